"""A short decoder-only transformer: pre-norm RMSNorm, rotary positions, SwiGLU, mixture of experts.

Pure functions on a pytree of parameters. `params["layers"]` is the stack of all layers (dim 0 is the layer), over which
`scan_layers` scans; every other entry is shared, and may be a lazy leaf, as of
`fsdp("d", layerwise=("layers", "embed", "head"))`: then it is whole only where it is used, and gathered again in each
microbatch. The same code runs on one device, inside shard_map over the mesh axes of `Axes`, and, with `pieces`, as a
pipeline. Shapes: B batch (b: this device's examples), T tokens (t: this device's, where they are split), D model, V
vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardkit._arguments.checks import Axis, at_least_zero, named, positive, quoted, shapes
from shardkit._arguments.typed import Arrays, Key, check_fields, typed
from shardkit._jax.compat import varying_axes
from shardkit.collectives import axis_index, axis_size
from shardkit.collectives.matmul import Impl
from shardkit.layers.attention import dot_attention
from shardkit.layers.context_attention import ring_attention, ulysses_attention
from shardkit.layers.linear import column_linear, local_groups, row_linear
from shardkit.layers.matmul import live_axes
from shardkit.layers.moe import moe
from shardkit.layers.routing import Capacity, Dropless
from shardkit.layers.vocabulary import vocab_cross_entropy_and_hits, vocab_embed
from shardkit.layers.zigzag import Order, positions, zigzag
from shardkit.meshes.rng import dropout, fold_keys
from shardkit.models.parameters import Config, init, logical_axes, muon_dims, tensor_rules
from shardkit.on_device.batch import token_axes
from shardkit.on_device.means import Mean
from shardkit.on_device.pipelines import Staged
from shardkit.remat.layers import gathered, scan_layers

__all__ = [
    "ONE_DEVICE",
    "Axes",
    "Config",
    "apply",
    "attention",
    "experts",
    "in_order",
    "init",
    "logical_axes",
    "loss_fn",
    "mlp",
    "muon_dims",
    "pieces",
    "rms_norm",
    "rotate",
    "run",
    "tensor_rules",
]

Piece = Callable[[Any, Any, Any], Any]


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
    """

    model: Axis | None = None
    sequence: bool = False
    context: Axis | None = None
    ulysses: Axis | None = None
    order: Order = "zigzag"
    expert: Axis | None = None
    impl: Impl = "auto"
    stage: Axis | None = None

    def __post_init__(self) -> None:
        check_fields(self)


ONE_DEVICE = Axes()
"""No axis at all: the model as it is on one device."""


def token_positions(tokens: int, axes: Axes) -> jax.Array:
    """Positions of this device's tokens in the sequence, [T]."""
    if axes.context is not None:
        return positions(tokens, axes.context, order=axes.order, ulysses=axes.ulysses)
    return jnp.arange(tokens, dtype=jnp.int32) if axes.ulysses is None else positions(tokens, axes.ulysses)


def check_tokens(axes: Axes, tokens_bT: jax.Array) -> None:
    """Refuses tokens that are not split over exactly the axes of attention.

    In a hand-written shard_map only the axes over which the tokens vary are known.
    """
    split, attended = token_axes(), set[str]()
    for name, axis in (("context", axes.context), ("ulysses", axes.ulysses)):
        live = set(live_axes("transformer", axis))
        whole = live - varying_axes(tokens_bT)
        attended |= live
        rule, remedy = f"transformer: the tokens must be split over axes.{name}={axis!r}", f"Chain cp({axis!r}) into"
        if whole:
            raise ValueError(f"{rule}; got the same tokens along {named(sorted(whole))}. {remedy} the plan.")
        examples = live if split is None else live & set(split)
        if live != examples:
            raise ValueError(
                f"{rule}; got different examples along {named(sorted(live - examples))}. {remedy} the plan, and dp "
                "over another axis."
            )
    if split is not None and not set(split) <= attended:
        other = tuple(axis for axis in split if axis not in attended)
        raise ValueError(
            f"transformer: attention must run over {named(other)}, which split the tokens in the plan; got "
            f"axes.context={axes.context!r} and axes.ulysses={axes.ulysses!r}. Pass Axes(context=...), or "
            "Axes(ulysses=...), with the axes of the plan's cp."
        )


def check_split(what: str, here: int, whole: int, axes: Axes) -> None:
    """Refuses weights that are not split over the model axis: sums over devices would count them more than once."""
    ways = 1 if axes.model is None else axis_size(axes.model)
    if here * ways == whole:
        return
    remedy = f"Chain tp({axes.model!r}, tensor_rules(config, {axes.model!r}, {ways})) into the plan."
    if axes.model is None:
        remedy = "Pass Axes(model=...) with the axis of the plan's tp."
    what, noun = f"{whole} {what}", what.split()[-1]
    raise ValueError(
        f"transformer: the {what} must be split over axes.model={axes.model!r}; got {here} {noun} on each of {ways} "
        f"devices. {remedy}"
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
        >>> from shardkit.models import transformer
        >>> config = transformer.Config(layers=1, dim=16, heads=2)
        >>> layer = jax.tree.map(lambda x: np.asarray(x)[0], transformer.init(jax.random.key(0), config)["layers"])
        >>> jax.jit(transformer.attention, static_argnums=2)(layer, np.ones((1, 4, 16), "f"), config).shape
        (1, 4, 16)
    """
    shapes("attention", x_btD=(x_btD, "btD"))
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
        >>> weights = {"gate": np.ones((16, 32), "f"), "up": np.ones((16, 32), "f"), "down": np.ones((32, 16), "f")}
        >>> jax.jit(transformer.mlp)(weights, np.ones((1, 4, 16), "f")).shape
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
        >>> layer = jax.tree.map(lambda x: np.asarray(x)[0], transformer.init(jax.random.key(0), config)["layers"])
        >>> y, losses, dropped = jax.jit(transformer.experts, static_argnums=2)(layer, np.ones((1, 4, 16), "f"), config)
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


class Stream(NamedTuple):
    """The carry from layer to layer; dim 0 of every array is the example.

    Attributes:
        x: the residual stream, [b, t, D].
        keys: a key for each token, [b, t], or None in evaluation and between the stages of a pipeline.
        weights: the tokens' weights, [b, t], or None.
        segments: the document of each token in packed sequences, int32 [b, T], or None.
        losses: with experts, the load-balance and z-losses so far, [b, 2].
        dropped: with experts, the dropped and all expert choices so far, [b, 2].
    """

    x: jax.Array
    keys: jax.Array | None
    weights: jax.Array | None
    segments: jax.Array | None
    losses: Any
    dropped: Any


@typed
def apply(
    params: Arrays, tokens_bT: jax.Array, config: Config, keys_b: Key | None = None, axes: Axes = ONE_DEVICE
) -> jax.Array:
    """The logits of the next token after each token.

    Args:
        params: as from `init`, in any floating-point dtype.
        tokens_bT: int32 tokens, shape [b, T].
        config: the sizes.
        keys_b: one key for each example, for dropout; None in evaluation.
        axes: the mesh axes to use; with `context` in zigzag order, the tokens must be in that order.

    Returns:
        Logits, shape [b, T, V], in the dtype of the parameters; with `axes.model` this device's shard of V.

    Example:
        >>> from shardkit.models import transformer
        >>> config = transformer.Config(layers=1, dim=16, heads=2)
        >>> params = transformer.init(jax.random.key(0), config)
        >>> jax.jit(transformer.apply, static_argnums=2)(params, np.zeros((1, 4), np.int32), config).shape
        (1, 4, 256)
    """
    stream = run(params, {"tokens": tokens_bT}, config, keys_b, axes)

    def logits(last: Any, x_btD: jax.Array) -> jax.Array:
        x_btD = rms_norm(x_btD, last["final_norm"], config.norm_epsilon)
        return column_linear(x_btD, _head(last, config), axes.model, sequence=axes.sequence, impl=axes.impl)

    return gathered(logits, keep=True)(_last(params, config), stream.x)


@typed
def run(
    params: Arrays, batch: Mapping[str, Any], config: Config, keys_b: Key | None = None, axes: Axes = ONE_DEVICE
) -> Stream:
    """The stream after the last layer.

    Example:
        >>> from shardkit.models import transformer
        >>> config = transformer.Config(layers=1, dim=16, heads=2)
        >>> params = transformer.init(jax.random.key(0), config)
        >>> transformer.run(params, {"tokens": jnp.zeros((1, 4), jnp.int32)}, config).x.shape
        (1, 4, 16)
    """
    embed, stage, _ = pieces(config, axes)
    return stage((params["layers"], jnp.arange(config.layers)), embed(params, batch, keys_b), keys_b)


@typed
def pieces(config: Config, axes: Axes = ONE_DEVICE) -> tuple[Piece, Piece, Piece]:
    """The model as the three functions of a pipeline, whose composition over all layers is the loss.

    Of `pipe = pipeline(schedule, axes.stage)` the GradFn is
    `in_order(pipe.value_and_grad(*pieces(config, axes), layer_numbers=True), axes)`, and `in_order(pipe.loss(...),
    axes)` the loss.

    Args:
        config: the sizes.
        axes: the mesh axes to use; with experts, `stage` too.

    Returns:
        `embed(shared, batch, keys) -> Stream`, `stage((layers, numbers), Stream, keys) -> Stream`, and
        `head(shared, Stream, batch) -> (Mean, aux)`. The batch is as for `loss_fn`; with `context` in zigzag order, it
        must be in that order.

    Example:
        >>> from shardkit.models import transformer
        >>> config = transformer.Config(layers=1, dim=16, heads=2)
        >>> params, tokens = transformer.init(jax.random.key(0), config), jnp.zeros((1, 4), jnp.int32)
        >>> embed, stage, head = transformer.pieces(config)
        >>> stage((params["layers"], jnp.arange(1)), embed(params, {"tokens": tokens}, None), None).x.shape
        (1, 4, 16)
    """

    def mine(x: jax.Array, dim: int) -> jax.Array:
        """This device's tokens, if `sequence` splits them."""
        if not axes.sequence or axes.model is None:
            return x
        size = x.shape[dim] // axis_size(axes.model)
        return jax.lax.dynamic_slice_in_dim(x, axis_index(axes.model) * size, size, dim)

    def embed(shared: Any, batch: Any, keys_b: jax.Array | None) -> Stream:
        tokens_bT = _entry(batch, "tokens")
        check_tokens(axes, tokens_bT)
        lookup = partial(vocab_embed, tokens_bT, axis=axes.model, sequence=axes.sequence)
        x_btD = gathered(lookup, keep=True)(shared["embed"])
        weights_bT = _weights(batch) if config.experts else None
        weights_bt = None if weights_bT is None else mine(weights_bT, 1)
        counts = [jnp.zeros((x_btD.shape[0], 2)) if config.experts else None for _ in range(2)]
        return Stream(x_btD, None, weights_bt, batch.get("segments"), *counts)

    def stage(layers: tuple[Any, jax.Array], stream: Stream, keys_b: jax.Array | None) -> Stream:
        t = stream.x.shape[1]
        positions_T = token_positions(
            t * axis_size(axes.model) if axes.sequence and axes.model is not None else t, axes
        )
        if keys_b is not None and config.dropout > 0:
            # A token's key depends on its position in the sequence, not on its device.
            stream = stream._replace(keys=fold_keys(keys_b[:, None], mine(positions_T, 0)[None]))
        how: dict[str, Any] = {name: getattr(config, name) for name in ("remat", "prefetch", "microbatches")}
        return scan_layers(partial(_layer, config, axes, positions_T), layers, stream, **how)._replace(keys=None)

    def head(shared: Any, stream: Stream, batch: Any) -> tuple[Mean, dict[str, Mean]]:
        return gathered(loss, keep=True)(_last(shared, config), stream, batch)

    def loss(last: Any, stream: Stream, batch: Any) -> tuple[Mean, dict[str, Mean]]:
        check_split("vocabulary entries", _head(last, config).shape[-1], config.vocabulary, axes)
        x_btD, weights_bT = rms_norm(stream.x, last["final_norm"], config.norm_epsilon), _weights(batch)
        nats_bT, hits_bT = vocab_cross_entropy_and_hits(
            x_btD, _head(last, config), _entry(batch, "targets"), axes.model, sequence=axes.sequence
        )
        assert weights_bT is not None  # there are targets
        mean = Mean.of(nats_bT, weights_bT)
        aux = {"accuracy": Mean.of(hits_bT, weights_bT)}
        if config.experts:
            extra_b = stream.losses @ jnp.array([config.balance, config.router_z])
            mean = Mean(mean.total + jnp.sum(extra_b * jnp.sum(weights_bT.astype(jnp.float32), axis=1)), mean.weight)
            aux["dropped"] = Mean(*jnp.sum(stream.dropped, axis=0))
        return mean, aux

    return embed, stage, head


def _entry(batch: Any, name: str) -> Any:
    """An array that every batch has."""
    if isinstance(batch, Mapping) and name in batch:
        return batch[name]
    raise ValueError(
        f"transformer: the batch must be a mapping with the entry {name!r}; got "
        f"{quoted(batch) if isinstance(batch, Mapping) else type(batch).__name__}. Pass for example "
        "{'tokens': tokens, 'targets': targets}."
    )


def _weights(batch: Any) -> jax.Array | None:
    """The tokens' weights: those of the batch, 0 for negative targets; None without weights and targets."""
    weights, targets = batch.get("weights"), batch.get("targets")
    if targets is None:
        return weights
    return (targets >= 0).astype(jnp.float32) if weights is None else jnp.where(targets >= 0, weights, 0)


def _layer(config: Config, axes: Axes, positions_T: jax.Array, each: tuple[Any, jax.Array], stream: Stream) -> Stream:
    weights, number = each
    keys = stream.keys
    drop = [None, None] if keys is None else [fold_keys(keys, 2 * number + i) for i in range(2)]
    h_btD = rms_norm(stream.x, weights["attention_norm"], config.norm_epsilon)
    y_btD = attention(weights, h_btD, config, positions_T, axes, stream.segments)
    x_btD = stream.x + dropout(y_btD, drop[0], config.dropout)
    h_btD = rms_norm(x_btD, weights["mlp_norm"], config.norm_epsilon)
    if not config.experts:
        check_split("hidden features", weights["down"].shape[0], config.width, axes)
        return stream._replace(x=x_btD + dropout(mlp(weights, h_btD, axes), drop[1], config.dropout))
    y_btD, losses_2, dropped_2 = experts(weights, h_btD, config, axes, stream.weights)
    return stream._replace(
        x=x_btD + dropout(y_btD, drop[1], config.dropout),
        losses=stream.losses + losses_2[None],
        dropped=stream.dropped + dropped_2[None] / x_btD.shape[0],
    )


@typed
def loss_fn(config: Config, axes: Axes = ONE_DEVICE) -> Callable[[Any, Any, Any], tuple[Mean, dict[str, Mean]]]:
    """The mean cross-entropy of the next token in nats, and the accuracy.

    Args:
        config: the sizes.
        axes: the mesh axes to use.

    Returns:
        `loss(params, batch, keys)` for `value_and_grad`. The batch has "tokens" and "targets", int32 [b, T], and may
        have "weights" [b, T] (tokens of weight 0 or with a negative target are ignored) and "segments", int32 [b, T]:
        the document of each token, within which it attends. With experts the loss includes those of the router, and
        "dropped" is the fraction of expert choices that are dropped.

    Raises:
        ValueError: at trace time, heads or tokens that the plan does not split over `axes`.

    Example:
        >>> from shardkit.models import transformer
        >>> grad_fn = sk.value_and_grad(transformer.loss_fn(transformer.Config(dropout=0.1)))
        >>> init, step = sk.make_train_step(grad_fn, optax.adamw(3e-4), mesh=mesh, plan=sk.dp("data"))
    """

    *_, head = pieces(config, axes)
    return in_order(lambda params, batch, keys: head(params, run(params, batch, config, keys, axes), batch), axes)


def in_order(function: Callable[..., Any], axes: Axes) -> Callable[..., Any]:
    """Makes a loss or GradFn take its batch in contiguous order, and reorders it for the ring once per step.

    A pipeline's GradFn or loss stays one.

    Args:
        function: `function(params, batch, keys, ...)`.
        axes: the mesh axes of its layers.

    Returns:
        A function of the same arguments.

    Raises:
        ValueError: at trace time, tokens that the plan does not split over `axes`.

    Cost: that of `zigzag` for tokens, targets, weights and segments, with `context` in zigzag order.

    Example:
        >>> from shardkit.models import transformer
        >>> axes = transformer.Axes(context="model")
        >>> loss = transformer.in_order(lambda params, batch, keys: sk.Mean.of(batch["tokens"] * params), axes)
    """

    if isinstance(function, Staged):
        return replace(function, function=in_order(function.function, axes))

    @wraps(function)
    def ordered(params: Any, batch: Any, keys: jax.Array | None, **options: Any) -> Any:
        check_tokens(axes, _entry(batch, "tokens"))
        if axes.context is not None and axes.order == "zigzag":
            batch = zigzag(batch, axes.context, ulysses=axes.ulysses)
        return function(params, batch, keys, **options)

    return ordered


def _last(params: Any, config: Config) -> dict[str, Any]:
    """The parameters after the last layer, which may be lazy leaves: they are whole where they are used alone."""
    return {name: params[name] for name in ("final_norm", "embed" if config.tied else "head")}


def _head(params: Any, config: Config) -> jax.Array:
    return params["embed"].T if config.tied else params["head"]
