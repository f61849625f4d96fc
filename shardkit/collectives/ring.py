"""Collectives written from ppermute: every message goes to a neighbour, so that it can be hidden behind compute.

The loops are `fori_loop`s of a fixed length: unrolled, a GPU's compiler no longer overlaps them. The backward pass is
a ring too, and keeps nothing of the forward one. For speed alone, the kernels of `basic` are as good or better.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from shardkit._check import Axis, bound, dim_of, divides
from shardkit._kinds import Arrays
from shardkit._typed import typed
from shardkit.collectives._sums import typed_zeros
from shardkit.collectives.basic import axis_index, axis_size, shift, vary

_Names = tuple[str, ...]


@partial(typed, where="ring.all_gather")
def all_gather(x: Arrays, axis: Axis, *, dim: int = 0, bidirectional: bool = False) -> Any:
    """Joins the devices' pieces along dimension `dim`, passing them round a ring.

    Layout: `X[.., D_a, ..] -> X[.., D, ..]`
    Args:
        x: pytree of arrays, a piece on each device.
        axis: axis name or tuple of names; the ring runs along the joint index.
        dim: the dimension to join along.
        bidirectional: send both ways at once: half the hops, each with two messages in opposite directions.

    Returns:
        Arrays whose size along `dim` is n times the piece's, typed as varying (a ring cannot prove them equal).

    Raises:
        ValueError: an unbound axis, or a `dim` the array does not have.

    Cost: B (n-1) bytes in n-1 hops, B being one piece; bidirectional in n // 2 hops.

    Source: Thakur, Rabenseifner, Gropp (2005), section 4.1.
    """
    names = bound("ring.all_gather", axis)

    def gather(leaf: jax.Array) -> jax.Array:
        at = dim_of("ring.all_gather", dim, jnp.ndim(leaf))
        return _all_gather(vary(leaf, names), names, at, bidirectional)

    return jax.tree.map(gather, x)


@partial(typed, where="ring.reduce_scatter")
def reduce_scatter(
    x: Arrays, axis: Axis, *, dim: int = 0, op: Literal["sum", "mean"] = "sum", bidirectional: bool = False
) -> Any:
    """Sums over the devices of `axis` and leaves each its piece along `dim`, passing partial sums round a ring.

    Piece d is summed in the order of the ring: device d+1 first, then d+2, and d itself last.

    Layout: `X[.., D, ..] {U_a} -> X[.., D_a, ..]`
    Args:
        x: pytree of arrays of the whole size; booleans count as int32.
        axis: axis name or tuple of names.
        dim: the dimension to split; its size must be divisible by n.
        op: "sum" or "mean".
        bidirectional: let partial sums come from both sides, each from half of the devices.

    Returns:
        Arrays whose size along `dim` is 1/n of the input's.

    Raises:
        ValueError: an unbound axis, a `dim` the array does not have or that does not divide, or another `op`.

    Cost: B (n-1)/n bytes in n-1 hops; bidirectional in n // 2 hops.

    Source: Patarasuk and Yuan (2009), the first half of the ring all-reduce.
    """
    names = bound("ring.reduce_scatter", axis)
    _check_op("ring.reduce_scatter", op)
    count = axis_size(names)

    def scatter(leaf: jax.Array) -> jax.Array:
        at = dim_of("ring.reduce_scatter", dim, jnp.ndim(leaf))
        divides("ring.reduce_scatter", at, leaf.shape[at], names, count)
        piece = _reduce_scatter(vary(_countable(leaf), names), names, at, bidirectional)
        return piece / count if op == "mean" else piece

    return jax.tree.map(scatter, x)


@partial(typed, where="ring.all_reduce")
def all_reduce(x: Arrays, axis: Axis, *, op: Literal["sum", "mean"] = "sum", bidirectional: bool = False) -> Any:
    """Sums over the devices of `axis`: a ring reduce_scatter of the flattened array, then a ring all_gather.

    Layout: `X[...] {U_a} -> X[...]`
    Args:
        x: pytree of arrays; booleans count as int32. A size that does not divide by n is padded with zeros.
        axis: axis name or tuple of names.
        op: "sum" or "mean".
        bidirectional: send both ways at once.

    Returns:
        Arrays of the same shapes, the same bits on every device, typed as varying (a ring cannot prove them equal).

    Raises:
        ValueError: an unbound axis, or another `op`.

    Cost: 2 B (n-1)/n bytes (of the padded array) in 2 (n-1) hops; bidirectional in 2 (n // 2) hops.

    Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms (2009).
    """
    names = bound("ring.all_reduce", axis)
    _check_op("ring.all_reduce", op)
    count = axis_size(names)

    def reduce(leaf: jax.Array) -> jax.Array:
        leaf = _countable(leaf)
        flat = jnp.pad(leaf.reshape(-1), (0, -leaf.size % count))
        pieces = reduce_scatter(flat, names, op=op, bidirectional=bidirectional)
        whole = all_gather(pieces, names, bidirectional=bidirectional)
        return whole[: leaf.size].reshape(leaf.shape)

    return jax.tree.map(reduce, x)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _all_gather(x: jax.Array, names: _Names, dim: int, bidirectional: bool) -> jax.Array:
    n, me = axis_size(names), axis_index(names)

    def put(out: jax.Array, piece: jax.Array, source: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(out, piece, source % n, 0)

    def one_way(k: Any, carry: Any) -> Any:
        piece, out = carry
        piece = shift(piece, names)  # from the device before, which had it from the one before it
        return piece, put(out, piece, me - k - 1)

    def both_ways(k: Any, carry: Any) -> Any:
        up, down, out = carry
        up, down = shift(up, names), shift(down, names, by=-1)
        return up, down, put(put(out, up, me - k - 1), down, me + k + 1)

    out = put(typed_zeros(x, shape=(n, *x.shape)), x, me)
    if bidirectional:
        up, _, out = lax.fori_loop(0, (n - 1) // 2, both_ways, (x, x, out))
        if n % 2 == 0:  # the device opposite is reached one way only
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

    def upward(length: int) -> jax.Array:  # sums over the `length` devices below, and this device's own part
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


def _forward(kernel: Any, x: jax.Array, *static: Any) -> tuple[jax.Array, None]:
    return kernel(x, *static), None


def _transpose(kernel: Any, *args: Any) -> tuple[jax.Array]:
    *static, _, cotangent = args
    return (kernel(cotangent, *static),)


# Each is the other's transpose.
_all_gather.defvjp(partial(_forward, _all_gather), partial(_transpose, _reduce_scatter))
_reduce_scatter.defvjp(partial(_forward, _reduce_scatter), partial(_transpose, _all_gather))


def _countable(x: jax.Array) -> jax.Array:
    return x.astype(jnp.int32) if x.dtype == jnp.bool_ else x


def _check_op(where: str, op: str) -> None:
    if op not in ("sum", "mean"):
        raise ValueError(f"{where}: op must be 'sum' or 'mean'; got {op!r}. Choose one of them.")
