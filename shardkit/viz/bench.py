"""Results of `shardkit bench` as pictures: bandwidth and latency against size, and ratios."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shardkit._arguments.checks import quoted
from shardkit._arguments.typed import typed
from shardkit.viz.bars import Bar, Line, size
from shardkit.viz.style import MUTED, SMALL, blank, file_of, filled, look, saved, stroked

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Record = Mapping[str, Any]

_SMALL = 64 * 1024  # bytes up to which a time is mostly latency
_KEYS_OF_LINES = ("impl", "dtype", "redop", "axes")  # named where they differ within an operation
_MANY = 10  # lines in one plot, above which each operation has a row of its own
# Title, unit and key of each plot, the largest size in it, and where it has a line.
_PLOTS = (
    ("bus bandwidth", "GB/s", "busbw_GBps", math.inf, None),
    ("latency", "us", "wall_us_median", _SMALL, None),
    ("achieved over expected by the alpha-beta fit", "share", "of_fit", math.inf, 1.0),
    ("achieved over expected by the chip", "share", "of_chip", math.inf, 1.0),
)
# Inches.
_WIDE, _TALL, _LEFT, _TOP, _UNDER, _LABELS, _KEYS = 3.6, 2.7, 0.85, 0.55, 0.55, 2.6, 2.4
_BAR, _EDGE = 0.2, 0.15


@partial(typed, where="viz.results")
def results(records: Sequence[Mapping[str, Any]], output: str | Path | None = None) -> Any:
    """The picture of results of `shardkit bench`: what each benchmark is read by.

    | benchmark | plots |
    |---|---|
    | comm | bus bandwidth against size, time against small sizes, achieved over expected; a line per op and impl |
    | others | ratios to the baseline, a bar per case |

    Colors are safe for color blindness, and markers and hatches tell the same in black and white. Values that are
    missing or not positive are left out; of a case that stands several times, the last is drawn.

    Args:
        records: of `bench.read`, of one benchmark or of several.
        output: a .png or .svg to write; missing directories are created. The same records give the same bytes.

    Returns:
        A matplotlib figure, which notebooks show. The gid of a line is its name, of a bar its label and its kind.

    Raises:
        ValueError: nothing to draw; another kind of file.
        RuntimeError: matplotlib is not installed.

    Example:
        >>> times = {"cpu_ratio_median": 1.2, "wall_ratio_median": 1.1}
        >>> picture = sk.viz.results([{"benchmark": "steps", "row": "8 devices", "case": "fsdp", **times}])
    """
    path = file_of("viz.results", output)
    rows = panels(records)
    if not rows:
        found = quoted(sorted({str(record.get("benchmark")) for record in records})) or "none"
        raise ValueError(
            f"viz.results: the records must have sizes with times, or ratios; got benchmarks {found} without any. Pass "
            "the results of a measurement, as --json writes them."
        )
    with look():
        return saved(_drawn(rows), path)


class Panel(NamedTuple):
    """A plot of lines, with logarithmic axes, or of horizontal bars, with a line at 1."""

    title: str
    across: str
    up: str = ""
    lines: tuple[Line, ...] = ()
    bars: tuple[Bar, ...] = ()
    level: float | None = None


def panels(records: Iterable[Record]) -> list[list[Panel]]:
    """The plots of some records, in rows; plots without values are left out."""
    benchmarks: dict[str, list[Record]] = {}
    for record in records:
        benchmarks.setdefault(str(record.get("benchmark")), []).append(record)
    rows = []
    for own in benchmarks.values():
        rows += _comm(own) if any("busbw_GBps" in record for record in own) else _ratios(own)
    kept = [[panel for panel in row if panel.bars or any(line.points for line in panel.lines)] for row in rows]
    return [row for row in kept if row]


def _number(record: Record, key: str) -> float | None:
    """A value that can be drawn, or None."""
    value = record.get(key)
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    return float(value) if usable else None  # type: ignore[arg-type]


def _line(name: str, records: Iterable[Record], key: str, most: float) -> Line:
    """The values of a key against sizes, up to the largest to draw."""
    points = ((_number(each, "size"), _number(each, key)) for each in records)
    found = {size: value for size, value in points if size and value and size <= most}
    return Line(name, tuple(sorted(found.items())))


def _comm(records: list[Record]) -> list[list[Panel]]:
    ops = len({str(r.get("op")) for r in records})
    keys = ["op"] * (ops > 1)
    for key in _KEYS_OF_LINES:
        keys += [key] * (len({(str(r.get("op")), str(r.get(key))) for r in records}) > ops)
    series: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        named = tuple(str(record.get(key)) for key in keys or ["op"])
        series.setdefault(named, []).append(record)
    groups = {"": series}
    if len(series) > _MANY and "op" in keys:
        groups = {}
        for named, own in series.items():
            groups.setdefault(named[0], {})[named[1:]] = own
    out = []
    for op, inside in groups.items():
        row = []
        for title, up, key, most, level in _PLOTS:
            lines = tuple(_line(" ".join(named), own, key, most) for named, own in inside.items())
            row.append(Panel(f"{op}: {title}" if op else title, "size", up, lines, level=level))
        out.append(row)
    return out


def _ratios(records: list[Record]) -> list[list[Panel]]:
    out = []
    for place in dict.fromkeys((str(r.get("row")), str(r.get("mode", ""))) for r in records):
        own = [r for r in records if (str(r.get("row")), str(r.get("mode", ""))) == place]
        over = next((f", over {r['baseline']}" for r in own if r.get("baseline")), "")
        last, bars = {str(r.get("case")): r for r in own}, []
        for case, record in last.items():
            for clock, kind in (("cpu", "CPU time"), ("wall", "wall time")):
                value = _number(record, f"{clock}_ratio")  # as tables print it; older records have the median alone
                value = _number(record, f"{clock}_ratio_median") if value is None else value
                if value is not None:
                    bars.append(Bar(case, kind, value))
        out.append([Panel(f"{place[0]}{over}", "ratio", bars=tuple(bars), level=1.0)])
    return out


def _drawn(rows: list[list[Panel]]) -> Figure:
    """The rows of plots, one below the other; lines of a row have their names at its right, bars theirs at the left."""
    heights = [max(max(_TALL if p.lines else 0.0, _BAR * (len(p.bars) + 1)) for p in row) for row in rows]
    before = [_LABELS if any(panel.bars for panel in row) else _LEFT for row in rows]
    wide = [len(row) * (_WIDE + b) for row, b in zip(rows, before, strict=True)]
    keyed = [_KEYS * any(panel.lines for panel in row) for row in rows]
    across = max(w + k for w, k in zip(wide, keyed, strict=True)) + 2 * _EDGE
    up = sum(_TOP + height + _UNDER for height in heights) + _EDGE
    picture, top = blank(across, up), _EDGE
    for row, height, labels in zip(rows, heights, before, strict=True):
        names = list(dict.fromkeys(line.name for panel in row for line in panel.lines))
        for column, panel in enumerate(row):
            left = _EDGE + column * (labels + _WIDE) + labels
            bottom = up - top - _TOP - height
            axes = picture.add_axes((left / across, bottom / up, _WIDE / across, height / up))
            axes.set_title(panel.title, pad=16 if panel.bars else 6)
            axes.set_xlabel(panel.across)
            axes.set_ylabel(panel.up)
            if panel.bars:
                _draw_bars(axes, panel)
            else:
                _draw_lines(axes, panel, names, column == len(row) - 1)
        top += _TOP + height + _UNDER
    return picture


def _draw_lines(axes: Axes, panel: Panel, names: list[str], last: bool) -> None:
    from matplotlib.lines import Line2D

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.grid()
    axes.xaxis.set_major_formatter(lambda x, _: size(x))
    if panel.level is not None:
        axes.axhline(panel.level, color=MUTED, linewidth=0.8)
    for line in filter(lambda line: line.points, panel.lines):
        axes.plot(*zip(*line.points, strict=True), label=line.name, gid=line.name, **stroked(names.index(line.name)))
    if last:  # the lines of a row have the same looks in all of its plots
        keys = [Line2D([], [], label=name, **stroked(number)) for number, name in enumerate(names)]
        axes.legend(handles=keys, loc="upper left", bbox_to_anchor=(1.02, 1), borderaxespad=0)


def _draw_bars(axes: Axes, panel: Panel) -> None:
    labels = list(dict.fromkeys(bar.label for bar in panel.bars))
    kinds = list(dict.fromkeys(bar.kind for bar in panel.bars))
    thick = 0.8 / len(kinds)
    for number, kind in enumerate(kinds):
        own = [bar for bar in panel.bars if bar.kind == kind]
        places = [labels.index(bar.label) + (number - (len(kinds) - 1) / 2) * thick for bar in own]
        drawn = axes.barh(places, [b.value for b in own], thick, label=kind, **filled(number))
        for bar, patch, place in zip(own, drawn.patches, places, strict=True):
            patch.set_gid(f"{bar.label}, {kind}")
            axes.text(bar.value, place, f" {bar.value:.2f}", size=SMALL - 1, va="center")
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.margins(x=0.12)
    axes.axvline(panel.level or 1.0, color=MUTED, linewidth=0.8)
    axes.grid(axis="x")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.1, ncols=2)
