"""The train-step builder: a GradFn, an optax optimizer, a mesh and a plan become `init` and `step`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from shardkit._check import at_least
from shardkit._kinds import Key, Optimizer
from shardkit._typed import typed
from shardkit.arguments import check_function
from shardkit.partitioning.batch import batch_specs
from shardkit.partitioning.gradient import GradFn, LossFn, divisor_of, global_means
from shardkit.partitioning.groups import check_groups, groups_per_device, leave_groups
from shardkit.partitioning.local_step import local_gradients, local_means
from shardkit.partitioning.metrics import all_finite, metrics_of, returned
from shardkit.partitioning.placement import Layout, map_layouts
from shardkit.partitioning.plan import Plan
from shardkit.partitioning.reshard import enter, leave, to_rest
from shardkit.partitioning.staged import PipelineGradFn
from shardkit.partitioning.storage import check_held
from shardkit.pipeline.stages import arranged
from shardkit.precision import Precision, precision_of
from shardkit.rng import salt
from shardkit.state import TrainState, make_init, updated

_REPLICATED = PartitionSpec()


class TrainStep(NamedTuple):
    """The two functions of a training run.

    Attributes:
        init: `init(params, key) -> TrainState`; `params` is a pytree, or a function of the key that returns one, which
            runs inside jit so that no device ever holds the whole model. A callable pytree with leaves, such as a
            module, counts as a pytree. `init.abstract(params)` returns the state's shapes, dtypes and layouts without
            making an array, over any mesh, even an AbstractMesh.
        step: `step(state, batch) -> (state, metrics)`; donates `state`. Metrics are float32 scalars by name: "loss",
            "weight" (the divisor of the loss), and the auxiliary means.
    """

    init: Callable[[Any, jax.Array], TrainState]
    step: Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]


class NonFiniteError(FloatingPointError):
    """A loss or gradient was not finite under `nonfinite="stop"`.

    Attributes:
        state: the TrainState with the parameters and optimizer state as they were before the step.
        metrics: the metrics of the step.
    """

    def __init__(self, message: str, state: TrainState, metrics: dict[str, jax.Array]):
        super().__init__(message)
        self.state, self.metrics = state, metrics


@typed
def make_train_step(
    grad_fn: GradFn,
    optimizer: Optimizer,
    *,
    mesh: Mesh,
    plan: Plan,
    accumulate: int = 1,
    precision: Precision | str | None = None,
    nonfinite: Literal["keep", "skip", "stop"] = "keep",
    deterministic: int | None = None,
) -> TrainStep:
    """Builds a training step in which every collective of loss and gradient is explicit.

    The loss and gradients are those of the whole batch: the sum of all totals over the sum of all weights, whatever the
    mesh and the accumulation. The optimizer runs on global arrays, so any optax transformation is right unmodified.

    Args:
        grad_fn: what one device computes, from `value_and_grad(loss_fn)`.
        optimizer: an optax GradientTransformation; it is given `value=loss` if it takes extra arguments.
        mesh: the mesh.
        plan: how its axes are used, for example `dp("data")`.
        accumulate: microbatches per step: the batch is split into as many parts, which run one after the other, and the
            gradient is reduced once. The effective batch does not change. With a pipeline this warns, because more
            microbatches in its schedule do the same and it fills and drains only once.
        precision: a Precision, or "no", "bf16", "fp16".
        nonfinite: what happens when the loss or a gradient is not finite: "keep" takes the step anyway, "skip" leaves
            parameters and optimizer state unchanged on all devices, "stop" does the same and raises. With a loss scale
            such a step is always skipped, and with a dynamic one "stop" raises only if the loss itself is not finite.
            "skip" and "stop" add the metric "finite"; "stop" waits for each step to end.
        deterministic: G, a number of groups: the step has the same bits on all numbers of devices that divide G, under
            dp, zero1 and whole fsdp. The batch is cut into G parts, which are computed one by one as microbatches are,
            and summed in a fixed order. It holds for one kind of device, version of jax and dtype, for a loss that does
            not depend on the mesh, and for optimizers that do not sum over the elements of split leaves.

    Returns:
        TrainStep(init, step). `step` calls one compiled program; `step.lower(state, batch)` and `step.trace` show it.

    Raises:
        ValueError: an axis the mesh does not have, an accumulation below 1, an unknown name, a pipeline without `pp`;
            at trace time a batch that does not divide by the batch axes times `accumulate`, or a weight computed only
            from scalars of the batch.
        ValueError: with `deterministic`, what depends on the mesh: other strategies and algorithms, a loss that
            communicates, an optimizer that sums over split leaves; groups that do not divide the batch.
        ValueError: from `step`, for a state that an earlier step has donated, or that another plan stores with other
            padding or with its layers in another order.
        NonFiniteError: from `step`, under `nonfinite="stop"`.

    Cost: that of the plan, and one all_reduce of 8 bytes for the loss and for each auxiliary mean. With `deterministic`
        the same bytes, where each device has 1, 2, 4, .. groups, and log2 of them further gradients in memory.

    Example:
        >>> loss_fn = lambda params, batch, keys: jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
        >>> grad_fn = sk.value_and_grad(loss_fn)
        >>> init, step = sk.make_train_step(grad_fn, optax.sgd(0.5), mesh=mesh, plan=sk.dp("data"))
        >>> state = init({"w": jnp.zeros(2)}, jax.random.key(0))
        >>> state, metrics = step(state, {"x": jnp.eye(2), "y": jnp.ones(2)})
        >>> print(metrics["loss"], state.params["w"])
        1.0 [0.5 0.5]
    """
    import optax

    check_function("make_train_step", grad_fn)
    plan = arranged(plan, grad_fn)
    plan.check(mesh)
    policy = precision_of(precision)
    at_least("make_train_step", 1, accumulate=accumulate)
    if accumulate > 1 and isinstance(grad_fn, PipelineGradFn):
        warnings.warn(
            f"make_train_step: accumulate={accumulate} fills and drains the pipeline {accumulate} times per step. Give "
            f"the schedule {accumulate} times as many microbatches instead.",
            stacklevel=3,  # the caller's line, above `typed`
        )
    optimizer = optax.with_extra_args_support(optimizer)
    batch_spec = plan.batch_spec(mesh)
    guarded = nonfinite != "keep" or policy.loss_scale is not None
    check_groups(deterministic, accumulate, plan, mesh, policy.reduce)

    def traced_step(state: TrainState, key: jax.Array, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        layouts = plan.layouts(state.params, mesh)
        check_held("step: the parameters", state.params, map_layouts(Layout.at_rest, layouts), mesh)
        rest = map_layouts(lambda layout: layout.rest, layouts)
        update = map_layouts(lambda layout: layout.update, layouts)
        scale = state.loss_scale.scale if state.loss_scale else jnp.float32(1)
        parts = accumulate
        if deterministic:
            parts = groups_per_device(deterministic, batch, batch_spec, mesh, layouts)
            scale = jnp.where(state.step < 0, 0.0, scale)  # the scale, but no constant for the compiler
        specs = batch_specs(batch, batch_spec, mesh, parts)

        def on_device(params: Any, batch: Any, key: jax.Array, scale: jax.Array) -> Any:
            seen = enter(params, layouts, batch_spec, policy.compute, policy.reduce)
            own = grad_fn, seen, batch, key, scale, batch_spec, policy.compute, parts
            _, means, grads = local_gradients(*own, groups=bool(deterministic))
            if deterministic:
                means, grads = leave_groups(means, grads, layouts, batch_spec, scale)
            else:
                means = global_means(means, plan.batch_axes)
                grads = leave(grads, layouts, divisor_of(means["loss"].weight) * scale, policy.reduce)
            metrics = metrics_of(means)
            if guarded:
                metrics["finite"] = all_finite(metrics["loss"], grads)
            return metrics, grads

        in_specs, out_specs = (rest, specs, _REPLICATED, _REPLICATED), (_REPLICATED, update)
        on_mesh = jax.shard_map(on_device, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
        metrics, grads = on_mesh(state.params, batch, step_key(key, state.step), scale)
        run = optimizer, policy, mesh, layouts
        params, opt_state, loss_scale = updated(*run, state, grads, metrics, alone=bool(deterministic))
        if rest != update:
            params = jax.shard_map(lambda p: to_rest(p, layouts), mesh=mesh, in_specs=(update,), out_specs=rest)(params)
        if state.loss_scale:
            metrics["loss_scale"] = scale
        new = TrainState(state.step + 1, params, opt_state, None, loss_scale, state.residuals, state.carried)
        return new, returned(metrics, policy.output)

    compiled = jax.jit(traced_step, donate_argnums=0)
    step = _keyed(compiled, stop=nonfinite == "stop", dynamic=policy.loss_scale == "dynamic")
    return TrainStep(make_init(optimizer, mesh, plan, policy), step)


@typed
def make_eval_step(
    loss_fn: LossFn, *, mesh: Mesh, plan: Plan, precision: Precision | str | None = None
) -> Callable[[Any, Any], dict[str, jax.Array]]:
    """Builds `evaluate(params, batch) -> metrics`: the loss over the whole batch, without dropout or gradient.

    Args:
        loss_fn: as for `value_and_grad`; it is called with `keys=None`.
        mesh: the mesh.
        plan: the plan of the parameters' layouts.
        precision: as for `make_train_step`.

    Returns:
        A jitted function; its metrics are "loss", "weight" and the auxiliary means, float32 scalars.

    Raises:
        ValueError: as `make_train_step`; from `evaluate`, for parameters that another plan pads or stores in the order
            of its stages: pass `unpadded(params)`.

    Cost: an all_gather of `rest - seen` for each leaf, and one all_reduce of 8 bytes per mean.

    Example:
        >>> loss_fn = lambda params, batch, keys: jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
        >>> evaluate = sk.make_eval_step(loss_fn, mesh=mesh, plan=sk.dp("data"))
        >>> metrics = evaluate({"w": jnp.zeros(2)}, {"x": jnp.eye(2), "y": jnp.ones(2)})
        >>> print(metrics["loss"])
        1.0
    """
    check_function("make_eval_step", loss_fn)
    plan = arranged(plan, loss_fn)
    plan.check(mesh)
    policy = precision_of(precision)
    batch_spec = plan.batch_spec(mesh)

    @jax.jit
    def evaluate(params: Any, batch: Any) -> dict[str, jax.Array]:
        layouts = plan.layouts(params, mesh)
        check_held("evaluate: the parameters", params, map_layouts(Layout.at_rest, layouts), mesh)
        rest = map_layouts(lambda layout: layout.rest, layouts)

        def on_device(params: Any, batch: Any) -> dict[str, jax.Array]:
            seen = enter(params, layouts, batch_spec, policy.compute)
            means = local_means(loss_fn, seen, batch, batch_spec, policy.compute)
            return returned(metrics_of(global_means(means, plan.batch_axes)), policy.output)

        specs = batch_specs(batch, batch_spec, mesh, 1)
        return jax.shard_map(on_device, mesh=mesh, in_specs=(rest, specs), out_specs=_REPLICATED)(params, batch)

    return evaluate


@typed
def step_key(key: Key, step: jax.Array | int) -> jax.Array:
    """The key of one step: its examples get `example_keys(step_key(state.key, state.step), batch size)`.

    Args:
        key: the TrainState's key.
        step: steps taken before, from 0.

    Returns:
        A typed key.

    Example:
        >>> key = sk.step_key(jax.random.key(0), 7)
        >>> sk.example_keys(key, 4).shape
        (4,)
    """
    # Salted, so that it differs from every key that the parameters were drawn from.
    return jax.random.fold_in(jax.random.fold_in(key, salt("shardkit.step")), step)


def _keyed(
    compiled: Any, *, stop: bool, dynamic: bool
) -> Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]:
    """The step as its user calls it. The key never changes, and stays outside jit.

    A typed key that jit returns is rebuilt in Python at every call, which costs more than the rest of the dispatch.
    """

    def step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        taken = state.step
        if isinstance(taken, jax.Array) and not isinstance(taken, jax.core.Tracer) and taken.is_deleted():
            raise ValueError(  # jax 0.10 on simulated devices aborts the process instead
                "step: the state must be the newest; an earlier step was passed this one and donated its buffers. Pass "
                "the state that step returned, or copy a state that you want to keep: jax.tree.map(jnp.copy, state)."
            )
        new, metrics = compiled(*split(state), batch)
        new = new._replace(key=state.key)
        # A dynamic loss scale is found by letting gradients overflow, so only the loss tells of an error.
        if stop and not metrics["finite"] and not (dynamic and jnp.isfinite(metrics["loss"])):
            raise NonFiniteError(
                f"step {int(new.step)}: the loss ({float(metrics['loss'])}) or a gradient is not finite. The "
                "parameters are as before the step; lower the learning rate, or pass nonfinite='skip'.",
                new,
                metrics,
            )
        return new, metrics

    def split(state: TrainState) -> tuple[TrainState, jax.Array]:
        return state._replace(key=None), state.key

    step.lower = lambda state, batch: compiled.lower(*split(state), batch)  # type: ignore[attr-defined]
    step.trace = lambda state, batch: compiled.trace(*split(state), batch)  # type: ignore[attr-defined]
    return step
