"""What the compressed collectives share: checks, leaves with their residuals, the derivative, chunks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shardkit._arguments.checks import at_least, one_of
from shardkit.collectives.axes import axis_index
from shardkit.cost.quantization import FORMATS

Pair = tuple[jax.Array, Any]  # a result and the new residual


def checked(where: str, x: Any, block: int, **dtypes: Any) -> list[str]:
    """The names of the dtypes, without None; refuses other dtypes, an empty block and leaves that are no floats."""
    names = {argument: jnp.dtype(dtype).name for argument, dtype in dtypes.items() if dtype is not None}
    for argument, name in names.items():
        one_of(where, argument, name, tuple(FORMATS))
    at_least(where, 1, block=block)
    for leaf in jax.tree.leaves(x):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            plain = where.removeprefix("compressed.").replace("reduce_scatter_two_level", "hierarchical.reduce_scatter")
            raise TypeError(
                f"{where}: every leaf must be floating-point; got {jnp.result_type(leaf)}. Use {plain} for it."
            )
    return list(names.values())


def of_pairs(where: str, reduce: Callable[[jax.Array, Any], Pair], x: Any, residual: Any) -> tuple[Any, Any]:
    """The results of `reduce` for each leaf and its residual, and the new residuals: None if there are none."""
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, x))
    if residual is None:
        return jax.tree.unflatten(structure, [reduce(leaf, None)[0] for leaf in leaves]), None
    residuals = jax.tree.leaves(residual)
    structures: list[Any] = [jax.tree.structure(residual), structure]
    if structures[0] != structures[1] or [(jnp.shape(r), jnp.result_type(r)) for r in residuals] != [
        (leaf.shape, jnp.float32) for leaf in leaves
    ]:
        got = [f"{jnp.result_type(r)}{list(jnp.shape(r))}" for r in residuals]
        shapes = [str(list(leaf.shape)) for leaf in leaves]
        raise ValueError(
            f"{where}: residual must be a pytree like x of float32 arrays of the same shapes; "
            f"got {', '.join(got) or 'none'} for shapes {', '.join(shapes) or 'none'}. Create it with init_residual(x)."
        )
    pairs = [reduce(leaf, left) for leaf, left in zip(leaves, residuals, strict=True)]
    total, left = (jax.tree.unflatten(structure, [pair[i] for pair in pairs]) for i in (0, 1))
    return total, left


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def straight_through(
    exact: Callable[[jax.Array], jax.Array], sent: Callable[[jax.Array], Pair], x: jax.Array, residual: jax.Array | None
) -> Pair:
    """`sent` of x + residual in float32, in the dtype of x; its derivative is that of `exact`."""
    if not x.size:
        return exact(x), residual
    wide = x.astype(jnp.float32)
    out, left = sent(wide if residual is None else wide + residual)
    return out.astype(x.dtype), left


@straight_through.defjvp
def _straight_through_jvp(exact: Any, sent: Any, primals: Any, tangents: Any) -> Any:
    out, left = straight_through(exact, sent, *primals)
    dx, dresidual = tangents
    tangent = exact(dx if dresidual is None else dx + dresidual.astype(dx.dtype))
    return (out, left), (tangent, jax.tree.map(jnp.zeros_like, left))


def chunks(x: jax.Array, dim: int, count: int) -> jax.Array:
    """`x` split along `dim` into chunks, [count, ...]."""
    return jnp.moveaxis(x.reshape(*x.shape[:dim], count, -1, *x.shape[dim + 1 :]), dim, 0)


def any_chunks(x: jax.Array, count: int) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """`x` in `count` equal chunks, padded if no dim divides; and the inverse for arrays of the same shape."""
    for dim, size in enumerate(x.shape):
        if size % count == 0:  # flattened, it takes the TPU compiler much longer
            return chunks(x, dim, count), partial(joined, dim=dim)
    padded = jnp.pad(x.ravel(), (0, -x.size % count)).reshape(count, -1)
    return padded, lambda y: y.ravel()[: x.size].reshape(x.shape)


def joined(chunks: jax.Array, dim: int) -> jax.Array:
    """Chunks [count, ...] concatenated along their `dim`."""
    whole = jnp.moveaxis(chunks, 0, dim)
    return whole.reshape(*whole.shape[:dim], -1, *whole.shape[dim + 2 :])


def added_here(x: jax.Array, y: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """`y` added to the chunk of `x`, [n, ...], that this device sums."""
    return x.at[axis_index(names)].add(y)
