"""Kernels built from the basic ones: prefix sums, halo exchange, gathering to one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from shardkit._arguments.checks import Axis, at_least, dim_of, member
from shardkit._arguments.typed import Arrays, typed
from shardkit._jax.compat import bound
from shardkit.collectives.axes import as_numbers, axis_size, vary
from shardkit.collectives.basic import gather_array
from shardkit.collectives.permute import shift_array

_COMBINE: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "sum": jnp.add,
    "max": jnp.maximum,
    "min": jnp.minimum,
}
_MOST_NEIGHBORS = 1024  # devices that a halo may reach: each sends a message of its own


@typed
def prefix_scan(x: Arrays, axis: Axis, *, op: Literal["sum", "max", "min"] = "sum", exclusive: bool = False) -> Any:
    """Gives device i the elementwise sum, max or min of the values of devices 0 to i.

    Layout: `X[...] on device i -> X[...] {reduced over devices 0..i}`
    Args:
        x: pytree of arrays.
        axis: axis name or tuple of names (then along the joint index).
        op: "sum", "max" or "min". Booleans count as integers for "sum". Equal values share the derivative of a "max"
            or "min".
        exclusive: leave out device i itself; device 0 gets 0, or the lowest or highest value of the dtype.

    Returns:
        Arrays of the same shapes, varying over `axis`.

    Raises:
        ValueError: an unbound axis, or another `op`.

    Cost: s B bytes in s steps, s = ceil(log2 n), or 1 + ceil(log2(n-1)) if exclusive; an all_gather needs n-1.

    Example:
        >>> offset = lambda size: sk.collectives.prefix_scan(size, "model", exclusive=True)
        >>> print(jax.shard_map(offset, mesh=mesh, in_specs=P("model"), out_specs=P("model"))(jnp.array([3, 1, 2, 2])))
        [0 3 4 6]

    Source: Hillis, Steele, Data Parallel Algorithms (1986).
    """
    names = bound("prefix_scan", axis)
    count = axis_size(names)
    index = lax.axis_index(names)
    first = int(exclusive)  # the first device that has a value to combine

    # Recursive doubling. Sums over five devices with the values 1 1 1 1 1, by the distance from which a value comes:
    #   distance 1: 1 2 2 2 2      device i has the sum of devices i-1 and i
    #   distance 2: 1 2 3 4 4      of i-3 to i
    #   distance 4: 1 2 3 4 5      of 0 to i
    # An exclusive sum begins with the values shifted up by one, and device 0 takes no part.
    def scan_leaf(leaf: jax.Array) -> jax.Array:
        if op == "sum":
            leaf = as_numbers(leaf)
        total = vary(leaf, names)
        if exclusive:
            # Device 0 would receive zeros from a shift without wrap, and they are larger than a max of negative values.
            neutral_value = _find_neutral_value(op, total.dtype)
            neutral = vary(jnp.full_like(total, neutral_value), names)
            if count == 1:
                total = neutral
            else:
                has_predecessor = index > 0
                arrival = shift_array(total, names, wrap=False)
                total = jnp.where(has_predecessor, arrival, neutral)
        distance = 1
        while distance < count - first:
            arrival = shift_array(total, names, by=distance, wrap=False)
            has_predecessor = index >= distance + first
            longer_total = _COMBINE[op](arrival, total)
            total = jnp.where(has_predecessor, longer_total, total)
            distance *= 2
        return total

    return jax.tree.map(scan_leaf, x)


def _find_neutral_value(op: str, dtype: Any) -> Any:
    """The value that changes no sum, max or min of this dtype."""
    if op == "sum":
        return 0
    if jnp.issubdtype(dtype, jnp.bool_):
        return op == "min"
    lowest, highest = -jnp.inf, jnp.inf
    if not jnp.issubdtype(dtype, jnp.floating):
        info = jnp.iinfo(dtype)
        lowest, highest = info.min, info.max
    return lowest if op == "max" else highest


@typed
def halo_exchange(
    x: Arrays,
    axis: Axis,
    *,
    dim: int = 0,
    before: int = 1,
    after: int = 1,
    wrap: bool = False,
) -> Any:
    """Extends this device's block by the last rows of the devices before it and the first rows of those after it.

    Layout: `X[.., D_a, ..] -> X[.., before + D_a + after, ..]`
    Args:
        x: pytree of arrays, a block on each device.
        axis: axis name or tuple of names (then along the joint index).
        dim: the dim split over the axis.
        before: rows from before the block; they may come from several devices.
        after: rows from after the block.
        wrap: periodic boundary: the last device precedes the first. False: zeros at both ends.

    Returns:
        Arrays with before + after more rows along `dim`.

    Raises:
        ValueError: an unbound axis, a `dim` the array does not have or that is empty, a negative number of rows, or
            more rows than 1024 devices have (each sends a message).

    Cost: B (before + after)/D bytes, D the block's size along `dim`, in one step for each neighbor reached.

    Example:
        >>> halo = lambda x: sk.collectives.halo_exchange(x, "data", before=1, after=1)
        >>> print(jax.shard_map(halo, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(jnp.array([1, 2, 3, 4])))
        [0 1 2 3 2 3 4 0]
    """
    names = bound("halo_exchange", axis)
    at_least("halo_exchange", 0, before=before, after=after)

    def extend_leaf(leaf: jax.Array) -> jax.Array:
        split_dim = dim_of("halo_exchange", dim, jnp.ndim(leaf))
        size = leaf.shape[split_dim]
        _check_halo(leaf.shape, split_dim, before=before, after=after)
        block = vary(leaf, names)
        pieces = [block]
        # Blocks of 3 rows and before=7: 3 rows of the nearest device, 3 of the next, and the last row of the third.
        for nearer_rows in range(0, before, size):
            rows = min(size, before - nearer_rows)
            edge = lax.slice_in_dim(block, size - rows, size, axis=split_dim)
            distance = nearer_rows // size + 1
            pieces.insert(0, shift_array(edge, names, by=distance, wrap=wrap))
        for nearer_rows in range(0, after, size):
            rows = min(size, after - nearer_rows)
            edge = lax.slice_in_dim(block, 0, rows, axis=split_dim)
            distance = nearer_rows // size + 1
            pieces.append(shift_array(edge, names, by=-distance, wrap=wrap))
        return jnp.concatenate(pieces, axis=split_dim)

    return jax.tree.map(extend_leaf, x)


def _check_halo(shape: tuple[int, ...], dim: int, **halos: int) -> None:
    size = shape[dim]
    if not size:
        raise ValueError(
            f"halo_exchange: dim {dim} must have at least one row per device; got shape {shape}. "
            "Choose another dim, or fewer devices."
        )
    for side, rows in halos.items():
        if rows > _MOST_NEIGHBORS * size:
            raise ValueError(
                f"halo_exchange: {side} must be at most the rows of {_MOST_NEIGHBORS} devices of {size} rows each; got "
                f"{rows}. Lower {side}."
            )


@typed
def gather_to_one(x: Arrays, axis: Axis, *, dim: int = 0, target: int = 0) -> Any:
    """Concatenates the devices' shards of each leaf along `dim` on device `target`; the others get zeros.

    Layout: `X[.., D_a, ..] -> X[.., D, ..] on device target`
    Args:
        x: pytree of arrays, this device's shards.
        axis: axis name or tuple of names (then `target` is a joint index).
        dim: the dim to concatenate along.
        target: index of the receiving device, 0 <= target < n.

    Returns:
        Arrays with n times the shard's size along `dim`, on every device, varying over `axis`.

    Raises:
        ValueError: an unbound axis, a `dim` the array does not have, or a target outside the axis.

    Cost: B (n-1) bytes in n-1 hops, B being one shard: an all_gather, because n-1 single messages are limited by the
    target's links just as much.

    Example:
        >>> first = lambda x: sk.collectives.gather_to_one(x, "data")
        >>> print(jax.shard_map(first, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(jnp.array([1, 2])))
        [1 2 0 0]
    """
    names = bound("gather_to_one", axis)
    member("gather_to_one", "target", target, axis_size(names))
    is_target = lax.axis_index(names) == target

    def gather_leaf(leaf: jax.Array) -> jax.Array:
        gathered_dim = dim_of("gather_to_one", dim, jnp.ndim(leaf))
        gathered = gather_array(leaf, names, gathered_dim)
        return jnp.where(is_target, gathered, jnp.zeros_like(gathered))

    return jax.tree.map(gather_leaf, x)
