"""Plans: how mesh axes are used, one strategy a file."""

from shardkit.parallel.attention import dot_attention
from shardkit.parallel.context import cp, ring_attention, ulysses_attention
from shardkit.parallel.data import dp
from shardkit.parallel.expert import ep, moe
from shardkit.parallel.gradient import GradFn, Mean, value_and_grad
from shardkit.parallel.layers import gathered, scan_layers
from shardkit.parallel.norms import sharded_layer_norm, sharded_moments, sharded_rms_norm
from shardkit.parallel.orders import positions, zigzag
from shardkit.parallel.padded import Padded, unpadded
from shardkit.parallel.pipeline import pipeline_loss, pipeline_value_and_grad
from shardkit.parallel.plan import Layout, Plan, chain
from shardkit.parallel.routing import Routing, RoutingStats, route, routing_stats
from shardkit.parallel.stages import Stages, pp
from shardkit.parallel.submeshes import device_put_pipeline, device_put_value_and_grad, submeshes
from shardkit.parallel.tensor import column_linear, device_major_qkv, local_groups, row_linear, tp
from shardkit.parallel.vocabulary import vocab_cross_entropy, vocab_cross_entropy_and_hits, vocab_embed
from shardkit.parallel.zero import fsdp, zero1, zero2

__all__ = [
    "GradFn",
    "Layout",
    "Mean",
    "Padded",
    "Plan",
    "Routing",
    "RoutingStats",
    "Stages",
    "chain",
    "column_linear",
    "cp",
    "device_major_qkv",
    "device_put_pipeline",
    "device_put_value_and_grad",
    "dot_attention",
    "dp",
    "ep",
    "fsdp",
    "gathered",
    "local_groups",
    "moe",
    "pipeline_loss",
    "pipeline_value_and_grad",
    "positions",
    "pp",
    "ring_attention",
    "route",
    "routing_stats",
    "row_linear",
    "scan_layers",
    "sharded_layer_norm",
    "sharded_moments",
    "sharded_rms_norm",
    "submeshes",
    "tp",
    "ulysses_attention",
    "unpadded",
    "value_and_grad",
    "vocab_cross_entropy",
    "vocab_cross_entropy_and_hits",
    "vocab_embed",
    "zero1",
    "zero2",
    "zigzag",
]
