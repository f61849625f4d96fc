"""Sizes that do not divide: padding, and collectives over shards of different sizes.

Zeros are appended to the dim, up to the next multiple of the axis size. Where the true sizes differ between devices,
every device's shard is padded to the largest; padding is never read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from shardkit._arguments.checks import Axis, dim_of, name_axes
from shardkit._arguments.typed import Arrays, typed
from shardkit._jax.compat import bound
from shardkit.collectives.axes import as_numbers, axis_size
from shardkit.collectives.basic import gather_array, scatter_array


@typed
def pad_to_axis(x: Arrays, axis: Axis, *, dim: int = 0) -> Any:
    """Pads each leaf with zeros at the end of `dim` up to the next multiple of the size of `axis`.

    Layout: `X[.., D, ..] -> X[.., n ceil(D/n), ..]`
    Args:
        x: pytree of arrays.
        axis: axis name or tuple of names.
        dim: the dim to pad.

    Returns:
        Arrays whose size along `dim` is a multiple of n; unchanged if it already is.

    Raises:
        ValueError: an unbound axis, or a `dim` the array does not have.

    Cost: none.

    Example:
        >>> mean = lambda x: sk.reduce_scatter(sk.collectives.pad_to_axis(x, "model"), "model", op="mean")
        >>> print(jax.shard_map(mean, mesh=mesh, in_specs=P(), out_specs=P("model"))(jnp.arange(1.0, 7.0)))
        [1. 2. 3. 4. 5. 6. 0. 0.]
    """
    count = axis_size(bound("pad_to_axis", axis))

    # 6 rows over 4 devices: 2 rows of zeros. Zeros add nothing to a sum, but they count in a mean over rows.
    def pad_leaf(leaf: jax.Array) -> jax.Array:
        padded_dim = dim_of("pad_to_axis", dim, jnp.ndim(leaf))
        return _pad_end(leaf, padded_dim, -leaf.shape[padded_dim] % count)

    return jax.tree.map(pad_leaf, x)


@typed
def unpad_from_axis(x: Arrays, size: int, *, dim: int = 0) -> Any:
    """Removes the padding of pad_to_axis: returns the first `size` rows of each leaf.

    Layout: `X[.., P, ..] -> X[.., size, ..]`
    Args:
        x: pytree of arrays.
        size: the true size along `dim`.
        dim: the padded dim.

    Returns:
        Arrays of size `size` along `dim`.

    Raises:
        ValueError: a `dim` the array does not have, or a size larger than the array's.

    Cost: none.

    Example:
        >>> print(sk.collectives.unpad_from_axis(jnp.array([1, 2, 3, 0]), 3))
        [1 2 3]
    """

    def unpad_leaf(leaf: jax.Array) -> jax.Array:
        padded_dim = dim_of("unpad_from_axis", dim, jnp.ndim(leaf))
        if not 0 <= size <= leaf.shape[padded_dim]:
            raise ValueError(
                f"unpad_from_axis: size must be from 0 to the size of dim {padded_dim}; got {size} for shape "
                f"{leaf.shape}. Pass the size before padding."
            )
        return lax.slice_in_dim(leaf, 0, size, axis=padded_dim)

    return jax.tree.map(unpad_leaf, x)


@typed
def all_gather_uneven(
    x: Arrays,
    sizes: Sequence[int],
    axis: Axis,
    *,
    dim: int = 0,
    replicated: bool = False,
) -> Any:
    """Concatenates shards of different sizes along `dim`; every device gets the whole array, without padding.

    Layout: `X[.., max(sizes), ..] -> X[.., sum(sizes), ..]`
    Args:
        x: pytree of arrays, this device's shards, padded to max(sizes) with any values.
        sizes: each device's true size along `dim`, the same static tuple on all devices.
        axis: axis name or tuple of names; shards are concatenated in the order of the device index.
        dim: the dim to concatenate along.
        replicated: return a result that is invariant over `axis`; see all_gather.

    Returns:
        Arrays of size sum(sizes) along `dim`.

    Raises:
        ValueError: an unbound axis, a `dim` the array does not have, or sizes that do not match the axis or the shards.

    Cost: B (n-1) bytes in n-1 hops, B being one padded shard.

    Example:
        >>> whole = lambda x: sk.collectives.all_gather_uneven(x, (1, 2), "data", replicated=True)
        >>> print(jax.shard_map(whole, mesh=mesh, in_specs=P("data"), out_specs=P())(jnp.array([5, 0, 6, 7])))
        [5 6 7]
    """
    where = "all_gather_uneven"
    names = bound(where, axis)
    sizes = _check_sizes(where, sizes, names)
    most = max(sizes)

    # sizes (1, 2): the shards [5 0 | 6 7] are gathered as they are, [5 0 6 7], and row 1 is cut out: [5 6 7].
    def gather_leaf(leaf: jax.Array) -> jax.Array:
        gathered_dim = dim_of(where, dim, jnp.ndim(leaf))
        _check_rows(where, leaf, gathered_dim, most, "max(sizes)", "Pad every device's piece to it.")
        padded = gather_array(leaf, names, gathered_dim, replicated=replicated)
        pieces = []
        for device, size in enumerate(sizes):
            start = device * most
            pieces.append(lax.slice_in_dim(padded, start, start + size, axis=gathered_dim))
        return jnp.concatenate(pieces, axis=gathered_dim)

    return jax.tree.map(gather_leaf, x)


@typed
def reduce_scatter_uneven(
    x: Arrays,
    sizes: Sequence[int],
    axis: Axis,
    *,
    dim: int = 0,
    op: Literal["sum", "mean"] = "sum",
) -> Any:
    """Reduces each leaf over the devices; device i gets its sizes[i] rows, padded with zeros to max(sizes).

    Layout: `X[.., sum(sizes), ..] {U_a} -> X[.., max(sizes), ..]`
    Args:
        x: pytree of arrays of the whole size.
        sizes: each device's true size along `dim`, the same static tuple on all devices.
        axis: axis name or tuple of names.
        dim: the dim to split, in the order of the device index.
        op: "sum" or "mean".

    Returns:
        Arrays of size max(sizes) along `dim`: you can pass them to all_gather_uneven.

    Raises:
        ValueError: an unbound axis, a `dim` the array does not have, sizes that do not match the axis or the array,
            or another `op`.

    Cost: P (n-1)/n bytes in n-1 hops, P being the padded array: n max(sizes) rows.

    Example:
        >>> rows = lambda x: sk.collectives.reduce_scatter_uneven(x, (1, 2), "data")
        >>> print(jax.shard_map(rows, mesh=mesh, in_specs=P(), out_specs=P("data"))(jnp.array([5, 6, 7])))
        [10  0 12 14]
    """
    where = "reduce_scatter_uneven"
    names = bound(where, axis)
    sizes = _check_sizes(where, sizes, names)
    most = max(sizes)

    # sizes (1, 2): the rows [5 6 7] are padded device by device, [5 0 6 7], so that an even scatter splits them right.
    def scatter_leaf(leaf: jax.Array) -> jax.Array:
        leaf = as_numbers(leaf)
        split_dim = dim_of(where, dim, jnp.ndim(leaf))
        _check_rows(where, leaf, split_dim, sum(sizes), "sum(sizes)", "Pass the true sizes.")
        pieces = []
        start = 0
        for size in sizes:
            piece = lax.slice_in_dim(leaf, start, start + size, axis=split_dim)
            pieces.append(_pad_end(piece, split_dim, most - size))
            start += size
        padded = jnp.concatenate(pieces, axis=split_dim)
        return scatter_array(padded, names, split_dim, op=op)

    return jax.tree.map(scatter_leaf, x)


def _pad_end(x: jax.Array, dim: int, rows: int) -> jax.Array:
    if not rows:
        return x
    widths = [(0, 0)] * x.ndim
    widths[dim] = (0, rows)
    return jnp.pad(x, widths)


def _check_sizes(where: str, sizes: Sequence[int], names: tuple[str, ...]) -> tuple[int, ...]:
    """The sizes as a tuple; refuses all but one size for each device."""
    sizes = tuple(sizes)
    count = axis_size(names)
    if len(sizes) != count or min(sizes) < 0:
        raise ValueError(
            f"{where}: sizes must be one size of at least 0 for each device of {name_axes(names)}; got {sizes} over "
            f"{count} devices. Pass the same tuple of {count} sizes on every device."
        )
    return sizes


def _check_rows(
    where: str,
    x: jax.Array,
    dim: int,
    rows: int,
    expression: str,
    remedy: str,
) -> None:
    if x.shape[dim] != rows:
        raise ValueError(
            f"{where}: dim {dim} must have {expression} = {rows} rows on every device; got shape {x.shape}. {remedy}"
        )


def split_flat(x: jax.Array, count: int) -> jax.Array:
    """All elements in equal parts, one for each of `count` devices: [count, rows, columns], zeros at the end.

    A leaf [3, 5] for 4 devices has 15 elements, is padded to 16, and becomes [4, 1, 4].

    Three dims, because the TPU's compiler scatters no lone dim: it sums a flat array, and sends it twice.
    """
    x = as_numbers(x)
    flat = jnp.pad(x.reshape(-1), (0, -x.size % count))
    part_size = flat.size // count
    columns = math.gcd(part_size, 128)
    return flat.reshape(count, part_size // columns, columns)


def join_flat(parts: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `split_flat`, for an array of this shape."""
    size = math.prod(shape)  # without the zeros
    return parts.reshape(-1)[:size].reshape(shape)
