"""A decoder-only transformer that can be read in one sitting: pre-norm RMSNorm, rotary positions, SwiGLU.

Pure functions on a pytree of parameters. `params["layers"]` is the stack of all layers (dim 0 is the layer), which
`scan_layers` walks; every other entry is shared. Shapes: B batch (b: this device's examples), T tokens, D model,
F hidden, H heads, G key/value heads, K head size, V vocabulary, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shardkit.parallel.gradient import Mean
from shardkit.parallel.layers import scan_layers
from shardkit.parallel.recompute import Remat
from shardkit.rng import dropout, fold_keys

_MASKED = -1e30  # finite: a row of -inf would make NaN gradients


@dataclass(frozen=True)
class Config:
    """The sizes of a transformer.

    Attributes:
        vocabulary: number of token values (256: bytes).
        layers: number of layers.
        dim: model width D; must be divisible by heads.
        heads: attention heads; dim / heads must be even, for the rotary positions.
        kv_heads: key/value heads, a divisor of heads; None means as many as heads.
        hidden: width F of the feed-forward layers; None means 8/3 D, rounded up to a multiple of 32.
        dropout: share of each block's output that is dropped in training.
        tied: use the embedding as the output head.
        remat, prefetch, microbatches: how `scan_layers` runs the stack; they change memory and time, not the numbers.
    """

    vocabulary: int = 256
    layers: int = 4
    dim: int = 128
    heads: int = 4
    kv_heads: int | None = None
    hidden: int | None = None
    dropout: float = 0.0
    tied: bool = False
    remat: Remat = None
    prefetch: bool = False
    microbatches: int = 1

    def __post_init__(self) -> None:
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise ValueError(
                f"transformer: dim must be divisible by heads into an even head size; got dim {self.dim} over "
                f"{self.heads} heads. Change dim or heads."
            )
        if self.heads % self.groups:
            raise ValueError(
                f"transformer: kv_heads must divide heads; got {self.groups} for {self.heads} heads. Change one."
            )

    @property
    def head_size(self) -> int:
        """K = D / H."""
        return self.dim // self.heads

    @property
    def groups(self) -> int:
        """G, the number of key/value heads."""
        return self.kv_heads or self.heads

    @property
    def width(self) -> int:
        """F, the width of the feed-forward layers."""
        return self.hidden or 32 * math.ceil(8 * self.dim / 3 / 32)


def init(key: jax.Array, config: Config) -> Any:
    """Draws the parameters: the same values on every mesh, float32.

    Args:
        key: typed or raw key.
        config: the sizes.

    Returns:
        `{"embed": [V, D], "layers": {...: [L, ...]}, "final_norm": [D], "head": [D, V]}` (no head if tied).
    """
    c = config
    shapes = {
        "query": (c.layers, c.dim, c.heads, c.head_size),
        "key": (c.layers, c.dim, c.groups, c.head_size),
        "value": (c.layers, c.dim, c.groups, c.head_size),
        "attention_out": (c.layers, c.heads, c.head_size, c.dim),
        "gate": (c.layers, c.dim, c.width),
        "up": (c.layers, c.dim, c.width),
        "down": (c.layers, c.width, c.dim),
    }
    keys = iter(jax.random.split(key, len(shapes) + 2))
    # What adds to the residual stream starts smaller, so that its variance does not grow with depth.
    scales = dict.fromkeys(("attention_out", "down"), 0.02 / math.sqrt(2 * c.layers))
    layers = {name: scales.get(name, 0.02) * jax.random.normal(next(keys), s) for name, s in shapes.items()}
    layers |= {name: jnp.ones((c.layers, c.dim)) for name in ("attention_norm", "mlp_norm")}
    params = {
        "embed": 0.02 * jax.random.normal(next(keys), (c.vocabulary, c.dim)),
        "layers": layers,
        "final_norm": jnp.ones(c.dim),
    }
    if not c.tied:
        params["head"] = 0.02 * jax.random.normal(next(keys), (c.dim, c.vocabulary))
    return params


def logical_axes(config: Config) -> Any:
    """The logical name of every dim of every leaf of `init`, for `specs_from_rules` and the plans' rules."""
    axes = {
        "embed": ("vocabulary", "embed"),
        "layers": {
            "query": ("layers", "embed", "heads", "head_size"),
            "key": ("layers", "embed", "kv_heads", "head_size"),
            "value": ("layers", "embed", "kv_heads", "head_size"),
            "attention_out": ("layers", "heads", "head_size", "embed"),
            "gate": ("layers", "embed", "hidden"),
            "up": ("layers", "embed", "hidden"),
            "down": ("layers", "hidden", "embed"),
            "attention_norm": ("layers", "embed"),
            "mlp_norm": ("layers", "embed"),
        },
        "final_norm": ("embed",),
    }
    return axes if config.tied else axes | {"head": ("embed", "vocabulary")}


def apply(params: Any, tokens_bT: jax.Array, config: Config, keys_b: jax.Array | None = None) -> jax.Array:
    """The logits of the next token after each token.

    Args:
        params: as `init` makes them, in any floating dtype.
        tokens_bT: int32 tokens, shape [b, T].
        config: the sizes.
        keys_b: one key for each example, for dropout; None in evaluation.

    Returns:
        Logits, shape [b, T, V], in the dtype of the parameters.
    """

    def layer(each: tuple[Any, jax.Array], x: tuple[jax.Array, jax.Array | None]) -> tuple[jax.Array, jax.Array | None]:
        (weights, number), (x_bTD, keys_b) = each, x
        return block(weights, x_bTD, config, None if keys_b is None else fold_keys(keys_b, number)), keys_b

    stack = params["layers"], jnp.arange(config.layers)
    # The keys travel with the examples, so that each microbatch has its own.
    how: dict[str, Any] = {name: getattr(config, name) for name in ("remat", "prefetch", "microbatches")}
    x_bTD, _ = scan_layers(layer, stack, (params["embed"][tokens_bT], keys_b), **how)
    x_bTD = rms_norm(x_bTD, params["final_norm"])
    head_DV = params["embed"].T if config.tied else params["head"]
    return jnp.einsum("bTD,DV->bTV", x_bTD, head_DV)


def block(weights: Any, x_bTD: jax.Array, config: Config, keys_b: jax.Array | None) -> jax.Array:
    """One layer: attention and feed-forward, each behind a norm and added to the residual stream."""
    drop = [None, None] if keys_b is None else [fold_keys(keys_b, 0), fold_keys(keys_b, 1)]
    y_bTD = attention(weights, rms_norm(x_bTD, weights["attention_norm"]), config)
    x_bTD = x_bTD + dropout(y_bTD, drop[0], config.dropout)
    y_bTD = mlp(weights, rms_norm(x_bTD, weights["mlp_norm"]))
    return x_bTD + dropout(y_bTD, drop[1], config.dropout)


def attention(weights: Any, x_bTD: jax.Array, config: Config) -> jax.Array:
    """Causal self-attention with rotary positions; each group of H/G heads shares one key/value head."""
    q_bTHK = rotate(jnp.einsum("bTD,DHK->bTHK", x_bTD, weights["query"]))
    k_bTGK = rotate(jnp.einsum("bTD,DGK->bTGK", x_bTD, weights["key"]))
    v_bTGK = jnp.einsum("bTD,DGK->bTGK", x_bTD, weights["value"])
    b, T, _, K = q_bTHK.shape
    q_bTGRK = q_bTHK.reshape(b, T, config.groups, -1, K)
    s_bGRTS = jnp.einsum("bTGRK,bSGK->bGRTS", q_bTGRK, k_bTGK).astype(jnp.float32) / math.sqrt(K)
    causal_TS = jnp.tril(jnp.ones((T, T), bool))
    p_bGRTS = jax.nn.softmax(jnp.where(causal_TS[None, None, None], s_bGRTS, _MASKED), axis=-1)
    y_bTGRK = jnp.einsum("bGRTS,bSGK->bTGRK", p_bGRTS.astype(x_bTD.dtype), v_bTGK)
    return jnp.einsum("bTHK,HKD->bTD", y_bTGRK.reshape(b, T, -1, K), weights["attention_out"])


def mlp(weights: Any, x_bTD: jax.Array) -> jax.Array:
    """SwiGLU: silu(x W_gate) * (x W_up), then W_down."""
    gate_bTF = jax.nn.silu(jnp.einsum("bTD,DF->bTF", x_bTD, weights["gate"]))
    up_bTF = jnp.einsum("bTD,DF->bTF", x_bTD, weights["up"])
    return jnp.einsum("bTF,FD->bTD", gate_bTF * up_bTF, weights["down"])


def rms_norm(x_bTD: jax.Array, gain_D: jax.Array) -> jax.Array:
    """x / sqrt(mean(x^2) + 1e-6) times a gain; the statistics are float32."""
    wide = x_bTD.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x_bTD.dtype) * gain_D[None, None, :]


def rotate(x_bTHK: jax.Array) -> jax.Array:
    """Rotary positions (Su et al., 2021): pairs of features turn by an angle that grows with the position."""
    _, T, _, K = x_bTHK.shape
    rates = 10_000.0 ** (-jnp.arange(0, K, 2, dtype=jnp.float32) / K)
    angles = jnp.arange(T, dtype=jnp.float32)[:, None] * rates[None, :]
    cos, sin = jnp.cos(angles)[None, :, None, :], jnp.sin(angles)[None, :, None, :]
    a, b = jnp.split(x_bTHK.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x_bTHK.dtype)


def loss_fn(config: Config) -> Callable[[Any, Any, Any], tuple[Mean, dict[str, Mean]]]:
    """The mean cross-entropy of the next token in nats, and the share that was predicted right.

    Args:
        config: the sizes.

    Returns:
        `loss(params, batch, keys)` for `value_and_grad`. The batch holds "tokens" and "targets", int32 [b, T], and may
        hold "weights" [b, T]: tokens of weight 0 count for nothing.
    """

    def loss(params: Any, batch: Any, keys: jax.Array | None) -> tuple[Mean, dict[str, Mean]]:
        logits_bTV = apply(params, batch["tokens"], config, keys).astype(jnp.float32)
        targets_bT = batch["targets"]
        right_bT = jnp.take_along_axis(logits_bTV, targets_bT[..., None], axis=-1)[..., 0]
        nats_bT = jax.nn.logsumexp(logits_bTV, axis=-1) - right_bT
        hits_bT = jnp.argmax(logits_bTV, axis=-1) == targets_bT
        weights_bT = batch.get("weights")
        return Mean.of(nats_bT, weights_bT), {"accuracy": Mean.of(hits_bT, weights_bT)}

    return loss
