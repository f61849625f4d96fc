"""The contents of pictures of results: plots of lines and of bars, without matplotlib."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

Record = Mapping[str, Any]

_SMALL = 64 * 1024  # bytes up to which a time is mostly latency
_KEYS = ("impl", "dtype", "redop", "axes")  # named where they differ within an operation
_TIMES = ("wall_us_median", "fit_us")
_MANY = 10  # lines in one plot, above which each operation has a row of its own


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


def panels(records: Iterable[Record]) -> list[list[Panel]]:
    """The plots of some records, in rows; plots without values are left out."""
    benchmarks: dict[str, list[Record]] = {}
    for record in records:
        benchmarks.setdefault(str(record.get("benchmark")), []).append(record)
    rows = [row for own in benchmarks.values() for row in _plots(own)(own)]
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


def _comm(records: list[Record]) -> list[list[Panel]]:
    ops = len({str(r.get("op")) for r in records})
    keys = ["op"] * (ops > 1)
    for key in _KEYS:
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
    small = [r for r in records if (_number(r, "size") or math.inf) <= _SMALL]
    out = []
    for op, inside in groups.items():
        of = {" ".join(named): own for named, own in inside.items()}
        before = f"{op}: " if op else ""

        def lines(y: Callable[[Record], float | None], only: list[Record] = records, of: Any = of) -> tuple[Line, ...]:
            here = {id(r) for r in only}
            return tuple(_line(n, [r for r in own if id(r) in here], "size", y) for n, own in of.items())

        row = [
            Panel(f"{before}bus bandwidth", "size", "GB/s", lines(lambda r: _number(r, "busbw_GBps"))),
            Panel(f"{before}latency", "size", "us", lines(lambda r: _number(r, "wall_us_median"), small)),
        ]
        for key, by in (("of_fit", "the alpha-beta fit"), ("of_chip", "the chip")):
            share = lines(partial(_number, key=key))
            row.append(Panel(f"{before}achieved over expected by {by}", "size", "share", share, level=1.0))
        out.append(row)
    return out


def fits(records: Iterable[Record]) -> list[list[Panel]]:
    """For each operation a plot of measured times against size, and the alpha-beta fit of each line; two in a row."""
    fitted = [r for r in records if r.get("fit") and _number(r, "fit_us") and _number(r, "wall_us_median")]
    plots = []
    for op in dict.fromkeys(str(r.get("op")) for r in fitted):
        own = [r for r in fitted if str(r.get("op")) == op]
        keys = [key for key in _KEYS if len({str(r.get(key)) for r in own}) > 1]
        series: dict[str, list[Record]] = {}
        for record in own:
            series.setdefault(" ".join(str(record.get(key)) for key in keys) or op, []).append(record)
        lines: list[Line] = []
        for name, rows in series.items():
            measured, expected = (_line(name, rows, "size", partial(_number, key=k)) for k in _TIMES)
            lines += [measured, Line(f"{name} ~ {_words(rows[-1]['fit'])}", expected.points, fit=True)]
        plots.append(Panel(op, "size", "us", tuple(lines)))
    return [plots[start : start + 2] for start in range(0, len(plots), 2)]


def _words(fit: Record) -> str:
    """Latency and bandwidth of a fit; none where more bytes took no longer."""
    bandwidth = fit["bandwidth"]
    grows = f"{bandwidth / 1e9:.3g} GB/s" if bandwidth and math.isfinite(bandwidth) else "any bytes"
    return f"{1e6 * fit['latency']:.3g} us a hop, {grows}, off by {fit['residual']:.0%}"


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
    kinds = (("gpipe_work_ratio", "simulated work"), ("gpipe_cpu_ratio", "CPU time"))
    row = []
    for count in sorted({r.get("microbatches", 0) for r in executed}):
        bars = _bars([r for r in executed if r.get("microbatches", 0) == count], kinds)
        row.append(Panel(f"{count} microbatches, over GPipe", "ratio", bars=bars, level=1.0))
    return [row[start : start + 2] for start in range(0, len(row), 2)] or _ratios(records)


def _ratios(records: list[Record]) -> list[list[Panel]]:
    out = []
    kinds = (("cpu_ratio_median", "CPU time"), ("wall_ratio_median", "wall time"), ("hidden", "share hidden"))
    for place in dict.fromkeys((str(r.get("row")), str(r.get("mode", ""))) for r in records):
        own = [r for r in records if (str(r.get("row")), str(r.get("mode", ""))) == place]
        over = next((f", over {r['baseline']}" for r in own if r.get("baseline")), "")
        out.append([Panel(f"{place[0]}{over}", "ratio", bars=_bars(own, kinds), level=1.0)])
    return out


def _bars(records: list[Record], kinds: Iterable[tuple[str, str]]) -> tuple[Bar, ...]:
    last = {str(r.get("case")): r for r in records}
    found = [(case, kind, _number(r, key)) for case, r in last.items() for key, kind in kinds]
    return tuple(Bar(case, kind, value) for case, kind, value in found if value is not None)


# By a field that only their records have.
_PLOTS = {"busbw_GBps": _comm, "lower_cpu_s": _scale, "gpipe_work_ratio": _schedules}


def _plots(records: list[Record]) -> Callable[[list[Record]], list[list[Panel]]]:
    return next((draw for field, draw in _PLOTS.items() if any(field in record for record in records)), _ratios)
