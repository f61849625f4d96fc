"""What the compiler made of the collectives that the author wrote: added, merged, dropped, changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

from shardkit import _compat
from shardkit._check import quoted
from shardkit.analysis.hlo import proto
from shardkit.analysis.hlo.collectives import CompiledRow, collectives_of
from shardkit.analysis.hlo.memory import Memory, memory_of
from shardkit.analysis.jaxpr.census import Census, Row, census_of, mesh_sizes, traceable
from shardkit.layout import table


class Compiled(NamedTuple):
    """A program as written and as compiled.

    Attributes:
        census: every collective as written.
        rows: every collective of the compiled program.
        memory: what it needs on one device.
    """

    census: Census
    rows: tuple[CompiledRow, ...]
    memory: Memory

    def differences(self) -> list[str]:
        """What the compiler changed, a line each."""
        return account(self.census, self.rows)

    def __str__(self) -> str:
        lines = [("kind", "axes", "times", "bytes in", "sent/device", "runs", "source")]
        for rows in grouped(self.rows):
            first, times = rows[0], sum(r.times for r in rows)
            lines.append(
                (
                    first.kind,
                    f"{','.join(first.axes)}={first.n}",
                    f"{times}" + ("?" if first.count is None else ""),
                    f"{first.bytes_in:,}",
                    f"{int(sum((r.total for r in rows), Fraction(0))):,}",
                    "overlapped" if first.asynchronous else "synchronous",
                    (first.source or first.op_name or "unknown") + (f" [{first.branch}]" if first.branch else ""),
                )
            )
        return "\n".join([table(lines) if self.rows else "no collectives", changed(self.differences())])


def compiled(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Compiled:
    """Compiles one call of `fn` for the devices that are there and reads what the compiler made of its collectives.

    Args:
        fn: a jitted function, a train step, or any function that jax can trace.
        *args: its arguments; `jax.ShapeDtypeStruct` with shardings will do.
        **kwargs: its keyword arguments.

    Returns:
        Compiled: the collectives as written, as compiled, the differences, and the memory. Nothing is run.
    """
    traced = traceable(fn).trace(*args, **kwargs)
    return read_compiled(traced, traced.lower().compile(), args, kwargs)


def read_compiled(traced: Any, program: Any, args: Any = (), kwargs: Any = None) -> Compiled:
    """What the compiler made of a program that is traced and compiled already (`jax.stages.Traced`, `Compiled`)."""
    executable = program.runtime_executable()
    module = executable.hlo_modules()[0]
    sizes = mesh_sizes(traced.jaxpr.jaxpr, (args, kwargs))
    rows = collectives_of(proto.read(module.as_serialized_hlo_module_proto()), sizes)
    return Compiled(census_of(traced.jaxpr.jaxpr), rows, memory_of(executable))


def grouped(rows: tuple[CompiledRow, ...]) -> list[list[CompiledRow]]:
    """Rows that read alike, together."""
    groups: dict[tuple[Any, ...], list[CompiledRow]] = {}
    for r in rows:
        key = (r.kind, r.axes, r.arrays, r.bytes_in, r.asynchronous, r.source, r.branch, r.count is None)
        groups.setdefault(key, []).append(r)
    return list(groups.values())


def changed(differences: list[str]) -> str:
    """What the compiler changed, in a paragraph."""
    return "what the compiler changed:\n" + "\n".join(f"- {c}" for c in differences) if differences else "as written"


def added_by_compiler(found: Compiled) -> Fraction:
    """Bytes that a device sends by collectives that the compiler added and nobody wrote."""
    return sum((row.total for row in found.rows if row.n > 1 and not written(row)), Fraction(0))


@dataclass
class _Side:
    """The collectives of one kind over the same axes."""

    times: int = 0
    sent: Fraction = Fraction(0)
    places: list[str] = field(default_factory=list)
    unknown: bool = False  # a loop of unknown length is among them, which is counted once


def written(row: CompiledRow) -> bool:
    """Whether a compiled collective comes from a written one; the compiler's own carry another op's name."""
    return row.op_name.rsplit("/", 1)[-1] in _compat.COLLECTIVES


def as_census(rows: Iterable[CompiledRow]) -> Census:
    """Compiled collectives as a census, so that what holds for one can be held against the other."""
    return Census(
        tuple(
            Row(
                kind=r.kind,
                primitive=r.name,
                axes=r.axes,
                n=r.n,
                count=r.count,
                bytes_in=r.bytes_in,
                bytes_out=r.bytes_out,
                sent=r.sent,
                source=r.source or r.op_name or "unknown",
                backward="transpose" in r.op_name,
                branch=r.branch,
            )
            for r in rows
        )
    )


class Change(NamedTuple):
    """One thing that the compiler changed: in words, and whether more is sent for it."""

    line: str
    more: bool


def account(census: Census, rows: Iterable[CompiledRow]) -> list[str]:
    """What the compiler changed, a line each; empty when the compiled program communicates as written."""
    return [change.line for change in changes(census, rows)]


def changes(census: Census, rows: Iterable[CompiledRow]) -> list[Change]:
    """What the compiler changed. A collective over axes of one device sends nothing and is left out on both sides."""
    sides: dict[tuple[str, tuple[str, ...]], tuple[_Side, _Side]] = {}
    added: dict[tuple[str, tuple[str, ...]], _Side] = {}
    rows = tuple(rows)
    places = {(row.kind, row.source) for row in census.rows if row.n > 1}
    for row in census.rows:
        if row.n > 1:
            side = sides.setdefault((row.kind, _moved(row, rows)), (_Side(), _Side()))[0]
            _count(side, 1 if row.count is None else row.count, row.total, row.source)
            side.unknown |= row.count is None
    for each in rows:
        if each.n > 1:
            key = (each.kind, tuple(sorted(each.axes)))
            scattered = each.kind == "all_reduce" and ("reduce_scatter", key[1]) in sides
            # The compiler drops some names, and gives what it merges that of another operation.
            own = (
                written(each)
                or (each.kind, each.source) in places
                or (not each.op_name and (key in sides or scattered))
            )
            side = sides.setdefault(key, (_Side(), _Side()))[1] if own else added.setdefault(key, _Side())
            _count(side, each.times, each.total, each.source or each.op_name)
    found = [Change(line, True) for line in _run_as_all_reduce(sides)]
    for (kind, axes), (before, after) in sorted(sides.items()):
        what = f"{kind} over {quoted(axes)}"
        if before.times == after.times and before.sent == after.sent:
            continue
        if before.unknown and after.times >= before.times and before.sent * after.times == after.sent * before.times:
            continue  # the compiler knows how often a loop runs that the trace does not
        if before.sent == after.sent:
            word = "merged" if after.times < before.times else "split"
            line = f"{word}: {before.times} x {what} run as {after.times}, {_bytes(after)} as written"
        elif before.sent * after.times == after.sent * before.times and after.times < before.times:
            lost = before.times - after.times
            line = (
                f"dropped: {lost} of {before.times} x {what}, {float(before.sent - after.sent):,.0f} bytes{_at(before)}"
            )
        elif not before.times:
            line = f"became {what}: {after.times} x, {_bytes(after)}{_at(after)}"
        else:
            line = (
                f"changed: {what}, {before.times} x of {_bytes(before)} in all as written, "
                f"{after.times} x of {_bytes(after)} as compiled"
            )
        found.append(Change(line, after.sent > before.sent))
    for (kind, axes), side in sorted(added.items()):
        line = f"added: {side.times} x {kind} over {quoted(axes)}, {_bytes(side)}{_at(side)}"
        found.append(Change(line, True))
    return found


def _moved(row: Row, rows: Iterable[CompiledRow]) -> tuple[str, ...]:
    """The axes of a written collective under which it is found among the compiled.

    A group does not show axes of one device, nor the pairs of a permute an axis along which they stay: fewer axes with
    as many devices are the same axes, and so are a permute's of the same line.
    """
    for each in rows:
        same = each.n == row.n or (row.kind == "ppermute" and each.source == row.source)
        if each.kind == row.kind and same and each.n > 1 and set(each.axes) < set(row.axes):
            return tuple(sorted(each.axes))
    return tuple(sorted(row.axes))


def _run_as_all_reduce(sides: dict[tuple[str, tuple[str, ...]], tuple[_Side, _Side]]) -> list[str]:
    """Takes out, and names, the reduce_scatters that the compiler runs as an all_reduce of which it keeps a slice."""
    lines = []
    for (kind, axes), (before, after) in sorted(sides.items()):
        summed = sides.get(("all_reduce", axes))
        lost = before.times - after.times
        if kind != "reduce_scatter" or lost <= 0 or summed is None:
            continue
        extra = summed[1].sent - summed[0].sent
        missing = before.sent - after.sent
        if extra >= 2 * missing * Fraction(9, 10):
            lines.append(
                f"run as all_reduce: {lost} x reduce_scatter over {quoted(axes)}, {float(2 * missing):,.0f} bytes "
                f"instead of {float(missing):,.0f}{_at(before)}"
            )
            after.times, after.sent = before.times, before.sent
            summed[1].times = max(summed[1].times - lost, min(1, summed[0].times))  # they may have been merged
            summed[1].sent -= 2 * missing
    return lines


def _count(side: _Side, times: int, sent: Fraction, place: str) -> None:
    side.times += times
    side.sent += sent
    if place and place not in side.places:
        side.places.append(place)


def _at(side: _Side) -> str:
    shown = side.places[:3] + (["..."] if len(side.places) > 3 else [])
    return f" at {', '.join(shown)}" if shown else ""


def _bytes(side: _Side) -> str:
    return f"{float(side.sent):,.0f} bytes"
