"""The dtype in which sums of many values are made."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from shardkit._compat import varying_axes
from shardkit.collectives.basic import vary


def wide(dtype: Any) -> Any:
    """The dtype in which values of `dtype` are summed: float32, or better."""
    return jnp.dtype(dtype) if jnp.finfo(dtype).bits > 32 else jnp.dtype(jnp.float32)


def wide_zeros(x: Any) -> jax.Array:
    """Zeros to sum such arrays in, varying as they do."""
    return vary(jnp.zeros(x.shape, wide(x.dtype)), tuple(varying_axes(x)))
