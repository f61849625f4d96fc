"""Interleaved 1F1B: with v chunks of the model per device the bubble is v times smaller."""

from __future__ import annotations

from shardkit.schedules.action import make_cell
from shardkit.schedules.base import Schedule, build_schedule, builder, check_sizes


@builder
def interleaved(devices: int, microbatches: int, chunks: int) -> Schedule:
    """1F1B over chunks: p microbatches go through chunk after chunk, with a warm-up of (v-1) p + 2 (p-1-d) forwards.

    If p does not divide m, the last round has fewer microbatches, and later actions move up.

    Args:
        devices: number p of pipeline devices.
        microbatches: microbatches m per step.
        chunks: model stages v per device; stage s is on device s % p. One chunk is 1F1B.

    Returns:
        A Schedule.

    Raises:
        ValueError: a size below 1.

    Cost: a bubble of (p-1) (F + B) / v where p divides m; p + (p-1)/v microbatches in flight, p + (m-p)/v
        where m is from p to 2p - 1.

    Example:
        >>> schedule = sk.schedules.interleaved(devices=2, microbatches=2, chunks=2)
        >>> schedule.order(0)
        ['0F0', '0F1', '2F0', '2F1', '2B0', '2B1', '0B0', '0B1']
        >>> sk.schedules.interleaved(4, 8, chunks=2).simulate().bubble  # (p-1) / (v m)
        0.1875

    Source: Narayanan et al., Megatron-LM (arXiv:2104.04473), section 2.2.2.
    """
    p, microbatches, chunks = check_sizes("interleaved", devices=devices, microbatches=microbatches, chunks=chunks)
    # What a device runs, in the order of forwards: p microbatches through chunk 0, then through chunk 1, and so on.
    turns = []
    for first in range(0, microbatches, p):
        for chunk in range(chunks):
            # Microbatches from m on stay in the list, so that each forward of the last round meets the same backward as
            # in a full round. `build_schedule` leaves them out.
            for microbatch in range(first, first + p):
                turns.append((microbatch, chunk))
    orders = []
    for d in range(p):
        forwards = []
        backwards = []
        for i, chunk in turns:  # the backwards go through the chunks from the last to the first
            forwards.append(make_cell(chunk * p + d, "F", i))
            backwards.append(make_cell((chunks - 1 - chunk) * p + d, "B", i))
        # With one chunk nothing returns around the ring, so the warm-up is shorter.
        later_devices = p - 1 - d
        warm_up = (chunks - 1) * p + 2 * later_devices if chunks > 1 else later_devices
        warm_up = min(warm_up, len(turns))
        order = forwards[:warm_up]
        # The backwards lag behind by the warm-up: those that find no forward are the drain below.
        for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
            order += [forward, backward]
        order += backwards[len(turns) - warm_up :]
        orders.append(order)
    return build_schedule("interleaved", orders, microbatches)
