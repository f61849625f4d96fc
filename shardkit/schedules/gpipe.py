"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from shardkit.schedules.action import alone
from shardkit.schedules.base import Schedule, scheduled, sizes


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards, each in the order of microbatches.

    Args:
        stages: devices p of the pipe axis.
        microbatches: m, in a step.

    Returns:
        A Schedule.

    Raises:
        ValueError: a size below 1.

    Cost: a bubble of (p-1) (F + B); m microbatches in flight.

    Source: Huang et al., GPipe (arXiv:1811.06965).
    """
    stages, microbatches = sizes("gpipe", stages=stages, microbatches=microbatches)
    orders = [[alone(d, op, i) for op in "FB" for i in range(microbatches)] for d in range(stages)]
    return scheduled("gpipe", orders, microbatches)
