"""A checksum of an array's bits and their indices, as one device computes it of the part that it holds.

Words of the bits, each mixed with its index in the array, are summed: so an array may be cut anywhere. For example x =
[5, 7, 9, 11] over two devices, with `mix` for what `_mix_bits` does, mod 2^32:

    device 0    mix(5 ^ mix(0)) + mix(7 ^ mix(1))
    device 1    mix(9 ^ mix(2)) + mix(11 ^ mix(3))     its first element is the third of the array
    checksum    the sum of both, on one device too

No library has it: a hash of bytes on the host (crc32, xxhash) needs the array there, whole and in one order. This one
runs on the devices, and compares what one mesh has with what another one had.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardkit.collectives.axes import vary_like
from shardkit.plans.storage import to_storable

PIECE = 2**18  # elements: a MiB of words, which stays in a CPU's cache


def checksum(x: jax.Array) -> jax.Array:
    """A uint32 scalar of an array's bits and their indices along its dims, so that the array may be sharded."""
    return checksum_of_part(x, (0,) * x.ndim, x.shape)


def checksum_of_part(x: jax.Array, start: Sequence[Any], shape: Sequence[int], piece: int | None = None) -> jax.Array:
    """What a part of an array, which begins at `start` in one of this shape, adds to the checksum of the whole.

    With `piece`, in a loop over so many elements. On CPU XLA writes what it sums to memory first: in one piece that is
    as large as the part, or larger, and takes ten times as long as in pieces that stay in a cache.
    """
    if piece is None or x.size <= piece:
        return jnp.sum(_make_words(x, start, shape), dtype=jnp.uint32)
    tile = _choose_tile(x.shape, piece)
    counts = []  # of tiles along each dim, rounded up
    for size, step in zip(x.shape, tile, strict=True):
        counts.append(-(-size // step))

    def add_tile(number: jax.Array, total: jax.Array) -> jax.Array:
        first = _find_tile(number, counts, tile)
        # The last tile of a dim reaches back over the one before, with words that do not count twice.
        # Worked example: 10 rows in tiles of 4 begin at 0, 4 and 6; the last tile, for rows 8 and 9, has 6 and 7 again.
        begin = []
        place = []
        for index, size, step, offset in zip(first, x.shape, tile, start, strict=True):
            tile_begin = jnp.minimum(index, size - step)
            begin.append(tile_begin)
            place.append(tile_begin + offset)
        words = _make_words(lax.dynamic_slice(x, begin, tile), place, shape)
        leading = _count_leading_dims(x)
        for dim, size in enumerate(x.shape):
            if size % tile[dim]:
                index = begin[dim] + lax.broadcasted_iota(jnp.int32, words.shape, dim + leading)
                words = jnp.where(index >= first[dim], words, jnp.uint32(0))
        return total + jnp.sum(words, dtype=jnp.uint32)

    return lax.fori_loop(0, math.prod(counts), add_tile, vary_like(jnp.uint32(0), x))


def _find_tile(number: jax.Array, counts: Sequence[int], tile: Sequence[int]) -> list[jax.Array]:
    """The index at which a tile begins: number 4 of [2, 3] tiles of 5 x 7 is (1, 1), which begins at [5, 7]."""
    first: list[jax.Array] = []
    for count, step in zip(reversed(counts), reversed(tile), strict=True):
        first.insert(0, number % count * step)
        number = number // count
    return first


def _choose_tile(shape: Sequence[int], piece: int) -> list[int]:
    """The shape of pieces of about so many elements, whole along the last dims."""
    tile = [1] * len(shape)
    room = piece
    for dim in reversed(range(len(shape))):
        tile[dim] = max(1, min(shape[dim], room))
        room //= tile[dim]
    return tile


def _count_leading_dims(x: jax.Array) -> int:
    """How many dims `_split_words` adds in front."""
    return int(jnp.iscomplexobj(x))


def _make_words(x: jax.Array, start: Sequence[Any], shape: Sequence[int]) -> jax.Array:
    """The bits of a part of an array, mixed with their indices in the array: summed, they are its checksum.

    A plain sum would miss swapped values or two flipped signs, and a sum weighted by index a value swapped with its
    negative. Mixing is one to one, so a single changed word always changes the sum.
    """
    leading = _count_leading_dims(x)
    bits = _split_words(to_storable(x)).astype(jnp.uint32)
    trailing = bits.shape[leading + x.ndim :]  # the words of an element wider than 32 bits
    # Dims of words are whole in each part: they begin at 0.
    sizes = [*bits.shape[:leading], *shape, *trailing]
    firsts = [0] * leading + list(start) + [0] * len(trailing)
    # The number of each word in the array, row-major: in [4, 6], word [1, 2] is number 1 * 6 + 2 = 8.
    place = jnp.uint32(0)
    for dim, (size, first) in enumerate(zip(sizes, firsts, strict=True)):
        index = lax.broadcasted_iota(jnp.uint32, bits.shape, dim)
        # Modulo 2**32, as all of this arithmetic is: uint32 takes no larger number.
        place = place * jnp.uint32(size % 2**32) + index + jnp.asarray(first).astype(jnp.uint32)
    return _mix_bits(bits ^ _mix_bits(place))


def _mix_bits(x: jax.Array) -> jax.Array:
    """The finalizer of MurmurHash3, in which every bit of a word affects every bit of the result."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _split_words(x: jax.Array) -> jax.Array:
    """An array's bits as unsigned integers of up to 32 bits; wider elements get a new last dim."""
    if jnp.iscomplexobj(x):
        # [2, ...]: the dim in front that `_count_leading_dims` counts.
        x = jnp.stack([x.real, x.imag])
    if jnp.issubdtype(x.dtype, jnp.floating):
        bits = min(jnp.finfo(x.dtype).bits, 32)
        return lax.bitcast_convert_type(x, f"uint{bits}")
    if x.dtype.itemsize <= 4:
        return x.astype(jnp.uint32)  # bitcast does not accept booleans and integers below a byte
    return lax.bitcast_convert_type(x, "uint32")  # of 64 bits
