"""The contents of a picture: boxes, curves and titles, without matplotlib."""

from __future__ import annotations

from typing import NamedTuple

from shardkit._check import counted
from shardkit._typed import typed
from shardkit.schedules import Action, Schedule, Timeline


class Box(NamedTuple):
    """The place of an action in a picture.

    Attributes:
        action: the action.
        device: its row.
        begin: when it begins, in the unit of the costs.
        length: how long it takes.
        top: its upper edge within the row, from 0 to 1.
        height: its height; half a row for a forward and a backward that run together.
    """

    action: Action
    device: int
    begin: float
    length: float
    top: float
    height: float


def boxes(schedule: Schedule, timeline: Timeline) -> list[Box]:
    """A box for every action, from its simulated begin to its end, in the order of ticks.

    Args:
        schedule: the schedule.
        timeline: what `schedule.simulate` returned.

    Returns:
        A Box per action.


    Example:
        >>> schedule = sk.schedules.gpipe(devices=2, microbatches=1)
        >>> [f"{box.action} from {box.begin:g}" for box in sk.viz.boxes(schedule, schedule.simulate())]
        ['0F0 from 0', '1F0 from 1', '1B0 from 2', '0B0 from 4']
    """
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


@typed
def in_flight(schedule: Schedule, timeline: Timeline, device: int) -> list[tuple[float, float]]:
    """The microbatches in flight on a device over time, counted as in `Timeline.peak_in_flight`.

    Args:
        schedule: the schedule.
        timeline: what `schedule.simulate` returned.
        device: the device.

    Returns:
        (time, microbatches from then on), at each begin or end of an action.

    Example:
        >>> schedule = sk.schedules.gpipe(devices=1, microbatches=2)
        >>> sk.viz.in_flight(schedule, schedule.simulate(), device=0)
        [(0, 1.0), (1.0, 2.0), (2.0, 2.0), (4.0, 1.0), (6.0, 0.0)]
    """
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
