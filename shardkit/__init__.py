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
from warnings import warn as _warn

from shardkit.collectives import (
    algorithms,
    all_gather,
    all_gather_matmul,
    all_reduce,
    all_to_all,
    axis_index,
    axis_size,
    broadcast,
    compressed,
    hierarchical,
    matmul_reduce_scatter,
    reduce_scatter,
    ring,
    shift,
    vary,
)
from shardkit.meshes.inspection import describe
from shardkit.meshes.layout import bytes_per_device, global_shape, local_shape, shard, specs_from_rules
from shardkit.meshes.mesh import abstract_mesh, make_hybrid_mesh, make_mesh
from shardkit.meshes.rng import dropout, example_keys, fold_axes, fold_axis, fold_keys, step_key
from shardkit.meshes.simulated import simulate_devices
from shardkit.on_device.gradient import GradFn, Mean, value_and_grad
from shardkit.on_device.pipelines import PipelineGradFn, PipelineLoss
from shardkit.on_device.precision import Precision
from shardkit.on_device.residuals import init_residuals
from shardkit.pipelines.submeshes import device_put_pipeline, device_put_value_and_grad, submeshes
from shardkit.plans.placement import Split
from shardkit.plans.plan import Plan, chain, strategy
from shardkit.plans.storage import unpadded
from shardkit.remat.layers import gathered, scan_layers
from shardkit.resharding.reshard import reshard, reshard_steps
from shardkit.steps.builder import TrainStep, make_train_step
from shardkit.steps.evaluate import make_eval_step
from shardkit.steps.state import TrainState
from shardkit.steps.step import NonFiniteError
from shardkit.strategies.config import DistributedConfig
from shardkit.strategies.context import cp
from shardkit.strategies.data import dp
from shardkit.strategies.expert import ep
from shardkit.strategies.pipeline import pipeline, pp
from shardkit.strategies.pipeline import pipeline_loss as pipeline_loss  # deprecated, as the next one
from shardkit.strategies.pipeline import pipeline_value_and_grad as pipeline_value_and_grad
from shardkit.strategies.tensor import tp
from shardkit.strategies.zero import fsdp, zero1, zero2

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022  (in the groups of the reference)
    # meshes and devices
    "make_mesh",
    "abstract_mesh",
    "make_hybrid_mesh",
    "simulate_devices",
    "DistributedConfig",
    "describe",
    # layouts
    "shard",
    "local_shape",
    "global_shape",
    "bytes_per_device",
    "specs_from_rules",
    "reshard",
    "reshard_steps",
    # train steps
    "make_train_step",
    "make_eval_step",
    "value_and_grad",
    "GradFn",
    "Mean",
    "Precision",
    "TrainState",
    "TrainStep",
    "NonFiniteError",
    "init_residuals",
    "unpadded",
    # plans
    "dp",
    "zero1",
    "zero2",
    "fsdp",
    "tp",
    "cp",
    "ep",
    "pp",
    "chain",
    "strategy",
    "Plan",
    "Split",
    # pipelines
    "pipeline",
    "PipelineGradFn",
    "PipelineLoss",
    "submeshes",
    "device_put_pipeline",
    "device_put_value_and_grad",
    # layer by layer
    "gathered",
    "scan_layers",
    # collectives
    "vary",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "shift",
    "broadcast",
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "axis_index",
    "axis_size",
    "ring",
    "hierarchical",
    "compressed",
    "algorithms",
    # random numbers
    "example_keys",
    "fold_axes",
    "fold_axis",
    "fold_keys",
    "step_key",
    "dropout",
]

_LAZY = (
    "analysis",
    "bench",
    "collectives",
    "cost",
    "layers",
    "models",
    "planner",
    "reporting",
    "runtime",
    "schedules",
    "testing",
    "viz",
)
_LAZY_NAMES = {
    **dict.fromkeys(("Finding", "aot", "audit", "census", "collective", "expects", "explain", "lint"), "analysis"),
    "report": "reporting",
}
_LAYERS = """
Capacity Dropless column_linear device_major_qkv dot_attention local_groups moe positions ring_attention route
routing_stats row_linear sharded_layer_norm sharded_moments sharded_rms_norm ulysses_attention vocab_cross_entropy
vocab_cross_entropy_and_hits vocab_embed zigzag
"""
_COLLECTIVES = "assume_replicated debug_print gather_to_one halo_exchange prefix_scan"
_MOVED = {  # names that stood here; they warn until 0.2
    **dict.fromkeys(_LAYERS.split(), "layers"),
    **dict.fromkeys(_COLLECTIVES.split(), "collectives"),
    "Algorithm": "algorithms",
}

if TYPE_CHECKING:  # what a type checker sees of the names that are imported on first use
    from shardkit import analysis as analysis
    from shardkit import bench as bench
    from shardkit import collectives as collectives
    from shardkit import cost as cost
    from shardkit import layers as layers
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
        if name in _MOVED:
            face = _MOVED[name]
            _warn(f"sk.{name} has moved: use sk.{face}.{name}.", DeprecationWarning, stacklevel=2)
            return getattr(algorithms if face == "algorithms" else _import_module(f"shardkit.{face}"), name)
        raise AttributeError(f"module 'shardkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_LAZY, *_LAZY_NAMES})
