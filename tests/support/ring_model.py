"""A model in pieces whose matmuls may go round a ring: its parameters, batches and tensor-parallel plan."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import shardkit as sk
from support.conformance import BATCH

D, F, TOKENS, RATE, LAYERS = 8, 12, 4, 0.25, 8


def params() -> Any:
    rng = np.random.default_rng(0)
    draw = lambda *shape: (rng.normal(size=shape) * 0.4).astype(np.float32)  # noqa: E731
    stack = {"up": draw(LAYERS, D, F), "down": draw(LAYERS, F, D), "gain": 1 + draw(LAYERS, D)}
    return {"embed": 1 + draw(7, D), "layers": stack, "out": draw(D, 7)}


def batch(step: int) -> Any:
    rng = np.random.default_rng(step)
    tokens, targets = rng.integers(0, 7, (2, BATCH, TOKENS)).astype(np.int32)
    weights = rng.integers(0, 3, (BATCH, TOKENS)) * (np.arange(BATCH) % 8 > 1)[:, None]  # some devices have less
    return {"tokens": tokens, "targets": targets, "weights": weights.astype(np.float32)}


@cache
def pieces(axis: str | None = None) -> Any:
    """Layers whose matmuls go round a ring over `axis`, between which tokens are split over it."""
    share: Any = {"sequence": True, "impl": "ring"}

    def mine(x: Any) -> Any:
        t = x.shape[1] // (1 if axis is None else sk.axis_size(axis))
        return x if axis is None else lax.dynamic_slice_in_dim(x, sk.axis_index(axis) * t, t, 1)

    def embed(shared: Any, batch: Any, keys: Any) -> Any:
        return shared["embed"][mine(batch["tokens"])]

    def layer(keys: Any, each: Any, x: Any) -> Any:
        weights, number = each
        h = sk.layers.column_linear(x * weights["gain"][None, None], weights["up"], axis, **share)
        y = sk.layers.row_linear(jnp.tanh(h), weights["down"], axis, **share)
        return x + sk.dropout(y, None if keys is None else sk.fold_keys(keys, number), RATE)

    def stage(layers: Any, x: Any, keys: Any) -> Any:
        keys = None if keys is None else sk.fold_keys(keys[:, None], mine(jnp.arange(TOKENS)[None]))
        return sk.scan_layers(partial(layer, keys), layers, x)

    def head(shared: Any, x: Any, batch: Any) -> Any:
        targets, weights = mine(batch["targets"]), mine(batch["weights"])
        logits = (x @ shared["out"]).astype(jnp.float32)
        nats = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
        hits = jnp.argmax(logits, axis=-1) == targets
        return sk.Mean.of(nats, weights), {"accuracy": sk.Mean.of(hits, weights)}

    return embed, stage, head


def tp(axis: str = "model") -> sk.Plan:
    return sk.tp(axis, lambda path, shape: {"layers.up": 2, "layers.down": 1}.get(path), sequence=True)
