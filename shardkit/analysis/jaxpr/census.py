"""The census: every collective in a traced program, how often it runs, and the bytes it sends.

Nothing runs and no device is needed; an AbstractMesh of any size is enough. What the compiler adds or merges is not in
the jaxpr and is not counted here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from shardkit._arguments.checks import format_count
from shardkit._arguments.typed import typed
from shardkit._jax import compat
from shardkit._jax.jaxprs import Site, kind_of, mesh_axes, source_line, walk, way_of
from shardkit._jax.primitives import SUMS, VIEWS, registered
from shardkit.analysis.jaxpr.dataflow import Block, follow
from shardkit.analysis.jaxpr.foreign import Claim, find_claim, sites_around
from shardkit.analysis.jaxpr.kernels import count_copies
from shardkit.analysis.jaxpr.step import trace_step
from shardkit.cost import wire
from shardkit.meshes.layout import table
from shardkit.meshes.network import Moves

_AnyRow = TypeVar("_AnyRow", bound=Any)  # a CensusRow, or a row of a compiled program


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
        if self.count is None:
            return 1
        return self.count

    @property
    def total(self) -> Fraction:
        """Bytes sent per device and call; a `while` counts once."""
        return self.sent * self.times


@dataclass(frozen=True)
class Census:
    """The collectives of one call; `print` it, or read the rows."""

    rows: tuple[CensusRow, ...]

    def sent(self, *, axis: str | None = None, kind: str | None = None) -> int | Fraction:
        """Bytes sent per device: of all rows, or of the rows with this axis or this kind.

        A Fraction only if it is no whole number, as two thirds of 1,000 bytes.
        """
        return sum_bytes(row.total for row in self.select(axis=axis, kind=kind))

    def count(self, *, axis: str | None = None, kind: str | None = None) -> int:
        """Collectives in one call; a `while` counts once."""
        return sum(row.times for row in self.select(axis=axis, kind=kind))

    def select(self, *, axis: str | None = None, kind: str | None = None) -> tuple[CensusRow, ...]:
        """The rows that use an axis and are of a kind."""
        return select_rows(self.rows, axis, kind)

    def to_json(self) -> str:
        """The rows as a JSON list; bytes are numbers."""
        rows = []
        for row in self.rows:
            fields = asdict(row)
            for name in ("way", "moves", "along"):
                del fields[name]
            rows.append({**fields, "sent": float(row.sent), "total": float(row.total)})
        return json.dumps(rows, indent=1)

    def ways(self) -> str:
        """Shows the way to each collective: kind and axes, then a line for each call from the step down to jax."""
        times: dict[tuple[str, ...], int] = {}  # of the collectives that are reached by the same lines
        for row in self.rows:
            title = f"{row.kind} over {','.join(row.axes)}"
            key = (title, *row.way)
            times[key] = times.get(key, 0) + row.times
        lines = []
        for (title, *calls), count in times.items():
            lines.append(f"{title}, {format_count(count, 'time')}")
            lines += [f"    {line}" for line in calls]
        return "\n".join(lines)

    @typed
    def compare(self, other: Census) -> str:
        """Lists the kinds and axes in which `other` differs, one line each; empty if both send the same."""
        here = self._sum_by_kind_and_axes()
        there = other._sum_by_kind_and_axes()
        nothing = (0, Fraction(0))
        lines = []
        for kind, axes in sorted(here.keys() | there.keys()):
            count, sent = here.get((kind, axes), nothing)
            other_count, other_sent = there.get((kind, axes), nothing)
            if (count, sent) == (other_count, other_sent):
                continue
            counts_here = f"{count} of {_bytes(sent)} here"
            counts_there = f"{other_count} of {_bytes(other_sent)} there"
            lines.append(f"{kind} over {','.join(axes)}: {counts_here}, {counts_there}")
        return "\n".join(lines)

    def _sum_by_kind_and_axes(self) -> dict[tuple[str, tuple[str, ...]], tuple[int, Fraction]]:
        """How often and how many bytes, by kind and axes."""
        sums: dict[tuple[str, tuple[str, ...]], tuple[int, Fraction]] = {}
        for row in self.rows:
            count, sent = sums.get((row.kind, row.axes), (0, Fraction(0)))
            sums[row.kind, row.axes] = (count + row.times, sent + row.total)
        return sums

    def __str__(self) -> str:
        if not self.rows:
            return "no collectives"
        lines = [("kind", "axes", "times", "bytes in", "bytes out", "sent/device", "pass", "source")]
        for rows in self._group_alike():
            lines.append(_table_line(rows))
        text = [table(lines)]
        axes: set[str] = set()
        for row in self.rows:
            axes.update(row.axes)
        for axis in sorted(axes):
            text.append(f"over {axis}: {self.count(axis=axis)} collectives, {_bytes(self.sent(axis=axis))}")
        text.append(f"in all: {self.count()} collectives, {_bytes(self.sent())} sent per device")
        if any(row.count is None for row in self.rows):
            text.append("times ?: inside a while, whose length is not in the program; its body is counted once")
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
            key = (row.kind, row.axes, row.n, row.count, sizes, place)
            groups.setdefault(key, []).append(row)
        return list(groups.values())


def _table_line(rows: list[CensusRow]) -> tuple[str, str, str, str, str, str, str, str]:
    """The line of rows that are alike."""
    first = rows[0]
    times = "?"
    if first.count is not None:
        times = str(first.count)
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
    """Traces one call of `fn` and counts every collective in it, with its bytes.

    It covers jit, shard_map, scan (times its length), while, cond (every branch), custom derivatives and remat. The
    remote copies of a Pallas kernel are a ppermute along the axes on which they go, of the bytes that a device sends on
    average.

    Args:
        fn: any function that jax can trace, such as a step or a loss; or the result of its `.trace`, without arguments.
        *args: its arguments; `jax.ShapeDtypeStruct` is enough.
        **kwargs: its keyword arguments.

    Returns:
        Census: rows, totals per axis and kind, a printed table, `.to_json()`, `.compare(other)`.

    Raises:
        ValueError: something that may send bytes which the census cannot count: an unknown primitive over mesh axes, a
            Pallas kernel whose remote copies depend on data, a foreign call (`jax.ffi`) with side effects. Wrap it in
            `sends` to say what it sends.

    Example:
        >>> f = jax.shard_map(lambda x: sk.all_reduce(x, "model"), mesh=mesh, in_specs=P(None, "model"), out_specs=P())
        >>> found = sk.census(f, jnp.ones((8, 4)))
        >>> found.count(kind="all_reduce"), float(found.sent(axis="model"))
        (1, 48.0)
    """
    return census_of(trace_step(fn, args, kwargs).jaxpr)


def census_of(jaxpr: Any) -> Census:
    """The census of a program that is traced already."""
    of_gradients = _find_collectives_of_gradients(jaxpr)
    rows = []
    counted: set[int] = set()  # kernels of remote copies, by identity
    for site in walk(jaxpr):
        claim = find_claim(site)
        copies = None
        if claim is None:
            copies = count_copies(site)
        if kind_of(site.equation) is not None:
            if not mesh_axes(site.equation):  # vmap leaves sums over none
                continue
            row = row_of(site)
            # A sum of gradients after the backward pass, as that of data parallelism.
            rows.append(replace(row, update=id(site.equation) in of_gradients and not row.backward))
        elif claim is not None:
            rows.append(_row_of_foreign(site, claim))
        elif copies is not None:
            counted.add(id(site.equation))
            rows += [_row_of_foreign(site, copy) for copy in copies]
        elif _is_unknown(site):
            _refuse_uncounted(site, counted)
    return Census(tuple(rows))


def _is_unknown(site: Site) -> bool:
    """Whether a primitive inside a shard_map is none that `primitives.py` lists.

    One with jaxprs of its own is walked through, and shows what it sends.
    """
    if registered(site.name).name or compat.inner_jaxprs(site.equation):
        return False
    return bool(site.sizes)


def _refuse_uncounted(site: Site, counted: set[int]) -> None:
    """Refuses a primitive inside a shard_map that may send what neither the program shows nor a kernel counts."""
    if compat.reaches_others(site.equation):
        for holder in sites_around(site):
            # All that this kernel sends is stated, or was counted.
            if find_claim(holder) is not None or id(holder.equation) in counted:
                return
        raise ValueError(
            f"census: every collective must be in the program; the primitive {site.name!r} at {site.source} may send "
            "to other devices by itself. To say what it sends, call it inside `with sk.analysis.sends(kind, axis, "
            "sent):`."
        )
    axes = mesh_axes(site.equation)
    if axes and set(axes) & site.sizes.keys():
        raise ValueError(
            f"census: the primitive {site.name!r} at {source_line(site.equation)} uses mesh axes and is unknown here. "
            "Report it, so that its bytes can be counted."
        )


def _find_collectives_of_gradients(jaxpr: Any) -> set[int]:
    """The collectives whose operand is a gradient, by identity."""
    collectives = set()

    def visit(block: Block) -> None:
        for equation in block.jaxpr.eqns:
            if kind_of(equation) is None:
                continue
            if any(block.state(v).from_gradient for v in equation.invars):
                collectives.add(id(equation))

    follow(jaxpr, visit)
    return collectives


def mesh_sizes(jaxpr: Any, args: Any) -> dict[str, int]:
    """Names and sizes of the axes of a program's mesh: its first shard_map's, else an argument's, else none."""
    for site in walk(jaxpr):
        if site.name == "shard_map":
            return dict(site.equation.params["mesh"].shape)
    for leaf in jax.tree.leaves(args):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, jax.sharding.NamedSharding):
            return dict(sharding.mesh.shape)
    return {}


def row_of(site: Site) -> CensusRow:
    """The row of one communicating equation.

    For example in a shard_map over data=8, in a scan over 12 layers, for an x of f32[4,8]:

        y = psum[axes=('data',)] x      all_reduce over ('data',), n=8, count=12, bytes_in=bytes_out=128,
                                        sent=2 x 7/8 x 128 = 224 each time, 2,688 in all
    """
    equation = site.equation
    kind = kind_of(equation)
    assert kind is not None
    params = equation.params
    axes = mesh_axes(equation)
    groups = params.get("axis_index_groups")
    if groups:
        n = len(groups[0])
    else:
        n = math.prod(site.sizes[axis] for axis in axes)
    data_operands = registered(site.name).sent
    bytes_in = sum(size_of(v) for v in equation.invars[:data_operands])
    bytes_out = sum(size_of(v) for v in equation.outvars)
    if kind == "all_reduce":  # what vmap stacked is summed on the device first
        bytes_in = bytes_out
    payload = bytes_in
    if data_operands is not None:  # of a ragged_all_to_all the rows or their buffer has padding that is not sent
        payload = min(bytes_in, bytes_out)
    row = CensusRow(
        kind=kind,
        primitive=site.name,
        axes=axes,
        n=n,
        count=site.times,
        bytes_in=bytes_in,
        bytes_out=bytes_out,
        sent=wire(kind, payload, n, params.get("perm")).sent,
        source=site.source,
        backward=site.backward,
        branch=site.branch,
        way=way_of(site),
        sums=_find_sum_dtype(site, kind),
    )
    if kind != "ppermute":
        return row
    pairs = params["perm"]
    return replace(row, moves=_find_moves(pairs, n), along=_find_axes_along(pairs, axes, site.sizes))


# What partial sums may go through between their arrival and the addition.
_ON_THE_WAY = VIEWS | {"slice", "dynamic_slice", "select_n", "pvary"}


def _find_sum_dtype(site: Site, kind: str) -> str:
    """The dtype of what a collective adds; "" where it adds nothing."""
    adds = False
    if kind in ("all_reduce", "reduce_scatter"):
        adds = registered(site.name).reduces not in ("maximum", "minimum")
    elif kind == "ppermute":
        adds = _sends_partial_sums(site.jaxpr, site.equation)
    if not adds:
        return ""
    dtypes = [v.aval.dtype for v in site.equation.invars]
    # Of several arrays in one psum the floats decide, because integers are added exactly.
    floats = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]
    narrowest = min(floats or dtypes, key=lambda dtype: dtype.itemsize, default="")
    return str(narrowest)


# Worked example: two kernels of a ring, each with `y = ppermute(x, ...)`.
#
#     y; z = reshape(y); w = z + own      arrived {y, z}, dependent {y, z}: own is not dependent, w is a sum on its way
#     y; a = sin(y); w = y + a            arrived {y}, dependent {y, a}: both operands depend on y, as in a residual
def _sends_partial_sums(jaxpr: Any, permute: Any) -> bool:
    """Whether what arrives is added to something that does not depend on it, before anything else is done with it."""
    arrived = set(permute.outvars)
    dependent = set(permute.outvars)
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        operands = [v for v in equation.invars if not hasattr(v, "val")]
        dependent_operands = dependent & set(operands)
        adds = name in SUMS and len(operands) == 2
        if adds and len(dependent_operands) == 1 and dependent_operands <= arrived:
            return True
        if dependent_operands:
            dependent |= set(equation.outvars)
        # A reshape or slice of what arrived is still what arrived.
        if dependent_operands & arrived and name in _ON_THE_WAY:
            arrived |= set(equation.outvars)
    return False


def _row_of_foreign(site: Site, claim: Claim) -> CensusRow:
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


def _find_moves(pairs: Sequence[tuple[int, int]], n: int) -> Moves:
    """By how many places round n every pair moves; the pairs themselves if that differs."""
    # Modulo n: in a ring of 8 the pair (7, 0) moves by 1, as all others do.
    moves = {(target - source) % n for source, target in pairs}
    if len(moves) == 1:
        return moves.pop()
    return tuple((int(source), int(target)) for source, target in pairs)


def _find_axes_along(
    pairs: Sequence[tuple[int, int]], axes: tuple[str, ...], sizes: Mapping[str, int]
) -> tuple[str, ...]:
    """The axes along which some source and its target differ."""
    # A ppermute counts devices in the order of the mesh. On data=2, model=4 over both axes the pair (1, 5) is from
    # (0, 1) to (1, 1): along "data" alone.
    if not pairs:
        return ()
    mesh_order = [axis for axis in sizes if axis in axes]
    shape = [sizes[axis] for axis in mesh_order]
    sources, targets = zip(*pairs, strict=True)
    source_coordinates = np.unravel_index(sources, shape)
    target_coordinates = np.unravel_index(targets, shape)
    along = []
    for axis, source, target in zip(mesh_order, source_coordinates, target_coordinates, strict=True):
        if (source != target).any():
            along.append(axis)
    return tuple(along)


def size_of(variable: Any) -> int:
    """Bytes of a value on one device."""
    dtype = variable.aval.dtype
    if jnp.issubdtype(dtype, jnp.integer):
        # An int4 is a byte in numpy and half a byte in compiled programs.
        bits = int(jnp.iinfo(dtype).bits)
    else:
        bits = int(dtype.itemsize) * 8
    return (math.prod(variable.aval.shape) * bits + 7) // 8


def sum_bytes(sizes: Iterable[Fraction]) -> int | Fraction:
    """Bytes in all; a Fraction only if they are no whole number."""
    total = sum(sizes, Fraction(0))
    if total.denominator > 1:
        return total
    return int(total)


def select_rows(rows: Iterable[_AnyRow], axis: str | None, kind: str | None) -> tuple[_AnyRow, ...]:
    """The rows, of a traced or a compiled program, that use an axis and are of a kind; None: all."""
    selected = []
    for row in rows:
        has_axis = axis is None or axis in row.axes
        has_kind = kind is None or kind == row.kind
        if has_axis and has_kind:
            selected.append(row)
    return tuple(selected)


def _bytes(size: int | Fraction) -> str:
    if size.denominator > 1:
        return f"{float(size):,.1f}"
    return f"{int(size):,}"


def traceable(fn: Callable[..., Any]) -> Any:
    """The function with `.trace`: unchanged where it is jitted or a train step, else jitted."""
    if hasattr(fn, "trace"):
        return fn
    return jax.jit(fn)
