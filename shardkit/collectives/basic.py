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
from shardkit.collectives.axes import as_numbers, axis_size, vary
from shardkit.collectives.deterministic import sum_blocks
from shardkit.collectives.tables import execute
from shardkit.collectives.tables.table import SendTable

Op = Literal["sum", "mean", "max", "min", "any", "all"]
_Names = tuple[str, ...]

# What the backward pass sends. Each row is a linear function and its transpose, with the types that check_vma tracks:
# a value that varies over the axis may differ on each device, one that is invariant is the same on all.
#
# | forward                 | input -> result        | transpose                  | which sends, for n devices  |
# |-------------------------|------------------------|----------------------------|-----------------------------|
# | vary                    | invariant -> varying   | all_reduce                 | 2 B (n-1)/n                 |
# | all_reduce              | varying -> invariant   | vary                       | nothing                     |
# | all_gather              | varying -> varying     | reduce_scatter             | B (n-1), B one shard        |
# | all_gather(replicated)  | varying -> invariant   | this device's slice        | nothing                     |
# | reduce_scatter          | varying -> varying     | all_gather                 | B (n-1)/n, B the input      |
# | all_to_all              | varying -> varying     | all_to_all, dims swapped   | as much as forward          |
# | shift                   | varying -> varying     | shift the other way        | as much as forward          |
# | broadcast               | varying -> invariant   | vary, zero but at source   | nothing                     |
#
# Here a gradient is easily counted twice. The shards [1 | 2] of two devices, and the loss sum(whole ** 2):
#
#   whole = all_gather(x, "a"). Every device computes the loss 5, and its gradient with respect to the whole, [2 4].
#   To jax these are two losses, which vary over "a", and the derivative is that of their sum: the transpose adds the
#   two gradients, and scatters them. x gets [4 | 8].
#
#   whole = all_gather(x, "a", replicated=True). The loss is invariant, so to jax it is one. Its gradient [2 4] is on
#   every device already, and the transpose takes this device's slice. x gets [2 | 4].
#
# The first form is right if each device goes on with its own data, as in a loss of its own examples: then the gradients
# with respect to the whole differ, and only their sum is the gradient. The second form is right if all devices compute
# the same. Dividing the first by n gives the right number in this example, and a wrong one as soon as the devices'
# losses differ.
#
# A weight can be counted twice in the same way. If an invariant w meets varying data, jax casts w to vary, and the
# transpose of this cast is an all_reduce of w's gradient: to all_reduce the gradient again would be one too many. A
# function that casts w with `vary` before jax.grad gets the gradient of this device alone, and must all_reduce it.


@typed
def all_reduce(
    x: Arrays,
    axis: Axis,
    *,
    op: Op = "sum",
    deterministic: bool = False,
    table: SendTable | None = None,
) -> Any:
    """Reduces each leaf over the devices of `axis`; every device gets the result.

    Layout: `X[...] {U_a} -> X[...]`
    Args:
        x: pytree of arrays.
        axis: axis name or tuple of names.
        op: "sum", "mean", "max" or "min", and "any" or "all" for booleans. Booleans count as integers for "sum" and
            "mean". The derivative of "max" and "min" goes to the largest or smallest elements, in equal shares.
        deterministic: sum in an order that depends on the data alone. Dim 0 of every leaf then counts this device's
            blocks and is summed too: `[blocks, ...] -> [...]`. You get the same bits on every number of devices if the
            global number of blocks is fixed, each device has the same number of consecutive blocks, and you compute
            each block's term separately (under `lax.map`, not in one matmul).
        table: a table of messages, such as one of `sk.tables`; None: the compiler chooses. A table adds in the dtype of
            x, message by message, and has no forward-mode derivative.

    Returns:
        Arrays of the same shapes (without dim 0 if deterministic), invariant over `axis`.

    Raises:
        ValueError: an unbound axis, another `op`, no blocks for a deterministic sum, a wrong table, one for
            another collective or number of devices, or one with an op other than a sum.
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
    is_sum = op in ("sum", "mean")
    if deterministic and not is_sum:
        raise ValueError(
            f"all_reduce: deterministic=True needs op 'sum' or 'mean'; got {op!r}. Leave deterministic out: the order "
            "changes no bit of this op."
        )
    if table is not None:
        if deterministic or not is_sum:
            raise ValueError(
                f"all_reduce: a table adds in its own order, so it needs op 'sum' or 'mean' without deterministic; got "
                f"op={op!r}, deterministic={deterministic}. Leave table out."
            )
        execute.check_table("all_reduce", table, "all_reduce", names)

    def reduce_leaf(leaf: jax.Array) -> jax.Array:
        leaf = vary(leaf, names)
        if op in ("any", "all"):
            return _reduce_booleans(leaf, names, op)
        if op in ("max", "min"):
            return _reduce_ordered(leaf, names, op)
        if table is not None:
            total = execute.all_reduce(as_numbers(leaf), names, table)
            addends = table.devices
        elif deterministic:
            total = sum_blocks(leaf, names)
            addends = axis_size(names) * leaf.shape[0]
        else:
            return reduce_array(leaf, names, op=op)
        if op == "mean":
            total = total / addends
        return total

    return jax.tree.map(reduce_leaf, x)


def reduce_array(x: jax.Array, names: _Names, *, op: str = "sum") -> jax.Array:
    """`all_reduce` of one array by "sum" or "mean", for kernels whose arguments are checked already."""
    addend = vary(x, names)
    if op == "mean":
        return lax.pmean(addend, names)
    return lax.psum(addend, names)


def _reduce_booleans(x: jax.Array, names: _Names, op: str) -> jax.Array:
    if x.dtype != bool:
        raise TypeError(f"all_reduce: op {op!r} needs booleans; got {x.dtype}. Compare first, as in x != 0.")
    # One byte for each boolean; a sum would send four.
    return _find_extremum(x, names, "max" if op == "any" else "min")


def _reduce_ordered(x: jax.Array, names: _Names, op: str) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise TypeError(f"all_reduce: op {op!r} needs an order; got {x.dtype}. Pass parts, or jnp.abs(x).")
    if jnp.issubdtype(x.dtype, jnp.floating):
        return _differentiable_extremum(x, names, op)
    return _find_extremum(x, names, op)


def _find_extremum(x: jax.Array, names: _Names, op: str) -> jax.Array:
    """The elementwise "max" or "min" over the devices."""
    if op == "max":
        return lax.pmax(x, names)
    return lax.pmin(x, names)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _differentiable_extremum(x: jax.Array, names: _Names, op: str) -> jax.Array:
    """The elementwise "max" or "min"; its derivative is split equally among the devices that attain it."""
    return _find_extremum(x, names, op)


@_differentiable_extremum.defjvp
def _differentiate_extremum(names: _Names, op: str, primals: Any, tangents: Any) -> Any:
    # Three devices have 3, 5 and 5. The max is 5, which devices 1 and 2 attain, and its tangent is (dx1 + dx2) / 2.
    # Without the division by the ties, the gradient of the max of n equal values would be n times too large.
    (x,) = primals
    (dx,) = tangents
    extremum = _differentiable_extremum(x, names, op)
    attains = x == extremum
    ties = lax.psum(attains.astype(jnp.float32), names)  # bfloat16 counts no further than 256
    shares = jnp.where(attains, dx / ties.astype(dx.dtype), jnp.zeros_like(dx))
    return extremum, lax.psum(shares, names)


@typed
def all_gather(
    x: Arrays,
    axis: Axis,
    *,
    dim: int = 0,
    replicated: bool = False,
    table: SendTable | None = None,
) -> Any:
    """Concatenates the devices' shards of each leaf along `dim`; every device gets the whole array.

    Layout: `X[.., D_a, ..] -> X[.., D, ..]`
    Args:
        x: pytree of arrays, this device's shards.
        axis: axis name or tuple of names; shards are concatenated in the order of the device index.
        dim: the dim to concatenate along.
        replicated: return a result that is invariant over `axis`, as `out_specs=P()` requires. Its transpose slices an
            all-reduced cotangent. The transpose of the default is a reduce_scatter, with half the bytes.
        table: as for all_reduce. The derivative runs its transpose; replicated, it sends nothing.

    Returns:
        Arrays with n times the shard's size along `dim`.

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

    def gather_leaf(leaf: jax.Array) -> jax.Array:
        gathered_dim = dim_of("all_gather", dim, jnp.ndim(leaf))
        if table is not None:
            return execute.all_gather(leaf, names, gathered_dim, replicated, table)
        return gather_array(leaf, names, gathered_dim, replicated=replicated)

    return jax.tree.map(gather_leaf, x)


def gather_array(x: jax.Array, names: _Names, dim: int, *, replicated: bool = False) -> jax.Array:
    """`all_gather` of one array, for kernels whose arguments are checked already."""
    shard = vary(x, names)
    if shard.shape[dim] == 0:  # jax refuses to gather empty arrays
        return jnp.zeros(shard.shape, shard.dtype) if replicated else shard
    squeezed, squeezed_dim = _drop_unit_dims(shard, dim)
    calls: list[Any] = [names]
    if not compat.tracked_axes() & set(names):
        # Axes of a vmap: jax gathers over one of them at a time. The minor axis first: that makes the major one the
        # slowest.
        calls = list(reversed(names))
    for axes in calls:
        if replicated:
            squeezed = compat.all_gather_replicated(squeezed, axes, squeezed_dim)
        else:
            squeezed = lax.all_gather(squeezed, axes, axis=squeezed_dim, tiled=True)
    shape = list(shard.shape)
    shape[dim] = squeezed.shape[squeezed_dim]
    return squeezed.reshape(shape)


@typed
def reduce_scatter(
    x: Arrays,
    axis: Axis,
    *,
    dim: int = 0,
    op: Literal["sum", "mean"] = "sum",
    table: SendTable | None = None,
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
        Arrays with 1/n of the input's size along `dim`.

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
    if table is not None:
        execute.check_table("reduce_scatter", table, "reduce_scatter", names)

    def scatter_leaf(leaf: jax.Array) -> jax.Array:
        split_dim = dim_of("reduce_scatter", dim, jnp.ndim(leaf))
        divides("reduce_scatter", split_dim, leaf.shape[split_dim], names, count)
        if table is not None:
            shard = execute.reduce_scatter(as_numbers(leaf), names, split_dim, table)
        else:
            shard = scatter_array(leaf, names, split_dim)
        if op == "mean":
            shard = shard / count
        return shard

    return jax.tree.map(scatter_leaf, x)


def scatter_array(x: jax.Array, names: _Names, dim: int, *, op: str = "sum") -> jax.Array:
    """`reduce_scatter` of one array, for kernels whose arguments are checked already."""
    addend = vary(as_numbers(x), names)
    shard = addend
    if addend.shape[dim]:  # jax refuses to scatter empty arrays
        shard = _scatter_addend(addend, names, dim)
    if op == "mean":
        shard = shard / axis_size(names)
    return shard


def _scatter_addend(x: jax.Array, names: _Names, dim: int) -> jax.Array:
    """The sum over the devices, scattered along a dim, by lax."""
    squeezed, squeezed_dim = _drop_unit_dims(x, dim)
    calls: list[Any] = [names]
    if not compat.tracked_axes().issuperset(names):
        # Axes of a vmap: jax scatters over one of them at a time. The major axis first, so that each device gets the
        # same part as by one call over all.
        calls = list(names)
    for axes in calls:
        squeezed = lax.psum_scatter(squeezed, axes, scatter_dimension=squeezed_dim, tiled=True)
    shape = list(x.shape)
    shape[dim] = squeezed.shape[squeezed_dim]
    return squeezed.reshape(shape)


def _drop_unit_dims(x: jax.Array, dim: int) -> tuple[jax.Array, int]:
    """The array without its dims of size 1, except `dim`, and the position of `dim` in it.

    If an array has a dim of size 1 beside the split dim, the TPU's compiler runs a reduce_scatter as an all_reduce,
    which sends twice as much. With one sequence on a device, `[1, T, D]`, that happens in each block of sequence
    parallelism. So `[T, D]` is sent. A gather drops such dims too, because its gradient is scattered.
    """
    unit_dims = []
    new_dim = dim
    for number, size in enumerate(x.shape):
        if size == 1 and number != dim:
            unit_dims.append(number)
            if number < dim:
                new_dim -= 1
    return lax.squeeze(x, unit_dims), new_dim


@typed
def all_to_all(x: Arrays, axis: Axis, *, split_dim: int, concat_dim: int) -> Any:
    """Splits each leaf along `split_dim`, sends piece j to device j, and joins the pieces it gets along `concat_dim`.

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

    def exchange_leaf(leaf: jax.Array) -> jax.Array:
        split = dim_of("all_to_all", split_dim, jnp.ndim(leaf), "split_dim")
        concat = dim_of("all_to_all", concat_dim, jnp.ndim(leaf), "concat_dim")
        divides("all_to_all", split, leaf.shape[split], names, count)
        leaf = vary(leaf, names)
        if not compat.tracked_axes().issuperset(names):
            # Under vmap jax adds a dim to the all_to_all of a value that does not depend on the vmapped axis. The
            # choice by the device's index, of equal values, makes every value depend on it.
            leaf = jnp.where(lax.axis_index(names) >= 0, leaf, leaf)
        return lax.all_to_all(leaf, names, split, concat, tiled=True)

    return jax.tree.map(exchange_leaf, x)
