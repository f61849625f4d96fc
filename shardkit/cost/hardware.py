"""Chips, as their vendors describe them.

Peaks are dense bfloat16. The GB of memory on a TPU page are GiB; NVIDIA's GB are taken as 10^9 bytes, a little less
than a driver shows. A TPU link's bandwidth is one direction of one link: the figure that collectives reach according to
the scaling book, a tenth below Google's; for tpu7x there is only Google's. A GPU's is that into its NVLink switch, half
of the published sum of both directions. The network beyond a slice or a host is one direction, per chip.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from shardkit._arguments import checks
from shardkit._arguments.typed import typed

_TPU = "https://docs.cloud.google.com/tpu/docs/"
_BOOK = "https://jax-ml.github.io/scaling-book/tpus/"
_NVIDIA = "https://www.nvidia.com/en-us/data-center/"


class Chip(NamedTuple):
    """One accelerator.

    Attributes:
        name: its key in `chips`.
        flops: peak dense bfloat16 FLOP/s.
        hbm_bytes: bytes of memory.
        hbm_bandwidth: bytes/s between memory and the compute units.
        link_bandwidth: bytes/s, one direction: of one torus link (TPU), of all NVLinks together (GPU).
        torus: dimensions of the torus, with two links each; 0 if a switch connects the chips of a host.
        host: number of chips connected at link_bandwidth without a torus: a GPU host; 1 on a torus.
        network_bandwidth: bytes/s, one direction, per chip, beyond the slice or the host.
        source: the publication of the figures.
    """

    name: str
    flops: float
    hbm_bytes: int
    hbm_bandwidth: float
    link_bandwidth: float
    torus: int
    host: int
    network_bandwidth: float
    source: str


_GIB = 2**30
_GB = 10**9

_CHIPS = (
    Chip("v4", 275e12, 32 * _GIB, 1200e9, 45e9, 3, 1, 6.25e9, f"{_TPU}v4; {_BOOK}"),
    Chip("v5e", 197e12, 16 * _GIB, 819e9, 45e9, 2, 1, 3.125e9, f"{_TPU}v5e; {_BOOK}"),
    Chip("v5p", 459e12, 95 * _GIB, 2765e9, 90e9, 3, 1, 6.25e9, f"{_TPU}v5p; {_BOOK}"),
    Chip("v6e", 918e12, 32 * _GIB, 1638e9, 90e9, 2, 1, 12.5e9, f"{_TPU}v6e; {_BOOK}"),
    Chip("tpu7x", 2307e12, 192 * _GIB, 7380e9, 100e9, 3, 1, 12.5e9, f"{_TPU}tpu7x"),
    # 80 GB SXM
    Chip("a100", 312e12, 80 * _GB, 2039e9, 300e9, 0, 8, 25e9, f"{_NVIDIA}a100/"),
    # SXM; the datasheet's 1979 TFLOP/s are with sparsity
    Chip("h100", 989e12, 80 * _GB, 3350e9, 450e9, 0, 8, 50e9, f"{_NVIDIA}h100/"),
    Chip("h200", 989e12, 141 * _GB, 4800e9, 450e9, 0, 8, 50e9, f"{_NVIDIA}h200/"),
    # as in a DGX B200, which has 1440 GB and 64 TB/s for eight
    Chip("b200", 2250e12, 180 * _GB, 8000e9, 900e9, 0, 8, 50e9, f"{_NVIDIA}dgx-b200/"),
)
chips: Mapping[str, Chip] = MappingProxyType({chip.name: chip for chip in _CHIPS})
"""The chips that are known, by name, each with the pages that its figures are from."""


def chip(name: str | Chip) -> Chip:
    """Returns the chip with this name. If you pass a Chip, you get it back.

    Args:
        name: "v4", "v5e", "v5p", "v6e", "tpu7x", "a100", "h100", "h200" or "b200", ignoring capitals.

    Raises:
        ValueError: an unknown name.

    Example:
        >>> sk.cost.chip("v5e").hbm_bytes // 2**30
        16
    """
    if isinstance(name, Chip):
        return name
    key = str(name).lower()
    if key not in chips:
        checks.one_of("chip", "name", name, tuple(chips))
    return chips[key]


# What jax calls the TPUs.
_KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU7x": "tpu7x",
}


@typed
def chip_of(device_kind: str | None) -> Chip | None:
    """Finds the chip of a jax device, by `jax.devices()[0].device_kind`.

    Args:
        device_kind: such as "TPU v5 lite" or "NVIDIA H100 80GB HBM3".

    Returns:
        Chip; None for a CPU, for GPUs without the NVLinks in `chips` (PCIe, NVL), and for unknown chips.

    Example:
        >>> from shardkit.cost.hardware import chip_of
        >>> chip_of("TPU v5 lite").name, chip_of("NVIDIA H100 PCIe")
        ('v5e', None)
    """
    kind = str(device_kind or "")
    if kind in _KINDS:
        return chips[_KINDS[kind]]
    # Whole words: "GH200" contains "h200", and is another chip.
    words = re.split(r"[ -]", kind.lower())
    if "pcie" in words or "nvl" in words:
        return None
    for word in words:
        if word in chips:
            return chips[word]
    return None


def device_kind(name: str) -> str:
    """What jax calls a chip: the first of the kinds of a TPU, or the words with which a GPU's begins."""
    for kind, chip_name in _KINDS.items():
        if chip_name == name:
            return kind
    return f"NVIDIA {name.upper()}"


_chip = chip  # where an argument takes the name


def group_bandwidth(chip: str | Chip, axes: int = 1) -> float:
    """Returns the bytes/s one chip sends, in all directions, in a collective over torus dimensions or a host.

    A wrapped torus dimension has two links; a GPU sends into its switch for any group.

    Args:
        chip: a chip or its name.
        axes: torus dimensions that the group extends along; 1 for GPUs.

    Raises:
        ValueError: an unknown chip, or more dimensions than it has.

    Example:
        >>> sk.cost.group_bandwidth("v5p", axes=2)
        360000000000.0

    Source: How to Scale Your Model, part 3: W, the bidirectional bandwidth, times the number of axes.
    """
    described = _chip(chip)
    [axes] = checks.integers_from_one("group_bandwidth", axes=axes)
    most = max(1, described.torus)
    if axes > most:
        raise ValueError(
            f"group_bandwidth: axes must be at most {most} for chip {described.name!r}; got {axes}. "
            "Choose fewer axes or another chip."
        )
    if not described.torus:
        return described.link_bandwidth
    return described.link_bandwidth * 2 * axes
