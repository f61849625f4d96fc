"""Arrays in dtypes that files can store: typed keys as integers, small numbers as bytes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def is_key(x: Any) -> bool:
    """Whether a leaf is an array of typed keys."""
    return jax.dtypes.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.prng_key)


# Dtypes that tensorstore does not have, stored as uint8.
_AS_BYTES = ("uint2", "uint4", "float8_e4m3")
# Dtypes with which XLA fails or aborts.
NOT_COMPUTED = ("int1", "uint1")


def is_storable(x: Any) -> bool:
    """Whether a leaf's array is stored unchanged."""
    return not is_key(x) and str(getattr(x, "dtype", "")) not in _AS_BYTES


def stored_dtype(dtype: Any) -> Any:
    """The dtype in which numbers of a dtype are stored."""
    return jnp.dtype(jnp.uint8) if str(dtype) in _AS_BYTES else dtype


def to_storable(x: Any) -> Any:
    """Typed keys as their integers, numbers that files cannot store as bytes; other arrays unchanged."""
    if is_key(x):
        return jax.random.key_data(x)
    if is_storable(x):
        return x
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    return lax.bitcast_convert_type(x, jnp.uint8) if floating else x.astype(jnp.uint8)


def from_storable(x: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of `to_storable`, for numbers of this dtype."""
    if stored_dtype(dtype) == dtype:
        return x
    return lax.bitcast_convert_type(x, dtype) if jnp.issubdtype(dtype, jnp.floating) else x.astype(dtype)
