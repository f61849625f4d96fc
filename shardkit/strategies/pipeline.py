"""Pipeline parallelism: a GradFn like any other, which runs the table of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from shardkit._check import Axis
from shardkit._typed import typed
from shardkit.partitioning.gradient import GradFn, LossFn, Mean
from shardkit.partitioning.handles import is_handle, part_gradient, parts, with_parts
from shardkit.partitioning.plan import Plan
from shardkit.pipeline.pieces import Model
from shardkit.pipeline.run import Mode, run
from shardkit.pipeline.stages import Stages, stack_plan
from shardkit.schedules import Schedule


@typed
def pp(axis: Axis) -> Plan:
    """Pipeline parallelism: each device holds the layers of its own stages, and all devices see the same batch.

    The stack is the entry "layers" of the parameters, with the layer as dim 0 of every leaf. The stages are those of
    the schedule of the GradFn; with any other GradFn there is one stage per device.

    Layout: `layers[L_a, ..]`, `grads[L_a, ..]` at rest, in use and in the update; all other leaves whole

    Args:
        axis: mesh axis of the pipeline.

    Returns:
        A plan for `make_train_step`; `chain` joins it with others.

    Raises:
        TypeError: `axis` is not a name or a tuple of names.
        ValueError: at trace time layers that the stages do not divide, an axis whose size is not that of the schedule,
            a leaf of the stack without a dim, or one whose layers another strategy splits.

    Cost: what the GradFn sends, and an all_reduce over `axis` of the gradients of all leaves outside the stack. The
        compiler moves rows between devices for the optimizer if stages differ in size, and, with several stages per
        device, if the optimizer state has arrays that mirror no parameter, as adafactor's does.

    Example:
        >>> layouts = sk.pp("model").layouts({"layers": jnp.ones((8, 3)), "head": jnp.ones(3)}, mesh)
        >>> tuple(layouts["layers"].rest), tuple(layouts["head"].rest)
        (('model',), ())

    Source: Huang et al., GPipe (arXiv:1811.06965); Narayanan et al. (arXiv:2104.04473), section 2.2.
    """
    return stack_plan(axis, None)


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
    layers_per_stage: tuple[int, ...] | None = None,
    layer_numbers: bool = False,
) -> GradFn:
    """The GradFn of a pipeline: one program for all devices, which runs any schedule.

    The parameters are a mapping. Its entry "layers" is the stack, with the layer as dim 0 of every leaf, and is split
    into stages; all other entries are shared by all devices. The numbers are those of
    `head(shared, stage(layers, embed(shared, batch, keys), keys), batch)`, microbatch by microbatch.

    Args:
        embed: `embed(shared, batch, keys) -> x`, the input of the first stage, a pytree. It is recomputed for its
            backward pass.
        stage: `stage(layers, x, keys) -> x`: some consecutive layers of the stack; returns the shapes and dtypes that
            it got. It may use collectives over other axes, `scan_layers` and lazy leaves. Stages of different widths
            pad their activations to a common one; what the head needs of every layer (a router's losses) is part of x.
        head: `head(shared, x, batch) ->` a scalar (a mean over equally many examples), a `Mean(total, weight)`, or
            either with a dict of auxiliary ones. Embedding and head may share (tie) a weight.
        schedule: when each device does what; its microbatches must divide the examples of a device.
        axis: the mesh axis of the pipeline; the plan has `pp(axis)`.
        mode: "masked": every device computes what any device computes at that tick, and discards what is not its own;
            no stage is inside a branch, so it may use any collective. "branch": devices compute only what is theirs;
            refused if the stage or its derivative uses a ppermute or a collective over `axis`. In both modes an
            embedding or head without collectives runs only where it is needed.
        recompute: whether only the stage's input is saved for the backward pass, which recomputes the rest. False: all
            that depends on the input is saved; less work, more memory.
        layers_per_stage: how many layers each stage has, where that differs.
        layer_numbers: whether the stage gets `(layers, numbers)`, with each layer's index in the whole stack, int32
            [layers]: for dropout keys that differ by layer, `fold_keys(keys, number)`.

    Returns:
        A GradFn `(params, batch, keys, *, scale=1) -> (Mean, aux, gradients)` with float32 gradients. There is one key
            per example, split like the batch, so that dropout is that of the unpipelined model. Its attribute `stages`
            tells `make_train_step` the order of the layers: a function that wraps it must keep that attribute, as
            `functools.wraps` does.

    Raises:
        ValueError: an unknown mode, an illegal schedule (with its grid); at trace time a schedule for another number of
            devices, examples that the microbatches do not divide, layers that the stages do not, a stage that returns
            another shape or dtype, a collective over `axis`, or one that `mode="branch"` forbids.

    Cost: at every tick of a segment each of its moves sends the activations, or their gradients, once, in their own
        dtype. Shared leaves are summed once per step over `axis`. Time is that of
        `schedule.simulate(..., synchronous=True)`; buffers are as large as `schedule.slots()` says, which grows with
        the microbatches only for gpipe and breadth_first.

    Example:
        >>> schedule = sk.schedules.one_f_one_b(stages=4, microbatches=8)
        >>> embed, head = lambda shared, batch, keys: batch, lambda shared, x, batch: jnp.mean(x**2)
        >>> stage = lambda layers, x, keys: sk.scan_layers(lambda w, x: jnp.tanh(x @ w), layers, x)
        >>> grad_fn = sk.pipeline_value_and_grad(embed, stage, head, schedule, "model")
        >>> plan = sk.chain(sk.dp("data"), sk.pp("model"))
        >>> init, step = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh, plan=plan)
        >>> state, metrics = step(init({"layers": jnp.ones((4, 2, 2))}, jax.random.key(0)), jnp.ones((16, 2)))
        >>> print(metrics["weight"])
        16.0

    Source: Huang et al., GPipe (arXiv:1811.06965); Narayanan et al., Megatron-LM (arXiv:2104.04473), section 2.2; Qi et
        al., Zero bubble (arXiv:2401.10241).
    """
    model = Model(embed, stage, head, layer_numbers, "pipeline_value_and_grad")
    stages = _stages(model.where, schedule, axis, layers_per_stage)

    def grad_fn(params: Any, batch: Any, keys: Any, *, scale: Any = 1) -> tuple[Mean, Mapping[str, Any], Any]:
        opened = with_parts(params, parts(params))
        sums = run(model, schedule, stages, opened, batch, keys, scale, mode, recompute, train=True)
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
    layers_per_stage: tuple[int, ...] | None = None,
    layer_numbers: bool = False,
) -> LossFn:
    """The loss of a pipeline, by the forward actions of a schedule: for `make_eval_step`.

    Args:
        embed, stage, head, schedule, axis, mode, layers_per_stage, layer_numbers: as for `pipeline_value_and_grad`.

    Returns:
        `loss(params, batch, keys) -> (Mean, aux)`.

    Raises:
        ValueError: as `pipeline_value_and_grad`.

    Cost: the activations once at every tick of `schedule.forward()`.

    Example:
        >>> schedule = sk.schedules.gpipe(stages=4, microbatches=8)
        >>> embed, head = lambda shared, batch, keys: batch, lambda shared, x, batch: jnp.mean(x**2)
        >>> stage = lambda layers, x, keys: sk.scan_layers(lambda w, x: x @ w, layers, x)
        >>> loss_fn = sk.pipeline_loss(embed, stage, head, schedule, "model")
        >>> evaluate = sk.make_eval_step(loss_fn, mesh=mesh, plan=sk.chain(sk.dp("data"), sk.pp("model")))
        >>> print(evaluate({"layers": jnp.ones((4, 1, 1))}, jnp.ones((16, 1)))["loss"])
        1.0
    """
    model = Model(embed, stage, head, layer_numbers, "pipeline_loss")
    stages = _stages(model.where, schedule, axis, layers_per_stage)
    forward = schedule.forward()

    def loss(params: Any, batch: Any, keys: Any) -> tuple[Mean, dict[str, Mean]]:
        means = dict(run(model, forward, stages, params, batch, keys, 1, mode, False, train=False).means)
        return means.pop("loss"), means

    loss.stages = stages  # type: ignore[attr-defined]
    return loss


def _stages(where: str, schedule: Schedule, axis: str, layers_per_stage: tuple[int, ...] | None) -> Stages:
    """The stages of a schedule, after checks."""
    if not axis:
        raise ValueError(f"{where}: axis must be a mesh axis name; got {axis!r}. Pass for example 'stage'.")
    schedule.check()
    return Stages.of(schedule, axis, layers_per_stage)


def _left(node: Any, grad: Any) -> Any:
    """The gradient of a leaf as it leaves the GradFn: of a lazy leaf with `entry`, that of its part."""
    return part_gradient(node, grad) if is_handle(node) and node.entry else grad
