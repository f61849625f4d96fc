"""Random keys inside shard_map: per-axis folding, and one key for each example of the global batch.

Fold over the axes along which the data differ, never over axes along which copies must agree. For dropout, prefer
one key per global example (`example_keys`, `dropout`): the draws are then the same on every mesh.
"""

from __future__ import annotations

import zlib

import jax
import jax.numpy as jnp

from shardkit._check import Axis, bound


def fold_axis(key: jax.Array, axis: Axis) -> jax.Array:
    """`fold_in(key, axis_index)`: keys that differ along `axis` and agree along every other axis.

    This is the field's plain rule. Two axes give the same stream at equal index; `fold_axes` does not.

    Args:
        key: typed or raw key, equal on all devices of `axis`.
        axis: mesh axis, or a tuple of axes (their joint index, the first one major).

    Returns:
        A key of the same kind, varying over `axis`.

    Raises:
        ValueError: an axis that is not bound here, or named twice.
    """
    return jax.random.fold_in(key, jax.lax.axis_index(bound("fold_axis", axis)))


def fold_axes(key: jax.Array, axes: Axis) -> jax.Array:
    """Keys that differ for every coordinate along `axes`, salted by axis name.

    The order of `axes` does not matter, and no coordinate of one axis repeats the stream of another axis.

    Args:
        key: typed or raw key, equal on all devices of `axes`.
        axes: mesh axis or tuple of axes.

    Returns:
        A key of the same kind, varying over `axes`.

    Raises:
        ValueError: an axis that is not bound here, or named twice.
    """
    for name in sorted(bound("fold_axes", axes)):
        key = jax.random.fold_in(jax.random.fold_in(key, salt(name)), jax.lax.axis_index(name))
    return key


def example_keys(key: jax.Array, n: int) -> jax.Array:
    """One key for each of `n` examples, by global index: key i is `fold_in(key, i)`, whatever `n` is.

    Args:
        key: typed or raw key.
        n: number of examples of the global batch.

    Returns:
        Keys of shape [n] (raw keys: [n, 2]), to be sharded like the batch's dim 0.
    """
    return fold_keys(key, jnp.arange(n, dtype=jnp.uint32))


def fold_keys(keys: jax.Array, data: jax.Array | int) -> jax.Array:
    """`fold_in` for each of a batch of keys: `fold_keys(keys_b, layer)` gives each example another key in each layer.

    Args:
        keys: one key, or keys of shape [b].
        data: one integer, or integers of shape [b]; at least one of the two has a leading dim.

    Returns:
        Keys of shape [b].
    """
    axes = (0 if _keys_shape(keys) else None, 0 if jnp.ndim(data) else None)
    return jax.vmap(jax.random.fold_in, axes)(keys, data)


def dropout(x_b: jax.Array, keys_b: jax.Array | None, rate: float) -> jax.Array:
    """Dropout whose draws belong to the example, not to the device: the same on every mesh and accumulation.

    Args:
        x_b: examples, shape [b, ...].
        keys_b: one key per example, shape [b]; None means evaluation, in which nothing is dropped.
        rate: probability that an element becomes zero, 0 <= rate < 1; the others are divided by 1 - rate.

    Returns:
        Array of the shape and dtype of `x_b`.

    Raises:
        ValueError: a rate outside [0, 1), or another number of keys than examples.
        TypeError: integers.
    """
    if not 0 <= rate < 1:
        raise ValueError(f"dropout: rate must be at least 0 and below 1; got {rate}. Pass the share to drop.")
    if not jnp.issubdtype(x_b.dtype, jnp.floating):
        raise TypeError(f"dropout: x must be floating-point; got {x_b.dtype}. Drop after the embedding, not before it.")
    if keys_b is None or rate == 0:
        return x_b
    if _keys_shape(keys_b) != x_b.shape[:1]:
        raise ValueError(
            f"dropout: there must be one key for each example; got keys of shape {keys_b.shape} for examples of "
            f"shape {x_b.shape}. Pass the keys that the loss function is given with the batch."
        )
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, x_b.shape[1:]))(keys_b)
    return jnp.where(keep, x_b / jnp.asarray(1 - rate, x_b.dtype), jnp.zeros_like(x_b))


def salt(name: str) -> int:
    """A 32-bit number for a name, the same in every process (unlike `hash`)."""
    return zlib.crc32(name.encode())


def _keys_shape(keys: jax.Array) -> tuple[int, ...]:
    """The shape of an array of keys: a raw key is itself a row of integers."""
    return keys.shape if jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) else keys.shape[:-1]
