"""What a program sends over each mesh axis, and how much of that compute hides, as bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from shardkit._arguments.typed import short, typed
from shardkit._jax.primitives import TABLE
from shardkit.analysis.hlo.collectives import CompiledRow
from shardkit.analysis.hlo.differences import Compiled
from shardkit.analysis.hlo.report import Report
from shardkit.analysis.jaxpr.census import Census, CensusRow
from shardkit.viz.bars import Bar, Scale, duration, size, stacked
from shardkit.viz.style import file_of, look, saved

# Each has one look in all pictures.
TIMES = ("compute", "hidden", "exposed")


@partial(typed, where="viz.census")
def census(census: Any, *, output: str | Path | None = None) -> Any:
    """The picture of a census: the bytes that one device sends per step over each mesh axis, by collective.

    Args:
        census: of `sk.census`, or a report of `aot.compile`, or what `analysis.compiled` returned; several of them by
            name are drawn one below the other.
        output: a .png or .svg to write; missing directories are created. The same census gives the same bytes.

    Returns:
        A matplotlib figure, which notebooks show. The gid of a bar is its axes and its collective, as in
        "data=8, all_reduce".

    Raises:
        TypeError: something else than a census.
        ValueError: another kind of file.
        RuntimeError: matplotlib is not installed.

    Example:
        >>> f = jax.shard_map(lambda x: sk.all_reduce(x, "model"), mesh=mesh, in_specs=P(None, "model"), out_specs=P())
        >>> picture = sk.viz.census(sk.census(f, jnp.ones((8, 4))))
    """
    path = file_of("viz.census", output)
    several = rows_of(census)
    bars, times = traffic(several), counts(several)
    with look():
        picture = stacked(
            "bytes sent over each axis",
            totals(several),
            bars,
            list(dict.fromkeys(row.kind for row in TABLE.values() if row.kind)),
            Scale("bytes that one device sends per step", lambda label, total: f"{size(total)}, {times[label]} x"),
            nothing="no collectives",
        )
        return saved(picture, path)


@partial(typed, where="viz.overlap")
def overlap(report: Any, *, output: str | Path | None = None) -> Any:
    """The picture of how a compiled program's collectives overlap with its compute, as the compiler scheduled it.

    A bar has the seconds of compute, and one for each axes those of the collectives over them: what compute hides, and
    what is exposed, for which compute waits. The times are those of the report's model, which are lower bounds.

    Args:
        report: of `aot.compile`; several of them by name are drawn one below the other.
        output: a .png or .svg to write; missing directories are created. The same report gives the same bytes.

    Returns:
        A matplotlib figure, which notebooks show. The gid of a bar is its label and its kind, as in
        "data=8, exposed".

    Raises:
        TypeError: something else than a report.
        ValueError: a program that the compiler refused, of which there are no times; another kind of file.
        RuntimeError: matplotlib is not installed.

    Example:
        report = sk.aot.compile(step, args, topology="v5e:2x4")
        sk.viz.overlap(report, output="overlap.svg")
    """
    path = file_of("viz.overlap", output)
    several = report if isinstance(report, Mapping) else {"": report}

    def ticks(axis: Any, most: float) -> None:
        axis.set_major_formatter(lambda x, _: duration(x) if x else "0")

    bars = [bar for name, each in several.items() for bar in spent(str(name), each)]
    note = "; ".join(": ".join(filter(None, [str(name), exposed(each)])) for name, each in several.items())
    with look():
        picture = stacked(
            "overlap of collectives with compute",
            note,
            bars,
            TIMES,
            Scale("seconds of one step, by the model", lambda label, total: duration(total), ticks),
            nothing="neither compute nor collectives",
        )
        return saved(picture, path)


def spent(name: str, report: Any) -> list[Bar]:
    """A bar of compute, and for each axes one of what is hidden and what is exposed; refuses anything else."""
    if not isinstance(report, Report):
        raise TypeError(
            f"viz.overlap: report must be a report of aot.compile, or a mapping of names to them; got {short(report)}. "
            "Pass sk.aot.compile(step, args, topology='v5e:2x4')."
        )
    if report.memory is None:
        raise ValueError(
            f"viz.overlap: the program must be compiled; got a report of one that does not fit {report.topology}, of "
            "which there are no times. Pass a report with fits=True."
        )
    bars = [Bar(": ".join(filter(None, [name, "compute"])), "compute", report.compute.seconds)]
    for row in sorted(report.rows, key=lambda row: row.axes):
        bars.append(Bar(_label(name, row), "hidden", (row.seconds - row.exposed) * row.times))
        bars.append(Bar(_label(name, row), "exposed", row.exposed * row.times))
    return bars


def exposed(report: Report) -> str:
    """How long a step takes, and how long it waits for collectives, in words."""
    waits = f"exposed {duration(report.exposed_seconds)} of {duration(report.wire_seconds)} of collectives"
    return f"{duration(report.compute.seconds + report.exposed_seconds)}, {waits if report.rows else 'no collectives'}"


def rows_of(given: Any) -> dict[str, tuple[CensusRow | CompiledRow, ...]]:
    """The rows of one census, or of several by name; refuses anything else."""
    several = given if isinstance(given, Mapping) else {"": given}
    for each in several.values():
        if not isinstance(each, Census | Report | Compiled):
            raise TypeError(
                f"viz.census: census must be a census, a report or a mapping of names to them; got {short(each)}. Pass "
                "sk.census(step, state, batch)."
            )
    return {str(name): each.rows for name, each in several.items()}


def traffic(several: Mapping[str, Sequence[CensusRow | CompiledRow]]) -> tuple[Bar, ...]:
    """A bar per name, axes and kind of collective, in bytes; the axes in the order of their names."""
    out: dict[tuple[str, str], float] = {}
    for name, rows in several.items():
        for row in sorted(rows, key=lambda row: row.axes):
            key = (_label(name, row), row.kind)
            out[key] = out.get(key, 0.0) + float(row.total)
    return tuple(Bar(label, kind, value) for (label, kind), value in out.items())


def counts(several: Mapping[str, Sequence[CensusRow | CompiledRow]]) -> dict[str, int]:
    """The collectives of each name and axes, by the label of their bars."""
    out: dict[str, int] = {}
    for name, rows in several.items():
        for row in rows:
            out[_label(name, row)] = out.get(_label(name, row), 0) + row.times
    return out


def totals(several: Mapping[str, Sequence[CensusRow | CompiledRow]]) -> str:
    """What each sends in all, as a line of notes."""
    sent = {name: size(float(sum(row.total for row in rows))) for name, rows in several.items()}
    note = "per device and step: " + "; ".join(f"{name} {total}" if name else total for name, total in sent.items())
    unknown = any(row.count is None for rows in several.values() for row in rows)
    return note + "; a loop of unknown length counts once" * unknown


def _label(name: str, row: CensusRow | CompiledRow) -> str:
    return ": ".join(filter(None, [name, f"{','.join(row.axes)}={row.n}"]))
