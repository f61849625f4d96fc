"""Kernels used inside shard_map."""

from shardkit.collectives import hierarchical, ring
from shardkit.collectives.basic import (
    all_gather,
    all_reduce,
    all_to_all,
    axis_index,
    axis_size,
    broadcast,
    reduce_scatter,
    shift,
    vary,
)

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "axis_index",
    "axis_size",
    "broadcast",
    "hierarchical",
    "reduce_scatter",
    "ring",
    "shift",
    "vary",
]
