"""What a pipeline's schedule wastes and holds.

Its stages run masked (`mode="masked"`): at each tick all devices compute what any of them does.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import zip_longest
from typing import NamedTuple

from shardkit.planner.layout import Layout

_BACKWARD = 3  # forwards that a backward takes, which begins with one


class PipelineRun(NamedTuple):
    """A schedule as it runs.

    Attributes:
        bubble: what it wastes over its work, a fraction.
        ticks: the ticks of a step.
        inputs: inputs of its stage that a device holds at once.
    """

    bubble: float
    ticks: int
    inputs: int


@lru_cache(maxsize=4096)
def _run_schedule(stages: int, microbatches: int, chunks: int) -> PipelineRun:
    schedule = Layout(stage=stages, microbatches=microbatches, chunks=chunks).schedule
    assert schedule is not None
    forwards = 0
    ticks = 0
    # One tick of all devices: in the masked step each of them computes what any of them does.
    for cells in zip_longest(*schedule.rows, fillvalue=()):
        operations: set[str] = set()  # of all devices at this tick
        for cell in cells:
            operations.update(action.op for action in cell)
        if "F" in operations:
            forwards += 1
        if "B" in operations:
            forwards += _BACKWARD
        ticks += 1
    work = (1 + _BACKWARD) * microbatches * chunks
    return PipelineRun(forwards / work - 1, ticks, schedule.slots().inputs)


def run_pipeline(layout: Layout) -> PipelineRun:
    """What the schedule of a layout with stages wastes and holds.

    Worked example: 1F1B on two stages with two microbatches has six ticks, in which some stage runs F, F, B, F or B, B
    and B. They take 1 + 1 + 3 + 4 + 3 + 3 = 15 forwards, and the work of a stage is 2 * 4 = 8: a bubble of 7/8.
    """
    return _run_schedule(layout.stage, layout.microbatches, layout.chunks)
