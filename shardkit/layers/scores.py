"""Scores of queries and keys: which query sees which key, and the gradients through the softmax of the scores.

All forms of attention share these functions. Shapes: b examples, t queries, s keys, H heads, G key/value heads, R = H/G
heads for each of these, K head size. Scores, softmax and sums are float32 for every input dtype; the operands of
matmuls have the inputs' dtype.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from shardkit.collectives._sums import dot_dtype
from shardkit.layers.matmul import vary_alike
from shardkit.on_device.means import describe_type

MASKED = -1e30  # finite: a row of -inf would make NaN gradients


def make_labels(
    where: str,
    q_btHK: jax.Array,
    segments_bt: jax.Array | None,
    positions_bt: jax.Array | None,
    window: int | None,
    causal: bool,
) -> jax.Array | None:
    """The numbers that decide which token attends to which, int32 [b, t, C]; None where the order alone decides.

    C is 1 with segments alone, and the number is that of the document. C is 2 with positions: the document (0 without
    segments), then the position.
    """
    if window is not None and (positions_bt is None or window < 1):
        received = "no positions" if positions_bt is None else "positions"
        raise ValueError(
            f"{where}: a window must be at least 1 and go with positions; got window={window} and "
            f"{received}. Pass positions_bt, of tokens in order "
            "jnp.broadcast_to(jnp.arange(t), (b, t))."
        )
    if positions_bt is None:
        if segments_bt is None:
            return None
        return segments_bt[..., None]
    are_integers = jnp.issubdtype(jnp.result_type(positions_bt), jnp.integer)
    if not causal or not are_integers or jnp.shape(positions_bt) != q_btHK.shape[:2]:
        raise ValueError(
            f"{where}: positions must hold a place for each token of a causal attention; got "
            f"{describe_type(positions_bt)} for {q_btHK.shape[0]} x {q_btHK.shape[1]} tokens, and causal={causal}. "
            "Pass them as int32 [b, t], or leave them out."
        )
    positions = positions_bt.astype(jnp.int32)  # the mask subtracts them, and a difference of unsigned ones has no sign
    if segments_bt is None:
        documents = jnp.zeros_like(positions)
    else:
        documents = segments_bt.astype(jnp.int32)
    return jnp.stack(vary_alike(documents, positions), axis=-1)


def has_positions(labels_btC: jax.Array | None) -> bool:
    """Whether labels hold the positions of tokens, which then may be in any order."""
    return labels_btC is not None and labels_btC.shape[-1] == 2


def make_mask(
    q: jax.Array,
    k: jax.Array,
    ahead: Any,
    q_labels_btC: jax.Array | None,
    k_labels_bsC: jax.Array | None,
    window: int | None = None,
) -> jax.Array | None:
    """Which query may attend to which key, [b or 1, 1, 1, t, s]; None where every query may attend to every key.

    `ahead` is the position of the first query minus that of the first key where attention is causal by order.

    For example, of tokens with documents 0 0 1 1 in order, ahead 0 (rows are queries):

        causal     same document     both
        1 0 0 0    1 1 0 0           1 0 0 0
        1 1 0 0    1 1 0 0           1 1 0 0
        1 1 1 0    0 0 1 1           0 0 1 0
        1 1 1 1    0 0 1 1           0 0 1 1
    """
    mask = None
    if ahead is not None:
        position_T1 = jnp.arange(q.shape[-2])[:, None] + ahead
        position_1S = jnp.arange(k.shape[-2])[None, :]
        mask = (position_T1 >= position_1S)[None]
    if q_labels_btC is not None and k_labels_bsC is not None:
        rows = q_labels_btC[:, :, None]
        columns = k_labels_bsC[:, None]
        same_document_bts = rows[..., 0] == columns[..., 0]
        if mask is None:
            mask = same_document_bts
        else:
            mask = mask & same_document_bts
        if has_positions(q_labels_btC):
            distance_bts = rows[..., 1] - columns[..., 1]
            mask = mask & (distance_bts >= 0)
            if window is not None:
                mask = mask & (distance_bts < window)
    if mask is None:
        return None
    return mask[:, None, None]


def compute_scores(q_bGRtK: jax.Array, k_bGsK: jax.Array, mask: jax.Array | None, scale: float) -> jax.Array:
    """Scaled and masked scores [b, G, R, t, s], float32."""
    scores = jnp.einsum("bGRtK,bGsK->bGRts", q_bGRtK, k_bGsK, preferred_element_type=jnp.float32)
    scores = scores * float(scale)
    if mask is None:
        return scores
    return jnp.where(mask, scores, MASKED)


def inner_product(y: jax.Array, dy: jax.Array) -> jax.Array:
    """The inner product of each query's result and its gradient, [.., 1], float32."""
    return jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32), axis=-1, keepdims=True)


def attention_gradients(
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
    """The gradients of queries, keys and values, from the softmax's weights.

    `y_dy` is the `inner_product` of the result and `dy`. The derivative of the softmax's denominator is a sum over all
    keys, and equals `y_dy`. So the gradients of some keys can be computed without the other keys.

    With `partial_sums`, the arrays have some of the queries and keys: the gradients are float32, for the caller to sum.

    Source: Dao et al., FlashAttention (arXiv:2205.14135), appendix B.
    """

    def dot(form: str, x: jax.Array, y: jax.Array) -> jax.Array:
        dtype = jnp.float32 if partial_sums else dot_dtype(x, y)
        return jnp.einsum(form, x, y, preferred_element_type=dtype)

    dweights = jnp.einsum("bGRtK,bGsK->bGRts", dy_bGRtK, v_bGsK, preferred_element_type=jnp.float32)
    dscores = weights_bGRts.astype(jnp.float32) * (dweights - y_dy_bGRt1) * scale
    dscores = dscores.astype(q_bGRtK.dtype)
    dq = dot("bGRts,bGsK->bGRtK", dscores, k_bGsK)
    dk = dot("bGRts,bGRtK->bGsK", dscores, q_bGRtK)
    if partial_sums:  # the weights were recomputed, in float32
        weights_bGRts = weights_bGRts.astype(dy_bGRtK.dtype)
    dv = dot("bGRts,bGRtK->bGsK", weights_bGRts, dy_bGRtK)
    return dq, dk, dv
