"""How collectives overlap with compute in a compiled program: the timeline of a report as a Gantt chart."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkit._kinds import short
from shardkit._typed import typed
from shardkit.analysis.hlo.report import Report
from shardkit.analysis.hlo.timeline import Span, Timeline
from shardkit.viz.bars import duration
from shardkit.viz.style import (
    AREA,
    GRID,
    LETTER,
    MUTED,
    PAPER,
    SERIES,
    SMALL,
    blank,
    file_of,
    heading,
    look,
    saved,
)
from shardkit.viz.traffic import COLLECTIVES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDE, _ROW, _GAP = 7.2, 0.36, 0.42  # inches
_EXPOSED, _THIN = "/////", 400  # hatches; a share of the width


@partial(typed, where="viz.overlap")
def overlap(report: Any, *, output: str | Path | None = None) -> Any:
    """The picture of how a compiled program's collectives overlap with its compute, as the compiler scheduled it.

    A row has compute, and a row for each axes has the collectives over them: plain where compute hides them, hatched
    where compute waits for them. The times are those of the report's model, which are lower bounds.

    Args:
        report: of `aot.compile`; several of them by name are drawn one below the other, on one scale.
        output: a .png or .svg to write; missing directories are created. The same report gives the same bytes.

    Returns:
        A matplotlib figure, which notebooks show. The gid of a part is the compiler's name for the instruction, and
        ", exposed" where compute waits for it.

    Raises:
        TypeError: something else than a report.
        ValueError: a report without a timeline, as of a program that the compiler refused; another kind of file.
        RuntimeError: matplotlib is not installed.

    Example:
        report = sk.aot.compile(step, args, topology="v5e:2x4")
        sk.viz.overlap(report, output="overlap.svg")
    """
    path = file_of("viz.overlap", output)
    several = timelines(report)
    with look():
        return saved(_picture(several), path)


def timelines(given: Any) -> dict[str, Timeline]:
    """The timeline of one report, or of several by name; refuses anything else."""
    several = given if isinstance(given, Mapping) else {"": given}
    out = {}
    for name, each in several.items():
        if not isinstance(each, Report | Timeline):
            raise TypeError(
                f"viz.overlap: report must be a report of aot.compile, or a mapping of names to them; got "
                f"{short(each)}. Pass sk.aot.compile(step, args, topology='v5e:2x4')."
            )
        line = each.timeline if isinstance(each, Report) else each
        if not line.seconds:
            raise ValueError(
                "viz.overlap: the report must have a timeline; got one of a program that the compiler refused, or that "
                "an older version wrote. Compile it again, for a topology that it fits."
            )
        out[str(name)] = line
    return out


def hidden(line: Timeline) -> str:
    """A timeline's length, and how much of its collectives compute hides, in words."""
    wire = sum(span.seconds for span in line.spans if span.kind in COLLECTIVES)
    text = f"{duration(line.seconds)}: compute {duration(line.compute_seconds)}"
    if not wire:
        return f"{text}, no collectives"
    share = 1 - line.exposed_seconds / wire
    return f"{text}, exposed {duration(line.exposed_seconds)} of {duration(wire)} of collectives, {share:.0%} hidden"


def beside(line: Timeline, lane: str) -> str:
    """What a lane takes, in words."""
    own = [span for span in line.spans if span.lane == lane]
    if lane == "compute":
        return duration(line.compute_seconds)
    alone = sum(span.seconds for span in own if span.exposed)
    return f"{duration(sum(span.seconds for span in own))}, {duration(alone)} exposed"


def _picture(several: Mapping[str, Timeline]) -> Figure:
    lanes = {name: line.lanes() for name, line in several.items()}
    heads = [name for name in several if name]
    left = max(0.9, LETTER * max(len(_label(lane)) for own in lanes.values() for lane in own) + 0.3)
    high = sum(_ROW * len(own) for own in lanes.values()) + _GAP * (len(lanes) - 1 + bool(heads))
    right = 0.9 * LETTER * max(len(beside(line, lane)) for name, line in several.items() for lane in lanes[name]) + 0.2
    below, top = 0.55, 0.75 if heads else 0.95
    width, up = left + _WIDE + right, top + high + below
    title = "overlap of collectives with compute"
    note = hidden(next(iter(several.values()))) if not heads else "by the compiler's schedule and the model of times"
    picture = blank(width, up, f"{title}: " + "; ".join(f"{name} {hidden(line)}" for name, line in several.items()))
    heading(picture, title, note)
    most = max(line.seconds for line in several.values())
    y = up - top
    for name, line in several.items():
        if name:
            y -= _GAP
            picture.text(left / width, (y + 0.1) / up, f"{name}: {hidden(line)}", color=MUTED)
        tall = _ROW * len(lanes[name])
        y -= tall
        axes = picture.add_axes((left / width, y / up, _WIDE / width, tall / up))
        _rows(axes, line, lanes[name], most)
        if not name:
            y -= _GAP
    axes.tick_params(labelbottom=True)
    axes.set_xlabel("time, by the model")
    _legend(picture, several, 0.15 / width, 1 - 0.62 / up)
    return picture


def _label(lane: str) -> str:
    return lane if lane == "compute" else f"over {lane}"


def _rows(axes: Axes, line: Timeline, lanes: list[str], most: float) -> None:
    """The lanes of a timeline, one below the other."""
    from matplotlib.patches import Rectangle

    axes.set_xlim(0, most)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_yticks(range(len(lanes)), [_label(lane) for lane in lanes])
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelbottom=False)
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_formatter(lambda x, _: duration(x) if x else "0")
    axes.grid(axis="x")
    for span in line.spans:
        row = lanes.index(span.lane)
        axes.add_patch(
            Rectangle((span.start, row - 0.36), span.seconds, 0.72, **_look(span, span.seconds < most / _THIN))
        )
        if span.exposed:  # compute waits
            wait: dict[str, Any] = {
                "facecolor": PAPER,
                "edgecolor": GRID,
                "hatch": _EXPOSED,
                "linewidth": 0.0,
                "gid": "wait",
            }
            axes.add_patch(Rectangle((span.start, lanes.index("compute") - 0.36), span.seconds, 0.72, **wait))
    for row, lane in enumerate(lanes):
        axes.annotate(
            beside(line, lane), (1, row), (6, 0), ("axes fraction", "data"), textcoords="offset points",
            va="center", size=SMALL,
        )  # fmt: skip


def _look(span: Span, thin: bool) -> dict[str, Any]:
    """The look of a span; of one too thin for hatches, an edge keeps it visible."""
    if span.kind in ("compute", "loop"):
        return {"facecolor": AREA, "linewidth": 0.0, "gid": span.name, "hatch": "---" * (span.kind == "loop")}
    colour = SERIES[COLLECTIVES.index(span.kind)]
    own: dict[str, Any] = {"facecolor": colour, "linewidth": 0.0, "gid": span.name}
    if span.exposed:
        own |= {"edgecolor": PAPER, "hatch": _EXPOSED, "gid": f"{span.name}, exposed"}
    return own | {"edgecolor": colour, "hatch": "", "linewidth": 0.6} if thin else own


def _legend(picture: Figure, several: Mapping[str, Timeline], left: float, top: float) -> None:
    from matplotlib.patches import Patch

    spans = [span for line in several.values() for span in line.spans]
    used = {span.kind for span in spans}
    handles = [Patch(facecolor=AREA, label="compute")]
    handles += [Patch(facecolor=SERIES[i], label=kind) for i, kind in enumerate(COLLECTIVES) if kind in used]
    if any(span.exposed for span in spans):
        handles.append(Patch(facecolor=MUTED, edgecolor=PAPER, hatch=_EXPOSED, label="exposed: compute waits"))
    if "loop" in used:
        handles.append(Patch(facecolor=AREA, edgecolor=PAPER, hatch="---", label="more iterations"))
    options: dict[str, Any] = {"handlelength": 1.6, "handleheight": 1.1, "borderpad": 0, "borderaxespad": 0}
    picture.legend(handles=handles, loc="upper left", bbox_to_anchor=(left, top), ncols=len(handles), **options)
