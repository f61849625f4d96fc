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


def arithmetic_intensity(flops: float, bytes: float) -> float:
    """FLOPs per byte.

    Args:
        flops: FLOPs of a computation.
        bytes: bytes that it moves.

    Returns:
        FLOPs/byte.

    Raises:
        ValueError: bytes that are not positive, or negative FLOPs.

    Example:
        >>> sk.cost.arithmetic_intensity(flops=2 * 8 * 1024**2, bytes=2 * 1024**2)
        8.0

    Source: How to Scale Your Model, part 1.
    """
    [flops] = _check.at_least_zero("arithmetic_intensity", flops=flops)
    [bytes] = _check.positive("arithmetic_intensity", bytes=bytes)
    return flops / bytes


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


def matmul_intensity(rows: int, inner: int, columns: int, *, value_bytes: float = 2) -> float:
    """FLOPs per byte of [rows, inner] times [inner, columns]: 2 B D F over the bytes of the three matrices.

    Args:
        rows: B, tokens.
        inner: D, the contracted width.
        columns: F.
        value_bytes: bytes per value.

    Returns:
        FLOPs/byte; about `rows` for 16-bit values where rows are few.

    Raises:
        ValueError: a size below 1, or value_bytes that are not positive.

    Example:
        >>> round(sk.cost.matmul_intensity(8, 4096, 4096), 2)
        7.97

    Source: How to Scale Your Model, part 1.
    """
    rows, inner, columns = _check.whole("matmul_intensity", rows=rows, inner=inner, columns=columns)
    [value_bytes] = _check.positive("matmul_intensity", value_bytes=value_bytes)
    return 2 * rows * inner * columns / (value_bytes * (rows * inner + inner * columns + rows * columns))


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


def network_intensity(chip: str | Chip, axes: int = 1) -> float:
    """FLOPs per byte sent from which a chip is compute bound: C / (W axes); 2550 on v5p with one axis.

    Args:
        chip: a chip or its name.
        axes: torus dimensions used at once; 1 for GPUs.

    Returns:
        FLOPs/byte.

    Raises:
        ValueError: an unknown chip, or more axes than it has.

    Example:
        >>> round(sk.cost.network_intensity("v5p"))
        2550

    Source: How to Scale Your Model, part 5.
    """
    return hardware.chip(chip).flops / group_bandwidth(chip, axes)
