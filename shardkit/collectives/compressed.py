"""Collectives that send fewer bits, in a small dtype with a scale for each block; sums with error feedback.

Under error feedback each device keeps a residual. It sends quantize(x + residual); the new residual is (x + residual) -
sent. Scales have few bits, so that the difference is exact: sent + new residual equals x + residual in every bit of
float32 (above the subnormals), and over many steps the mean of what is received equals the mean of x. Without a
residual, the rounding errors accumulate. `cost.quantization_error` bounds them, `cost.quantized_bytes` is what is sent.

With `key=` an element is rounded to the value below or above it, each as often as makes the mean of what is sent the
element itself: without a residual, the errors of many steps then average out. A residual is rounded to float32 then.

A residual begins with zeros in float32. It differs between devices, as gradients do before they are reduced: between
steps keep it in arrays whose specs name the axis, for example `[n, ...]` under `P(axis)`.

Source: Seide et al., 1-Bit Stochastic Gradient Descent (2014); Karimireddy et al., Error Feedback Fixes SignSGD (2019);
Wang et al., ZeRO++ (2023), for quantized gathers of weights and two-level reductions of gradients; Gupta et al., Deep
Learning with Limited Numerical Precision (2015), for stochastic rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shardkit._arguments.checks import Axis, dim_of, divides
from shardkit._arguments.typed import Arrays, Key, typed
from shardkit._jax.compat import bound
from shardkit.collectives import basic, hierarchical
from shardkit.collectives._parts import join_parts, stack_parts
from shardkit.collectives.axes import axis_index, axis_size, vary
from shardkit.collectives.quantization import WireDType, check_dtype, decode, encode
from shardkit.cost.quantization import choose_block
from shardkit.meshes.rng import check_single, fold_axes

# The reduction on two levels is called by `algorithms.compressed(inner=...)`.
__all__ = ["all_gather", "all_reduce", "reduce_scatter"]

_Names = tuple[str, ...]
_Pair = tuple[jax.Array, Any]  # a result and the new residual


@partial(typed, where="compressed.all_gather")
def all_gather(
    x: Arrays,
    axis: Axis,
    *,
    dim: int = 0,
    dtype: WireDType,
    block: int | None = None,
    replicated: bool = False,
    key: Key | None = None,
) -> Any:
    """Concatenates the devices' shards of each leaf along `dim`, and sends them in a small dtype.

    Every device restores the same values from the same bytes, also for the shard that it sent.

    Layout: `X[.., D_a, ..] -> X[.., D, ..]`
    Args:
        x: pytree of floating-point arrays, this device's shards.
        axis: axis name or tuple of names; shards are concatenated in the order of the device index.
        dim: the dim to concatenate along.
        dtype: jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8, jnp.int4, "mxfp8", "mxfp4" or "nvfp4". All
            but the first are sent in blocks of the flattened shard.
        block: elements that share a scale, 1 or more; by default 256. "mxfp8" and "mxfp4" have 32, "nvfp4" has 16, and
            no other.
        replicated: return a result that is invariant over `axis`, as `out_specs=P()` requires.
        key: to round stochastically, each leaf and device of `axis` by draws of its own: pass one key, the same on all
            of them, and another one in each step. None: round to nearest.

    Returns:
        Arrays in the dtypes of x, with n times the shard's size along `dim`. The derivative is the derivative of
            all_gather (straight-through): a reduce_scatter backward, uncompressed. A non-finite element makes its block
            non-finite.

    Raises:
        ValueError: an unbound axis, another `dtype`, a block of no elements or of another size than the format's, a
            `dim` the array does not have, or several keys.
        TypeError: leaves that are not floating-point.

    Cost: Q (n-1) bytes in n-1 hops, Q = cost.quantized_bytes of one shard's elements.

    Example:
        >>> whole = lambda w: sk.compressed.all_gather(w, "model", dtype=jnp.int8, replicated=True)
        >>> print(jax.shard_map(whole, mesh=mesh, in_specs=P("model"), out_specs=P())(jnp.arange(4.0)))
        [0. 1. 2. 3.]
    """
    where = "compressed.all_gather"
    names = bound(where, axis)
    wire_dtype = check_dtype(where, "dtype", dtype)
    block_size = choose_block(where, wire_dtype, block)
    _check_leaves(where, "all_gather", x)

    def gather_leaf(leaf: jax.Array, residual: None, leaf_key: jax.Array | None) -> _Pair:
        gathered_dim = dim_of(where, dim, jnp.ndim(leaf))

        def compress(wide: jax.Array, leaf_key: jax.Array | None) -> _Pair:
            shards = _gather_quantized(wide, names, wire_dtype, block_size, replicated, leaf_key)
            return join_parts(shards, gathered_dim), None

        exact = partial(basic.all_gather, axis=names, dim=gathered_dim, replicated=replicated)
        return _straight_through(exact, compress, vary(leaf, names), residual, leaf_key)

    results, _ = _map_with_residuals(where, gather_leaf, x, None, names, key)
    return results


@partial(typed, where="compressed.reduce_scatter")
def reduce_scatter(
    x: Arrays,
    axis: Axis,
    residual: Arrays | None = None,
    *,
    dim: int = 0,
    dtype: WireDType,
    block: int | None = None,
    key: Key | None = None,
) -> tuple[Any, Any]:
    """Sums each leaf over the devices of `axis`, and sends it in a small dtype; each device gets its shard along `dim`.

    Every device sends each other device its chunk of x + residual, quantized; chunks are summed in float32.

    Layout: `X[.., D, ..] {U_a} -> X[.., D_a, ..]`
    Args:
        x: pytree of floating-point arrays of the whole size.
        axis: axis name or tuple of names. A tuple is one level: each device sends to all others.
        residual: the part not sent so far: zeros in float32, or the residual of the last call; None for no error
            feedback.
        dim: the dim to split; its size must be divisible by n.
        dtype, block, key: as for all_gather, in blocks of the flattened chunks.

    Returns:
        The shards of the sums, in the dtypes of x, 1/n of the input's size along `dim`; and the new residual, or None.
        The derivative is the derivative of the exact sum of x + residual (straight-through), and zero for the new
        residual. A non-finite element makes its block non-finite in both: if you skip a step, keep its old residual.

    Raises:
        ValueError: an unbound axis, another `dtype`, a block of no elements or of another size than the format's, a
            `dim` the array does not have or that does not divide, a residual of other shapes, or several keys.
        TypeError: leaves that are not floating-point.

    Cost: Q (n-1) bytes to n-1 other devices, Q = cost.quantized_bytes of 1/n of the elements.

    Example:
        >>> rows = lambda g: sk.compressed.reduce_scatter(g, "model", dtype=jnp.int8)[0]
        >>> print(jax.shard_map(rows, mesh=mesh, in_specs=P(), out_specs=P("model"))(jnp.arange(4.0)))
        [ 0.  4.  8. 12.]
    """
    where = "compressed.reduce_scatter"
    names = bound(where, axis)
    wire_dtype = check_dtype(where, "dtype", dtype)
    block_size = choose_block(where, wire_dtype, block)
    _check_leaves(where, "reduce_scatter", x)
    count = axis_size(names)

    def scatter_leaf(leaf: jax.Array, residual: jax.Array | None, leaf_key: jax.Array | None) -> _Pair:
        split_dim = dim_of(where, dim, leaf.ndim)
        divides(where, split_dim, leaf.shape[split_dim], names, count)

        def compress(wide: jax.Array, leaf_key: jax.Array | None) -> _Pair:
            chunks = stack_parts(wide, split_dim, count)
            total, remainder = _sum_quantized(chunks, names, wire_dtype, block_size, leaf_key)
            return total, join_parts(remainder, split_dim)

        exact = partial(basic.reduce_scatter, axis=names, dim=split_dim)
        return _straight_through(exact, compress, vary(leaf, names), vary(residual, names), leaf_key)

    return _map_with_residuals(where, scatter_leaf, x, residual, names, key)


@partial(typed, where="compressed.reduce_scatter_two_level")
def reduce_scatter_two_level(
    x: Arrays,
    inner: Axis,
    outer: Axis,
    residual: Arrays | None = None,
    *,
    dim: int = 0,
    dtype: WireDType,
    inner_dtype: WireDType | None = None,
    block: int | None = None,
    key: Key | None = None,
) -> tuple[Any, Any]:
    """Sums over both axes, compressed over the slow links, or over both; each device gets its shard along `dim`.

    First it sums over the inner axis: in float32, or in `inner_dtype`, and then every device sends chunks to every
    other. It quantizes the partial sums, and sends them over the outer axis: 1/I of the bytes that one level over both
    axes sends there.

    Layout: `X[.., D, ..] {U_inner, U_outer} -> X[.., D_(outer,inner), ..]`
    Args:
        x: pytree of floating-point arrays of the whole size.
        inner: the axis (or axes) of the fast links, I devices.
        outer: the axis (or axes) of the slow links, O devices; major in the order.
        residual: as for reduce_scatter; each device keeps the error of its second rounding too.
        dim: the dim to split; its size must be divisible by I * O.
        dtype: the dtype over the outer axis, as for all_gather.
        inner_dtype: the dtype over the inner axis; None for an uncompressed reduce_scatter in float32.
        block, key: as for all_gather; both roundings have draws of their own.

    Returns:
        The shards of the sums, in the dtypes of x, 1 / (I * O) of the input's size along `dim`, in the order of
        `(outer, inner)`; and the new residual, or None. Derivatives and non-finite elements are as in reduce_scatter.

    Raises:
        ValueError: as for reduce_scatter, or an axis in both.
        TypeError: leaves that are not floating-point.

    Cost: inner Q (I-1) bytes, Q = cost.quantized_bytes of 1/I of the elements, or of 4 bytes each; outer Q (O-1) bytes,
    Q = cost.quantized_bytes of 1/(I O) of the elements.

    Example:
        >>> from shardkit.collectives.compressed import reduce_scatter_two_level
        >>> def rows(g):
        ...     return reduce_scatter_two_level(g, inner="model", outer="data", dtype=jnp.int8)[0]
        >>> print(jax.shard_map(rows, mesh=mesh, in_specs=P(), out_specs=P(("data", "model")))(jnp.arange(8.0)))
        [ 0.  8. 16. 24. 32. 40. 48. 56.]

    Source: Wang et al., ZeRO++ (2023), section 3.3.
    """
    where = "compressed.reduce_scatter_two_level"
    fast = bound(where, inner)
    slow = bound(where, outer)
    names = bound(where, (*slow, *fast))  # refuses an axis that is in both
    outer_wire_dtype = check_dtype(where, "dtype", dtype)
    outer_block = choose_block(where, outer_wire_dtype, block)
    inner_wire_dtype = None
    inner_block = outer_block
    if inner_dtype is not None:
        inner_wire_dtype = check_dtype(where, "inner_dtype", inner_dtype)
        inner_block = choose_block(where, inner_wire_dtype, block)
    _check_leaves(where, "hierarchical.reduce_scatter", x)
    devices = axis_size(fast)  # of one machine
    machines = axis_size(slow)

    def scatter_leaf(leaf: jax.Array, residual: jax.Array | None, leaf_key: jax.Array | None) -> _Pair:
        split_dim = dim_of(where, dim, leaf.ndim)
        divides(where, split_dim, leaf.shape[split_dim], names, machines * devices)

        # Worked example: O = 2 machines of I = 4 devices, and a leaf of 8 chunks in the order of the shards. Device 1
        # of either machine sums chunks 1 and 5 over its machine: they are the shards of device 1 of machine 0, and of
        # device 1 of machine 1. The two machines' sums differ. They are quantized and exchanged over the slow links:
        # machine 0 gets both sums of chunk 1, machine 1 both sums of chunk 5, and each adds them.
        def compress(wide: jax.Array, leaf_key: jax.Array | None) -> _Pair:
            inner_key, outer_key = _split_key(leaf_key)
            chunks = stack_parts(wide, split_dim, machines * devices)
            by_machine = chunks.reshape(machines, devices, *chunks.shape[1:])
            by_device = by_machine.swapaxes(0, 1)
            if inner_wire_dtype is None:
                machine_sums = basic.scatter_array(by_device, fast, 0)[0]
                remainder = jnp.zeros_like(by_device)
            else:
                machine_sums, remainder = _sum_quantized(by_device, fast, inner_wire_dtype, inner_block, inner_key)
            total, outer_remainder = _sum_quantized(machine_sums, slow, outer_wire_dtype, outer_block, outer_key)
            # What the second rounding leaves out belongs to the sum of a machine. Only the device that rounded keeps
            # it; if all devices of the machine kept it, the next step would add it I times.
            remainder = _add_to_own_chunk(remainder, outer_remainder, fast)
            remainder = remainder.swapaxes(0, 1).reshape(chunks.shape)
            return total, join_parts(remainder, split_dim)

        exact = partial(hierarchical.reduce_scatter, inner=fast, outer=slow, dim=split_dim)
        return _straight_through(exact, compress, vary(leaf, names), vary(residual, names), leaf_key)

    return _map_with_residuals(where, scatter_leaf, x, residual, names, key)


@partial(typed, where="compressed.all_reduce")
def all_reduce(
    x: Arrays,
    axis: Axis,
    residual: Arrays | None = None,
    *,
    dtype: WireDType,
    block: int | None = None,
    compress_result: bool = False,
    key: Key | None = None,
) -> tuple[Any, Any]:
    """Sums each leaf over the devices of `axis`, and sends it in a small dtype.

    Every device sends each other device its chunk of x + residual, quantized; chunks are summed in float32; the
    sums are gathered in the dtype of x, or quantized again.

    Layout: `X[...] {U_a} -> X[...]`
    Args:
        x: pytree of floating-point arrays.
        axis: axis name or tuple of names.
        residual: as for reduce_scatter; each device keeps the error of its second rounding too.
        dtype, block, key: as for reduce_scatter; the second rounding has draws of its own.
        compress_result: gather the sums in `dtype` too.

    Returns:
        The sums, with the shapes and dtypes of x, invariant over `axis`; and the new residual, which varies over it, or
        None. Derivatives and non-finite elements are as in reduce_scatter.

    Raises:
        ValueError: an unbound axis, another `dtype`, a block of no elements or of another size than the format's, a
            residual of other shapes, or several keys.
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
    names = bound(where, axis)
    wire_dtype = check_dtype(where, "dtype", dtype)
    block_size = choose_block(where, wire_dtype, block)
    _check_leaves(where, "all_reduce", x)
    count = axis_size(names)

    def reduce_leaf(leaf: jax.Array, residual: jax.Array | None, leaf_key: jax.Array | None) -> _Pair:
        def compress(wide: jax.Array, leaf_key: jax.Array | None) -> _Pair:
            term_key, total_key = _split_key(leaf_key)
            chunks, restore = _make_chunks(wide, count)
            total, remainder = _sum_quantized(chunks, names, wire_dtype, block_size, term_key)
            if compress_result:
                totals = _gather_quantized(total, names, wire_dtype, block_size, True, total_key)
                # All devices read the sum of this chunk as it was rounded. What is missing there, this device alone
                # knows, and adds to what it sends the next time.
                rounding = total - totals[axis_index(names)]
                remainder = _add_to_own_chunk(remainder, rounding, names)
            else:
                # Cast before it is sent: a bfloat16 leaf is gathered in bfloat16, and not in the float32 of its sum.
                total = total.astype(leaf.dtype)
                totals = basic.gather_array(total[None], names, 0, replicated=True)
            return restore(totals), restore(remainder)

        exact = partial(basic.all_reduce, axis=names)
        return _straight_through(exact, compress, vary(leaf, names), vary(residual, names), leaf_key)

    return _map_with_residuals(where, reduce_leaf, x, residual, names, key)


def _gather_quantized(
    x: jax.Array,
    names: _Names,
    dtype: str,
    block: int,
    replicated: bool,
    key: jax.Array | None,
) -> jax.Array:
    """The float32 arrays [...] of all devices as [n, ...], each decoded from its message, this device's own too."""
    # Encoded before the gather and decoded after it: each device sends its shard in the small dtype once, and it is
    # rounded once, not at each hop.
    message = encode(x[None], dtype, block, key)
    messages = basic.all_gather(message, names, replicated=replicated)
    return decode(messages, x.shape, dtype, block)


def _sum_quantized(
    x: jax.Array,
    names: _Names,
    dtype: str,
    block: int,
    key: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """From float32 [n, ...] on every device, the sum of this device's chunk, [...]; and what was not sent, [n, ...].

    Each chunk is sent to the device that sums it, and is decoded there before it is added. On a ring, sums in a small
    dtype would be rounded at every hop.
    """
    messages = encode(x, dtype, block, key)
    arrivals = basic.all_to_all(messages, names, split_dim=0, concat_dim=0)
    terms = decode(arrivals, x.shape[1:], dtype, block)
    total = jnp.sum(terms, axis=0)
    # Decoded from the message, as the receiver does: the residual is what is missing there, in every bit.
    remainder = x - decode(messages, x.shape[1:], dtype, block)
    return total, remainder


def _check_leaves(where: str, uncompressed: str, x: Any) -> None:
    """Refuses leaves that are not floating-point; the error names the `uncompressed` function."""
    for leaf in jax.tree.leaves(x):
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"{where}: every leaf must be floating-point; got {dtype}. Use {uncompressed} for it.")


def _map_with_residuals(
    where: str,
    reduce_leaf: Callable[[jax.Array, Any, jax.Array | None], _Pair],
    x: Any,
    residual: Any,
    names: _Names,
    key: jax.Array | None,
) -> tuple[Any, Any]:
    """The results of `reduce_leaf` for each leaf, its residual and its key; and the new residuals, or None."""
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, x))
    residuals = [None] * len(leaves)
    if residual is not None:
        _check_residual(where, leaves, structure, residual)
        residuals = jax.tree.leaves(residual)
    keys = _make_leaf_keys(where, key, names, len(leaves))
    sums = []
    remainders = []
    for leaf, leaf_residual, leaf_key in zip(leaves, residuals, keys, strict=True):
        total, remainder = reduce_leaf(leaf, leaf_residual, leaf_key)
        sums.append(total)
        remainders.append(remainder)
    sum_tree = jax.tree.unflatten(structure, sums)
    if residual is None:
        return sum_tree, None
    return sum_tree, jax.tree.unflatten(structure, remainders)


def _make_leaf_keys(where: str, key: jax.Array | None, names: _Names, count: int) -> Sequence[jax.Array | None]:
    """A key for each of `count` leaves, or None for each."""
    if key is None:
        return [None] * count
    check_single(where, key)
    # Folded over the axes over which messages go, and no other. The devices of these axes send different values: with
    # the same draws their errors would not average out. Along another axis they may have the same x, and must send the
    # same.
    device_key = fold_axes(key, names)
    return [jax.random.fold_in(device_key, number) for number in range(count)]


def _split_key(key: jax.Array | None) -> tuple[jax.Array | None, jax.Array | None]:
    """Keys for two roundings, one after the other."""
    if key is None:
        return None, None
    return jax.random.fold_in(key, 0), jax.random.fold_in(key, 1)


def _check_residual(where: str, leaves: list[jax.Array], structure: Any, residual: Any) -> None:
    types = []
    for leaf in jax.tree.leaves(residual):
        types.append(f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}")
    shapes = [str(list(leaf.shape)) for leaf in leaves]
    correct_types = [f"float32{shape}" for shape in shapes]
    if jax.tree.structure(residual) != structure or types != correct_types:
        raise ValueError(
            f"{where}: residual must be a pytree like x of float32 arrays of the same shapes; "
            f"got {', '.join(types) or 'none'} for shapes {', '.join(shapes) or 'none'}. Begin with "
            "zeros: jax.tree.map(lambda leaf: jnp.zeros_like(leaf, jnp.float32), x)."
        )


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _straight_through(
    exact: Callable[[jax.Array], jax.Array],
    compress: Callable[[jax.Array, jax.Array | None], _Pair],
    x: jax.Array,
    residual: jax.Array | None,
    key: jax.Array | None,
) -> _Pair:
    """`compress` of x + residual in float32, in the dtype of x; its derivative is the derivative of `exact`."""
    # Without an element a block has no largest one, from which its scale follows.
    if not x.size:
        return exact(x), residual
    wide = x.astype(jnp.float32)
    if residual is not None:
        wide = wide + residual
    result, remainder = compress(wide, key)
    return result.astype(x.dtype), remainder


@_straight_through.defjvp
def _differentiate_straight_through(exact: Any, compress: Any, primals: Any, tangents: Any) -> Any:
    # The derivative of a rounding is zero almost everywhere, and would leave a loss without a gradient.
    x, residual, key = primals
    dx, dresidual, _ = tangents
    result, remainder = _straight_through(exact, compress, x, residual, key)
    if dresidual is not None:
        dx = dx + dresidual.astype(dx.dtype)
    dresult = exact(dx)
    dremainder = jax.tree.map(jnp.zeros_like, remainder)
    return (result, remainder), (dresult, dremainder)


def _make_chunks(x: jax.Array, count: int) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """`x` in `count` equal chunks, padded if no dim divides; and the inverse for arrays of the same shape."""
    for dim, size in enumerate(x.shape):
        if size % count == 0:  # flattened, it takes the TPU compiler much longer
            return stack_parts(x, dim, count), partial(join_parts, dim=dim)
    padded = jnp.pad(x.ravel(), (0, -x.size % count))

    def restore(chunks: jax.Array) -> jax.Array:
        return chunks.ravel()[: x.size].reshape(x.shape)

    return padded.reshape(count, -1), restore


def _add_to_own_chunk(x: jax.Array, y: jax.Array, names: _Names) -> jax.Array:
    """`y` added to the chunk of `x`, [n, ...], that this device sums."""
    return x.at[axis_index(names)].add(y)
