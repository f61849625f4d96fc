"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from shardkit.schedules.action import alone
from shardkit.schedules.base import Schedule, builder, scheduled, sizes


@builder
def gpipe(devices: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards, each in the order of microbatches.

    Args:
        devices: number p of pipeline devices.
        microbatches: microbatches m per step.

    Returns:
        A Schedule.

    Raises:
        ValueError: a size below 1.

    Cost: a bubble of (p-1) (F + B); m microbatches in flight.

    Example:
        >>> print(sk.schedules.gpipe(devices=2, microbatches=2))
        tick      0   1   2   3   4   5
        device 0  0F0 0F1 .   .   0B0 0B1
        device 1  .   1F0 1F1 1B0 1B1 .

    Source: Huang et al., GPipe (arXiv:1811.06965).
    """
    devices, microbatches = sizes("gpipe", devices=devices, microbatches=microbatches)
    orders = [[alone(d, op, i) for op in "FB" for i in range(microbatches)] for d in range(devices)]
    return scheduled("gpipe", orders, microbatches)
