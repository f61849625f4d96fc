"""ZB-H1: 1F1B with delayed weight gradients, which fill idle time."""

from __future__ import annotations

from shardkit.schedules.action import alone
from shardkit.schedules.base import Schedule, builder, scheduled, sizes


@builder
def zero_bubble_h1(devices: int, microbatches: int) -> Schedule:
    """1F1B with a split backward: device d delays weight gradients by d input gradients, so that all have p in flight.

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
    devices, microbatches = sizes("zero_bubble_h1", devices=devices, microbatches=microbatches)
    orders = []
    for d in range(devices):
        ahead, weighed = min(microbatches, devices - 1 - d), 0
        order = [alone(d, "F", i) for i in range(ahead)]
        for i in range(microbatches):
            order += [alone(d, "F", i + ahead), alone(d, "I", i)]
            if i >= d or i + ahead >= microbatches:
                order.append(alone(d, "W", weighed))
                weighed += 1
        orders.append(order + [alone(d, "W", i) for i in range(weighed, microbatches)])
    return scheduled("zero_bubble_h1", orders, microbatches)
