"""The pytest plugin, in processes of its own with a user's test file."""

import os
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from support.compiling import QUICK

ROOT = Path(__file__).parents[2]
USER = """
import jax
import pytest
import shardkit as sk

@pytest.mark.meshes({"data": 8}, {"data": 2, "model": 4})
def test_both(mesh):
    assert mesh.size == 8 == jax.device_count()
    assert "model" not in mesh.shape, "no second axis was meant"

@pytest.mark.meshes({"data": -1}, {"model": 3})
def test_fewer(mesh):
    assert mesh.size in (3, 8)

def test_without_the_mark(mesh):
    assert dict(mesh.shape) == {"data": 8}
    import os
    assert os.environ["XLA_FLAGS"].count("xla_cpu_collective_timeout_seconds=60") == 1

def test_a_step(prove):
    import numpy as np
    loss = sk.value_and_grad(lambda params, x, keys: sk.Mean.of((x @ params["w"]) ** 2))
    rows = [sk.testing.Row({"data": 4}, sk.dp("data"))]
    proof = prove(loss, loss, rows=rows, params={"w": np.ones(3, "f")}, batches=[np.ones((8, 3), "f")] * 2)
    assert str(proof).count("holds") == len(sk.testing.LAWS)
"""


def pytest_run(folder, *options, ini="", **files):
    """pytest in `folder` with the plugin, as its entry point loads it, and no other configuration."""
    (folder / "pytest.ini").write_text(f"[pytest]\n{ini}")
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC") and "PYTEST" not in k}
    # The same whether or not this checkout is installed.
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "XLA_FLAGS": QUICK}
    command = [sys.executable, "-m", "pytest", "-p", "shardkit_pytest", "-p", "no:cacheprovider", "-q", *options]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    return done.returncode, done.stdout + done.stderr


def test_a_users_suite_and_the_failing_mesh_first(tmp_path):  # proves F72
    code, text = pytest_run(tmp_path, test_user=USER)
    assert code == 1 and "1 failed, 5 passed" in text
    assert "FAILED test_user.py::test_both[data=2,model=4]" in text
    report = text.split("test_both[data=2,model=4] ____")[1].split("FAILED")[0]
    first = next(line for line in report.splitlines()[1:] if line.strip())
    assert first == "mesh = data=2,model=4"
    assert "\nmesh = data=2,model=4\n" in pytest_run(tmp_path, "--tb=short", "-k", "test_both", test_user=USER)[1]


@pytest.mark.deep
def test_the_same_under_xdist_beside_a_conftest_that_simulates(tmp_path):
    conftest = "import shardkit as sk\nsk.simulate_devices(8)\n"
    options = ("-p", "xdist.plugin", "-n", "2")
    code, text = pytest_run(tmp_path, *options, ini="shardkit_devices = 8\n", test_user=USER, conftest=conftest)
    assert code == 1 and "1 failed, 5 passed" in text
    assert "\nmesh = data=2,model=4\n" in text


def test_a_suite_without_the_fixture_never_imports_jax_and_devices_by_the_ini_option(tmp_path):
    user = "import sys\ndef test_plain(): assert not {'jax', 'shardkit', 'numpy'} & set(sys.modules)\n"
    assert pytest_run(tmp_path, test_user=user)[0] == 0
    own = "import pytest\n@pytest.fixture\ndef mesh(): return 3\ndef test_mine(mesh): assert mesh == 3\n"
    assert pytest_run(tmp_path, test_user=own)[0] == 0
    user = "import jax\nN = jax.device_count()\ndef test_four(): assert N == 4\n"
    assert pytest_run(tmp_path, ini="shardkit_devices = 4\n", test_user=user)[0] == 0


def test_errors_in_full(tmp_path):
    large = 'import pytest\n@pytest.mark.meshes({"a": 4, "b": 4})\ndef test_large(mesh): pass\n'
    assert (
        "meshes: a mesh must fit the devices; {'a': 4, 'b': 4} needs 16 and there are 8. Set shardkit_devices = 16 in "
        "pytest's configuration, and let nothing start jax before."
    ) in pytest_run(tmp_path, test_user=large)[1]
    unused = 'import pytest\n@pytest.mark.meshes({"a": 4})\ndef test_unused(): pass\n'
    assert (
        "meshes: test_unused must take the fixture `mesh`, and the mark one or more mappings of axis sizes; got "
        "({'a': 4},). Write @pytest.mark.meshes({'data': 8}) and def test(mesh)."
    ) in pytest_run(tmp_path, test_user=unused)[1]
    assert (
        "shardkit_devices: it must be a number of devices, at least 1; got 'many'. Write for example 8."
    ) in pytest_run(tmp_path, ini="shardkit_devices = many\n", test_user=unused)[1]


def test_the_entry_point_names_the_plugin():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["pytest11"] == {"shardkit": "shardkit_pytest"}
    assert "shardkit_pytest.py" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert isinstance(import_module("shardkit_pytest").mesh, type(pytest.fixture(lambda: None)))


def test_the_file_of_the_manual_from_an_empty_folder(tmp_path):
    """`docs/howto/test_a_collective.md` as a reader copies it, also where the drawn test comes first."""
    page = (ROOT / "docs" / "howto" / "test_a_collective.md").read_text()
    files = dict(re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', page, re.S | re.M))
    ini = files["pytest.ini"].removeprefix("[pytest]\n")
    first, last = "test_ring.py::test_any_number_of_devices", "test_ring.py::test_values_and_gradients"
    code, text = pytest_run(tmp_path, first, last, ini=ini, test_ring=files["test_ring.py"])
    assert code == 0 and "3 passed" in text, text


WRONG = """
import jax
import numpy as np
import optax
import shardkit as sk
from jax.sharding import PartitionSpec as P

def double(x):
    return 2 * x

def double_mean(w, x, keys):
    return sk.Mean.of(2 * (x @ w) ** 2)

def mean(w, x, keys):
    return sk.Mean.of((x @ w) ** 2)

WRONG, RIGHT = sk.value_and_grad(double_mean), sk.value_and_grad(mean)
DATA = {"params": np.ones(3, "f"), "batches": [np.ones((8, 3), "f")]}

def test_kernel(mesh):
    sk.testing.assert_matches_reference(  # the user's line
        double, np.negative, mesh=mesh, in_specs=P("data"), out_specs=P("data"), args=(np.ones(8, "f"),), grad=False)

def test_training(mesh):
    plan = sk.dp("data")
    sk.testing.assert_same_training(WRONG, RIGHT, optax.sgd(0.1), mesh=mesh, plan=plan, **DATA)  # the user's line

def test_laws(prove):
    rows = [sk.testing.Row({"data": 2}, sk.dp("data"))]
    prove(WRONG, RIGHT, rows=rows, laws=[sk.testing.laws.same_numbers], **DATA)  # the user's line

def test_gradients():
    gradient = jax.grad(lambda w, x: 2 * ((x @ w) ** 2).mean())
    loss = lambda w, x: ((x @ w) ** 2).mean()
    sk.testing.certify_gradients(gradient, loss, np.ones(3, "f"), np.ones((8, 3), "f"), devices=2)  # the user's line
"""


def test_a_failed_assertion_of_the_kit_shows_the_users_line_and_none_of_the_kits(tmp_path):
    code, text = pytest_run(tmp_path, "--tb=short", test_wrong=WRONG)
    assert code == 1 and "4 failed" in text
    assert text.count("# the user's line") == 4
    failures = text.split("short test summary")[0]
    shown = set(re.findall(r"^(\S+\.py):\d+: in \w+", failures, re.MULTILINE))
    assert shown == {"test_wrong.py"}
