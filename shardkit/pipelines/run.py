"""A pipeline's share of a step on one device: the microbatches of its stages, by the table of a schedule."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from shardkit._arguments.checks import bound, named, quoted
from shardkit._jax.compat import eval_shape
from shardkit.collectives import axis_index, axis_size, vary
from shardkit.layers.matmul import live_axes
from shardkit.on_device.batch import split_microbatches, take_microbatch
from shardkit.on_device.handles import parts, unsealed
from shardkit.pipelines.divergent import refuse_divergent, refuse_mixed
from shardkit.pipelines.executor import Executor
from shardkit.pipelines.ops import BRANCHED, MASKED, Ops, Sums
from shardkit.pipelines.pieces import Given, Model, Pieces
from shardkit.schedules import Schedule, Stages

Mode = Literal["masked", "branch"]


def run(
    model: Model,
    schedule: Schedule,
    stages: Stages,
    params: Any,
    batch: Any,
    keys: Any,
    scale: Any,
    mode: Mode,
    recompute: bool,
    *,
    train: bool,
) -> Sums:
    """The sums over all microbatches on this device."""
    where, p, v = model.where, schedule.devices, schedule.chunks
    names = bound(where, stages.axis)
    if axis_size(names) != p:
        raise ValueError(
            f"{where}: the schedule must be for the devices of {named(names)}; it is for {p} and there are "
            f"{axis_size(names)}. Make one with devices={axis_size(names)}."
        )
    if not isinstance(params, Mapping) or "layers" not in params:
        found = quoted(params) if isinstance(params, Mapping) else type(params).__name__
        raise ValueError(
            f"{where}: the parameters must be a mapping with the entry 'layers', the stack; got {found}. Put the "
            "stack of layers under 'layers', and everything else beside it."
        )
    live = live_axes(where, names, *jax.tree.leaves(params))
    device = axis_index(names) if live else jnp.int32(0)
    params = vary(unsealed(dict(params)), live)  # gradients stay unreduced until the step sums them
    layers, shared = params.pop("layers"), params
    rows = jax.tree.leaves(layers)[0].shape[0]
    each = stages.layers_per_stage or stages.layers_of(rows * p)
    _check_divides(where, (batch, keys), schedule.microbatches)
    microbatches = split_microbatches((batch, keys), schedule.microbatches)
    starts, counts = np.concatenate([[0], np.cumsum(each)[:-1]]).astype(np.int32), np.array(each, np.int32)
    stacks = jax.tree.map(lambda leaf: leaf.reshape(v, rows // v, *leaf.shape[1:]), layers)

    def given(stage: Any, chunk: Any, microbatch: Any) -> Given:
        batch, keys = take_microbatch(microbatches, microbatch)
        return Given(
            take_microbatch(stacks, chunk), jnp.asarray(starts)[stage], jnp.asarray(counts)[stage], batch, keys
        )

    zero = vary(jnp.int32(0), live)
    pieces = Pieces(model, shared, eval_shape(given, zero, zero, zero), live, min(each))
    if mode == "branch":
        traced = [pieces.embed, *([pieces.forward, pieces.backward] if train else [pieces.stage])]
        traced += [pieces.embed_backward, pieces.head_backward] if train else [pieces.head]
        refuse_divergent(f"{where}: mode='branch'", [t.jaxpr for t in traced], names, "Use mode='masked'.")
    elif live:
        traced = [pieces.embed, pieces.stage, pieces.head_backward if train else pieces.head]
        refuse_mixed(where, [t.jaxpr for t in traced], names)
    table = schedule.table(saved=not recompute)
    splits = train and any("I" in segment.ops for segment in table.segments)
    if splits and pieces.split.whole:
        warnings.warn(
            f"{where}: the schedule splits backward passes, but those of this stage run whole, in place of I. "
            f"{pieces.split.why}",
            stacklevel=3,
        )
    ops = Ops(
        pieces,
        given,
        shared,
        jnp.asarray(scale, jnp.float32),
        last=p * v - 1,
        saves=train and not recompute,
        train=train,
        split=pieces.split if splits and not pieces.split.whole else None,
        exclusion=BRANCHED if mode == "branch" else MASKED,
    )
    executor = Executor(table, ops, live or None, wrap=v > 1 and schedule.placement == "loop")
    return executor.run(jax.tree.leaves(parts(stacks)), device)


def _check_divides(where: str, tree: Any, count: int) -> None:
    """Refuses examples that do not divide into the schedule's microbatches."""
    sizes = sorted({leaf.shape[0] for leaf in jax.tree.leaves(tree) if leaf.ndim})
    if any(size % count for size in sizes):
        raise ValueError(
            f"{where}: a device's examples must be divisible by the schedule's microbatches; got "
            f"{', '.join(map(str, sizes))} examples for {count} microbatches. Choose another batch or a schedule for "
            "other microbatches."
        )
