"""Sizes that do not divide: padding, and collectives that take every device's true size.

The rule, the same everywhere: zeros at the end of the dim, up to the next multiple of the axis' size. With true sizes
that differ between the devices, every device's block is padded to the largest of them; padding is never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from shardkit._check import Axis, bound, dim_of, named
from shardkit._kinds import Arrays
from shardkit._typed import typed
from shardkit.collectives.basic import all_gather, axis_size, reduce_scatter


@typed
def pad_to_axis(x: Arrays, axis: Axis, *, dim: int = 0) -> Any:
    """Pads each leaf with zeros at the end of `dim` up to the next multiple of the size of `axis`.

    Layout: `X[.., D, ..] -> X[.., n ceil(D/n), ..]`
    Args:
        x: pytree of arrays.
        axis: axis name or tuple of names.
        dim: the dimension to pad.

    Returns:
        Arrays whose size along `dim` n divides; the same arrays where it does so already.

    Raises:
        ValueError: an unbound axis, or a `dim` the array does not have.

    Cost: none.
    """
    count = axis_size(bound("pad_to_axis", axis))

    def pad(leaf: jax.Array) -> jax.Array:
        at = dim_of("pad_to_axis", dim, jnp.ndim(leaf))
        return _padded(leaf, at, -leaf.shape[at] % count)

    return jax.tree.map(pad, x)


@typed
def unpad_from_axis(x: Arrays, size: int, *, dim: int = 0) -> Any:
    """Takes the padding off again: the first `size` rows of each leaf.

    Layout: `X[.., P, ..] -> X[.., size, ..]`
    Args:
        x: pytree of arrays.
        size: the true size along `dim`.
        dim: the dimension that was padded.

    Returns:
        Arrays of size `size` along `dim`.

    Raises:
        ValueError: a `dim` the array does not have, or a size that it does not hold.

    Cost: none.
    """

    def cut(leaf: jax.Array) -> jax.Array:
        at = dim_of("unpad_from_axis", dim, jnp.ndim(leaf))
        if not 0 <= size <= leaf.shape[at]:
            raise ValueError(
                f"unpad_from_axis: size must be 0 to the size of dim {at}; got {size} for shape {leaf.shape}. "
                "Pass the size before padding."
            )
        return lax.slice_in_dim(leaf, 0, size, axis=at)

    return jax.tree.map(cut, x)


@typed
def all_gather_uneven(x: Arrays, sizes: Sequence[int], axis: Axis, *, dim: int = 0, replicated: bool = False) -> Any:
    """Joins pieces of different sizes along `dim`; every device gets the whole, without padding.

    Layout: `X[.., max(sizes), ..] -> X[.., sum(sizes), ..]`
    Args:
        x: pytree of arrays, on each device a piece padded to max(sizes); the padding may hold anything.
        sizes: each device's true size along `dim`, the same static tuple on all devices.
        axis: axis name or tuple of names; pieces are joined in the order of the device's index.
        dim: the dimension to join along.
        replicated: type the result as equal over `axis`; see all_gather.

    Returns:
        Arrays of size sum(sizes) along `dim`.

    Raises:
        ValueError: an unbound axis, a `dim` the array does not have, or sizes that fit neither the axis nor the pieces.

    Cost: B (n-1) bytes in n-1 hops, B being one padded piece.
    """
    names, sizes = _sizes("all_gather_uneven", sizes, axis)
    most = max(sizes)

    def gather(leaf: jax.Array) -> jax.Array:
        at = dim_of("all_gather_uneven", dim, jnp.ndim(leaf))
        _holds("all_gather_uneven", leaf, at, most, "max(sizes)", "Pad every device's piece to it.")
        whole = all_gather(leaf, names, dim=at, replicated=replicated)
        pieces = [lax.slice_in_dim(whole, i * most, i * most + size, axis=at) for i, size in enumerate(sizes)]
        return jnp.concatenate(pieces, axis=at)

    return jax.tree.map(gather, x)


@typed
def reduce_scatter_uneven(
    x: Arrays, sizes: Sequence[int], axis: Axis, *, dim: int = 0, op: Literal["sum", "mean"] = "sum"
) -> Any:
    """Reduces each leaf over the devices; device i gets its sizes[i] rows, padded with zeros to max(sizes).

    Layout: `X[.., sum(sizes), ..] {U_a} -> X[.., max(sizes), ..]`
    Args:
        x: pytree of arrays of the whole size.
        sizes: each device's true size along `dim`, the same static tuple on all devices.
        axis: axis name or tuple of names.
        dim: the dimension to split, in the order of the device's index.
        op: "sum" or "mean".

    Returns:
        Arrays of size max(sizes) along `dim`; what all_gather_uneven takes.

    Raises:
        ValueError: an unbound axis, a `dim` the array does not have, sizes that fit neither the axis nor the array, or
            another `op`.

    Cost: P (n-1)/n bytes in n-1 hops, P being the padded array: n max(sizes) rows.
    """
    names, sizes = _sizes("reduce_scatter_uneven", sizes, axis)
    if op not in ("sum", "mean"):
        raise ValueError(f"reduce_scatter_uneven: op must be 'sum' or 'mean'; got {op!r}. Choose one of them.")
    most = max(sizes)

    def scatter(leaf: jax.Array) -> jax.Array:
        at = dim_of("reduce_scatter_uneven", dim, jnp.ndim(leaf))
        _holds("reduce_scatter_uneven", leaf, at, sum(sizes), "sum(sizes)", "Pass the true sizes.")
        pieces, start = [], 0
        for size in sizes:
            pieces.append(_padded(lax.slice_in_dim(leaf, start, start + size, axis=at), at, most - size))
            start += size
        return reduce_scatter(jnp.concatenate(pieces, axis=at), names, dim=at, op=op)

    return jax.tree.map(scatter, x)


def _padded(x: jax.Array, dim: int, rows: int) -> jax.Array:
    return jnp.pad(x, [(0, rows if d == dim else 0) for d in range(x.ndim)]) if rows else x


def _sizes(where: str, sizes: Sequence[int], axis: Axis) -> tuple[tuple[str, ...], tuple[int, ...]]:
    names, sizes = bound(where, axis), tuple(sizes)
    count = axis_size(names)
    if len(sizes) != count or min(sizes) < 0:
        raise ValueError(
            f"{where}: sizes must hold one size, 0 or more, for each device of {named(names)}; got {sizes} over "
            f"{count} devices. Pass the same tuple of {count} sizes on every device."
        )
    return names, sizes


def _holds(where: str, x: jax.Array, dim: int, size: int, what: str, remedy: str) -> None:
    if x.shape[dim] != size:
        raise ValueError(
            f"{where}: dim {dim} must have {what} = {size} rows on every device; got shape {x.shape}. {remedy}"
        )
