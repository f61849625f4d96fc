"""Norms over a sharded dim: the statistics are those of the whole dim, in float32.

Use them for features that stay sharded. Under sequence parallelism a norm sees whole features: there a plain norm does.
Statistics over a batch, as in a batch norm, are two calls of `all_reduce(..., op="mean")`. Variances are computed in
two passes, as means of squared distances from the mean: the difference of two large means would cancel.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from shardkit._arguments.checks import Axis, at_least_zero, shapes
from shardkit._arguments.typed import typed
from shardkit.collectives import all_reduce, axis_size, vary
from shardkit.collectives._sums import wide
from shardkit.layers.matmul import live_axes


@typed
def sharded_rms_norm(x_Td: jax.Array, gain_d: jax.Array, axis: Axis | None, *, epsilon: float = 1e-6) -> jax.Array:
    """x / sqrt(mean(x^2) + epsilon) times a gain, with the features split over `axis`.

    Layout: `X[T, D_a] -> Y[T, D_a]`

    Args:
        x_Td: this device's features of each token, [..., d].
        gain_d: their gains, [d].
        axis: axis name or tuple of names; None for one device.
        epsilon: a small number, added to the mean square.

    Returns:
        Array of the shape and dtype of x.

    Raises:
        ValueError: an unbound axis.

    Cost: an all_reduce of 4 bytes per token forward, and one backward.

    Example:
        >>> features = P(None, "model")
        >>> kernel = lambda x, gain: sk.layers.sharded_rms_norm(x, gain, "model")
        >>> norm = jax.shard_map(kernel, mesh=mesh, in_specs=(features, P("model")), out_specs=features)
        >>> f"{norm(jnp.full((1, 8), 3.0), jnp.ones(8))[0, 0]:.3f}"
        '1.000'

    Source: Zhang, Sennrich, Root Mean Square Layer Normalization (arXiv:1910.07467).
    """
    at_least_zero("sharded_rms_norm", epsilon=epsilon)
    shapes("sharded_rms_norm", x_Td=(x_Td, "..d"), gain_d=(gain_d, "d"))
    names = live_axes("sharded_rms_norm", axis, x_Td, gain_d)
    x = _widen("sharded_rms_norm", "x_Td", x_Td)
    mean_square = _mean(x * x, names)
    scale = lax.rsqrt(mean_square + float(epsilon))
    return (x * scale).astype(x_Td.dtype) * _as_row(gain_d, x_Td)


@typed
def sharded_layer_norm(
    x_Td: jax.Array, gain_d: jax.Array, bias_d: jax.Array, axis: Axis | None, *, epsilon: float = 1e-5
) -> jax.Array:
    """(x - mean) / sqrt(variance + epsilon) times a gain plus a bias, with the features split over `axis`.

    Layout: `X[T, D_a] -> Y[T, D_a]`

    Args:
        x_Td: this device's features of each token, [..., d].
        gain_d: their gains, [d].
        bias_d: their biases, [d].
        axis: axis name or tuple of names; None for one device.
        epsilon: a small number, added to the variance.

    Returns:
        Array of the shape and dtype of x.

    Raises:
        ValueError: an unbound axis.

    Cost: two all_reduces of 4 bytes per token forward (the mean, then the variance), and two backward.

    Example:
        >>> features, vector = P(None, "model"), P("model")
        >>> kernel = lambda x, gain, bias: sk.layers.sharded_layer_norm(x, gain, bias, "model")
        >>> norm = jax.shard_map(kernel, mesh=mesh, in_specs=(features, vector, vector), out_specs=features)
        >>> f"{norm(jnp.arange(8.0)[None], jnp.ones(8), jnp.zeros(8)).mean():.3f}"
        '0.000'

    Source: Ba et al., Layer Normalization (arXiv:1607.06450).
    """
    at_least_zero("sharded_layer_norm", epsilon=epsilon)
    shapes("sharded_layer_norm", x_Td=(x_Td, "..d"), gain_d=(gain_d, "d"), bias_d=(bias_d, "d"))
    names = live_axes("sharded_layer_norm", axis, x_Td, gain_d, bias_d)
    x = _widen("sharded_layer_norm", "x_Td", x_Td)
    centered = x - vary(_mean(x, names), names)
    variance = _mean(centered * centered, names)
    scale = lax.rsqrt(variance + float(epsilon))
    normalized = (centered * scale).astype(x_Td.dtype)
    return normalized * _as_row(gain_d, x_Td) + _as_row(bias_d, x_Td)


def _widen(where: str, name: str, x: jax.Array) -> jax.Array:
    """The array in the dtype in which it is summed."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise TypeError(f"{where}: {name} must be floating-point; got {x.dtype}. Convert it with astype(jnp.float32).")
    return x.astype(wide(x.dtype))


def _mean(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """The mean over the last dim and the devices."""
    # A device averages its own features first, and sends only this mean: one number for each token. The sum stands
    # here, before the callers subtract the mean or divide by a root, because both need the statistics of all features:
    # with the mean of a device's own features, the norm would be another one on every mesh. Mean and variance are two
    # sums, one after the other. Both at once, as mean(x^2) - mean(x)^2, would cancel if the mean is large.
    mean = jnp.mean(x, axis=-1, keepdims=True)
    if not names:
        return mean
    return all_reduce(mean, names) / axis_size(names)


def _as_row(x_d: jax.Array, like: jax.Array) -> jax.Array:
    return x_d.reshape((1,) * (like.ndim - 1) + x_d.shape).astype(like.dtype)
