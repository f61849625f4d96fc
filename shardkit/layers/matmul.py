"""What layers share: the axes that matter here, and a matmul whose forward and backward sums are in float32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from shardkit._arguments.checks import Axis, named
from shardkit._jax import compat
from shardkit._jax.compat import bound
from shardkit.collectives import vary
from shardkit.collectives._sums import dot_dtype


def live_axes(where: str, axis: Axis | None, *arrays: Any) -> tuple[str, ...]:
    """The names of `axis` along which something is split: several devices, or arrays typed as varying.

    An axis of one device then costs no collective, and `axis=None` is one device without a mesh, so that the same model
    runs everywhere. The joint index over these names equals that over all names of `axis`.
    """
    if axis is None:
        return ()
    sizes, varying = compat.bound_axes(), _everywhere(arrays)
    return tuple(name for name in bound(where, axis) if sizes[name] > 1 or name in varying)


def check_split(where: str, what: str, names: tuple[str, ...], w: jax.Array) -> None:
    """Refuses weights that are invariant over the summed axes: every device would add the whole product."""
    sizes, known = compat.bound_axes(), compat.tracked_axes()
    whole = [name for name in names if sizes[name] > 1 and name in known - compat.varying_axes(w)]
    if whole:
        raise ValueError(
            f"{where}: {what} must be sharded over {named(names)}, over which the product is summed; got one that is "
            f"invariant over {named(whole)}. Shard it, with tp for example, or pass another axis."
        )


def matmul(x: jax.Array, w: jax.Array, dims: int = 1) -> jax.Array:
    """Contracts the last `dims` dims of x with the first of w: summed in float32, returned in the dtype of x.

    The operands of the backward matmuls have that dtype too; autodiff would widen one of them.
    """
    x, w = alike(x, w)
    return _matmul(x, w, dims)


def alike(*arrays: Any, over: tuple[str, ...] = ()) -> tuple[Any, ...]:
    """The arrays, all varying over `over` and wherever one of them varies, as a custom_vjp needs.

    The sums of a cast's transpose are then outside it.
    """
    return vary(arrays, tuple({*over, *_everywhere(arrays)}))


def _product(x: jax.Array, w: jax.Array, dims: int) -> jax.Array:
    return jnp.tensordot(x, w, axes=dims, preferred_element_type=dot_dtype(x, w)).astype(x.dtype)


def _forward(x: jax.Array, w: jax.Array, dims: int) -> Any:
    return _product(x, w, dims), (x, w)  # a call of _matmul would hide the matmul from jax.checkpoint policies


def _backward(dims: int, residuals: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = residuals
    return matmul_gradients(x, w, dy, dims)


_matmul = jax.custom_vjp(_product, nondiff_argnums=(2,))
_matmul.defvjp(_forward, _backward)


def matmul_gradients(x: jax.Array, w: jax.Array, dy: jax.Array, dims: int = 1) -> tuple[jax.Array, jax.Array]:
    """The gradients of `matmul` with respect to x and w."""
    rows = x.ndim - dims
    columns = (tuple(range(rows, dy.ndim)), tuple(range(dims, w.ndim)))
    dx = jnp.tensordot(dy, w, axes=columns, preferred_element_type=dot_dtype(dy, w))
    dw = jnp.tensordot(x, dy, axes=(tuple(range(rows)),) * 2, preferred_element_type=dot_dtype(x, dy))
    return dx.astype(x.dtype), dw.astype(w.dtype)


def _everywhere(arrays: Any) -> frozenset[str]:
    return frozenset[str]().union(*map(compat.varying_axes, jax.tree.leaves(arrays)))
