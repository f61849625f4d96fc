"""shardkit: explicit collectives for JAX.

Per-device kernels, written with `jax.shard_map` and lax collectives, that compose into data parallelism, ZeRO, tensor
parallelism and pipelines. An *axis* is a mesh axis, a *dim* is an array dimension.

Shape suffixes: an upper-case letter is a whole dimension, lower case is this device's shard, as in `x_tD`, `w_Df`.
B batch, T tokens, D model, F hidden, H heads, K head size, V vocabulary, L layers, M microbatches, S stages, E experts.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import Any as _Any

from shardkit.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    axis_index,
    axis_size,
    broadcast,
    compressed,
    gather_to_one,
    halo_exchange,
    hierarchical,
    pad_to_axis,
    reduce_scatter,
    ring,
    scan,
    shift,
    unpad,
    vary,
)
from shardkit.config import DistributedConfig
from shardkit.layout import bytes_per_device, describe, global_shape, local_shape, shard, specs_from_rules
from shardkit.mesh import abstract_mesh, make_hybrid_mesh, make_mesh, simulate_devices
from shardkit.parallel import GradFn, Mean, Plan, chain, dp, fsdp, gathered, scan_layers, value_and_grad, zero1, zero2
from shardkit.precision import Precision
from shardkit.rng import dropout, example_keys, fold_axes, fold_axis, fold_keys
from shardkit.train import NonFiniteError, TrainState, TrainStep, make_eval_step, make_train_step, step_key

__version__ = "0.1.0"

__all__ = [
    "DistributedConfig",
    "GradFn",
    "Mean",
    "NonFiniteError",
    "Plan",
    "Precision",
    "TrainState",
    "TrainStep",
    "abstract_mesh",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "axis_index",
    "axis_size",
    "broadcast",
    "bytes_per_device",
    "chain",
    "compressed",
    "describe",
    "dp",
    "dropout",
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
    "local_shape",
    "make_eval_step",
    "make_hybrid_mesh",
    "make_mesh",
    "make_train_step",
    "pad_to_axis",
    "reduce_scatter",
    "ring",
    "scan",
    "scan_layers",
    "shard",
    "shift",
    "simulate_devices",
    "specs_from_rules",
    "step_key",
    "unpad",
    "value_and_grad",
    "vary",
    "zero1",
    "zero2",
]

_LAZY = ("analysis", "cost", "models", "runtime", "testing")


def __getattr__(name: str) -> _Any:
    if name in _LAZY:
        return _import_module(f"shardkit.{name}")
    if name in ("Finding", "aot", "census", "collective", "expects", "explain", "lint", "planner"):
        return getattr(_import_module("shardkit.analysis"), name)
    raise AttributeError(f"module 'shardkit' has no attribute {name!r}")
