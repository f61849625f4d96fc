"""The options of a command, read from the source of its `Options`, so that help need not import jax."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

_WORDS = {"int": "INT", "float": "FLOAT", "str": "TEXT", "Path": "PATH"}
_UNKNOWN = object()


class Option(NamedTuple):
    """An option of a command.

    Attributes:
        words: how it is written, as ("-n", "--processes"); a positional argument has none.
        value: what follows it, as "INT" or "PATH ..."; "" for a flag.
        choices: the values that it takes, if they can be listed.
        default: its default value as it would be written; "" if there is none to write.
        text: what it does.
        name: its field.
        needed: whether it must be given.
    """

    words: tuple[str, ...]
    value: str
    choices: tuple[str, ...]
    default: str
    text: str
    name: str
    needed: bool


class Declared(NamedTuple):
    """What a command's module says of it: its docstring, examples, groups of options, and options."""

    text: str
    examples: tuple[tuple[str, str], ...]
    groups: dict[str, tuple[str, ...]]
    options: tuple[Option, ...]


@cache
def declared(module: str, function: str) -> Declared:
    """Reads the module of a command.

    Args:
        module: its name, as "shardkit.cli.train".
        function: the function that runs the command, whose docstring describes it.
    """
    tree = _tree(module)
    body = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function)
    where, _ = _found(module, ast.Name("Options"))
    constants: Any = {name: _value(where, ast.Name(name)) for name in ("EXAMPLES", "GROUPS")}
    examples, groups = ({} if value is _UNKNOWN else value for value in constants.values())
    text = inspect.cleandoc(ast.get_docstring(body) or "")
    return Declared(text, tuple(dict(examples).items()), groups, tuple(_options(module, "Options")))


@cache
def root() -> Path:
    """The folder of the package `shardkit`, which is not imported."""
    spec = find_spec("shardkit")
    assert spec is not None and spec.origin is not None, "shardkit_command is installed with shardkit"
    return Path(spec.origin).parent


@cache
def _tree(module: str) -> ast.Module:
    path = root().joinpath(*module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def _options(module: str, name: str) -> Iterator[Option]:
    """The options of a dataclass, those of its bases first."""
    where, node = _found(module, ast.Name(name))
    if not isinstance(node, ast.ClassDef):
        return
    for base in node.bases:
        yield from _options(*_reached(where, base))
    for field, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            yield from _option(where, field.target.id, field.annotation, field.value, inspect.cleandoc(str(text)))


def _option(module: str, name: str, kind: ast.expr, default: ast.expr | None, text: str) -> Iterator[Option]:
    """One field; a field of options stands for all of them."""
    said: dict[str, Any] = {}
    positional = many = False
    while True:
        if isinstance(kind, ast.Subscript):
            outer, inner = ast.unparse(kind.value), kind.slice
            first = inner.elts[0] if isinstance(inner, ast.Tuple) else inner
            if outer == "Literal":
                break
            if outer == "Annotated" and isinstance(inner, ast.Tuple):
                calls = [each for each in inner.elts[1:] if isinstance(each, ast.Call)]
                said |= {word.arg or "": _value(module, word.value) for each in calls for word in each.keywords}
            positional |= outer.endswith("Positional")
            many |= outer == "tuple"
            kind = first
        elif isinstance(kind, ast.BinOp):  # X | None
            kind = kind.left
        elif ast.unparse(kind) in (*_WORDS, "bool"):
            break
        else:
            where, found = _found(module, kind)
            if isinstance(found, ast.ClassDef):
                yield from _options(where, found.name)
                return
            assert isinstance(found, ast.expr), f"{module}: the type of {name} cannot be read"
            module, kind = where, found
    choices: tuple[str, ...] = ()
    if isinstance(kind, ast.Subscript):
        listed = kind.slice.elts if isinstance(kind.slice, ast.Tuple) else [kind.slice]
        choices = tuple(str(each.value) for each in listed if isinstance(each, ast.Constant) and each.value)
    flag = ast.unparse(kind) == "bool"
    usual = None if default is None else _value(module, default)
    value = said.get("metavar") or "|".join(choices) or _WORDS.get(ast.unparse(kind), "")
    value += " ..." if many and "..." not in value else ""
    called = str(said.get("name", name)).replace("_", "-")
    dashes = f"--{'no-' if flag and usual is True else ''}{called}"
    words = () if positional else (*said.get("aliases", ()), dashes)
    shown = "" if flag else value
    yield Option(words, shown, choices, _written(usual), str(said.get("help", text)), name, default is None)


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return "" if value is None or value is _UNKNOWN or isinstance(value, bool) else str(value)


def _value(module: str, node: ast.expr) -> Any:
    """The value of an expression of literals, arithmetic and names of such, or _UNKNOWN."""
    where, found = _found(module, node)
    if not isinstance(found, ast.expr):
        return _UNKNOWN
    try:
        return ast.literal_eval(found)
    except ValueError:
        plain = (ast.BinOp, ast.Constant, ast.operator)
        if isinstance(found, ast.BinOp) and all(isinstance(each, plain) for each in ast.walk(found)):
            return eval(compile(ast.Expression(found), where, "eval"))
        return _UNKNOWN


def _found(module: str, node: ast.AST) -> tuple[str, ast.AST]:
    """What a name of a module stands for: an expression or a class, and the module where it is written."""
    seen = None
    while isinstance(node, ast.Name | ast.Attribute) and (module, ast.dump(node)) != seen:
        seen = module, ast.dump(node)
        where, name = _reached(module, node)
        if where != module:
            module, node = where, ast.Name(name)
            continue
        for each in _tree(module).body:
            targets = each.targets if isinstance(each, ast.Assign) else [getattr(each, "target", None)]
            named = [target.id for target in targets if isinstance(target, ast.Name)]
            if isinstance(each, ast.ClassDef) and each.name == name:
                return module, each
            if name in named and isinstance(each, ast.Assign | ast.AnnAssign) and each.value is not None:
                node = each.value
    return module, node


def _reached(module: str, node: ast.AST) -> tuple[str, str]:
    """The module and name of `Name` or `alias.Name`, one import away."""
    first = node.value if isinstance(node, ast.Attribute) else node
    called = first.id if isinstance(first, ast.Name) else ""
    name = node.attr if isinstance(node, ast.Attribute) else called
    for each in _tree(module).body:
        if isinstance(each, ast.ImportFrom) and (each.module or "").startswith("shardkit"):
            for alias in each.names:
                if (alias.asname or alias.name) == called:
                    if isinstance(node, ast.Attribute):
                        return f"{each.module}.{alias.name}", name
                    return str(each.module), alias.name
    return module, name
