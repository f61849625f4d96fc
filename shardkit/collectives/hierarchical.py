"""Two-level collectives for meshes of fast and slow links.

`inner` is the fast axis (inside a machine), `outer` the slow one (between machines). With I devices inside, the slow
links carry 1/I of the bytes.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from shardkit._arguments.checks import Axis, dim_of, divides
from shardkit._arguments.typed import Arrays, typed
from shardkit._jax.compat import bound
from shardkit.collectives import basic
from shardkit.collectives.axes import axis_size
from shardkit.collectives.padding import join_flat, split_flat


@partial(typed, where="hierarchical.all_reduce")
def all_reduce(x: Arrays, inner: Axis, outer: Axis, *, op: Literal["sum", "mean"] = "sum") -> Any:
    """Sums over both axes: reduce_scatter over the inner, all_reduce over the outer, all_gather over the inner.

    Layout: `X[...] {U_inner, U_outer} -> X[...]`
    Args:
        x: pytree of arrays. A size that the inner axis does not divide is padded with zeros.
        inner: the axis (or axes) of the fast links, I devices.
        outer: the axis (or axes) of the slow links, O devices.
        op: "sum" or "mean".

    Returns:
        Arrays of the same shapes, invariant over both axes.

    Raises:
        ValueError: an unbound axis, an axis in both, or another `op`.

    Cost: inner 2 B (I-1)/I bytes, outer 2 (B/I) (O-1)/O bytes, B padded to a multiple of I.

    Example:
        >>> total = lambda x: sk.hierarchical.all_reduce(x, inner="model", outer="data")
        >>> print(jax.shard_map(total, mesh=mesh, in_specs=P(("data", "model")), out_specs=P())(jnp.arange(8.0)))
        [28.]

    Source: Mikami et al., Massively Distributed SGD (2018), "2D-torus all-reduce".
    """
    fast, slow = _check_levels("hierarchical.all_reduce", inner, outer)
    count = axis_size(fast)

    # Worked example: 8 elements, and O=2 machines of I=4 devices. The reduce_scatter leaves each device 2 elements of
    # its machine's sum. It adds the same 2 elements of its partner in the other machine, so that 2 elements cross the
    # slow link. With the slow all_reduce first, all 8 would.
    def reduce_leaf(leaf: jax.Array) -> jax.Array:
        leaf = jnp.asarray(leaf)
        machine_sum = basic.scatter_array(split_flat(leaf, count), fast, 0, op=op)
        total = basic.reduce_array(machine_sum, slow, op=op)
        totals = basic.gather_array(total, fast, 0, replicated=True)
        return join_flat(totals, leaf.shape)

    return jax.tree.map(reduce_leaf, x)


@partial(typed, where="hierarchical.all_gather")
def all_gather(
    x: Arrays,
    inner: Axis,
    outer: Axis,
    *,
    dim: int = 0,
    replicated: bool = False,
) -> Any:
    """Concatenates the shards along `dim` in the order of `(outer, inner)`: over the slow links first, while small.

    Layout: `X[.., D_(outer,inner), ..] -> X[.., D, ..]`
    Args:
        x: pytree of arrays, this device's shards.
        inner, outer: as for all_reduce; outer is major in the order.
        dim: the dim to concatenate along.
        replicated: return a result that is invariant over both axes, as `out_specs=P()` requires.

    Returns:
        Arrays with I * O times the shard's size along `dim`.

    Raises:
        ValueError: an unbound axis, an axis in both, or a `dim` the array does not have.

    Cost: outer B (O-1) bytes, inner B O (I-1) bytes, B being one shard.

    Example:
        >>> whole = lambda x: sk.hierarchical.all_gather(x, inner="model", outer="data", replicated=True)
        >>> print(jax.shard_map(whole, mesh=mesh, in_specs=P(("data", "model")), out_specs=P())(jnp.arange(8)))
        [0 1 2 3 4 5 6 7]
    """
    where = "hierarchical.all_gather"
    fast, slow = _check_levels(where, inner, outer)
    inner_major = (axis_size(fast), axis_size(slow))

    # The slow links come first, while a device has one shard to send; after the fast links it would have I shards.
    def gather_leaf(leaf: jax.Array) -> jax.Array:
        gathered_dim = dim_of(where, dim, jnp.ndim(leaf))
        column = basic.gather_array(leaf, slow, gathered_dim, replicated=replicated)
        gathered = basic.gather_array(column, fast, gathered_dim, replicated=replicated)
        return _swap_levels(gathered, gathered_dim, inner_major)

    return jax.tree.map(gather_leaf, x)


@partial(typed, where="hierarchical.reduce_scatter")
def reduce_scatter(
    x: Arrays,
    inner: Axis,
    outer: Axis,
    *,
    dim: int = 0,
    op: Literal["sum", "mean"] = "sum",
) -> Any:
    """Sums over both axes; each device gets its shard in the order of `(outer, inner)`: over the fast links first.

    Layout: `X[.., D, ..] {U_inner, U_outer} -> X[.., D_(outer,inner), ..]`
    Args:
        x: pytree of arrays of the whole size.
        inner, outer: as for all_gather.
        dim: the dim to split; its size must be divisible by I * O.
        op: "sum" or "mean".

    Returns:
        Arrays with 1 / (I * O) of the input's size along `dim`.

    Raises:
        ValueError: an unbound axis, an axis in both, a `dim` the array does not have or that does not divide.

    Cost: inner B (I-1)/I bytes, outer (B/I) (O-1)/O bytes.

    Example:
        >>> rows = lambda x: sk.hierarchical.reduce_scatter(x, inner="model", outer="data")
        >>> print(jax.shard_map(rows, mesh=mesh, in_specs=P(), out_specs=P(("data", "model")))(jnp.arange(8)))
        [ 0  8 16 24 32 40 48 56]
    """
    where = "hierarchical.reduce_scatter"
    fast, slow = _check_levels(where, inner, outer)
    outer_major = (axis_size(slow), axis_size(fast))

    # The fast links come first: then the slow links carry 1/I of the rows.
    def scatter_leaf(leaf: jax.Array) -> jax.Array:
        split_dim = dim_of(where, dim, jnp.ndim(leaf))
        divides(where, split_dim, leaf.shape[split_dim], (*slow, *fast), math.prod(outer_major))
        swapped = _swap_levels(leaf, split_dim, outer_major)
        machine_sum = basic.scatter_array(swapped, fast, split_dim, op=op)
        return basic.scatter_array(machine_sum, slow, split_dim, op=op)

    return jax.tree.map(scatter_leaf, x)


def _check_levels(where: str, inner: Axis, outer: Axis) -> tuple[tuple[str, ...], tuple[str, ...]]:
    fast = bound(where, inner)
    slow = bound(where, outer)
    bound(where, (*fast, *slow))  # refuses an axis that is in both
    return fast, slow


def _swap_levels(x: jax.Array, dim: int, sizes: tuple[int, int]) -> jax.Array:
    """`dim` read as [a, b, rows] and written as [b, a, rows], for sizes (a, b).

    Gathered over "outer" (2) and then "inner" (4), rows stand inner-major: 0 4 1 5 2 6 3 7. Swapped with sizes (4, 2)
    they are 0 1 2 3 4 5 6 7, as `P((outer, inner))` has them.
    """
    a, b = sizes
    levels = x.reshape(*x.shape[:dim], a, b, -1, *x.shape[dim + 1 :])
    return jnp.swapaxes(levels, dim, dim + 1).reshape(x.shape)
