"""The metrics of a step or an evaluation, from its sums over all devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from shardkit._compat import varying_axes
from shardkit.collectives import all_reduce
from shardkit.partitioning.gradient import Mean, divisor_of


def metrics_of(sums: Mapping[str, Mean]) -> dict[str, jax.Array]:
    """The means in float32, so that a loss beyond the output dtype's range still counts as finite."""
    is_mean = lambda x: isinstance(x, Mean)  # noqa: E731
    out = jax.tree.map(lambda mean: mean.total / divisor_of(mean.weight), dict(sums), is_leaf=is_mean)
    return {"loss": out.pop("loss"), "weight": sums["loss"].weight, **out}


def returned(metrics: dict[str, jax.Array], dtype: Any) -> dict[str, jax.Array]:
    """The metrics in the output dtype, except for counts and scales."""
    kept = ("weight", "finite", "loss_scale")
    return {name: x if name in kept else x.astype(dtype) for name, x in metrics.items()}


def all_finite(loss: jax.Array, grads: Any) -> jax.Array:
    """Whether loss and gradients are finite on all devices; nothing is sent for those that are invariant."""
    finite = jnp.isfinite(loss)
    for grad in jax.tree.leaves(grads):
        finite = finite & jnp.all(jnp.isfinite(grad))
    axes = tuple(sorted(varying_axes(finite)))
    return all_reduce(finite.astype(jnp.int32), axes, op="min") == 1 if axes else finite
