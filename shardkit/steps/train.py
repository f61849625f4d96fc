"""One training step, from top to bottom: enter, loss and gradient, leave, update, back to rest.

`TrainProgram` is the step that `jit` compiles; `make_train_step` (in `builder.py`) makes one, and `Step` (in `step.py`)
calls it. Between global arrays and one device stands a shard_map, and what is inside of it is in `on_device/`.

Options that not every step has join in one line each, and can be skipped at first reading:

| option | what it is | where it joins |
|---|---|---|
| `accumulate=`, `deterministic=` | `Microbatches` or `Groups`: how a device sums its examples | `microbatches` |
| `nonfinite=`, a loss scale | the metric "finite", and the state that stays as it was | `self.watches`, `if_finite` |
| `carry=`, a loss with carried state | `Carried`, which enters and is updated beside the parameters | `carried` |
| error feedback | residuals, which `leave` adds and returns | `residuals` |
| `steps=`, `manual=`, a mesh with Explicit axes | functions around the step | `builder.py` |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from shardkit.meshes.rng import step_key
from shardkit.on_device.batch import batch_specs
from shardkit.on_device.gradient import GradFn
from shardkit.on_device.groups import Groups
from shardkit.on_device.local_step import local_gradients, note_split_leaf
from shardkit.on_device.metrics import all_finite, cast_metrics, if_finite, metrics_of
from shardkit.on_device.microbatches import Microbatches
from shardkit.on_device.precision import Precision
from shardkit.on_device.residuals import residual_specs
from shardkit.on_device.seam import enter, to_rest
from shardkit.on_device.trained import frozen_leaves, noting_trained
from shardkit.plans.plan import Placement, Plan
from shardkit.plans.storage import check_storage, is_padded
from shardkit.steps.carry import Carried, Update, check_carried
from shardkit.steps.optimizer import update_state
from shardkit.steps.state import TrainState
from shardkit.steps.state_layouts import shardings

_REPLICATED = PartitionSpec()
Metrics = dict[str, Any]


@dataclass(frozen=True, eq=False)
class TrainProgram:
    """`program(state, key, batch) -> (state, metrics)`, one training step on global arrays, for jit."""

    grad_fn: GradFn  # what one device computes
    optimizer: Any  # an optax transformation, wrapped by `wrap_optimizer`
    mesh: Mesh  # the mesh, with Auto axes
    plan: Plan  # how its axes are used
    manual: tuple[str, ...]  # those that are Manual inside of the step
    policy: Precision  # the dtypes
    microbatches: Microbatches | Groups  # how a device sums over its examples
    watches: bool  # whether a step with gradients that are not finite leaves the state as it was
    reads: bool  # whether the loss takes carried state, which `carry` updates
    carry: Update | None
    in_loop: bool  # whether the step is the body of a loop
    __name__ = "step"  # of the program, in profiles and in jax's own messages

    def __call__(self, state: TrainState, key: jax.Array, batch: Any) -> tuple[TrainState, Metrics]:
        placement = self.plan.placement(state.params, self.mesh)
        check_storage("step: the parameters", state.params, placement.at_rest, self.mesh)
        check_carried("step", self.reads, self.carry, state.carried)
        # In a loop the partitioner would choose the layout of the carry: it would split the parameters over more axes,
        # and gather them in each round.
        if self.in_loop:
            state = state._replace(params=self._pin(state.params, placement))
        carried = Carried("step", state.carried, state.params, placement)
        scale = jnp.float32(1)
        if state.loss_scale:
            scale = state.loss_scale.scale

        microbatches = self.microbatches.for_batch(batch, placement)
        with noting_trained() as noted:  # tracing the GradFn notes the leaves that it trains
            gradients = self.map_gradients(placement, carried, state, batch, microbatches)
            step_scale = microbatches.hide_scale(scale, state.step)
            # The key follows from the run's key and the number of the step alone: a run that was restored draws what it
            # would have drawn.
            metrics, grads, residuals = gradients(
                state.params, carried.tree, state.residuals, batch, step_key(key, state.step), step_scale
            )
        frozen = frozen_leaves(noted, jax.tree.structure(state.params, is_leaf=is_padded))
        params, opt_state, loss_scale = update_state(
            self.optimizer, self.policy, placement, state, grads, metrics, self.microbatches, frozen
        )
        params = self.back_to_rest(params, placement)
        if state.loss_scale:
            metrics["loss_scale"] = scale
        new_carried = state.carried
        if self.carry:
            new_carried = carried.update(self.carry, metrics, params, state.step, self.microbatches)
        new = TrainState(
            state.step + 1,
            params,
            opt_state,
            key=None,  # `Step` adds it
            loss_scale=loss_scale,
            residuals=residuals,
            carried=new_carried,
        )
        return new, cast_metrics(metrics, self.policy.output)

    def map_gradients(
        self,
        placement: Placement,
        carried: Carried,
        state: TrainState,
        batch: Any,
        microbatches: Microbatches | Groups,
    ) -> Callable[..., tuple[Metrics, Any, Any]]:
        """A function on global arrays: metrics, gradients in the layout of the update, and new residuals.

        It takes parameters, carried state, residuals, batch, the key of the step and the loss scale.
        """
        residual_spec = residual_specs(state.residuals, state.params, placement)
        batch_spec = batch_specs(batch, placement.batch, self.mesh, microbatches.parts)

        def on_device(
            params: Any, carried_tree: Any, residuals: Any, batch: Any, key: jax.Array, scale: jax.Array
        ) -> tuple[Metrics, Any, Any]:
            # Enter: this device's parts of the parameters become the weights that the loss sees.
            weights = enter(params, placement, self.policy)
            grad_fn = self.grad_fn
            if self.reads:
                grad_fn = carried.bind(grad_fn, carried_tree, self.policy)

            # Loss and gradient: sums over this device's examples. Only the loss and its lazy leaves send here.
            compute = partial(
                local_gradients,
                grad_fn,
                batch=batch,
                key=key,
                scale=scale,
                placement=placement,
                policy=self.policy,
                microbatches=microbatches,
            )
            with note_split_leaf(compute, self.grad_fn, state.params, placement, self.policy.compute):
                _, means, grads = compute(weights)

            # Leave: sums over all devices, divided by the weight of the whole batch. `Microbatches` leave by the seam.
            means, grads, new_residuals = microbatches.leave(means, grads, placement, self.policy, scale, residuals)
            metrics = metrics_of(means)
            if self.watches:
                metrics["finite"] = all_finite(metrics["loss"], grads)
            return metrics, grads, if_finite(metrics, new_residuals, residuals)

        # The out_specs are checked against the types: a gradient or metric that still varies over an axis which its
        # spec lacks, because nothing has summed it there, is refused when the step is traced.
        return jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=(placement.rest, carried.specs, residual_spec, batch_spec, _REPLICATED, _REPLICATED),
            out_specs=(_REPLICATED, placement.update, residual_spec),
            axis_names=set(self.manual),
        )

    def back_to_rest(self, params: Any, placement: Placement) -> Any:
        """The new parameters, from the layout of the update to the layout of the state."""
        if placement.rest == placement.update:
            return params
        gather = jax.shard_map(
            lambda params: to_rest(params, placement),
            mesh=self.mesh,
            in_specs=(placement.update,),
            out_specs=placement.rest,
            axis_names=set(self.manual),
        )
        params = gather(params)
        if self.plan.automatic:
            params = self._pin(params, placement)
        return params

    def _pin(self, params: Any, placement: Placement) -> Any:
        # The specs of shard_map say nothing of the partitioner's axes. Unpinned, it might lay the parameters out in
        # another way, and the next step would compile again.
        return jax.lax.with_sharding_constraint(params, shardings(self.mesh, placement.at_rest))
