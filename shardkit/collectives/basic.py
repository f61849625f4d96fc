"""Collectives for use inside shard_map, over pytrees and over one axis or several.

Over a tuple of axes the first one is major, as in a PartitionSpec. A value that is already equal on all devices of an
axis is treated as that many equal copies, so that every kernel means the same as over a Python list of blocks.
Costs are bytes sent by each device, for n devices and an input of B bytes on each.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit import _compat
from shardkit._check import Axis, bound, dim_of, divides, member
from shardkit._kinds import Arrays
from shardkit._typed import typed
from shardkit.collectives._derivatives import extremum, from_source
from shardkit.collectives.deterministic import blocks_sum

Op = Literal["sum", "mean", "max", "min", "any", "all"]
OPS = ("sum", "mean", "max", "min", "any", "all")


@typed
def axis_size(axis: Axis) -> int:
    """Number of devices along `axis` (the product over a tuple); a Python integer, nothing is sent."""
    known = _compat.bound_axes()
    return math.prod(known[name] for name in bound("axis_size", axis))


@typed
def axis_index(axis: Axis) -> jax.Array:
    """This device's place along `axis` (int32 scalar); over a tuple the joint index, the first axis major."""
    return lax.axis_index(bound("axis_index", axis))


@typed
def vary(tree: Arrays | None, axes: Axis | tuple[()]) -> Any:
    """Marks every leaf as varying over `axes`; what already varies is left alone, and nothing is sent.

    Differentiating with respect to a marked value gives this device's own gradient, and leaves the reduction to be
    written where a reader can see it. The transpose of the cast is a sum over the axes it added.

    Layout: `X[...] -> X[...] {varying over axes}`
    Args:
        tree: pytree of arrays.
        axes: axis name, tuple of names, or `()`.

    Returns:
        The same values, typed as varying.

    Raises:
        ValueError: an axis that is not bound here, or named twice.

    Cost: none.
    """
    tracked = _compat.tracked_axes()
    names = tuple(name for name in bound("vary", axes) if name in tracked) if axes != () else ()

    def cast(x: Any) -> jax.Array:
        missing = tuple(name for name in names if name not in _compat.varying_axes(x))
        return _compat.cast_varying(x, missing) if missing else x

    return jax.tree.map(cast, tree)


@typed
def all_reduce(x: Arrays, axis: Axis, *, op: Op = "sum", deterministic: bool = False) -> Any:
    """Reduces each leaf over the devices of `axis`; every device gets the result.

    Layout: `X[...] {U_a} -> X[...]`
    Args:
        x: pytree of arrays.
        axis: axis name or tuple of names.
        op: "sum", "mean", "max" or "min", and "any" or "all" for booleans. Booleans count as integers for "sum" and
            "mean". The derivative of "max" and "min" goes to the elements that attain it, equal shares to ties.
        deterministic: sum in an order that the data alone fix. Dim 0 of every leaf then counts this device's blocks
            and is summed too: `[blocks, ...] -> [...]`. Cut the data into a fixed number of global blocks, the same
            number on each device in the order of its index, compute one term for each block by itself (under
            `lax.map`, not in one matmul for all), and the bits do not depend on how many devices share them.

    Returns:
        Arrays of the same shapes (without dim 0 if deterministic), typed as equal over `axis`.

    Raises:
        ValueError: an unbound axis, another `op`, or no blocks for a deterministic sum.
        TypeError: "any" or "all" of something else than booleans.

    Cost: 2 B (n-1)/n bytes in 2 (n-1) hops, as a ring sends it.
    The derivative of "max" and "min" sends as much again, at 4 bytes an element. A deterministic sum sends
    (q+1) P (n-1)/n bytes: P one block in float32, padded to a multiple of n elements, and q its number of blocks a
    device divided by the largest power of two in it; so 2 P (n-1)/n for 1, 2, 4, ... blocks a device.
    """
    names = bound("all_reduce", axis)
    if op not in OPS:
        raise ValueError(
            f"all_reduce: op must be 'sum', 'mean', 'max', 'min', 'any' or 'all'; got {op!r}. Choose one of them."
        )
    if deterministic and op not in ("sum", "mean"):
        raise ValueError(
            f"all_reduce: deterministic must go with op 'sum' or 'mean'; got {op!r}. "
            "Leave it out: the other results do not depend on the order."
        )

    def reduce(leaf: jax.Array) -> jax.Array:
        leaf = vary(leaf, names)
        if op in ("any", "all"):
            if leaf.dtype != bool:
                raise TypeError(
                    f"all_reduce: op {op!r} must be given booleans; got {leaf.dtype}. Compare first, as in x != 0."
                )
            return lax.pmax(leaf, names) if op == "any" else lax.pmin(leaf, names)
        if op in ("max", "min"):
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                return extremum(leaf, names, op)
            return lax.pmax(leaf, names) if op == "max" else lax.pmin(leaf, names)
        if deterministic:
            total = blocks_sum(leaf, names)
            return total / (axis_size(names) * leaf.shape[0]) if op == "mean" else total
        return lax.psum(leaf, names) if op == "sum" else lax.pmean(leaf, names)

    return jax.tree.map(reduce, x)


@typed
def all_gather(x: Arrays, axis: Axis, *, dim: int = 0, replicated: bool = False) -> Any:
    """Joins the devices' pieces of each leaf along dimension `dim`; every device gets the whole.

    Layout: `X[.., D_a, ..] -> X[.., D, ..]`
    Args:
        x: pytree of arrays, a piece on each device.
        axis: axis name or tuple of names; pieces are joined in the order of the device's index.
        dim: the dimension to join along.
        replicated: type the result as equal over `axis`, which `out_specs=P()` needs. Its transpose takes a slice of
            a summed cotangent; the default's transpose is a reduce_scatter, half the bytes.

    Returns:
        Arrays whose size along `dim` is n times the piece's.

    Raises:
        ValueError: an unbound axis, or a `dim` the array does not have.

    Cost: B (n-1) bytes in n-1 hops, B being one piece.
    """
    names = bound("all_gather", axis)

    def gather(leaf: jax.Array) -> jax.Array:
        at = dim_of("all_gather", dim, jnp.ndim(leaf))
        piece = vary(leaf, names)
        if not leaf.shape[at]:  # jax cannot gather nothing
            return jnp.zeros(leaf.shape, leaf.dtype) if replicated else piece
        # under vmap jax gathers over one axis at a time
        for over in (names,) if _compat.tracked_axes() & set(names) else reversed(names):
            if replicated:
                piece = _compat.all_gather_replicated(piece, over, at)
            else:
                piece = lax.all_gather(piece, over, axis=at, tiled=True)
        return piece

    return jax.tree.map(gather, x)


@typed
def reduce_scatter(x: Arrays, axis: Axis, *, dim: int = 0, op: Literal["sum", "mean"] = "sum") -> Any:
    """Reduces each leaf over the devices of `axis`; each device gets its piece along dimension `dim`.

    Layout: `X[.., D, ..] {U_a} -> X[.., D_a, ..]`
    Args:
        x: pytree of arrays of the whole size.
        axis: axis name or tuple of names.
        dim: the dimension to split; its size must be divisible by n.
        op: "sum" or "mean". Booleans count as integers.

    Returns:
        Arrays whose size along `dim` is 1/n of the input's.

    Raises:
        ValueError: an unbound axis, a `dim` the array does not have or that does not divide, or another `op`.

    Cost: B (n-1)/n bytes in n-1 hops.
    """
    names = bound("reduce_scatter", axis)
    count = axis_size(names)
    if op not in ("sum", "mean"):
        raise ValueError(f"reduce_scatter: op must be 'sum' or 'mean'; got {op!r}. Choose one of them.")
    tracked = _compat.tracked_axes()

    def scatter(leaf: jax.Array) -> jax.Array:
        at = dim_of("reduce_scatter", dim, jnp.ndim(leaf))
        divides("reduce_scatter", at, leaf.shape[at], names, count)
        if leaf.dtype == bool:  # as psum does by itself
            leaf = leaf.astype(jnp.int32)
        piece = vary(leaf, names)
        if leaf.shape[at]:  # jax cannot scatter nothing
            # Under vmap jax cannot scatter over a tuple of axes: there one after the other, the major one first.
            for axes in [names] if tracked.issuperset(names) else names:
                piece = lax.psum_scatter(piece, axes, scatter_dimension=at, tiled=True)
        return piece / count if op == "mean" else piece

    return jax.tree.map(scatter, x)


@typed
def all_to_all(x: Arrays, axis: Axis, *, split_dim: int, concat_dim: int) -> Any:
    """Splits each leaf along `split_dim`, sends piece j to device j, and joins what arrives along `concat_dim`.

    Layout: `X[A_a, B] -> X[A, B_a]` for split_dim=1, concat_dim=0
    Args:
        x: pytree of arrays.
        axis: axis name or tuple of names.
        split_dim: the dimension to split; its size must be divisible by n.
        concat_dim: the dimension along which the pieces are joined, in the order of their senders.

    Returns:
        Arrays with `split_dim` n times smaller and `concat_dim` n times larger (the same shape if they are one).

    Raises:
        ValueError: an unbound axis, a dimension the array does not have, or one that does not divide.

    Cost: B (n-1)/n bytes, to n-1 other devices.
    """
    names = bound("all_to_all", axis)
    count = axis_size(names)
    tracked = _compat.tracked_axes()

    def exchange(leaf: jax.Array) -> jax.Array:
        split = dim_of("all_to_all", split_dim, jnp.ndim(leaf), "split_dim")
        concat = dim_of("all_to_all", concat_dim, jnp.ndim(leaf), "concat_dim")
        divides("all_to_all", split, leaf.shape[split], names, count)
        leaf = vary(leaf, names)
        if not tracked.issuperset(names):  # under vmap jax gives a value that is equal everywhere one dim too many
            leaf = jnp.where(lax.axis_index(names) >= 0, leaf, leaf)
        return lax.all_to_all(leaf, names, split, concat, tiled=True)

    return jax.tree.map(exchange, x)


@typed
def shift(x: Arrays, axis: Axis, *, by: int = 1, wrap: bool = True) -> Any:
    """Sends each leaf `by` places up along `axis`: device i gets what device i - by held.

    Layout: `X[...] on device i -> X[...] on device i + by`
    Args:
        x: pytree of arrays.
        axis: axis name or tuple of names (then along the joint index).
        by: number of places, negative for the other way.
        wrap: a ring, in which the last device sends to the first; without it the ends receive zeros.

    Returns:
        Arrays of the same shapes.

    Raises:
        ValueError: an unbound axis.

    Cost: B bytes in one step (min(by, n - by) hops round a ring); nothing where by is a multiple of n.
    """
    names = bound("shift", axis)
    count = axis_size(names)
    if wrap:
        pairs = [(i, (i + by) % count) for i in range(count)]
    else:
        pairs = [(i, i + by) for i in range(count) if 0 <= i + by < count]
    if pairs == [(i, i) for i in range(count)]:
        return vary(x, names)
    if not _compat.tracked_axes() & set(names):
        # Under vmap jax refuses a ppermute in which some device sends nothing, or over several axes.
        sender = lax.axis_index(names) - by
        arrives = wrap | ((sender >= 0) & (sender < count))

        def take(leaf: jax.Array) -> jax.Array:
            whole = all_gather(leaf[None], names)
            return jnp.where(arrives, whole[sender % count], jnp.zeros_like(leaf))

        return jax.tree.map(take, x)
    return permuted(x, names, pairs)


@typed
def broadcast(x: Arrays, axis: Axis, *, source: int = 0) -> Any:
    """Every device of `axis` gets what device `source` holds.

    Layout: `X[...] on device source -> X[...]`
    Args:
        x: pytree of arrays; only the source's values matter, so the others may hold NaN.
        axis: axis name or tuple of names (then `source` is a joint index).
        source: index of the sending device, 0 <= source < n.

    Returns:
        Arrays of the same shapes, dtypes and bits, typed as equal over `axis`.

    Raises:
        ValueError: an unbound axis, or a source outside the axis.

    Cost: 2 B (n-1)/n bytes in 2 (n-1) hops: a masked all_reduce, which is what types the result as equal.
    """
    names = bound("broadcast", axis)
    member("broadcast", "source", source, axis_size(names))
    return jax.tree.map(lambda leaf: from_source(vary(leaf, names), names, source), x)


def permuted(x: Any, names: tuple[str, ...], pairs: list[tuple[int, int]]) -> Any:
    """Sends each leaf from source to target, given as pairs of joint indices over `names`, the first one major."""
    ordered, pairs = _in_mesh_order(names, pairs)
    return jax.tree.map(lambda leaf: lax.ppermute(vary(leaf, names), ordered, pairs), x)


def _in_mesh_order(
    names: tuple[str, ...], pairs: list[tuple[int, int]]
) -> tuple[tuple[str, ...], list[tuple[int, int]]]:
    """The axes in mesh order, and pairs of joint indices over `names` as joint indices over those.

    Of all collectives, ppermute alone ignores the order of the names and counts devices in mesh order (jax 0.12
    refuses names in another order).
    """
    known = _compat.bound_axes()
    ordered = tuple(name for name in known if name in names)

    def place(index: int) -> int:
        at = dict(zip(names, np.unravel_index(index, [known[name] for name in names]), strict=True))
        return int(np.ravel_multi_index([at[name] for name in ordered], [known[name] for name in ordered]))

    return ordered, [(place(source), place(target)) for source, target in pairs]
