"""The small model that `schedules.py` runs: with every schedule, and on one device without a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from shardkit.collectives import all_reduce
from shardkit.partitioning.gradient import Mean, value_and_grad
from shardkit.schedules import Schedule
from shardkit.strategies.pipeline import pipeline_value_and_grad

SPECS = {"layers": P("stage"), "table": P(), "gain": P()}
VOCABULARY = 64


def make_params(layers: int, dim: int, hidden: int, dtype: Any = np.float32) -> Any:
    """A stack of residual feed-forward layers, a table of tokens, and the head's gain."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: (rng.normal(size=shape) * shape[-2] ** -0.5 / 2).astype(dtype)  # noqa: E731
    stack = {"up": draw(layers, dim, hidden), "down": draw(layers, hidden, dim)}
    return {"layers": stack, "table": draw(VOCABULARY, dim), "gain": np.ones((), dtype)}


def embed(shared: Any, batch: Any, keys: Any) -> jax.Array:
    """A row of the table for each token."""
    return shared["table"][batch["tokens"]]


def stage(layers: Any, x: jax.Array, keys: Any) -> jax.Array:
    """Residual feed-forward layers."""

    def layer(x: jax.Array, w: Any) -> Any:
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    return lax.scan(layer, x, layers)[0]


def head(shared: Any, x: jax.Array, batch: Any) -> Mean:
    """The mean square, times a parameter."""
    return Mean.of(jnp.square((x * shared["gain"]).astype(jnp.float32)))


def pipelined(schedule: Schedule, mode: str, recompute: bool, mesh: Mesh) -> Callable[..., Any]:
    """`(carry, params, batch) -> (carry, (loss, gradients))` of a schedule; stacks are in the order of the layers."""
    how: dict[str, Any] = {"mode": mode, "recompute": recompute}
    grad_fn = pipeline_value_and_grad(embed, stage, head, schedule, "stage", **how)

    def device(params: Any, batch: Any) -> Any:
        mean, _, grads = grad_fn(params, batch, None)
        mean, shared = all_reduce((mean, {name: grads[name] for name in ("table", "gain")}), "stage")
        return mean.total / mean.weight, jax.tree.map(lambda g: g / mean.weight, grads | shared)

    mapped = jax.shard_map(device, mesh=mesh, in_specs=(SPECS, P()), out_specs=(P(), SPECS))

    def step(carry: Any, params: Any, batch: Any) -> Any:
        order = np.array(grad_fn.stages.rows(params["layers"]["up"].shape[0]) or [], int)
        if (order == np.arange(order.size)).all():
            return carry, mapped(params, batch)
        stack = jax.tree.map(lambda leaf: leaf[order], params["layers"])
        loss, grads = mapped(params | {"layers": stack}, batch)
        return carry, (loss, grads | {"layers": jax.tree.map(lambda leaf: leaf[np.argsort(order)], grads["layers"])})

    return step


def unpipelined(count: int) -> Callable[..., Any]:
    """The same on one device: the whole model for each microbatch, and the sum."""

    def loss(params: Any, batch: Any, keys: Any) -> Mean:
        return head(params, stage(params["layers"], embed(params, batch, keys), keys), batch)

    grad_fn: Any = value_and_grad(loss)

    def step(carry: Any, params: Any, batch: Any) -> Any:
        def add(sums: Any, tokens: jax.Array) -> Any:
            mean, _, grads = grad_fn(params, {"tokens": tokens}, None)
            return jax.tree.map(jnp.add, sums, (mean, grads)), None

        zero = (Mean(jnp.float32(0), jnp.float32(0)), jax.tree.map(jnp.zeros_like, params))
        (mean, grads), _ = lax.scan(add, zero, batch["tokens"].reshape(count, -1))
        return carry, (mean.total / mean.weight, jax.tree.map(lambda g: g / mean.weight, grads))

    return step
