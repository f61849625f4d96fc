"""The bits of arrays: in dtypes that files can store, and their checksums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit.collectives.axes import vary_like


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
    return jnp.sum(_words(x, (0,) * x.ndim, x.shape), dtype=jnp.uint32)


def checksum_of_part(x: jax.Array, start: Sequence[Any], shape: Sequence[int], piece: int | None = None) -> jax.Array:
    """What a part of an array, which begins at `start` in one of this shape, adds to the checksum of the whole.

    With `piece`, in a loop over so many elements. On CPU XLA writes what it sums to memory first: in one piece that is
    as large as the part, or larger, and takes ten times as long as in pieces that stay in a cache.
    """
    if piece is None or x.size <= piece:
        return jnp.sum(_words(x, start, shape), dtype=jnp.uint32)
    tile = _tile(x.shape, piece)
    counts = [-(-size // step) for size, step in zip(x.shape, tile, strict=True)]

    def add(number: jax.Array, total: jax.Array) -> jax.Array:
        first: list[jax.Array] = []
        for count, step in zip(reversed(counts), reversed(tile), strict=True):
            first.insert(0, number % count * step)
            number = number // count
        # The last piece of a dim reaches back over the one before, whose words do not count twice.
        begin = [jnp.minimum(at, size - step) for at, size, step in zip(first, x.shape, tile, strict=True)]
        place = [here + there for here, there in zip(begin, start, strict=True)]
        words = _words(lax.dynamic_slice(x, begin, tile), place, shape)
        for dim, size in enumerate(x.shape):
            if size % tile[dim]:
                index = begin[dim] + lax.broadcasted_iota(jnp.int32, words.shape, dim + _lead(x))
                words = jnp.where(index >= first[dim], words, jnp.uint32(0))
        return total + jnp.sum(words, dtype=jnp.uint32)

    return lax.fori_loop(0, math.prod(counts), add, vary_like(jnp.uint32(0), x))


def _tile(shape: Sequence[int], piece: int) -> list[int]:
    """The shape of pieces of about so many elements, whole along the last dims."""
    tile, left = [1] * len(shape), piece
    for dim in reversed(range(len(shape))):
        tile[dim] = max(1, min(shape[dim], left))
        left //= tile[dim]
    return tile


def _lead(x: jax.Array) -> int:
    """How many dims `bit_words` adds in front."""
    return int(jnp.iscomplexobj(x))


def _words(x: jax.Array, start: Sequence[Any], shape: Sequence[int]) -> jax.Array:
    """The bits of a part of an array, mixed with their indices in the array: summed, they are its checksum.

    A plain sum would miss swapped values or two flipped signs, and a sum weighted by index a value swapped with its
    negative. Mixing is one to one, so a single changed word always changes the sum.
    """
    lead, bits, place = _lead(x), bit_words(to_storable(x)).astype(jnp.uint32), jnp.uint32(0)
    more = bits.shape[lead + x.ndim :]
    sizes, firsts = (*bits.shape[:lead], *shape, *more), (*(0,) * lead, *start, *(0,) * len(more))
    for dim, (size, first) in enumerate(zip(sizes, firsts, strict=True)):
        index = lax.broadcasted_iota(jnp.uint32, bits.shape, dim)
        place = place * jnp.uint32(size % 2**32) + index + jnp.asarray(first).astype(jnp.uint32)
    return _mixed(bits ^ _mixed(place))


def _mixed(x: jax.Array) -> jax.Array:
    """The finalizer of MurmurHash3, in which every bit of a word affects every bit of the result."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
