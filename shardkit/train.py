"""The train-step builder: a GradFn, an optax optimizer, a mesh and a plan become `init` and `step`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from shardkit._compat import varying_axes
from shardkit._kinds import Key, Optimizer
from shardkit._typed import typed
from shardkit.arguments import check_function
from shardkit.collectives import all_reduce
from shardkit.partitioning.batch import batch_specs
from shardkit.partitioning.gradient import GradFn, LossFn, Mean, counted, global_means
from shardkit.partitioning.local_step import local_gradients, local_means
from shardkit.partitioning.plan import Layout, Plan, map_layouts
from shardkit.partitioning.reshard import leave, to_rest
from shardkit.partitioning.storage import check_held, exact, padded
from shardkit.pipeline.stages import arranged
from shardkit.precision import Precision, next_loss_scale, precision_of
from shardkit.rng import salt
from shardkit.state import TrainState, advance, make_init, optimizer_held, reads_order, shardings

_REPLICATED = PartitionSpec()


class TrainStep(NamedTuple):
    """The two functions of a training run.

    Attributes:
        init: `init(params, key) -> TrainState`; `params` is a pytree, or a function of the key that makes one, which
            then runs inside jit so that no device ever holds the whole model. What is both, as a module that is called,
            is a pytree if it has leaves. `init.abstract(params)` gives the state's
            shapes, dtypes and layouts instead, over any mesh, an AbstractMesh too, and makes no array.
        step: `step(state, batch) -> (state, metrics)`; donates `state`. Metrics are float32 scalars by name: "loss",
            "weight" (what it was divided by), and the auxiliary means.
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
) -> TrainStep:
    """Builds a training step in which every collective of loss and gradient is explicit.

    The loss and gradients are those of the whole batch: the sum of all totals over the sum of all weights, whatever the
    mesh and the accumulation. The optimizer runs on global arrays, so any optax transformation is right unmodified.

    Args:
        grad_fn: what one device computes, from `value_and_grad(loss_fn)`.
        optimizer: an optax GradientTransformation; it is given `value=loss` if it takes extra arguments.
        mesh: the mesh.
        plan: how its axes are used, for example `dp("data")`.
        accumulate: microbatches a step; the batch is split into so many parts, one after the other, and the gradient
            reduced once. The effective batch does not change. A pipeline warns: more microbatches in its schedule do
            the same, and it fills and drains once.
        precision: a Precision, or "no", "bf16", "fp16".
        nonfinite: what happens when the loss or a gradient is not finite: "keep" takes the step all the same, "skip"
            leaves parameters and optimizer state as they were on all devices, "stop" does so and raises. A loss
            scale always skips, and a dynamic one stops only for the loss itself. "skip" and "stop" add the metric
            "finite"; "stop" waits for each step to end.

    Returns:
        TrainStep(init, step). `step` calls one compiled program; `step.lower(state, batch)` and `step.trace` show it.

    Raises:
        ValueError: an axis the mesh does not have, an accumulation below 1, an unknown name, a pipeline without `pp`;
            at trace time a batch that does not divide by the batch axes times `accumulate`.
        ValueError: at trace time a loss' weight that is made of scalars of the batch alone.
        ValueError: from `step`, for a state that an earlier step has used up, or that another plan pads otherwise or
            holds in the order of other stages.
        NonFiniteError: from `step`, under `nonfinite="stop"`.

    Cost: that of the plan, and one all_reduce of 8 bytes for the loss and for each auxiliary mean.
    """
    import optax

    check_function("make_train_step", grad_fn)
    plan = arranged(plan, grad_fn)
    plan.check(mesh)
    policy = precision_of(precision)
    if accumulate < 1:
        raise ValueError(
            f"make_train_step: accumulate must be at least 1; got {accumulate}. Pass the number of microbatches."
        )
    if nonfinite not in ("keep", "skip", "stop"):
        raise ValueError(
            f"make_train_step: nonfinite must be 'keep', 'skip' or 'stop'; got {nonfinite!r}. Choose one of them."
        )
    if accumulate > 1 and hasattr(grad_fn, "stages"):
        warnings.warn(
            f"make_train_step: accumulate={accumulate} fills and drains the pipeline {accumulate} times a step. Give "
            f"the schedule {accumulate} times as many microbatches instead.",
            stacklevel=3,  # the caller's line, behind `typed`
        )
    optimizer = optax.with_extra_args_support(optimizer)
    batch_spec = plan.batch_spec(mesh)
    guarded = nonfinite != "keep" or policy.loss_scale is not None

    def pinned(tree: Any, held: Any) -> Any:
        return jax.lax.with_sharding_constraint(tree, shardings(mesh, held))

    def traced_step(state: TrainState, key: jax.Array, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        layouts = plan.layouts(state.params, mesh)
        check_held("step: the parameters", state.params, map_layouts(Layout.at_rest, layouts), mesh)
        specs = batch_specs(batch, batch_spec, mesh, accumulate)
        rest = map_layouts(lambda layout: layout.rest, layouts)
        update = map_layouts(lambda layout: layout.update, layouts)
        scale = state.loss_scale.scale if state.loss_scale else jnp.float32(1)

        def per_device(params: Any, batch: Any, key: jax.Array, scale: jax.Array) -> Any:
            _, means, grads = local_gradients(
                grad_fn, params, batch, key, scale, layouts, batch_spec, policy, accumulate
            )
            sums = global_means(means, plan.batch_axes)
            grads = leave(grads, layouts, counted(sums["loss"].weight) * scale, policy.reduce)
            metrics = _metrics(sums)
            if guarded:
                metrics["finite"] = _all_finite(metrics["loss"], grads)
            return metrics, grads

        metrics, grads = jax.shard_map(
            per_device,
            mesh=mesh,
            in_specs=(rest, specs, _REPLICATED, _REPLICATED),
            out_specs=(_REPLICATED, update),
        )(state.params, batch, step_key(key, state.step), scale)

        held = map_layouts(Layout.in_update, layouts)
        opt_held = optimizer_held(state.opt_state, state.params, held)
        check_held("step: the optimizer state", state.opt_state, opt_held, mesh)
        in_order = reads_order(optimizer, policy, (grads, state.opt_state, state.params), held, opt_held)
        natural = lambda tree, held: pinned(exact(tree, in_order=in_order), held)  # noqa: E731
        grads, old_params = natural(grads, held), natural(state.params, held)
        opt_state = natural(state.opt_state, opt_held)
        params, new_opt_state = advance(optimizer, policy, grads, opt_state, old_params, metrics["loss"])
        loss_scale = state.loss_scale
        if guarded:
            finite = metrics["finite"]
            params, new_opt_state = jax.tree.map(
                lambda new, old: jnp.where(finite, new, old), (params, new_opt_state), (old_params, opt_state)
            )
            if loss_scale is not None:
                metrics["loss_scale"] = loss_scale.scale
                loss_scale = next_loss_scale(policy, loss_scale, finite)
        metrics = _returned(metrics, policy.output)
        params = pinned(padded(params, held, mesh, in_order=in_order), held)
        new_opt_state = pinned(padded(new_opt_state, opt_held, mesh, in_order=in_order), opt_held)
        if rest != update:
            params = jax.shard_map(lambda p: to_rest(p, layouts), mesh=mesh, in_specs=(update,), out_specs=rest)(params)
        return TrainState(state.step + 1, params, new_opt_state, None, loss_scale), metrics

    compiled = jax.jit(traced_step, donate_argnums=0)
    return TrainStep(
        make_init(optimizer, mesh, plan, policy), _keyed(compiled, nonfinite == "stop", policy.loss_scale == "dynamic")
    )


@typed
def make_eval_step(
    loss_fn: LossFn, *, mesh: Mesh, plan: Plan, precision: Precision | str | None = None
) -> Callable[[Any, Any], dict[str, jax.Array]]:
    """Builds `evaluate(params, batch) -> metrics`: the loss over the whole batch, without dropout or gradient.

    Args:
        loss_fn: as for `value_and_grad`; it is called with `keys=None`.
        mesh: the mesh.
        plan: the plan under which the parameters are laid out.
        precision: as for `make_train_step`.

    Returns:
        A jitted function; its metrics are "loss", "weight" and the auxiliary means, float32 scalars.

    Raises:
        ValueError: as `make_train_step`; from `evaluate`, for parameters that another plan pads, or holds in the order
            of its stages: pass `unpadded` ones.

    Cost: an all_gather of `rest - seen` for each leaf, and one all_reduce of 8 bytes a mean.
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

        def per_device(params: Any, batch: Any) -> dict[str, jax.Array]:
            means = local_means(loss_fn, params, batch, layouts, batch_spec, policy)
            return _returned(_metrics(global_means(means, plan.batch_axes)), policy.output)

        specs = batch_specs(batch, batch_spec, mesh, 1)
        return jax.shard_map(per_device, mesh=mesh, in_specs=(rest, specs), out_specs=_REPLICATED)(params, batch)

    return evaluate


@typed
def step_key(key: Key, step: jax.Array | int) -> jax.Array:
    """The key of one step: its examples get `example_keys(step_key(state.key, state.step), batch size)`.

    Args:
        key: the TrainState's key.
        step: steps taken before, from 0.
    """
    # Salted, so that it never meets a key that the parameters were drawn from.
    return jax.random.fold_in(jax.random.fold_in(key, salt("shardkit.step")), step)


def _metrics(sums: Mapping[str, Mean]) -> dict[str, jax.Array]:
    """The means in float32: an overflow of the output's dtype is no overflow of the loss."""
    out = {name: mean.total / counted(mean.weight) for name, mean in sums.items()}
    return {"loss": out.pop("loss"), "weight": sums["loss"].weight, **out}


def _returned(metrics: dict[str, jax.Array], dtype: Any) -> dict[str, jax.Array]:
    """The metrics as the step returns them; what counts stays in float32."""
    kept = ("weight", "finite", "loss_scale")
    return {name: x if name in kept else x.astype(dtype) for name, x in metrics.items()}


def _all_finite(loss: jax.Array, grads: Any) -> jax.Array:
    """One verdict for all devices; a gradient that is equal everywhere costs nothing to agree on."""
    finite = jnp.isfinite(loss)
    for grad in jax.tree.leaves(grads):
        finite = finite & jnp.all(jnp.isfinite(grad))
    axes = tuple(sorted(varying_axes(finite)))
    return all_reduce(finite.astype(jnp.int32), axes, op="min") == 1 if axes else finite


def _keyed(
    compiled: Any, stop: bool, dynamic: bool
) -> Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]:
    """The step as its user calls it: the key, which never changes, goes round the compiled program, not through it.

    A typed key that jit returns is rebuilt in Python at every call, which costs more than all the rest of a dispatch.
    """

    def step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        taken = state.step
        if isinstance(taken, jax.Array) and not isinstance(taken, jax.core.Tracer) and taken.is_deleted():
            raise ValueError(  # jax 0.10 on simulated devices ends the process instead
                "step: the state must be the newest; an earlier step wrote its new state in the place of this one. "
                "Pass the state which that step returned, or copy one that you want to keep: jax.tree.map(jnp.copy, "
                "state)."
            )
        new, metrics = compiled(*split(state), batch)
        new = TrainState(new.step, new.params, new.opt_state, state.key, new.loss_scale)
        # With a dynamic loss scale, overflowing gradients are how the scale is found; only the loss can be wrong.
        if stop and not metrics["finite"] and not (dynamic and jnp.isfinite(metrics["loss"])):
            raise NonFiniteError(
                f"step {int(new.step)}: the loss ({float(metrics['loss'])}) or a gradient is not finite. The "
                "parameters are as before the step; lower the learning rate, or pass nonfinite='skip'.",
                new,
                metrics,
            )
        return new, metrics

    def split(state: TrainState) -> tuple[TrainState, jax.Array]:
        return TrainState(state.step, state.params, state.opt_state, None, state.loss_scale), state.key

    step.lower = lambda state, batch: compiled.lower(*split(state), batch)  # type: ignore[attr-defined]
    step.trace = lambda state, batch: compiled.trace(*split(state), batch)  # type: ignore[attr-defined]
    return step
