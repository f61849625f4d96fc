"""The dtype in which long sums are accumulated.

A complete matmul returns the dtype of its operands: every compiler accumulates the matmul in float32 and rounds once. A
float32 result that is cast afterwards would be saved for the backward pass in float32. A partial matmul, to which
further terms are added, returns float32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shardkit.collectives.axes import vary_like

DOT = "shardkit.dot"


def wide(dtype: Any) -> Any:
    """The dtype in which values of `dtype` are summed: float32 or wider."""
    if jnp.finfo(dtype).bits > 32:
        return jnp.dtype(dtype)
    return jnp.dtype(jnp.float32)


def dot_dtype(*operands: Any) -> Any:
    """The dtype of a complete matmul: the wider of its operands' dtypes."""
    dtypes = [x.dtype for x in operands]
    return max(dtypes, key=lambda dtype: dtype.itemsize)


def typed_zeros(like: Any, *, shape: tuple[int, ...] | None = None, dtype: Any = None) -> jax.Array:
    """Zeros that vary over the axes of `like`, of its shape and dtype, or of this `shape` and this `dtype`."""
    if shape is None:
        shape = like.shape
    return vary_like(jnp.zeros(shape, dtype or like.dtype), like)


def wide_zeros(x: Any) -> jax.Array:
    """Zeros to accumulate arrays like `x` in, varying as `x` does."""
    return typed_zeros(x, dtype=wide(x.dtype))


def add_terms(sums: Any, terms: Any) -> Any:
    """Adds a pytree of terms to a pytree of sums, in the dtypes of the sums: float32 however wide the terms are."""
    return jax.tree.map(lambda total, term: total + term.astype(total.dtype), sums, terms)


def save_as_dot(x: jax.Array) -> jax.Array:
    """Marks the value that `remat="dots"` saves instead of the wider matmuls, or partial sums, that compute it."""
    return checkpoint_name(x, DOT)
