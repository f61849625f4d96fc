"""The plans of the tests of checkpoints, and one model that all of them can train: layers, dropout, unequal weights."""

import math
from functools import cache
from typing import Any, NamedTuple

import jax
import optax

import shardkit as sk
from shardkit import schedules
from support import conformance
from support.pipelines import pipelined_grad, unpipelined
from support.ring_model import batch, params, pieces, tp
from support.training import lenient

__all__ = ["KEY", "ROWS", "batch", "make", "params"]
KEY = jax.random.key(5)
LAYERWISE: Any = {"min_size": 1, "layerwise": ("layers",)}


class Row(NamedTuple):
    """A mesh and a plan; the axis that the model itself uses; and the schedule of a pipeline."""

    sizes: dict[str, int]
    plan: sk.Plan
    axis: str | None = None
    schedule: Any = None
    how: dict[str, Any] = {}  # noqa: RUF012


ROWS = {
    "one device": Row({"data": 1}, sk.dp("data")),
    "dp": Row({"data": 4}, sk.dp("data")),
    "fsdp": Row({"fsdp": 4}, sk.fsdp("fsdp", min_size=1)),
    "fsdp layerwise": Row({"data": 2, "fsdp": 2}, sk.chain(sk.dp("data"), sk.fsdp("fsdp", **LAYERWISE))),
    "fsdp padded": Row({"fsdp": 8}, sk.fsdp("fsdp", **conformance.padding(8), layerwise=("layers",))),
    "zero1": Row({"data": 2}, sk.zero1("data", min_size=1)),
    "zero2": Row({"data": 4}, sk.zero2("data", min_size=1)),
    "tp": Row({"model": 4}, tp(), "model"),
    "pipeline of chunks": Row({"stage": 2}, sk.pp("stage"), None, schedules.lockstep(2, 4, 2)),
    "unequal stages": Row(
        {"stage": 2}, sk.pp("stage"), None, schedules.lockstep(2, 4, 2), {"layers_per_stage": (1, 3, 2, 2)}
    ),
    "unequal stages, fsdp padded": Row(
        {"stage": 2, "fsdp": 4},
        sk.chain(sk.fsdp("fsdp", **conformance.padding(4), layerwise=("layers",)), sk.pp("stage")),
        None,
        schedules.lockstep(2, 4, 2),
        {"layers_per_stage": (1, 1, 4, 2)},
    ),
}
THREE = Row({"stage": 3}, sk.pp("stage"), None, schedules.lockstep(3, 4), {"layers_per_stage": (3, 3, 2)})


@cache
def make(name: str, **options: Any) -> sk.TrainStep:
    """The train step of a row, or of "three" devices, over the first devices there are."""
    row = THREE if name == "three" else ROWS[name]
    if row.schedule is None:
        grad_fn = sk.value_and_grad(unpipelined(pieces(row.axis)))
    else:
        grad_fn = pipelined_grad(*pieces(row.axis), row.schedule, "stage", layer_numbers=True, **row.how)
    mesh = sk.make_mesh(jax.devices()[: math.prod(row.sizes.values())], **row.sizes)
    return sk.make_train_step(grad_fn, lenient(optax.adamw(1e-2)), mesh=mesh, plan=row.plan, **options)
