"""Axes inside shard_map: how many devices, which one this is, and over which axes a value varies."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardkit._arguments.checks import Axis
from shardkit._arguments.typed import Arrays, typed
from shardkit._jax import compat
from shardkit._jax.compat import bound


@typed
def axis_size(axis: Axis) -> int:
    """Number of devices along `axis`, or their product over a tuple, as a Python integer.

    Cost: none.

    Example:
        >>> size = lambda x: x * sk.axis_size(("data", "model"))
        >>> print(jax.shard_map(size, mesh=mesh, in_specs=P(), out_specs=P())(1))
        8
    """
    sizes = compat.bound_axes()
    return math.prod(sizes[name] for name in bound("axis_size", axis))


@typed
def axis_index(axis: Axis) -> jax.Array:
    """Index of this device along `axis`, an int32 scalar; over a tuple the joint index, the first axis major.

    Cost: none.

    Example:
        >>> index = lambda: sk.axis_index("model")[None]
        >>> print(jax.shard_map(index, mesh=mesh, in_specs=(), out_specs=P("model"))())
        [0 1 2 3]
    """
    return lax.axis_index(bound("axis_index", axis))


@typed
def vary(tree: Arrays | None, axes: Axis | tuple[()]) -> Any:
    """Casts every leaf to vary over `axes`. It skips an axis if the leaf already varies over it.

    The gradient with respect to a varying value is the gradient of this device alone: you write the sum over devices
    yourself. The transpose of the cast is a psum over the axes it added.

    Layout: `X[...] -> X[...] {varying over axes}`
    Args:
        tree: pytree of arrays.
        axes: axis name, tuple of names, or `()`.

    Returns:
        The same values, typed as varying.

    Raises:
        ValueError: an unbound axis, or an axis named twice.

    Cost: none.

    Example:
        >>> def gradient(w, x):  # of this device's rows alone
        ...     return jax.grad(lambda w: (w * x).sum())(sk.vary(w, "data"))
        >>> both = jax.shard_map(gradient, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
        >>> print(both(jnp.ones(1), jnp.array([2.0, 3.0])))
        [2. 3.]
    """
    if axes == ():
        return tree
    tracked = compat.tracked_axes()
    # An axis of vmap has no type to cast to.
    names = [name for name in bound("vary", axes) if name in tracked]

    def cast_leaf(leaf: Any) -> jax.Array:
        # Only what is missing: jax refuses to cast to an axis over which a value varies already.
        varying = compat.varying_axes(leaf)
        missing = tuple(name for name in names if name not in varying)
        if not missing:
            return leaf
        return compat.cast_varying(leaf, missing)

    return jax.tree.map(cast_leaf, tree)


@typed
def vary_like(tree: Arrays | None, like: Arrays) -> Any:
    """Casts every leaf to vary over the same axes as the leaves of `like`: as `vary`, on any mesh.

    Use it for the initial carry of a loop: jax refuses a carry that is invariant before an iteration and varies after
    it.

    Layout: `X[...] -> X[...] {varying as like}`
    Args:
        tree: pytree of arrays.
        like: array, or pytree of them, such as the data of the loop.

    Returns:
        The same values, typed as varying.

    Cost: none.

    Example:
        >>> def total(x):
        ...     return jax.lax.scan(lambda sum, row: (sum + row, None), sk.vary_like(jnp.zeros(1), x), x)[0]
        >>> kernel = jax.shard_map(total, mesh=mesh, in_specs=P("data", "model"), out_specs=P(("data", "model")))
        >>> print(kernel(jnp.ones((6, 4))))
        [3. 3. 3. 3. 3. 3. 3. 3.]
    """
    axes: set[str] = set()
    for leaf in jax.tree.leaves(like):
        axes |= compat.varying_axes(leaf)
    return vary(tree, tuple(sorted(axes)))


def varies(x: Any, axes: tuple[str, ...]) -> bool:
    """Whether the type of `x` says that it varies over all of the axes; False under vmap, which has no such types."""
    return compat.varying_axes(x).issuperset(axes)


def as_numbers(x: Any) -> jax.Array:
    """`x` as an array of a dtype that can be summed: booleans as int32, as psum takes them.

    Raises:
        TypeError: keys, which are no numbers.
    """
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        raise TypeError(
            f"sum: devices can add numbers only; got {x.aval.str_short()}. Fold keys with sk.fold_axis, or sum the "
            "numbers that you draw from them."
        )
    if x.dtype == bool:
        return x.astype(jnp.int32)
    return x
