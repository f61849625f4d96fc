"""1F1B: each device runs the backward of a microbatch as early as possible, so that few are in flight."""

from __future__ import annotations

from shardkit.schedules.action import make_cell, make_cells
from shardkit.schedules.base import Schedule, build_schedule, builder, check_sizes


@builder
def one_f_one_b(devices: int, microbatches: int) -> Schedule:
    """One forward, one backward, after a warm-up of p - 1 - d forwards on device d.

    Args:
        devices: number p of pipeline devices.
        microbatches: microbatches m per step.

    Returns:
        A Schedule.

    Raises:
        ValueError: a size below 1.

    Cost: a bubble of (p-1) (F + B); p - d microbatches in flight on device d, for any m.

    Example:
        >>> print(sk.schedules.one_f_one_b(devices=2, microbatches=3))
        tick      0   1   2   3   4   5   6   7
        device 0  0F0 0F1 .   0B0 0F2 0B1 .   0B2
        device 1  .   1F0 1B0 1F1 1B1 1F2 1B2 .

    Source: Narayanan et al., PipeDream (SOSP 2019) and Megatron-LM (arXiv:2104.04473), section 2.2.1.
    """
    devices, microbatches = check_sizes("one_f_one_b", devices=devices, microbatches=microbatches)
    orders = []
    for d in range(devices):
        # None on the last device, where the backward of a microbatch follows its forward at once.
        warm_up = devices - 1 - d
        order = make_cells(d, "F", range(warm_up))
        for i in range(microbatches):
            # The first stages run out of microbatches: `build_schedule` leaves out those from m on.
            order.append(make_cell(d, "F", i + warm_up))
            order.append(make_cell(d, "B", i))
        orders.append(order)
    return build_schedule("one_f_one_b", orders, microbatches)
