"""Lockstep: a forward and a backward at each tick, so that one program without branches runs it at 1F1B's bubble."""

from __future__ import annotations

from shardkit.schedules.action import Action
from shardkit.schedules.base import Schedule, builder, check_sizes


@builder
def lockstep(devices: int, microbatches: int, chunks: int = 1) -> Schedule:
    """In every tick, all devices run one forward and one backward together.

    Microbatch i = g p + r goes through stage s = c p + d forward at tick g v p + c p + r + d and backward at tick (v p
    - 1) + g v p + (v-1-c) p + r + (p-1-d). Devices send at the end of a tick, and use the values in the next.

    Args:
        devices: number p of pipeline devices.
        microbatches: microbatches m per step.
        chunks: model stages v per device; stage s is on device s % p.

    Returns:
        A Schedule.

    Raises:
        ValueError: a size below 1.

    Cost: a bubble of (p-1) (F + B) / v where p divides m or v is 1, although every tick synchronizes all devices. With
        one chunk 2 (p-1-d) + 1 microbatches in flight on device d, 2p - 3 slots for stage inputs and 1 for a cotangent.

    Example:
        >>> print(sk.schedules.lockstep(devices=2, microbatches=2))
        tick      0       1       2       3
        device 0  0F0     0F1     0B0     0B1
        device 1  .       1F0/1B0 1F1/1B1 .
    """
    p, m, v = check_sizes("lockstep", devices=devices, microbatches=microbatches, chunks=chunks)
    cells: dict[tuple[int, int], list[Action]] = {}
    # In this order a cell has its forward first. The last stage needs that: its backward of a microbatch falls on the
    # tick of its forward.
    for op in "FB":
        for i in range(m):
            # Round g of p microbatches, of which i is number r; chunk c of device d has stage s. Of two devices with
            # two chunks, microbatch 3 is number 1 of round 1, and stage 2 is chunk 1 of device 0: its forward is at
            # tick 4 + 1 + 2 + 0 = 7.
            g, r = divmod(i, p)
            for s in range(v * p):
                c, d = divmod(s, p)
                tick = g * v * p + r
                if op == "F":
                    tick += c * p + d
                else:
                    tick += (v * p - 1) + (v - 1 - c) * p + (p - 1 - d)
                cells.setdefault((d, tick), []).append(Action(s, op, i))
    ticks = 1 + max(tick for _, tick in cells)
    rows = []
    for d in range(p):
        row = []
        for tick in range(ticks):
            row.append(tuple(cells.get((d, tick), ())))
        rows.append(tuple(row))
    return Schedule(tuple(rows), name="lockstep")
