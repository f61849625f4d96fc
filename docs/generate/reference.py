"""The pages of the reference: one for each module that users name, written from its `__all__`."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
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
    def says(self) -> str:
        """The first sentence of its docstring."""
        text = " ".join((self.documented or "").split("\n\n")[0].split())
        return re.split(r"(?<=[.:;]) (?=[A-Z`])|: ", text)[0].rstrip(".:;") + "."

    @property
    def documented(self) -> str | None:
        """Its docstring; that of a constant stands below its assignment."""
        if inspect.isfunction(self.value) or inspect.isclass(self.value):
            return inspect.getdoc(self.value)
        return _below(*self.path.rsplit(".", 1))


def _below(module: str, name: str) -> str | None:
    """The docstring of a constant, in the module that assigns it or that this one imports it from."""
    body = ast.parse(inspect.getsource(importlib.import_module(module))).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.ImportFrom) and name in [alias.asname or alias.name for alias in node.names]:
            return _below(str(node.module), name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            constant = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            return str(after.value.value) if constant else None  # type: ignore[union-attr]
    return None


def names(face: str) -> list[Name]:
    """All public names of a face, wherever else they are."""
    module = importlib.import_module(FACES[face])
    listed = getattr(module, "__all__", None)
    if listed is None:
        listed = [name for name, value in vars(module).items() if name[0] != "_" and defined_in(module, value)]
    return [
        Name(f"{face}.{name}", _path(module, name, value), value)
        for name, value in ((name, getattr(module, name)) for name in listed)
        if not inspect.ismodule(value)
    ]


def defined_in(module: ModuleType, value: Any) -> bool:
    """Whether a module defines a function, a class, or a value of a class of its own."""
    if inspect.isfunction(value) or inspect.isclass(value):
        return value.__module__ == module.__name__
    return type(value).__module__ == module.__name__


def _path(module: ModuleType, name: str, value: Any) -> str:
    if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__.startswith("shardkit."):
        inside = value.__name__ if "<locals>" in value.__qualname__ else value.__qualname__  # what a decorator returned
        return f"{value.__module__}.{inside}"
    return f"{module.__name__}.{name}"


def pages() -> dict[str, str]:
    """The Markdown of each page of the reference by its path, the overview first."""
    seen: dict[str, str] = {}
    made: dict[str, str] = {"reference/index.md": ""}
    overview = [
        "# Reference",
        "Every public name, with its signature, what it sends, what it raises, and an example that the tests run. "
        "In all examples `sk` is shardkit, `mesh` is `sk.make_mesh(data=2, model=4)`.",
    ]
    for face in FACES:
        own = [name for name in names(face) if seen.setdefault(name.path, name.called) == name.called]
        elsewhere = [seen[name.path] for name in names(face) if seen[name.path] != name.called]
        if face == "sk":
            overview.append(f"## sk\n\n{_says(face)}")
            for title, group in _groups(face, own):
                file = f"sk.{title.replace(' ', '_')}.md"
                made[f"reference/{file}"] = "\n\n".join([_boosted(2), f"# sk: {title}", *_described(group)]) + "\n"
                overview.append(f"[{title}]({file}): " + ", ".join(f"`{name.called}`" for name in group))
            continue
        where = f"{face}.md"
        if face in INSIDE:
            where = f"{INSIDE[face]}.md#{face}"
            made[f"reference/{INSIDE[face]}.md"] += "\n" + "\n\n".join(_section(face, own, elsewhere)) + "\n"
        else:
            made[f"reference/{where}"] = _page(face, own, elsewhere)
        overview.append(f"## [{face}]({where})\n\n{_says(face)}")
        for title, group in _groups(face, own):
            overview.append(f"{title}: " + ", ".join(f"`{name.called}`" for name in group))
    made["reference/index.md"] = "\n\n".join(overview) + "\n"
    return made


def _says(face: str) -> str:
    """The first paragraph of a module's docstring."""
    return (inspect.getdoc(importlib.import_module(FACES[face])) or "").split("\n\n")[0]


def _boosted(boost: int) -> str:
    """The head of a page; whoever searches for a name that several pages have wants that of `sk` first.

    Twice as much as the other pages of the reference, and no more: a page about a subject comes before the names in it.
    """
    return f"---\nsearch:\n  boost: {boost}\n---"


def _page(face: str, own: list[Name], elsewhere: list[str]) -> str:
    parts = [f"# {face}", *_about(face, elsewhere)]
    for title, group in _groups(face, own):
        parts += [f"## {title}", *_described(group)]
    return "\n\n".join(parts) + "\n"


def _section(face: str, own: list[Name], elsewhere: list[str]) -> list[str]:
    """A module on the page of another."""
    return [f'<a id="{face}"></a>', f"## {face}", *_about(face, elsewhere), *(_described(own) if own else ())]


def _about(face: str, elsewhere: list[str]) -> list[str]:
    text = inspect.getdoc(importlib.import_module(FACES[face])) or ""
    kept = [part for part in text.split("\n\n") if not re.match(r"Start\s+with|Source:", part)]
    return kept + (["Also here: " + ", ".join(f"`{name}`" for name in elsewhere) + "."] if elsewhere else [])


def _described(group: list[Name]) -> list[str]:
    rows = [f"| `{name.called}` | {name.says.replace('|', chr(92) + '|')} |" for name in group]
    return ["\n".join(["| name | what it does |", "|---|---|", *rows]), *map(_block, group)]


def _groups(face: str, own: list[Name]) -> Iterator[tuple[str, list[Name]]]:
    if face == "sk":
        groups = {title: [name for name in own if group_of(name.path) == title] for title in GROUPS}
    else:
        functions = [name for name in own if inspect.isfunction(name.value)]
        types = [name for name in own if inspect.isclass(name.value)]
        groups = {"Functions": functions, "Types": types}
        groups["Values"] = [name for name in own if name not in functions + types]
    yield from ((title, group) for title, group in groups.items() if group)


def group_of(path: str) -> str:
    """The group of a name of `sk` by the longest beginning of its path that a group has."""
    inside = path.removeprefix("shardkit.")
    found = [(len(each), title) for title, files in GROUPS.items() for each in files if f"{inside}.".startswith(each)]
    if not found:
        raise ValueError(f"{path} belongs to no group of sk. Name its file in GROUPS of docs/generate/reference.py.")
    return max(found)[1]


def _block(name: Name) -> str:
    # The anchor is what other pages link: it stays where it is when a file is renamed.
    options = f'    options: {{heading: "{name.called}", toc_label: "{name.called.rpartition(".")[2]}"}}'
    return f'<a id="{name.called}"></a>\n\n::: {name.path}\n{options}'
