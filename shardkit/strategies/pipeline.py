"""Pipelines: the same GradFn as any other, run by the table of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args

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

    The stack is what stands in the parameters under the entry "layers", with the layer as dim 0 of every leaf. Alone it
    is one stage a device; under the GradFn of a pipeline the stages are those of its schedule.

    Layout: `layers[L_a, ..]`, `grads[L_a, ..]` at rest, in use and in the update; all else whole

    Args:
        axis: mesh axis of the pipeline.

    Returns:
        A plan for `make_train_step`; `chain` joins it with others.

    Raises:
        TypeError: `axis` is not a name or a tuple of names.
        ValueError: at trace time layers that do not fit the stages, a mesh that does not fit the schedule, a leaf of
            the stack without a dim, or one whose layers another strategy splits.

    Cost: nothing of the stack: its gradients are complete. What the GradFn sends stands there, as does the sum over
        `axis` of the gradients of all other leaves. For the optimizer the compiler moves rows between devices where
        stages differ in size and, with several stages a device, where it keeps arrays that mirror no parameter, as
        adafactor does.

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
        layers_per_stage: how many layers each stage has, where that differs.
        layer_numbers: whether the stage gets `(layers, numbers)`, with each layer's place in the whole stack, int32
            [layers]: for dropout keys that differ by layer, `fold_keys(keys, number)`.

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
    model = Model(embed, stage, head, layer_numbers, "pipeline_value_and_grad")
    stages = _stages(model.where, schedule, axis, mode, layers_per_stage)

    def grad_fn(params: Any, batch: Any, keys: Any, *, scale: Any = 1) -> tuple[Mean, Mapping[str, Any], Any]:
        opened = with_parts(params, parts(params))  # those handles that the loss is not to see
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
    """The loss alone, through the forwards of a schedule: for `make_eval_step`.

    Args:
        embed, stage, head, schedule, axis, mode, layers_per_stage, layer_numbers: as for `pipeline_value_and_grad`.

    Returns:
        `loss(params, batch, keys) -> (Mean, aux)`.

    Raises:
        ValueError: as `pipeline_value_and_grad`.

    Cost: the activations once at every tick of `schedule.forward()`.
    """
    model = Model(embed, stage, head, layer_numbers, "pipeline_loss")
    stages = _stages(model.where, schedule, axis, mode, layers_per_stage)
    forward = schedule.forward()

    def loss(params: Any, batch: Any, keys: Any) -> tuple[Mean, dict[str, Mean]]:
        means = dict(run(model, forward, stages, params, batch, keys, 1, mode, False, train=False).means)
        return means.pop("loss"), means

    loss.stages = stages  # type: ignore[attr-defined]
    return loss


def _stages(where: str, schedule: Schedule, axis: str, mode: Mode, layers_per_stage: tuple[int, ...] | None) -> Stages:
    """The stages of a legal schedule; refuses another one, and an unknown mode."""
    if mode not in get_args(Mode):
        raise ValueError(f"{where}: mode must be 'masked' or 'branch'; got {mode!r}. Choose one of them.")
    if not axis:
        raise ValueError(f"{where}: axis must be a mesh axis name; got {axis!r}. Pass for example 'stage'.")
    schedule.check()
    return Stages.of(schedule, axis, layers_per_stage)


def _left(node: Any, grad: Any) -> Any:
    """The gradient of a leaf as it leaves the GradFn: a handle that was opened for the loss had it whole until here."""
    return part_gradient(node, grad) if is_handle(node) and node.entry else grad
