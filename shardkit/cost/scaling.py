"""From which batch on, and up to how many ways, a parallel layer is compute bound.

Tokens are per device, values have two bytes, and a layer is its feed-forward block, as in Austin et al., How
to Scale Your Model (https://jax-ml.github.io/scaling-book/), part 5 (training). C is a chip's FLOP/s and W the bytes/s
that it sends over one torus dimension in both directions (on a GPU, into its switch).
"""

from __future__ import annotations

import math

from shardkit import _check
from shardkit.cost import hardware
from shardkit.cost.hardware import Chip
from shardkit.cost.rooflines import network_intensity


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
        chip, ffn, fsdp_axes, tensor_axes: as for `fsdp_tensor_batch`.
        tokens: B, tokens in the whole batch.
        chips: N, number of chips.

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
