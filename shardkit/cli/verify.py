"""The same training on one device, in plain jax and optax, to compare with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardkit as sk
from shardkit.cli.plans import ways
from shardkit.models import transformer
from shardkit.on_device.handles import cast_floating
from shardkit.on_device.precision import precision_of


class Differences(NamedTuple):
    """How far a run differs from the same run on one device."""

    steps: int  # optimizer steps compared
    loss: float  # largest relative difference of the loss
    parameters: float  # largest difference of a parameter, relative to the largest value in its leaf

    def __str__(self) -> str:
        return (
            f"after {self.steps} steps the loss differs from one device's by {self.loss:.1e}, "
            f"the parameters by {self.parameters:.1e} (relative)"
        )


def verify(run: Any, state: sk.TrainState, steps: int) -> Differences:
    """Takes `steps` steps of a `TrainingRun` from `state` on its mesh and on one device, and compares them.

    `state` stays valid. On one device there is no loss scale.
    """
    compute, optimizer, loss_fn = precision_of(run.options.precision).compute, run.optimizer, loss_of(run)

    @jax.jit
    def plain_step(params: Any, opt_state: Any, batch: Any, keys: jax.Array) -> Any:
        def mean_loss(params: Any) -> jax.Array:
            loss, _ = loss_fn(cast_floating(params, compute), cast_floating(batch, compute), keys)
            return loss.total / loss.weight

        loss, grads = jax.value_and_grad(mean_loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    here = jax.local_devices()[0]
    params = jax.device_put(sk.runtime.fetch(sk.unpadded(state.params)), here)
    key = jax.random.wrap_key_data(sk.runtime.fetch(state.key), impl=jax.random.key_impl(state.key))
    # Zeros depend on no parameter, and so on no device: the first step would be compiled for them alone.
    opt_state = jax.device_put(jax.jit(optimizer.init)(params), here)
    state = jax.tree.map(jnp.copy, state)  # the step donates its state
    worst = 0.0
    for index in range(steps):
        batch = sk.runtime.fetch(run.batch(index))
        count = jax.tree.leaves(batch)[0].shape[0]
        keys = sk.example_keys(sk.step_key(key, index), count)
        params, opt_state, expected = plain_step(params, opt_state, batch, keys)
        state, metrics = run.step(state, run.batch(index))
        worst = max(worst, abs(float(metrics["loss"]) - float(expected)) / abs(float(expected)))
    gaps = jax.tree.map(_relative_gap, sk.runtime.fetch(sk.unpadded(state.params)), params)
    return Differences(steps, worst, max(jax.tree.leaves(gaps)))


def loss_of(run: Any) -> Callable[..., Any]:
    """The loss of the whole batch on one device.

    With experts it uses the run's own microbatches, because the router's losses are computed per microbatch, over all
    devices.
    """
    o, config, schedule = run.options, run.model.config, run.model.schedule
    count = o.accumulate * (schedule.microbatches if schedule else 1)
    if not config.experts or count == 1:
        return transformer.loss_fn(config)
    loss_fn = transformer.loss_fn(replace(config, microbatches=count))
    order = np.arange(o.batch).reshape(ways(run.mesh.shape), count, -1).swapaxes(0, 1).ravel()

    def loss(params: Any, batch: Any, keys: jax.Array) -> Any:
        return loss_fn(params, {name: x[order] for name, x in batch.items()}, keys[order])

    return loss


def _relative_gap(x: jax.Array, expected: jax.Array) -> float:
    ours, theirs = np.asarray(x, np.float64), np.asarray(expected, np.float64)
    return float(np.max(np.abs(ours - theirs)) / max(np.max(np.abs(theirs)), 1e-30))
