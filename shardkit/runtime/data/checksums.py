"""The bits of arrays, and checksums of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def is_key(x: Any) -> bool:
    """Whether a leaf holds typed keys."""
    return jax.dtypes.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.prng_key)


# What tensorstore has no type for; it lies there as uint8.
_AS_BYTES = ("uint2", "uint4", "float8_e4m3")
# What XLA itself fails on, or aborts.
NOT_COMPUTED = ("int1", "uint1")


def is_plain(x: Any) -> bool:
    """Whether a leaf's array is stored as it is."""
    return not is_key(x) and str(getattr(x, "dtype", "")) not in _AS_BYTES


def stored_dtype(dtype: Any) -> Any:
    """The dtype under which numbers of another one are stored."""
    return jnp.dtype(jnp.uint8) if str(dtype) in _AS_BYTES else dtype


def plain(x: Any) -> Any:
    """Typed keys as the integers that they are made of, what is stored as bytes as those; all else as it is."""
    if is_key(x):
        return jax.random.key_data(x)
    if is_plain(x):
        return x
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    return lax.bitcast_convert_type(x, jnp.uint8) if floating else x.astype(jnp.uint8)


def from_plain(x: jax.Array, dtype: Any) -> jax.Array:
    """What `plain` gave for numbers of this dtype, as those numbers."""
    if stored_dtype(dtype) == dtype:
        return x
    return lax.bitcast_convert_type(x, dtype) if jnp.issubdtype(dtype, jnp.floating) else x.astype(dtype)


def words(x: jax.Array) -> jax.Array:
    """An array's bits as unsigned integers of up to 32 bits; of wider elements with a new last dim."""
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag])
    if not jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize <= 4:
        return x.astype(jnp.uint32)  # booleans and integers of less than a byte have no other spelling
    bits = jnp.finfo(x.dtype).bits if jnp.issubdtype(x.dtype, jnp.floating) else 64
    return lax.bitcast_convert_type(x, f"uint{min(bits, 32)}")


def checksum(x: jax.Array) -> jax.Array:
    """A uint32 scalar of an array's bits and their places, which are counted along its dims: it may lie split."""
    bits, place = words(plain(x)).astype(jnp.uint32), jnp.uint32(0)
    for dim, size in enumerate(bits.shape):
        place = place * jnp.uint32(size % 2**32) + lax.broadcasted_iota(jnp.uint32, bits.shape, dim)
    # A plain sum would miss values that change places, or two signs that flip, and one weighted by place a value that
    # changes places with its negative; mixing is one to one, so that one other word always makes another sum.
    return jnp.sum(_mixed(bits ^ _mixed(place)), dtype=jnp.uint32)


def _mixed(x: jax.Array) -> jax.Array:
    """The last steps of MurmurHash3, in which every bit of a word decides over every bit of the result."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
