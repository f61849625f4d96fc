"""Results of `shardkit bench` as pictures: bandwidth and latency against size, ratios, schedules, and what grows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shardkit._check import quoted
from shardkit._typed import typed
from shardkit.viz.colours import RGB, ramp
from shardkit.viz.picture import blank, file_of, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Record = Mapping[str, Any]

_SMALL = 64 * 1024  # bytes up to which a time is mostly latency
_MANY = 10  # lines in one plot, above which each operation has a row of its own
# Inches.
_WIDE, _TALL, _LEFT, _TOP, _UNDER, _LABELS, _KEYS = 3.6, 2.7, 0.85, 0.55, 0.55, 2.6, 2.4
_BAR, _EDGE = 0.2, 0.15
_MARKERS, _DASHES, _HATCHES = "os^Dv<>P*X", ("-", "--", "-.", ":"), ("", "////", "....", "xxxx", "\\\\\\\\")
_TEXT = 7.0  # points


class Line(NamedTuple):
    """A line of a plot: its name, its points, and whether it is a fit, which is drawn without markers."""

    name: str
    points: tuple[tuple[float, float], ...]
    fit: bool = False


class Bar(NamedTuple):
    """A bar: its label at the left, the kind that gives it color and hatch, and its length."""

    label: str
    kind: str
    value: float


class Panel(NamedTuple):
    """A plot of lines, with logarithmic axes, or of horizontal bars, with a line at 1."""

    title: str
    across: str
    up: str = ""
    lines: tuple[Line, ...] = ()
    bars: tuple[Bar, ...] = ()
    level: float | None = None


@partial(typed, where="viz.results")
def results(records: Sequence[Mapping[str, Any]], file: str | Path | None = None) -> Any:
    """The picture of results of `shardkit bench`: what each benchmark is read by.

    | benchmark | plots |
    |---|---|
    | comm | bus bandwidth against size, time against small sizes, achieved over expected; a line per op and impl |
    | scale | seconds and bytes against what grows, with the fitted line and its exponent |
    | schedules | simulated work beside executed CPU time, both over GPipe, a plot per number of microbatches |
    | others | ratios to the baseline, a bar per case |

    Colors are safe for color blindness, and markers and hatches tell the same in black and white. Values that are
    missing or not positive are left out; of a case that stands several times, the last is drawn.

    Args:
        records: of `bench.read`, of one benchmark or of several.
        file: a .png or .svg to write; missing directories are created. The same records give the same bytes.

    Returns:
        A matplotlib figure, which notebooks show. The gid of a line is its name, of a bar its label and its kind.

    Raises:
        ValueError: nothing to draw; another kind of file.
        RuntimeError: matplotlib is not installed.

    Example:
        >>> times = {"cpu_ratio_median": 1.2, "wall_ratio_median": 1.1}
        >>> picture = sk.viz.results([{"benchmark": "steps", "row": "8 devices", "case": "fsdp", **times}])
    """
    path = None if file is None else file_of("viz.results", file)
    rows = panels(records)
    if not rows:
        found = quoted(sorted({str(record.get("benchmark")) for record in records})) or "none"
        raise ValueError(
            f"viz.results: the records must have sizes with times, or ratios; got benchmarks {found} without any. Pass "
            "the results of a measurement, as --json writes them."
        )
    picture = _drawn(rows)
    if path is not None:
        save(picture, path)
    return picture


def panels(records: Iterable[Record]) -> list[list[Panel]]:
    """The plots of some records, in rows; plots without values are left out."""
    benchmarks: dict[str, list[Record]] = {}
    for record in records:
        benchmarks.setdefault(str(record.get("benchmark")), []).append(record)
    rows = [row for name, own in benchmarks.items() for row in _PLOTS.get(name, _ratios)(own)]
    kept = [[panel for panel in row if panel.bars or any(line.points for line in panel.lines)] for row in rows]
    return [row for row in kept if row]


def _number(record: Record, key: str) -> float | None:
    """A value that can be drawn, or None."""
    value = record.get(key)
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    return float(value) if usable else None  # type: ignore[arg-type]


def _line(name: str, records: Iterable[Record], x: str, y: Callable[[Record], float | None]) -> Line:
    points = {_number(each, x): y(each) for each in records}
    return Line(name, tuple(sorted((a, b) for a, b in points.items() if a is not None and b is not None)))


def _over(record: Record, expected: str) -> float | None:
    """The share of what is expected that a record reaches: the expected time over its own."""
    times = _number(record, expected), _number(record, "wall_us_median")
    return times[0] / times[1] if times[0] and times[1] else None


def _comm(records: list[Record]) -> list[list[Panel]]:
    keys = [key for key in ("op", "impl", "dtype", "axis") if len({str(r.get(key)) for r in records}) > 1]
    series: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        named = tuple(str(record.get(key)) for key in keys or ["op"])
        series.setdefault(named, []).append(record)
    groups = {"": series}
    if len(series) > _MANY and "op" in keys:
        groups = {}
        for named, own in series.items():
            groups.setdefault(named[0], {})[named[1:]] = own
    small = [r for r in records if (_number(r, "size_bytes") or math.inf) <= _SMALL]
    out = []
    for op, inside in groups.items():
        of = {" ".join(named): own for named, own in inside.items()}
        before = f"{op}: " if op else ""

        def lines(y: Callable[[Record], float | None], only: list[Record] = records, of: Any = of) -> tuple[Line, ...]:
            here = {id(r) for r in only}
            return tuple(_line(n, [r for r in own if id(r) in here], "size_bytes", y) for n, own in of.items())

        row = [
            Panel(f"{before}bus bandwidth", "size", "GB/s", lines(lambda r: _number(r, "busbw_gb_s"))),
            Panel(f"{before}latency", "size", "us", lines(lambda r: _number(r, "wall_us_median"), small)),
        ]
        for key, by in (("expected_us_fit", "the alpha-beta fit"), ("expected_us_chip", "the chip")):
            share = lines(lambda r, key=key: _over(r, key))  # type: ignore[misc]
            row.append(Panel(f"{before}achieved over expected by {by}", "size", "share", share, level=1.0))
        out.append(row)
    return out


def _scale(records: list[Record]) -> list[list[Panel]]:
    out = []
    for row in dict.fromkeys(str(r.get("row")) for r in records):
        own = [r for r in records if str(r.get("row")) == row]
        plots = []
        for title, up, costs in (
            (f"time against {row}", "CPU seconds", ("trace_cpu_s", "lower_cpu_s", "compile_cpu_s")),
            (f"memory against {row}", "bytes", ("compile_rss_bytes", "temp_bytes", "program_bytes")),
        ):
            lines: list[Line] = []
            for cost in costs:
                found = _line(cost.rsplit("_", 1)[0].removesuffix("_cpu"), own, "size", partial(_number, key=cost))
                lines += [found, *_fitted(found)]
            plots.append(Panel(title, row, up, tuple(lines)))
        out.append(plots)
    return out


def _fitted(line: Line) -> list[Line]:
    """The straight line through the logarithms of a line's points, by least squares."""
    logs = [(math.log(x), math.log(y)) for x, y in line.points]
    if len(logs) < 2:
        return []
    mean = [sum(values) / len(logs) for values in zip(*logs, strict=True)]
    slope = sum((x - mean[0]) * (y - mean[1]) for x, y in logs) / sum((x - mean[0]) ** 2 for x, _ in logs)
    ends = (line.points[0][0], line.points[-1][0])
    points = tuple((x, math.exp(mean[1] + slope * (math.log(x) - mean[0]))) for x in ends)
    return [Line(f"{line.name} ~ {slope:.2f}", points, fit=True)]


def _schedules(records: list[Record]) -> list[list[Panel]]:
    executed = [r for r in records if _number(r, "gpipe_work_ratio")]
    kinds = (("gpipe_work_ratio", "simulated work"), ("gpipe_cpu_ratio_median", "CPU time"))
    row = []
    for count in sorted({r.get("microbatches", 0) for r in executed}):
        bars = _bars([r for r in executed if r.get("microbatches", 0) == count], kinds)
        row.append(Panel(f"{count} microbatches, over GPipe", "ratio", bars=bars, level=1.0))
    return [row[start : start + 3] for start in range(0, len(row), 3)] or _ratios(records)


def _ratios(records: list[Record]) -> list[list[Panel]]:
    out = []
    kinds = (("cpu_ratio_median", "CPU time"), ("wall_ratio_median", "wall time"))
    for place in dict.fromkeys((str(r.get("row")), str(r.get("mode", ""))) for r in records):
        own = [r for r in records if (str(r.get("row")), str(r.get("mode", ""))) == place]
        over = next((f", over {r['baseline']}" for r in own if r.get("baseline")), "")
        out.append([Panel(f"{place[0]}{over}", "ratio", bars=_bars(own, kinds), level=1.0)])
    return out


def _bars(records: list[Record], kinds: Iterable[tuple[str, str]]) -> tuple[Bar, ...]:
    last = {str(r.get("case")): r for r in records}
    found = [(case, kind, _number(r, key)) for case, r in last.items() for key, kind in kinds]
    return tuple(Bar(case, kind, value) for case, kind, value in found if value is not None)


_PLOTS: dict[str, Callable[[list[Record]], list[list[Panel]]]] = {
    "comm": _comm,
    "scale": _scale,
    "schedules": _schedules,
}


def _drawn(rows: list[list[Panel]]) -> Figure:
    """The rows of plots, one below the other; lines of a row have their names at its right, bars theirs at the left."""
    heights = [_height(row) for row in rows]
    beside = [_LABELS if any(panel.bars for panel in row) else _LEFT for row in rows]
    ends = [_KEYS if any(panel.lines for panel in row) else _EDGE for row in rows]
    across = max(len(row) * (_WIDE + side) + end for row, side, end in zip(rows, beside, ends, strict=True)) + _EDGE
    up = sum(_TOP + height + _UNDER for height in heights) + _EDGE
    picture, top = blank(across, up), _EDGE
    for row, height, side in zip(rows, heights, beside, strict=True):
        names = list(dict.fromkeys(line.name for panel in row for line in panel.lines if not line.fit))
        for column, panel in enumerate(row):
            left, bottom = _EDGE + column * (_WIDE + side) + side, up - top - _TOP - height
            axes = picture.add_axes((left / across, bottom / up, _WIDE / across, height / up))
            axes.set_title(panel.title, size=_TEXT + 1.5, weight="bold", loc="left", pad=16 if panel.bars else 6)
            axes.set_xlabel(panel.across, size=_TEXT)
            axes.set_ylabel(panel.up, size=_TEXT)
            axes.tick_params(labelsize=_TEXT, which="both")
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_axisbelow(True)
            if panel.bars:
                _draw_bars(axes, panel)
            else:
                _draw_lines(axes, panel, names, column == len(row) - 1)
        top += _TOP + height + _UNDER
    return picture


def _height(row: list[Panel]) -> float:
    return max(max(_TALL if panel.lines else 0.0, _BAR * (len(panel.bars) + 1)) for panel in row)


def _style(names: list[str], name: str, fit: bool = False) -> dict[str, Any]:
    """The look of a line; the lightest color of the ramp is too light for one."""
    number = names.index(name)
    colour: RGB = ramp(number, len(names) + 1)
    if fit:
        return {"color": colour, "linestyle": ":", "linewidth": 1.0}
    edge = {"markersize": 4, "markeredgecolor": "black", "markeredgewidth": 0.4, "linewidth": 1.2}
    marker, dashes = _MARKERS[number % len(_MARKERS)], _DASHES[number % len(_DASHES)]
    return {"color": colour, "marker": marker, "linestyle": dashes, **edge}


def _draw_lines(axes: Axes, panel: Panel, names: list[str], last: bool) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.grid(color="0.88", linewidth=0.6)
    if panel.across == "size":
        axes.xaxis.set_major_formatter(lambda x, _: _size(x))
    if panel.level is not None:
        axes.axhline(panel.level, color="0.35", linewidth=0.8)
    for line in filter(lambda line: line.points, panel.lines):
        style = _style(names, line.name.split(" ~ ")[0] if line.fit else line.name, line.fit)
        axes.plot(*zip(*line.points, strict=True), label=line.name, gid=line.name, **style)
    if any(line.fit for line in panel.lines):
        axes.legend(fontsize=_TEXT - 1.5, frameon=False, loc="best")
    elif last:  # the lines of a row have the same looks in all of its plots
        keys = [axes.plot([], [], label=name, **_style(names, name))[0] for name in names]
        beside: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.02, 1), "borderaxespad": 0}
        axes.legend(handles=keys, fontsize=_TEXT - 1, frameon=False, **beside)


def _draw_bars(axes: Axes, panel: Panel) -> None:
    labels = list(dict.fromkeys(bar.label for bar in panel.bars))
    kinds = list(dict.fromkeys(bar.kind for bar in panel.bars))
    thick = 0.8 / len(kinds)
    for number, kind in enumerate(kinds):
        own = [bar for bar in panel.bars if bar.kind == kind]
        places = [labels.index(bar.label) + (number - (len(kinds) - 1) / 2) * thick for bar in own]
        how: dict[str, Any] = {"color": ramp(number, len(kinds) + 1), "hatch": _HATCHES[number % len(_HATCHES)]}
        drawn = axes.barh(places, [b.value for b in own], thick, edgecolor="white", linewidth=0.5, label=kind, **how)
        for bar, patch, place in zip(own, drawn.patches, places, strict=True):
            patch.set_gid(f"{bar.label}, {kind}")
            axes.text(bar.value, place, f" {bar.value:.2f}", size=_TEXT - 1.5, va="center")
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.margins(x=0.12)
    axes.axvline(panel.level or 1.0, color="0.35", linewidth=0.8)
    axes.grid(axis="x", color="0.88", linewidth=0.6)
    axes.legend(fontsize=_TEXT - 1, frameon=False, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.1, ncols=2)


def _size(bytes_: float) -> str:
    """A number of bytes as in `4 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if bytes_ < 1024 or unit == "GiB":
            return f"{bytes_:g} {unit}"
        bytes_ /= 1024
    raise AssertionError("unreachable")
