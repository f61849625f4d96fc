"""A decoder-only transformer that can be read in one sitting: pre-norm RMSNorm, rotary positions, SwiGLU, experts.

Pure functions on a pytree of parameters. `params["layers"]` is the stack of all layers (dim 0 is the layer), which
`scan_layers` walks; every other entry is shared. One text runs on one device and, given `Axes`, inside shard_map over
the mesh axes that they name. Shapes: B batch (b: this device's examples), T tokens (t: this device's, where they are
split), D model, F hidden, H heads, G key/value heads, K head size, V vocabulary, L layers, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardkit._check import Axis, named
from shardkit._compat import varying_axes
from shardkit.collectives import axis_index, axis_size
from shardkit.collectives.matmul import Impl
from shardkit.models.parameters import Config, init, logical_axes, tensor_rules
from shardkit.parallel.attention import dot_attention
from shardkit.parallel.context import ring_attention, ulysses_attention
from shardkit.parallel.expert import moe
from shardkit.parallel.gradient import Mean
from shardkit.parallel.layers import scan_layers
from shardkit.parallel.local import live_axes
from shardkit.parallel.orders import Order, positions, zigzag
from shardkit.parallel.tensor import column_linear, local_groups, row_linear
from shardkit.parallel.vocabulary import vocab_cross_entropy_and_hits, vocab_embed
from shardkit.rng import dropout, fold_keys

__all__ = [
    "ONE_DEVICE",
    "Axes",
    "Config",
    "apply",
    "attention",
    "experts",
    "init",
    "logical_axes",
    "loss_fn",
    "mlp",
    "rms_norm",
    "rotate",
    "run",
    "tensor_rules",
]


@dataclass(frozen=True)
class Axes:
    """The mesh axes over which the model itself communicates; without any it is a model on one device.

    Attributes:
        model: tensor parallelism: heads, hidden width and vocabulary are split, as `tensor_rules` lays them out.
        sequence: between blocks, tokens are split over `model` too.
        context: tokens are split over it, and attention goes round a ring.
        ulysses: tokens are split over it, and attention splits heads instead; with `context`, inside of it.
        order: the order of the tokens along `context`; the batch comes in natural order.
        expert: the experts are split over it.
        impl: how gathered matmuls are cut up, with `sequence`.
    """

    model: Axis | None = None
    sequence: bool = False
    context: Axis | None = None
    ulysses: Axis | None = None
    order: Order = "zigzag"
    expert: Axis | None = None
    impl: Impl = "auto"


ONE_DEVICE = Axes()


class Stream(NamedTuple):
    """What travels from layer to layer; dim 0 of every array is the example.

    Attributes:
        x: the residual stream, [b, t, D].
        keys: a key for each token, [b, t], or None in evaluation.
        weights: the tokens' weights, [b, t], or None.
        segments: the documents that are packed into each sequence, int32 [b, T], or None.
        losses: with experts, the load-balance and z-losses so far, [b, 2].
        dropped: with experts, the choices without room and all choices so far, [b, 2].
    """

    x: jax.Array
    keys: jax.Array | None
    weights: jax.Array | None
    segments: jax.Array | None
    losses: Any
    dropped: Any


def apply(
    params: Any,
    tokens_bT: jax.Array,
    config: Config,
    keys_b: jax.Array | None = None,
    axes: Axes = ONE_DEVICE,
) -> jax.Array:
    """The logits of the next token after each token.

    Args:
        params: as `init` makes them, in any floating dtype.
        tokens_bT: int32 tokens, shape [b, T].
        config: the sizes.
        keys_b: one key for each example, for dropout; None in evaluation.
        axes: the mesh axes to use; under `context` in zigzag order the tokens are in that order already.

    Returns:
        Logits, shape [b, T, V], in the dtype of the parameters; with `axes.model` this device's share of V.
    """
    x_btD = run(params, tokens_bT, config, keys_b, axes).x
    return column_linear(x_btD, _head(params, config), axes.model, sequence=axes.sequence, impl=axes.impl)


def run(
    params: Any,
    tokens_bT: jax.Array,
    config: Config,
    keys_b: jax.Array | None = None,
    axes: Axes = ONE_DEVICE,
    weights_bT: jax.Array | None = None,
    segments_bT: jax.Array | None = None,
) -> Stream:
    """Everything but the head: the stream after the last layer and its norm."""
    places_T = _places(tokens_bT.shape[1], axes)

    def mine(x: jax.Array | None, dim: int) -> Any:
        """This device's tokens, where `sequence` splits them."""
        if x is None or not axes.sequence or axes.model is None:
            return x
        size = x.shape[dim] // axis_size(axes.model)
        return jax.lax.dynamic_slice_in_dim(x, axis_index(axes.model) * size, size, dim)

    def layer(each: tuple[Any, jax.Array], stream: Stream) -> Stream:
        weights, number = each
        keys = stream.keys
        drop = [None, None] if keys is None else [fold_keys(keys, 2 * number + i) for i in range(2)]
        h_btD = rms_norm(stream.x, weights["attention_norm"])
        y_btD = attention(weights, h_btD, config, places_T, axes, stream.segments)
        x_btD = stream.x + dropout(y_btD, drop[0], config.dropout)
        h_btD = rms_norm(x_btD, weights["mlp_norm"])
        if not config.experts:
            return stream._replace(x=x_btD + dropout(mlp(weights, h_btD, axes), drop[1], config.dropout))
        y_btD, losses_2, dropped_2 = experts(weights, h_btD, config, axes, stream.weights)
        b = x_btD.shape[0]
        return stream._replace(
            x=x_btD + dropout(y_btD, drop[1], config.dropout),
            losses=stream.losses + losses_2[None],
            dropped=stream.dropped + dropped_2[None] / b,
        )

    b = tokens_bT.shape[0]
    # A token's key depends on where it stands in the sequence, not on the device that holds it.
    dropped = keys_b is not None and config.dropout > 0
    keys_bt = fold_keys(keys_b[:, None], mine(places_T, 0)[None]) if dropped else None  # type: ignore[index]
    x_btD = vocab_embed(tokens_bT, params["embed"], axes.model, sequence=axes.sequence)
    counts = [jnp.zeros((b, 2)) if config.experts else None for _ in range(2)]
    first = Stream(x_btD, keys_bt, mine(weights_bT, 1) if config.experts else None, segments_bT, *counts)
    how: dict[str, Any] = {name: getattr(config, name) for name in ("remat", "prefetch", "microbatches")}
    last = scan_layers(layer, (params["layers"], jnp.arange(config.layers)), first, **how)
    return last._replace(x=rms_norm(last.x, params["final_norm"]))


def attention(
    weights: Any,
    x_btD: jax.Array,
    config: Config,
    places_T: jax.Array | None = None,
    axes: Axes = ONE_DEVICE,
    segments_bT: jax.Array | None = None,
) -> jax.Array:
    """Causal self-attention with rotary positions; each group of H/G heads shares one key/value head."""
    places_T = jnp.arange(x_btD.shape[1]) if places_T is None else places_T
    ways, heads = 1 if axes.model is None else axis_size(axes.model), weights["query"].shape[-2]
    if heads * ways != config.heads:
        remedy = f"Chain tp({axes.model!r}, tensor_rules(config, {axes.model!r}, {ways})) into the plan."
        if axes.model is None:
            remedy = "Pass Axes(model=...) with the axis of the plan's tp."
        raise ValueError(
            f"transformer: the {config.heads} query heads must be split over axes.model={axes.model!r}; got {heads} "
            f"heads on each of {ways} devices. {remedy}"
        )
    share: dict[str, Any] = {"sequence": axes.sequence, "impl": axes.impl}
    key, value = (
        local_groups(weights[name], axes.model, heads=config.heads, kv_heads=config.groups) for name in ("key", "value")
    )
    q_bThK, k_bTgK, v_bTgK = column_linear(x_btD, (weights["query"], key, value), axes.model, **share)
    q_bThK, k_bTgK = rotate(q_bThK, places_T), rotate(k_bTgK, places_T)
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


def mlp(weights: Any, x_btD: jax.Array, axes: Axes = ONE_DEVICE) -> jax.Array:
    """SwiGLU: silu(x W_gate) * (x W_up), then W_down."""
    share: dict[str, Any] = {"sequence": axes.sequence, "impl": axes.impl}
    gate_bTf, up_bTf = column_linear(x_btD, (weights["gate"], weights["up"]), axes.model, **share)
    return row_linear(jax.nn.silu(gate_bTf) * up_bTf, weights["down"], axes.model, **share)


def experts(
    weights: Any, x_btD: jax.Array, config: Config, axes: Axes = ONE_DEVICE, weights_bt: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A mixture of SwiGLU experts: its answer, the two losses of its router, and the dropped and all choices."""

    def answer(expert: Any, x_SD: jax.Array, dot: Any) -> jax.Array:
        return dot(jax.nn.silu(dot(x_SD, expert["gate"])) * dot(x_SD, expert["up"]), expert["down"])

    places: dict[str, Any] = {"dropless": True}
    if config.capacity is not None:
        places = {"capacity_factor": config.capacity, "group": config.group}
    route: dict[str, Any] = {"top_k": config.top_k, "weights": weights_bt} | places
    y_btD, stats = moe(x_btD, weights["router"], weights["experts"], answer, axes.expert, **route)
    return y_btD, jnp.stack([stats.balance_loss, stats.z_loss]), jnp.stack(stats.dropped)


def rms_norm(x_bTD: jax.Array, gain_D: jax.Array) -> jax.Array:
    """x / sqrt(mean(x^2) + 1e-6) times a gain; the statistics are float32."""
    wide = x_bTD.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x_bTD.dtype) * gain_D[None, None, :]


def rotate(x_bTHK: jax.Array, places_T: jax.Array) -> jax.Array:
    """Rotary positions (Su et al., 2021): pairs of features turn by an angle that grows with the token's place."""
    K = x_bTHK.shape[-1]
    rates = 10_000.0 ** (-jnp.arange(0, K, 2, dtype=jnp.float32) / K)
    angles = places_T.astype(jnp.float32)[:, None] * rates[None, :]
    cos, sin = jnp.cos(angles)[None, :, None, :], jnp.sin(angles)[None, :, None, :]
    a, b = jnp.split(x_bTHK.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x_bTHK.dtype)


def loss_fn(config: Config, axes: Axes = ONE_DEVICE) -> Callable[[Any, Any, Any], tuple[Mean, dict[str, Mean]]]:
    """The mean cross-entropy of the next token in nats, and the share that was predicted right.

    Args:
        config: the sizes.
        axes: the mesh axes to use.

    Returns:
        `loss(params, batch, keys)` for `value_and_grad`. The batch holds "tokens" and "targets", int32 [b, T], and may
        hold "weights" [b, T], tokens of weight 0 count for nothing, and "segments", int32 [b, T]: the document of each
        token, which attends to its own only. With experts the loss includes those of the router, and "dropped" is the
        share of choices without room.

    Raises:
        ValueError: at trace time, heads or tokens that the plan does not split as `axes` say.
    """

    def loss(params: Any, batch: Any, keys: jax.Array | None) -> tuple[Mean, dict[str, Mean]]:
        for name, axis in (("context", axes.context), ("ulysses", axes.ulysses)):
            whole = set(live_axes("transformer", axis)) - varying_axes(batch["tokens"])
            if whole:
                raise ValueError(
                    f"transformer: the tokens must be split over axes.{name}={axis!r}; got the same along "
                    f"{named(sorted(whole))}. Chain cp({axis!r}) into the plan."
                )
        if axes.context is not None and axes.order == "zigzag":
            batch = zigzag(batch, axes.context, ulysses=axes.ulysses)
        weights_bT = batch.get("weights")
        stream = run(params, batch["tokens"], config, keys, axes, weights_bT, batch.get("segments"))
        nats_bT, hits_bT = vocab_cross_entropy_and_hits(
            stream.x, _head(params, config), batch["targets"], axes.model, sequence=axes.sequence
        )
        mean = Mean.of(nats_bT, weights_bT)
        aux = {"accuracy": Mean.of(hits_bT, weights_bT)}
        if config.experts:
            weight_bT = jnp.ones_like(nats_bT) if weights_bT is None else weights_bT.astype(jnp.float32)
            extra_b = stream.losses @ jnp.array([config.balance, config.router_z])
            mean = Mean(mean.total + jnp.sum(extra_b * jnp.sum(weight_bT, axis=1)), mean.weight)
            aux["dropped"] = Mean(*jnp.sum(stream.dropped, axis=0))
        return mean, aux

    return loss


def _head(params: Any, config: Config) -> jax.Array:
    return params["embed"].T if config.tied else params["head"]


def _places(tokens: int, axes: Axes) -> jax.Array:
    """Where this device's tokens stand in the sequence, [T]."""
    if axes.context is not None:
        return positions(tokens, axes.context, order=axes.order, ulysses=axes.ulysses)
    return jnp.arange(tokens, dtype=jnp.int32) if axes.ulysses is None else positions(tokens, axes.ulysses)
