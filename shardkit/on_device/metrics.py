"""The metrics of a step or an evaluation, from its sums over all devices."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from shardkit._jax.compat import varying_axes
from shardkit.collectives import all_reduce
from shardkit.collectives.deterministic import sum_pairwise
from shardkit.on_device.means import Mean, divisor_of, is_mean, largest_weight, terms_of


def metrics_of(sums: Mapping[str, Any]) -> dict[str, Any]:
    """The means in float32, so that a loss beyond the output dtype's range still counts as finite."""

    def divide(mean: Mean) -> jax.Array:
        return mean.total / divisor_of(mean.weight)

    metrics = jax.tree.map(divide, dict(sums), is_leaf=is_mean)
    loss = reduce(jnp.add, terms_of(metrics.pop("loss")))
    return {"loss": loss, "weight": largest_weight(sums["loss"]), **metrics}


def cast_metrics(metrics: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
    """The metrics in the output dtype, except for counts and scales."""
    cast = dict(metrics)
    for name, metric in metrics.items():
        # bfloat16 counts exactly only up to 256.
        if name not in ("weight", "finite", "loss_scale"):
            cast[name] = jax.tree.map(lambda x: x.astype(dtype), metric)
    return cast


def all_finite(loss: jax.Array, grads: Any) -> jax.Array:
    """Whether loss and gradients are finite on all devices; nothing is sent for values that all devices share."""
    finite = jnp.isfinite(loss)
    for grad in jax.tree.leaves(grads):
        finite = finite & jnp.all(jnp.isfinite(grad))
    # Devices with other parts of the gradients must agree, or some would skip a step that others take.
    axes = tuple(sorted(varying_axes(finite)))
    if not axes:
        return finite
    return all_reduce(finite.astype(jnp.int32), axes, op="min") == 1


def if_finite(metrics: Mapping[str, Any], new: Any, old: Any) -> Any:
    """The state after a step: `new`, or `old` if the step checks for finite numbers and a number is not finite."""
    if "finite" not in metrics:
        return new
    return jax.tree.map(lambda new, old: jnp.where(metrics["finite"], new, old), new, old)


def sum_means_of_groups(means: Mapping[str, Any], axes: tuple[str, ...]) -> dict[str, Any]:
    """The means over all devices, from float32 sums `[runs]` of each device's groups.

    Cost: one deterministic all_reduce of 8 bytes per mean and run.
    """
    means = dict(means)

    def flatten(run: Any) -> jax.Array:
        numbers, _ = ravel_pytree(run)
        return numbers

    flat = jax.vmap(flatten)(means)  # [runs, numbers]
    _, restore = ravel_pytree(jax.tree.map(lambda x: x[0], means))
    if axes:
        # In the order of the gradients' sums: by a plain all_reduce the loss would have other bits on each mesh.
        return restore(all_reduce(flat, axes, deterministic=True))
    return restore(sum_pairwise(flat))
