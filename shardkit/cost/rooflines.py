"""Rooflines: whether a computation is compute, memory or network bound, and from which batch size.

Compute, memory and network overlap perfectly, so that the longest counts. Tokens are per device, values have two bytes,
and a layer is its feed-forward block, as in the source: Austin et al., How to Scale Your Model
(https://jax-ml.github.io/scaling-book/), parts 1 (roofline) and 5 (training). C is a chip's FLOP/s and W the bytes/s
that it sends over one torus dimension in both directions (on a GPU, into its switch).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from shardkit import _check
from shardkit.cost import hardware
from shardkit.cost.hardware import Chip, group_bandwidth


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


def critical_intensity(chip: str | Chip) -> float:
    """FLOPs per byte from which a chip is compute bound: peak over memory bandwidth (v5e: 240).

    Also roughly the batch, in tokens per device, from which a 16-bit matmul with a large weight is compute bound.

    Args:
        chip: a chip or its name.

    Returns:
        FLOPs/byte.

    Raises:
        ValueError: an unknown chip.

    Example:
        >>> round(sk.cost.critical_intensity("v5e"))
        241

    Source: How to Scale Your Model, part 1.
    """
    it = hardware.chip(chip)
    return it.flops / it.hbm_bandwidth


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
    it = hardware.chip(chip)
    flops, bytes, sent = _check.at_least_zero("roofline", flops=flops, bytes=bytes, sent=sent)
    _check.positive("roofline", work=flops + bytes + sent)
    times = {
        "compute": flops / it.flops,
        "memory": bytes / it.hbm_bandwidth,
        "network": sent / group_bandwidth(it, axes),
    }
    bound = max(times, key=lambda part: times[part])
    return Roofline(
        times[bound],
        times["compute"],
        times["memory"],
        times["network"],
        bound,
        flops / bytes if bytes else math.inf,
        critical_intensity(it),
        flops / times[bound],
    )


def data_parallel_batch(chip: str | Chip, axes: int = 1) -> float:
    """Tokens per device from which data parallelism and FSDP are compute bound: C / (W axes).

    DP all-reduces the gradients during the backward, FSDP gathers the weights during the forward; both take the same
    share of their compute.

    Args:
        chip: a chip or its name.
        axes: torus dimensions that the parameters are reduced or gathered over; 1 for GPUs.

    Returns:
        Tokens per device.

    Raises:
        ValueError: an unknown chip, or more axes than it has.

    Example:
        >>> round(sk.cost.data_parallel_batch("v5p", axes=3))
        850

    Source: How to Scale Your Model, part 5, "Data Parallelism" and "FSDP": 2550 / axes on v5p.
    """
    return hardware.chip(chip).flops / group_bandwidth(chip, axes)


def tensor_parallel_ways(chip: str | Chip, ffn: int, axes: int = 1) -> float:
    """The most tensor-parallel ways that stay compute bound, for any batch: F W axes / C.

    Args:
        chip: a chip or its name.
        ffn: width F of the feed-forward layers.
        axes: torus dimensions that the activations are gathered over; 1 for GPUs.

    Returns:
        Ways, not rounded.

    Raises:
        ValueError: an unknown chip, more axes than it has, or ffn below 1.

    Example:
        >>> round(sk.cost.tensor_parallel_ways("v5p", ffn=28672), 1)
        11.2

    Source: How to Scale Your Model, part 5, "Tensor Parallelism": Y < axes F / 2550 on v5p.
    """
    [ffn] = _check.whole("tensor_parallel_ways", ffn=ffn)
    return ffn / data_parallel_batch(chip, axes)
