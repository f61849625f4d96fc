"""Rooflines: whether a computation is compute, memory or network bound.

Compute, memory and network overlap perfectly, so that the longest counts, as in Austin et al., How to Scale Your Model
(https://jax-ml.github.io/scaling-book/), part 1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from shardkit._arguments import checks
from shardkit.cost import hardware
from shardkit.cost.hardware import Chip, group_bandwidth
from shardkit.cost.links import Link


class Roofline(NamedTuple):
    """The times of a computation on one chip, and its bound.

    Attributes:
        seconds: the longest of the three times.
        compute_seconds: FLOPs over the chip's peak.
        memory_seconds: bytes over its memory bandwidth.
        network_seconds: bytes sent over its links' bandwidth.
        bound: "compute", "memory" or "network".
        intensity: FLOPs per byte of memory traffic.
        critical_intensity: FLOPs per byte at which compute and memory take equally long.
        flops_per_second: FLOP/s attained.
    """

    seconds: float
    compute_seconds: float
    memory_seconds: float
    network_seconds: float
    bound: str
    intensity: float
    critical_intensity: float
    flops_per_second: float


def roofline(flops: float, bytes: float, chip: str | Chip, *, sent: float = 0.0, axes: int = 1) -> Roofline:
    """The time of a computation on one chip, and its bound.

    Args:
        flops: FLOPs of one device.
        bytes: bytes of memory traffic of one device.
        chip: a chip or its name.
        sent: bytes that one device sends to others.
        axes: torus dimensions that it sends along; 1 for GPUs.

    Returns:
        Roofline, in seconds, FLOPs/byte and FLOP/s.

    Raises:
        ValueError: an unknown chip, a negative number, nothing to do at all, or more axes than the chip has.

    Example:
        >>> sk.cost.roofline(1e12, 1e10, "v5e").bound
        'memory'

    Source: Williams, Waterman, Patterson, Roofline (2009); How to Scale Your Model, part 1.
    """
    described = hardware.chip(chip)
    flops, bytes, sent = checks.at_least_zero("roofline", flops=flops, bytes=bytes, sent=sent)
    checks.positive("roofline", work=flops + bytes + sent)
    # Without latency and without overhead: each is the least that the chip can take.
    times = {
        "compute": flops / described.flops,
        "memory": bytes / described.hbm_bandwidth,
        "network": Link(0.0, group_bandwidth(described, axes)).seconds(sent),
    }
    bound = max(times, key=lambda part: times[part])
    seconds = times[bound]
    intensity = math.inf
    if bytes:
        intensity = flops / bytes
    return Roofline(
        seconds=seconds,
        compute_seconds=times["compute"],
        memory_seconds=times["memory"],
        network_seconds=times["network"],
        bound=bound,
        intensity=intensity,
        critical_intensity=described.flops / described.hbm_bandwidth,
        flops_per_second=flops / seconds,
    )
