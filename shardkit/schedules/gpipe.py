"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from shardkit.schedules.action import make_cells
from shardkit.schedules.base import Schedule, build_schedule, builder, check_sizes


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
    devices, microbatches = check_sizes("gpipe", devices=devices, microbatches=microbatches)
    orders = []
    for d in range(devices):
        forwards = make_cells(d, "F", range(microbatches))
        backwards = make_cells(d, "B", range(microbatches))
        orders.append(forwards + backwards)
    return build_schedule("gpipe", orders, microbatches)
