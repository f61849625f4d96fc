"""The train-step builder: a GradFn, an optax optimizer, a mesh and a plan become `init` and `step`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit._arguments.checks import Axis, at_least
from shardkit._arguments.context import CONTEXT
from shardkit._arguments.typed import ARRAYS, Optimizer, check_kind, typed
from shardkit._jax import compat
from shardkit.meshes.layout import path_name
from shardkit.meshes.rng import step_key
from shardkit.on_device.advice import warn_of
from shardkit.on_device.batch import batch_specs
from shardkit.on_device.gradient import GradFn, divisor_of, global_means, largest_weight
from shardkit.on_device.groups import check_groups, groups_per_device, leave_groups, update_alone
from shardkit.on_device.local_step import local_gradients, or_column_linear
from shardkit.on_device.metrics import all_finite, metrics_of, returned
from shardkit.on_device.pipelines import PipelineGradFn
from shardkit.on_device.residuals import residual_specs
from shardkit.on_device.seam import enter, leave, to_rest
from shardkit.pipeline.stages import arranged
from shardkit.plans.axis_types import auto_mesh, with_auto_axes
from shardkit.plans.manual import manual_axes
from shardkit.plans.placement import Layout, map_layouts, seen_in_parts
from shardkit.plans.plan import Plan
from shardkit.plans.storage import check_held
from shardkit.steps.arguments import check_function
from shardkit.steps.carry import Carried, check_carried, reads_carried
from shardkit.steps.init import Init
from shardkit.steps.partitioner import AsLaidOut
from shardkit.steps.precision import Precision, precision_of
from shardkit.steps.state import TrainState, passed_what_it_takes, shardings, state_check, updated

_REPLICATED = PartitionSpec()
# What may not sum over split leaves with deterministic=, and what to use instead.
_OPTIMIZER = "an optimizer", "Use dp, or an optimizer without it: clip by value, not by norm."
_CARRY = "a carry=", "Use dp or zero1, or sum in the loss, as an auxiliary Mean."


class NonFiniteError(FloatingPointError):
    """A loss or gradient was not finite under `nonfinite="stop"`.

    Attributes:
        state: the TrainState with the parameters and optimizer state as they were before the step.
        metrics: the metrics of the step.
    """

    def __init__(self, message: str, state: TrainState, metrics: dict[str, jax.Array]):
        super().__init__(message)
        self.state, self.metrics = state, metrics


class Step:
    """`step(state, batch) -> (state, metrics)`, one training step.

    The key of a state never changes, and stays outside jit: a typed key that jit returns is rebuilt in Python at every
    call, which costs more than the rest of the dispatch.

    Attributes:
        plan: how the axes of the mesh are used; None of a step that was loaded from a file, as all below.
        mesh: the mesh; `manual` are the axes that were named as Manual.
        schedule: that of a pipeline.
        ends: what a step does with what is not finite, as `analysis.compiled(...).save` keeps it.
    """

    __name__ = "step"  # in profiles and reports

    def __init__(
        self,
        run: Any,
        *,
        stop: bool,
        dynamic: bool,
        check: Callable[[Any], None] | None = None,
        warns: bool = True,
        plan: Plan | None = None,
        mesh: Any = None,
        manual: Any = None,
        schedule: Any = None,
    ):
        self.plan, self.mesh, self.manual, self.schedule = plan, mesh, manual, schedule
        self.ends = {"stop": stop, "dynamic": dynamic}
        self._run, self._check, self._warns = run, check, warns
        self._array = compat.private("array.ArrayImpl")  # for every leaf, and isinstance takes twice as long

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """The next state, and the metrics by name."""
        array = self._array
        if any(type(x) is array and x.is_deleted() for x in jax.tree.leaves(state)):
            leaves = jax.tree_util.tree_leaves_with_path(state)
            path = next(path for path, x in leaves if type(x) is array and x.is_deleted())
            raise ValueError(  # jax 0.10 on simulated devices aborts the process instead
                "step: the state must be the newest; an earlier step was passed its leaf "
                f"{path_name(path)} and donated the buffer. Pass the state that step returned, copy one that you "
                "want to keep, jax.tree.map(jnp.copy, state), or pass make_train_step(..., donate=False)."
            )
        args = self._arguments(state, batch)
        if self._warns:
            self._warns = False
            warn_of(_called(self._run.trace, args).jaxpr.jaxpr, stacklevel=2)
        new, metrics = _called(self._run, args)
        new = new._replace(key=state.key)
        # A dynamic loss scale is found by letting gradients overflow, so only the loss tells of an error.
        dynamic = self.ends["dynamic"]
        if self.ends["stop"] and not metrics["finite"] and not (dynamic and jnp.isfinite(metrics["loss"])):
            raise NonFiniteError(
                f"step {int(new.step)}: the loss ({float(metrics['loss'])}) or a gradient is not finite. The "
                "parameters are as before the step; lower the learning rate, or pass nonfinite='skip'.",
                new,
                metrics,
            )
        return new, metrics

    def trace(self, state: TrainState, batch: Any = None) -> jax.stages.Traced:
        """The program of one call, as a jaxpr."""
        return _called(self._run.trace, self._arguments(state, batch))

    def lower(self, state: TrainState, batch: Any = None) -> jax.stages.Lowered:
        """The program of one call, for the compiler."""
        return _called(self._run.lower, self._arguments(state, batch))

    def _arguments(self, state: TrainState, batch: Any) -> tuple[TrainState, jax.Array, Any]:
        if batch is None:
            raise TypeError(
                "step: the batch must follow the state; got none. Pass for example sk.census(step, state, batch)."
            )
        if self._check:
            self._check(state)
        return state._replace(key=None), state.key, batch


def _called(call: Callable[..., Any], args: tuple[TrainState, jax.Array, Any]) -> Any:
    try:
        return call(*args)
    except TypeError:  # jax's names a function that is not the caller's
        check_kind("step", "batch", args[2], (ARRAYS,))
        raise


class TrainStep(NamedTuple):
    """The two functions of a training run.

    Attributes:
        init: `init(params, key, carried=None) -> TrainState`; `params` is a pytree, or a function of the key that
            returns one, which runs inside jit so that no device ever holds the whole model. A callable pytree with
            leaves, such as a module, counts as a pytree. `carried` is a pytree, or a function of the parameters.
            `init.abstract(params, carried=None)` makes no array, over any mesh, even an AbstractMesh.
        step: `step(state, batch) -> (state, metrics)`; donates `state`, unless `donate=False`. Metrics are float32
            scalars by name: "loss", "weight" (the divisor of the loss; of a sum of means the largest), and the
            auxiliary means, as arrays or trees where the loss returns such.
    """

    init: Init
    step: Step


@typed
def make_train_step(
    grad_fn: GradFn,
    optimizer: Optimizer,
    *,
    mesh: Mesh = CONTEXT,
    plan: Plan,
    accumulate: int = 1,
    precision: Precision | str | None = None,
    nonfinite: Literal["keep", "skip", "stop"] = "keep",
    carry: Callable[..., Any] | None = None,
    deterministic: int | None = None,
    manual: Axis | None = None,
    steps: int | None = None,
    donate: bool = True,
) -> TrainStep:
    """Builds a training step in which every collective of loss and gradient is explicit.

    The loss and gradients are those of the whole batch: the sum of all totals over the sum of all weights, whatever the
    mesh and the accumulation. The optimizer runs on global arrays, so an optax transformation works
    unmodified if it needs only gradients, its state, the parameters and the loss; others are refused.

    Args:
        grad_fn: what one device computes, from `value_and_grad(loss_fn)`.
        optimizer: an optax GradientTransformation; it is given `value=loss` if it takes that.
        mesh: the mesh; by default that of `jax.set_mesh`.
        plan: how its axes are used, for example `dp("data")`.
        accumulate: microbatches per step: the batch is split into as many parts, which run one after the other, and the
            gradient is reduced once. The effective batch does not change. With a pipeline this warns, because more
            microbatches in its schedule do the same and it fills and drains only once; and where the loss sends over
            an axis of the batch, because it then mixes the examples of one microbatch.
        precision: a Precision, or "no", "bf16", "fp16".
        nonfinite: what happens when the loss or a gradient is not finite: "keep" takes the step anyway, "skip" leaves
            parameters, optimizer and carried state unchanged on all devices, "stop" does the same and raises. With a
            loss scale such a step is always skipped, and with a dynamic one "stop" raises only if the loss itself is
            not finite. "skip" and "stop" add the metric "finite"; "stop" waits for each step to end.
        carry: `carry(carried, metrics, params) -> carried` updates the state that `init(params, key, carried=...)`
            began with, once per step, from the float32 metrics and the new parameters, all global arrays. A loss with
            a fourth argument reads it. None: it never changes.
        deterministic: G, a number of groups: the step has the same bits on all numbers of devices that divide G, under
            dp, zero1 and whole fsdp. The batch is cut into G parts, which are computed one by one as microbatches are,
            and summed in a fixed order. It holds for one kind of device, version of jax and dtype, for a loss that does
            not depend on the mesh, and an optimizer and a `carry` that neither multiply matrices nor sum over the
            elements of split leaves.
        manual: the mesh axes that are Manual in the step, which include those of the plan; None: all. The others are
            left to XLA's partitioner, as in `jit`: parameters keep the layout over them of the arrays that `init` gets,
            and the loss may use `jax.lax.with_sharding_constraint` over them.
        steps: the number of steps in one call, as a scan: every array of the batch gets a leading dim for the step, as
            does every metric. Python then dispatches once for all of them.
        donate: whether the new state takes the memory of the old one, which is gone then. With False both are held, and
            arrays of one state may be used in another.

    Returns:
        TrainStep(init, step). `step` calls one compiled program; `step.lower(state, batch)` and `step.trace` show it.

    Raises:
        ValueError: an axis that the mesh or `manual` lacks, an accumulation below 1, an unknown name, no `pp`;
            at trace time a batch that does not divide by the batch axes times `accumulate`, a weight computed only
            from scalars of the batch, carried state that is missing or that nothing uses, or a `carry` that changes its
            tree, shapes or dtypes.
        ValueError: with `deterministic`, what depends on the mesh: other strategies and algorithms, a loss that
            communicates, an optimizer or `carry` that multiplies matrices or sums over split leaves; groups that do not
            divide the batch.
        ValueError: from `step`, for a state that an earlier step has donated, that is on another mesh, or that another
            plan lays out, pads or orders otherwise, or gives other residuals.
        TypeError: from `step`, for what is no TrainState, and for an optimizer whose updates are not like gradients.
            What the optimizer raises is raised as it is, as by line searches, which need a function of the loss.
        NonFiniteError: from `step`, under `nonfinite="stop"`.

    Cost: that of the plan, one all_reduce of 8 bytes for the loss and for each auxiliary mean, or each element of one
        that is an array, and what the compiler adds for a `carry` that mixes shards. With `deterministic` the same
        bytes, where each device has 1, 2, 4, .. groups, and log2 of them further gradients in memory.

    Example:
        >>> loss_fn = lambda params, batch, keys: jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
        >>> grad_fn = sk.value_and_grad(loss_fn)
        >>> init, step = sk.make_train_step(grad_fn, optax.sgd(0.5), mesh=mesh, plan=sk.dp("data"))
        >>> state = init({"w": jnp.zeros(2)}, jax.random.key(0))
        >>> state, metrics = step(state, {"x": jnp.eye(2), "y": jnp.ones(2)})
        >>> print(metrics["loss"], state.params["w"])
        1.0 [0.5 0.5]
        >>> average = lambda old, metrics, params: optax.incremental_update(params, old, 0.5)
        >>> init, step = sk.make_train_step(grad_fn, optax.sgd(0.5), mesh=mesh, plan=sk.dp("data"), carry=average)
        >>> state = init({"w": jnp.zeros(2)}, jax.random.key(0), carried=lambda params: params)
        >>> print(step(state, {"x": jnp.eye(2), "y": jnp.ones(2)})[0].carried["w"])
        [0.25 0.25]
    """
    check_function("make_train_step", grad_fn)
    at_least("make_train_step", 1, accumulate=accumulate, steps=1 if steps is None else steps)
    if steps and nonfinite == "stop":
        raise ValueError(
            f"make_train_step: nonfinite='stop' checks every step, but steps={steps} returns after {steps}. Pass "
            "nonfinite='skip', and check the metric 'finite'."
        )
    plan = arranged(plan, grad_fn, deterministic or accumulate)
    plan.check(mesh)
    given, mesh = mesh, auto_mesh(mesh)
    policy = precision_of(precision)
    axes = manual_axes("make_train_step", manual, plan, mesh)
    if deterministic and set(axes) != set(mesh.axis_names):
        raise ValueError(
            f"make_train_step: deterministic={deterministic} needs every axis of the mesh to be Manual; got "
            f"{manual=}. Leave manual out, or deterministic."
        )
    if accumulate > 1 and isinstance(grad_fn, PipelineGradFn):
        warnings.warn(
            f"make_train_step: accumulate={accumulate} fills and drains the pipeline {accumulate} times per step. Give "
            f"the schedule {accumulate} times as many microbatches instead.",
            stacklevel=3,  # the caller's line, above `typed`
        )
    optimizer = passed_what_it_takes(optimizer)
    batch_spec = plan.batch_spec(mesh)
    reads = reads_carried(grad_fn)
    guarded = nonfinite != "keep" or policy.loss_scale is not None
    check_groups(deterministic, accumulate, plan, mesh, policy.reduce)
    shard_map = partial(jax.shard_map, mesh=mesh, axis_names=set(axes))

    def traced_step(plan: Plan, state: TrainState, key: jax.Array, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        layouts = plan.layouts(state.params, mesh)
        check_held("step: the parameters", state.params, map_layouts(Layout.at_rest, layouts), mesh)
        rest = map_layouts(lambda layout: layout.rest, layouts)
        at_rest = shardings(mesh, map_layouts(Layout.at_rest, layouts))
        if steps:  # else the partitioner splits what a loop carries as the optimizer does, and gathers it in each step
            state = state._replace(params=jax.lax.with_sharding_constraint(state.params, at_rest))
        update = map_layouts(lambda layout: layout.update, layouts)
        scale = state.loss_scale.scale if state.loss_scale else jnp.float32(1)
        owed = residual_specs(state.residuals, state.params, mesh, plan)
        check_carried("step", reads, carry, state.carried)
        carried = Carried("step", state.carried, state.params, layouts, mesh)
        parts = accumulate
        if deterministic:
            parts = groups_per_device(deterministic, batch, batch_spec, mesh, layouts)
            scale = jnp.where(state.step < 0, 0.0, scale)  # the scale, but no constant for the compiler
        specs = batch_specs(batch, batch_spec, mesh, parts)

        def on_device(params: Any, kept: Any, residuals: Any, batch: Any, key: jax.Array, scale: jax.Array) -> Any:
            seen = enter(params, layouts, batch_spec, policy.compute, policy.reduce)
            run = carried.bound(grad_fn, kept, batch_spec, policy) if reads else grad_fn
            groups, split = bool(deterministic), seen_in_parts(layouts)

            def local(seen: Any) -> Any:
                return local_gradients(run, seen, batch, key, scale, batch_spec, policy.compute, parts, groups, split)

            _, means, grads = or_column_linear(local, seen, state.params, policy.compute, split)
            if deterministic:
                means, grads = leave_groups(means, grads, layouts, batch_spec, scale)
                left = residuals
            else:
                means = global_means(means, plan.batch_axes)
                divisor = divisor_of(largest_weight(means["loss"])) * scale
                grads, left = leave(grads, layouts, divisor, policy.reduce, residuals)
            metrics = metrics_of(means)
            if guarded:
                metrics["finite"] = all_finite(metrics["loss"], grads)
                left = jax.tree.map(lambda new, old: jnp.where(metrics["finite"], new, old), left, residuals)
            return metrics, grads, left

        in_specs = (rest, carried.specs, owed, specs, _REPLICATED, _REPLICATED)
        on_mesh = shard_map(on_device, in_specs=in_specs, out_specs=(_REPLICATED, update, owed))
        args = (state.params, carried.tree, state.residuals, batch, step_key(key, state.step), scale)
        metrics, grads, residuals = on_mesh(*args)
        run = optimizer, policy, mesh, layouts
        alone = partial(update_alone, step=state.step, specs=update, what=_OPTIMIZER) if deterministic else None
        params, opt_state, loss_scale = updated(*run, state, grads, metrics, alone=alone)
        if rest != update:
            params = shard_map(lambda p: to_rest(p, layouts), in_specs=(update,), out_specs=rest)(params)
            if plan.automatic:
                params = jax.lax.with_sharding_constraint(params, at_rest)
        if state.loss_scale:
            metrics["loss_scale"] = scale
        alone = alone and partial(alone, specs=rest, what=_CARRY)
        kept = carried.updated(carry, metrics, params, alone) if carry else state.carried
        new = TrainState(state.step + 1, params, opt_state, None, loss_scale, residuals, kept)
        return new, returned(metrics, policy.output)

    def compiled(plan: Plan, out: Any = None) -> Any:
        one: Any = partial(traced_step, plan)
        step = with_auto_axes(one if steps is None else partial(_in_sequence, one, steps), given)
        laid_out = out and (out, NamedSharding(given, _REPLICATED))
        return jax.jit(step, donate_argnums=(0,) if donate else (), out_shardings=laid_out)

    whole = set(axes) == set(mesh.axis_names)
    run = compiled(plan) if given is mesh and whole else AsLaidOut(compiled, plan, axes)
    step = Step(
        run,
        stop=nonfinite == "stop",
        dynamic=policy.loss_scale == "dynamic",
        check=state_check(plan, given) if whole else None,  # else the layouts are the caller's
        plan=plan,
        mesh=mesh,
        manual=manual,
        schedule=getattr(grad_fn, "schedule", None),
    )
    return TrainStep(Init(optimizer, policy, given, plan, axes, reads, carry), step)


def _in_sequence(step: Any, steps: int, state: TrainState, key: jax.Array, batches: Any) -> tuple[TrainState, Any]:
    """A number of steps, over batches whose arrays have the step as dim 0."""
    for path, x in jax.tree_util.tree_leaves_with_path(batches):
        if jnp.shape(x)[:1] != (steps,):
            raise ValueError(
                f"step: every array of the batch must have dim 0 of size steps={steps}; leaf {path_name(path)} has "
                f"shape {jnp.shape(x)}. Stack the batches of {steps} steps."
            )
    return jax.lax.scan(lambda state, batch: step(state, key, batch), state, batches)
