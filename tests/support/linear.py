"""A linear loss of whole numbers, whose gradients every precision represents exactly, whatever the parameters."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import shardkit as sk

BATCH = 16


def params() -> Any:
    return {"bias": np.zeros(7, "f"), "shift": np.float32(0), "weight": np.zeros((8, 5), "f")}


def batch(step: int) -> Any:
    """Whole numbers up to 3 in magnitude, weighted by 0 to 3: sums over a device's examples are below 256."""
    rng = np.random.default_rng(step)
    draw = lambda *shape: rng.integers(-3, 4, (BATCH, *shape)).astype("f")  # noqa: E731
    weight = (rng.integers(0, 4, BATCH) + (np.arange(BATCH) == 3)).astype("f")
    return {"x": draw(8), "y": draw(5), "bias": draw(7), "shift": draw(), "weight": weight}


def loss(axis: str | None = None) -> Any:
    """The loss; with an axis, over whose devices the rows of the weight are split."""

    def loss_fn(params: Any, batch: Any, keys: Any) -> Any:
        x, weight = batch["x"], params["weight"]
        if axis:
            rows = weight.shape[0]
            x = lax.dynamic_slice_in_dim(x, sk.axis_index(axis) * rows, rows, 1)
        out = jnp.sum((x @ weight) * batch["y"], axis=1)
        out = sk.all_reduce(out, axis) if axis else out
        out = out + batch["bias"] @ params["bias"] + batch["shift"] * params["shift"]
        return sk.Mean.of(out, batch["weight"])

    return loss_fn


def gradients(batches: Sequence[Any]) -> Any:
    """The sum of the gradients of some batches, in float64."""

    def of(batch: Any) -> Any:
        b = jax.tree.map(np.float64, batch)
        w = b["weight"] / b["weight"].sum()
        sums = {"bias": w @ b["bias"], "shift": w @ b["shift"]}
        return sums | {"weight": np.einsum("b,bi,bj->ij", w, b["x"], b["y"])}

    return jax.tree.map(lambda *each: sum(each), *map(of, batches))
