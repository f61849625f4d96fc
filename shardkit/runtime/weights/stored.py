"""Leaves between their original form on the host and the shards in which they are stored on the devices."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax import lax

from shardkit.partitioning.storage import as_stored, is_padded, stored_array
from shardkit.runtime.data.reading import replicate
from shardkit.runtime.weights.names import Ranges

Index = tuple[slice, ...]


def ranges_of(index: Index, shape: tuple[int, ...]) -> Ranges:
    """The first and last element of each slice of a shard."""
    return tuple(piece.indices(size)[:2] for piece, size in zip(index, shape, strict=True))


def pieces(x: Any, ranges: Ranges) -> Iterator[tuple[Index, Ranges]]:
    """The pieces of a stored part that are not padding: where they are in it, and in the original leaf.

    Args:
        x: the leaf, as it is stored.
        ranges: of the part, in the stored array.
    """
    original, rows = x.shape, x.rows if is_padded(x) else ()
    inner: list[tuple[int, int]] = []
    for (first, last), size in list(zip(ranges, original, strict=True))[1 if rows else 0 :]:
        inner.append((first, max(first, min(last, size))))
    cut = [slice(0, last - first) for first, last in inner]
    if not rows:
        yield tuple(cut), tuple(inner)
        return
    first, last = ranges[0]
    held = list(rows[first:last])
    starts = [i for i, row in enumerate(held) if i == 0 or row < 0 or held[i - 1] < 0 or row != held[i - 1] + 1]
    for start, after in itertools.pairwise([*starts, len(held)]):
        if held[start] >= 0:
            yield (slice(start, after), *cut), ((held[start], held[start] + after - start), *inner)


def stored_from(x: Any, part: Callable[[Ranges], np.ndarray]) -> Any:
    """A leaf as it is stored, of which each device gets its own part; padding is zeros.

    Args:
        x: shape, dtype and sharding of the leaf, as it is stored.
        part: reads a part of the original leaf.
    """
    array = stored_array(x)
    read: dict[Ranges, np.ndarray] = {}  # once for all replicas

    def shard(index: Any) -> np.ndarray:
        ranges = ranges_of(index, array.shape)
        if ranges not in read:
            block = np.zeros([last - first for first, last in ranges], array.dtype)
            for at, original in pieces(x, ranges):
                block[at] = part(original)
            read[ranges] = block
        return read[ranges]

    made = jax.make_array_from_callback(array.shape, array.sharding, shard, dtype=array.dtype)
    return as_stored(made, x.sizes, x.rows) if is_padded(x) else made


Span = tuple[int, int]
_PIECE_BYTES = 2**28


def rows_on_host(x: Any, rows: Span, mine: Span) -> np.ndarray:
    """The rows `mine` of a leaf in original form, on the host.

    Every process must call it, with the same `rows`, among which `mine` are.

    Args:
        x: the leaf, as it is stored.
        rows: the first and last original index along dim 0 that any process wants; of a scalar (0, 1).
        mine: those that this process wants.

    Cost: none between devices if the leaf is whole on the process's devices. Otherwise an all_gather of the stored rows
        that any process wants, of at most 256 MiB at a time unless one row is larger.
    """
    array = stored_array(x)
    out = np.empty((mine[1] - mine[0], *x.shape[1:]) if x.shape else (), array.dtype)
    if array.is_fully_addressable or array.is_fully_replicated:
        shards = {ranges_of(shard.index, array.shape): shard.data for shard in array.addressable_shards}
        for ranges, shard in shards.items():
            _copy(out, x, ranges, mine, shard)
        return out
    for first, last in _chunks(array):
        held = ((first, last), *((0, size) for size in array.shape[1:]))
        if any(_overlap(original[0], rows) for _, original in pieces(x, held)):
            _copy(out, x, held, mine, replicate(lax.slice_in_dim(array, first, last), array.sharding.mesh))
    return out


def _chunks(array: jax.Array) -> list[Span]:
    count = max(1, min(array.shape[0], _PIECE_BYTES * array.shape[0] // max(1, array.nbytes)))
    return [(first, min(first + count, array.shape[0])) for first in range(0, array.shape[0], count)]


def _overlap(a: Span, b: Span) -> Span | None:
    first, last = max(a[0], b[0]), min(a[1], b[1])
    return (first, last) if first < last else None


def _copy(out: np.ndarray, x: Any, held: Ranges, mine: Span, data: Any) -> None:
    """Copies what a stored part has of the original rows `mine`."""
    host: Any = None  # fetched from the device only if it has any
    for at, original in pieces(x, held):
        both = _overlap(original[0], mine) if original else mine
        if both is None:
            continue
        host = np.asarray(data) if host is None else host
        if not original:
            out[()] = host
            continue
        begin = at[0].start + both[0] - original[0][0]
        rows = slice(begin, begin + both[1] - both[0])
        to = (slice(both[0] - mine[0], both[1] - mine[0]), *(slice(*each) for each in original[1:]))
        out[to] = host[(rows, *at[1:])]
