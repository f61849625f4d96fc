"""A simulated schedule as a picture: the actions of every device over time, and its microbatches in flight.

What the picture shows (`boxes`, `in_flight`, `title`, `facts`) needs no matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shardkit._arguments.checks import format_count
from shardkit._arguments.typed import typed
from shardkit.schedules import Schedule
from shardkit.schedules.action import Action
from shardkit.schedules.simulate import Timeline
from shardkit.viz.style import (
    AREA,
    GREY,
    MUTED,
    OPS,
    PAPER,
    check_file,
    look,
    make_figure,
    save,
    shade,
    text_on,
    write_heading,
)

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
    halves = _find_halves(schedule, timeline)
    out = []
    for action in schedule.ticks:
        begin, end = timeline.spans[action]
        top = 0.0
        height = 1.0
        if action in halves:
            height = 0.5
            if action.op != "F":  # of two that run together, the forward is above
                top = 0.5
        out.append(Box(action, schedule.device(action.stage), begin, end - begin, top, height))
    return out


def _find_halves(schedule: Schedule, timeline: Timeline) -> set[Action]:
    """The actions that share a cell of the table with another, and its time: a forward and a backward at once."""
    halves: set[Action] = set()
    for row in schedule.rows:
        for cell in row:
            if len(cell) == 2 and timeline.spans[cell[0]] == timeline.spans[cell[1]]:
                halves.update(cell)
    return halves


def in_flight(schedule: Schedule, timeline: Timeline, device: int) -> list[tuple[float, float]]:
    """(time, microbatches in flight on a device from then on), counted as in `Timeline.peak_in_flight`."""
    # A forward is in flight from its begin to the end of its backward, of which W is the last part. An input gradient
    # changes nothing, and has a point of the curve all the same.
    changes: dict[float, float] = {}
    for action, (begin, end) in timeline.spans.items():
        if schedule.device(action.stage) != device:
            continue
        changes.setdefault(begin, 0)
        changes.setdefault(end, 0)
        if action.op == "F":
            changes[begin] += 1
        elif action.op in "BW":
            changes[end] -= 1
    chunks_in_flight = 0.0
    curve = []
    for time in sorted(changes):
        chunks_in_flight += changes[time]
        curve.append((time, chunks_in_flight / schedule.chunks))
    return curve


def title(schedule: Schedule) -> str:
    """Writes the title of a picture: the name and the sizes of a schedule.

    Example:
        >>> from shardkit.viz.schedule import title
        >>> title(sk.schedules.lockstep(4, 8, chunks=2))
        'lockstep: 4 devices x 2 chunks, 8 microbatches'
    """
    devices = format_count(schedule.devices, "device")
    if schedule.chunks > 1:
        devices += f" x {schedule.chunks} chunks"
    microbatches = format_count(schedule.microbatches, "microbatch", "es")
    return f"{schedule.name}: {devices}, {microbatches}"


def facts(timeline: Timeline) -> str:
    """Writes the subtitle of a picture: the makespan, and the bubble in both conventions.

    Example:
        >>> from shardkit.viz.schedule import facts
        >>> facts(sk.schedules.gpipe(2, 4).simulate())
        "makespan 15, bubble 25.0% of the work (Megatron's convention), 20.0% of the makespan (GPipe's)"
    """
    return (
        f"makespan {timeline.makespan:g}, bubble {timeline.bubble:.1%} of the work (Megatron's convention), "
        f"{timeline.bubble_of_total:.1%} of the makespan (GPipe's)"
    )


_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
# Inches: the margins, the gap between the two plots, the shortest action, the width of the plots at least and at most,
# a row of actions, all rows at most, and a row of the curves.
_LEFT = 0.6
_RIGHT = 0.95
_TOP = 0.95
_GAP = 0.5
_BOTTOM = 0.5
_SHORTEST = 0.2
_NARROW = 7.0
_WIDE = 24.0
_ROW = 0.36
_TALL = 12.0
_CURVE = 0.26
# Points.
_LARGEST_TEXT = 9.0
_SMALLEST_TEXT = 4.0
_MARGIN = 0.06  # of a row


def figure(schedule: Schedule, timeline: Timeline) -> Figure:
    """Draws a schedule as a matplotlib figure, to show in a notebook or to modify.

    Args:
        schedule: the schedule.
        timeline: the result of `schedule.simulate`.

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
        return _draw(schedule, timeline)


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
        ValueError: another kind of file; costs as for `Schedule.simulate`.
        RuntimeError: matplotlib is not installed.

    Example:
        >>> from tempfile import mkdtemp
        >>> file = f"{mkdtemp()}/pipeline.svg"
        >>> sk.viz.draw(sk.schedules.one_f_one_b(4, 8), file, backward=2.5)
    """
    file = check_file("viz.draw", output)
    timeline = schedule.simulate(**costs)
    save(figure(schedule, timeline), file)


class _Layout(NamedTuple):
    """Where the two plots are in a picture, in inches: the actions above, the curves below, both equally wide."""

    width: float  # of the plots
    row: float  # the height of a device's actions
    actions: float  # the height of all of them
    curves: float  # that of the curves

    @property
    def full_width(self) -> float:
        return _LEFT + self.width + _RIGHT

    @property
    def full_height(self) -> float:
        return _TOP + self.actions + _GAP + self.curves + _BOTTOM


def _choose_layout(schedule: Schedule, timeline: Timeline) -> _Layout:
    """As wide as the shortest action needs for its number, and as high as the devices need, within limits."""
    shortest = timeline.makespan
    for begin, end in timeline.spans.values():
        if end > begin:
            shortest = min(shortest, end - begin)
    width = timeline.makespan / shortest * _SHORTEST
    width = min(max(width, _NARROW), _WIDE)
    row = min(_ROW, _TALL / schedule.devices)
    actions = row * schedule.devices
    curves = min(row, _CURVE) * schedule.devices
    return _Layout(width, row, actions, curves)


def _draw(schedule: Schedule, timeline: Timeline) -> Figure:
    layout = _choose_layout(schedule, timeline)
    full_width = layout.full_width
    full_height = layout.full_height
    picture = make_figure(full_width, full_height, f"{title(schedule)}; {facts(timeline)}")
    # matplotlib counts in shares of the picture, from its lower left corner; the layout in inches, from the upper one.
    left = _LEFT / full_width
    width = layout.width / full_width
    actions_bottom = 1 - (_TOP + layout.actions) / full_height
    actions_axes = picture.add_axes((left, actions_bottom, width, layout.actions / full_height))
    curves_axes = picture.add_axes(
        (left, _BOTTOM / full_height, width, layout.curves / full_height), sharex=actions_axes
    )
    for axes in (actions_axes, curves_axes):
        axes.set_xlim(0, timeline.makespan)
        axes.set_ylim(schedule.devices - 0.5, -0.5)  # device 0 is the upper one
        axes.set_yticks(range(schedule.devices))
        axes.tick_params(length=0)
        axes.grid(axis="x")
        axes.spines[:].set_visible(False)
    # A tick and a row in points, of which an inch has 72, as sizes of letters are.
    _draw_actions(actions_axes, schedule, timeline, 72 * layout.width / timeline.makespan, 72 * layout.row)
    _draw_curves(curves_axes, schedule, timeline)
    write_heading(picture, title(schedule), facts(timeline))
    _draw_legend(picture, schedule, left, 1 - (_TOP - 0.08) / full_height)
    return picture


def _draw_actions(axes: Axes, schedule: Schedule, timeline: Timeline, unit: float, row: float) -> None:
    """The boxes with their microbatches; a unit of time is `unit` points wide, a row `row` points high."""
    all_boxes = boxes(schedule, timeline)
    colours = []
    for box in all_boxes:
        chunk = box.action.stage // schedule.devices
        colours.append(shade(OPS[box.action.op], chunk, schedule.chunks))
    inner = 1 - 2 * _MARGIN  # of a row
    # One call for all, which is faster than one for each: bars from the left edges, of these heights and widths.
    bars = axes.bar(
        [box.begin for box in all_boxes],
        [inner * box.height for box in all_boxes],
        [box.length for box in all_boxes],
        [box.device - 0.5 + _MARGIN + inner * box.top for box in all_boxes],
        align="edge",
        color=colours,
        edgecolor=PAPER,
        linewidth=0.5,
    )
    # A digit is about 0.64 of the text's size wide.
    digits = 0.64 / 0.9 * len(str(schedule.microbatches - 1))
    sizes = []
    for box in all_boxes:
        sizes.append(min(_LARGEST_TEXT, unit * box.length / digits, 0.7 * row * box.height))
    # Numbers of similar size are easier to read.
    readable = [size for size in sizes if size >= _SMALLEST_TEXT]
    largest = 1.4 * min(readable, default=0)
    for box, bar, colour, size in zip(all_boxes, bars.patches, colours, sizes, strict=True):
        bar.set_gid(str(box.action))
        if size >= _SMALLEST_TEXT:
            style: dict[str, Any] = {"ha": "center", "va": "center_baseline", "color": text_on(colour)}
            x, y = bar.get_center()
            axes.text(x, y, str(box.action.microbatch), size=min(size, largest), **style)
    _write_above(axes, 0, "device", -8, "right")
    idle_shares = [1 - busy / timeline.makespan for busy in timeline.busy]
    _write_beside(axes, "bubble, of\nmakespan", [f"{share:.1%}" for share in idle_shares])
    axes.tick_params(labelbottom=False)


def _draw_curves(axes: Axes, schedule: Schedule, timeline: Timeline) -> None:
    """For each device the curve of its microbatches in flight, all on one scale."""
    unit = 0.88 / max(timeline.peak_in_flight)
    for device in range(schedule.devices):
        times, counts = zip(*in_flight(schedule, timeline, device), strict=True)
        # The axis goes down: more is higher up in the row, and has a smaller y.
        floor = device + 0.5
        heights = [floor - unit * count for count in counts]
        axes.fill_between(times, heights, floor, step="post", color=AREA, linewidth=0)
        axes.axhline(floor, color=AREA, linewidth=0.5)
    _write_above(axes, 0, "microbatches in flight", 0, "left")
    _write_beside(axes, "peak", [f"{peak:g}" for peak in timeline.peak_in_flight])
    axes.set_xlabel("time, in the unit of the costs")


def _write_above(axes: Axes, side: int, text: str, shift: float, align: str) -> None:
    """A heading above the left (0) or the right (1) edge, so many points further to the right."""
    axes.annotate(text, (side, 1), (shift, 5), "axes fraction", textcoords="offset points", color=MUTED, ha=align)


def _write_beside(axes: Axes, heading: str, texts: Sequence[str]) -> None:
    """A column of text on the right, a line per device."""
    _write_above(axes, 1, heading, 8, "left")
    where = ("axes fraction", "data")
    for device, text in enumerate(texts):
        axes.annotate(text, (1, device), (8, 0), where, textcoords="offset points", va="center_baseline")


def _draw_legend(picture: Figure, schedule: Schedule, left: float, bottom: float) -> None:
    """The ops that the schedule has, and of several chunks the shade of the first and the last."""
    from matplotlib.patches import Patch

    ops = {action.op for action in schedule.ticks}
    keys = []
    for op, colour in OPS.items():
        if op in ops:
            keys.append(Patch(color=colour, label=_NAMES[op]))
    if schedule.chunks > 1:
        for chunk in (0, schedule.chunks - 1):
            keys.append(Patch(color=shade(GREY, chunk, schedule.chunks), label=f"chunk {chunk}"))
    options: dict[str, Any] = {
        "loc": "lower left",
        "bbox_to_anchor": (left, bottom),
        "handlelength": 1,
        "handleheight": 1,
        "borderpad": 0,
        "borderaxespad": 0,
        "columnspacing": 1.5,
    }
    picture.legend(handles=keys, ncols=len(keys), **options)
