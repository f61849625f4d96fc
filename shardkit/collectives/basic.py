"""Collectives for use inside shard_map, over pytrees and over one axis or several.

Over a tuple of axes the first is major, as in a PartitionSpec. A value that is invariant over an axis counts as one
equal copy per device. Costs are bytes sent per device, for n devices and an input of B bytes on each.
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
from shardkit.collectives.axes import axis_size, countable, vary
from shardkit.collectives.deterministic import blocks_sum
from shardkit.collectives.tables import execute
from shardkit.collectives.tables.table import SendTable

Op = Literal["sum", "mean", "max", "min", "any", "all"]


@typed
def all_reduce(
    x: Arrays, axis: Axis, *, op: Op = "sum", deterministic: bool = False, table: SendTable | None = None
) -> Any:
    """Reduces each leaf over the devices of `axis`; every device gets the result.

    Layout: `X[...] {U_a} -> X[...]`
    Args:
        x: pytree of arrays.
        axis: axis name or tuple of names.
        op: "sum", "mean", "max" or "min", and "any" or "all" for booleans. Booleans count as integers for "sum" and
            "mean". The derivative of "max" and "min" goes to the elements that attain it, equal shares to ties.
        deterministic: sum in an order that only the data determine. Dim 0 of every leaf then counts this device's
            blocks and is summed too: `[blocks, ...] -> [...]`. The result has the same bits on every number of devices
            if the global number of blocks is fixed, each device has the same number of consecutive blocks, and each
            block's term is computed separately (under `lax.map`, not in one matmul).
        table: which device sends what to which, as one of `sk.tables`; None: as the compiler chooses. It adds in the
            dtype of x, message by message, and has no forward-mode derivative.

    Returns:
        Arrays of the same shapes (without dim 0 if deterministic), invariant over `axis`.

    Raises:
        ValueError: an unbound axis, another `op`, no blocks for a deterministic sum, or a table that is wrong, for
            another collective or number of devices, or with an op that is no sum.
        TypeError: "any" or "all" of a leaf that is not boolean, "max" or "min" of a complex one.

    Cost: 2 B (n-1)/n bytes in 2 (n-1) hops, as a ring sends it.
    With a table its `traffic`. The derivative of "max" and "min" sends as much again, at 4 bytes per element. A
    deterministic sum sends (q+1) P (n-1)/n bytes: P one block in float32, padded to a multiple of n elements, and q the
    number of blocks per device divided by its largest power-of-two factor; so 2 P (n-1)/n for 1, 2, 4, ... blocks per
    device.

    Example:
        >>> total = lambda x: sk.all_reduce(x, "model")
        >>> print(jax.shard_map(total, mesh=mesh, in_specs=P("model"), out_specs=P())(jnp.arange(8.0)))
        [12. 16.]
    """
    names = bound("all_reduce", axis)
    if deterministic and op not in ("sum", "mean"):
        raise ValueError(
            f"all_reduce: deterministic=True needs op 'sum' or 'mean'; got {op!r}. Leave deterministic out: the order "
            "changes no bit of this op."
        )
    if table is not None:
        if op not in ("sum", "mean") or deterministic:
            raise ValueError(
                f"all_reduce: a table adds in its own order, so it needs op 'sum' or 'mean' without deterministic; got "
                f"op={op!r}, deterministic={deterministic}. Leave table out."
            )
        execute.check_table("all_reduce", table, "all_reduce", names)

    def reduce(leaf: jax.Array) -> jax.Array:
        leaf = vary(leaf, names)
        if table is not None:
            total = execute.all_reduce(countable(leaf), names, table)
            return total / table.devices if op == "mean" else total
        if op in ("any", "all"):
            if leaf.dtype != bool:
                raise TypeError(f"all_reduce: op {op!r} needs booleans; got {leaf.dtype}. Compare first, as in x != 0.")
            return lax.pmax(leaf, names) if op == "any" else lax.pmin(leaf, names)
        if op in ("max", "min"):
            if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
                raise TypeError(f"all_reduce: op {op!r} needs an order; got {leaf.dtype}. Pass parts, or jnp.abs(x).")
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                return _extremum(leaf, names, op)
            return lax.pmax(leaf, names) if op == "max" else lax.pmin(leaf, names)
        if deterministic:
            total = blocks_sum(leaf, names)
            return total / (axis_size(names) * leaf.shape[0]) if op == "mean" else total
        return lax.psum(leaf, names) if op == "sum" else lax.pmean(leaf, names)

    return jax.tree.map(reduce, x)


@typed
def all_gather(x: Arrays, axis: Axis, *, dim: int = 0, replicated: bool = False, table: SendTable | None = None) -> Any:
    """Concatenates the devices' shards of each leaf along `dim`; every device gets the whole.

    Layout: `X[.., D_a, ..] -> X[.., D, ..]`
    Args:
        x: pytree of arrays, this device's shards.
        axis: axis name or tuple of names; shards are concatenated in the order of the device index.
        dim: the dim to concatenate along.
        replicated: return a result that is invariant over `axis`, as `out_specs=P()` requires. Its transpose slices an
            all-reduced cotangent; the default's transpose is a reduce_scatter, half the bytes.
        table: as for all_reduce. The derivative runs its transpose; replicated, it sends nothing.

    Returns:
        Arrays whose size along `dim` is n times the shard's.

    Raises:
        ValueError: an unbound axis, a `dim` the array does not have, or a table as for all_reduce.

    Cost: B (n-1) bytes in n-1 hops, B being one shard.
    With a table its `traffic`.

    Example:
        >>> whole = lambda x: sk.all_gather(x, "model", replicated=True)
        >>> print(jax.shard_map(whole, mesh=mesh, in_specs=P("model"), out_specs=P())(jnp.arange(4)))
        [0 1 2 3]
    """
    names = bound("all_gather", axis)
    if table is not None:
        execute.check_table("all_gather", table, "all_gather", names)

    def gather(leaf: jax.Array) -> jax.Array:
        at = dim_of("all_gather", dim, jnp.ndim(leaf))
        if table is not None:
            return execute.all_gather(leaf, names, at, replicated, table)
        piece = vary(leaf, names)
        if not leaf.shape[at]:  # jax refuses to gather empty arrays
            return jnp.zeros(leaf.shape, leaf.dtype) if replicated else piece
        piece, at = _without_unit_dims(piece, at)
        # Under vmap jax gathers over one axis at a time.
        for over in (names,) if compat.tracked_axes() & set(names) else reversed(names):
            if replicated:
                piece = compat.all_gather_replicated(piece, over, at)
            else:
                piece = lax.all_gather(piece, over, axis=at, tiled=True)
        return _with_unit_dims(piece, leaf, dim, at)

    return jax.tree.map(gather, x)


@typed
def reduce_scatter(
    x: Arrays, axis: Axis, *, dim: int = 0, op: Literal["sum", "mean"] = "sum", table: SendTable | None = None
) -> Any:
    """Reduces each leaf over the devices of `axis`; each device gets its shard of the result along `dim`.

    Layout: `X[.., D, ..] {U_a} -> X[.., D_a, ..]`
    Args:
        x: pytree of arrays of the whole size.
        axis: axis name or tuple of names.
        dim: the dim to split; its size must be divisible by n.
        op: "sum" or "mean". Booleans count as integers.
        table: as for all_reduce. The derivative runs its transpose.

    Returns:
        Arrays whose size along `dim` is 1/n of the input's.

    Raises:
        ValueError: an unbound axis, a `dim` the array does not have or that does not divide, another `op`, or a table
            as for all_reduce.

    Cost: B (n-1)/n bytes in n-1 hops.
    With a table its `traffic`.

    Example:
        >>> rows = lambda x: sk.reduce_scatter(x, "model")
        >>> print(jax.shard_map(rows, mesh=mesh, in_specs=P(), out_specs=P("model"))(jnp.arange(4.0)))
        [ 0.  4.  8. 12.]
    """
    names = bound("reduce_scatter", axis)
    count = axis_size(names)
    tracked = compat.tracked_axes()
    if table is not None:
        execute.check_table("reduce_scatter", table, "reduce_scatter", names)

    def scatter(leaf: jax.Array) -> jax.Array:
        at = dim_of("reduce_scatter", dim, jnp.ndim(leaf))
        divides("reduce_scatter", at, leaf.shape[at], names, count)
        piece = vary(countable(leaf), names)
        if table is not None:
            piece = execute.reduce_scatter(piece, names, at, table)
        elif leaf.shape[at]:  # jax refuses to scatter empty arrays
            piece, at = _without_unit_dims(piece, at)
            # Under vmap jax scatters over one axis at a time; the major axis first.
            for axes in [names] if tracked.issuperset(names) else names:
                piece = lax.psum_scatter(piece, axes, scatter_dimension=at, tiled=True)
            piece = _with_unit_dims(piece, leaf, dim, at)
        return piece / count if op == "mean" else piece

    return jax.tree.map(scatter, x)


# The TPU's compiler runs a reduce_scatter as an all_reduce, which sends twice as much, where the array has a dim of
# size 1 beside the one that is split. One sequence on a device is enough for that, in each block of sequence
# parallelism. Such dims are left out of what is sent, also of what is gathered, whose gradient is scattered.


def _without_unit_dims(x: jax.Array, dim: int) -> tuple[jax.Array, int]:
    """The array without other dims of size 1 than this one, and where this one then is."""
    left_out = [d for d, size in enumerate(x.shape) if size == 1 and d != dim]
    return lax.squeeze(x, left_out), dim - sum(d < dim for d in left_out)


def _with_unit_dims(piece: jax.Array, x: jax.Array, dim: int, at: int) -> jax.Array:
    """With the dims of size 1 that x has: its shape, but for the size of `dim`, which is dim `at` of the piece."""
    shape = list(x.shape)
    shape[dim] = piece.shape[at]
    return piece.reshape(shape)


@typed
def all_to_all(x: Arrays, axis: Axis, *, split_dim: int, concat_dim: int) -> Any:
    """Splits each leaf along `split_dim`, sends piece j to device j, and concatenates what arrives along `concat_dim`.

    Layout: `X[A_a, B] -> X[A, B_a]` for split_dim=1, concat_dim=0
    Args:
        x: pytree of arrays.
        axis: axis name or tuple of names.
        split_dim: the dim to split; its size must be divisible by n.
        concat_dim: the dim to concatenate along, in the order of the senders.

    Returns:
        Arrays with `split_dim` n times smaller and `concat_dim` n times larger (the same shape if both are one dim).

    Raises:
        ValueError: an unbound axis, a dim the array does not have, or one that does not divide.

    Cost: B (n-1)/n bytes, to n-1 other devices.

    Example:
        >>> columns = lambda x: sk.all_to_all(x, "model", split_dim=1, concat_dim=0)
        >>> y = jax.shard_map(columns, mesh=mesh, in_specs=P("model"), out_specs=P(None, "model"))(jnp.ones((4, 8)))
        >>> print(sk.local_shape(y.shape, y.sharding.spec, mesh))
        (4, 2)
    """
    names = bound("all_to_all", axis)
    count = axis_size(names)
    tracked = compat.tracked_axes()

    def exchange(leaf: jax.Array) -> jax.Array:
        split = dim_of("all_to_all", split_dim, jnp.ndim(leaf), "split_dim")
        concat = dim_of("all_to_all", concat_dim, jnp.ndim(leaf), "concat_dim")
        divides("all_to_all", split, leaf.shape[split], names, count)
        leaf = vary(leaf, names)
        if not tracked.issuperset(names):  # under vmap jax adds a dim to the result of an unbatched value
            leaf = jnp.where(lax.axis_index(names) >= 0, leaf, leaf)
        return lax.all_to_all(leaf, names, split, concat, tiled=True)

    return jax.tree.map(exchange, x)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _extremum(x: jax.Array, names: tuple[str, ...], op: str) -> jax.Array:
    """The elementwise "max" or "min"; its derivative is split equally among the devices that attain it."""
    return lax.pmax(x, names) if op == "max" else lax.pmin(x, names)


@_extremum.defjvp
def _extremum_jvp(names: tuple[str, ...], op: str, primals: Any, tangents: Any) -> Any:
    (x,), (dx,) = primals, tangents
    out = _extremum(x, names, op)
    attained = x == out
    ties = lax.psum(attained.astype(jnp.float32), names)  # bfloat16 counts no further than 256
    return out, lax.psum(jnp.where(attained, dx / ties.astype(dx.dtype), jnp.zeros_like(dx)), names)
