"""Kernels made of the basic ones: prefix sums, the neighbours' edges, a whole array on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from shardkit._check import Axis, bound, dim_of, member
from shardkit._kinds import Arrays
from shardkit._typed import typed
from shardkit.collectives.basic import all_gather, axis_size, shift, vary

_COMBINE: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "sum": jnp.add,
    "max": jnp.maximum,
    "min": jnp.minimum,
}

_FARTHEST = 1024  # devices whose rows a halo may reach


@typed
def prefix_scan(x: Arrays, axis: Axis, *, op: Literal["sum", "max", "min"] = "sum", exclusive: bool = False) -> Any:
    """Device i gets the sum, max or min of what devices 0 to i hold, element by element.

    Layout: `X[...] on device i -> X[...] {reduced over devices 0..i}`
    Args:
        x: pytree of arrays.
        axis: axis name or tuple of names (then along the joint index).
        op: "sum", "max" or "min". Booleans count as integers for "sum". Two equal values of a "max" or "min" that meet
            share its derivative.
        exclusive: leave out device i itself; device 0 then gets 0, or the lowest or highest value of the dtype.

    Returns:
        Arrays of the same shapes, typed as varying over `axis`.

    Raises:
        ValueError: an unbound axis, or another `op`.

    Cost: s B bytes in s steps, s = ceil(log2 n), or 1 + ceil(log2(n-1)) if exclusive; an all_gather needs n-1.
    Source: Hillis, Steele, Data Parallel Algorithms (1986).
    """
    names = bound("prefix_scan", axis)
    count = axis_size(names)
    if op not in _COMBINE:
        raise ValueError(f"prefix_scan: op must be 'sum', 'max' or 'min'; got {op!r}. Choose one of them.")
    index = lax.axis_index(names)
    first = int(exclusive)  # the first device that has something to add up

    def prefix(leaf: jax.Array) -> jax.Array:
        if leaf.dtype == bool and op == "sum":
            leaf = leaf.astype(jnp.int32)
        total = vary(leaf, names)
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
    """Joins the last rows of the devices before and the first rows of those behind to this device's block.

    Layout: `X[.., D_a, ..] -> X[.., before + D_a + after, ..]`
    Args:
        x: pytree of arrays, a block on each device.
        axis: axis name or tuple of names (then along the joint index).
        dim: the dimension along which the blocks lie side by side.
        before: rows wanted from before the block; they may reach over several devices.
        after: rows wanted from behind the block.
        wrap: a ring, in which the last device lies before the first; without it the open ends receive zeros.

    Returns:
        Arrays whose size along `dim` is larger by before + after.

    Raises:
        ValueError: an unbound axis, a `dim` the array does not have or that is empty, a negative number of rows, or
            more than 1024 devices have: each takes a message.

    Cost: B (before + after)/D bytes, D the block's size along `dim`, in one step for each neighbour reached.
    """
    names = bound("halo_exchange", axis)
    for side, rows in (("before", before), ("after", after)):
        if rows < 0:
            raise ValueError(f"halo_exchange: {side} must be 0 rows or more; got {rows}. Pass {side}=0 for none.")

    def join(leaf: jax.Array) -> jax.Array:
        at = dim_of("halo_exchange", dim, jnp.ndim(leaf))
        size = leaf.shape[at]
        for side, rows in (("before", before), ("after", after)):
            if rows > _FARTHEST * size > 0:
                raise ValueError(
                    f"halo_exchange: {side} must be at most the rows of {_FARTHEST} devices, of {size} each; got "
                    f"{rows}. Lower it."
                )
        if not size:
            raise ValueError(
                f"halo_exchange: dim {at} must have one row or more on each device; got shape {leaf.shape}. "
                "Choose another dim, or fewer devices."
            )
        leaf = vary(leaf, names)
        pieces = [leaf]
        for near in range(0, before, size):  # near: rows that nearer devices give
            edge = lax.slice_in_dim(leaf, size - min(size, before - near), size, axis=at)
            pieces.insert(0, shift(edge, names, by=near // size + 1, wrap=wrap))
        for near in range(0, after, size):
            edge = lax.slice_in_dim(leaf, 0, min(size, after - near), axis=at)
            pieces.append(shift(edge, names, by=-(near // size + 1), wrap=wrap))
        return jnp.concatenate(pieces, axis=at)

    return jax.tree.map(join, x)


@typed
def gather_to_one(x: Arrays, axis: Axis, *, dim: int = 0, target: int = 0) -> Any:
    """Joins the devices' pieces of each leaf along `dim` on device `target`; the others get zeros.

    Layout: `X[.., D_a, ..] -> X[.., D, ..] on device target`
    Args:
        x: pytree of arrays, a piece on each device.
        axis: axis name or tuple of names (then `target` is a joint index).
        dim: the dimension to join along.
        target: index of the receiving device, 0 <= target < n.

    Returns:
        Arrays whose size along `dim` is n times the piece's, on every device, typed as varying over `axis`.

    Raises:
        ValueError: an unbound axis, a `dim` the array does not have, or a target outside the axis.

    Cost: B (n-1) bytes in n-1 hops, B being one piece: an all_gather, since the target's own links are the bottleneck
    of n-1 single messages too.
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
