"""The bits of arrays: in dtypes that files can store, and their checksums."""

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


def bit_words(x: jax.Array) -> jax.Array:
    """An array's bits as unsigned integers of up to 32 bits; wider elements get a new last dim."""
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag])
    if not jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize <= 4:
        return x.astype(jnp.uint32)  # bitcast does not accept booleans and integers below a byte
    bits = jnp.finfo(x.dtype).bits if jnp.issubdtype(x.dtype, jnp.floating) else 64
    return lax.bitcast_convert_type(x, f"uint{min(bits, 32)}")


def checksum(x: jax.Array) -> jax.Array:
    """A uint32 scalar of an array's bits and their indices along its dims, so that the array may be sharded."""
    bits, place = bit_words(to_storable(x)).astype(jnp.uint32), jnp.uint32(0)
    for dim, size in enumerate(bits.shape):
        place = place * jnp.uint32(size % 2**32) + lax.broadcasted_iota(jnp.uint32, bits.shape, dim)
    # A plain sum would miss swapped values or two flipped signs, and a sum weighted by index a value swapped with its
    # negative. Mixing is one to one, so a single changed word always changes the sum.
    return jnp.sum(_mixed(bits ^ _mixed(place)), dtype=jnp.uint32)


def _mixed(x: jax.Array) -> jax.Array:
    """The finalizer of MurmurHash3, in which every bit of a word affects every bit of the result."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
