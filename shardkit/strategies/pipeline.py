"""Pipeline parallelism: a plan, and a GradFn like any other, which runs the table of a schedule."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from shardkit._arguments.checks import Axis
from shardkit._arguments.typed import typed
from shardkit.on_device.pipelines import PipelineGradFn, PipelineLoss
from shardkit.pipelines.grad_fn import Mode, build_grad_fn, build_loss
from shardkit.pipelines.pieces import StagedModel
from shardkit.pipelines.stages import build_stack_plan
from shardkit.plans.dim_rules import DimRules
from shardkit.plans.plan import Plan
from shardkit.schedules import Schedule
from shardkit.schedules.stages import Stages

Piece = Callable[[Any, Any, Any], Any]


@typed
def pp(axis: Axis, *, stack: str = "layers") -> Plan:
    """Pipeline parallelism: each device holds the layers of its stages, and all devices see the same batch.

    The stack is an entry of your parameters, with the layer as dim 0 of every leaf. If you train the GradFn of a
    pipeline, it sets the stages; with any other GradFn there is one stage per device. `pipeline(...).plan` is this plan
    with the stages of its schedule.

    Layout: `layers[L_a, ..]`, `grads[L_a, ..]` at rest, in use and in the update; all other leaves whole

    Args:
        axis: mesh axis of the pipeline.
        stack: the name of the stack among the parameters.

    Returns:
        A plan for `make_train_step`; `chain` joins it with others.

    Raises:
        TypeError: `axis` is not a name or a tuple of names.
        ValueError: an empty `stack`. At trace time: parameters without the stack, a number of layers that the stages do
            not divide, an axis with more or fewer devices than the schedule, a leaf of the stack without a dim, or one
            with layers that another strategy splits.

    Cost: the collectives of the GradFn, and an all_reduce over `axis` of the gradients of all leaves outside the stack.
        The compiler moves rows between devices for the optimizer if stages differ in size. With several stages per
        device it also does if the optimizer state has arrays that mirror no parameter, as in adafactor.

    Example:
        >>> layouts = sk.pp("model").layouts({"layers": jnp.ones((8, 3)), "head": jnp.ones(3)}, mesh)
        >>> tuple(layouts["layers"].rest), tuple(layouts["head"].rest)
        (('model',), ())

    Source: Huang et al., GPipe (arXiv:1811.06965); Narayanan et al. (arXiv:2104.04473), section 2.2.
    """
    _check_stack("pp", stack)
    return build_stack_plan(Stages(axis, stack=stack))


def _check_stack(where: str, stack: str) -> None:
    if not stack:
        raise ValueError(
            f"{where}: stack must be the name of an entry of the parameters; got {stack!r}. Pass for example 'layers'."
        )


@dataclass(frozen=True)
class Pipeline:
    """A pipeline: when each device runs which microbatch, and which layers it has.

    Attributes:
        schedule: when each device does what.
        axis: the mesh axis of the pipeline.
        layers_per_stage: how many layers each stage has; None for equally many.
        spread: which dims of the leaves outside the stack are split over the axis; None: all of them are whole.
        stack: the entry of the parameters that has the layers.
    """

    schedule: Schedule
    axis: str
    layers_per_stage: tuple[int, ...] | None = None
    spread: DimRules | None = None
    stack: str = "layers"

    @property
    def stages(self) -> Stages:
        """Which device has which layers, in which order."""
        return Stages.of(self.schedule, self.axis, self.layers_per_stage, self.spread, self.stack)

    @property
    def plan(self) -> Plan:
        """`pp(axis)` with these stages; `chain` joins it with other plans."""
        return build_stack_plan(self.stages)

    @partial(typed, where="pipeline.value_and_grad")
    def value_and_grad(
        self,
        embed: Piece,
        stage: Piece,
        head: Piece,
        *,
        mode: Mode = "masked",
        recompute: bool = True,
        layer_numbers: bool = False,
        trained: Any = None,
    ) -> PipelineGradFn:
        """The GradFn of the pipeline: one program for all devices.

        The parameters are a mapping. Its entry "layers", or the pipeline's `stack`, has the layer as dim 0 of every
        leaf, and is split into stages; all other entries are shared by all devices. The numbers are those of
        `head(shared, stage(layers, embed(shared, batch, keys), keys), batch)`, microbatch by microbatch.

        Args:
            embed: `embed(shared, batch, keys) -> x`, the input of the first stage, a pytree. It is recomputed for its
                backward pass.
            stage: `stage(layers, x, keys) -> x`: some consecutive layers of the stack; returns the shapes and dtypes
                that it got. It may use collectives over other axes, `scan_layers` and lazy leaves. Stages of different
                widths pad their activations to a common one; what the head needs of every layer (a router's losses) is
                part of x.
            head: `head(shared, x, batch) ->` a scalar (a mean over equally many examples), a `Mean(total, weight)`, or
                either with a dict of auxiliary ones. Embedding and head may share (tie) a weight.
            mode: "masked": if any device runs an op at a tick, all devices compute it, and the others discard the
                result. No stage is inside a branch, so it may use any collective. "branch": a device computes only its
                own ops; refused if the stage or its derivative uses a ppermute or a collective over `axis`. In both
                modes an embedding or head without collectives runs only where it is needed.
            recompute: whether only the stage's input is saved for the backward pass, which recomputes the rest. False:
                all values that depend on the input are saved; less work, more memory.
            layer_numbers: whether the stage gets `(layers, numbers)`, with each layer's index in the whole stack, int32
                [layers]: for dropout keys that differ by layer, `fold_keys(keys, number)`.
            trained: as for `sk.value_and_grad`; the gradients of frozen leaves are not sent, but may be computed.

        Returns:
            A GradFn `(params, batch, keys, *, scale=1) -> (Mean, aux, gradients)` with float32 gradients. There is one
                key per example, split like the batch, so that dropout is that of the unpipelined model. Wrap it with
                `dataclasses.replace(grad_fn, function=...)`, which keeps its stages.

        Raises:
            TypeError: a piece that takes other arguments, such as carried state; at trace time a list of layers.
            ValueError: an unknown mode; at trace time a schedule for another number of devices, examples that the
                microbatches do not divide, layers that the stages do not, a stage that returns another shape or dtype,
                a collective over `axis`, or one that `mode="branch"` forbids.

        Cost: at every tick of a segment each of its moves sends the activations, or their gradients, once, in their own
            dtype. Shared leaves are summed once per step over `axis`. Time is that of
            `schedule.simulate(..., synchronous=True)`; buffers are as large as `schedule.slots()` says, which grows
            with the microbatches only for gpipe and breadth_first.

        Source: Huang et al., GPipe (arXiv:1811.06965); Narayanan et al., Megatron-LM (arXiv:2104.04473), section 2.2;
            Qi et al., Zero bubble (arXiv:2401.10241).
        """
        self._check("pipeline.value_and_grad", mode)
        model = StagedModel(embed, stage, head, layer_numbers, "pipeline.value_and_grad", self.stack)
        return build_grad_fn(model, self.schedule, self.stages, mode, recompute, trained)

    @partial(typed, where="pipeline.loss")
    def loss(
        self, embed: Piece, stage: Piece, head: Piece, *, mode: Mode = "masked", layer_numbers: bool = False
    ) -> PipelineLoss:
        """The loss of the pipeline, by the forward actions of its schedule: for `make_eval_step`.

        Args:
            embed, stage, head, mode, layer_numbers: as for `value_and_grad`.

        Returns:
            `loss(params, batch, keys) -> (Mean, aux)`.

        Raises:
            ValueError: as `value_and_grad`.

        Cost: the activations once at every tick of `schedule.forward()`.
        """
        self._check("pipeline.loss", mode)
        model = StagedModel(embed, stage, head, layer_numbers, "pipeline.loss", self.stack)
        return build_loss(model, self.schedule, self.stages, mode)

    def _check(self, where: str, mode: Mode) -> None:
        # In a branch some devices would wait for the others in a collective of the head, while the others run their
        # stage: the step would hang.
        if self.spread is not None and mode == "branch":
            raise ValueError(
                f"{where}: embedding and head that are spread over {self.axis!r} must run on all its devices; got "
                "mode='branch', in which each device runs its stage alone. Pass mode='masked', or no spread=."
            )


@typed
def pipeline(
    schedule: Schedule,
    axis: str,
    *,
    layers_per_stage: tuple[int, ...] | None = None,
    spread: DimRules | None = None,
    stack: str = "layers",
) -> Pipeline:
    """Builds a pipeline from a schedule and a mesh axis: its plan, its GradFn and its loss.

    Args:
        schedule: the order in which each device works, for example `sk.schedules.one_f_one_b(...)`. Its microbatches
            must divide the examples of a device.
        axis: the mesh axis of the pipeline.
        layers_per_stage: the number of layers of each stage, if they differ.
        spread: None: the device of the first stage runs the embedding, the device of the last stage the head. Otherwise
            which dims of the leaves outside the stack are split over `axis`, such as the vocabulary, in the form of
            `rules` of `sk.tp`. Then all devices run the embedding together, and the head together, each with its part
            of these leaves, by collectives over `axis` such as `sk.layers.vocab_embed` and `vocab_cross_entropy`. All
            devices get the same arguments: the embedding those of the microbatch that enters the first stage, the head
            those of the microbatch that has left the last stage, and its activations.
        stack: the name of the layers among the parameters, with the layer as dim 0 of every leaf.

    Returns:
        A Pipeline: `plan` is `pp(axis)` with the stages of the schedule, `value_and_grad(embed, stage, head)` the
            GradFn for `make_train_step`, `loss(embed, stage, head)` the loss for `make_eval_step`.

    Raises:
        ValueError: an illegal schedule (with its grid), no axis or stack, or `spread` specs that never name `axis`. At
            trace time: a leaf that does not divide, or a spread head in which only one of total and weight differs
            between devices.

    Cost: the cost of `value_and_grad` and of `loss`. With `spread`, each microbatch also sends, beside the collectives
        of embedding and head, the output of the last stage to all devices and the gradient of the input of the first
        stage, each 2 (n-1)/n of its bytes.

    Example:
        >>> pipe = sk.pipeline(sk.schedules.one_f_one_b(devices=4, microbatches=8), "model")
        >>> embed, head = lambda shared, batch, keys: batch, lambda shared, x, batch: jnp.mean(x**2)
        >>> stage = lambda layers, x, keys: sk.scan_layers(lambda w, x: jnp.tanh(x @ w), layers, x)
        >>> grad_fn, plan = pipe.value_and_grad(embed, stage, head), sk.chain(sk.dp("data"), pipe.plan)
        >>> init, step = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh, plan=plan)
        >>> state, metrics = step(init({"layers": jnp.ones((4, 2, 2))}, jax.random.key(0)), jnp.ones((16, 2)))
        >>> print(metrics["weight"])
        16.0

    Source: Huang et al., GPipe (arXiv:1811.06965).
    """
    if not axis:
        raise ValueError(f"pipeline: axis must be a mesh axis name; got {axis!r}. Pass for example 'stage'.")
    _check_stack("pipeline", stack)
    # Here and not when the step is traced: the error draws the grid, which needs no parameters and no mesh.
    schedule.check()
    pipe = Pipeline(schedule, axis, layers_per_stage, spread, stack)
    _ = pipe.plan  # refuses a `spread` that is no rules
    return pipe


def pipeline_value_and_grad(
    embed: Piece,
    stage: Piece,
    head: Piece,
    schedule: Schedule,
    axis: str,
    *,
    mode: Mode = "masked",
    recompute: bool = True,
    layers_per_stage: tuple[int, ...] | None = None,
    layer_numbers: bool = False,
    trained: Any = None,
) -> PipelineGradFn:
    """Deprecated: `pipeline(schedule, axis, layers_per_stage=...).value_and_grad(embed, stage, head, ...)`."""
    warnings.warn(
        "sk.pipeline_value_and_grad(embed, stage, head, schedule, axis) is deprecated: use "
        "sk.pipeline(schedule, axis).value_and_grad(embed, stage, head).",
        DeprecationWarning,
        stacklevel=2,
    )
    return pipeline(schedule, axis, layers_per_stage=layers_per_stage).value_and_grad(
        embed, stage, head, mode=mode, recompute=recompute, layer_numbers=layer_numbers, trained=trained
    )
