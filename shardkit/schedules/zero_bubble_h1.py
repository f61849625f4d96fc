"""ZB-H1: 1F1B with delayed weight gradients, which fill idle time."""

from __future__ import annotations

from shardkit.schedules.action import make_cell, make_cells
from shardkit.schedules.base import Schedule, build_schedule, builder, check_sizes


@builder
def zero_bubble_h1(devices: int, microbatches: int) -> Schedule:
    """1F1B with a split backward: device d delays weight gradients by d input gradients, so all have p in flight.

    Args:
        devices: number p of pipeline devices.
        microbatches: microbatches m per step.

    Returns:
        A Schedule.

    Raises:
        ValueError: a size below 1.

    Cost: a bubble of (p-1) (F + B - W - min(F, B-W, W)) where m is at least p: the paper's (p-1) (F + B - 2W) where
        W is no more than F or B - W; at most p microbatches in flight.

    Example:
        >>> sk.schedules.zero_bubble_h1(devices=4, microbatches=8).simulate().bubble
        0.125
        >>> sk.schedules.one_f_one_b(devices=4, microbatches=8).simulate().bubble
        0.375

    Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv:2401.10241), section 2.2.
    """
    devices, microbatches = check_sizes("zero_bubble_h1", devices=devices, microbatches=microbatches)
    orders = []
    for d in range(devices):
        warm_up = min(microbatches, devices - 1 - d)
        weight_gradients = 0  # how many are done
        order = make_cells(d, "F", range(warm_up))
        for i in range(microbatches):
            order.append(make_cell(d, "F", i + warm_up))
            order.append(make_cell(d, "I", i))
            no_forward_left = i + warm_up >= microbatches
            # The warm-up puts p - 1 - d microbatches in flight, one more runs here, and the d weight gradients that are
            # not done yet keep d more: p on every device.
            if i >= d or no_forward_left:
                order.append(make_cell(d, "W", weight_gradients))
                weight_gradients += 1
        # 1F1B would idle here, because input gradients still go through the earlier devices.
        order += make_cells(d, "W", range(weight_gradients, microbatches))
        orders.append(order)
    return build_schedule("zero_bubble_h1", orders, microbatches)
