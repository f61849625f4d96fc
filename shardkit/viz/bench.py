"""Results of `shardkit bench` as pictures: bandwidth and latency against size, ratios, schedules, and what grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkit._check import counted, quoted
from shardkit._typed import typed
from shardkit.viz.bars import size
from shardkit.viz.panels import Panel, panels
from shardkit.viz.panels import fits as fit_panels
from shardkit.viz.style import LETTER, MUTED, SMALL, blank, file_of, filled, look, saved, stroked

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches.
_WIDE, _TALL, _LEFT, _TOP, _UNDER, _LABELS, _KEYS = 3.6, 2.7, 0.85, 0.55, 0.55, 2.6, 2.4
_BAR, _EDGE = 0.2, 0.15


@partial(typed, where="viz.results")
def results(records: Sequence[Mapping[str, Any]], output: str | Path | None = None) -> Any:
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


@partial(typed, where="viz.fits")
def fits(records: Sequence[Mapping[str, Any]], *, output: str | Path | None = None) -> Any:
    """The picture of alpha-beta fits: measured times of `shardkit bench comm` against size, and the fitted lines.

    A plot per operation. A line's name has the fitted latency of a hop, the bandwidth, and the root mean square of the
    relative error.

    Args:
        records: of `bench.comm` or `bench.read`, which have the fits of `bench.alpha_beta`.
        output: a .png or .svg to write; missing directories are created. The same records give the same bytes.

    Returns:
        A matplotlib figure, which notebooks show. The gid of a line is its name; that of a fit has " ~ " in it.

    Raises:
        ValueError: records without a fit, as of a single size; another kind of file.
        RuntimeError: matplotlib is not installed.

    Example:
        >>> fit = {"fit": {"latency": 5e-6, "bandwidth": 1e9, "residual": 0.1}, "op": "all_reduce", "impl": "ring"}
        >>> times = {1e3: {"wall_us_median": 7.0, "fit_us": 6.0}, 1e6: {"wall_us_median": 990.0, "fit_us": 1005.0}}
        >>> picture = sk.viz.fits([{**fit, "size": size, **row} for size, row in times.items()])
    """
    path = file_of("viz.fits", output)
    rows = fit_panels(records)
    if not rows:
        raise ValueError(
            f"viz.fits: the records must have alpha-beta fits; got {counted(len(records), 'record')} without any. Pass "
            "the results of shardkit bench comm, of at least two sizes."
        )
    with look():
        return saved(_drawn(rows), path)


def _drawn(rows: list[list[Panel]]) -> Figure:
    """The rows of plots, one below the other; lines of a row have their names at its right, bars theirs at the left."""
    heights = [_height(row) for row in rows]
    before = [_LABELS if any(panel.bars for panel in row) else _LEFT for row in rows]
    # A fit has its figures in its name: each of these plots has its own names beside it.
    after = [max((_beside(line.name) for p in row if _fits(p) for line in p.lines), default=0.0) for row in rows]
    wide = [len(row) * (_WIDE + a + b) for row, a, b in zip(rows, before, after, strict=True)]
    keyed = [_KEYS * any(panel.lines for panel in row if not _fits(panel)) for row in rows]
    across = max(w + k for w, k in zip(wide, keyed, strict=True)) + 2 * _EDGE
    up = sum(_TOP + height + _UNDER for height in heights) + _EDGE
    picture, top = blank(across, up), _EDGE
    for row, height, labels, keys in zip(rows, heights, before, after, strict=True):
        names = list(dict.fromkeys(line.name for panel in row for line in panel.lines if not line.fit))
        for column, panel in enumerate(row):
            left = _EDGE + column * (labels + _WIDE + keys) + labels
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


def _beside(name: str) -> float:
    """The width of a line's name beside a plot."""
    return 0.9 * LETTER * len(name) + 0.6


def _height(row: list[Panel]) -> float:
    return max(max(_TALL if panel.lines else 0.0, _BAR * (len(panel.bars) + 1)) for panel in row)


def _style(names: list[str], name: str, fit: bool = False) -> dict[str, Any]:
    """The look of a line; that of its fit is dotted, without markers."""
    look = stroked(names.index(name))
    return {"color": look["color"], "linestyle": ":", "linewidth": 1.0} if fit else look


def _draw_lines(axes: Axes, panel: Panel, names: list[str], last: bool) -> None:
    from matplotlib.lines import Line2D

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.grid()
    if panel.across == "size":
        axes.xaxis.set_major_formatter(lambda x, _: size(x))
    if panel.level is not None:
        axes.axhline(panel.level, color=MUTED, linewidth=0.8)
    for line in filter(lambda line: line.points, panel.lines):
        style = _style(names, line.name.split(" ~ ")[0] if line.fit else line.name, line.fit)
        axes.plot(*zip(*line.points, strict=True), label=line.name, gid=line.name, **style)
    beside: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.02, 1), "borderaxespad": 0}
    if _fits(panel):
        axes.legend(**beside)
    elif last:  # the lines of a row have the same looks in all of its plots
        keys = [Line2D([], [], label=name, **_style(names, name)) for name in names]
        axes.legend(handles=keys, **beside)


def _fits(panel: Panel) -> bool:
    return any(line.fit for line in panel.lines)


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
