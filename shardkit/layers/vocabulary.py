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
from shardkit.collectives import all_gather, all_reduce, axis_index, axis_size, reduce_scatter
from shardkit.layers.attention import MASKED
from shardkit.layers.matmul import alike, check_split, live_axes, matmul_gradients


@typed
def vocab_embed(tokens_bT: jax.Array, table_vD: jax.Array, axis: Axis | None, *, sequence: bool = False) -> jax.Array:
    """Looks tokens up in a table whose rows are split over `axis`.

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
    local_bT = _local(tokens_bT, rows, names)
    mine_bT = (local_bT >= 0) & (local_bT < rows)
    found_bTD = jnp.take(table_vD, local_bT, axis=0, mode="clip")
    x_bTD = jnp.where(mine_bT[..., None], found_bTD, jnp.zeros_like(found_bTD))
    # Of each token one device has the row and all others zeros, so that the sum is the row itself, without rounding. An
    # all_gather of the table would send the vocabulary in place of the tokens.
    if not names:
        return x_bTD
    return reduce_scatter(x_bTD, names, dim=-2) if sequence else all_reduce(x_bTD, names)


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
    """The cross-entropy of each target in nats, where the columns of the output head are split over `axis`.

    Layout: `X[B, T, D] . W[D, V_a] -> L[B, T, V_a] -> nats[B, T]`; with `sequence` `X[B, T_a, D] -> X[B, T, D]` first

    Args:
        x_bTD: the head's input, [..., T, D], the same on all devices of `axis`; with `sequence` this device's
            tokens, [..., t, D].
        head_Dv: this device's columns of the head, [D, v] (of a tied embedding, `table_vD.T`).
        targets_bT: integer targets of all tokens, [..., T], the same on all devices. A negative target is ignored: its
            nats and gradients are zero for every x. One of V or more (of `vocabulary` or more) has NaN.
        axis: axis name or tuple of names; None for one device.
        sequence: the tokens of x are split over `axis`.
        z_loss: coefficient of the squared logarithm of the softmax's denominator, added to the nats.
        label_smoothing: share of the target's probability spread evenly over the whole vocabulary.
        vocabulary: how many columns of the whole head are classes; the others are padding, for a vocabulary not
            divisible by n, outside the softmax and without gradient. None: all columns.

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
    options = _Options(z_loss, label_smoothing, False, vocabulary)
    return _cross_entropy("vocab_cross_entropy", x_bTD, head_Dv, targets_bT, axis, sequence, options)[0]


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
        targets_bT: likewise; a negative target is never a hit.

    Returns:
        The nats, float32 [..., T], and the hits, bool [..., T]: `argmax(logits) == target`, ties to the first.

    Raises:
        ValueError: as for `vocab_cross_entropy`.

    Cost: that of `vocab_cross_entropy`, and 4 bytes per token more in its second all_reduce.

    Example:
        >>> x, head = jnp.eye(4)[None], 9 * jnp.eye(4)  # token i has the largest logit in class i
        >>> nats, hits = sk.layers.vocab_cross_entropy_and_hits(x, head, jnp.asarray([[0, 1, 2, 0]]), None)
        >>> hits.tolist()
        [[True, True, True, False]]
    """
    options = _Options(z_loss, label_smoothing, True, vocabulary)
    return _cross_entropy("vocab_cross_entropy_and_hits", x_bTD, head_Dv, targets_bT, axis, sequence, options)


def _check_integers(where: str, name: str, x: Any) -> None:
    if not jnp.issubdtype(jnp.result_type(x), jnp.integer):
        raise TypeError(f"{where}: {name} must be integers; got {jnp.result_type(x)}. Convert them to int32.")


class _Options(NamedTuple):
    z_loss: float
    smoothing: float
    hits: bool
    vocabulary: Any  # an int after the check


def _cross_entropy(
    where: str, x: jax.Array, head: jax.Array, targets: jax.Array, axis: Axis | None, sequence: bool, options: _Options
) -> tuple[jax.Array, jax.Array]:
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
    if sequence and names:
        x = all_gather(x, names, dim=-2)
    if targets.shape != x.shape[:-1]:
        raise ValueError(
            f"{where}: there must be one target for each token; got targets of shape {targets.shape} for tokens of "
            f"shape {x.shape[:-1]}{' after the gather' if sequence and names else ''}. Pass the targets of all tokens, "
            "and sequence=True where x holds a part of them."
        )
    columns = head.shape[-1] * _ways(names)
    if options.vocabulary is None:
        options = options._replace(vocabulary=columns)
    elif not 1 <= options.vocabulary <= columns:
        raise ValueError(
            f"{where}: vocabulary must be at least 1 and at most the {columns} columns of the head; got "
            f"{options.vocabulary}. Pass the number of classes."
        )
    counted = targets >= 0
    x = jnp.where(counted[..., None], x, jnp.zeros_like(x))  # a NaN there must not reach a gradient
    nats, hits = _nats(*alike(x, head, targets, over=names), names, options)
    nats = jnp.where(targets < options.vocabulary, nats, jnp.nan)
    return jnp.where(counted, nats, 0), hits & counted


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _nats(
    x: jax.Array, head: jax.Array, targets: jax.Array, names: tuple[str, ...], options: _Options
) -> tuple[jax.Array, jax.Array]:
    return _nats_forward(x, head, targets, names, options)[0]


def _nats_forward(x: jax.Array, head: jax.Array, targets: jax.Array, names: tuple[str, ...], options: _Options) -> Any:
    """Autodiff would save both the logits and their exponentials; here, of arrays as large, only the logits.

    Compiled for TPU v5e with 8192 tokens and 16,384 columns per device: 512 MiB of temporary memory, not 1 GiB.
    """
    logits = jnp.tensordot(x, head, axes=1, preferred_element_type=jnp.float32)
    places = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    classes = _classes(places, head, names, options)
    logits = logits if classes is None else jnp.where(classes, logits, MASKED)
    # The largest logit of all devices' columns comes first, and is subtracted before exp on each: with its own largest,
    # a device's sum of exponentials would be in units that no other has. Then everything that is left to sum of a token
    # goes in one all_reduce. Logits of all columns are gathered nowhere: they are the largest array of a language
    # model.
    largest = jnp.max(logits, axis=-1)
    largest = all_reduce(largest, names, op="max") if names else largest
    logits = logits - largest[..., None]
    local = _local(targets, head.shape[-1], names)[..., None]
    terms = [jnp.exp(logits), jnp.where(places == local, logits, 0)]
    if options.smoothing:
        terms.append(logits if classes is None else jnp.where(classes, logits, 0))
    if options.hits:  # ties with the largest logit before the target
        terms.append(((logits == 0) & (places < local)).astype(jnp.float32))
    sums = jnp.stack([jnp.sum(term, axis=-1) for term in terms])
    denominator, right, *others = all_reduce(sums, names) if names else sums
    log = jnp.log(denominator)
    nats = log - (1 - options.smoothing) * right
    if options.smoothing:
        nats = nats - options.smoothing / options.vocabulary * others[0]
    if options.z_loss:
        nats = nats + options.z_loss * (log + largest) ** 2
    hits = (right == 0) & (others[-1] == 0) if options.hits else jnp.zeros_like(right, bool)
    return (nats, hits), (x, head, local, logits, log, largest)


def _nats_backward(names: tuple[str, ...], options: _Options, residuals: Any, cotangents: Any) -> Any:
    x, head, local, logits, log, largest = residuals
    places = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    slope = 1 + 2 * options.z_loss * (log + largest)
    parts = jnp.exp(logits - log[..., None]) * slope[..., None]
    parts = parts - jnp.where(places == local, 1 - options.smoothing, 0)
    parts = parts - options.smoothing / options.vocabulary
    classes = _classes(places, head, names, options)
    parts = parts if classes is None else jnp.where(classes, parts, 0)
    dlogits = (parts * cotangents[0][..., None]).astype(x.dtype)
    return *matmul_gradients(x, head, dlogits), None


_nats.defvjp(_nats_forward, _nats_backward)


def _classes(places: jax.Array, head: jax.Array, names: tuple[str, ...], options: _Options) -> jax.Array | None:
    """Which of this device's columns are classes; None where all of them are."""
    if options.vocabulary == head.shape[-1] * _ways(names):
        return None
    return places < _local(jnp.int32(options.vocabulary), head.shape[-1], names)


def _local(tokens: jax.Array, rows: int, names: tuple[str, ...]) -> jax.Array:
    """Tokens as indices into this device's part of the vocabulary; those of other devices are out of range."""
    tokens = tokens.astype(jnp.int32)
    return tokens - axis_index(names) * rows if names else tokens


def _ways(names: tuple[str, ...]) -> int:
    return axis_size(names) if names else 1
