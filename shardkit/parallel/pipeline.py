"""Pipelines: the same GradFn as any other, run by the table of a schedule."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit._check import bound, named, quoted
from shardkit._typed import typed
from shardkit.collectives import axis_index, axis_size, vary
from shardkit.parallel.divergent import refuse_divergent, refuse_mixed
from shardkit.parallel.executor import Executor, Sums
from shardkit.parallel.gradient import GradFn, LossFn, Mean
from shardkit.parallel.handles import is_handle, part_gradient, parts, unsealed, with_parts
from shardkit.parallel.local import live_axes
from shardkit.parallel.pieces import Given, Model, Pieces
from shardkit.parallel.stages import Stages
from shardkit.schedules import Schedule

Mode = Literal["masked", "branch"]


@typed
def pipeline_value_and_grad(
    embed: Callable[[Any, Any, Any], Any],
    stage: Callable[[Any, Any, Any], Any],
    head: Callable[[Any, Any, Any], Any],
    schedule: Schedule,
    axis: str,
    *,
    mode: Mode = "masked",
    recompute: bool = True,
    sizes: tuple[int, ...] | None = None,
    numbered: bool = False,
) -> GradFn:
    """Makes the function that each device of a pipeline runs: one program for all of them, for every schedule.

    The parameters are a mapping. Its entry "layers" is the stack, with the layer as dim 0 of every leaf, and belongs to
    the stages; all other entries are shared by all devices. The numbers are those of
    `head(shared, stage(layers, embed(shared, batch, keys), keys), batch)`, microbatch by microbatch.

    Args:
        embed: `embed(shared, batch, keys) -> x`: what the first stage is given, a pytree. It is computed again for its
            own backward pass.
        stage: `stage(layers, x, keys) -> x`: some consecutive layers of the stack; returns what it was given, in shape
            and dtype. It may hold collectives over other axes, `scan_layers` and handles. Stages of different widths
            pad their activations to a common one; what the head needs of every layer (a router's losses) travels in x.
        head: `head(shared, x, batch) ->` a scalar (a mean over equally many examples), a `Mean(total, weight)`, or
            either with a dict of auxiliary ones. A weight that embedding and head both use (tied) needs nothing more.
        schedule: when each device does what; its microbatches must divide the examples of a device.
        axis: the mesh axis of the pipeline; the plan has `pp(axis)`.
        mode: "masked": every device computes whatever some device computes at that tick, and leaves out what is not
            its own; no branch surrounds a stage, so that it may hold any collective. "branch": devices compute only
            what is theirs, which is refused where the stage or its derivative holds a ppermute or a collective over
            `axis`. An embedding or head that sends nothing is always left out by the other stages.
        recompute: the backward pass begins again with the stage's input, all that is held of a microbatch in flight.
            False: it finds saved all that depends on the input; less work, more memory.
        sizes: the layers of each stage, where they are not equal.
        numbered: the stage is given `(layers, numbers)`, the layers' places in the whole stack, int32 [layers]: for
            dropout keys that differ by layer, `fold_keys(keys, number)`.

    Returns:
        A GradFn `(params, batch, keys, *, scale=1) -> (Mean, aux, gradients)`, whose gradients are float32. Keys are
            one for each example, cut like the batch, so that dropout is that of the unpipelined model. Its attribute
            `stages` tells `make_train_step` where each layer lies: a function that wraps it must keep that, as
            `functools.wraps` does.

    Raises:
        ValueError: an unknown mode, an illegal schedule (with its grid); at trace time a schedule for another number of
            devices, examples that the microbatches do not divide, layers that the stages do not, a stage that returns
            another shape or dtype, a collective over `axis`, or one that `mode="branch"` cannot have.

    Cost: what the table says: at every tick of a segment each of its moves sends the activations, or their gradients,
        once, in their own dtype. Shared leaves are summed once a step over `axis`. Time is that of
        `schedule.simulate(..., synchronous=True)`; what waits for its turn lies in as many places as `schedule.slots()`
        says, which only those of gpipe and breadth_first grow with the microbatches.

    Source: Huang et al., GPipe (arXiv:1811.06965); Narayanan et al., Megatron-LM (arXiv:2104.04473), section 2.2; Qi et
        al., Zero bubble (arXiv:2401.10241).
    """
    model = Model(embed, stage, head, numbered, "pipeline_value_and_grad")
    stages = _stages(model.where, schedule, axis, mode, sizes)

    def grad_fn(params: Any, batch: Any, keys: Any, *, scale: Any = 1) -> tuple[Mean, Mapping[str, Any], Any]:
        opened = with_parts(params, parts(params))  # those handles that the loss is not to see
        sums = _run(model, schedule, stages, opened, batch, keys, scale, mode, recompute, train=True)
        layers = jax.tree.leaves(parts(opened["layers"]))
        stack = [total.reshape(leaf.shape) for total, leaf in zip(sums.layers, layers, strict=True)]
        grads = sums.shared | {"layers": jax.tree.unflatten(jax.tree.structure(parts(opened["layers"])), stack)}
        grads = jax.tree.map(_left, params, grads, is_leaf=is_handle)
        means = dict(sums.means)
        return means.pop("loss"), means, {name: grads[name] for name in params}

    grad_fn.stages = stages  # type: ignore[attr-defined]
    return grad_fn


@typed
def pipeline_loss(
    embed: Callable[[Any, Any, Any], Any],
    stage: Callable[[Any, Any, Any], Any],
    head: Callable[[Any, Any, Any], Any],
    schedule: Schedule,
    axis: str,
    *,
    mode: Mode = "masked",
    sizes: tuple[int, ...] | None = None,
    numbered: bool = False,
) -> LossFn:
    """The loss alone, through the forwards of a schedule: for `make_eval_step`.

    Args:
        embed, stage, head, schedule, axis, mode, sizes, numbered: as for `pipeline_value_and_grad`.

    Returns:
        `loss(params, batch, keys) -> (Mean, aux)`.

    Raises:
        ValueError: as `pipeline_value_and_grad`.

    Cost: the activations once at every tick of `schedule.forward()`.
    """
    model = Model(embed, stage, head, numbered, "pipeline_loss")
    stages = _stages(model.where, schedule, axis, mode, sizes)
    forward = schedule.forward()

    def loss(params: Any, batch: Any, keys: Any) -> tuple[Mean, dict[str, Mean]]:
        means = dict(_run(model, forward, stages, params, batch, keys, 1, mode, False, train=False).means)
        return means.pop("loss"), means

    loss.stages = stages  # type: ignore[attr-defined]
    return loss


def _stages(where: str, schedule: Schedule, axis: str, mode: Mode, sizes: tuple[int, ...] | None) -> Stages:
    """The stages of a legal schedule; refuses another one, and an unknown mode."""
    if mode not in get_args(Mode):
        raise ValueError(f"{where}: mode must be 'masked' or 'branch'; got {mode!r}. Choose one of them.")
    if not axis:
        raise ValueError(f"{where}: axis must be a mesh axis name; got {axis!r}. Pass for example 'stage'.")
    schedule.check()
    return Stages.of(schedule, axis, sizes)


def _run(
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
    """The sums over all microbatches of this device."""
    where, p, v = model.where, schedule.stages, schedule.chunks
    names = bound(where, stages.axis)
    if axis_size(names) != p:
        raise ValueError(
            f"{where}: the schedule must be for the devices of {named(names)}; it is for {p} and there are "
            f"{axis_size(names)}. Make one with stages={axis_size(names)}."
        )
    if not isinstance(params, Mapping) or "layers" not in params:
        found = quoted(params) if isinstance(params, Mapping) else type(params).__name__
        raise ValueError(
            f"{where}: the parameters must be a mapping with the entry 'layers', the stack; got {found}. Put what the "
            "stages use under 'layers', and all else beside it."
        )
    live = live_axes(where, names, *jax.tree.leaves(params))
    device = axis_index(names) if live else jnp.int32(0)
    params = vary(unsealed(dict(params)), live)  # gradients stay this stage's own until the step sums them
    layers, shared = params.pop("layers"), params
    rows = jax.tree.leaves(layers)[0].shape[0]
    each = stages.sizes or stages.layers_of(rows * p)
    microbatches = _cut(where, (batch, keys), schedule.microbatches)
    starts, counts = np.concatenate([[0], np.cumsum(each)[:-1]]).astype(np.int32), np.array(each, np.int32)
    stacks = jax.tree.map(lambda leaf: leaf.reshape(v, rows // v, *leaf.shape[1:]), layers)

    def given(stage: Any, chunk: Any, microbatch: Any) -> Given:
        batch, keys = microbatches(microbatch)
        layers = jax.tree.map(lambda leaf: _at(leaf, chunk), stacks)
        return Given(layers, jnp.asarray(starts)[stage], jnp.asarray(counts)[stage], batch, keys)

    zero = vary(jnp.int32(0), live)
    pieces = Pieces(model, shared, jax.eval_shape(given, zero, zero, zero), live, min(each))
    if mode == "branch":
        traced = [pieces.embed, *([pieces.forward, pieces.backward] if train else [pieces.stage])]
        traced += [pieces.embed_backward, pieces.head_backward] if train else [pieces.head]
        refuse_divergent(f"{where}: mode='branch'", [t.jaxpr for t in traced], names, "Use mode='masked'.")
    elif live:
        traced = [pieces.embed, pieces.stage, pieces.head_backward if train else pieces.head]
        refuse_mixed(where, [t.jaxpr for t in traced], names)
    executor = Executor(
        schedule.table(saved=not recompute),
        pieces,
        given,
        shared,
        jnp.asarray(scale, jnp.float32),
        last=p * v - 1,
        axis=live or None,
        wrap=v > 1 and schedule.placement == "loop",
        saved=not recompute,
        branch=mode == "branch",
        train=train,
    )
    if executor.unsplit:
        warnings.warn(
            f"{where}: the schedule splits backward passes, but those of this stage run whole, in place of I. "
            f"{pieces.split.why}",
            stacklevel=3,
        )
    return executor.run(jax.tree.leaves(parts(stacks)), device)


def _cut(where: str, tree: Any, count: int) -> Callable[[Any], Any]:
    """The microbatches of the examples that dim 0 counts, by their number; scalars belong to all of them."""
    sizes = sorted({leaf.shape[0] for leaf in jax.tree.leaves(tree) if leaf.ndim})
    if any(size % count for size in sizes):
        raise ValueError(
            f"{where}: a device's examples must be divisible by the schedule's microbatches; got "
            f"{', '.join(map(str, sizes))} examples for {count} microbatches. Choose another batch or a schedule for "
            "other microbatches."
        )
    parts = jax.tree.map(lambda leaf: leaf.reshape(count, -1, *leaf.shape[1:]) if leaf.ndim else leaf, tree)
    return lambda i: jax.tree.map(lambda leaf: _at(leaf, i) if leaf.ndim else leaf, parts)


def _at(leaf: jax.Array, i: Any) -> jax.Array:
    return leaf[0] if leaf.shape[0] == 1 else lax.dynamic_index_in_dim(leaf, i, 0, keepdims=False)


def _left(node: Any, grad: Any) -> Any:
    """The gradient of a leaf as it leaves the GradFn: a handle that was opened for the loss had it whole until here."""
    return part_gradient(node, grad) if is_handle(node) and node.entry else grad
