"""The pages of the reference: one for each module that users name, written from its `__all__`."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

# What users call a module, and where it is. A name that several of them export is on the first page that has it.
FACES = {
    "sk": "shardkit",
    "sk.layers": "shardkit.layers",
    "sk.collectives": "shardkit.collectives",
    "sk.ring": "shardkit.collectives.ring",
    "sk.hierarchical": "shardkit.collectives.hierarchical",
    "sk.compressed": "shardkit.collectives.compressed",
    "sk.algorithms": "shardkit.collectives.algorithms",
    "sk.tables": "shardkit.collectives.tables",
    "sk.schedules": "shardkit.schedules",
    "sk.analysis": "shardkit.analysis",
    "sk.aot": "shardkit.analysis.hlo.aot",
    "sk.testing": "shardkit.testing",
    "sk.testing.reference": "shardkit.testing.reference",
    "sk.testing.laws": "shardkit.testing.laws",
    "sk.cost": "shardkit.cost",
    "sk.planner": "shardkit.planner",
    "sk.runtime": "shardkit.runtime",
    "sk.bench": "shardkit.bench",
    "sk.viz": "shardkit.viz",
    "sk.models.transformer": "shardkit.models.transformer",
}
# Modules that are too small for a page of their own, and the page on which they are.
INSIDE = {
    "sk.collectives": "sk.collectives",  # that of the group of `sk`
    "sk.ring": "sk.collectives",
    "sk.hierarchical": "sk.collectives",
    "sk.compressed": "sk.collectives",
    "sk.algorithms": "sk.collectives",
    "sk.aot": "sk.analysis",
    "sk.testing.reference": "sk.testing",
    "sk.testing.laws": "sk.testing",
}
# Groups of the names of `sk`, a page each, by the files that define them.
GROUPS = {
    "meshes and layouts": ("meshes", "runtime.cluster.config", "resharding"),
    "train steps and keys": ("meshes.rng", "steps", "on_device", "plans.storage"),
    "plans": ("strategies", "optimizers", "plans", "remat"),
    "pipelines": ("strategies.pipeline", "on_device.pipelines", "pipelines"),
    "collectives": ("collectives",),
    "reading programs": ("analysis",),
}


class Name(NamedTuple):
    """A public name.

    Attributes:
        called: as users write it, such as "sk.ring.all_gather".
        path: where it is defined.
        value: what it is.
    """

    called: str
    path: str
    value: Any

    @property
    def first_sentence(self) -> str:
        """The first sentence of its docstring."""
        paragraph, *_ = (self.docstring or "").split("\n\n")
        line = " ".join(paragraph.split())
        sentence, *_ = re.split(r"(?<=[.:;]) (?=[A-Z`])|: ", line)
        return sentence.rstrip(".:;") + "."

    @property
    def docstring(self) -> str | None:
        """Its docstring; that of a constant stands below its assignment."""
        if inspect.isfunction(self.value) or inspect.isclass(self.value):
            return inspect.getdoc(self.value)
        module, _, name = self.path.rpartition(".")
        return _find_docstring_of_constant(module, name)


def _find_docstring_of_constant(module: str, name: str) -> str | None:
    """The docstring of a constant, in the module that assigns it or that this one imports it from."""
    body = ast.parse(inspect.getsource(importlib.import_module(module))).body
    for number, node in enumerate(body):
        if isinstance(node, ast.ImportFrom) and any(name == (alias.asname or alias.name) for alias in node.names):
            return _find_docstring_of_constant(str(node.module), name)
        if not _assigns(node, name):
            continue
        if number + 1 == len(body):
            return None
        below = body[number + 1]
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            return str(below.value.value)
        return None
    return None


def _assigns(node: ast.stmt, name: str) -> bool:
    """Whether a statement is the assignment of a name."""
    targets = [getattr(node, "target", None)]
    if isinstance(node, ast.Assign):
        targets = list(node.targets)
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


def names(face: str) -> list[Name]:
    """All public names of a face, wherever else they are."""
    module = importlib.import_module(FACES[face])
    public_names = getattr(module, "__all__", None)
    if public_names is None:
        public_names = []
        for name, value in vars(module).items():
            if not name.startswith("_") and is_defined_in(module, value):
                public_names.append(name)
    result = []
    for name in public_names:
        value = getattr(module, name)
        if not inspect.ismodule(value):
            result.append(Name(f"{face}.{name}", _path(module, name, value), value))
    return result


def is_defined_in(module: ModuleType, value: Any) -> bool:
    """Whether a module defines a function, a class, or a value of a class of its own."""
    if inspect.isfunction(value) or inspect.isclass(value):
        return value.__module__ == module.__name__
    return type(value).__module__ == module.__name__


def _path(module: ModuleType, name: str, value: Any) -> str:
    """Where a name is defined: a function or a class in a module of the package, all else where it is public."""
    is_object = inspect.isfunction(value) or inspect.isclass(value)
    if not is_object or not value.__module__.startswith("shardkit."):
        return f"{module.__name__}.{name}"
    inner_name = value.__qualname__
    if "<locals>" in inner_name:  # what a decorator returned
        inner_name = value.__name__
    return f"{value.__module__}.{inner_name}"


def pages() -> dict[str, str]:
    """The Markdown of each page of the reference by its path, the overview first."""
    first_call: dict[str, str] = {}  # how each name is called on the first page that has it, by its path
    texts: dict[str, str] = {"reference/index.md": ""}
    overview = [
        "# Reference",
        "Every public name, with its signature, what it sends, what it raises, and an example that the tests run. "
        "In all examples `sk` is shardkit, `mesh` is `sk.make_mesh(data=2, model=4)`.",
    ]
    for face in FACES:
        members = []
        elsewhere = []
        for name in names(face):
            call = first_call.setdefault(name.path, name.called)
            if call == name.called:
                members.append(name)
            else:
                elsewhere.append(call)
        if face == "sk":
            overview.append(f"## sk\n\n{_read_first_paragraph(face)}")
            for title, group in _group(face, members):
                file = f"sk.{title.replace(' ', '_')}.md"
                parts = [_make_head(boost=2), f"# sk: {title}", *_describe(group)]
                texts[f"reference/{file}"] = "\n\n".join(parts) + "\n"
                overview.append(f"[{title}]({file}): {_list_calls(group)}")
            continue
        if face in INSIDE:
            address = f"{INSIDE[face]}.md#{face}"
            section = "\n\n".join(_make_section(face, members, elsewhere))
            texts[f"reference/{INSIDE[face]}.md"] += f"\n{section}\n"
        else:
            address = f"{face}.md"
            texts[f"reference/{address}"] = _make_page(face, members, elsewhere)
        overview.append(f"## [{face}]({address})\n\n{_read_first_paragraph(face)}")
        for title, group in _group(face, members):
            overview.append(f"{title}: {_list_calls(group)}")
    texts["reference/index.md"] = "\n\n".join(overview) + "\n"
    return texts


def _list_calls(group: Sequence[Name]) -> str:
    return ", ".join(f"`{name.called}`" for name in group)


def _read_paragraphs(face: str) -> list[str]:
    """The paragraphs of a module's docstring."""
    docstring = inspect.getdoc(importlib.import_module(FACES[face])) or ""
    return docstring.split("\n\n")


def _read_first_paragraph(face: str) -> str:
    return _read_paragraphs(face)[0]


def _make_head(boost: int) -> str:
    """The head of a page; whoever searches for a name that several pages have wants that of `sk` first.

    Twice as much as the other pages of the reference, and no more: a page about a subject comes before the names in it.
    """
    return f"---\nsearch:\n  boost: {boost}\n---"


def _make_page(face: str, members: list[Name], elsewhere: list[str]) -> str:
    parts = [f"# {face}", *_introduce(face, elsewhere)]
    for title, group in _group(face, members):
        parts += [f"## {title}", *_describe(group)]
    return "\n\n".join(parts) + "\n"


def _make_section(face: str, members: list[Name], elsewhere: list[str]) -> list[str]:
    """A module on the page of another."""
    parts = [f'<a id="{face}"></a>', f"## {face}", *_introduce(face, elsewhere)]
    if members:
        parts += _describe(members)
    return parts


def _introduce(face: str, elsewhere: list[str]) -> list[str]:
    """What a module's docstring tells users, and the names of the module that are on other pages."""
    paragraphs = []
    for paragraph in _read_paragraphs(face):
        if not re.match(r"Start\s+with|Source:", paragraph):  # for who reads the code
            paragraphs.append(paragraph)
    if elsewhere:
        paragraphs.append(f"Also here: {', '.join(f'`{name}`' for name in elsewhere)}.")
    return paragraphs


def _describe(group: list[Name]) -> list[str]:
    """A table of some names, and a block for each."""
    lines = ["| name | what it does |", "|---|---|"]
    for name in group:
        sentence = name.first_sentence.replace("|", r"\|")
        lines.append(f"| `{name.called}` | {sentence} |")
    return ["\n".join(lines), *(_make_block(name) for name in group)]


def _group(face: str, members: list[Name]) -> Iterator[tuple[str, list[Name]]]:
    """The names of a face by the headings under which they stand, in the order of these."""
    if face == "sk":
        groups: dict[str, list[Name]] = {title: [] for title in GROUPS}
        for name in members:
            groups[group_of(name.path)].append(name)
    else:
        groups = {"Functions": [], "Types": [], "Values": []}
        for name in members:
            if inspect.isfunction(name.value):
                groups["Functions"].append(name)
            elif inspect.isclass(name.value):
                groups["Types"].append(name)
            else:
                groups["Values"].append(name)
    for title, group in groups.items():
        if group:
            yield title, group


def group_of(path: str) -> str:
    """The group of a name of `sk` by the longest beginning of its path that a group has."""
    inner_path = path.removeprefix("shardkit.") + "."
    longest = ""
    group = None
    for title, beginnings in GROUPS.items():
        for beginning in beginnings:
            if inner_path.startswith(beginning) and len(beginning) > len(longest):
                longest = beginning
                group = title
    if group is None:
        raise ValueError(f"{path} belongs to no group of sk. Name its file in GROUPS of docs/generate/reference.py.")
    return group


def _make_block(name: Name) -> str:
    # The anchor is what other pages link: it stays where it is when a file is renamed.
    _, _, label = name.called.rpartition(".")
    options = f'    options: {{heading: "{name.called}", toc_label: "{label}"}}'
    return f'<a id="{name.called}"></a>\n\n::: {name.path}\n{options}'
