"""An all_to_all of blocks whose lengths are known only at run time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit._arguments.checks import Axis, at_least
from shardkit._arguments.typed import typed
from shardkit._jax import backends
from shardkit._jax.compat import bound
from shardkit._jax.ragged import invalid_value
from shardkit.collectives.axes import axis_index, axis_size, vary, vary_like
from shardkit.collectives.basic import all_to_all


@typed
def ragged_all_to_all(
    x: jax.Array,
    counts: jax.Array,
    axis: Axis,
    *,
    rows: int,
    limit: int,
    dense: bool | None = None,
) -> jax.Array:
    """Sends device j the next `counts[i, j]` rows of device i, for all i and j.

    Layout: `X[A, ..] -> Y[rows, ..]`, in the order of the senders, zeros after the last row that arrives
    Args:
        x: rows in the order of their target device; rows beyond the sum of the counts are not sent.
        counts: integers [n, n], the same on all devices: the number of rows device i sends to device j.
        axis: axis name or tuple of names.
        rows: rows of the result; at least the largest number one device ever receives.
        limit: the most rows one device ever sends another.
        dense: send blocks of `limit` rows by a plain all_to_all. By default only on CPUs, which have no ragged
            all_to_all.

    Returns:
        The rows received, shape [rows, ..]. Invalid counts (below 0, above `limit`, more than a device has, more than
        `rows` received) send nothing and show on every device: the whole result is NaN; the smallest value of a signed
        dtype, the largest of an unsigned one, True for booleans.

    Raises:
        TypeError: counts that are not integers.
        ValueError: an unbound axis, counts of another shape, negative `rows` or `limit`, or counts known at trace
            time to be invalid.

    Cost: the rows in the counts, B (n-1)/n bytes if they are balanced, B being the rows a device sends. Dense:
        (n-1) blocks of `limit` rows.

    Example:
        >>> counts = np.array([[1, 1], [0, 2]])  # device 0 sends one row to each, device 1 both to itself
        >>> exchange = lambda x: sk.collectives.ragged_all_to_all(x, counts, "data", rows=3, limit=2)
        >>> kernel = jax.shard_map(exchange, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        >>> print(jax.jit(kernel)(jnp.arange(1, 5)))
        [1 0 0 2 3 4]
    """
    names = bound("ragged_all_to_all", axis)
    n = axis_size(names)
    me = axis_index(names)
    _check_arguments(x, counts, n, rows, limit)
    x = vary(x, names)
    counts = vary(jnp.asarray(counts), names)
    # All devices have all counts, and judge them alike before the exchange. If one device alone sent nothing, the
    # others would take the holes for rows; rows without a place would be written over other rows, or beyond the array.
    invalid = _are_invalid(counts, x.shape[0], rows, limit)
    counts = jnp.where(invalid, jnp.zeros_like(counts), counts)
    # Row i of the counts is what device i sends, column j what device j receives.
    sent = counts[me]
    received = counts[:, me]
    starts = _sum_before(sent)  # of the rows for each device, in x
    arrivals = _sum_before(received)  # of the rows from each device, in the result
    if dense is None:
        dense = backends.platform() == "cpu"
    if not dense:
        fill = jnp.where(invalid, invalid_value(x.dtype), jnp.zeros((), x.dtype))
        result = vary_like(jnp.full((rows, *x.shape[1:]), fill), x)
        # The sender says where the target puts its rows: after the rows that earlier devices send to the target.
        offsets = _sum_before(counts)[me]
        return lax.ragged_all_to_all(x, result, starts, sent, offsets, received, axis_name=names)
    blocks = _exchange_blocks(x, sent, starts, names, limit)
    # Row r of the result comes from the block of its sender, at the row's place among the rows of this sender.
    row = jnp.arange(rows)
    sender = segments(received, rows)
    index = sender * limit + row - arrivals.at[sender].get(mode="clip")
    no_row = n * limit  # an index that reads zeros
    index = jnp.where(sender < n, index, no_row)
    result = blocks.at[index].get(mode="fill", fill_value=0)
    return jnp.where(invalid, invalid_value(x.dtype), result)


def _exchange_blocks(
    x: jax.Array,
    sent: jax.Array,
    starts: jax.Array,
    names: tuple[str, ...],
    limit: int,
) -> jax.Array:
    """The rows of all senders in blocks of `limit` rows, [n limit, ...], which are sent whole.

    With limit 2, sent [1, 2] and the rows a b c: the blocks [a 0] for device 0 and [b c] for device 1.
    """
    place_L = jnp.arange(limit)
    no_row = x.shape[0]  # an index that reads zeros
    is_sent_nL = place_L[None, :] < sent[:, None]
    index_nL = jnp.where(is_sent_nL, starts[:, None] + place_L[None, :], no_row)
    blocks = x.at[index_nL].get(mode="fill", fill_value=0)
    arrivals = all_to_all(blocks, names, split_dim=0, concat_dim=0)
    return arrivals.reshape(len(sent) * limit, *x.shape[1:])


def _are_invalid(counts: Any, has: int, rows: int, limit: int) -> Any:
    """Whether the counts are invalid on any device; every device gets the same answer."""
    invalid = (counts < 0).any() | (counts > limit).any()
    invalid |= (counts.sum(axis=1) > has).any()  # a device sends more than it has
    invalid |= (counts.sum(axis=0) > rows).any()  # or receives more than there is room for
    return invalid


def _check_arguments(x: jax.Array, counts: Any, n: int, rows: int, limit: int) -> None:
    """Refuses arguments that are known to be invalid at trace time."""
    where = "ragged_all_to_all"
    if not x.ndim:
        raise ValueError(f"{where}: x must have rows along dim 0; got a scalar. Pass an array of rank 1 or more.")
    if max(rows, n * limit) >= 2**31:
        raise ValueError(
            f"{where}: rows and limit must be below 2**31 for all devices together, because places are int32; got "
            f"rows={rows}, limit={limit} over {n} devices. Lower them."
        )
    if not jnp.issubdtype(jnp.result_type(counts), jnp.integer):
        raise TypeError(
            f"{where}: counts must be integers; got {jnp.result_type(counts)}. Convert them with astype(jnp.int32)."
        )
    if jnp.shape(counts) != (n, n):
        raise ValueError(
            f"{where}: counts must have shape {(n, n)}: rows from each of {n} devices to each; got shape "
            f"{jnp.shape(counts)}. Gather them over the axis first."
        )
    at_least(where, 0, rows=rows, limit=limit)
    is_known = not isinstance(counts, jax.core.Tracer)
    if is_known and _are_invalid(np.asarray(counts), x.shape[0], rows, limit):
        raise ValueError(
            f"{where}: every count must be from 0 to limit={limit}, and a device must send at most its {x.shape[0]} "
            f"rows and receive at most rows={rows}; got {np.asarray(counts).tolist()}. Lower the counts, or raise "
            "limit or rows."
        )


@typed
def segments(sizes: jax.Array, rows: int) -> jax.Array:
    """The segment of each of `rows` rows, for consecutive segments of these sizes; int32 [rows].

    Rows after the last segment get the number of segments: sizes [2, 0, 1] and 5 rows give [0, 0, 2, 3, 3].
    """
    ends = jnp.cumsum(sizes)
    # Each end of a segment raises the number of all rows after it by one. For sizes [2, 0, 1] the ends are 2, 2 and 3:
    # [0, 0, 2, 1, 0, 0] is summed up to [0, 0, 2, 3, 3, 3].
    ends_by_row = jnp.zeros(rows + 1, jnp.int32).at[ends].add(1)
    return jnp.cumsum(ends_by_row)[:rows]


def _sum_before(sizes: jax.Array) -> jax.Array:
    """The exclusive cumulative sum along dim 0."""
    return jnp.cumsum(sizes, axis=0) - sizes
