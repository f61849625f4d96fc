"""A cast from varying to invariant, for values that a kernel made equal on all devices by messages of its own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from shardkit._arguments.checks import Axis
from shardkit._arguments.typed import Arrays, typed
from shardkit._jax import compat
from shardkit._jax.compat import bound
from shardkit._jax.primitives import ASSUMED
from shardkit.collectives.axes import axis_index, vary


@typed
def assume_replicated(x: Arrays, axis: Axis) -> Any:
    """Casts each leaf to be invariant over `axis`. Use it if you know that the value is equal on its devices.

    `out_specs=P()` and a training step require the invariant type. jax gives it to the result of a psum, but not to the
    result of ppermutes. Nothing checks the value when the program runs. To check it, use `sk.testing.emulate`: it
    compares the values of all devices here, bit for bit. `assert_matches_reference` and `prove` compare the replicas of
    the results.

    The transpose gives the cotangent to the first device of `axis`, and zeros to the others.

    Layout: `X[...] {varying over a} -> X[...]`
    Args:
        x: pytree of arrays with the same bits on every device of `axis`.
        axis: axis name or tuple of names; an axis over which a leaf does not vary is skipped.

    Returns:
        The same values, invariant over `axis`. Under vmap with an axis name, which tracks no types, `x` itself.

    Raises:
        ValueError: an unbound axis, or an axis named twice.

    Cost: none.

    Example:
        >>> def total(x):  # recursive doubling over two devices
        ...     return sk.collectives.assume_replicated(x + jax.lax.ppermute(x, "data", [(0, 1), (1, 0)]), "data")
        >>> print(jax.shard_map(total, mesh=mesh, in_specs=P("data"), out_specs=P())(jnp.arange(2)))
        [1]
    """
    names = bound("assume_replicated", axis)

    def cast_leaf(leaf: Any) -> Any:
        varying = compat.varying_axes(leaf)
        axes = tuple(name for name in names if name in varying)
        if not axes:
            return leaf
        return _cast.bind(leaf, axes=axes)

    return jax.tree.map(cast_leaf, x)


# The primitive: the identity on values, a cast of types.


def _transpose_cast(cotangent: Any, _: Any, *, axes: tuple[str, ...]) -> list[Any]:
    # The inputs on n devices are n arguments of the function, whose cotangents must add up to the cotangent of the
    # result. The whole cotangent on each device would count n times. Any shares that add up to it are right; all of it
    # on the first device rounds nothing.
    varying = vary(cotangent, axes)
    return [jnp.where(axis_index(axes) == 0, varying, lax.full_like(varying, 0))]


def _batch_cast(values: Any, dims: Any, *, axes: tuple[str, ...]) -> Any:
    return (_cast.bind(*values, axes=axes), *dims)


_cast = Primitive(ASSUMED)
_cast.def_abstract_eval(lambda aval, *, axes: compat.invariant(aval, axes))
_cast.def_impl(lambda x, *, axes: x)
mlir.register_lowering(_cast, lambda ctx, x, *, axes: [x])
ad.deflinear2(_cast, _transpose_cast)
batching.primitive_batchers[_cast] = _batch_cast
