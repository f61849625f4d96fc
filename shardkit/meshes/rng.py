"""Random keys inside shard_map: per-axis folding, and one key per example of the global batch.

Fold over the axes over which the data differ, never over axes over which replicas must agree. For dropout, prefer one
key per global example (`example_keys`, `dropout`): the draws are then the same on every mesh.
"""

from __future__ import annotations

import zlib
from functools import partial
from typing import overload

import jax
import jax.numpy as jnp

from shardkit._arguments.checks import Axis, at_least
from shardkit._arguments.typed import Key, typed
from shardkit._jax.compat import bound


@typed
def fold_axis(key: Key, axis: Axis) -> jax.Array:
    """`fold_in(key, axis_index)`: you get another key on each device along `axis`, and the same along every other axis.

    Two axes have the same stream at the same index. If you fold in more than one axis, use `fold_axes`.

    What you draw depends on the number of devices along `axis`, so a loss that draws from it is another number on each
    mesh, and no first call of a step says so: that is what the function is for. Within a training step draw from the
    keys that your loss gets, one for each example (`dropout`), which are the same on every mesh.

    Args:
        key: typed or raw key, the same on all devices of `axis`.
        axis: mesh axis, or a tuple of axes (their joint index, the first one major).

    Returns:
        A key of the same kind, varying over `axis`.

    Raises:
        ValueError: an unbound axis, or an axis named twice.

    Example:
        >>> draw = lambda key: jax.random.bits(sk.fold_axis(key, "data"), 1)
        >>> bits = jax.shard_map(draw, mesh=mesh, in_specs=P(), out_specs=P("data"))(jax.random.key(0))
        >>> bool(bits[0] == bits[1])
        False
    """
    check_single("fold_axis", key)
    return jax.random.fold_in(key, jax.lax.axis_index(bound("fold_axis", axis)))


@typed
def fold_axes(key: Key, axes: Axis) -> jax.Array:
    """Folds the device's place along `axes` into a key, salted by axis name: no two coordinates have the same key.

    The order of `axes` does not matter, and no coordinate of one axis repeats the stream of another axis.

    Args:
        key: typed or raw key, the same on all devices of `axes`.
        axes: mesh axis or tuple of axes.

    Returns:
        A key of the same kind, varying over `axes`.

    Raises:
        ValueError: an unbound axis, or an axis named twice.

    Example:
        >>> draw = lambda key: jax.random.bits(sk.fold_axes(key, ("data", "model")), 1)
        >>> bits = jax.shard_map(draw, mesh=mesh, in_specs=P(), out_specs=P(("data", "model")))(jax.random.key(0))
        >>> len(set(bits.tolist()))
        8
    """
    check_single("fold_axes", key)
    # Without the salt, index 1 along "data" and index 1 along "model" would be the same number: two layers of which
    # each folds over one axis would draw alike.
    for name in sorted(bound("fold_axes", axes)):
        key = jax.random.fold_in(jax.random.fold_in(key, salt(name)), jax.lax.axis_index(name))
    return key


@typed
def example_keys(key: Key, n: int) -> jax.Array:
    """Makes one key for each of `n` examples, by global index: key i is `fold_in(key, i)` for every `n`.

    Args:
        key: typed or raw key.
        n: number of examples of the global batch.

    Returns:
        Keys of shape [n] (raw keys: [n, 2]). Shard them like dim 0 of the batch.

    Example:
        >>> few, many = (sk.example_keys(jax.random.key(0), n) for n in (4, 8))
        >>> bool((few == many[:4]).all())
        True
    """
    at_least("example_keys", 0, n=n)
    refuse_unstable("example_keys", key)
    return fold_keys(key, jnp.arange(n, dtype=jnp.uint32))


@overload
def fold_keys(keys: Key, data: jax.Array | int) -> jax.Array: ...


@overload
def fold_keys(keys: None, data: jax.Array | int) -> None: ...


@typed
def fold_keys(keys: Key | None, data: jax.Array | int) -> jax.Array | None:
    """Elementwise `fold_in`: `fold_keys(keys_b, layer)` gives each example a different key in each layer.

    `fold_keys(keys_b[:, None], positions_t[None, :])` gives each token of each example a different key, in the same way
    for every sharding of the tokens.

    Args:
        keys: keys of any shape, typed or raw; None in an evaluation, which draws nothing.
        data: integers; their shape broadcasts with the keys'.

    Returns:
        Keys of the shape to which both broadcast; None for None.

    Example:
        >>> keys = sk.example_keys(jax.random.key(0), 2)
        >>> sk.fold_keys(keys[:, None], jnp.arange(3)[None, :]).shape
        (2, 3)
    """
    if keys is None:
        return None
    keys_shape = _find_shape(keys)
    try:
        shape = jnp.broadcast_shapes(keys_shape, jnp.shape(data))
    except ValueError:
        raise ValueError(
            f"fold_keys: data must have a shape that broadcasts with the keys' {keys_shape}; got {jnp.shape(data)}. "
            "Insert dims of size 1."
        ) from None
    if not jnp.issubdtype(jnp.result_type(data), jnp.integer):
        raise TypeError(f"fold_keys: data must be integers; got {jnp.result_type(data)}. Pass for example 1.")
    # The integers of a raw key, its last dim, belong together: they broadcast with nothing.
    raw_shape = keys.shape[len(keys_shape) :]
    fold = jax.random.fold_in
    for _ in shape:  # once for each dim of the keys
        fold = jax.vmap(fold)
    return fold(jnp.broadcast_to(keys, shape + raw_shape), jnp.broadcast_to(data, shape))


@typed
def dropout(x_b: jax.Array, keys_b: Key | None, rate: float) -> jax.Array:
    """Dropout with one key per example: the same draws on every mesh and with every number of accumulation steps.

    Args:
        x_b: examples, shape [b, ...].
        keys_b: one key per example, shape [b], or, if tokens are sharded, one per token, shape [b, t]. None for
            evaluation: nothing is dropped.
        rate: probability of zeroing an element, 0 <= rate < 1; the others are divided by 1 - rate.

    Returns:
        Array of the shape and dtype of `x_b`.

    Raises:
        ValueError: a rate outside [0, 1), or keys with another shape than the leading dims of `x_b`.
        TypeError: integers.

    Example:
        >>> keys = sk.example_keys(jax.random.key(0), 4)
        >>> y = sk.dropout(jnp.ones((4, 100)), keys, rate=0.5)
        >>> set(y.ravel().tolist()) == {0.0, 2.0}
        True
    """
    if not 0 <= rate < 1:
        raise ValueError(f"dropout: rate must be at least 0 and below 1; got {rate}. Pass for example rate=0.1.")
    if not jnp.issubdtype(x_b.dtype, jnp.floating):
        raise TypeError(f"dropout: x_b must be floating-point; got {x_b.dtype}. Apply dropout after the embedding.")
    if keys_b is None or rate == 0:
        return x_b
    refuse_unstable("dropout", keys_b)
    shape = _find_shape(keys_b)
    if not shape or shape != x_b.shape[: len(shape)]:
        raise ValueError(
            f"dropout: keys_b must have one key per example; got keys of shape {keys_b.shape} for examples of shape "
            f"{x_b.shape}. Pass the keys that the loss function receives with the batch."
        )
    # Keys [b, t] of examples [b, t, D] draw D numbers each. One draw of the whole array would depend on how many
    # examples this device has.
    draw = partial(jax.random.bernoulli, p=1 - rate, shape=x_b.shape[len(shape) :])
    for _ in shape:
        draw = jax.vmap(draw)
    mask = draw(keys_b)
    # In the dtype of x: a numpy array of bfloat16 over a Python number would become float32.
    scaled = x_b / jnp.asarray(1 - float(rate), x_b.dtype)
    # A product with 0 and 1 would make a nan of an infinity that is dropped.
    return jnp.where(mask, scaled, jnp.zeros_like(x_b))


def refuse_unstable(where: str, keys: jax.Array) -> None:
    """Refuses keys whose draws differ under vmap, and so depend on mesh and batch."""
    if _is_typed(keys) and str(jax.random.key_impl(keys)) in ("rbg", "unsafe_rbg"):
        raise ValueError(
            f"{where}: keys must draw the same numbers in every batch; got {jax.random.key_impl(keys)!r}. Pass "
            "jax.random.key(seed, impl='threefry2x32')."
        )


def salt(name: str) -> int:
    """A 32-bit number for a name, the same in every process (unlike `hash`)."""
    return zlib.crc32(name.encode())


def _is_typed(keys: jax.Array) -> bool:
    """Whether keys are those of `jax.random.key`, and not the integers of `jax.random.PRNGKey`."""
    return bool(jnp.issubdtype(keys.dtype, jax.dtypes.prng_key))


def _find_shape(keys: jax.Array) -> tuple[int, ...]:
    """The shape of an array of keys; a raw key is a row of integers."""
    if _is_typed(keys):
        return keys.shape
    return keys.shape[:-1]


@typed
def step_key(key: Key, step: jax.Array | int) -> jax.Array:
    """Makes the key of one step: its examples get `example_keys(step_key(state.key, state.step), batch size)`.

    Args:
        key: the TrainState's key.
        step: steps taken before, from 0.

    Returns:
        A typed key.

    Example:
        >>> key = sk.step_key(jax.random.key(0), 7)
        >>> sk.example_keys(key, 4).shape
        (4,)
    """
    at_least("step_key", 0, step=step if isinstance(step, int) else None)
    check_single("step_key", key)
    # Salted, so that it differs from every key that the parameters were drawn from.
    return jax.random.fold_in(jax.random.fold_in(key, salt("shardkit.step")), step)


def check_single(where: str, key: jax.Array) -> None:
    """Refuses an array of keys where a single key is needed."""
    if _find_shape(key):
        raise ValueError(
            f"{where}: key must be one key; got keys of shape {_find_shape(key)}. Pass one of them, or fold all with "
            "jax.vmap."
        )
