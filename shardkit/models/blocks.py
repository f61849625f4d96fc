"""The blocks of the reference transformer: attention, feed-forward, experts, norm and rotary positions.

Each runs on one device and, given `Axes`, inside shard_map. Shapes: b examples, T tokens (t: this device's, where they
are split), D model, F hidden, H heads, G key/value heads, K head size, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from shardkit._arguments.checks import at_least_zero, positive, shapes
from shardkit._arguments.typed import typed
from shardkit.layers.attention import dot_attention
from shardkit.layers.context_attention import ring_attention, ulysses_attention
from shardkit.layers.linear import column_linear, local_groups, row_linear
from shardkit.layers.moe import moe
from shardkit.layers.routing import Capacity, Dropless
from shardkit.models.axes import ONE_DEVICE, Axes, check_split
from shardkit.models.parameters import Config


@typed
def attention(
    weights: Mapping[str, Any],
    x_btD: jax.Array,
    config: Config,
    positions_T: jax.Array | None = None,
    axes: Axes = ONE_DEVICE,
    segments_bT: jax.Array | None = None,
) -> jax.Array:
    """Causal self-attention with rotary positions; each group of H/G heads shares one key/value head.

    Example:
        >>> from shardkit.models import transformer
        >>> config = transformer.Config(layers=1, dim=16, heads=2)
        >>> layer = jax.tree.map(lambda x: x[0], transformer.init(jax.random.key(0), config)["layers"])
        >>> transformer.attention(layer, jnp.ones((1, 4, 16)), config).shape
        (1, 4, 16)
    """
    positions_T = jnp.arange(x_btD.shape[1]) if positions_T is None else positions_T
    check_split("query heads", weights["query"].shape[-2], config.heads, axes)
    share: dict[str, Any] = {"sequence": axes.sequence, "impl": axes.impl}
    key, value = (
        local_groups(weights[name], axes.model, heads=config.heads, kv_heads=config.groups) for name in ("key", "value")
    )
    q_bThK, k_bTgK, v_bTgK = column_linear(x_btD, (weights["query"], key, value), axes.model, **share)
    q_bThK, k_bTgK = (rotate(x, positions_T, config.rope_theta) for x in (q_bThK, k_bTgK))
    along: dict[str, Any]
    qkv, along = (q_bThK, k_bTgK, v_bTgK), {"segments_bt": segments_bT}
    if axes.ulysses is not None:
        order = "contiguous" if axes.context is None else axes.order
        y_bThK = ulysses_attention(*qkv, axes.ulysses, ring=axes.context, order=order, **along)
    elif axes.context is not None:
        y_bThK = ring_attention(*qkv, axes.context, order=axes.order, **along)
    else:
        y_bThK = dot_attention(*qkv, **along)
    return row_linear(y_bThK, weights["attention_out"], axes.model, **share)


@typed
def mlp(weights: Mapping[str, Any], x_btD: jax.Array, axes: Axes = ONE_DEVICE) -> jax.Array:
    """SwiGLU: silu(x W_gate) * (x W_up), then W_down.

    Example:
        >>> from shardkit.models import transformer
        >>> weights = {"gate": jnp.ones((16, 32)), "up": jnp.ones((16, 32)), "down": jnp.ones((32, 16))}
        >>> transformer.mlp(weights, jnp.ones((1, 4, 16))).shape
        (1, 4, 16)
    """
    share: dict[str, Any] = {"sequence": axes.sequence, "impl": axes.impl}
    gate_bTf, up_bTf = column_linear(x_btD, (weights["gate"], weights["up"]), axes.model, **share)
    return row_linear(jax.nn.silu(gate_bTf) * up_bTf, weights["down"], axes.model, **share)


@typed
def experts(
    weights: Mapping[str, Any],
    x_btD: jax.Array,
    config: Config,
    axes: Axes = ONE_DEVICE,
    weights_bt: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A mixture of SwiGLU experts: the output, the two losses of the router, and the dropped and all choices.

    Example:
        >>> from shardkit.models import transformer
        >>> config = transformer.Config(layers=1, dim=16, heads=2, experts=4)
        >>> layer = jax.tree.map(lambda x: x[0], transformer.init(jax.random.key(0), config)["layers"])
        >>> y, losses, dropped = transformer.experts(layer, jnp.ones((1, 4, 16)), config)
        >>> dropped.tolist()
        [0.0, 8.0]
    """

    def swiglu(expert: Any, x_SD: jax.Array, dot: Any) -> jax.Array:
        return dot(jax.nn.silu(dot(x_SD, expert["gate"])) * dot(x_SD, expert["up"]), expert["down"])

    routing = Dropless() if config.capacity is None else Capacity(config.capacity, config.group)
    route: dict[str, Any] = {"top_k": config.top_k, "routing": routing, "weights": weights_bt, "stage": axes.stage}
    y_btD, stats = moe(x_btD, weights["router"], weights["experts"], swiglu, axes.expert, **route)
    return y_btD, jnp.stack([stats.balance_loss, stats.z_loss]), jnp.stack(stats.dropped)


@typed
def rms_norm(x_bTD: jax.Array, gain_D: jax.Array, epsilon: float = 1e-6) -> jax.Array:
    """x / sqrt(mean(x^2) + epsilon) times a gain, with float32 statistics.

    Example:
        >>> from shardkit.models import transformer
        >>> transformer.rms_norm(jnp.array([[[3.0, -3.0]]]), jnp.ones(2)).round(3).tolist()
        [[[1.0, -1.0]]]
    """
    at_least_zero("rms_norm", epsilon=epsilon)
    shapes("rms_norm", x_bTD=(x_bTD, "bTD"), gain_D=(gain_D, "D"))
    wide = x_bTD.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return (wide * scale).astype(x_bTD.dtype) * gain_D[None, None, :]


@typed
def rotate(x_bTHK: jax.Array, positions_T: jax.Array, theta: float = 10_000.0) -> jax.Array:
    """Rotary positions (Su et al., 2021): pairs of features rotate by an angle proportional to the position.

    Example:
        >>> from shardkit.models import transformer
        >>> x = jnp.ones((1, 4, 2, 8))
        >>> (transformer.rotate(x, jnp.arange(4)) == x).all(axis=(0, 2, 3)).tolist()
        [True, False, False, False]
    """
    positive("rotate", theta=theta)
    shapes("rotate", x_bTHK=(x_bTHK, "bTHK"), positions_T=(positions_T, "T"))
    K = x_bTHK.shape[-1]
    rates = theta ** (-jnp.arange(0, K, 2, dtype=jnp.float32) / K)
    angles = positions_T.astype(jnp.float32)[:, None] * rates[None, :]
    cos, sin = jnp.cos(angles)[None, :, None, :], jnp.sin(angles)[None, :, None, :]
    a, b = jnp.split(x_bTHK.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x_bTHK.dtype)
