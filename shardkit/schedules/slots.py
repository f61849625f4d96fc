"""Where stage inputs and cotangents wait: register allocation over the ticks of a schedule."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

from shardkit.schedules.action import Action

if TYPE_CHECKING:
    from shardkit.schedules.base import Schedule

# A stage of the model and a microbatch.
Work = tuple[int, int]


class Slots(NamedTuple):
    """How many buffers of each kind a device needs, the most over devices, and which one each piece of work uses.

    A buffer has one place more than the number says, for rubbish: what a masked device reads and writes. The first
    stage has no input, since it recomputes the embedding, and the last no cotangent, since it has the loss.

    Attributes:
        inputs: places for stage inputs, held from their arrival until B or I; until F where F saves what B needs.
        saved: places for what F saves, held from F until B or I; none where B begins with the stage input.
        cotangents: places for cotangents of stage outputs, held from their arrival until B or I.
        kept: places for what I leaves to W.
        input_of: the place of (stage, microbatch) among the inputs of its device.
        saved_of: its place among what is saved.
        cotangent_of: its place among the cotangents.
        kept_of: its place among what is kept.
    """

    inputs: int
    saved: int
    cotangents: int
    kept: int
    input_of: dict[Work, int]
    saved_of: dict[Work, int]
    cotangent_of: dict[Work, int]
    kept_of: dict[Work, int]


def coloured(schedule: Schedule, saved: bool) -> Slots:
    """The slots of a schedule; see `Schedule.slots`.

    What arrives at the end of a tick is there from the next on, in a place that may have been read in that tick.
    """
    inputs, residuals, cotangents, kept = (dict[Work, tuple[int, int]]() for _ in range(4))
    for (stage, op, i), tick in schedule.ticks.items():
        if op == "W":
            kept[stage, i] = (schedule.ticks[Action(stage, "I", i)] + 1, tick)
        elif stage and (op == "F") == saved:
            inputs[stage, i] = (schedule.ticks[Action(stage - 1, "F", i)] + 1, tick)
        if op in "BI":
            if saved:
                residuals[stage, i] = (schedule.ticks[Action(stage, "F", i)], tick)
            for need in schedule.needs(Action(stage, op, i))[1:]:
                cotangents[stage, i] = (schedule.ticks[need] + 1, tick)
    counts, places = zip(*(_coloured(schedule, live) for live in (inputs, residuals, cotangents, kept)), strict=True)
    return Slots(*counts, *places)


def _coloured(schedule: Schedule, live: dict[Work, tuple[int, int]]) -> tuple[int, dict[Work, int]]:
    """A place for each interval of ticks, the lowest that is free on its device: no device uses more than it must."""
    places: dict[Work, int] = {}
    counts = [0] * schedule.devices
    free: list[list[int]] = [[] for _ in counts]
    held: list[list[tuple[int, int]]] = [[] for _ in counts]
    for work, (begin, end) in sorted(live.items(), key=lambda item: item[1]):
        device = schedule.device(work[0])
        while held[device] and held[device][0][0] < begin:
            heappush(free[device], heappop(held[device])[1])
        if not free[device]:
            heappush(free[device], counts[device])
            counts[device] += 1
        places[work] = heappop(free[device])
        heappush(held[device], (end, places[work]))
    return max(counts), places
