"""An all_to_all of blocks whose lengths are known only when the program runs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit import _platform
from shardkit._check import Axis, at_least, bound
from shardkit._typed import typed
from shardkit.collectives._sums import varying_like
from shardkit.collectives.basic import all_to_all, axis_index, axis_size, vary


@typed
def ragged_all_to_all(
    x: jax.Array, counts: jax.Array, axis: Axis, *, rows: int, limit: int, dense: bool | None = None
) -> jax.Array:
    """Sends device j the next `counts[i, j]` rows of device i, for all i and j.

    Layout: `X[A, ..] -> Y[rows, ..]`, in the order of the senders, zeros after the last row that arrives
    Args:
        x: rows in the order of the device that they go to; those beyond the sum of the counts stay.
        counts: integers [n, n], the same on all devices: how many rows device i sends device j.
        axis: axis name or tuple of names.
        rows: rows of the result; at least as many as ever arrive.
        limit: the most rows that one device ever sends another.
        dense: send blocks of `limit` rows by an ordinary all_to_all. By default only where the devices are CPUs, which
            have no ragged one.

    Returns:
        The rows that arrive, shape [rows, ..]. Counts that cannot be (below 0, beyond `limit`, more than a device has,
        more than `rows` hold) send nothing, and are seen: on every device the whole result is NaN; of integers the
        smallest number, of unsigned ones the largest, of booleans True.

    Raises:
        TypeError: counts that are no integers.
        ValueError: an unbound axis, counts of another shape, negative `rows` or `limit`, or counts that are known when
            the program is traced, and cannot be.

    Cost: what the counts say, B (n-1)/n bytes when they are balanced, B the rows that a device sends. Dense: (n-1)
        blocks of `limit` rows.
    """
    names = bound("ragged_all_to_all", axis)
    n, me = axis_size(names), axis_index(names)
    _check(x, counts, n, rows, limit)
    x, counts = vary(x, names), vary(jnp.asarray(counts), names)
    wrong = _wrong(counts, x.shape[0], rows, limit)
    counts = jnp.where(wrong, jnp.zeros_like(counts), counts)
    sent, received = counts[me], counts[:, me]
    starts, arrivals = _before(sent), _before(received)
    if not (_platform.platform() == "cpu" if dense is None else dense):
        fill = jnp.where(wrong, _no_number(x.dtype), jnp.zeros((), x.dtype))
        result = varying_like(jnp.full((rows, *x.shape[1:]), fill), x)
        return lax.ragged_all_to_all(x, result, starts, sent, _before(counts)[me], received, axis_name=names)
    place_L = jnp.arange(limit)
    from_nL = jnp.where(place_L[None, :] < sent[:, None], starts[:, None] + place_L[None, :], x.shape[0])
    blocks = all_to_all(x.at[from_nL].get(mode="fill", fill_value=0), names, split_dim=0, concat_dim=0)
    blocks = blocks.reshape(n * limit, *x.shape[1:])
    row, sender = jnp.arange(rows), segments(received, rows)
    inside = sender * limit + row - arrivals.at[sender].get(mode="clip")
    arrived = blocks.at[jnp.where(sender < n, inside, n * limit)].get(mode="fill", fill_value=0)
    return jnp.where(wrong, _no_number(x.dtype), arrived)


def _wrong(counts: Any, has: int, rows: int, limit: int) -> Any:
    """Whether counts cannot be, on some device: the same verdict on all of them."""
    beyond = (counts < 0).any() | (counts > limit).any()
    return beyond | (counts.sum(axis=1) > has).any() | (counts.sum(axis=0) > rows).any()


def _no_number(dtype: Any) -> jax.Array:
    """What stands where nothing can: as jax fills in what lies outside of an array."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(jnp.nan, dtype)
    if dtype == jnp.bool_:
        return jnp.asarray(True)
    info = jnp.iinfo(dtype)
    return jnp.asarray(info.min if info.min else info.max, dtype)


def _check(x: jax.Array, counts: Any, n: int, rows: int, limit: int) -> None:
    """Refuses what can be known while the program is traced."""
    where = "ragged_all_to_all"
    if not jnp.issubdtype(jnp.result_type(counts), jnp.integer):
        raise TypeError(
            f"{where}: counts must be integers; got {jnp.result_type(counts)}. Convert them with astype(jnp.int32)."
        )
    if jnp.shape(counts) != (n, n):
        raise ValueError(
            f"{where}: counts must say for each of {n} devices how many rows it sends each; got shape "
            f"{jnp.shape(counts)}. Gather them to shape {(n, n)}."
        )
    at_least(where, 0, rows=rows, limit=limit)
    if not isinstance(counts, jax.core.Tracer) and _wrong(np.asarray(counts), x.shape[0], rows, limit):
        raise ValueError(
            f"{where}: no count may be below 0 or beyond limit={limit}, and no device may send more than the "
            f"{x.shape[0]} rows that it has or receive more than rows={rows}; got {np.asarray(counts).tolist()}. "
            "Correct the counts, or make limit or rows larger."
        )


@typed
def segments(sizes: jax.Array, rows: int) -> jax.Array:
    """The segment that each of `rows` rows lies in, when segments of these sizes follow each other; int32 [rows].

    Rows after the last segment get the number of segments.
    """
    ends = jnp.cumsum(sizes)
    return jnp.cumsum(jnp.zeros(rows + 1, jnp.int32).at[ends].add(1))[:rows]


def _before(sizes: jax.Array) -> jax.Array:
    """Along dim 0, the sum of all sizes before each one."""
    return jnp.cumsum(sizes, axis=0) - sizes
