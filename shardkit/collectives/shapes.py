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
from shardkit.collectives.axes import axis_size, countable, vary
from shardkit.collectives.basic import all_gather
from shardkit.collectives.permute import shift

_COMBINE: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "sum": jnp.add,
    "max": jnp.maximum,
    "min": jnp.minimum,
}

_FARTHEST = 1024  # devices whose rows a halo may reach


@typed
def prefix_scan(x: Arrays, axis: Axis, *, op: Literal["sum", "max", "min"] = "sum", exclusive: bool = False) -> Any:
    """Device i gets the elementwise sum, max or min of the values of devices 0 to i.

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
    first = int(exclusive)  # the first device with a value to combine

    def prefix(leaf: jax.Array) -> jax.Array:
        total = vary(countable(leaf) if op == "sum" else leaf, names)
        if exclusive:
            neutral = vary(jnp.full_like(total, _neutral(op, total.dtype)), names)
            total = neutral if count == 1 else jnp.where(index > 0, shift(total, names, wrap=False), neutral)
        distance = 1
        while distance < count - first:
            arrived = shift(total, names, by=distance, wrap=False)
            total = jnp.where(index >= distance + first, _COMBINE[op](arrived, total), total)
            distance *= 2
        return total

    return jax.tree.map(prefix, x)


@typed
def halo_exchange(x: Arrays, axis: Axis, *, dim: int = 0, before: int = 1, after: int = 1, wrap: bool = False) -> Any:
    """Extends this device's block by the last rows of the devices before it and the first rows of those after it.

    Layout: `X[.., D_a, ..] -> X[.., before + D_a + after, ..]`
    Args:
        x: pytree of arrays, a block on each device.
        axis: axis name or tuple of names (then along the joint index).
        dim: the dim that is split over the axis.
        before: rows from before the block; they may come from several devices.
        after: rows from after the block.
        wrap: periodic boundary: the last device precedes the first. False: zeros at both ends.

    Returns:
        Arrays whose size along `dim` is larger by before + after.

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

    def join(leaf: jax.Array) -> jax.Array:
        at = dim_of("halo_exchange", dim, jnp.ndim(leaf))
        size = leaf.shape[at]
        for side, rows in (("before", before), ("after", after)):
            if rows > _FARTHEST * size > 0:
                raise ValueError(
                    f"halo_exchange: {side} must be at most the rows of {_FARTHEST} devices of {size} rows each; got "
                    f"{rows}. Lower {side}."
                )
        if not size:
            raise ValueError(
                f"halo_exchange: dim {at} must have at least one row per device; got shape {leaf.shape}. "
                "Choose another dim, or fewer devices."
            )
        leaf = vary(leaf, names)
        pieces = [leaf]
        for near in range(0, before, size):  # near: rows from nearer devices
            edge = lax.slice_in_dim(leaf, size - min(size, before - near), size, axis=at)
            pieces.insert(0, shift(edge, names, by=near // size + 1, wrap=wrap))
        for near in range(0, after, size):
            edge = lax.slice_in_dim(leaf, 0, min(size, after - near), axis=at)
            pieces.append(shift(edge, names, by=-(near // size + 1), wrap=wrap))
        return jnp.concatenate(pieces, axis=at)

    return jax.tree.map(join, x)


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
        Arrays whose size along `dim` is n times the shard's, on every device, varying over `axis`.

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
    here = lax.axis_index(names) == target

    def gather(leaf: jax.Array) -> jax.Array:
        dim_of("gather_to_one", dim, jnp.ndim(leaf))
        whole = all_gather(leaf, names, dim=dim)
        return jnp.where(here, whole, jnp.zeros_like(whole))

    return jax.tree.map(gather, x)


def _neutral(op: str, dtype: Any) -> Any:
    if op == "sum":
        return 0
    if jnp.issubdtype(dtype, jnp.bool_):
        return op == "min"
    if jnp.issubdtype(dtype, jnp.floating):
        return -jnp.inf if op == "max" else jnp.inf
    return jnp.iinfo(dtype).min if op == "max" else jnp.iinfo(dtype).max
