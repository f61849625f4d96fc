"""Leaves brought to the host in original form, piece by piece, on the processes that want them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax

from shardkit.partitioning.storage import stored_array
from shardkit.runtime.data.reading import replicate
from shardkit.runtime.weights.shards import Ranges, pieces, ranges_of

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
