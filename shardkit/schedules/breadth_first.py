"""Breadth-first: all microbatches run through a chunk before the next chunk begins."""

from __future__ import annotations

from shardkit.schedules.action import make_cells
from shardkit.schedules.base import Schedule, build_schedule, builder, check_sizes


@builder
def breadth_first(devices: int, microbatches: int, chunks: int) -> Schedule:
    """All forwards chunk by chunk, then all backwards chunk by chunk: you need a chunk's weights once each way.

    Args:
        devices: number p of pipeline devices.
        microbatches: microbatches m per step.
        chunks: model stages v per device; stage s is on device s % p. One chunk is GPipe.

    Returns:
        A Schedule.

    Raises:
        ValueError: a size below 1.

    Cost: a bubble of (p-1) (F + B) / v where m is at least p; m microbatches in flight.

    Example:
        >>> sk.schedules.breadth_first(devices=2, microbatches=2, chunks=2).order(0)
        ['0F0', '0F1', '2F0', '2F1', '2B0', '2B1', '0B0', '0B1']

    Source: Lamy-Poirier, Breadth-First Pipeline Parallelism (arXiv:2211.05953).
    """
    devices, microbatches, chunks = check_sizes(
        "breadth_first", devices=devices, microbatches=microbatches, chunks=chunks
    )
    orders = []
    for d in range(devices):
        stages = range(d, chunks * devices, devices)  # of this device
        order = []
        for stage in stages:
            order += make_cells(stage, "F", range(microbatches))
        # The last chunk first: its cotangents are the first that come.
        for stage in reversed(stages):
            order += make_cells(stage, "B", range(microbatches))
        orders.append(order)
    return build_schedule("breadth_first", orders, microbatches)
