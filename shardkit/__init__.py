"""shardkit: explicit collectives for JAX.

Per-device kernels, written with `jax.shard_map` and lax collectives, that compose into data parallelism, ZeRO, tensor
parallelism and pipelines. An *axis* is a mesh axis, a *dim* is an array dimension.

Shape suffixes: an upper-case letter is a whole dimension, lower case is this device's shard, as in `x_tD`, `w_Df`.
B batch, T tokens, D model, F hidden, H heads, K head size, V vocabulary, L layers, M microbatches, S stages, E experts.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

from shardkit.collectives import (
    algorithms,
    all_gather,
    all_gather_matmul,
    all_reduce,
    all_to_all,
    assume_replicated,
    axis_index,
    axis_size,
    broadcast,
    compressed,
    debug_print,
    gather_to_one,
    halo_exchange,
    hierarchical,
    matmul_reduce_scatter,
    prefix_scan,
    reduce_scatter,
    ring,
    shift,
    vary,
)
from shardkit.collectives.algorithms import Algorithm
from shardkit.config import DistributedConfig
from shardkit.evaluate import make_eval_step
from shardkit.inspection import describe
from shardkit.layers.attention import dot_attention
from shardkit.layers.context_attention import ring_attention, ulysses_attention
from shardkit.layers.linear import column_linear, device_major_qkv, local_groups, row_linear
from shardkit.layers.moe import moe
from shardkit.layers.norms import sharded_layer_norm, sharded_moments, sharded_rms_norm
from shardkit.layers.routing import Capacity, Dropless, route, routing_stats
from shardkit.layers.vocabulary import vocab_cross_entropy, vocab_cross_entropy_and_hits, vocab_embed
from shardkit.layers.zigzag import positions, zigzag
from shardkit.layout import bytes_per_device, global_shape, local_shape, shard, specs_from_rules
from shardkit.mesh import abstract_mesh, make_hybrid_mesh, make_mesh
from shardkit.partitioning.gradient import GradFn, Mean, value_and_grad
from shardkit.partitioning.placement import Split
from shardkit.partitioning.plan import Plan, chain, strategy
from shardkit.partitioning.residuals import init_residuals
from shardkit.partitioning.staged import PipelineGradFn, PipelineLoss
from shardkit.partitioning.storage import unpadded
from shardkit.pipeline.submeshes import device_put_pipeline, device_put_value_and_grad, submeshes
from shardkit.precision import Precision
from shardkit.remat.layers import gathered, scan_layers
from shardkit.resharding import reshard, reshard_steps
from shardkit.rng import dropout, example_keys, fold_axes, fold_axis, fold_keys, step_key
from shardkit.simulated import simulate_devices
from shardkit.strategies.context import cp
from shardkit.strategies.data import dp
from shardkit.strategies.expert import ep
from shardkit.strategies.pipeline import pipeline, pipeline_loss, pipeline_value_and_grad, pp
from shardkit.strategies.tensor import tp
from shardkit.strategies.zero import fsdp, zero1, zero2
from shardkit.train import NonFiniteError, TrainState, TrainStep, make_train_step

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "Capacity",
    "DistributedConfig",
    "Dropless",
    "GradFn",
    "Mean",
    "NonFiniteError",
    "PipelineGradFn",
    "PipelineLoss",
    "Plan",
    "Precision",
    "Split",
    "TrainState",
    "TrainStep",
    "abstract_mesh",
    "algorithms",
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "all_to_all",
    "assume_replicated",
    "axis_index",
    "axis_size",
    "broadcast",
    "bytes_per_device",
    "chain",
    "column_linear",
    "compressed",
    "cp",
    "debug_print",
    "describe",
    "device_major_qkv",
    "device_put_pipeline",
    "device_put_value_and_grad",
    "dot_attention",
    "dp",
    "dropout",
    "ep",
    "example_keys",
    "fold_axes",
    "fold_axis",
    "fold_keys",
    "fsdp",
    "gather_to_one",
    "gathered",
    "global_shape",
    "halo_exchange",
    "hierarchical",
    "init_residuals",
    "local_groups",
    "local_shape",
    "make_eval_step",
    "make_hybrid_mesh",
    "make_mesh",
    "make_train_step",
    "matmul_reduce_scatter",
    "moe",
    "pipeline",
    "pipeline_loss",
    "pipeline_value_and_grad",
    "positions",
    "pp",
    "prefix_scan",
    "reduce_scatter",
    "reshard",
    "reshard_steps",
    "ring",
    "ring_attention",
    "route",
    "routing_stats",
    "row_linear",
    "scan_layers",
    "shard",
    "sharded_layer_norm",
    "sharded_moments",
    "sharded_rms_norm",
    "shift",
    "simulate_devices",
    "specs_from_rules",
    "step_key",
    "strategy",
    "submeshes",
    "tp",
    "ulysses_attention",
    "unpadded",
    "value_and_grad",
    "vary",
    "vocab_cross_entropy",
    "vocab_cross_entropy_and_hits",
    "vocab_embed",
    "zero1",
    "zero2",
    "zigzag",
]

_LAZY = ("analysis", "bench", "cost", "models", "planner", "reporting", "runtime", "schedules", "testing", "viz")
_LAZY_NAMES = {
    **dict.fromkeys(("Finding", "aot", "audit", "census", "collective", "expects", "explain", "lint"), "analysis"),
    "report": "reporting",
}

if TYPE_CHECKING:  # what a type checker sees of the names that are imported on first use
    from shardkit import analysis as analysis
    from shardkit import bench as bench
    from shardkit import cost as cost
    from shardkit import models as models
    from shardkit import planner as planner
    from shardkit import reporting as reporting
    from shardkit import runtime as runtime
    from shardkit import schedules as schedules
    from shardkit import testing as testing
    from shardkit import viz as viz
    from shardkit.analysis import Finding as Finding
    from shardkit.analysis import aot as aot
    from shardkit.analysis import audit as audit
    from shardkit.analysis import census as census
    from shardkit.analysis import collective as collective
    from shardkit.analysis import expects as expects
    from shardkit.analysis import explain as explain
    from shardkit.analysis import lint as lint
    from shardkit.reporting import report as report
else:  # a checker that sees __getattr__ accepts every name

    def __getattr__(name: str) -> _Any:
        if name in _LAZY:
            return _import_module(f"shardkit.{name}")
        if name in _LAZY_NAMES:
            return getattr(_import_module(f"shardkit.{_LAZY_NAMES[name]}"), name)
        raise AttributeError(f"module 'shardkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_LAZY_NAMES})
