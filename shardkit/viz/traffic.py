"""What a program sends over each mesh axis, as bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from shardkit._kinds import short
from shardkit._typed import typed
from shardkit.analysis.hlo.collectives import CompiledRow
from shardkit.analysis.hlo.differences import Compiled
from shardkit.analysis.hlo.report import Report
from shardkit.analysis.jaxpr.census import Census, Row
from shardkit.viz.bars import Bar, size, stacked
from shardkit.viz.style import file_of, look, saved

# Each has one look in all pictures.
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "ppermute", "broadcast")


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
            COLLECTIVES,
            across="bytes that one device sends per step",
            nothing="no collectives",
            text=lambda label, total: f"{size(total)}, {times[label]} x",
        )
        return saved(picture, path)


def rows_of(given: Any) -> dict[str, tuple[Row | CompiledRow, ...]]:
    """The rows of one census, or of several by name; refuses anything else."""
    several = given if isinstance(given, Mapping) else {"": given}
    for each in several.values():
        if not isinstance(each, Census | Report | Compiled):
            raise TypeError(
                f"viz.census: census must be a census, a report or a mapping of names to them; got {short(each)}. Pass "
                "sk.census(step, state, batch)."
            )
    return {str(name): each.rows for name, each in several.items()}


def traffic(several: Mapping[str, Sequence[Row | CompiledRow]]) -> tuple[Bar, ...]:
    """A bar per name, axes and kind of collective, in bytes; the axes in the order of their names."""
    out: dict[tuple[str, str], float] = {}
    for name, rows in several.items():
        for row in sorted(rows, key=lambda row: row.axes):
            key = (_label(name, row), row.kind)
            out[key] = out.get(key, 0.0) + float(row.total)
    return tuple(Bar(label, kind, value) for (label, kind), value in out.items())


def counts(several: Mapping[str, Sequence[Row | CompiledRow]]) -> dict[str, int]:
    """The collectives of each name and axes, by the label of their bars."""
    out: dict[str, int] = {}
    for name, rows in several.items():
        for row in rows:
            out[_label(name, row)] = out.get(_label(name, row), 0) + row.times
    return out


def totals(several: Mapping[str, Sequence[Row | CompiledRow]]) -> str:
    """What each sends in all, as a line of notes."""
    sent = {name: size(float(sum(row.total for row in rows))) for name, rows in several.items()}
    note = "per device and step: " + "; ".join(f"{name} {total}" if name else total for name, total in sent.items())
    unknown = any(row.count is None for rows in several.values() for row in rows)
    return note + "; a loop of unknown length counts once" * unknown


def _label(name: str, row: Row | CompiledRow) -> str:
    return ": ".join(filter(None, [name, f"{','.join(row.axes)}={row.n}"]))
