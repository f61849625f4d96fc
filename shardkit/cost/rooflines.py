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
    return network_intensity(chip, axes)


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
    return ffn / network_intensity(chip, axes)


def fsdp_tensor_batch(
    chip: str | Chip, ffn: int, *, fsdp_axes: int | None = None, tensor_axes: int | None = None
) -> float:
    """Tokens per device from which the best mix of FSDP and tensor parallelism is compute bound.

    a^2 / (F M_X M_Y), where a = C / W: 2550^2 / (2 F) on v5p with two axes for FSDP and one for tensor parallelism.
    They use different axes concurrently; on a GPU they share the links, one after the other, and it is 4 a^2 / F.

    Args:
        chip: a chip or its name.
        ffn: width F of the feed-forward layers.
        fsdp_axes: torus dimensions M_X for FSDP; None: all but one (at least 1; GPUs: 1).
        tensor_axes: torus dimensions M_Y for tensor parallelism; None: 1.

    Returns:
        Tokens per device.

    Raises:
        ValueError: an unknown chip, a size below 1, or more axes together than the torus has.

    Example:
        >>> round(sk.cost.fsdp_tensor_batch("v5p", ffn=28672))
        113

    Source: How to Scale Your Model, part 5, "Mixed FSDP and Tensor Parallelism".
    """
    ffn, fsdp_axes, tensor_axes = _split_axes("fsdp_tensor_batch", chip, ffn, fsdp_axes, tensor_axes)
    # at the best split both take equally long: twice that where they share the links, and tokens go by the square
    shared = 1 if hardware.chip(chip).torus else 4
    return shared * network_intensity(chip) ** 2 / (ffn * fsdp_axes * tensor_axes)


def fsdp_tensor_split(
    chip: str | Chip,
    ffn: int,
    *,
    tokens: float,
    chips: int,
    fsdp_axes: int | None = None,
    tensor_axes: int | None = None,
) -> tuple[float, float]:
    """The FSDP and tensor-parallel ways with the shortest communication time.

    Forward, FSDP takes 4 D F / (Y W M_X) and tensor parallelism 4 B D / (X W M_Y) seconds per layer; with X Y = N the
    longer of the two, and also their sum, is shortest at X = sqrt(B N M_X / (F M_Y)), where they are equal.

    Args:
        chip: a chip or its name.
        ffn: width F of the feed-forward layers.
        tokens: B, tokens in the whole batch.
        chips: N, number of chips.
        fsdp_axes: torus dimensions M_X for FSDP; None: all but one (at least 1; GPUs: 1).
        tensor_axes: torus dimensions M_Y for tensor parallelism; None: 1.

    Returns:
        (X, Y), not rounded, each between 1 and N.

    Raises:
        ValueError: an unknown chip, a size below 1, or more axes together than the torus has.

    Example:
        >>> fsdp, tensor = sk.cost.fsdp_tensor_split("v5p", 28672, tokens=2**21, chips=4096)
        >>> round(fsdp), round(tensor, 1)
        (774, 5.3)

    Source: How to Scale Your Model, part 5, "Mixed FSDP and Tensor Parallelism".
    """
    where = "fsdp_tensor_split"
    ffn, fsdp_axes, tensor_axes = _split_axes(where, chip, ffn, fsdp_axes, tensor_axes)
    [chips] = _check.whole(where, chips=chips)
    [tokens] = _check.positive(where, tokens=tokens)
    fsdp = min(float(chips), max(1.0, math.sqrt(tokens * chips * fsdp_axes / (ffn * tensor_axes))))
    return fsdp, chips / fsdp


def _split_axes(
    where: str, chip: str | Chip, ffn: int, fsdp_axes: int | None, tensor_axes: int | None
) -> tuple[int, int, int]:
    it = hardware.chip(chip)
    fsdp_axes = max(1, it.torus - 1) if fsdp_axes is None else fsdp_axes
    tensor_axes = 1 if tensor_axes is None else tensor_axes
    ffn, fsdp_axes, tensor_axes = _check.whole(where, ffn=ffn, fsdp_axes=fsdp_axes, tensor_axes=tensor_axes)
    # a GPU sends both through the same links, one after the other: an axis each, as if it had two
    if fsdp_axes + tensor_axes > max(2, it.torus):
        raise ValueError(
            f"{where}: fsdp_axes and tensor_axes must together be at most {max(2, it.torus)} for chip {it.name!r}; "
            f"got {fsdp_axes} and {tensor_axes}. Choose fewer axes or another chip."
        )
    return ffn, fsdp_axes, tensor_axes
