"""DualPipeV: the V of ZB-V, with pairs of a forward and a backward that overlap their communication."""

from __future__ import annotations

from shardkit.schedules.base import Schedule, build_schedule, builder, check_sizes
from shardkit.schedules.words import parse_v_order


@builder
def dualpipe_v(devices: int, microbatches: int) -> Schedule:
    """Two chunks on each device, placed as a V; most cells are a forward of one and a backward of the other chunk.

    It splits the backward only to fill a gap. With fewer than 2p microbatches, each device runs the order for 2p and
    leaves out the microbatches that do not exist.

    Args:
        devices: number p of pipeline devices.
        microbatches: microbatches m per step.

    Returns:
        A Schedule with the placement "v".

    Raises:
        ValueError: a size below 1.

    Cost: a bubble of (p-1) (F&B + B - 3W) / 2, where F&B is the time of a forward and a backward that overlap, if m is
        at least 2p, F = B - W, W is at most F and F&B = F + B (simulate other costs); p + 1/2 microbatches in flight.

    Example:
        >>> sk.schedules.dualpipe_v(devices=4, microbatches=8).order(0)[16:20]
        ['7F3', '0F7', '7B3', '7F4']

    Source: DeepSeek-V3 (arXiv:2412.19437) and the DualPipe repository, where it is the "cut-in-half" schedule.
    """
    p, microbatches = check_sizes("dualpipe_v", devices=devices, microbatches=microbatches)
    total = max(microbatches, 2 * p)
    orders = []
    # Worked example, device 0 of two with four microbatches. Warm-up: F0 F0. Both chunks forward: F0 F1. Chunk 1 back
    # in halves: I1 W F1. Steady state: "F0 B1" "F1 B0". Drain: B1 "F1 B0". The end: B1 I0, then W I0 W.
    for d in range(p):
        # Warm-up: forward passes of chunk 0, until microbatch 0 arrives at chunk 1 of this device.
        words = ["F0"] * (2 * (p - 1 - d))
        # Both chunks run forward, in turn.
        words += ["F0", "F1"] * (d + 1)
        # Chunk 1 runs backward too, in halves: its weight gradients fill the gaps.
        words += ["I1", "W", "F1"] * (p - 1 - d)
        # The steady state: a forward of one chunk with a backward of the other.
        pairs = ["F0 B1", "F1 B0"] * (total - 2 * p + d + 1)
        if d == p - 1:
            # The input of chunk 1 comes from chunk 0 of this device, so the first two actions cannot be a pair.
            pairs[:1] = ["F0", "B1"]
        words += pairs
        # Drain: chunk 0 has no forward passes left.
        words += ["B1", "F1 B0"] * (p - 1 - d)
        # The last backward passes, chunk 1 and chunk 0 in turn: whole ones first, then in two parts.
        for number in range(2 * (d + 1)):
            op = "B" if number <= d else "I"
            chunk = 1 - number % 2
            words.append(f"{op}{chunk}")
        words += ["W", "I0"] * (p - 1 - d)
        words += ["W"] * (d + 1)
        orders.append(parse_v_order(d, p, words))
    return build_schedule("dualpipe_v", orders, microbatches, "v")
