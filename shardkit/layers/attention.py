"""Attention on one device, unblocked, and what every form of attention shares.

Shapes: b examples, T or t queries, S or s keys, H heads, G key/value heads, R = H/G heads that share one, K head size.
Scores, softmax and sums are float32 for every input dtype; the operands of matmuls have the inputs' dtype.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardkit._arguments.checks import divisor, finite
from shardkit._arguments.typed import typed
from shardkit.collectives._sums import dot_dtype, save_as_dot
from shardkit.layers.matmul import alike
from shardkit.on_device.means import kind

MASKED = -1e30  # finite: a row of -inf would make NaN gradients


@typed
def dot_attention(
    q_bTHK: jax.Array,
    k_bTGK: jax.Array,
    v_bTGK: jax.Array,
    *,
    causal: bool = True,
    segments_bt: jax.Array | None = None,
    positions_bt: jax.Array | None = None,
    window: int | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Softmax attention over a whole sequence on one device: the reference for every other form.

    Layout: `Q[b, T, H, K], K[b, T, G, K], V[b, T, G, K] -> Y[b, T, H, K]`

    Args:
        q_bTHK: queries.
        k_bTGK: keys; H/G heads share each of the G key/value heads (G = H: each has its own).
        v_bTGK: values.
        causal: a token attends to itself and to earlier ones only.
        segments_bt: int32 numbers of the documents packed into a sequence; a token attends to its own only.
        positions_bt: int32 places of the tokens in the sequence, where they are not in order: "earlier" is by them.
        window: with positions, how many tokens a token attends to, itself and those before it; None: all.
        scale: factor of the scores; None: 1/sqrt(K).

    Returns:
        Array of the shape and dtype of the queries.

    Raises:
        ValueError: inconsistent shapes, G does not divide H, or a window or positions without what they need.

    Cost: nothing is sent; temporary memory of b H T T scores, and as many weights in the dtype of v as residuals.

    Example:
        >>> q, k = jnp.ones((1, 6, 4, 8)), jnp.ones((1, 6, 2, 8))  # two query heads share each key/value head
        >>> sk.layers.dot_attention(q, k, k).shape
        (1, 6, 4, 8)

    Source: Vaswani et al. (arXiv:1706.03762); Ainslie et al., grouped queries (arXiv:2305.13245).
    """
    finite("dot_attention", scale=scale)
    check("dot_attention", q_bTHK, k_bTGK, v_bTGK, segments_bt)
    labels = labelled("dot_attention", q_bTHK, segments_bt, positions_bt, window, causal)
    q, k, v, labels = alike(*split_heads(q_bTHK, k_bTGK, v_bTGK, labels))
    form = Scoring(causal and positions_bt is None, window, scale_of(q, scale))
    return join_heads(_attend(q, k, v, labels, form))


class Scoring(NamedTuple):
    """The static options of an attention on one device."""

    causal: bool  # whether a token attends only to itself and to earlier ones, by the order of the tokens
    window: int | None  # how many tokens one attends to, where labels have places
    scale: float  # factor of the scores


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q: jax.Array, k: jax.Array, v: jax.Array, labels: jax.Array | None, form: Scoring) -> jax.Array:
    return _attend_forward(q, k, v, labels, form)[0]


def _attend_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, labels: jax.Array | None, form: Scoring
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Autodiff would save the float32 softmax and multiply float32 gradients; here weights are saved in v's dtype."""
    mask = allowed(q, k, 0 if form.causal else None, labels, labels, form.window)
    scores = scores_of(q, k, mask, form.scale)
    largest = jnp.max(scores, axis=-1, keepdims=True)
    log_total = largest + jnp.log(jnp.sum(jnp.exp(scores - largest), axis=-1, keepdims=True))
    weights = save_as_dot(jnp.exp(scores - log_total).astype(v.dtype))  # a division would need float32 weights first
    y = jnp.einsum("bGRts,bGsK->bGRtK", weights, v, preferred_element_type=dot_dtype(v)).astype(q.dtype)
    return y, (q, k, v, weights, y)


def _attend_backward(form: Scoring, residuals: tuple[jax.Array, ...], dy: jax.Array) -> tuple[Any, ...]:
    q, k, v, weights, y = residuals
    dq, dk, dv = gradients(q, k, v, weights, dy, inner(y, dy), scale=form.scale)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_attend.defvjp(_attend_forward, _attend_backward)


def check(where: str, q_btHK: jax.Array, k_btGK: jax.Array, v_btGK: jax.Array, segments_bt: jax.Array | None) -> None:
    """Refuses queries, keys, values and segments of inconsistent shapes."""
    q, k, v = jnp.shape(q_btHK), jnp.shape(k_btGK), jnp.shape(v_btGK)
    if not (len(q) == len(k) == 4 and v == k and (*q[:2], q[3]) == (*k[:2], k[3])):
        raise ValueError(
            f"{where}: keys and values must be [b, t, G, K] for queries [b, t, H, K]; got queries {q}, keys {k}, "
            f"values {v}. Give all three the same b, t and K."
        )
    divisor(where, "kv heads", k[2], "heads", q[2])
    if segments_bt is not None and jnp.shape(segments_bt) != q[:2]:
        raise ValueError(
            f"{where}: segments must hold one document number per token; got shape {jnp.shape(segments_bt)} for "
            f"{q[0]} x {q[1]} tokens. Pass them as [b, t]."
        )


def labelled(
    where: str,
    q_btHK: jax.Array,
    segments_bt: jax.Array | None,
    positions_bt: jax.Array | None,
    window: int | None,
    causal: bool,
) -> jax.Array | None:
    """What the mask of each token is made of, int32 [b, t, C]: its document, and where given its place after it."""
    if window is not None and (positions_bt is None or window < 1):
        raise ValueError(
            f"{where}: a window must be at least 1 and go with positions; got window={window} and "
            f"{'no positions' if positions_bt is None else 'positions'}. Pass positions_bt, of tokens in order "
            "jnp.broadcast_to(jnp.arange(t), (b, t))."
        )
    if positions_bt is None:
        return None if segments_bt is None else segments_bt[..., None]
    integers = jnp.issubdtype(jnp.result_type(positions_bt), jnp.integer)
    if not causal or not integers or jnp.shape(positions_bt) != q_btHK.shape[:2]:
        raise ValueError(
            f"{where}: positions must hold a place for each token of a causal attention; got {kind(positions_bt)} for "
            f"{q_btHK.shape[0]} x {q_btHK.shape[1]} tokens, and causal={causal}. Pass them as int32 [b, t], or leave "
            "them out."
        )
    places = positions_bt.astype(jnp.int32)  # whose differences have signs
    documents = jnp.zeros_like(places) if segments_bt is None else segments_bt.astype(jnp.int32)
    return jnp.stack(alike(documents, places), axis=-1)


def placed(labels_btC: jax.Array | None) -> bool:
    """Whether labels have the places of tokens, which then may be in any order."""
    return labels_btC is not None and labels_btC.shape[-1] == 2


def scale_of(q: jax.Array, scale: float | None) -> float:
    """The factor of the scores."""
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def split_heads(
    q_btHK: jax.Array, k_btGK: jax.Array, v_btGK: jax.Array, labels_btC: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Queries [b, G, R, t, K], keys and values [b, G, t, K], labels [b, t, C]: tokens are always dim -2."""
    b, t, _, K = q_btHK.shape
    q = q_btHK.reshape(b, t, k_btGK.shape[2], -1, K).transpose(0, 2, 3, 1, 4)
    k, v = k_btGK.transpose(0, 2, 1, 3), v_btGK.transpose(0, 2, 1, 3)
    return q, k, v, labels_btC


def join_heads(y_bGRtK: jax.Array) -> jax.Array:
    """Back to [b, t, H, K]."""
    b, G, R, t, K = y_bGRtK.shape
    return y_bGRtK.transpose(0, 3, 1, 2, 4).reshape(b, t, G * R, K)


def allowed(
    q: jax.Array,
    k: jax.Array,
    ahead: Any,
    q_labels_btC: jax.Array | None,
    k_labels_bsC: jax.Array | None,
    window: int | None = None,
) -> jax.Array | None:
    """Which query may attend to which key, [b or 1, 1, 1, t, s]; None for all.

    `ahead` is the position of the first query minus that of the first key where attention is causal by order.
    """
    mask = None
    if ahead is not None:
        mask = (jnp.arange(q.shape[-2])[:, None] + ahead >= jnp.arange(k.shape[-2])[None, :])[None]
    if q_labels_btC is not None and k_labels_bsC is not None:
        rows, columns = q_labels_btC[:, :, None], k_labels_bsC[:, None]
        same_bts = rows[..., 0] == columns[..., 0]
        mask = same_bts if mask is None else mask & same_bts
        if placed(q_labels_btC):
            behind_bts = rows[..., 1] - columns[..., 1]
            mask = mask & (behind_bts >= 0)
            if window is not None:
                mask = mask & (behind_bts < window)
    return None if mask is None else mask[:, None, None]


def scores_of(q_bGRtK: jax.Array, k_bGsK: jax.Array, mask: jax.Array | None, scale: float) -> jax.Array:
    """Scaled and masked scores [b, G, R, t, s], float32."""
    scores = jnp.einsum("bGRtK,bGsK->bGRts", q_bGRtK, k_bGsK, preferred_element_type=jnp.float32)
    scores = scores * float(scale)
    return scores if mask is None else jnp.where(mask, scores, MASKED)


def inner(y: jax.Array, dy: jax.Array) -> jax.Array:
    """The inner product of each query's result and its gradient, [.., 1], float32."""
    return jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32), axis=-1, keepdims=True)


def gradients(
    q_bGRtK: jax.Array,
    k_bGsK: jax.Array,
    v_bGsK: jax.Array,
    weights_bGRts: jax.Array,
    dy_bGRtK: jax.Array,
    y_dy_bGRt1: jax.Array,
    *,
    scale: float,
    partial_sums: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of queries, keys and values, from the softmax's weights; `y_dy` is `inner` of the result and `dy`.

    With `partial_sums` these are some of the keys: the gradients are float32, to be summed over all.

    Source: Dao et al., FlashAttention (arXiv:2205.14135), appendix B.
    """

    def dot(form: str, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.einsum(form, x, y, preferred_element_type=jnp.float32 if partial_sums else dot_dtype(x, y))

    dweights = jnp.einsum("bGRtK,bGsK->bGRts", dy_bGRtK, v_bGsK, preferred_element_type=jnp.float32)
    dscores = (weights_bGRts.astype(jnp.float32) * (dweights - y_dy_bGRt1) * scale).astype(q_bGRtK.dtype)
    dq = dot("bGRts,bGsK->bGRtK", dscores, k_bGsK)
    dk = dot("bGRts,bGRtK->bGsK", dscores, q_bGRtK)
    weights_bGRts = weights_bGRts.astype(dy_bGRtK.dtype) if partial_sums else weights_bGRts
    return dq, dk, dot("bGRts,bGRtK->bGsK", weights_bGRts, dy_bGRtK)
