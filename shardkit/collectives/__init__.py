"""Kernels for use inside `jax.shard_map`: collectives with their layout, errors and cost, on pytrees.

Start with `basic.py`. Imports cost, and single files such as `checks.py`; no plan and no mesh.
"""

from shardkit._jax import gloo
from shardkit.collectives import algorithms, compressed, hierarchical, ring, tables
from shardkit.collectives.axes import axis_index, axis_size, vary, vary_like
from shardkit.collectives.basic import all_gather, all_reduce, all_to_all, reduce_scatter
from shardkit.collectives.bucketed import all_reduce_tree
from shardkit.collectives.debug import debug_print
from shardkit.collectives.matmul import all_gather_matmul, matmul_reduce_scatter
from shardkit.collectives.padding import all_gather_uneven, pad_to_axis, reduce_scatter_uneven, unpad_from_axis
from shardkit.collectives.permute import broadcast, shift
from shardkit.collectives.ragged import ragged_all_to_all
from shardkit.collectives.replicated import assume_replicated
from shardkit.collectives.shapes import gather_to_one, halo_exchange, prefix_scan

gloo.mend()  # before any program with a collective can be lowered

__all__ = [
    "algorithms",
    "all_gather",
    "all_gather_matmul",
    "all_gather_uneven",
    "all_reduce",
    "all_reduce_tree",
    "all_to_all",
    "assume_replicated",
    "axis_index",
    "axis_size",
    "broadcast",
    "compressed",
    "debug_print",
    "gather_to_one",
    "halo_exchange",
    "hierarchical",
    "matmul_reduce_scatter",
    "pad_to_axis",
    "prefix_scan",
    "ragged_all_to_all",
    "reduce_scatter",
    "reduce_scatter_uneven",
    "ring",
    "shift",
    "tables",
    "unpad_from_axis",
    "vary",
    "vary_like",
]
