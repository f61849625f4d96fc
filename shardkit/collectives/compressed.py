"""Collectives that send fewer bits, in a small dtype with a scale for each block; sums with error feedback.

Under error feedback each device keeps a residual. It sends quantize(x + residual); the new residual is (x + residual) -
sent. Scales are powers of two, so that the difference is exact: sent + new residual equals x + residual in every bit of
float32 (above the subnormals), and over many steps the mean of what is received equals the mean of x. Without a
residual, the rounding errors accumulate. `cost.quantization_error` bounds them, `cost.quantized_bytes` is what is sent.

Source: Seide et al., 1-Bit Stochastic Gradient Descent (2014); Karimireddy et al., Error Feedback Fixes SignSGD (2019);
Wang et al., ZeRO++ (2023), for quantized gathers of weights and two-level reductions of gradients.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shardkit._arguments.checks import Axis, bound, dim_of, divides
from shardkit._arguments.kinds import Arrays, DType
from shardkit._arguments.typed import typed
from shardkit.collectives import basic, hierarchical
from shardkit.collectives._compression import (
    Pair,
    added_here,
    any_chunks,
    checked,
    chunks,
    joined,
    of_pairs,
    straight_through,
)
from shardkit.collectives._quantization import gathered, summed
from shardkit.collectives.axes import axis_index, axis_size, vary


@typed
def init_residual(x: Arrays) -> Any:
    """The initial residual: zeros in float32, with the shapes and varying axes of x.

    It differs between devices, as gradients do before they are reduced: between steps keep it in arrays whose specs
    name the axis, for example `[n, ...]` under `P(axis)`.

    Args:
        x: pytree of arrays, as passed to the reduction.

    Returns:
        Pytree of float32 arrays of the same shapes.

    Cost: none.

    Example:
        >>> print(sk.compressed.init_residual(jnp.ones(3, jnp.bfloat16)))
        [0. 0. 0.]
    """
    return jax.tree.map(lambda leaf: jnp.zeros_like(leaf, jnp.float32), x)


@partial(typed, where="compressed.all_gather")
def all_gather(x: Arrays, axis: Axis, *, dim: int = 0, dtype: DType, block: int = 256, replicated: bool = False) -> Any:
    """Concatenates the devices' shards of each leaf along `dim`, sent in a small dtype.

    Every device restores the same values from the same bytes, also of its own shard.

    Layout: `X[.., D_a, ..] -> X[.., D, ..]`
    Args:
        x: pytree of floating-point arrays, this device's shards.
        axis: axis name or tuple of names; shards are concatenated in the order of the device index.
        dim: the dim to concatenate along.
        dtype: jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8 or jnp.int4. All but the first are sent in
            blocks of the flattened shard.
        block: elements that share a scale, 1 or more.
        replicated: return a result that is invariant over `axis`, as `out_specs=P()` requires.

    Returns:
        Arrays of the dtypes of x, whose size along `dim` is n times the shard's. The derivative is that of all_gather
        (straight-through): a reduce_scatter backward, uncompressed. A non-finite element makes its block non-finite.

    Raises:
        ValueError: an unbound axis, another `dtype`, a block of no elements, or a `dim` the array does not have.
        TypeError: leaves that are not floating-point.

    Cost: Q (n-1) bytes in n-1 hops, Q = cost.quantized_bytes of one shard's elements.

    Example:
        >>> whole = lambda w: sk.compressed.all_gather(w, "model", dtype=jnp.int8, replicated=True)
        >>> print(jax.shard_map(whole, mesh=mesh, in_specs=P("model"), out_specs=P())(jnp.arange(4.0)))
        [0. 1. 2. 3.]
    """
    where = "compressed.all_gather"
    names, (small,) = bound(where, axis), checked(where, x, block, dtype=dtype)

    def gather(leaf: jax.Array) -> jax.Array:
        at = dim_of(where, dim, jnp.ndim(leaf))

        def sent(wide: jax.Array) -> Pair:
            return joined(gathered(wide, names, small, block, replicated), at), None

        exact = partial(basic.all_gather, axis=names, dim=at, replicated=replicated)
        return straight_through(exact, sent, vary(leaf, names), None)[0]

    return jax.tree.map(gather, x)


@partial(typed, where="compressed.reduce_scatter")
def reduce_scatter(
    x: Arrays, axis: Axis, residual: Arrays | None = None, *, dim: int = 0, dtype: DType, block: int = 256
) -> tuple[Any, Any]:
    """Sums each leaf over the devices of `axis`, sent in a small dtype; each device gets its shard along `dim`.

    Every device sends each other device its chunk of x + residual, quantized; chunks are summed in float32.

    Layout: `X[.., D, ..] {U_a} -> X[.., D_a, ..]`
    Args:
        x: pytree of floating-point arrays of the whole size.
        axis: axis name or tuple of names; a tuple is one level, each device sending to all others.
        residual: what has not been sent so far, from init_residual or from the last call; None for no error feedback.
        dim: the dim to split; its size must be divisible by n.
        dtype, block: as for all_gather, in blocks of the flattened chunks.

    Returns:
        The shards of the sums, in the dtypes of x, 1/n of the input's size along `dim`; and the new residual, or None.
        The derivative is that of the exact sum of x + residual (straight-through), and zero for the new residual. A
        non-finite element makes its block non-finite in both: a step that is skipped must keep its old residual.

    Raises:
        ValueError: an unbound axis, another `dtype`, a block of no elements, a `dim` the array does not have or that
            does not divide, or a residual of other shapes.
        TypeError: leaves that are not floating-point.

    Cost: Q (n-1) bytes to n-1 other devices, Q = cost.quantized_bytes of 1/n of the elements.

    Example:
        >>> rows = lambda g: sk.compressed.reduce_scatter(g, "model", dtype=jnp.int8)[0]
        >>> print(jax.shard_map(rows, mesh=mesh, in_specs=P(), out_specs=P("model"))(jnp.arange(4.0)))
        [ 0.  4.  8. 12.]
    """
    where = "compressed.reduce_scatter"
    names, (small,) = bound(where, axis), checked(where, x, block, dtype=dtype)
    count = axis_size(names)

    def scatter(leaf: jax.Array, residual: jax.Array | None) -> Pair:
        at = dim_of(where, dim, leaf.ndim)
        divides(where, at, leaf.shape[at], names, count)

        def sent(wide: jax.Array) -> Pair:
            total, left = summed(chunks(wide, at, count), names, small, block)
            return total, joined(left, at)

        exact = partial(basic.reduce_scatter, axis=names, dim=at)
        return straight_through(exact, sent, vary(leaf, names), vary(residual, names))

    return of_pairs(where, scatter, x, residual)


@partial(typed, where="compressed.reduce_scatter_two_level")
def reduce_scatter_two_level(
    x: Arrays,
    inner: Axis,
    outer: Axis,
    residual: Arrays | None = None,
    *,
    dim: int = 0,
    dtype: DType,
    inner_dtype: DType | None = None,
    block: int = 256,
) -> tuple[Any, Any]:
    """Sums over both axes, compressed over the slow links, or over both; each device gets its shard along `dim`.

    First over the inner axis: in float32, or in `inner_dtype` with every device sending each other its chunks. The
    partial sums, in float32, are quantized and sent over the outer axis: 1/I of the bytes that one level over both axes
    sends there.

    Layout: `X[.., D, ..] {U_inner, U_outer} -> X[.., D_(outer,inner), ..]`
    Args:
        x: pytree of floating-point arrays of the whole size.
        inner: the axis (or axes) of the fast links, I devices.
        outer: the axis (or axes) of the slow links, O devices; major in the order.
        residual: as for reduce_scatter; what the second rounding leaves is kept by the device that rounded.
        dim: the dim to split; its size must be divisible by I * O.
        dtype: what is sent over the outer axis: jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8 or jnp.int4.
        inner_dtype: likewise over the inner axis; None for an uncompressed reduce_scatter in float32.
        block: elements that share a scale, 1 or more.

    Returns:
        The shards of the sums, in the dtypes of x, 1 / (I * O) of the input's size along `dim`, in the order of
        `(outer, inner)`; and the new residual, or None. Derivatives and non-finite elements are as in reduce_scatter.

    Raises:
        ValueError: as for reduce_scatter, or an axis in both.
        TypeError: leaves that are not floating-point.

    Cost: inner Q (I-1) bytes, Q = cost.quantized_bytes of 1/I of the elements, or of 4 bytes each; outer Q (O-1) bytes,
    Q = cost.quantized_bytes of 1/(I O) of the elements.

    Example:
        >>> def rows(g):
        ...     return sk.compressed.reduce_scatter_two_level(g, inner="model", outer="data", dtype=jnp.int8)[0]
        >>> print(jax.shard_map(rows, mesh=mesh, in_specs=P(), out_specs=P(("data", "model")))(jnp.arange(8.0)))
        [ 0.  8. 16. 24. 32. 40. 48. 56.]

    Source: Wang et al., ZeRO++ (2023), section 3.3.
    """
    where = "compressed.reduce_scatter_two_level"
    fast, slow = bound(where, inner), bound(where, outer)
    both = bound(where, (*slow, *fast))  # refuses an axis that is in both
    small, *first = checked(where, x, block, dtype=dtype, inner_dtype=inner_dtype)
    ways, machines = axis_size(fast), axis_size(slow)

    def scatter(leaf: jax.Array, residual: jax.Array | None) -> Pair:
        at = dim_of(where, dim, leaf.ndim)
        divides(where, at, leaf.shape[at], both, machines * ways)

        def sent(wide: jax.Array) -> Pair:
            pieces = chunks(wide, at, machines * ways)
            swapped = pieces.reshape(machines, ways, *pieces.shape[1:]).swapaxes(0, 1)  # in the order of (inner, outer)
            if first:
                sums, left = summed(swapped, fast, first[0], block)
            else:
                sums, left = basic.reduce_scatter(swapped, fast)[0], jnp.zeros_like(swapped)
            total, left_here = summed(sums, slow, small, block)
            left = added_here(left, left_here, fast).swapaxes(0, 1).reshape(pieces.shape)
            return total, joined(left, at)

        exact = partial(hierarchical.reduce_scatter, inner=fast, outer=slow, dim=at)
        return straight_through(exact, sent, vary(leaf, both), vary(residual, both))

    return of_pairs(where, scatter, x, residual)


@partial(typed, where="compressed.all_reduce")
def all_reduce(
    x: Arrays,
    axis: Axis,
    residual: Arrays | None = None,
    *,
    dtype: DType,
    block: int = 256,
    compress_result: bool = False,
) -> tuple[Any, Any]:
    """Sums each leaf over the devices of `axis`, sent in a small dtype.

    Every device sends each other device its chunk of x + residual, quantized; chunks are summed in float32; the
    sums are gathered in the dtype of x, or quantized again.

    Layout: `X[...] {U_a} -> X[...]`
    Args:
        x: pytree of floating-point arrays.
        axis: axis name or tuple of names.
        residual: as for reduce_scatter; what the second rounding leaves is kept by the device that rounded.
        dtype, block: as for reduce_scatter.
        compress_result: gather the sums in `dtype` too.

    Returns:
        The sums, with the shapes and dtypes of x, invariant over `axis`; and the new residual, which varies over it, or
        None. Derivatives and non-finite elements are as in reduce_scatter.

    Raises:
        ValueError: an unbound axis, another `dtype`, a block of no elements, or a residual of other shapes.
        TypeError: leaves that are not floating-point.

    Cost: Q (n-1) bytes to n-1 other devices, Q = cost.quantized_bytes of 1/n of the elements, padded to a multiple of
    n; then as many again with compress_result, or with Q the bytes of these elements. An all_reduce sends 2 B (n-1)/n.

    Example:
        >>> def reduce(grads, residual):
        ...     return sk.compressed.all_reduce(grads, "data", residual, dtype=jnp.bfloat16)
        >>> step = jax.shard_map(reduce, mesh=mesh, in_specs=P("data"), out_specs=(P(), P("data")))
        >>> total, residual = step(jnp.array([1.0, 2.001]), jnp.zeros(2))
        >>> print(total, jnp.abs(residual) < 0.01)
        [3.] [ True  True]
    """
    where = "compressed.all_reduce"
    names, (small,) = bound(where, axis), checked(where, x, block, dtype=dtype)
    count = axis_size(names)

    def reduce(leaf: jax.Array, residual: jax.Array | None) -> Pair:
        def sent(wide: jax.Array) -> Pair:
            pieces, whole = any_chunks(wide, count)
            total, left = summed(pieces, names, small, block)
            if compress_result:
                totals = gathered(total, names, small, block, replicated=True)
                left = added_here(left, total - totals[axis_index(names)], names)
            else:
                totals = basic.all_gather(total.astype(leaf.dtype)[None], names, replicated=True)
            return whole(totals), whole(left)

        exact = partial(basic.all_reduce, axis=names)
        return straight_through(exact, sent, vary(leaf, names), vary(residual, names))

    return of_pairs(where, reduce, x, residual)
