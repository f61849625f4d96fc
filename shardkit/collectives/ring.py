"""Collectives built from ppermute: every message goes to a neighbor, so that it can overlap with compute.

The loops are `fori_loop`s of a fixed length: XLA does not overlap them on GPUs when they are unrolled. The backward
pass is a ring too and has no residuals. Without compute to overlap, the kernels of `basic` are as fast or faster.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from shardkit._arguments.checks import Axis, dim_of, divides
from shardkit._arguments.typed import Arrays, typed
from shardkit._jax import compat
from shardkit._jax.compat import bound
from shardkit.collectives._sums import typed_zeros
from shardkit.collectives.axes import axis_index, axis_size, countable, varies, vary
from shardkit.collectives.permute import shift
from shardkit.collectives.replicated import assume_replicated

_Names = tuple[str, ...]


@partial(typed, where="ring.all_gather")
def all_gather(x: Arrays, axis: Axis, *, dim: int = 0, bidirectional: bool = False, replicated: bool = False) -> Any:
    """Concatenates the devices' shards along `dim`, passing them around a ring.

    Layout: `X[.., D_a, ..] -> X[.., D, ..]`
    Args:
        x: pytree of arrays, this device's shards.
        axis: axis name or tuple of names; the ring follows the joint index.
        dim: the dim to concatenate along.
        bidirectional: send both ways at once: half the hops, each with two messages in opposite directions.
        replicated: return a result that is invariant over `axis`, as `out_specs=P()` requires. Its transpose slices an
            all-reduced cotangent; the default's transpose is a ring reduce_scatter.

    Returns:
        Arrays whose size along `dim` is n times the shard's.

    Raises:
        ValueError: an unbound axis, or a `dim` the array does not have.

    Cost: B (n-1) bytes in n-1 hops, B being one shard; bidirectional in n // 2 hops.

    Example:
        >>> whole = lambda x: sk.ring.all_gather(x, "data")
        >>> print(jax.shard_map(whole, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(jnp.arange(2)))
        [0 1 0 1]

    Source: Thakur, Rabenseifner, Gropp (2005), section 4.1.
    """
    names = bound("ring.all_gather", axis)

    def gather(leaf: jax.Array) -> jax.Array:
        at = dim_of("ring.all_gather", dim, jnp.ndim(leaf))
        leaf = vary(leaf, names)
        own = replicated and compat.tracked_axes().issuperset(names)  # also without check_vma, where no type says so
        kernel = _replicated_all_gather if own else _all_gather
        return kernel(leaf, names, at, bidirectional)

    return jax.tree.map(gather, x)


@partial(typed, where="ring.reduce_scatter")
def reduce_scatter(
    x: Arrays, axis: Axis, *, dim: int = 0, op: Literal["sum", "mean"] = "sum", bidirectional: bool = False
) -> Any:
    """Sums over the devices of `axis`; each gets its shard along `dim`, passing partial sums around a ring.

    Shard d is summed in the order of the ring: device d+1 first, then d+2, and d last.

    Layout: `X[.., D, ..] {U_a} -> X[.., D_a, ..]`
    Args:
        x: pytree of arrays of the whole size; booleans count as int32.
        axis: axis name or tuple of names.
        dim: the dim to split; its size must be divisible by n.
        op: "sum" or "mean".
        bidirectional: pass partial sums from both sides, each of half of the devices.

    Returns:
        Arrays whose size along `dim` is 1/n of the input's.

    Raises:
        ValueError: an unbound axis, a `dim` the array does not have or that does not divide, or another `op`.

    Cost: B (n-1)/n bytes in n-1 hops; bidirectional in n // 2 hops.

    Example:
        >>> rows = lambda x: sk.ring.reduce_scatter(x, "model", op="mean")
        >>> print(jax.shard_map(rows, mesh=mesh, in_specs=P(), out_specs=P("model"))(jnp.arange(4.0)))
        [0. 1. 2. 3.]

    Source: Patarasuk and Yuan (2009), the first half of the ring all-reduce.
    """
    names = bound("ring.reduce_scatter", axis)
    count = axis_size(names)

    def scatter(leaf: jax.Array) -> jax.Array:
        at = dim_of("ring.reduce_scatter", dim, jnp.ndim(leaf))
        divides("ring.reduce_scatter", at, leaf.shape[at], names, count)
        piece = _reduce_scatter(vary(countable(leaf), names), names, at, bidirectional)
        return piece / count if op == "mean" else piece

    return jax.tree.map(scatter, x)


@partial(typed, where="ring.all_reduce")
def all_reduce(
    x: Arrays, axis: Axis, *, op: Literal["sum", "mean"] = "sum", bidirectional: bool = False, replicated: bool = False
) -> Any:
    """Sums over the devices of `axis`: a ring reduce_scatter of the flattened array, then a ring all_gather.

    Layout: `X[...] {U_a} -> X[...]`
    Args:
        x: pytree of arrays; booleans count as int32. A size that does not divide by n is padded with zeros.
        axis: axis name or tuple of names.
        op: "sum" or "mean".
        bidirectional: send both ways at once.
        replicated: return a result that is invariant over `axis`, as `all_reduce` does, whose derivative sends nothing.
            The default's sends as much again.

    Returns:
        Arrays of the same shapes, with the same bits on every device.

    Raises:
        ValueError: an unbound axis, or another `op`.

    Cost: 2 B (n-1)/n bytes (of the padded array) in 2 (n-1) hops; bidirectional in 2 (n // 2) hops.

    Example:
        >>> total = lambda x: sk.ring.all_reduce(x, "model", bidirectional=True)
        >>> kernel = jax.shard_map(total, mesh=mesh, in_specs=P("model"), out_specs=P("model"))
        >>> print(jax.jit(kernel)(jnp.arange(4)))
        [6 6 6 6]

    Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms (2009).
    """
    names = bound("ring.all_reduce", axis)
    count = axis_size(names)

    def reduce(leaf: jax.Array) -> jax.Array:
        leaf = vary(countable(leaf), names)
        flat = jnp.pad(leaf.reshape(-1), (0, -leaf.size % count))
        kernel = _replicated_all_reduce if replicated and varies(leaf, names) else _all_reduce
        return kernel(flat, names, op, bidirectional)[: leaf.size].reshape(leaf.shape)

    return jax.tree.map(reduce, x)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _all_gather(x: jax.Array, names: _Names, dim: int, bidirectional: bool) -> jax.Array:
    n, me = axis_size(names), axis_index(names)

    def put(out: jax.Array, piece: jax.Array, source: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(out, piece, source % n, 0)

    def one_way(k: Any, carry: Any) -> Any:
        piece, out = carry
        piece = shift(piece, names)  # from the previous device
        return piece, put(out, piece, me - k - 1)

    def both_ways(k: Any, carry: Any) -> Any:
        up, down, out = carry
        up, down = shift(up, names), shift(down, names, by=-1)
        return up, down, put(put(out, up, me - k - 1), down, me + k + 1)

    out = put(typed_zeros(x, shape=(n, *x.shape)), x, me)
    if bidirectional:
        up, _, out = lax.fori_loop(0, (n - 1) // 2, both_ways, (x, x, out))
        if n % 2 == 0:  # the opposite device is reached in one direction only
            _, out = one_way(n // 2 - 1, (up, out))
    else:
        _, out = lax.fori_loop(0, n - 1, one_way, (x, out))
    return jnp.moveaxis(out, 0, dim).reshape(*x.shape[:dim], n * x.shape[dim], *x.shape[dim + 1 :])


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _reduce_scatter(x: jax.Array, names: _Names, dim: int, bidirectional: bool) -> jax.Array:
    n, me = axis_size(names), axis_index(names)
    size = x.shape[dim] // n

    def part(of: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(x, of % n * size, size, dim)

    def upward(length: int) -> jax.Array:  # the sum over the `length` devices below and this one
        return lax.fori_loop(
            0, length, lambda k, sum_: shift(sum_, names) + part(me + length - 1 - k), part(me + length)
        )

    def both_ways(k: Any, carry: Any) -> Any:
        up, down = carry
        up = shift(up, names) + part(me + half - 1 - k)
        down = shift(down, names, by=-1)
        return up, down + jnp.where(k < half - 1, part(me - half + 1 + k), jnp.zeros_like(down))

    if not bidirectional or n < 3:
        return upward(n - 1)
    half = (n - 1) // 2
    start = part(me + half)
    if n % 2 == 0:  # one more device below than above
        start = shift(part(me + half + 1), names) + start
    up, down = lax.fori_loop(0, half, both_ways, (start, part(me - half)))
    return up + down


def _all_reduce(x: jax.Array, names: _Names, op: Literal["sum", "mean"], bidirectional: bool) -> jax.Array:
    pieces = reduce_scatter(x, names, op=op, bidirectional=bidirectional)
    return all_gather(pieces, names, bidirectional=bidirectional)


# The cotangent of a replicated result is on every device already.


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _replicated_all_gather(x: jax.Array, names: _Names, dim: int, bidirectional: bool) -> jax.Array:
    return assume_replicated(_all_gather(x, names, dim, bidirectional), names)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _replicated_all_reduce(x: jax.Array, names: _Names, op: Literal["sum", "mean"], bidirectional: bool) -> jax.Array:
    return assume_replicated(_all_reduce(x, names, op, bidirectional), names)


def _own_slice(names: _Names, dim: int, bidirectional: bool, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    size = cotangent.shape[dim] // axis_size(names)
    return (lax.dynamic_slice_in_dim(vary(cotangent, names), axis_index(names) * size, size, dim),)


def _own_copy(names: _Names, op: str, bidirectional: bool, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (vary(cotangent / axis_size(names) if op == "mean" else cotangent, names),)


def _forward(kernel: Any, x: jax.Array, *static: Any) -> tuple[jax.Array, None]:
    return kernel(x, *static), None


def _transpose(kernel: Any, *args: Any) -> tuple[jax.Array]:
    *static, _, cotangent = args
    return (kernel(cotangent, *static),)


# Each is the other's transpose.
_all_gather.defvjp(partial(_forward, _all_gather), partial(_transpose, _reduce_scatter))
_reduce_scatter.defvjp(partial(_forward, _reduce_scatter), partial(_transpose, _all_gather))
_replicated_all_gather.defvjp(partial(_forward, _replicated_all_gather), _own_slice)
_replicated_all_reduce.defvjp(partial(_forward, _replicated_all_reduce), _own_copy)
