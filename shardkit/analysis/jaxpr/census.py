"""The census: every collective that a traced program holds, how often it runs, and the bytes it sends.

Nothing is run and no device is needed; an AbstractMesh of any size will do. What the compiler adds or merges later is
not in the jaxpr and is not counted here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from shardkit import _compat
from shardkit._typed import typed
from shardkit.cost import wire
from shardkit.layout import table

KINDS = _compat.COLLECTIVES
# Primitives that carry axis names and send nothing.
SILENT = {"axis_index", "pvary", "pcast", "preduced", "reduced_vary_cast", "vary_unreduced_cast", "shard_map"}
SILENT |= {f"{name}_p" for name in SILENT}  # as jax 0.10 calls some of them
_HERE = Path(__file__).parents[2]
_KERNELS = {_HERE / "collectives", _HERE / "_compat.py", _HERE / "_typed.py"}


@dataclass(frozen=True)
class Row:
    """One place of the program that communicates.

    Attributes:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ppermute", "broadcast".
        primitive: jax's name for it.
        axes: the mesh axes, in order.
        n: devices along them, or in a group where axis_index_groups makes some.
        count: times it runs in one call, loops included; None inside a `while`, whose length is not in the program.
        bytes_in: bytes of the operand on one device.
        bytes_out: bytes of the result on one device.
        sent: bytes that one device sends, each time, as the ring sends them.
        source: the user's line, "file.py:12 (function)".
        backward: whether differentiation made it.
        branch: "" or "branch 1 of 2" inside a `cond`, whose branches are all listed.
        update: whether a gradient goes into it, after the backward pass: those of data parallelism are summed there.
    """

    kind: str
    primitive: str
    axes: tuple[str, ...]
    n: int
    count: int | None
    bytes_in: int
    bytes_out: int
    sent: Fraction
    source: str
    backward: bool
    branch: str
    update: bool = False

    @property
    def total(self) -> Fraction:
        """Bytes sent by one device in one call; a `while` counts once."""
        return self.sent * (1 if self.count is None else self.count)


@dataclass(frozen=True)
class Census:
    """What a program communicates in one call; `print` it, or read the rows."""

    rows: tuple[Row, ...]

    def sent(self, *, axis: str | None = None, kind: str | None = None) -> Fraction:
        """Bytes that one device sends, over all rows, those that use an axis, or those of a kind."""
        return sum((r.total for r in self.select(axis=axis, kind=kind)), Fraction(0))

    def count(self, *, axis: str | None = None, kind: str | None = None) -> int:
        """Collectives in one call; a `while` counts once."""
        return sum(1 if r.count is None else r.count for r in self.select(axis=axis, kind=kind))

    def select(self, *, axis: str | None = None, kind: str | None = None) -> tuple[Row, ...]:
        """The rows that use an axis and are of a kind."""
        return tuple(r for r in self.rows if axis in (None, *r.axes) and kind in (None, r.kind))

    def to_json(self) -> str:
        """The rows as a JSON list; bytes sent as numbers."""
        return json.dumps([{**asdict(r), "sent": float(r.sent), "total": float(r.total)} for r in self.rows], indent=1)

    def compare(self, other: Census) -> str:
        """What `other` has more or less of, by kind and axes; empty when both communicate alike."""
        mine, theirs = self._by_kind_and_axes(), other._by_kind_and_axes()
        lines = []
        for key in sorted(mine.keys() | theirs.keys()):
            (count, sent), (count2, sent2) = mine.get(key, (0, Fraction(0))), theirs.get(key, (0, Fraction(0)))
            if (count, sent) != (count2, sent2):
                kind, axes = key
                lines.append(
                    f"{kind} over {_axes(axes)}: {count} of {_bytes(sent)} here, {count2} of {_bytes(sent2)} there"
                )
        return "\n".join(lines)

    def _by_kind_and_axes(self) -> dict[tuple[str, tuple[str, ...]], tuple[int, Fraction]]:
        out: dict[tuple[str, tuple[str, ...]], tuple[int, Fraction]] = {}
        for r in self.rows:
            count, sent = out.get((r.kind, r.axes), (0, Fraction(0)))
            out[r.kind, r.axes] = (count + (1 if r.count is None else r.count), sent + r.total)
        return out

    def __str__(self) -> str:
        if not self.rows:
            return "no collectives"
        lines = [("kind", "axes", "times", "bytes in", "bytes out", "sent/device", "pass", "source")]
        for r in self.rows:
            times = "?" if r.count is None else str(r.count)
            where = r.source + (f" [{r.branch}]" if r.branch else "")
            pass_ = "backward" if r.backward else "update" if r.update else "forward"
            sizes = (f"{r.bytes_in:,}", f"{r.bytes_out:,}", _bytes(r.total))
            lines.append((r.kind, f"{_axes(r.axes)}={r.n}", times, *sizes, pass_, where))
        text = [table(lines)]
        axes = sorted({axis for r in self.rows for axis in r.axes})
        text += [f"over {axis}: {self.count(axis=axis)} collectives, {_bytes(self.sent(axis=axis))}" for axis in axes]
        text.append(f"in all: {self.count()} collectives, {_bytes(self.sent())} sent by each device")
        return "\n".join(text)


@typed
def census(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Census:
    """Counts every collective in one call of `fn`, by tracing it.

    The walk goes through jit, shard_map, scan (times its length), while, cond (every branch listed), custom derivatives
    and remat.

    Args:
        fn: any function that jax can trace: a step, a loss, a shard_map; or what `.trace` returned, without arguments.
        *args: its arguments; `jax.ShapeDtypeStruct` will do.
        **kwargs: its keyword arguments.

    Returns:
        Census: rows, totals per axis and kind, a printed table, `.to_json()`, `.compare(other)`.

    Raises:
        ValueError: a communicating primitive that the census does not know, because an uncounted byte is worse than an
            error.
    """
    return census_of(traced(fn, args, kwargs).jaxpr)


def traced(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The program of one call as a closed jaxpr: traced already, or by the function's own `.trace`, or by jax."""
    if isinstance(fn, jax.stages.Traced):
        return fn.jaxpr
    trace = getattr(fn, "trace", None)
    return trace(*args, **kwargs).jaxpr if callable(trace) else jax.make_jaxpr(fn)(*args, **kwargs)


def census_of(jaxpr: Any) -> Census:
    """The census of a program that is traced already."""
    after = _after(jaxpr)
    rows = _walk(jaxpr, 1, {}, False, "")
    return Census(tuple(replace(row, update=id(equation) in after and not row.backward) for equation, row in rows))


def _after(jaxpr: Any) -> set[int]:
    """The communicating equations that a gradient goes into, by identity."""
    from shardkit.analysis.jaxpr.dataflow import walk  # which knows from here what communicates

    found = set()

    def visit(block: Any) -> None:
        for equation in block.jaxpr.eqns:
            if equation.primitive.name in KINDS and any(block.state(v).graded for v in equation.invars):
                found.add(id(equation))

    walk(jaxpr, visit)
    return found


def mesh_sizes(jaxpr: Any, args: Any) -> dict[str, int]:
    """Names and sizes of the axes of a program's mesh: its first shard_map's, else an argument's, else none."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "shard_map":
            return dict(equation.params["mesh"].shape)
        for _, inner in _compat.inner_jaxprs(equation):
            found = mesh_sizes(inner, ())
            if found:
                return found
    for leaf in jax.tree.leaves(args):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, jax.sharding.NamedSharding):
            return dict(sharding.mesh.shape)
    return {}


def _walk(
    jaxpr: Any, count: int | None, sizes: Mapping[str, int], backward: bool, branch: str, around: str = ""
) -> Iterator[tuple[Any, Row]]:
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        behind = backward or _compat.in_backward(equation)
        if name in KINDS:
            yield equation, row_of(equation, count, sizes, behind, branch, around)
            continue
        inner = _compat.inner_jaxprs(equation)
        if not inner and name not in SILENT and _names_axes(equation.params, sizes):
            raise ValueError(
                f"census: the primitive {name!r} at {source_line(equation)} uses mesh axes and is not known here. "
                "Report it, so that its bytes can be counted."
            )
        if name == "shard_map":
            sizes = {**sizes, **dict(equation.params["mesh"].shape)}
        for number, (parameter, sub) in enumerate(inner):
            times, where = count, branch
            if name == "scan":
                times = None if count is None else count * equation.params["length"]
            elif name == "while":
                times = None
            elif name == "cond" and parameter == "branches":
                where = f"{branch + ', ' if branch else ''}branch {number + 1} of {len(inner)}"
            yield from _walk(sub, times, sizes, behind, where, source_line(equation, around))


def row_of(
    equation: Any, count: int | None, sizes: Mapping[str, int], backward: bool, branch: str, around: str = ""
) -> Row:
    """The row of one communicating equation, given where it stands."""
    params = equation.params
    named = params.get("axes") or params["axis_name"]
    axes = tuple(a for a in (named if isinstance(named, tuple) else (named,)) if isinstance(a, str))
    groups = params.get("axis_index_groups")
    n = len(groups[0]) if groups else math.prod(sizes[a] for a in axes)
    primitive = equation.primitive.name
    ragged = primitive == "ragged_all_to_all"
    size_in = sum(_size(v) for v in (equation.invars[:1] if ragged else equation.invars))  # the rest are its sizes
    size_out = sum(_size(v) for v in equation.outvars)
    traffic = wire(KINDS[primitive], min(size_in, size_out) if ragged else size_in, n, params.get("perm"))
    source = source_line(equation, around)
    return Row(KINDS[primitive], primitive, axes, n, count, size_in, size_out, traffic.sent, source, backward, branch)


def source_line(equation: Any, around: str = "") -> str:
    """The innermost line that led to an equation, outside jax, the kernels and, if there is one, outside shardkit.

    Where only a kernel's own line is known, as inside a function with its own derivative, it is that of the equation
    `around` it.
    """
    frames = _compat.user_frames(equation)
    above = [f for f in frames if not _KERNELS & {Path(f[0]), *Path(f[0]).parents}]
    if not above:
        return around or (_written(frames[0]) if frames else "unknown")
    return user_line(equation) or _written(above[0])


def user_line(equation: Any) -> str:
    """The innermost line that led to an equation outside jax and shardkit; "" if there is none."""
    outside = [f for f in _compat.user_frames(equation) if _HERE not in Path(f[0]).parents]
    return _written(outside[0]) if outside else ""


def _written(frame: tuple[str, int, str]) -> str:
    file, line, function = frame
    return f"{Path(file).name}:{line} ({function})"


def _names_axes(params: Mapping[str, Any], sizes: Mapping[str, int]) -> bool:
    named = [params.get(key) for key in ("axes", "axis_name")]
    return any(
        a in sizes for v in named if v is not None for a in (v if isinstance(v, tuple) else (v,)) if isinstance(a, str)
    )


def _size(variable: Any) -> int:
    aval = variable.aval
    return (math.prod(aval.shape) * _bits(aval.dtype) + 7) // 8


def _bits(dtype: Any) -> int:
    """Bits of an element on the wire: numpy counts a byte for an int4, the compilers send half of one."""
    if jnp.issubdtype(dtype, jnp.integer):
        return int(jnp.iinfo(dtype).bits)
    return int(dtype.itemsize) * 8


def _axes(axes: tuple[str, ...]) -> str:
    return ",".join(axes)


def _bytes(size: Fraction) -> str:
    return f"{int(size):,}" if size.denominator == 1 else f"{float(size):,.1f}"


def traceable(fn: Callable[..., Any]) -> Any:
    """The function as jax can trace and compile it: itself, where it is jitted already or a train step."""
    return fn if hasattr(fn, "trace") else jax.jit(fn)
