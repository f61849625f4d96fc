"""The census: every collective in a traced program, how often it runs, and the bytes it sends.

Nothing runs and no device is needed; an AbstractMesh of any size is enough. What the compiler adds or merges is not in
the jaxpr and is not counted here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardkit._arguments.checks import counted
from shardkit._arguments.typed import typed
from shardkit._jax import compat
from shardkit._jax.jaxprs import Site, kind_of, mesh_axes, source_line, walk, way_of
from shardkit._jax.primitives import VIEWS, registered
from shardkit.analysis.jaxpr.dataflow import Block, follow
from shardkit.analysis.jaxpr.foreign import Said, around, said
from shardkit.analysis.jaxpr.step import trace_step
from shardkit.cost import wire
from shardkit.meshes.layout import table
from shardkit.meshes.network import Moves


@dataclass(frozen=True)
class CensusRow:
    """One collective of the program.

    Attributes:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ppermute", "broadcast".
        primitive: jax's name for it.
        axes: the mesh axes, in order.
        n: devices along the axes, or per group under axis_index_groups.
        count: executions per call, loops included; None inside a `while`, whose length is not in the program.
        bytes_in: bytes of the operand per device.
        bytes_out: bytes of the result per device.
        sent: bytes sent per device and execution by the ring algorithm.
        source: the user's line, "file.py:12 (function)".
        backward: whether it is in the backward pass.
        branch: "" or "branch 1 of 2" inside a `cond`; every branch is listed.
        update: whether its operand is a gradient, after the backward pass, as in the all_reduce of data parallelism.
        moves: of a ppermute, by how many places every message goes round its axes, or the pairs (source, target).
        along: of a ppermute, the axes along which a source and its target differ.
        way: the lines that lead from the call to it, outermost first, without those of jax and of Python's library.
        sums: the dtype of what it adds, of several the narrowest, as "bfloat16"; of a ppermute that of partial sums on
            their way, to which the receiver adds its own at once, as in a ring. "" for what moves or compares.
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
    moves: Moves | None = field(default=None, compare=False, repr=False)
    along: tuple[str, ...] = field(default=(), compare=False, repr=False)
    way: tuple[str, ...] = field(default=(), compare=False, repr=False)
    sums: str = ""

    @property
    def times(self) -> int:
        """Executions per call; a loop of unknown length counts once."""
        return 1 if self.count is None else self.count

    @property
    def total(self) -> Fraction:
        """Bytes sent per device and call; a `while` counts once."""
        return self.sent * self.times


@dataclass(frozen=True)
class Census:
    """The collectives of one call; `print` it, or read the rows."""

    rows: tuple[CensusRow, ...]

    def sent(self, *, axis: str | None = None, kind: str | None = None) -> Fraction:
        """Bytes sent per device: of all rows, of those that use an axis, or of those of a kind."""
        return sum((r.total for r in self.select(axis=axis, kind=kind)), Fraction(0))

    def count(self, *, axis: str | None = None, kind: str | None = None) -> int:
        """Collectives in one call; a `while` counts once."""
        return sum(r.times for r in self.select(axis=axis, kind=kind))

    def select(self, *, axis: str | None = None, kind: str | None = None) -> tuple[CensusRow, ...]:
        """The rows that use an axis and are of a kind."""
        return tuple(r for r in self.rows if axis in (None, *r.axes) and kind in (None, r.kind))

    def to_json(self) -> str:
        """The rows as a JSON list; bytes are numbers."""
        rows = [{**asdict(r), "sent": float(r.sent), "total": float(r.total)} for r in self.rows]
        return json.dumps(
            [{name: x for name, x in row.items() if name not in ("way", "moves", "along")} for row in rows], indent=1
        )

    def ways(self) -> str:
        """How each collective is reached: kind and axes, then a line for each call on the way from the step to jax."""
        several: dict[tuple[str, ...], list[CensusRow]] = {}
        for row in self.rows:
            several.setdefault((f"{row.kind} over {','.join(row.axes)}", *row.way), []).append(row)
        lines = []
        for (title, *way), rows in several.items():
            lines.append(f"{title}, {counted(sum(row.times for row in rows), 'time')}")
            lines += [f"    {line}" for line in way]
        return "\n".join(lines)

    @typed
    def compare(self, other: Census) -> str:
        """The kinds and axes in which `other` differs, one line each; empty when both send the same."""
        mine, theirs = self._by_kind_and_axes(), other._by_kind_and_axes()
        lines = []
        for key in sorted(mine.keys() | theirs.keys()):
            (count, sent), (count2, sent2) = mine.get(key, (0, Fraction(0))), theirs.get(key, (0, Fraction(0)))
            if (count, sent) != (count2, sent2):
                kind, axes = key
                lines.append(
                    f"{kind} over {','.join(axes)}: {count} of {_bytes(sent)} here, {count2} of {_bytes(sent2)} there"
                )
        return "\n".join(lines)

    def _by_kind_and_axes(self) -> dict[tuple[str, tuple[str, ...]], tuple[int, Fraction]]:
        out: dict[tuple[str, tuple[str, ...]], tuple[int, Fraction]] = {}
        for r in self.rows:
            count, sent = out.get((r.kind, r.axes), (0, Fraction(0)))
            out[r.kind, r.axes] = (count + r.times, sent + r.total)
        return out

    def __str__(self) -> str:
        if not self.rows:
            return "no collectives"
        lines = [("kind", "axes", "times", "bytes in", "bytes out", "sent/device", "pass", "source")]
        for rows in self._group_alike():
            lines.append(_table_line(rows))
        text = [table(lines)]
        axes = sorted({axis for row in self.rows for axis in row.axes})
        for axis in axes:
            text.append(f"over {axis}: {self.count(axis=axis)} collectives, {_bytes(self.sent(axis=axis))}")
        text.append(f"in all: {self.count()} collectives, {_bytes(self.sent())} sent per device")
        return "\n".join(text)

    def _group_alike(self) -> list[list[CensusRow]]:
        """Rows that differ in nothing that the table shows, together, in the order of the first of each group.

        For example the gradients of seven layers that are not stacked: seven rows of one line, which the table shows as
        one, with 7 x 1 times.
        """
        groups: dict[tuple[Any, ...], list[CensusRow]] = {}
        for row in self.rows:
            sizes = (row.bytes_in, row.bytes_out, row.sent)
            place = (row.backward, row.update, row.source, row.branch)
            groups.setdefault((row.kind, row.axes, row.n, row.count, sizes, place), []).append(row)
        return list(groups.values())


def _table_line(rows: list[CensusRow]) -> tuple[str, str, str, str, str, str, str, str]:
    """The line of rows that are alike."""
    first = rows[0]
    times = "?" if first.count is None else str(first.count)
    if len(rows) > 1:
        times = f"{len(rows)} x {times}"
    sent = sum((row.total for row in rows), Fraction(0))
    place = first.source
    if first.branch:
        place += f" [{first.branch}]"
    step_pass = "forward"
    if first.backward:
        step_pass = "backward"
    elif first.update:
        step_pass = "update"
    axes = f"{','.join(first.axes)}={first.n}"
    return first.kind, axes, times, f"{first.bytes_in:,}", f"{first.bytes_out:,}", _bytes(sent), step_pass, place


@typed
def census(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Census:
    """Counts every collective in one call of `fn`, by tracing it.

    It covers jit, shard_map, scan (times its length), while, cond (every branch), custom derivatives and remat.

    Args:
        fn: any function that jax can trace, as a step or a loss; or the result of its `.trace`, without arguments.
        *args: its arguments; `jax.ShapeDtypeStruct` is enough.
        **kwargs: its keyword arguments.

    Returns:
        Census: rows, totals per axis and kind, a printed table, `.to_json()`, `.compare(other)`.

    Raises:
        ValueError: something whose bytes would be missing: a primitive over mesh axes that the census does not know, a
            Pallas kernel that copies to other devices or signals them, a foreign call (`jax.ffi`) with side effects;
            `sends` says what these send.

    Example:
        >>> f = jax.shard_map(lambda x: sk.all_reduce(x, "model"), mesh=mesh, in_specs=P(None, "model"), out_specs=P())
        >>> found = sk.census(f, jnp.ones((8, 4)))
        >>> found.count(kind="all_reduce"), float(found.sent(axis="model"))
        (1, 48.0)
    """
    return census_of(trace_step(fn, args, kwargs).jaxpr)


def census_of(jaxpr: Any) -> Census:
    """The census of a program that is traced already."""
    after = _after(jaxpr)
    rows = []
    for site in walk(jaxpr):
        if kind_of(site.equation) is not None:
            if not mesh_axes(site.equation):  # vmap leaves sums over none
                continue
            row = row_of(site)
            rows.append(replace(row, update=id(site.equation) in after and not row.backward))
        elif claim := said(site):
            rows.append(_row_of_foreign(site, claim))
        elif not registered(site.name).name and site.sizes and not compat.inner_jaxprs(site.equation):
            _refuse_uncounted(site)
    return Census(tuple(rows))


def _refuse_uncounted(site: Site) -> None:
    if compat.reaches_others(site.equation):
        if any(map(said, around(site))):  # inside a kernel of which all is said
            return
        raise ValueError(
            f"census: what is sent must be in the program; the primitive {site.name!r} at {site.source} may send to "
            "other devices by itself. Say what it sends: call it inside `with sk.analysis.sends(kind, axis, sent):`."
        )
    axes = mesh_axes(site.equation)
    if axes and set(axes) & site.sizes.keys():
        raise ValueError(
            f"census: the primitive {site.name!r} at {source_line(site.equation)} uses mesh axes and is unknown here. "
            "Report it, so that its bytes can be counted."
        )


def _after(jaxpr: Any) -> set[int]:
    """The collectives whose operand is a gradient, by identity."""
    found = set()

    def visit(block: Block) -> None:
        for equation in block.jaxpr.eqns:
            if kind_of(equation) is not None and any(block.state(v).graded for v in equation.invars):
                found.add(id(equation))

    follow(jaxpr, visit)
    return found


def mesh_sizes(jaxpr: Any, args: Any) -> dict[str, int]:
    """Names and sizes of the axes of a program's mesh: its first shard_map's, else an argument's, else none."""
    meshes = (site.equation.params["mesh"] for site in walk(jaxpr) if site.name == "shard_map")
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args))
    given = (each.mesh for each in shardings if isinstance(each, jax.sharding.NamedSharding))
    mesh = next(chain(meshes, given), None)
    return {} if mesh is None else dict(mesh.shape)


def row_of(site: Site) -> CensusRow:
    """The row of one communicating equation."""
    equation, kind = site.equation, kind_of(site.equation)
    assert kind is not None
    params, axes = equation.params, mesh_axes(equation)
    groups = params.get("axis_index_groups")
    n = len(groups[0]) if groups else math.prod(site.sizes[a] for a in axes)
    data = registered(site.name).sent
    size_in = sum(size_of(v) for v in equation.invars[:data])
    size_out = sum(size_of(v) for v in equation.outvars)
    size_in = size_out if kind == "all_reduce" else size_in  # what vmap stacked is summed on the device first
    sent = wire(kind, size_in if data is None else min(size_in, size_out), n, params.get("perm")).sent
    place = site.source, site.backward, site.branch
    row = CensusRow(
        kind, site.name, axes, n, site.times, size_in, size_out, sent, *place, way=way_of(site), sums=_sums(site, kind)
    )
    if kind != "ppermute":
        return row
    return replace(row, moves=_moves(params["perm"], n), along=_along(params["perm"], axes, site.sizes))


# What partial sums may go through between their arrival and the addition.
_ON_THE_WAY = VIEWS | {"slice", "dynamic_slice", "select_n", "pvary"}


def _sums(site: Site, kind: str) -> str:
    """The dtype of what a collective adds; "" where it adds nothing."""
    equation = site.equation
    compares = registered(site.name).reduces in ("maximum", "minimum")
    adds = kind in ("all_reduce", "reduce_scatter") and not compares
    if not adds and not (kind == "ppermute" and _added_to(site.jaxpr, equation)):
        return ""
    dtypes = [v.aval.dtype for v in equation.invars]
    floats = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]
    return str(min(floats or dtypes, key=lambda dtype: dtype.itemsize, default=""))


def _added_to(jaxpr: Any, equation: Any) -> bool:
    """Whether what arrives is added to something that does not depend on it, before anything else is done with it."""
    arrived, dependent = set(equation.outvars), set(equation.outvars)
    for each in jaxpr.eqns:
        operands = [v for v in each.invars if not hasattr(v, "val")]
        depend = dependent & set(operands)
        adds = each.primitive.name in ("add", "add_any", "sub") and len(operands) == 2
        if adds and len(depend) == 1 and depend <= arrived:
            return True
        if depend:
            dependent |= set(each.outvars)
        if depend & arrived and each.primitive.name in _ON_THE_WAY:
            arrived |= set(each.outvars)
    return False


def _row_of_foreign(site: Site, claim: Said) -> CensusRow:
    """The row of a call of which its writer says what it sends."""
    return CensusRow(
        kind=claim.kind,
        primitive=site.name,
        axes=claim.axes,
        n=math.prod(site.sizes[axis] for axis in claim.axes),
        count=site.times,
        bytes_in=sum(map(size_of, site.equation.invars)),
        bytes_out=sum(map(size_of, site.equation.outvars)),
        sent=claim.sent,
        source=site.source,
        backward=site.backward,
        branch=site.branch,
        way=way_of(site),
    )


def _moves(pairs: Sequence[tuple[int, int]], n: int) -> Moves:
    """By how many places round n every pair moves; the pairs themselves if that differs."""
    moves = {(target - source) % n for source, target in pairs}
    return moves.pop() if len(moves) == 1 else tuple((int(source), int(target)) for source, target in pairs)


def _along(pairs: Sequence[tuple[int, int]], axes: tuple[str, ...], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes along which some source and its target differ; a ppermute counts devices in the order of the mesh."""
    ordered = [axis for axis in sizes if axis in axes]
    ends = [np.unravel_index(end, [sizes[axis] for axis in ordered]) for end in zip(*pairs, strict=True)]
    return tuple(axis for axis, one, other in zip(ordered, *ends, strict=True) if (one != other).any()) if ends else ()


def size_of(variable: Any) -> int:
    """Bytes of a value on one device."""
    shape, dtype = variable.aval.shape, variable.aval.dtype
    # An int4 is a byte in numpy and half a byte in compiled programs.
    bits = int(jnp.iinfo(dtype).bits) if jnp.issubdtype(dtype, jnp.integer) else int(dtype.itemsize) * 8
    return (math.prod(shape) * bits + 7) // 8


def _bytes(size: Fraction) -> str:
    return f"{int(size):,}" if size.denominator == 1 else f"{float(size):,.1f}"


def traceable(fn: Callable[..., Any]) -> Any:
    """The function with `.trace`: unchanged where it is jitted or a train step, else jitted."""
    return fn if hasattr(fn, "trace") else jax.jit(fn)
