"""An all_to_all of blocks whose lengths are known only when the program runs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from shardkit import _compat, _platform
from shardkit._check import Axis, at_least, bound, shapes
from shardkit._typed import typed
from shardkit.collectives.basic import all_to_all, axis_index, axis_size, vary


@typed
def ragged_all_to_all(
    x: jax.Array, counts: jax.Array, axis: Axis, *, rows: int, limit: int, dense: bool | None = None
) -> jax.Array:
    """Sends device j the next `counts[i, j]` rows of device i, for all i and j.

    Layout: `X[A, ..] -> Y[rows, ..]`, in the order of the senders, zeros after the last row that arrives
    Args:
        x: rows in the order of the device that they go to; those beyond the sum of the counts stay.
        counts: int32 [n, n], the same on all devices: how many rows device i sends device j.
        axis: axis name or tuple of names.
        rows: rows of the result; at least as many as ever arrive.
        limit: the most rows that one device ever sends another.
        dense: send blocks of `limit` rows by an ordinary all_to_all. By default only where the devices are CPUs, which
            have no ragged one.

    Returns:
        The rows that arrive, shape [rows, ..].

    Raises:
        ValueError: an unbound axis.

    Cost: what the counts say, B (n-1)/n bytes when they are balanced, B the rows that a device sends. Dense: (n-1)
        blocks of `limit` rows.
    """
    names = bound("ragged_all_to_all", axis)
    shapes("ragged_all_to_all", counts=(counts, "nn"))
    at_least("ragged_all_to_all", 0, rows=rows, limit=limit)
    if not jnp.issubdtype(counts.dtype, jnp.integer):
        raise TypeError(f"ragged_all_to_all: counts must be integers; got {counts.dtype}. Convert them.")
    n, me = axis_size(names), axis_index(names)
    x, counts = vary(x, names), vary(counts, names)
    sent, received = counts[me], counts[:, me]
    starts, arrivals = _before(sent), _before(received)
    if not (_platform.platform() == "cpu" if dense is None else dense):
        result = vary(jnp.zeros((rows, *x.shape[1:]), x.dtype), tuple(_compat.varying_axes(x)))
        return lax.ragged_all_to_all(x, result, starts, sent, _before(counts)[me], received, axis_name=names)
    place_L = jnp.arange(limit)
    from_nL = jnp.where(place_L[None, :] < sent[:, None], starts[:, None] + place_L[None, :], x.shape[0])
    blocks = all_to_all(x.at[from_nL].get(mode="fill", fill_value=0), names, split_dim=0, concat_dim=0)
    blocks = blocks.reshape(n * limit, *x.shape[1:])
    row, sender = jnp.arange(rows), segments(received, rows)
    inside = sender * limit + row - arrivals.at[sender].get(mode="clip")
    return blocks.at[jnp.where(sender < n, inside, n * limit)].get(mode="fill", fill_value=0)


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
