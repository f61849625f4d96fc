"""Attention on one device, unblocked; the checks of its arguments, and heads in groups.

Shapes are those of `scores.py`; T are all tokens of a sequence.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardkit._arguments.checks import divisor, finite
from shardkit._arguments.typed import typed
from shardkit._jax.pallas import kernel_platform
from shardkit.collectives._sums import dot_dtype, save_as_dot
from shardkit.layers.attention_kernel import check_kernel
from shardkit.layers.blockwise import Form, attend
from shardkit.layers.matmul import vary_alike
from shardkit.layers.scores import attention_gradients, compute_scores, inner_product, make_labels, make_mask


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
    kernel: bool = False,
) -> jax.Array:
    """Softmax attention over a whole sequence on one device. All other forms give the same numbers.

    Layout: `Q[b, T, H, K], K[b, T, G, K], V[b, T, G, K] -> Y[b, T, H, K]`

    Args:
        q_bTHK: queries.
        k_bTGK: keys. H/G query heads share each of the G key/value heads.
        v_bTGK: values.
        causal: a token attends to itself and to earlier tokens only.
        segments_bt: int32 numbers of the documents packed into a sequence; a token attends to its document only.
        positions_bt: int32 places of the tokens in the sequence. Pass them if the tokens are not in order.
        window: with positions, the number of tokens a token attends to: itself and the tokens before it; None:
            all.
        scale: factor of the scores; None: 1/sqrt(K).
        kernel: compute it on TPUs and GPUs by the Pallas kernel that jax ships for each, which writes no scores to
            memory. T must be a multiple of 128, the dtype float32 or bfloat16; on TPUs K at most 128 or a multiple of
            it, on GPUs 16 to 256. There are no positions and no second derivatives. On CPUs, in `emulate` and in a
            proof the same function runs as without it.

    Returns:
        Array of the shape and dtype of the queries.

    Raises:
        ValueError: inconsistent shapes, G does not divide H, positions without `causal`, a window without positions, or
            what the kernel does not compute.

    Cost: nothing is sent; temporary memory of b H T T scores, and as many weights in the dtype of v as residuals. The
        kernel needs neither, and keeps a float32 number of each query and head.

    Example:
        >>> q, k = jnp.ones((1, 6, 4, 8)), jnp.ones((1, 6, 2, 8))  # two query heads share each key/value head
        >>> sk.layers.dot_attention(q, k, k).shape
        (1, 6, 4, 8)

    Source: Vaswani et al. (arXiv:1706.03762); Ainslie et al., grouped queries (arXiv:2305.13245); the kernel: Dao et
    al., FlashAttention (arXiv:2205.14135), `jax.experimental.pallas.ops.tpu.flash_attention` and `..gpu.attention`.
    """
    finite("dot_attention", scale=scale)
    check_shapes("dot_attention", q_bTHK, k_bTGK, v_bTGK, segments_bt)
    labels = make_labels("dot_attention", q_bTHK, segments_bt, positions_bt, window, causal)
    q, k, v, labels = split_heads(q_bTHK, k_bTGK, v_bTGK, labels)
    q, k, v, labels = vary_alike(q, k, v, labels)
    causal_by_order = causal and positions_bt is None  # else the labels say which token is earlier
    form = Scoring(causal_by_order, window, choose_scale(q, scale))
    if kernel:
        check_kernel("dot_attention", (q, k, v), q.shape[-2], positions=positions_bt is not None, block=None)
        if kernel_platform() is not None:
            one_tile = Form((), causal, "contiguous", None, form.scale, kernel=True)
            return join_heads(attend(q, k, v, labels, one_tile))
    return join_heads(_attend(q, k, v, labels, form))


class Scoring(NamedTuple):
    """The static options of an attention on one device."""

    causal: bool  # whether a token attends only to itself and to earlier tokens, by their order in the array
    window: int | None  # how many tokens a token attends to, if labels have positions
    scale: float  # factor of the scores


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q: jax.Array, k: jax.Array, v: jax.Array, labels: jax.Array | None, form: Scoring) -> jax.Array:
    return _attend_forward(q, k, v, labels, form)[0]


def _attend_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, labels: jax.Array | None, form: Scoring
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """The result, and the residuals of the backward pass, with the softmax's weights in v's dtype.

    Autodiff would save the weights in float32, and multiply float32 gradients.
    """
    ahead = 0 if form.causal else None
    mask = make_mask(q, k, ahead, labels, labels, form.window)
    scores = compute_scores(q, k, mask, form.scale)
    # The logarithm of the denominator is subtracted before exp, so that the weights are rounded to v's dtype at once.
    # A division by the denominator would need the float32 weights as an array first.
    largest = jnp.max(scores, axis=-1, keepdims=True)
    log_total = largest + jnp.log(jnp.sum(jnp.exp(scores - largest), axis=-1, keepdims=True))
    weights = save_as_dot(jnp.exp(scores - log_total).astype(v.dtype))
    y = jnp.einsum("bGRts,bGsK->bGRtK", weights, v, preferred_element_type=dot_dtype(v))
    y = y.astype(q.dtype)
    return y, (q, k, v, weights, y)


def _attend_backward(form: Scoring, residuals: tuple[jax.Array, ...], dy: jax.Array) -> tuple[Any, ...]:
    q, k, v, weights, y = residuals
    dq, dk, dv = attention_gradients(q, k, v, weights, dy, inner_product(y, dy), scale=form.scale)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_attend.defvjp(_attend_forward, _attend_backward)


def check_shapes(
    where: str, q_btHK: jax.Array, k_btGK: jax.Array, v_btGK: jax.Array, segments_bt: jax.Array | None
) -> None:
    """Refuses queries, keys, values and segments of inconsistent shapes."""
    q = jnp.shape(q_btHK)
    k = jnp.shape(k_btGK)
    v = jnp.shape(v_btGK)
    four_dims = len(q) == len(k) == 4
    if not (four_dims and v == k and (*q[:2], q[3]) == (*k[:2], k[3])):
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


def choose_scale(q: jax.Array, scale: float | None) -> float:
    """The factor of the scores, by default 1/sqrt(K)."""
    if scale is None:
        return 1 / math.sqrt(q.shape[-1])
    return scale


def split_heads(
    q_btHK: jax.Array, k_btGK: jax.Array, v_btGK: jax.Array, labels_btC: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Queries [b, G, R, t, K], keys and values [b, G, t, K], labels [b, t, C]: tokens are always dim -2."""
    b, t, _, K = q_btHK.shape
    G = k_btGK.shape[2]
    q_bGRtK = q_btHK.reshape(b, t, G, -1, K).transpose(0, 2, 3, 1, 4)
    k_bGtK = k_btGK.transpose(0, 2, 1, 3)
    v_bGtK = v_btGK.transpose(0, 2, 1, 3)
    return q_bGRtK, k_bGtK, v_bGtK, labels_btC


def join_heads(y_bGRtK: jax.Array) -> jax.Array:
    """Back to [b, t, H, K]."""
    b, G, R, t, K = y_bGRtK.shape
    return y_bGRtK.transpose(0, 3, 1, 2, 4).reshape(b, t, G * R, K)
