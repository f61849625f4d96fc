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
from shardkit.collectives._parts import join_parts
from shardkit.collectives._sums import typed_zeros
from shardkit.collectives.axes import as_numbers, axis_index, axis_size, varies, vary
from shardkit.collectives.permute import shift_array
from shardkit.collectives.replicated import assume_replicated

_Names = tuple[str, ...]


@partial(typed, where="ring.all_gather")
def all_gather(
    x: Arrays,
    axis: Axis,
    *,
    dim: int = 0,
    bidirectional: bool = False,
    replicated: bool = False,
) -> Any:
    """Concatenates the devices' shards along `dim`: they pass around a ring.

    Layout: `X[.., D_a, ..] -> X[.., D, ..]`
    Args:
        x: pytree of arrays, this device's shards.
        axis: axis name or tuple of names; the ring follows the joint index.
        dim: the dim to concatenate along.
        bidirectional: send both ways at once: half the hops, each with two messages in opposite directions.
        replicated: return a result that is invariant over `axis`, as `out_specs=P()` requires. Its transpose slices an
            all-reduced cotangent. The transpose of the default is a ring reduce_scatter.

    Returns:
        Arrays with n times the shard's size along `dim`.

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

    # The mesh is asked, and not the leaf's type: without check_vma no type says over which axes a leaf varies.
    kernel = _all_gather
    if replicated and compat.tracked_axes().issuperset(names):
        kernel = _all_gather_replicated

    def gather_leaf(leaf: jax.Array) -> jax.Array:
        gathered_dim = dim_of("ring.all_gather", dim, jnp.ndim(leaf))
        return kernel(vary(leaf, names), names, gathered_dim, bidirectional)

    return jax.tree.map(gather_leaf, x)


@partial(typed, where="ring.reduce_scatter")
def reduce_scatter(
    x: Arrays,
    axis: Axis,
    *,
    dim: int = 0,
    op: Literal["sum", "mean"] = "sum",
    bidirectional: bool = False,
) -> Any:
    """Sums over the devices of `axis`; each gets its shard along `dim`. Partial sums pass around a ring.

    Shard d is summed in the order of the ring: device d+1 first, then d+2, and d last.

    Layout: `X[.., D, ..] {U_a} -> X[.., D_a, ..]`
    Args:
        x: pytree of arrays of the whole size; booleans count as int32.
        axis: axis name or tuple of names.
        dim: the dim to split; its size must be divisible by n.
        op: "sum" or "mean".
        bidirectional: pass partial sums from both sides, each of half of the devices.

    Returns:
        Arrays with 1/n of the input's size along `dim`.

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

    def scatter_leaf(leaf: jax.Array) -> jax.Array:
        split_dim = dim_of("ring.reduce_scatter", dim, jnp.ndim(leaf))
        divides("ring.reduce_scatter", split_dim, leaf.shape[split_dim], names, count)
        shard = _reduce_scatter(vary(as_numbers(leaf), names), names, split_dim, bidirectional)
        if op == "mean":
            shard = shard / count
        return shard

    return jax.tree.map(scatter_leaf, x)


@partial(typed, where="ring.all_reduce")
def all_reduce(
    x: Arrays,
    axis: Axis,
    *,
    op: Literal["sum", "mean"] = "sum",
    bidirectional: bool = False,
    replicated: bool = False,
) -> Any:
    """Sums over the devices of `axis`: a ring reduce_scatter of the flattened array, then a ring all_gather.

    Layout: `X[...] {U_a} -> X[...]`
    Args:
        x: pytree of arrays; booleans count as int32. A size that n does not divide is padded with zeros.
        axis: axis name or tuple of names.
        op: "sum" or "mean".
        bidirectional: send both ways at once.
        replicated: return a result that is invariant over `axis`, as `sk.all_reduce` does. Its derivative sends
            nothing; the derivative of the default sends the same bytes again.

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

    def reduce_leaf(leaf: jax.Array) -> jax.Array:
        leaf = vary(as_numbers(leaf), names)
        # Flat, so that any array splits into n parts, also where none of its dims divides.
        flat = jnp.pad(leaf.reshape(-1), (0, -leaf.size % count))
        kernel = _all_reduce
        if replicated and varies(leaf, names):
            kernel = _all_reduce_replicated
        total = kernel(flat, names, op, bidirectional)
        return total[: leaf.size].reshape(leaf.shape)

    return jax.tree.map(reduce_leaf, x)


# The four shards of a ring of four devices, as device 0 gets them from device 3:
#   one way:    own 0, then 3, 2, 1 in three hops
#   both ways:  own 0, then 3 from below and 1 from above in one hop, and the opposite 2 from below in a second
# Every shift is issued before the shard that it carries is needed, so that the caller's matmuls can hide it.


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _all_gather(x: jax.Array, names: _Names, dim: int, bidirectional: bool) -> jax.Array:
    n = axis_size(names)
    me = axis_index(names)

    def store(out: jax.Array, shard: jax.Array, source: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(out, shard, source % n, 0)

    def hop(k: Any, carry: Any) -> Any:
        shard, out = carry
        shard = shift_array(shard, names)  # from the previous device
        return shard, store(out, shard, me - k - 1)

    def hop_both_ways(k: Any, carry: Any) -> Any:
        from_below, from_above, out = carry
        from_below = shift_array(from_below, names)
        from_above = shift_array(from_above, names, by=-1)
        out = store(out, from_below, me - k - 1)
        out = store(out, from_above, me + k + 1)
        return from_below, from_above, out

    out = store(typed_zeros(x, shape=(n, *x.shape)), x, me)
    if bidirectional:
        from_below, _, out = lax.fori_loop(0, (n - 1) // 2, hop_both_ways, (x, x, out))
        if n % 2 == 0:  # the opposite device is reached in one direction only
            _, out = hop(n // 2 - 1, (from_below, out))
    else:
        _, out = lax.fori_loop(0, n - 1, hop, (x, out))
    return join_parts(out, dim)


# The sum of a shard starts at the device that is farthest from its owner. Shard 0 over four devices:
#   one way:    1 sends its part to 2, which adds its own part and sends the sum to 3; 3 does the same, and 0 ends
#   both ways:  2 sends to 3, which adds and sends to 0; 1 sends to 0. Device 0 adds the sums from both sides
# So no device ever holds more than one partial sum for each direction.


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _reduce_scatter(x: jax.Array, names: _Names, dim: int, bidirectional: bool) -> jax.Array:
    n = axis_size(names)
    me = axis_index(names)
    size = x.shape[dim] // n

    def take_part(device: jax.Array) -> jax.Array:
        """This device's part of the sum of a device's shard."""
        return lax.dynamic_slice_in_dim(x, device % n * size, size, dim)

    # Of two devices, above and below are the same neighbor.
    if not bidirectional or n < 3:
        hops = n - 1

        def hop(k: Any, partial_sum: jax.Array) -> jax.Array:
            return shift_array(partial_sum, names) + take_part(me + hops - 1 - k)

        return lax.fori_loop(0, hops, hop, take_part(me + hops))

    half = (n - 1) // 2

    def hop_both_ways(k: Any, carry: Any) -> Any:
        from_below, from_above = carry
        from_below = shift_array(from_below, names) + take_part(me + half - 1 - k)
        from_above = shift_array(from_above, names, by=-1)
        # In the last hop both sums arrive at their owner, which adds its own part to the one from below alone.
        part = jnp.where(k < half - 1, take_part(me - half + 1 + k), jnp.zeros_like(from_above))
        return from_below, from_above + part

    first_below = take_part(me + half)
    if n % 2 == 0:  # one more device below than above
        first_below = shift_array(take_part(me + half + 1), names) + first_below
    first_above = take_part(me - half)
    from_below, from_above = lax.fori_loop(0, half, hop_both_ways, (first_below, first_above))
    return from_below + from_above


def _all_reduce(x: jax.Array, names: _Names, op: Literal["sum", "mean"], bidirectional: bool) -> jax.Array:
    shards = reduce_scatter(x, names, op=op, bidirectional=bidirectional)
    return all_gather(shards, names, bidirectional=bidirectional)


# The cotangent of a replicated result is on every device already, so the transpose sends nothing. The transpose of the
# varying result would add n equal copies of it.


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _all_gather_replicated(x: jax.Array, names: _Names, dim: int, bidirectional: bool) -> jax.Array:
    return assume_replicated(_all_gather(x, names, dim, bidirectional), names)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _all_reduce_replicated(x: jax.Array, names: _Names, op: Literal["sum", "mean"], bidirectional: bool) -> jax.Array:
    return assume_replicated(_all_reduce(x, names, op, bidirectional), names)


def _slice_cotangent(
    names: _Names,
    dim: int,
    bidirectional: bool,
    _: None,
    cotangent: jax.Array,
) -> tuple[jax.Array]:
    size = cotangent.shape[dim] // axis_size(names)
    cotangent = vary(cotangent, names)
    return (lax.dynamic_slice_in_dim(cotangent, axis_index(names) * size, size, dim),)


def _copy_cotangent(
    names: _Names,
    op: str,
    bidirectional: bool,
    _: None,
    cotangent: jax.Array,
) -> tuple[jax.Array]:
    if op == "mean":
        cotangent = cotangent / axis_size(names)
    return (vary(cotangent, names),)


def _run_forward(kernel: Any, x: jax.Array, *static: Any) -> tuple[jax.Array, None]:
    return kernel(x, *static), None  # a linear kernel has no residuals


def _run_transpose(kernel: Any, *args: Any) -> tuple[jax.Array]:
    *static, _, cotangent = args
    return (kernel(cotangent, *static),)


# The gather and the scatter are each other's transpose.
_all_gather.defvjp(partial(_run_forward, _all_gather), partial(_run_transpose, _reduce_scatter))
_reduce_scatter.defvjp(partial(_run_forward, _reduce_scatter), partial(_run_transpose, _all_gather))
_all_gather_replicated.defvjp(partial(_run_forward, _all_gather_replicated), _slice_cotangent)
_all_reduce_replicated.defvjp(partial(_run_forward, _all_reduce_replicated), _copy_cotangent)
