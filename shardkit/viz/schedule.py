"""A simulated schedule as a picture: the actions of every device over time, and its microbatches in flight.

What the picture shows (`boxes`, `in_flight`, `title`, `facts`) needs no matplotlib.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shardkit._arguments.checks import counted
from shardkit._arguments.typed import typed
from shardkit.schedules import Action, Schedule, Timeline
from shardkit.viz.style import AREA, GREY, MUTED, OPS, PAPER, blank, file_of, heading, look, saved, shade, text_on

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Box(NamedTuple):
    """The place of an action in a picture."""

    action: Action
    device: int  # its row
    begin: float  # when it begins, in the unit of the costs
    length: float  # how long it takes
    top: float  # its upper edge within the row, from 0 to 1
    height: float  # its height; half a row for a forward and a backward that run together


def boxes(schedule: Schedule, timeline: Timeline) -> list[Box]:
    """A box for every action, from its simulated begin to its end, in the order of ticks."""
    spans = timeline.spans
    # Of two that run together, the forward is above.
    partner = {
        action: other
        for row in schedule.rows
        for cell in row
        if len(cell) == 2 and spans[cell[0]] == spans[cell[1]]
        for action, other in (cell, cell[::-1])
    }
    out = []
    for action in schedule.ticks:
        begin, end = spans[action]
        height = 0.5 if action in partner else 1.0
        top = 0.5 if action in partner and action.op != "F" else 0.0
        out.append(Box(action, schedule.device(action.stage), begin, end - begin, top, height))
    return out


def in_flight(schedule: Schedule, timeline: Timeline, device: int) -> list[tuple[float, float]]:
    """(time, microbatches in flight on a device from then on), counted as in `Timeline.peak_in_flight`."""
    changes: dict[float, float] = {}
    for action, (begin, end) in timeline.spans.items():
        if schedule.device(action.stage) == device:
            changes[begin] = changes.get(begin, 0) + (action.op == "F")
            changes[end] = changes.get(end, 0) - (action.op in "BW")
    held, out = 0.0, []
    for time in sorted(changes):
        held += changes[time]
        out.append((time, held / schedule.chunks))
    return out


def title(schedule: Schedule) -> str:
    """The title of a picture: the name and the sizes of a schedule.

    Example:
        >>> sk.viz.title(sk.schedules.lockstep(4, 8, chunks=2))
        'lockstep: 4 devices x 2 chunks, 8 microbatches'
    """
    chunks = f" x {schedule.chunks} chunks" if schedule.chunks > 1 else ""
    devices, microbatches = counted(schedule.devices, "device"), counted(schedule.microbatches, "microbatch", "es")
    return f"{schedule.name}: {devices}{chunks}, {microbatches}"


def facts(timeline: Timeline) -> str:
    """The subtitle of a picture: the makespan, and the bubble in both conventions.

    Example:
        >>> sk.viz.facts(sk.schedules.gpipe(2, 4).simulate())
        "makespan 15, bubble 25.0% of the work (Megatron's convention), 20.0% of the makespan (GPipe's)"
    """
    return (
        f"makespan {timeline.makespan:g}, bubble {timeline.bubble:.1%} of the work (Megatron's convention), "
        f"{timeline.bubble_of_total:.1%} of the makespan (GPipe's)"
    )


_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
# Inches.
_LEFT, _RIGHT, _TOP, _GAP, _BOTTOM = 0.6, 0.95, 0.95, 0.5, 0.5
_SHORTEST, _NARROW, _WIDE = 0.2, 7.0, 24.0
_ROW, _TALL, _CURVE = 0.36, 12.0, 0.26
# Points.
_LARGEST_TEXT, _SMALLEST_TEXT = 9.0, 4.0
_MARGIN = 0.06  # of a row


def figure(schedule: Schedule, timeline: Timeline) -> Figure:
    """The picture of a schedule as a matplotlib figure, to show in a notebook or to modify.

    Args:
        schedule: the schedule.
        timeline: what `schedule.simulate` returned.

    Returns:
        A figure with two plots over the same time: the actions of the devices, and their microbatches in flight. The
        gid of a box is its action, as in "2F0".

    Raises:
        RuntimeError: matplotlib is not installed.

    Example:
        >>> schedule = sk.schedules.zero_bubble_v(4, 8)
        >>> picture = sk.viz.figure(schedule, schedule.simulate())
    """
    with look():
        return _picture(schedule, timeline)


@partial(typed, where="viz.draw")
def draw(schedule: Schedule, output: str | Path, **costs: Any) -> None:
    """Simulates a schedule and writes its picture.

    The upper plot has a row per device and a box per action: the color is the op, the shade the chunk (later is
    lighter), the number the microbatch, if it fits. On the right is the idle share of the device. The lower plot has
    the microbatches in flight, and their peak. The same schedule and costs give the same bytes.

    Args:
        schedule: the schedule.
        output: the .png or .svg to write; missing directories are created.
        **costs: as for `Schedule.simulate`: forward, backward, input_grad, weight_grad, communication, overlapped,
            synchronous.

    Raises:
        ValueError: another kind of file; a cost that `Schedule.simulate` refuses.
        RuntimeError: matplotlib is not installed.

    Example:
        >>> from tempfile import mkdtemp
        >>> file = f"{mkdtemp()}/pipeline.svg"
        >>> sk.viz.draw(sk.schedules.one_f_one_b(4, 8), file, backward=2.5)
    """
    path = file_of("viz.draw", output)
    timeline = schedule.simulate(**costs)
    saved(figure(schedule, timeline), path)


def _draw_actions(axes: Axes, schedule: Schedule, timeline: Timeline, unit: float, row: float) -> None:
    """The boxes with their microbatches; a unit of time is `unit` points wide, a row `row` points high."""
    drawn = boxes(schedule, timeline)
    colours = [shade(OPS[box.action.op], box.action.stage // schedule.devices, schedule.chunks) for box in drawn]
    inner = 1 - 2 * _MARGIN
    bars = axes.bar(
        [box.begin for box in drawn],
        [inner * box.height for box in drawn],
        [box.length for box in drawn],
        [box.device - 0.5 + _MARGIN + inner * box.top for box in drawn],
        align="edge",
        color=colours,
        edgecolor=PAPER,
        linewidth=0.5,
    )
    # A digit is about 0.64 of the text's size wide.
    digit = 0.64 / 0.9 * len(str(schedule.microbatches - 1))
    sizes = [min(_LARGEST_TEXT, unit * box.length / digit, 0.7 * row * box.height) for box in drawn]
    # Numbers of similar size are easier to read.
    largest = 1.4 * min((size for size in sizes if size >= _SMALLEST_TEXT), default=0)
    for box, bar, colour, size in zip(drawn, bars.patches, colours, sizes, strict=True):
        bar.set_gid(str(box.action))
        if size >= _SMALLEST_TEXT:
            style: dict[str, Any] = {"ha": "center", "va": "center_baseline", "color": text_on(colour)}
            x, y = bar.get_center()
            axes.text(x, y, str(box.action.microbatch), size=min(size, largest), **style)
    _head(axes, 0, "device", "right")
    _beside(axes, "bubble, of\nmakespan", [f"{1 - busy / timeline.makespan:.1%}" for busy in timeline.busy])
    axes.tick_params(labelbottom=False)


def _draw_memory(axes: Axes, schedule: Schedule, timeline: Timeline) -> None:
    """For each device the curve of its microbatches in flight, all on one scale."""
    unit = 0.88 / max(timeline.peak_in_flight)
    for device in range(schedule.devices):
        times, held = zip(*in_flight(schedule, timeline, device), strict=True)
        floor = device + 0.5
        axes.fill_between(times, [floor - unit * h for h in held], floor, step="post", color=AREA, linewidth=0)
        axes.axhline(floor, color=AREA, linewidth=0.5)
    _head(axes, 0, "microbatches in flight", "left")
    _beside(axes, "peak", [f"{peak:g}" for peak in timeline.peak_in_flight])
    axes.set_xlabel("time, in the unit of the costs")


def _head(axes: Axes, side: int, text: str, align: str) -> None:
    """A heading above the left (0) or the right (1) edge."""
    by = {"left": 8 * side, "right": -8}[align]
    axes.annotate(text, (side, 1), (by, 5), "axes fraction", textcoords="offset points", color=MUTED, ha=align)


def _beside(axes: Axes, head: str, texts: Sequence[str]) -> None:
    """A column of text on the right, a line per device."""
    _head(axes, 1, head, "left")
    where = ("axes fraction", "data")
    for device, text in enumerate(texts):
        axes.annotate(text, (1, device), (8, 0), where, textcoords="offset points", va="center_baseline")


def _write(
    picture: Figure, schedule: Schedule, timeline: Timeline, left: float, below: Callable[[float], float]
) -> None:
    """The title and the legend; `below` converts inches below the upper edge to a share of the height."""
    from matplotlib.patches import Patch

    heading(picture, title(schedule), facts(timeline))
    used = {action.op for action in schedule.ticks}
    keys = [Patch(color=colour, label=_NAMES[op]) for op, colour in OPS.items() if op in used]
    if schedule.chunks > 1:
        ends = (0, schedule.chunks - 1)
        keys += [Patch(color=shade(GREY, chunk, schedule.chunks), label=f"chunk {chunk}") for chunk in ends]
    options: Any = {"handlelength": 1, "handleheight": 1, "borderpad": 0, "borderaxespad": 0, "columnspacing": 1.5}
    corner: Any = {"loc": "lower left", "bbox_to_anchor": (left, below(_TOP - 0.08))}
    picture.legend(handles=keys, ncols=len(keys), **corner, **options)


def _picture(schedule: Schedule, timeline: Timeline) -> Figure:
    shortest = min(end - begin for begin, end in timeline.spans.values() if end > begin)
    width = min(max(timeline.makespan / shortest * _SHORTEST, _NARROW), _WIDE)
    row = min(_ROW, _TALL / schedule.devices)
    above, below = row * schedule.devices, min(row, _CURVE) * schedule.devices
    across, up = _LEFT + width + _RIGHT, _TOP + above + _GAP + below + _BOTTOM
    picture = blank(across, up, f"{title(schedule)}; {facts(timeline)}")
    work = picture.add_axes((_LEFT / across, 1 - (_TOP + above) / up, width / across, above / up))
    memory = picture.add_axes((_LEFT / across, _BOTTOM / up, width / across, below / up), sharex=work)
    for axes in (work, memory):
        axes.set_xlim(0, timeline.makespan)
        axes.set_ylim(schedule.devices - 0.5, -0.5)
        axes.set_yticks(range(schedule.devices))
        axes.tick_params(length=0)
        axes.grid(axis="x")
        axes.spines[:].set_visible(False)
    _draw_actions(work, schedule, timeline, 72 * width / timeline.makespan, 72 * row)
    _draw_memory(memory, schedule, timeline)
    _write(picture, schedule, timeline, _LEFT / across, lambda inches: 1 - inches / up)
    return picture
