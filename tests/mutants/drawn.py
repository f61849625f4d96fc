"""Mistakes drawn by a seed: a line of the core rooms, and one change of its syntax tree. No jax.

The sample measures what tests notice of mistakes that nobody thought of. Each line of code that can be changed is drawn
with the same chance, then one of its changes. What only words show (errors, docstrings, annotations, what is printed)
is left alone.
"""

import ast
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from mutants import ROOT, Mutant

ROOMS = (
    "_arguments", "_jax", "collectives", "layers", "meshes", "on_device", "optimizers", "pipelines", "plans", "remat",
    "resharding", "schedules", "steps", "strategies", "testing",
)  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mod, ast.Mod: ast.FloorDiv, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any", "psum": "pmean", "pmean": "psum", "pmax": "pmin"}
WORDS = ("__repr__", "__str__", "describe")
# Without these calls, everything ends in an error: they would only flatter the score.
NEEDED = ("len", "zip", "range", "map", "enumerate", "isinstance", "getattr", "hasattr", "iter", "next", "private")


class Change(NamedTuple):
    """A node of a tree, the source that replaces it, and the kind of mistake."""

    node: ast.expr | ast.stmt
    new: str
    kind: str


def files() -> list[Path]:
    """The modules of the core rooms."""
    return sorted(path for room in ROOMS for path in (ROOT / "shardkit" / room).rglob("*.py"))


def code(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """The statements and expressions below a node that compute something."""
    for name, field in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in field if isinstance(field, list) else [field]:
            if isinstance(child, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
                continue
            if isinstance(child, ast.FunctionDef) and child.name in WORDS:
                continue
            if isinstance(child, ast.expr | ast.stmt):
                yield child
            if isinstance(child, ast.AST):
                yield from code(child)


def with_operator(node: ast.expr, old: ast.AST, new: ast.AST) -> str:
    """The source of an expression with another operator."""
    text = ast.unparse(node)
    other = ast.parse(text, mode="eval").body
    if isinstance(other, ast.Compare):
        other.ops = [new]  # type: ignore[list-item]
    else:
        other.op = new  # type: ignore[attr-defined]
    return f"({ast.unparse(other)})"


def of_call(node: ast.Call) -> Iterator[Change]:
    """Neighbouring arguments swapped, the call dropped, one function taken for another."""
    arguments = [ast.unparse(each) for each in node.args]
    rest = [ast.unparse(each) for each in node.keywords]
    function = ast.unparse(node.func)
    if any(isinstance(each, ast.Starred) for each in node.args) or isinstance(node.func, ast.Call):
        return
    for i in range(len(arguments) - 1):
        if arguments[i] != arguments[i + 1]:
            swapped = [*arguments[:i], arguments[i + 1], arguments[i], *arguments[i + 2 :]]
            yield Change(node, f"{function}({', '.join([*swapped, *rest])})", "arguments swapped")
    name = node.func.attr if isinstance(node.func, ast.Attribute) else function
    if name in ("astype", "reshape", "transpose") and isinstance(node.func, ast.Attribute):
        yield Change(node, f"({ast.unparse(node.func.value)})", f"{name} dropped")
    elif arguments and name[:1].islower() and name not in NEEDED:
        yield Change(node, f"({arguments[0]})", f"the call of {name} dropped")
    if name in FUNCTIONS:
        other = function.removesuffix(name) + FUNCTIONS[name]
        yield Change(node, f"{other}({', '.join([*arguments, *rest])})", f"{FUNCTIONS[name]} for {name}")


def changes(tree: ast.Module) -> Iterator[Change]:
    """Every change that the sample may draw."""
    for node in code(tree):
        if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in OPERATORS:
            new = OPERATORS[type(node.op)]()
            yield Change(node, with_operator(node, node.op, new), f"{type(new).__name__} for {type(node.op).__name__}")
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            new = OPERATORS[type(node.ops[0])]()
            yield Change(
                node, with_operator(node, node.ops[0], new), f"{type(new).__name__} for {type(node.ops[0]).__name__}"
            )
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            yield Change(node, f"({ast.unparse(node.operand)})", f"{type(node.op).__name__} dropped")
        if isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield Change(node, str(not node.value), "a constant changed")
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            yield Change(node, f"({node.value + 1!r})", "a constant changed")
        if isinstance(node, ast.If | ast.While | ast.IfExp) and isinstance(
            node.test, ast.Name | ast.Attribute | ast.Call
        ):
            yield Change(node.test, f"(not {ast.unparse(node.test)})", "a condition turned round")
        if isinstance(node, ast.Call):
            yield from of_call(node)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield Change(node, "pass", "a statement dropped")
        if isinstance(node, ast.AugAssign):
            yield Change(node, f"{ast.unparse(node.target)} = {ast.unparse(node.value)}", "an update that forgets")


@cache
def by_line(file: Path) -> list[list[Mutant]]:
    """The mutants of a file, those of one line together."""
    text = file.read_bytes()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    name = str(file.relative_to(ROOT))
    lines: dict[int, list[Mutant]] = {}
    for node, new, kind in changes(ast.parse(text)):
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        mutant = Mutant(f"{name}:{node.lineno}:{node.col_offset} {kind}", name, begin, end, new, kind)
        lines.setdefault(node.lineno, []).append(mutant)
    return [lines[line] for line in sorted(lines)]


def sample(seed: int, count: int, under: str = "") -> list[Mutant]:
    """`count` mutants of different lines, of the files below a folder; of the core rooms without one."""
    draw = random.Random(seed)
    chosen = [file for file in files() if file.is_relative_to(ROOT / under)]
    lines = [line for file in chosen for line in by_line(file)]
    return [draw.choice(line) for line in draw.sample(lines, count)]
