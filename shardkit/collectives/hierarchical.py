"""Two-level collectives for meshes of fast and slow links.

`inner` is the fast axis (inside a machine), `outer` the slow one (between machines). With I devices inside, the slow
links carry 1/I of the bytes.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from shardkit._arguments.checks import Axis, dim_of, divides
from shardkit._arguments.typed import Arrays, typed
from shardkit._jax.compat import bound
from shardkit.collectives import basic
from shardkit.collectives.axes import axis_size
from shardkit.collectives.padding import in_rows


@partial(typed, where="hierarchical.all_reduce")
def all_reduce(x: Arrays, inner: Axis, outer: Axis, *, op: Literal["sum", "mean"] = "sum") -> Any:
    """Sums over both axes: reduce_scatter over the inner, all_reduce over the outer, all_gather over the inner.

    Layout: `X[...] {U_inner, U_outer} -> X[...]`
    Args:
        x: pytree of arrays. A size that does not divide by the inner axis is padded with zeros.
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
    fast, slow = _levels("hierarchical.all_reduce", inner, outer)
    count = axis_size(fast)

    def reduce(leaf: jax.Array) -> jax.Array:
        leaf = jnp.asarray(leaf)
        piece = basic.all_reduce(basic.reduce_scatter(in_rows(leaf, count), fast, op=op), slow, op=op)
        return basic.all_gather(piece, fast, replicated=True).reshape(-1)[: leaf.size].reshape(leaf.shape)

    return jax.tree.map(reduce, x)


@partial(typed, where="hierarchical.all_gather")
def all_gather(x: Arrays, inner: Axis, outer: Axis, *, dim: int = 0, replicated: bool = False) -> Any:
    """Concatenates the shards along `dim` in the order of `(outer, inner)`: over the slow links first, while small.

    Layout: `X[.., D_(outer,inner), ..] -> X[.., D, ..]`
    Args:
        x: pytree of arrays, this device's shards.
        inner, outer: as for all_reduce; outer is major in the order.
        dim: the dim to concatenate along.
        replicated: return a result that is invariant over both axes, as `out_specs=P()` requires.

    Returns:
        Arrays whose size along `dim` is I * O times the shard's.

    Raises:
        ValueError: an unbound axis, an axis in both, or a `dim` the array does not have.

    Cost: outer B (O-1) bytes, inner B O (I-1) bytes, B being one shard.

    Example:
        >>> whole = lambda x: sk.hierarchical.all_gather(x, inner="model", outer="data", replicated=True)
        >>> print(jax.shard_map(whole, mesh=mesh, in_specs=P(("data", "model")), out_specs=P())(jnp.arange(8)))
        [0 1 2 3 4 5 6 7]
    """
    fast, slow = _levels("hierarchical.all_gather", inner, outer)
    shape = (axis_size(fast), axis_size(slow))

    def gather(leaf: jax.Array) -> jax.Array:
        at = dim_of("hierarchical.all_gather", dim, jnp.ndim(leaf))
        whole = basic.all_gather(leaf, slow, dim=at, replicated=replicated)
        whole = basic.all_gather(whole, fast, dim=at, replicated=replicated)
        return _swap(whole, at, shape)  # gathered inner-major, returned outer-major

    return jax.tree.map(gather, x)


@partial(typed, where="hierarchical.reduce_scatter")
def reduce_scatter(x: Arrays, inner: Axis, outer: Axis, *, dim: int = 0, op: Literal["sum", "mean"] = "sum") -> Any:
    """Sums over both axes; each device gets its shard in the order of `(outer, inner)`: over the fast links first.

    Layout: `X[.., D, ..] {U_inner, U_outer} -> X[.., D_(outer,inner), ..]`
    Args:
        x: pytree of arrays of the whole size.
        inner, outer: as for all_gather.
        dim: the dim to split; its size must be divisible by I * O.
        op: "sum" or "mean".

    Returns:
        Arrays whose size along `dim` is 1 / (I * O) of the input's.

    Raises:
        ValueError: an unbound axis, an axis in both, a `dim` the array does not have or that does not divide.

    Cost: inner B (I-1)/I bytes, outer (B/I) (O-1)/O bytes.

    Example:
        >>> rows = lambda x: sk.hierarchical.reduce_scatter(x, inner="model", outer="data")
        >>> print(jax.shard_map(rows, mesh=mesh, in_specs=P(), out_specs=P(("data", "model")))(jnp.arange(8)))
        [ 0  8 16 24 32 40 48 56]
    """
    fast, slow = _levels("hierarchical.reduce_scatter", inner, outer)
    shape = (axis_size(slow), axis_size(fast))

    def scatter(leaf: jax.Array) -> jax.Array:
        at = dim_of("hierarchical.reduce_scatter", dim, jnp.ndim(leaf))
        divides("hierarchical.reduce_scatter", at, leaf.shape[at], (*slow, *fast), shape[0] * shape[1])
        swapped = _swap(leaf, at, shape)
        return basic.reduce_scatter(basic.reduce_scatter(swapped, fast, dim=at, op=op), slow, dim=at, op=op)

    return jax.tree.map(scatter, x)


def _levels(where: str, inner: Axis, outer: Axis) -> tuple[tuple[str, ...], tuple[str, ...]]:
    fast, slow = bound(where, inner), bound(where, outer)
    bound(where, (*fast, *slow))  # refuses an axis that is in both
    return fast, slow


def _swap(x: jax.Array, dim: int, shape: tuple[int, int]) -> jax.Array:
    """`dim` read as [a, b, rest] and written as [b, a, rest]."""
    a, b = shape
    split = x.reshape(*x.shape[:dim], a, b, -1, *x.shape[dim + 1 :])
    return jnp.swapaxes(split, dim, dim + 1).reshape(x.shape)
