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
    """The number of slots in each buffer, the most that any device needs, and the slot of each piece of work.

    The first stage has no input, since it recomputes the embedding. The last has no cotangent, since it has the loss.

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


def assign_slots(schedule: Grid, lives: Sequence[Lives]) -> Slots:
    """The slots of a schedule; `lives` has the ticks in which values are needed, in the order of `find_lives`."""
    inputs, saved, cotangents, kept = [_assign_buffer(schedule, live) for live in lives]
    return Slots(
        inputs=inputs.slots,
        saved=saved.slots,
        cotangents=cotangents.slots,
        kept=kept.slots,
        input_of=inputs.slot_of,
        saved_of=saved.slot_of,
        cotangent_of=cotangents.slot_of,
        kept_of=kept.slot_of,
    )


class _Buffer(NamedTuple):
    """The number of slots of one buffer, the most that any device needs, and the slot of each piece of work."""

    slots: int
    slot_of: dict[Work, int]


def find_lives(schedule: Grid, saved: bool) -> tuple[Lives, Lives, Lives, Lives]:
    """When stage inputs, residuals, cotangents and weight-gradient residuals are needed.

    A value that arrives at the end of a tick is there from the next tick on. It may overwrite a slot that is read in
    the tick in which it is sent.

    Worked example: 1F1B on two devices with three microbatches, B from the stage's input. Stage 1 gets the input of
    microbatch 1 at the end of tick 1, and runs 1F1 in tick 3 and 1B1 in tick 4: it is needed from tick 2 to tick 4.
    """
    inputs: Lives = {}
    residuals: Lives = {}
    cotangents: Lives = {}
    kept: Lives = {}
    for (stage, op, i), tick in schedule.ticks.items():
        work = (stage, i)
        if op == "W":
            kept[work] = (schedule.ticks[Action(stage, "I", i)] + 1, tick)
            continue
        # The last reader of an input: F if it saves residuals, else the backward.
        reads_input = (op == "F") == saved
        if stage and reads_input:
            inputs[work] = (schedule.ticks[Action(stage - 1, "F", i)] + 1, tick)
        if op == "F":
            continue
        if saved:
            # From the tick of F on, without + 1: F writes its residuals while a backward in the same cell still reads
            # others.
            residuals[work] = (schedule.ticks[Action(stage, "F", i)], tick)
        # The first need is this stage's own forward. The second, if there is one, is the backward of the next stage.
        _, *later_stage = schedule.needs(Action(stage, op, i))
        for need in later_stage:
            cotangents[work] = (schedule.ticks[need] + 1, tick)
    return inputs, residuals, cotangents, kept


def _assign_buffer(schedule: Grid, lives: Lives) -> _Buffer:
    """Gives each value the lowest free slot of its device, in the order of begin ticks: this uses the fewest slots."""
    slot_of: dict[Work, int] = {}
    counts = [0] * schedule.devices
    free: list[list[int]] = [[] for _ in counts]
    taken: list[list[tuple[int, int]]] = [[] for _ in counts]  # the last tick in which a slot is needed, and the slot
    for work, (begin, end) in sorted(lives.items(), key=lambda item: item[1]):
        stage, _ = work
        device = schedule.device(stage)
        # A slot that is read in tick 4 takes a new value from tick 5 on; the heap has the slot that is free first on
        # top.
        while taken[device] and taken[device][0][0] < begin:
            _, slot = heappop(taken[device])
            heappush(free[device], slot)
        if not free[device]:
            heappush(free[device], counts[device])
            counts[device] += 1
        slot = heappop(free[device])
        slot_of[work] = slot
        heappush(taken[device], (end, slot))
    return _Buffer(max(counts), slot_of)
