"""From the original form of a leaf to the shards in which it is stored on the devices, and back, on the host."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from shardkit.partitioning.storage import as_stored, is_padded, stored_array

Ranges = tuple[tuple[int, int], ...]
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
