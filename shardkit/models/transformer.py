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
from dataclasses import replace
from functools import partial, wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardkit._arguments.checks import quote
from shardkit._arguments.typed import Arrays, Key, typed
from shardkit.collectives import axis_index, axis_size
from shardkit.layers.linear import column_linear
from shardkit.layers.vocabulary import vocab_cross_entropy_and_hits, vocab_embed
from shardkit.layers.zigzag import zigzag
from shardkit.meshes.rng import dropout, fold_keys
from shardkit.models.blocks import (
    ONE_DEVICE,
    Axes,
    attention,
    check_split,
    check_tokens,
    experts,
    mlp,
    rms_norm,
    token_positions,
)
from shardkit.models.parameters import Config, init, logical_axes, tensor_rules
from shardkit.on_device.means import Mean
from shardkit.on_device.pipelines import Staged
from shardkit.remat.layers import gathered, scan_layers

__all__ = [
    "Axes",
    "Config",
    "in_order",
    "init",
    "logical_axes",
    "loss_fn",
    "pieces",
    "tensor_rules",
]

Piece = Callable[[Any, Any, Any], Any]


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

    def compute_logits(last: Any, x_btD: jax.Array) -> jax.Array:
        x_btD = rms_norm(x_btD, last["final_norm"], config.norm_epsilon)
        return column_linear(x_btD, _output_weight(last, config), axes.model, sequence=axes.sequence, impl=axes.impl)

    return gathered(compute_logits, keep=True)(_select_last(params, config), stream.x)


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
    # The number of each layer in the whole model, of which a pipeline passes each stage its part: dropout draws by it.
    numbers_L = jnp.arange(config.layers)
    stream = embed(params, batch, keys_b)
    return stage((params["layers"], numbers_L), stream, keys_b)


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

    def embed(shared: Any, batch: Any, keys_b: jax.Array | None) -> Stream:
        return _embed(config, axes, shared, batch)

    def stage(layers: tuple[Any, jax.Array], stream: Stream, keys_b: jax.Array | None) -> Stream:
        return _run_layers(config, axes, layers, stream, keys_b)

    def head(shared: Any, stream: Stream, batch: Any) -> tuple[Mean, dict[str, Mean]]:
        # The last weights may be lazy leaves, whole only inside this call: `keep` saves them for the backward pass
        # instead of a second gather.
        loss = gathered(partial(_compute_loss, config, axes), keep=True)
        return loss(_select_last(shared, config), stream, batch)

    return embed, stage, head


def _embed(config: Config, axes: Axes, shared: Any, batch: Any) -> Stream:
    """The stream before the first layer."""
    tokens_bT = _get_entry(batch, "tokens")
    check_tokens(axes, tokens_bT)
    lookup = partial(vocab_embed, tokens_bT, axis=axes.model, sequence=axes.sequence)
    x_btD = gathered(lookup, keep=True)(shared["embed"])
    segments_bT = batch.get("segments")
    if not config.experts:
        return Stream(x_btD, None, None, segments_bT, None, None)
    weights_bt = _token_weights(batch)
    if weights_bt is not None:
        weights_bt = _take_local_tokens(axes, weights_bt, 1)
    # For each example: a stack with `microbatches` cuts the stream along dim 0, and the loss weighs the router's losses
    # by example.
    losses_b2 = jnp.zeros((x_btD.shape[0], 2))
    dropped_b2 = jnp.zeros((x_btD.shape[0], 2))
    return Stream(x_btD, None, weights_bt, segments_bT, losses_b2, dropped_b2)


def _run_layers(
    config: Config, axes: Axes, layers: tuple[Any, jax.Array], stream: Stream, keys_b: jax.Array | None
) -> Stream:
    """The stream after the layers of a stage, the whole stack or a part of it."""
    tokens = stream.x.shape[1]
    if axes.sequence and axes.model is not None:  # attention is over the tokens of all devices along `model`
        tokens = tokens * axis_size(axes.model)
    positions_T = token_positions(tokens, axes)
    if keys_b is not None and config.dropout > 0:
        # A token's key depends on its position in the sequence, not on its device: dropout is the same on every mesh.
        keys_b1 = keys_b[:, None]
        positions_1t = _take_local_tokens(axes, positions_T, 0)[None]
        stream = stream._replace(keys=fold_keys(keys_b1, positions_1t))
    stream = scan_layers(
        partial(_run_layer, config, axes, positions_T),
        layers,
        stream,
        remat=config.remat,
        prefetch=config.prefetch,
        microbatches=config.microbatches,
    )
    # The keys end here: a pipeline sends the stream to its next stage, which makes them again from `keys_b`.
    return stream._replace(keys=None)


def _compute_loss(config: Config, axes: Axes, last: Any, stream: Stream, batch: Any) -> tuple[Mean, dict[str, Mean]]:
    """The loss and the metrics, from the stream after the last layer."""
    check_split("vocabulary entries", _output_weight(last, config).shape[-1], config.vocabulary, axes)
    x_btD = rms_norm(stream.x, last["final_norm"], config.norm_epsilon)
    weights_bT = _token_weights(batch)
    nats_bT, hits_bT = vocab_cross_entropy_and_hits(
        x_btD, _output_weight(last, config), _get_entry(batch, "targets"), axes.model, sequence=axes.sequence
    )
    assert weights_bT is not None  # there are targets
    mean = Mean.of(nats_bT, weights_bT)
    aux = {"accuracy": Mean.of(hits_bT, weights_bT)}
    if config.experts:
        # The router's losses are means over tokens already. Times the weight of an example they become a part of the
        # total, which is divided by the weight of all examples in the end.
        # Two examples of weights 3 and 1 with losses 0.2 and 0.6 add 0.2 * 3 + 0.6 * 1 = 1.2, which is 0.3 of the mean.
        router_loss_b = stream.losses @ jnp.array([config.balance, config.router_z])
        example_weight_b = jnp.sum(weights_bT.astype(jnp.float32), axis=1)
        mean = Mean(mean.total + jnp.sum(router_loss_b * example_weight_b), mean.weight)
        dropped, choices = jnp.sum(stream.dropped, axis=0)
        aux["dropped"] = Mean(dropped, choices)
    return mean, aux


def _take_local_tokens(axes: Axes, x: jax.Array, dim: int) -> jax.Array:
    """This device's tokens along a dim, if `sequence` splits them."""
    if not axes.sequence or axes.model is None:
        return x
    # Of 16 tokens on 4 devices, device 2 has 8 to 11.
    size = x.shape[dim] // axis_size(axes.model)
    return jax.lax.dynamic_slice_in_dim(x, axis_index(axes.model) * size, size, dim)


def _get_entry(batch: Any, name: str) -> Any:
    """An array that every batch has."""
    is_mapping = isinstance(batch, Mapping)
    if is_mapping and name in batch:
        return batch[name]
    received = quote(batch) if is_mapping else type(batch).__name__
    raise ValueError(
        f"transformer: the batch must be a mapping with the entry {name!r}; got {received}. Pass for example "
        "{'tokens': tokens, 'targets': targets}."
    )


def _token_weights(batch: Any) -> jax.Array | None:
    """The tokens' weights: those of the batch, 0 for negative targets; None without weights and targets."""
    weights = batch.get("weights")
    targets = batch.get("targets")
    if targets is None:
        return weights
    if weights is None:
        return (targets >= 0).astype(jnp.float32)
    return jnp.where(targets >= 0, weights, 0)


def _run_layer(
    config: Config, axes: Axes, positions_T: jax.Array, layer: tuple[Any, jax.Array], stream: Stream
) -> Stream:
    """One layer: `layer` is its weights and its number, from which the keys of its two dropouts are folded."""
    weights, number = layer
    attention_keys = None
    mlp_keys = None
    if stream.keys is not None:
        # Layer 3 folds 6 and 7, whichever stage runs it: no two dropouts of the model draw the same.
        attention_keys = fold_keys(stream.keys, 2 * number + 0)
        mlp_keys = fold_keys(stream.keys, 2 * number + 1)
    h_btD = rms_norm(stream.x, weights["attention_norm"], config.norm_epsilon)
    y_btD = attention(weights, h_btD, config, positions_T, axes, stream.segments)
    x_btD = stream.x + dropout(y_btD, attention_keys, config.dropout)
    h_btD = rms_norm(x_btD, weights["mlp_norm"], config.norm_epsilon)
    if not config.experts:
        check_split("hidden features", weights["down"].shape[0], config.width, axes)
        y_btD = mlp(weights, h_btD, axes)
        return stream._replace(x=x_btD + dropout(y_btD, mlp_keys, config.dropout))
    y_btD, losses_2, dropped_2 = experts(weights, h_btD, config, axes, stream.weights)
    # The choices of a device are counted once for all its examples; each example carries its share.
    return stream._replace(
        x=x_btD + dropout(y_btD, mlp_keys, config.dropout),
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

    _, _, head = pieces(config, axes)

    def compute_loss(params: Any, batch: Any, keys: Any) -> tuple[Mean, dict[str, Mean]]:
        stream = run(params, batch, config, keys, axes)
        return head(params, stream, batch)

    return in_order(compute_loss, axes)


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
    def reorder_and_call(params: Any, batch: Any, keys: jax.Array | None, **options: Any) -> Any:
        check_tokens(axes, _get_entry(batch, "tokens"))
        if axes.context is not None and axes.order == "zigzag":
            # Here, where tokens and targets are 4 bytes each: within the layers it would be activations, D values each,
            # in every layer and again in its backward pass.
            batch = zigzag(batch, axes.context, ulysses=axes.ulysses)
        return function(params, batch, keys, **options)

    return reorder_and_call


def _select_last(params: Any, config: Config) -> dict[str, Any]:
    """The parameters after the last layer, which may be lazy leaves: they are whole where they are used alone."""
    head = "embed" if config.tied else "head"
    # Both leaves and no others, because a lazy leaf is gathered where it is opened: of all parameters the head would
    # gather the layers again.
    return {"final_norm": params["final_norm"], head: params[head]}


def _output_weight(params: Any, config: Config) -> jax.Array:
    if config.tied:
        return params["embed"].T
    return params["head"]
