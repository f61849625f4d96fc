"""Shared by layers: the axes along which something is split, and a matmul that sums in float32, backward too."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from shardkit._arguments.checks import Axis, name_axes
from shardkit._jax import compat
from shardkit._jax.compat import bound
from shardkit.collectives import axis_size, vary
from shardkit.collectives._sums import dot_dtype


def live_axes(where: str, axis: Axis | None, *arrays: Any) -> tuple[str, ...]:
    """The names of `axis` along which something is split: several devices, or arrays typed as varying.

    An axis of one device then costs no collective, and `axis=None` is one device without a mesh, so that the same model
    runs everywhere. The joint index over these names equals that over all names of `axis`.
    """
    if axis is None:
        return ()
    sizes = compat.bound_axes()
    varying = _varying_axes(arrays)
    names = []
    for name in bound(where, axis):
        if sizes[name] > 1 or name in varying:
            names.append(name)
    return tuple(names)


def count_devices(names: tuple[str, ...]) -> int:
    """The number of devices along axes; 1 where there are none."""
    return axis_size(names) if names else 1


def check_split(where: str, what: str, names: tuple[str, ...], w: jax.Array) -> None:
    """Refuses weights that are invariant over the summed axes: every device would add the whole product."""
    sizes = compat.bound_axes()
    invariant = compat.tracked_axes() - compat.varying_axes(w)
    wrong_axes = [name for name in names if sizes[name] > 1 and name in invariant]
    if wrong_axes:
        raise ValueError(
            f"{where}: {what} must be sharded over {name_axes(names)}, because the product is summed there; got one "
            f"that is invariant over {name_axes(wrong_axes)}. Shard it, with tp for example, or pass another axis."
        )


def matmul(x: jax.Array, w: jax.Array, dims: int = 1) -> jax.Array:
    """Contracts the last `dims` dims of x with the first of w: summed in float32, returned in the dtype of x.

    The operands of the backward matmuls have that dtype too; autodiff would widen one of them.
    """
    x, w = vary_alike(x, w)
    return _matmul(x, w, dims)


def vary_alike(*arrays: Any, over: tuple[str, ...] = ()) -> tuple[Any, ...]:
    """Casts all arrays to vary over `over` and over every axis over which one of them varies.

    A custom_vjp needs it: its backward rule returns gradients that vary as dy does, and would have to sum them for an
    argument that varies over fewer axes. With the cast outside of the custom_vjp, the transpose of the cast is this
    sum.
    """
    axes = _varying_axes(arrays).union(over)
    return vary(arrays, tuple(axes))


def _product(x: jax.Array, w: jax.Array, dims: int) -> jax.Array:
    y = jnp.tensordot(x, w, axes=dims, preferred_element_type=dot_dtype(x, w))
    return y.astype(x.dtype)


def _forward(x: jax.Array, w: jax.Array, dims: int) -> Any:
    return _product(x, w, dims), (x, w)  # a call of _matmul would hide the matmul from jax.checkpoint policies


def _backward(dims: int, residuals: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = residuals
    return matmul_gradients(x, w, dy, dims)


_matmul = jax.custom_vjp(_product, nondiff_argnums=(2,))
_matmul.defvjp(_forward, _backward)


def matmul_gradients(x: jax.Array, w: jax.Array, dy: jax.Array, dims: int = 1) -> tuple[jax.Array, jax.Array]:
    """The gradients of `matmul` with respect to x and w.

    For x [b, T, h, K], w [h, K, D] and dy [b, T, D], with dims=2: dx contracts D of dy and w, and dw contracts b and T
    of x and dy.
    """
    rows = x.ndim - dims
    row_dims = tuple(range(rows))
    columns_of_dy = tuple(range(rows, dy.ndim))
    columns_of_w = tuple(range(dims, w.ndim))
    dx = jnp.tensordot(dy, w, axes=(columns_of_dy, columns_of_w), preferred_element_type=dot_dtype(dy, w))
    dw = jnp.tensordot(x, dy, axes=(row_dims, row_dims), preferred_element_type=dot_dtype(x, dy))
    return dx.astype(x.dtype), dw.astype(w.dtype)


def _varying_axes(arrays: Any) -> frozenset[str]:
    """The axes over which at least one of the arrays varies."""
    axes: set[str] = set()
    for array in jax.tree.leaves(arrays):
        axes |= compat.varying_axes(array)
    return frozenset(axes)
