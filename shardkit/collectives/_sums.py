"""The dtype in which sums of many values are made.

A matmul is asked for its operands' dtype where its sum is complete: every compiler makes that sum in float32 and rounds
it once. Asked for float32 and then cast, it would be saved for the backward pass in float32. It is asked for float32
where further parts are added to it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shardkit._compat import varying_axes
from shardkit.collectives.basic import vary

DOT = "shardkit.dot"


def wide(dtype: Any) -> Any:
    """The dtype in which values of `dtype` are summed: float32, or better."""
    return jnp.dtype(dtype) if jnp.finfo(dtype).bits > 32 else jnp.dtype(jnp.float32)


def dot_dtype(*operands: Any) -> Any:
    """The dtype of a complete matmul: that of its operands, or of the wider one."""
    return max((x.dtype for x in operands), key=lambda dtype: dtype.itemsize)


def varying_like(x: Any, like: Any) -> Any:
    """`x`, marked as varying over the axes over which `like` (an array, or its shape) varies."""
    return vary(x, tuple(varying_axes(like)))


def typed_zeros(like: Any, *, shape: tuple[int, ...] | None = None, dtype: Any = None) -> jax.Array:
    """Zeros of the shape and dtype of `like`, or of the given ones, that vary over the same axes."""
    return varying_like(jnp.zeros(like.shape if shape is None else shape, dtype or like.dtype), like)


def wide_zeros(x: Any) -> jax.Array:
    """Zeros in which to sum arrays like `x`."""
    return typed_zeros(x, dtype=wide(x.dtype))


def saved_as_dot(x: jax.Array) -> jax.Array:
    """Marks what `remat="dots"` saves in place of the wider matmuls, or the parts of a sum, that it follows from."""
    return checkpoint_name(x, DOT)
