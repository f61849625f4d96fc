"""A vocabulary split over devices: embedding, and a cross-entropy whose logits stay sharded."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardkit._arguments.checks import Axis, shapes
from shardkit._arguments.typed import typed
from shardkit.collectives import all_gather, all_reduce, axis_index, reduce_scatter
from shardkit.layers.matmul import check_split, count_devices, live_axes, matmul_gradients, vary_alike
from shardkit.layers.scores import MASKED


@typed
def vocab_embed(tokens_bT: jax.Array, table_vD: jax.Array, axis: Axis | None, *, sequence: bool = False) -> jax.Array:
    """Looks tokens up in a table with its rows split over `axis`.

    Layout: `tokens[B, T], W[V_a, D] -> X[B, T, D] {U_a} -> X[B, T, D]`; with `sequence` `-> X[B, T_a, D]`

    Args:
        tokens_bT: integer tokens, [..., T], the same on all devices of `axis`.
        table_vD: this device's rows of the table, [v, D].
        axis: axis name or tuple of names; None for one device.
        sequence: split the tokens of the result over `axis`; their number must be divisible by n.

    Returns:
        [..., T, D] in the table's dtype, invariant over `axis`; with `sequence` this device's tokens,
        [..., t, D]. A token outside [0, V) has a row of zeros.

    Raises:
        ValueError: an unbound axis, or tokens not divisible by n.

    Cost: one all_reduce of the result forward, and nothing backward; with `sequence` a reduce_scatter forward and an
        all_gather backward.

    Example:
        >>> kernel = lambda tokens, table: sk.layers.vocab_embed(tokens, table, "model")
        >>> embed = jax.shard_map(kernel, mesh=mesh, in_specs=(P(), P("model")), out_specs=P())
        >>> embed(jnp.asarray([[6, 1]]), jnp.arange(8.0)[:, None]).ravel().tolist()
        [6.0, 1.0]

    Source: Shoeybi et al., Megatron-LM (arXiv:1909.08053), section 3.
    """
    _check_integers("vocab_embed", "tokens", tokens_bT)
    shapes("vocab_embed", table_vD=(table_vD, "vD"))
    names = live_axes("vocab_embed", axis, table_vD)
    rows = table_vD.shape[0]
    if not rows:
        raise ValueError(f"vocab_embed: the table must have rows; got shape {table_vD.shape}. Pass [v, D].")
    local_bT = _index_locally(tokens_bT, rows, names)
    is_here_bT = (local_bT >= 0) & (local_bT < rows)
    rows_bTD = jnp.take(table_vD, local_bT, axis=0, mode="clip")
    x_bTD = jnp.where(is_here_bT[..., None], rows_bTD, jnp.zeros_like(rows_bTD))
    # One device has the row of a token, and all others have zeros: the sum is the row itself, without rounding. The sum
    # stands directly after the lookup, because a bias, or a norm of zeros, is not zero and would be summed too. An
    # all_gather of the table would send the whole vocabulary instead of the tokens.
    if not names:
        return x_bTD
    if sequence:
        return reduce_scatter(x_bTD, names, dim=-2)
    return all_reduce(x_bTD, names)


@typed
def vocab_cross_entropy(
    x_bTD: jax.Array,
    head_Dv: jax.Array,
    targets_bT: jax.Array,
    axis: Axis | None,
    *,
    sequence: bool = False,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    vocabulary: int | None = None,
) -> jax.Array:
    """Computes the cross-entropy of each target in nats, with the columns of the output head split over `axis`.

    Layout: `X[B, T, D] . W[D, V_a] -> L[B, T, V_a] -> nats[B, T]`; with `sequence` `X[B, T_a, D] -> X[B, T, D]` first

    Args:
        x_bTD: the head's input, [..., T, D], the same on all devices of `axis`; with `sequence` this device's
            tokens, [..., t, D].
        head_Dv: this device's columns of the head, [D, v]. For a tied embedding pass `table_vD.T`.
        targets_bT: integer targets of all tokens, [..., T], the same on all devices. A negative target is ignored: its
            nats and gradients are zero for every x. A target of V or more (of `vocabulary` or more) gives NaN.
        axis: axis name or tuple of names; None for one device.
        sequence: True if the tokens of x are split over `axis`.
        z_loss: coefficient of the z-loss: adds the squared logarithm of the softmax's denominator to the nats.
        label_smoothing: share of the target's probability spread evenly over the whole vocabulary.
        vocabulary: the number of columns of the whole head that are classes. The others are padding, for a vocabulary
            that n does not divide: they are outside the softmax and have no gradient. None: all columns.

    Returns:
        float32 [..., T], invariant over `axis`. Logits and sums are float32.

    Raises:
        ValueError: an unbound axis, a head that is invariant over `axis`, a vocabulary larger than the head, or
            targets of another shape than the tokens.

    Cost: all_reduces of 4 bytes per token (the largest logit) and 8 bytes per token (the denominator and the target's
        logit; 12 with `label_smoothing`) forward; one all_reduce of x's gradient backward. With `sequence` an
        all_gather of x forward and a reduce_scatter of its gradient backward. Residuals are this device's
        logits, in float32, once.

    Example:
        >>> kernel = lambda x, head, targets: sk.layers.vocab_cross_entropy(x, head, targets, "model")
        >>> entropy = jax.shard_map(kernel, mesh=mesh, in_specs=(P(), P(None, "model"), P()), out_specs=P())
        >>> nats = jax.jit(entropy)(jnp.zeros((1, 2, 4)), jnp.ones((4, 8)), jnp.asarray([[3, -1]]))
        >>> [f"{x:.3f}" for x in nats[0]]  # log(8), and an ignored target
        ['2.079', '0.000']

    Source: Shoeybi et al., Megatron-LM (arXiv:1909.08053), section 3; Chowdhery et al., PaLM (arXiv:2204.02311),
        section 5, for the z-loss; Szegedy et al. (arXiv:1512.00567), section 7, for smoothing.
    """
    options = _Options(z_loss, label_smoothing, hits=False, vocabulary=vocabulary)
    nats_bT, _ = _cross_entropy("vocab_cross_entropy", x_bTD, head_Dv, targets_bT, axis, sequence, options)
    return nats_bT


@typed
def vocab_cross_entropy_and_hits(
    x_bTD: jax.Array,
    head_Dv: jax.Array,
    targets_bT: jax.Array,
    axis: Axis | None,
    *,
    sequence: bool = False,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    vocabulary: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`vocab_cross_entropy`, and whether each target is the token that the logits predict.

    Layout: as `vocab_cross_entropy`, `-> nats[B, T], hits[B, T]`

    Args:
        x_bTD, head_Dv, axis, sequence, z_loss, label_smoothing, vocabulary: as for `vocab_cross_entropy`.
        targets_bT: as for `vocab_cross_entropy`; a negative target is never a hit.

    Returns:
        The nats, float32 [..., T], and the hits, bool [..., T]: `argmax(logits) == target`, ties to the first.

    Raises:
        ValueError: as for `vocab_cross_entropy`.

    Cost: as `vocab_cross_entropy`, and 4 bytes per token more in its second all_reduce.

    Example:
        >>> x, head = jnp.eye(4)[None], 9 * jnp.eye(4)  # token i has the largest logit in class i
        >>> from shardkit.layers.vocabulary import vocab_cross_entropy_and_hits
        >>> nats, hits = vocab_cross_entropy_and_hits(x, head, jnp.asarray([[0, 1, 2, 0]]), None)
        >>> hits.tolist()
        [[True, True, True, False]]
    """
    options = _Options(z_loss, label_smoothing, hits=True, vocabulary=vocabulary)
    return _cross_entropy("vocab_cross_entropy_and_hits", x_bTD, head_Dv, targets_bT, axis, sequence, options)


def _check_integers(where: str, name: str, x: Any) -> None:
    if not jnp.issubdtype(jnp.result_type(x), jnp.integer):
        raise TypeError(f"{where}: {name} must be integers; got {jnp.result_type(x)}. Convert them to int32.")


class _Options(NamedTuple):
    z_loss: float
    smoothing: float
    hits: bool  # whether hits are computed
    vocabulary: Any  # the number of classes: an int after the check


def _cross_entropy(
    where: str, x: jax.Array, head: jax.Array, targets: jax.Array, axis: Axis | None, sequence: bool, options: _Options
) -> tuple[jax.Array, jax.Array]:
    """Checks the arguments and computes nats and hits, both [..., T]; a negative target has 0 and False."""
    _check_integers(where, "targets", targets)
    if not 0 <= options.smoothing < 1:
        raise ValueError(
            f"{where}: label_smoothing must be at least 0 and below 1; got {options.smoothing}. "
            "Pass for example label_smoothing=0.1."
        )
    if not 0 <= options.z_loss < math.inf:
        raise ValueError(f"{where}: z_loss must be 0 or more; got {options.z_loss}. Pass for example z_loss=1e-4.")
    shapes(where, x_bTD=(x, "..D"), head_Dv=(head, "Dv"))
    names = live_axes(where, axis, x, head)
    check_split(where, "head", names, head)
    is_gathered = sequence and bool(names)
    # As in `column_linear`, the tokens are gathered where they meet the weights, and not before the norm. They are
    # gathered, and not the head: a device's columns of all tokens are what the sums below need.
    if is_gathered:
        x = all_gather(x, names, dim=-2)
    if targets.shape != x.shape[:-1]:
        after = " after the gather" if is_gathered else ""
        raise ValueError(
            f"{where}: there must be one target for each token; got targets of shape {targets.shape} for tokens of "
            f"shape {x.shape[:-1]}{after}. Pass the targets of all tokens, "
            "and sequence=True where x holds a part of them."
        )
    options = options._replace(vocabulary=_count_classes(where, options.vocabulary, head, names))
    is_counted = targets >= 0
    x = jnp.where(is_counted[..., None], x, jnp.zeros_like(x))  # a NaN of an ignored token must not reach a gradient
    # Under other names: the targets themselves stay the same on all devices, and so do the results below.
    varying = vary_alike(x, head, targets, over=names)
    nats, hits = _nats(*varying, names, options)
    nats = jnp.where(targets < options.vocabulary, nats, jnp.nan)
    return jnp.where(is_counted, nats, 0), hits & is_counted


def _count_classes(where: str, vocabulary: int | None, head: jax.Array, names: tuple[str, ...]) -> int:
    """The number of classes, by default all columns of the whole head."""
    columns = head.shape[-1] * count_devices(names)
    if vocabulary is None:
        return columns
    if not 1 <= vocabulary <= columns:
        raise ValueError(
            f"{where}: vocabulary must be at least 1 and at most the {columns} columns of the head; got "
            f"{vocabulary}. Pass the number of classes."
        )
    return vocabulary


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _nats(
    x: jax.Array, head: jax.Array, targets: jax.Array, names: tuple[str, ...], options: _Options
) -> tuple[jax.Array, jax.Array]:
    return _nats_forward(x, head, targets, names, options)[0]


def _nats_forward(x: jax.Array, head: jax.Array, targets: jax.Array, names: tuple[str, ...], options: _Options) -> Any:
    """The nats and hits, and residuals with the logits; all [..., T] or [..., T, v].

    Autodiff would save both the logits and their exponentials. Of arrays of this size, only the logits are saved here.
    Compiled for TPU v5e with 8192 tokens and 16,384 columns per device: 512 MiB of temporary memory, not 1 GiB.
    """
    # One token over two devices with four classes each, target 5. Every device computes the logits of its columns.
    #
    #                                     device 0: classes 0-3     device 1: classes 4-7      all_reduce
    #     logits                              1   3   0   2             1   2   0   1
    #     the largest                             3                         2                   max: 3
    #     logits - 3                         -2   0  -3  -1            -2  -1  -3  -2
    #     sum of exp                             1.553                     0.688                sum: 2.241
    #     index of the target here              5 (none)                    1
    #     logit of the target - 3                  0                       -1                   sum: -1
    #
    # The nats are log(2.241) - (-1) = 1.807, the same on both devices. Three numbers of a token are sent, and no logit.
    logits = jnp.tensordot(x, head, axes=1, preferred_element_type=jnp.float32)
    columns = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    is_class = _find_classes(columns, head, names, options)
    if is_class is not None:
        logits = jnp.where(is_class, logits, MASKED)
    # The largest logit of all devices' columns comes first, and every device subtracts it before exp. If each device
    # subtracted the largest of its own columns, the sums of exponentials would have different units. All other sums of
    # a token share one all_reduce. The logits of all columns are gathered nowhere: they are the largest array of a
    # language model.
    largest = jnp.max(logits, axis=-1)
    if names:
        largest = all_reduce(largest, names, op="max")
    logits = logits - largest[..., None]
    target_column = _index_locally(targets, head.shape[-1], names)[..., None]
    terms = [jnp.exp(logits), jnp.where(columns == target_column, logits, 0)]
    if options.smoothing:
        class_logits = logits
        if is_class is not None:
            class_logits = jnp.where(is_class, logits, 0)
        terms.append(class_logits)
    if options.hits:  # ties with the largest logit before the target
        terms.append(((logits == 0) & (columns < target_column)).astype(jnp.float32))
    sums = jnp.stack([jnp.sum(term, axis=-1) for term in terms])
    if names:
        sums = all_reduce(sums, names)
    denominator, target_logit, *optional_sums = sums
    log = jnp.log(denominator)
    nats = log - (1 - options.smoothing) * target_logit
    if options.smoothing:
        nats = nats - options.smoothing / options.vocabulary * optional_sums[0]
    if options.z_loss:
        nats = nats + options.z_loss * (log + largest) ** 2
    if options.hits:
        earlier_ties = optional_sums[-1]
        hits = (target_logit == 0) & (earlier_ties == 0)
    else:
        hits = jnp.zeros_like(target_logit, bool)
    return (nats, hits), (x, head, target_column, logits, log, largest)


def _nats_backward(names: tuple[str, ...], options: _Options, residuals: Any, cotangents: Any) -> Any:
    """The gradients of x and head; nothing is sent here.

    dlogits = softmax (1 + 2 z (log + largest)) - (1 - smoothing) [column == target] - smoothing / V, of this device's
    columns. The gradient of x is its part of a sum over columns; the cast before this function adds the parts.
    """
    x, head, target_column, logits, log, largest = residuals
    columns = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    z_slope = 1 + 2 * options.z_loss * (log + largest)
    dlogits = jnp.exp(logits - log[..., None]) * z_slope[..., None]
    dlogits = dlogits - jnp.where(columns == target_column, 1 - options.smoothing, 0)
    dlogits = dlogits - options.smoothing / options.vocabulary
    is_class = _find_classes(columns, head, names, options)
    if is_class is not None:
        dlogits = jnp.where(is_class, dlogits, 0)
    dnats, _ = cotangents
    dlogits = (dlogits * dnats[..., None]).astype(x.dtype)
    dx, dhead = matmul_gradients(x, head, dlogits)
    return dx, dhead, None


_nats.defvjp(_nats_forward, _nats_backward)


def _find_classes(columns: jax.Array, head: jax.Array, names: tuple[str, ...], options: _Options) -> jax.Array | None:
    """Which of this device's columns are classes; None if all columns of all devices are."""
    if options.vocabulary == head.shape[-1] * count_devices(names):
        return None
    return columns < _index_locally(jnp.int32(options.vocabulary), head.shape[-1], names)


def _index_locally(tokens: jax.Array, rows: int, names: tuple[str, ...]) -> jax.Array:
    """Tokens as indices into this device's part of the vocabulary; tokens of other devices are out of range.

    With 4 rows on each device, token 6 is index 6 on device 0, 2 on device 1, and -2 on device 2.
    """
    tokens = tokens.astype(jnp.int32)
    if not names:
        return tokens
    return tokens - axis_index(names) * rows
