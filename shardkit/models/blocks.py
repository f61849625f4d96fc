"""What a layer of the reference transformer is made of: norm, rotary attention, SwiGLU, mixture of experts.

Each block is a pure function of one layer's weights and of tokens. The same code runs on one device and inside
shard_map over the mesh axes of `Axes`. Shapes: b this device's examples, T tokens (t: this device's, where they are
split), D model, H heads, G key/value heads, K head size, F hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shardkit._arguments.checks import Axis, at_least_zero, name_axes, positive, shapes
from shardkit._arguments.typed import check_fields, typed
from shardkit._jax.compat import varying_axes
from shardkit.collectives import axis_size
from shardkit.collectives.matmul import Impl
from shardkit.layers.attention import dot_attention
from shardkit.layers.context_attention import ring_attention, ulysses_attention
from shardkit.layers.linear import column_linear, local_groups, row_linear
from shardkit.layers.matmul import live_axes
from shardkit.layers.moe import moe
from shardkit.layers.routing import Capacity, Dropless
from shardkit.layers.zigzag import Order, positions
from shardkit.models.parameters import Config
from shardkit.on_device.batch import token_axes


@dataclass(frozen=True)
class Axes:
    """The mesh axes over which the model communicates; by default none, for one device.

    Attributes:
        model: tensor parallelism over heads, hidden width and vocabulary, laid out by `tensor_rules`.
        sequence: sequence parallelism: between blocks, tokens are split over `model`.
        context: context parallelism: tokens are split over it, with ring attention.
        ulysses: tokens are split over it, with attention split by heads; with `context`, it is the inner axis.
        order: the order of the tokens along `context`; the batch is in contiguous order.
        expert: expert parallelism.
        impl: with `sequence`, as for `all_gather_matmul`.
        stage: the axis of the pipeline, if the layers run as its stages.
        kernel: attention by jax's kernel on TPUs and GPUs, as for `dot_attention`.
    """

    model: Axis | None = None
    sequence: bool = False
    context: Axis | None = None
    ulysses: Axis | None = None
    order: Order = "zigzag"
    expert: Axis | None = None
    impl: Impl = "auto"
    stage: Axis | None = None
    kernel: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


ONE_DEVICE = Axes()
"""No axis at all: the model as it is on one device."""


def token_positions(tokens: int, axes: Axes) -> jax.Array:
    """Positions of this device's tokens in the sequence, [T]."""
    if axes.context is not None:
        return positions(tokens, axes.context, order=axes.order, ulysses=axes.ulysses)
    if axes.ulysses is not None:
        return positions(tokens, axes.ulysses)
    return jnp.arange(tokens, dtype=jnp.int32)


def check_tokens(axes: Axes, tokens_bT: jax.Array) -> None:
    """Refuses tokens that are not split over exactly the axes of attention.

    In a hand-written shard_map only the axes over which the tokens vary are known.
    """
    # In a step the plan says which axes split the tokens. With one that no attention runs over, each device would
    # attend to its own tokens alone, without an error: the loss would be another one than on one device.
    token_split = token_axes()
    attended: set[str] = set()
    for name, axis in (("context", axes.context), ("ulysses", axes.ulysses)):
        live = set(live_axes("transformer", axis))
        attended |= live
        rule = f"transformer: the tokens must be split over axes.{name}={axis!r}"
        remedy = f"Chain cp({axis!r}) into"
        same_tokens = live - varying_axes(tokens_bT)
        if same_tokens:
            raise ValueError(f"{rule}; got the same tokens along {name_axes(sorted(same_tokens))}. {remedy} the plan.")
        split_examples: set[str] = set()
        if token_split is not None:
            split_examples = live - set(token_split)
        if split_examples:
            raise ValueError(
                f"{rule}; got different examples along {name_axes(sorted(split_examples))}. {remedy} the plan, and dp "
                "over another axis."
            )
    if token_split is None:
        return
    unattended = tuple(axis for axis in token_split if axis not in attended)
    if unattended:
        raise ValueError(
            f"transformer: attention must run over {name_axes(unattended)}, which split the tokens in the plan; got "
            f"axes.context={axes.context!r} and axes.ulysses={axes.ulysses!r}. Pass Axes(context=...), or "
            "Axes(ulysses=...), with the axes of the plan's cp."
        )


def check_split(what: str, local: int, whole: int, axes: Axes) -> None:
    """Refuses weights that are not split over the model axis: sums over devices would count them more than once."""
    # The error of a plan without tp: the weights are whole on all devices of `model`, each computes the whole layer,
    # and `row_linear` sums n equal results.
    ways = 1 if axes.model is None else axis_size(axes.model)
    if local * ways == whole:
        return
    remedy = f"Chain tp({axes.model!r}, tensor_rules(config, {axes.model!r}, {ways})) into the plan."
    if axes.model is None:
        remedy = "Pass Axes(model=...) with the axis of the plan's tp."
    noun = what.split()[-1]
    raise ValueError(
        f"transformer: the {whole} {what} must be split over axes.model={axes.model!r}; got {local} {noun} on each of "
        f"{ways} devices. {remedy}"
    )


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
        >>> from shardkit.models import blocks, transformer
        >>> config = transformer.Config(layers=1, dim=16, heads=2)
        >>> layer = jax.tree.map(lambda x: np.asarray(x)[0], transformer.init(jax.random.key(0), config)["layers"])
        >>> jax.jit(blocks.attention, static_argnums=2)(layer, np.ones((1, 4, 16), "f"), config).shape
        (1, 4, 16)
    """
    shapes("attention", x_btD=(x_btD, "btD"))
    if positions_T is None:
        positions_T = jnp.arange(x_btD.shape[1])
    check_split("query heads", weights["query"].shape[-2], config.heads, axes)
    # A device computes h = H/n query heads. If the axis divides the G key/value heads too, it has theirs; if not, every
    # device has all G, and takes the ones that its query heads use.
    key = local_groups(weights["key"], axes.model, heads=config.heads, kv_heads=config.groups)
    value = local_groups(weights["value"], axes.model, heads=config.heads, kv_heads=config.groups)
    q_bThK, k_bTgK, v_bTgK = column_linear(
        x_btD, (weights["query"], key, value), axes.model, sequence=axes.sequence, impl=axes.impl
    )
    # Positions are applied before attention exchanges anything: a token knows its own position, and its rotated key is
    # as large as its key. Applied after a hop, positions would have to travel too.
    q_bThK = rotate(q_bThK, positions_T, config.rope_theta)
    k_bTgK = rotate(k_bTgK, positions_T, config.rope_theta)
    y_bThK = _attend(q_bThK, k_bTgK, v_bTgK, axes, segments_bT)
    return row_linear(y_bThK, weights["attention_out"], axes.model, sequence=axes.sequence, impl=axes.impl)


def _attend(
    q_bThK: jax.Array, k_bTgK: jax.Array, v_bTgK: jax.Array, axes: Axes, segments_bT: jax.Array | None
) -> jax.Array:
    """Attention in the form that the axes of the tokens ask for, [b, T, h, K]."""
    if axes.ulysses is not None:
        order: Order = "contiguous"
        if axes.context is not None:
            order = axes.order
        return ulysses_attention(
            q_bThK,
            k_bTgK,
            v_bTgK,
            axes.ulysses,
            ring=axes.context,
            order=order,
            segments_bt=segments_bT,
            kernel=axes.kernel,
        )
    if axes.context is not None:
        return ring_attention(
            q_bThK, k_bTgK, v_bTgK, axes.context, order=axes.order, segments_bt=segments_bT, kernel=axes.kernel
        )
    return dot_attention(q_bThK, k_bTgK, v_bTgK, segments_bt=segments_bT, kernel=axes.kernel)


@typed
def mlp(weights: Mapping[str, Any], x_btD: jax.Array, axes: Axes = ONE_DEVICE) -> jax.Array:
    """SwiGLU: silu(x W_gate) * (x W_up), then W_down.

    Example:
        >>> from shardkit.models import blocks
        >>> weights = {"gate": np.ones((16, 32), "f"), "up": np.ones((16, 32), "f"), "down": np.ones((32, 16), "f")}
        >>> jax.jit(blocks.mlp)(weights, np.ones((1, 4, 16), "f")).shape
        (1, 4, 16)
    """
    gate_bTf, up_bTf = column_linear(
        x_btD, (weights["gate"], weights["up"]), axes.model, sequence=axes.sequence, impl=axes.impl
    )
    h_bTf = jax.nn.silu(gate_bTf) * up_bTf
    return row_linear(h_bTf, weights["down"], axes.model, sequence=axes.sequence, impl=axes.impl)


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
        >>> from shardkit.models import blocks, transformer
        >>> config = transformer.Config(layers=1, dim=16, heads=2, experts=4)
        >>> layer = jax.tree.map(lambda x: np.asarray(x)[0], transformer.init(jax.random.key(0), config)["layers"])
        >>> y, losses, dropped = jax.jit(blocks.experts, static_argnums=2)(layer, np.ones((1, 4, 16), "f"), config)
        >>> dropped.tolist()
        [0.0, 8.0]
    """

    def swiglu(expert: Any, x_SD: jax.Array, dot: Any) -> jax.Array:
        # `dot` multiplies the tokens of each expert by its own matrix: what the routing makes of them, equal groups or
        # a ragged one, is its affair.
        gate_SF = jax.nn.silu(dot(x_SD, expert["gate"]))
        return dot(gate_SF * dot(x_SD, expert["up"]), expert["down"])

    routing: Capacity | Dropless = Dropless()
    if config.capacity is not None:
        routing = Capacity(config.capacity, config.group)
    y_btD, stats = moe(
        x_btD,
        weights["router"],
        weights["experts"],
        swiglu,
        axes.expert,
        top_k=config.top_k,
        routing=routing,
        weights=weights_bt,
        stage=axes.stage,
    )
    losses_2 = jnp.stack([stats.balance_loss, stats.z_loss])
    dropped_2 = jnp.stack(stats.dropped)
    return y_btD, losses_2, dropped_2


@typed
def rms_norm(x_bTD: jax.Array, gain_D: jax.Array, epsilon: float = 1e-6) -> jax.Array:
    """x / sqrt(mean(x^2) + epsilon) times a gain, with float32 statistics.

    Example:
        >>> from shardkit.models import blocks
        >>> blocks.rms_norm(jnp.array([[[3.0, -3.0]]]), jnp.ones(2)).round(3).tolist()
        [[[1.0, -1.0]]]
    """
    at_least_zero("rms_norm", epsilon=epsilon)
    shapes("rms_norm", x_bTD=(x_bTD, "bTD"), gain_D=(gain_D, "D"))
    # The sum over D alone needs float32: in bfloat16, with 8 bits, adding the thousandth square to the sum of the
    # others changes nothing.
    wide = x_bTD.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return (wide * scale).astype(x_bTD.dtype) * gain_D[None, None, :]


@typed
def rotate(x_bTHK: jax.Array, positions_T: jax.Array, theta: float = 10_000.0) -> jax.Array:
    """Rotary positions (Su et al., 2021): pairs of features rotate by an angle proportional to the position.

    Example:
        >>> from shardkit.models import blocks
        >>> x = jnp.ones((1, 4, 2, 8))
        >>> (blocks.rotate(x, jnp.arange(4)) == x).all(axis=(0, 2, 3)).tolist()
        [True, False, False, False]
    """
    positive("rotate", theta=theta)
    shapes("rotate", x_bTHK=(x_bTHK, "bTHK"), positions_T=(positions_T, "T"))
    K = x_bTHK.shape[-1]
    # Feature k is paired with feature k + K/2, as in GPT-NeoX and the Llama of Hugging Face; the paper, and the Llama
    # of Meta, pair neighbors. Weights that were trained with neighbors must be permuted. Angles are in float32: in
    # bfloat16 position 10,001 is 9,984.
    rates = theta ** (-jnp.arange(0, K, 2, dtype=jnp.float32) / K)
    angles = positions_T.astype(jnp.float32)[:, None] * rates[None, :]
    cos = jnp.cos(angles)[None, :, None, :]
    sin = jnp.sin(angles)[None, :, None, :]
    a, b = jnp.split(x_bTHK.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    return rotated.astype(x_bTHK.dtype)
