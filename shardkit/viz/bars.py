"""Lines and bars, and horizontal bars of bytes or seconds, stacked by kind: what several pictures share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from shardkit.viz.style import GRID, INK, LETTER, MUTED, PAPER, SMALL, blank, filled, heading

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROW, _WIDE = 0.34, 4.6  # inches
_TIMES = ((1, "s"), (1e3, "ms"), (1e6, "us"), (1e9, "ns"))
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


class Line(NamedTuple):
    """A line of a plot: its name and its points."""

    name: str
    points: tuple[tuple[float, float], ...]


class Bar(NamedTuple):
    """A bar: its label at the left, the kind that gives it color and hatch, and its length."""

    label: str
    kind: str
    value: float


def size(count: float) -> str:
    """Bytes with a binary unit, in four digits at most: "1.5 KiB"."""
    power = min(int(math.log(count, 1024)) if count >= 1 else 0, len(_UNITS) - 1)
    return f"{count / 1024**power:.4g} {_UNITS[power]}"


def duration(seconds: float) -> str:
    """Seconds in s, ms, us or ns, in four digits at most: "1.5 ms"."""
    if not seconds:
        return "0 s"
    scale, unit = next(((s, u) for s, u in _TIMES if seconds >= 1 / s), _TIMES[-1])
    return f"{seconds * scale:.4g} {unit}"


def steps_of(most: float) -> list[float]:
    """The ticks of an axis of bytes: round numbers of the unit that `most` has, at most six."""
    unit = 1024.0 ** min(int(math.log(most, 1024)) if most >= 1 else 0, len(_UNITS) - 1)
    rough = most / unit / 5
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= rough * (1 - 1e-9)) if rough > 0 else 1.0
    return [i * step * unit for i in range(int(most / unit / step * (1 + 1e-9)) + 1)]


def bytes_on(axis: Any, most: float) -> None:
    """Round numbers of bytes as the ticks of an axis."""
    axis.set_ticks(ticks := steps_of(most), [size(tick) if tick else "0" for tick in ticks])


class Scale(NamedTuple):
    """What bars measure."""

    across: str  # the words below the axis
    # what to write beside the bars of a label, which sum to a total
    text: Callable[[str, float], str] = lambda label, total: size(total)
    ticks: Callable[[Any, float], None] = bytes_on  # sets the ticks of an axis up to a value


def stacked(
    title: str,
    note: str,
    bars: Sequence[Bar],
    kinds: Sequence[str],
    scale: Scale,
    *,
    nothing: str,
    limit: tuple[float, str] | None = None,
) -> Figure:
    """A figure of one row per label, in which the values of its kinds stand one after the other.

    Bars of one label and kind are added. `kinds` are all that there may be, in order: each has one look in every
    picture. Without bars it says `nothing`; `limit` is a value to mark by a line, and its name.
    """
    from matplotlib.patches import Patch

    labels = list(dict.fromkeys(bar.label for bar in bars))
    totals = {label: sum(bar.value for bar in bars if bar.label == label) for label in labels}
    used = [kind for kind in kinds if any(bar.kind == kind for bar in bars)]
    left = max(0.9, LETTER * max(map(len, labels), default=0) + 0.3)
    keys = 0.24 * math.ceil(len(used) / 3) + 0.1
    high = _ROW * max(len(labels), 1) + 0.1
    wide, top, below, right = _WIDE, 0.62 + keys + 0.2 * (limit is not None), 0.55, 1.15
    width, up = max(left + wide + right, 0.068 * len(note) + 0.3), top + high + below
    picture = blank(width, up, f"{title}: {note}" if note else title)
    heading(picture, title, note)
    axes = picture.add_axes((left / width, below / up, wide / width, high / up))
    axes.set_ylim(len(labels) - 0.4 if labels else 0.6, -0.6)
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    if not labels:
        axes.text(0.5, 0, nothing, ha="center", va="center", color=MUTED)
        axes.set_xticks([])
        return picture
    most = max([*totals.values(), limit[0] if limit else 0.0]) or 1.0
    axes.set_xlim(0, most)
    scale.ticks(axes.xaxis, most)
    axes.set_xlabel(scale.across)
    axes.grid(axis="x", color=GRID)
    _pieces(axes, bars, labels, kinds)
    over: dict[str, Any] = {"bbox": {"facecolor": PAPER, "linewidth": 0, "pad": 0.8}, "zorder": 4}
    for row, label in enumerate(labels):
        axes.text(totals[label] + 0.01 * most, row, scale.text(label, totals[label]), va="center", size=SMALL, **over)
    if limit is not None:
        axes.axvline(limit[0], color=INK, linewidth=1.2, linestyle="--", gid="limit")
        axes.annotate(
            limit[1], (limit[0], 1), (0, 3), ("data", "axes fraction"), textcoords="offset points",
            ha="right", va="bottom", size=SMALL, color=INK,
        )  # fmt: skip
    handles = [Patch(label=kind, **filled(kinds.index(kind))) for kind in used]
    options: dict[str, Any] = {"handlelength": 1.6, "handleheight": 1.1, "borderpad": 0, "borderaxespad": 0}
    corner = (0.15 / width, 1 - 0.62 / up)  # below the notes, three in a line
    picture.legend(handles=handles, loc="upper left", bbox_to_anchor=corner, ncols=3, **options)
    return picture


def _pieces(axes: Axes, bars: Sequence[Bar], labels: Sequence[str], kinds: Sequence[str]) -> None:
    """A rectangle for each label and kind, after those of the kinds before it; its gid is both."""
    for row, label in enumerate(labels):
        start = 0.0
        for number, kind in enumerate(kinds):
            value = sum(bar.value for bar in bars if (bar.label, bar.kind) == (label, kind))
            if value:
                [patch] = axes.barh(row, value, 0.7, start, **filled(number)).patches
                patch.set_gid(f"{label}, {kind}")
                start += value
