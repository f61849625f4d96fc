"""The house: who imports whom, what an import costs, and what the package promises about itself."""

import ast
import graphlib
import importlib
import inspect
import pickle
import pydoc
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import shardkit as sk
from support.refusals import raises

pytestmark = pytest.mark.check
ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "shardkit"

# From the lowest floor up. A file imports from the rooms of its floor and of lower floors, and no rooms form a circle.
FLOORS = [
    ["_arguments", "_jax", "schedules", "cost", "remote_copies"],
    ["meshes", "collectives"],
    ["plans", "on_device", "remat", "layers", "pipelines", "strategies", "optimizers"],
    ["analysis/jaxpr", "analysis/rules", "steps", "resharding", "models"],
    ["analysis", "analysis/hlo", "analysis/compiled_rules", "testing", "planner"],
    [
        *("runtime", "runtime/channel", "runtime/cluster", "runtime/data", "runtime/checkpoint", "runtime/weights"),
        *("bench", "viz"),
    ],
    ["jobs", "jobs/monitor"],
    ["cli", "__main__"],
]
FLOOR = {name: number for number, floor in enumerate(FLOORS) for name in floor}
# Names of `sk` that are modules of a room.
MODULES = {"algorithms", "aot", "compressed", "hierarchical", "ring", "tables"}


def modules():
    return [p for p in sorted(PACKAGE.rglob("*.py")) if p != PACKAGE / "__init__.py"]


def room(parts):
    """The folder or file on a floor that holds the module `shardkit.<parts>`."""
    inner = "/".join(parts[:2])
    return inner if inner in FLOOR else parts[0]


NAMES = {
    str(path.relative_to(ROOT).with_suffix("")).replace("/", ".").removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


def imports_of(path):
    """The modules of the package that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from [alias.name for alias in node.names if alias.name in NAMES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "shardkit":
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from [name if name in NAMES else node.module for name in inner]


def rooms_imported(path):
    """The room of a file, and the others that it imports; `sk.runtime` imports names of jobs at their first use."""
    here = room(path.relative_to(PACKAGE).with_suffix("").parts)
    rooms = {room(name.split(".")[1:]) for name in imports_of(path) if name != "shardkit"}
    if path == PACKAGE / "runtime" / "__init__.py":
        rooms -= {"jobs", "jobs/monitor"}
    return here, rooms - {here}


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_imports_only_from_its_own_floor_and_lower_ones(path):
    here, imported = rooms_imported(path)
    assert here in FLOOR, f"{here} is on no floor: add it to FLOORS"
    if "shardkit" in imports_of(path):  # the public face, which holds every floor up to steps
        assert FLOOR[here] > FLOOR["steps"], f"{path.name} imports the whole package from below it"
    for other in imported:
        assert FLOOR[other] <= FLOOR[here], f"{here} imports {other}"


def test_no_rooms_form_a_circle():
    graph = {}
    for path in modules():
        here, imported = rooms_imported(path)
        graph.setdefault(here, set()).update(imported)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        raise AssertionError(f"a circle of rooms: {' imports '.join(reversed(error.args[1]))}") from None


def test_a_training_script_needs_nothing_of_jobs():
    """The command starts jobs, and `sk.runtime` has their names, which it imports when they are used."""
    named = [path for path in modules() if "shardkit.jobs" in path.read_text() and "jobs" not in path.parts]
    allowed = {PACKAGE / "runtime" / "__init__.py", *(PACKAGE / "cli").rglob("*.py")}
    assert set(named) <= allowed, sorted(set(named) - allowed)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_compat_imports_jax_privately(path):
    if path.name not in ("compat.py", "backends.py"):
        assert "jax._src" not in path.read_text()


def printed(code):
    """What a program prints in a process of its own."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_touches_no_device_and_nothing_heavy():
    code = (
        "import sys, jax, shardkit\n"
        "from shardkit._jax import backends\n"
        "heavy = {'optax', 'chex', 'rich', 'tyro', 'hypothesis', 'pytest', 'matplotlib', 'scipy'}\n"
        "shardkit.make_train_step, shardkit.pipeline, shardkit.census, shardkit.testing, shardkit.runtime\n"
        "print(backends.jax_has_started(), sorted(heavy & set(sys.modules)))"
    )
    assert printed(code) == "False []\n"


# benchmarks/building.py has the time.
def test_an_import_loads_what_it_names():
    """A room that the face or the runtime imports at once, which every training script would wait for."""
    code = "import sys, shardkit; print([n for n in sys.modules if n.split('.')[0] in ('jax', 'numpy', 'shardkit')])"
    assert printed(code) == "['shardkit']\n"
    late = tuple(f"shardkit.{name}" for name in ("analysis", "bench", "jobs", "testing", "viz"))
    code = f"import sys, shardkit.runtime as r; print([n for n in sys.modules if n.startswith({late})], r.guard)"
    assert printed(code).startswith("[] <function guard") and set(sk.runtime.__all__) <= set(dir(sk.runtime))


def test_a_lazy_face_is_a_module_like_others():
    """A submodule that takes the place of a name of `sk` (`pipeline` was a folder), and what looks at modules."""
    names = {}
    exec("from shardkit import *", names)
    assert set(sk.__all__) < names.keys() and set(sk.__all__) < set(dir(sk))
    rooms = {path.stem for path in PACKAGE.iterdir()}
    assert [name for name in dir(sk) if inspect.ismodule(getattr(sk, name)) != (name in rooms | MODULES)] == []
    assert pickle.loads(pickle.dumps(sk.TrainState)) is sk.TrainState is inspect.getmodule(sk.TrainState).TrainState
    assert "explicit collectives for JAX" in pydoc.render_doc(sk) and sk.strategies.pipeline.pp is sk.pp


def test_submodules_are_reached_from_the_top():
    assert sk.models.transformer.Config().vocabulary == 256
    assert sk.runtime.__name__ == "shardkit.runtime"
    assert sk.census is sk.analysis.census and sk.expects is sk.analysis.expects
    assert sk.testing.emulate.__module__ == "shardkit.testing.emulate"
    with raises(AttributeError, "module 'shardkit' has no attribute 'nothing'"):
        _ = sk.nothing


def test_the_face_is_small():
    """What few need lives in its module: another name in `sk` takes the place of one that leaves."""
    assert len(dir(sk)) <= 90 and all(hasattr(sk, name) for name in dir(sk))
    with raises(AttributeError, "module 'shardkit' has no attribute 'all_gather_uneven'"):  # which never stood here
        _ = sk.all_gather_uneven


def test_what_is_promised_is_there():
    assert all(hasattr(sk, name) for name in sk.__all__)
    assert sk.__all__[0] == "make_mesh" and len(sk.__all__) == len(set(sk.__all__))
    assert (PACKAGE / "py.typed").exists()
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == sk.__version__ == metadata.version("shardkit")
    assert {d.split(">")[0] for d in project["dependencies"]} == {"jax", "numpy", "optax"}
    extras = {"cli", "pytest", "test", "viz", "docs", "checkpoint", "data", "all"}
    extras |= {"aot", "aot-gpu", "cuda", "tpu"}
    assert set(project["optional-dependencies"]) == extras


def test_vma_tracking_is_never_switched_off():
    for path in modules():
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        words = [word for call in calls for word in call.keywords if word.arg in ("check_vma", "check_rep")]
        assert not any(isinstance(word.value, ast.Constant) and not word.value.value for word in words), path.name


def texts_of(path):
    """The texts of a file: its strings, with {} for what is computed, and its docstrings."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(each.value if isinstance(each, ast.Constant) else "{}" for each in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_every_remedy_names_what_to_pass():
    """An error that ends in "Correct it." says no more than that it is one."""
    empty = re.compile(r"\bCorrect [^.]*\.")
    assert empty.search("f: x must be at least 1; got 0. Correct {}.")
    found = [(path.name, text) for path in modules() for text in texts_of(path) if empty.search(text)]
    assert not found, found


def test_one_class_name_has_one_meaning_and_no_error_is_known_by_its_words():
    trees = [ast.parse(path.read_text()) for path in modules()]
    names = [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    twins = {name for name in names if names.count(name) > 1 and not name.startswith("_")}
    assert twins == {"Options"}, "of which each command has its own"
    reads = re.compile(r"str\(error\)\.startswith|\" (not )?in str\(error\)|error\.args")
    assert [path.name for path in modules() if reads.search(path.read_text())] == []


def test_no_two_files_import_each_other():
    graph = {name: set(imports_of(path)) - {name, "shardkit"} for name, path in NAMES.items() if name != "shardkit"}
    while True:  # what imports none of the rest, or is imported by none of it, is in no circle
        imported = set().union(*graph.values()) if graph else set()
        outside = [name for name, needs in graph.items() if not needs & graph.keys() or name not in imported]
        if not outside:
            break
        for name in outside:
            del graph[name]
    assert not graph, {name: sorted(needs & graph.keys()) for name, needs in graph.items()}


# What users import from. `sk` is the face of the folders below it, such as collectives and strategies.
FACES = ("", "analysis", "cost", "layers", "models.transformer", "planner", "runtime", "schedules")
FACES += ("testing", "viz")


def test_every_public_name_is_documented_and_exported_once():
    seen = {}
    for face in FACES:
        room = importlib.import_module(f"shardkit.{face}".rstrip("."))
        for name in room.__all__:
            each = getattr(room, name)
            of_sk = face and name in sk.__all__ and getattr(sk, name) is each  # such as sk.census
            if not of_sk and (inspect.isfunction(each) or inspect.isclass(each)):
                assert inspect.getdoc(each), f"{face}.{name}"
                seen.setdefault(id(each), []).append(f"{face}.{name}".lstrip("."))
    assert [names for names in seen.values() if len(names) > 1] == []


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*/__init__.py")), ids=lambda p: p.parent.relative_to(PACKAGE).as_posix()
)
def test_a_folder_says_what_is_in_it_and_which_file_to_open_first(path):
    text = ast.get_docstring(ast.parse(path.read_text()))
    first = re.search(r"Start\s+with\s+`([\w/]+\.py)`", text)
    assert first and (path.parent / first[1]).exists(), path
    assert "Imports " in text or "imports " in text, f"{path}: what may be imported here?"
