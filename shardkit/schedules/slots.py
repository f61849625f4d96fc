"""Slots for stage inputs, residuals and cotangents: register allocation over the ticks of a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from shardkit.schedules.action import Action
from shardkit.schedules.grid import Grid

# A stage of the model and a microbatch.
Work = tuple[int, int]
Lives = dict[Work, tuple[int, int]]  # the first tick and the last in which a value is needed


class Slots(NamedTuple):
    """The number of slots in each buffer of a device, the most over devices, and the slot of each piece of work.

    The first stage has no input, since it recomputes the embedding, and the last no cotangent, since it has the loss.

    Attributes:
        inputs: slots for stage inputs, from their arrival until B or I; until F if F saves residuals.
        saved: slots for the residuals of F, until B or I; 0 if B recomputes them from the stage input.
        cotangents: slots for cotangents of stage outputs, from their arrival until B or I.
        kept: slots for weight-gradient residuals, from I until W.
        input_of: the slot of (stage, microbatch) among the inputs of its device.
        saved_of: its slot among the residuals.
        cotangent_of: its slot among the cotangents.
        kept_of: its slot among the weight-gradient residuals.
    """

    inputs: int
    saved: int
    cotangents: int
    kept: int
    input_of: dict[Work, int]
    saved_of: dict[Work, int]
    cotangent_of: dict[Work, int]
    kept_of: dict[Work, int]


def coloured(schedule: Grid, needed: Sequence[Lives]) -> Slots:
    """The slots of a schedule, of what is needed when; see `Schedule.slots`."""
    counts, places = zip(*(_coloured(schedule, live) for live in needed), strict=True)
    return Slots(*counts, *places)


def lives(schedule: Grid, saved: bool) -> tuple[Lives, Lives, Lives, Lives]:
    """When stage inputs, residuals, cotangents and weight-gradient residuals are needed.

    What arrives at the end of a tick is there from the next tick on, and may overwrite a slot read in that tick.
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
    return inputs, residuals, cotangents, kept


def _coloured(schedule: Grid, live: dict[Work, tuple[int, int]]) -> tuple[int, dict[Work, int]]:
    """The lowest free slot of its device for each interval of ticks, which uses the fewest slots."""
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
