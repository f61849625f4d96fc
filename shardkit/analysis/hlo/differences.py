"""What the compiler did to the collectives as written: added, merged, dropped, changed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any, NamedTuple

from shardkit._arguments.checks import quoted
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
                    first.place + (f" [{first.branch}]" if first.branch else ""),
                )
            )
        return "\n".join([table(lines) if self.rows else "no collectives", changed(self.differences())])


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
    return read_compiled(traced, traced.lower().compile(), args, kwargs)._replace(ends=getattr(fn, "ends", None))


def read_compiled(traced: Any, program: Any, args: Any = (), kwargs: Any = None) -> Compiled:
    """The collectives of a program that is traced and compiled already (`jax.stages.Traced`, `Compiled`)."""
    executable = program.runtime_executable()
    module = executable.hlo_modules()[0]
    sizes = mesh_sizes(traced.jaxpr.jaxpr, (args, kwargs))
    rows = collectives_of(proto.read(module.as_serialized_hlo_module_proto()), sizes)
    return Compiled(census_of(traced.jaxpr.jaxpr), rows, memory_of(executable), program)


def grouped(rows: tuple[CompiledRow, ...]) -> list[list[CompiledRow]]:
    """Rows that differ in nothing that is shown, together."""
    groups: dict[tuple[Any, ...], list[CompiledRow]] = {}
    for r in rows:
        key = (r.kind, r.axes, r.arrays, r.bytes_in, r.asynchronous, r.source, r.branch, r.count is None)
        groups.setdefault(key, []).append(r)
    return list(groups.values())


def changed(differences: list[str]) -> str:
    """What the compiler changed, in a paragraph."""
    return "what the compiler changed:\n" + "\n".join(f"- {c}" for c in differences) if differences else "as written"


def added_by_compiler(found: Compiled) -> Fraction:
    """Bytes sent per device by collectives that only the compiler added."""
    return sum((row.total for row in found.rows if row.n > 1 and not written(row)), Fraction(0))


def written(row: CompiledRow) -> bool:
    """Whether a compiled collective comes from a written one; those that it adds carry another operation's name.

    One merged of several under different scopes has the names of all, `shard_map/(loss/psum:psum)`.
    """
    return registered(re.split("[/:(]", row.op_name.rstrip(")"))[-1]).kind is not None


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
    own = [r for r in census.rows if r.n > 1 and r.primitive not in CALLS]
    before, after, added = _tallies(own, [r for r in rows if r.n > 1])
    found, after = _run_as_all_reduce(before, after)
    for key in sorted(before.keys() | after.keys()):
        one, other = before.get(key, _NOTHING), after.get(key, _NOTHING)
        # The compiler may know a trip count that the trace does not.
        counted = one.unknown and other.times >= one.times and one.sent * other.times == other.sent * one.times
        if (one.times, one.sent) != (other.times, other.sent) and not counted:
            found.append(CompilerChange(_rewritten(_what(key), one, other), key[0], other.sent > one.sent))
    for key, each in sorted(added.items()):
        line = f"added: {each.times} x {_what(key)}, {each.bytes}{each.at}"
        found.append(CompilerChange(line, key[0], more=True, added=True))
    return found


Key = tuple[str, tuple[str, ...]]  # a kind of collective, and its axes in alphabetical order


class _Traffic(NamedTuple):
    """The collectives of one kind over the same axes; `unknown` if a loop of unknown length, counted once, is in it."""

    times: int = 0
    sent: Fraction = Fraction(0)
    places: tuple[str, ...] = ()
    unknown: bool = False

    def plus(self, row: CensusRow | CompiledRow, place: str, unknown: bool) -> _Traffic:
        """With the collectives of one more row."""
        new = (place,) if place and place not in self.places else ()
        return _Traffic(self.times + row.times, self.sent + row.total, self.places + new, self.unknown or unknown)

    @property
    def bytes(self) -> str:
        """What is sent, in words."""
        return f"{float(self.sent):,.0f} bytes"

    @property
    def at(self) -> str:
        """The places, in words."""
        shown = [*self.places[:3], *(["..."] if len(self.places) > 3 else [])]
        return f" at {', '.join(shown)}" if shown else ""


_NOTHING = _Traffic()
_Tally = dict[Key, _Traffic]


def _tallies(wanted: list[CensusRow], rows: list[CompiledRow]) -> tuple[_Tally, _Tally, _Tally]:
    """The collectives as written, those of them in the compiled program, and those that the compiler added."""
    before: _Tally = {}
    after: _Tally = {}
    added: _Tally = {}
    for row in wanted:
        key = row.kind, _moved(row, rows)
        before[key] = before.get(key, _NOTHING).plus(row, row.source, row.count is None)
    places = {(row.kind, row.source) for row in wanted}
    for each in rows:
        key = each.kind, tuple(sorted(each.axes))
        # The compiler drops some names, and gives what it merges that of another operation.
        kin = {key, ("reduce_scatter", key[1])} if each.kind == "all_reduce" else {key}
        nameless = not each.op_name and bool(kin & (before.keys() | after.keys()))
        side = after if written(each) or (each.kind, each.source) in places or nameless else added
        side[key] = side.get(key, _NOTHING).plus(each, each.source or each.op_name, False)
    return before, after, added


def _what(key: Key) -> str:
    return f"{key[0]} over {quoted(key[1])}"


def _moved(row: CensusRow, rows: Iterable[CompiledRow]) -> tuple[str, ...]:
    """The axes of a written collective under which it is found among the compiled.

    A group does not show axes of one device, nor the pairs of a permute an axis along which they stay: fewer axes with
    as many devices are the same axes.
    """
    if row.kind == "ppermute":
        return tuple(sorted(row.along))
    for each in sorted(rows, key=lambda each: each.bytes_in != row.bytes_in):
        if each.kind == row.kind and each.n == row.n > 1 and set(each.axes) < set(row.axes):
            return tuple(sorted(each.axes))
    return tuple(sorted(row.axes))


def _run_as_all_reduce(before: _Tally, after: _Tally) -> tuple[list[CompilerChange], _Tally]:
    """Names the reduce_scatters that run as an all_reduce and a slice of it, and restores them among the compiled."""
    found, restored = [], dict(after)
    for key in sorted(key for key in before if key[0] == "reduce_scatter"):
        wanted, run = before[key], after.get(key, _NOTHING)
        lost, missing = wanted.times - run.times, wanted.sent - run.sent
        summed = "all_reduce", key[1]
        own, sums = before.get(summed, _NOTHING), after.get(summed, _NOTHING)
        if summed in before | after and lost > 0 and sums.sent - own.sent >= 2 * missing * Fraction(9, 10):
            line = f"run as all_reduce: {lost} x {_what(key)}, {float(2 * missing):,.0f} bytes instead of"
            found.append(CompilerChange(f"{line} {float(missing):,.0f}{wanted.at}", key[0], True))
            restored[key] = run._replace(times=wanted.times, sent=wanted.sent)
            times = max(sums.times - lost, min(1, own.times))  # they may have been merged
            rest = max(sums.sent - 2 * missing, own.sent)  # the sums may have sent up to a tenth less
            restored[summed] = sums._replace(times=times, sent=rest)
    return found, restored


def _rewritten(what: str, before: _Traffic, after: _Traffic) -> str:
    """What the compiler did to the collectives of one kind over the same axes."""
    lost = before.times - after.times
    if before.sent == after.sent:
        word = "merged" if after.times < before.times else "split"
        return f"{word}: {before.times} x {what} run as {after.times}, {after.bytes} as written"
    if lost > 0 and before.sent * after.times == after.sent * before.times:
        return f"dropped: {lost} of {before.times} x {what}, {float(before.sent - after.sent):,.0f} bytes{before.at}"
    if not before.times:
        return f"became {what}: {after.times} x, {after.bytes}{after.at}"
    return (
        f"changed: {what}, {before.times} x of {before.bytes} in all as written, {after.times} x of {after.bytes} as "
        "compiled"
    )
