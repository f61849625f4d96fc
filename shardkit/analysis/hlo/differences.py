"""How compiled collectives differ from the written ones: added, merged, dropped, changed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Set
from fractions import Fraction
from typing import Any, NamedTuple

from shardkit._arguments.checks import quote
from shardkit._jax.primitives import registered
from shardkit.analysis.hlo import proto
from shardkit.analysis.hlo.collectives import CompiledRow, collectives_of
from shardkit.analysis.hlo.memory import Memory, memory_of
from shardkit.analysis.hlo.saved import save
from shardkit.analysis.jaxpr.census import Census, CensusRow, census_of, mesh_sizes, traceable
from shardkit.analysis.jaxpr.foreign import CALLS
from shardkit.meshes.layout import table


class Compiled(NamedTuple):
    """A program as written and as compiled.

    Attributes:
        census: every collective as written.
        rows: every collective of the compiled program.
        memory: what it needs per device.
        program: the `jax.stages.Compiled`; None where the report was read.
        ends: of a train step, what it does after the program.
    """

    census: Census
    rows: tuple[CompiledRow, ...]
    memory: Memory
    program: Any = None
    ends: dict[str, bool] | None = None

    def differences(self) -> list[str]:
        """What the compiler changed, one line each."""
        return account(self.census, self.rows)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the program to a file, which `aot.load` runs in another process without compiling.

        Args:
            path: the file, which you alone can write to: what it holds is executed.

        Raises:
            ValueError: a program that calls back to Python.

        Example:
            sk.analysis.compiled(step, state, batch).save("step.program")
        """
        assert self.program is not None, "of a program that was compiled here"
        save(self.program, path, self.ends)

    def __str__(self) -> str:
        collectives = "no collectives"
        if self.rows:
            collectives = _format_rows(self.rows)
        return "\n".join([collectives, describe_differences(self.differences())])


_HEADS = ("kind", "axes", "times", "bytes in", "sent/device", "runs", "source")


def _format_rows(rows: tuple[CompiledRow, ...]) -> str:
    """A table of collectives, a line for those that are alike in all that it shows."""
    lines = [_HEADS]
    for group in group_alike(rows):
        lines.append(_make_line(group))
    return table(lines)


def _make_line(rows: list[CompiledRow]) -> tuple[str, str, str, str, str, str, str]:
    """The cells of collectives that are alike, under the heads."""
    first = rows[0]
    sent = sum((row.total for row in rows), Fraction(0))
    runs = "synchronous"
    if first.asynchronous:
        runs = "overlapped"
    return (
        first.kind,
        f"{','.join(first.axes)}={first.n}",
        format_times(rows),
        f"{first.bytes_in:,}",
        f"{int(sent):,}",
        runs,
        format_place(first),
    )


def format_times(rows: list[CompiledRow]) -> str:
    """How often collectives run that are alike: "12", and "12?" in a loop whose length is not in the program."""
    times = sum(row.times for row in rows)
    if rows[0].count is None:
        return f"{times}?"
    return str(times)


def format_place(row: CompiledRow) -> str:
    """The line of a collective, with the branch that it is in: "model.py:12 (layer) [branch 1 of 2]"."""
    if not row.branch:
        return row.place
    return f"{row.place} [{row.branch}]"


def compiled(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Compiled:
    """Compiles one call of `fn` for the devices of this process and reads its collectives.

    Args:
        fn: a jitted function, a train step, or any function that jax can trace.
        *args: its arguments; `jax.ShapeDtypeStruct` with shardings is enough.
        **kwargs: its keyword arguments.

    Returns:
        Compiled: the collectives as written and as compiled, the differences, and the memory; `.save(path)` keeps the
        program. Nothing runs.

    Example:
        >>> f = jax.shard_map(lambda x: sk.all_reduce(x, "model"), mesh=mesh, in_specs=P(None, "model"), out_specs=P())
        >>> found = sk.analysis.compiled(f, jnp.ones((8, 4)))
        >>> found.rows[0].kind, found.rows[0].axes, found.differences()
        ('all_reduce', ('model',), [])
    """
    traced = traceable(fn).trace(*args, **kwargs)
    program = read_compiled(traced, traced.lower().compile(), args, kwargs)
    return program._replace(ends=getattr(fn, "ends", None))


def read_compiled(traced: Any, program: Any, args: Any = (), kwargs: Any = None) -> Compiled:
    """The collectives of a program that is traced and compiled already (`jax.stages.Traced`, `Compiled`)."""
    executable = program.runtime_executable()
    module = executable.hlo_modules()[0]
    sizes = mesh_sizes(traced.jaxpr.jaxpr, (args, kwargs))
    rows = collectives_of(proto.read(module.as_serialized_hlo_module_proto()), sizes)
    return Compiled(census_of(traced.jaxpr.jaxpr), rows, memory_of(executable), program)


def group_alike(rows: tuple[CompiledRow, ...]) -> list[list[CompiledRow]]:
    """Rows that differ in nothing that is shown, together: the gathers of twelve unrolled layers are one line."""
    groups: dict[tuple[Any, ...], list[CompiledRow]] = {}
    for row in rows:
        is_unknown = row.count is None
        key = (row.kind, row.axes, row.arrays, row.bytes_in, row.asynchronous, row.source, row.branch, is_unknown)
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def describe_differences(differences: list[str]) -> str:
    """The compiler's changes as a paragraph."""
    if not differences:
        return "as written"
    lines = ["what the compiler changed:"]
    for difference in differences:
        lines.append(f"- {difference}")
    return "\n".join(lines)


def bytes_added_by_compiler(program: Compiled) -> Fraction:
    """Bytes sent per device by collectives that only the compiler added."""
    added = Fraction(0)
    for row in program.rows:
        if row.n > 1 and not is_written(row):
            added += row.total
    return added


def is_written(row: CompiledRow) -> bool:
    """Whether a compiled collective comes from a written one; one that the compiler adds has another operation's name.

    For example "jit(step)/shard_map/all_gather" is written, and "jit(step)/optax/mul" the compiler's own. One that is
    merged of collectives under different scopes has the names of all, "shard_map/(loss/psum:psum)".
    """
    # The last operation: "shard_map/(loss/psum:psum)" ends with psum.
    operations = re.split("[/:(]", row.op_name.rstrip(")"))
    return registered(operations[-1]).kind is not None


class CompilerChange(NamedTuple):
    """One change by the compiler: a line, the kind, whether more bytes are sent, and whether it is its own addition."""

    line: str
    kind: str
    more: bool
    added: bool = False


def account(census: Census, rows: Iterable[CompiledRow]) -> list[str]:
    """What the compiler changed, one line each; empty when the compiled program communicates as written."""
    return [change.line for change in changes(census, rows)]


def changes(census: Census, rows: Iterable[CompiledRow]) -> list[CompilerChange]:
    """What the compiler changed. Collectives over axes of one device send nothing and are left out.

    A foreign call is compiled as it is, and its bytes stand nowhere in the program: it is left out too.
    """
    census_rows = []
    for row in census.rows:
        if row.n > 1 and row.primitive not in CALLS:
            census_rows.append(row)
    compiled_rows = [row for row in rows if row.n > 1]
    before, after, added = _tally(census_rows, compiled_rows)
    # Before all others: a reduce_scatter that runs as a sum would be one that is missing, and a sum that is new.
    differences, after = _find_scatters_run_as_sums(before, after)
    for key in sorted(before.keys() | after.keys()):
        kind, _ = key
        old = before.get(key, _NOTHING)
        new = after.get(key, _NOTHING)
        if not _are_equal(old, new):
            line = _describe_change(_describe_key(key), old, new)
            differences.append(CompilerChange(line, kind, more=new.sent > old.sent))
    for key, traffic in sorted(added.items()):
        kind, _ = key
        line = f"added: {traffic.times} x {_describe_key(key)}, {traffic.bytes}{traffic.at}"
        differences.append(CompilerChange(line, kind, more=True, added=True))
    return differences


def _are_equal(before: _Traffic, after: _Traffic) -> bool:
    """Whether as much is sent as written.

    The compiler may know a trip count that the trace does not: then it is as many bytes each time, and more times.
    """
    if (before.times, before.sent) == (after.times, after.sent):
        return True
    # before.sent / before.times == after.sent / after.times, without a division by 0.
    same_bytes_each_time = before.sent * after.times == after.sent * before.times
    return before.unknown and after.times >= before.times and same_bytes_each_time


Key = tuple[str, tuple[str, ...]]  # a kind of collective, and its axes in alphabetical order


class _Traffic(NamedTuple):
    """The collectives of one kind over the same axes; `unknown` if a loop of unknown length, counted once, is in it."""

    times: int = 0
    sent: Fraction = Fraction(0)
    places: tuple[str, ...] = ()
    unknown: bool = False

    def plus(self, row: CensusRow | CompiledRow, place: str, unknown: bool) -> _Traffic:
        """With the collectives of one more row."""
        places = self.places
        if place and place not in places:
            places = (*places, place)
        return _Traffic(self.times + row.times, self.sent + row.total, places, self.unknown or unknown)

    @property
    def bytes(self) -> str:
        """The bytes sent, as text."""
        return _describe_bytes(self.sent)

    @property
    def at(self) -> str:
        """The places, as text: at most three."""
        if not self.places:
            return ""
        shown = list(self.places[:3])
        if len(self.places) > 3:
            shown.append("...")
        return f" at {', '.join(shown)}"


_NOTHING = _Traffic()
_Tally = dict[Key, _Traffic]


def _tally(census_rows: list[CensusRow], rows: list[CompiledRow]) -> tuple[_Tally, _Tally, _Tally]:
    """Adds up written collectives, compiled ones that come from them, and compiled ones that the compiler added.

    For example two psums over "data" are written, the compiler merges them, and gathers a sharded operand over "fsdp":

        before  all_reduce over data: 2 x, 1,000 bytes
        after   all_reduce over data: 1 x, 1,000 bytes
        added   all_gather over fsdp: 1 x, 512 bytes
    """
    before: _Tally = {}
    after: _Tally = {}
    added: _Tally = {}
    for written_row in census_rows:
        key = written_row.kind, _axes_as_compiled(written_row, rows)
        traffic = before.get(key, _NOTHING)
        before[key] = traffic.plus(written_row, written_row.source, written_row.count is None)
    # The compiler may rename an operation, but keeps its line.
    written_places = {(written_row.kind, written_row.source) for written_row in census_rows}
    for row in rows:
        axes = tuple(sorted(row.axes))
        key = row.kind, axes
        similar_is_known = _has_similar(row.kind, axes, before.keys() | after.keys())
        # The compiler drops some names, and may name a merged collective after another operation.
        is_nameless = not row.op_name and similar_is_known
        tally = added
        if is_written(row) or (row.kind, row.source) in written_places or is_nameless:
            tally = after
        tally[key] = tally.get(key, _NOTHING).plus(row, row.source or row.op_name, False)
    return before, after, added


def _has_similar(kind: str, axes: tuple[str, ...], keys: Set[Key]) -> bool:
    """Whether a compiled collective may be one of these: an all_reduce may be a reduce_scatter, run as a sum."""
    if kind == "all_reduce" and ("reduce_scatter", axes) in keys:
        return True
    return (kind, axes) in keys


def _describe_key(key: Key) -> str:
    kind, axes = key
    return f"{kind} over {quote(axes)}"


def _describe_bytes(size: Fraction) -> str:
    return f"{float(size):,.0f} bytes"


def _axes_as_compiled(written_row: CensusRow, rows: Iterable[CompiledRow]) -> tuple[str, ...]:
    """The axes of a written collective under which it stands among the compiled.

    A group does not show axes of one device, nor the pairs of a permute an axis along which they stay: fewer axes with
    as many devices are the same axes. For example a psum over ("data", "model") with model=1 is compiled as one over
    "data".
    """
    if written_row.kind == "ppermute":
        return tuple(sorted(written_row.along))
    # False sorts before True, and `sorted` keeps the order of equals.
    same_size_first = sorted(rows, key=lambda row: row.bytes_in != written_row.bytes_in)
    for row in same_size_first:
        is_alike = row.kind == written_row.kind and row.n == written_row.n
        has_fewer_axes = set(row.axes) < set(written_row.axes)
        if is_alike and row.n > 1 and has_fewer_axes:
            return tuple(sorted(row.axes))
    return tuple(sorted(written_row.axes))


def _find_scatters_run_as_sums(before: _Tally, after: _Tally) -> tuple[list[CompilerChange], _Tally]:
    """Names the reduce_scatters that run as an all_reduce and a slice of it, and restores them among the compiled.

    For example one reduce_scatter of 768 bytes is written, and one all_reduce of 1,536 is compiled: an all_reduce sends
    twice what a reduce_scatter does.
    """
    changes_of_scatters = []
    restored = dict(after)
    for key in sorted(before):
        kind, axes = key
        if kind != "reduce_scatter":
            continue
        scatters = before[key]
        compiled_scatters = after.get(key, _NOTHING)
        missing_times = scatters.times - compiled_scatters.times
        missing_bytes = scatters.sent - compiled_scatters.sent
        sum_key = ("all_reduce", axes)
        if missing_times <= 0 or sum_key not in before | after:
            continue
        sums = before.get(sum_key, _NOTHING)
        compiled_sums = after.get(sum_key, _NOTHING)
        # The compiled sums may send up to a tenth less, where they were merged with others.
        more_in_sums = compiled_sums.sent - sums.sent
        # Of the 768 bytes above: 1,383 more in the sums are enough.
        if more_in_sums < 2 * missing_bytes * Fraction(9, 10):
            continue
        sent = _describe_bytes(2 * missing_bytes)
        written = f"{float(missing_bytes):,.0f}"
        line = f"run as all_reduce: {missing_times} x {_describe_key(key)}, {sent} instead of {written}{scatters.at}"
        changes_of_scatters.append(CompilerChange(line, "reduce_scatter", more=True))
        restored[key] = compiled_scatters._replace(times=scatters.times, sent=scatters.sent)
        # What is left are the sums that are written. At least one of them, for they may have been merged.
        sum_times = max(compiled_sums.times - missing_times, min(1, sums.times))
        sum_bytes = max(compiled_sums.sent - 2 * missing_bytes, sums.sent)
        restored[sum_key] = compiled_sums._replace(times=sum_times, sent=sum_bytes)
    return changes_of_scatters, restored


def _describe_change(what: str, before: _Traffic, after: _Traffic) -> str:
    """Describes how the collectives of one kind over the same axes changed."""
    missing = before.times - after.times
    if before.sent == after.sent:
        word = "split"
        if missing > 0:
            word = "merged"
        return f"{word}: {before.times} x {what} run as {after.times}, {after.bytes} as written"
    if missing > 0 and before.sent * after.times == after.sent * before.times:
        dropped = _describe_bytes(before.sent - after.sent)
        return f"dropped: {missing} of {before.times} x {what}, {dropped}{before.at}"
    if not before.times:
        return f"became {what}: {after.times} x, {after.bytes}{after.at}"
    return (
        f"changed: {what}, {before.times} x of {before.bytes} in all as written, {after.times} x of {after.bytes} as "
        "compiled"
    )
