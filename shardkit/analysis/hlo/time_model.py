"""The time model of reports.

Compute takes the longer of FLOPs over the chip's bf16 peak and bytes over its memory bandwidth. A collective takes the
bytes that one device sends over the bandwidth that its group can use: on a torus, both directions of every dimension
along which the group extends, one direction for a permute; on GPUs, NVLink inside a host and the network between hosts.
Each device of a tpu7x has half of its chip's compute and memory bandwidth and all of the chip's links.
Latency, contention between collectives and the chip's real efficiency are left out, so times are lower bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

from shardkit.analysis.hlo.compute import Clock
from shardkit.analysis.hlo.groups import Groups
from shardkit.cost import Chip, group_bandwidth


def clock_of(platform: str, chip: Chip, places: Sequence[Sequence[int]]) -> Clock:
    """The model for a mesh whose device i is at `places[i]`: torus coordinates, or (slice, host, GPU)."""

    def compute(flops: int, size: int) -> float:
        return max(flops / chip.flops, size / chip.hbm_bandwidth)

    @lru_cache(maxsize=1024)
    def bandwidth(kind: str, groups: Groups) -> float:
        spans = {
            dim
            for group in groups or (tuple(range(len(places))),)
            for device in group[1:]
            for dim, (a, b) in enumerate(zip(places[group[0]], places[device], strict=True))
            if a != b
        }
        if platform == "cuda":
            return chip.network_bandwidth if spans & {0, 1} else chip.link_bandwidth
        return chip.link_bandwidth if kind == "ppermute" else group_bandwidth(chip, max(1, len(spans)))

    def wire(kind: str, groups: Groups, sent: Fraction) -> float:
        return float(sent) / bandwidth(kind, groups)

    return Clock(compute, wire)
