"""The loss of a pipeline without its schedule: every device runs all stages, one after the other.

The first call of a step asks for it. Whether the loss of a microbatch adds over its examples does not depend on the
schedule, and in a program of embedding, a scan over the stages and head it is easier to read than in one of ticks.

Worked example: four layers on two devices of one chunk each. A device holds two layers, `[2, ...]` of the stack, and
gathers `[4, ...]`. Reshaped to `[2 stages, 2 layers, ...]` they are what the scan goes over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit._jax.compat import bound
from shardkit._jax.jaxprs import PLAN
from shardkit.collectives import all_gather, vary
from shardkit.layers.matmul import live_axes
from shardkit.on_device.batch import take_row
from shardkit.on_device.handles import unseal_handles
from shardkit.on_device.means import Mean
from shardkit.pipelines.pieces import PieceArguments, Pieces, StagedModel
from shardkit.schedules import Schedule
from shardkit.schedules.action import device_of
from shardkit.schedules.stages import Stages


def compute_in_sequence(
    model: StagedModel, schedule: Schedule, stages: Stages, params: Any, batch: Any, keys: Any
) -> Mapping[str, Mean]:
    """The means of these examples as one microbatch: embedding, one stage after the other, and head.

    Every device computes all of it, as one device would.

    Cost: an all_gather of the stack over the pipe axis.
    """
    where = model.where
    names = bound(where, stages.axis)
    live = live_axes(where, names, *jax.tree.leaves(params))
    spread = stages.spread is not None and bool(live)
    shared = unseal_handles(dict(params))
    layers = shared.pop(stages.stack)
    sizes = count_layers(stages, schedule.devices, layers)
    owner = None
    if spread:
        owner = device_of(len(sizes) - 1, schedule.devices, schedule.placement)
    else:
        shared = vary(shared, live)

    gather = partial(_gather_stages, schedule, axes=live)
    # The plan splits the stack, so it is the plan that gathers it: what reads this trace asks what the loss sends.
    with jax.named_scope(PLAN):
        stacks = jax.tree.map(gather, layers)
    starts = jnp.asarray(find_starts(sizes))
    counts = jnp.asarray(sizes, jnp.int32)
    rows = vary((stacks, starts, counts), live)  # one for each stage
    layers, start, count = take_row(rows, 0)
    common = PieceArguments(layers, start, count, batch, keys)
    args = vary(common, live)
    if not spread:
        common = args
    pieces = Pieces(model, shared, args, live, min(sizes), common, owner)

    def run_stage(x: list[jax.Array], stage: Any) -> tuple[list[jax.Array], None]:
        layers, start, count = stage
        return pieces.stage(args._replace(layers=layers, number=start, count=count), x), None

    y, _ = lax.scan(run_stage, pieces.embed(shared, common), rows)
    means: Mapping[str, Mean] = pieces.head(shared, common, y)
    return means


def _gather_stages(schedule: Schedule, leaf: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """A leaf of the stack as `[stages, layers, ...]` on all devices.

    Worked example: two devices with two chunks each, in a loop. Device by device and chunk by chunk the stages are
    0, 2, 1, 3; rows 0, 2, 1, 3 of that are the stages in their order.
    """
    devices = schedule.devices
    chunks = schedule.chunks
    if axes:
        # The whole stack, once, before the scan over the stages. A device runs all of them, and so needs the layers of
        # all of them; no activations move. In the scan a gather would bring a chunk of each of p devices, p stages of
        # which the turn runs one: p times the bytes. The result varies over the axis, because the pieces are traced for
        # layers that differ between devices. Each device then has the whole loss: a sum over the axis counts it p
        # times, total and weight alike. For the same reason nothing differentiates this program: the transpose of the
        # gather, a reduce_scatter, would sum the equal gradients of p devices. Gradients are those of the schedule
        # (`grad_fn.py`), which never gathers the stack: there each device runs its own layers.
        leaf = all_gather(leaf, axes)
    stages = leaf.reshape(devices * chunks, -1, *leaf.shape[1:])
    order = []
    for stage in range(devices * chunks):
        device = device_of(stage, devices, schedule.placement)
        order.append(device * chunks + stage // devices)
    return stages[np.array(order)]


def count_layers(stages: Stages, devices: int, layers: Any) -> tuple[int, ...]:
    """How many layers each stage of the model has; `layers` is the part of the stack of one of the devices."""
    if stages.layers_per_stage:
        return stages.layers_per_stage
    rows = jax.tree.leaves(layers)[0].shape[0]
    return stages.layers_of(rows * devices)


def find_starts(sizes: Sequence[int]) -> np.ndarray:
    """The index of the first layer of each stage: 0, 1, 3 of stages with 1, 2 and 2 layers."""
    ends = np.cumsum(sizes)
    return np.concatenate([[0], ends[:-1]]).astype(np.int32)
