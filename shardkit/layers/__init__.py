"""Layers for your loss, inside `jax.shard_map`: linear, attention, norms, vocabulary, mixtures of experts.

Start with `linear.py`. Every layer takes `axis=None` for one device without a mesh. Imports collectives and
on_device; no strategy: a layer is passed its axis.
"""

from shardkit.layers.attention import dot_attention
from shardkit.layers.context_attention import ring_attention, ulysses_attention
from shardkit.layers.documents import deal
from shardkit.layers.linear import column_linear, device_major_qkv, local_groups, row_linear
from shardkit.layers.moe import moe
from shardkit.layers.norms import sharded_layer_norm, sharded_rms_norm
from shardkit.layers.recurrence import linear_recurrence
from shardkit.layers.routing import Capacity, Dropless, balance_bias, route, routing_stats
from shardkit.layers.vocabulary import vocab_cross_entropy, vocab_embed
from shardkit.layers.zigzag import positions, zigzag

__all__ = [
    "Capacity",
    "Dropless",
    "balance_bias",
    "column_linear",
    "deal",
    "device_major_qkv",
    "dot_attention",
    "linear_recurrence",
    "local_groups",
    "moe",
    "positions",
    "ring_attention",
    "route",
    "routing_stats",
    "row_linear",
    "sharded_layer_norm",
    "sharded_rms_norm",
    "ulysses_attention",
    "vocab_cross_entropy",
    "vocab_embed",
    "zigzag",
]
