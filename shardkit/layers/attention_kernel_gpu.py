"""The tiles of attention by the bodies of the Pallas kernels for GPUs that jax ships, `pallas.ops.gpu.attention`.

jax's function around them takes queries and keys as [batch, tokens, heads, K], with as many heads of keys as of
queries, and computes the inner products of result and gradient in each call. Here the bodies are called on the arrays
of `scores.py`: the R query heads of a group read the keys of the one head that they share, and a ring computes the
inner products once.

Logarithms in the bodies are of base 2: they compute exp(x) as 2 ** (x log2(e)).
"""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardkit._jax.pallas import KernelCost, call_kernel
from shardkit.layers.tiles import TileForm, TileSizes

HEADS = "16 to 256"  # the sizes that the kernels take: operands of a matmul in Triton have at least 16 columns
_LOG2_E = math.log2(math.e)
_ROW_BYTES = 256  # of a token in q, k or v, up to which blocks are large
_WARPS = 8  # of a program


class Blocks(NamedTuple):
    """The blocks of a kernel: each of its programs holds one, and reads smaller ones, one after another."""

    held: int  # tokens of the block that a program holds; they divide 128
    read: int  # tokens of those that it reads; they divide `held`


def fits_head(size: int) -> bool:
    """Whether the kernels take heads of this size."""
    return 16 <= size <= 256


def attend_tile(
    q_bGRtK: jax.Array,
    k_bGsK: jax.Array,
    v_bGsK: jax.Array,
    documents: tuple[jax.Array, jax.Array] | None,
    form: TileForm,
) -> tuple[jax.Array, jax.Array]:
    """The result of a tile, and the logarithm of its denominator; see `attention_kernel.attend_tile`."""
    forward, _ = count_costs(TileSizes.of(q_bGRtK, k_bGsK), causal=form.causal)
    call = partial(_call_forward, form=form)
    y, log2_total = call_kernel(call, [forward], q_bGRtK, k_bGsK, v_bGsK, *_take_documents(documents))
    return y, log2_total[..., None] / _LOG2_E


def tile_gradients(
    q_bGRtK: jax.Array,
    k_bGsK: jax.Array,
    v_bGsK: jax.Array,
    log_total_bGRt1: jax.Array,
    dy_bGRtK: jax.Array,
    y_dy_bGRt1: jax.Array,
    documents: tuple[jax.Array, jax.Array] | None,
    form: TileForm,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of queries, of keys and of values, those of keys and values for each query head."""
    _, backward = count_costs(TileSizes.of(q_bGRtK, k_bGsK), causal=form.causal)
    call = partial(_call_backward, form=form)
    rows = (dy_bGRtK, log_total_bGRt1[..., 0] * _LOG2_E, y_dy_bGRt1[..., 0])
    dq, dk, dv = call_kernel(call, [backward], q_bGRtK, k_bGsK, v_bGsK, *rows, *_take_documents(documents))
    return dq, dk, dv


def _take_documents(documents: tuple[jax.Array, jax.Array] | None) -> list[jax.Array]:
    """The documents of a tile's tokens, if there are any: a body reads one array for queries and keys."""
    if documents is None:
        return []
    of_queries, _ = documents
    return [of_queries.astype(jnp.int32)]


def _load_kernels() -> Any:
    """jax's module of the kernels, on first use: it is experimental, and from jax 0.12 on warns of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import attention

    return attention


def _call_forward(q: jax.Array, k: jax.Array, v: jax.Array, *documents: jax.Array, form: TileForm) -> Any:
    """The result, and the logarithm of its denominator in base 2, [b, G, R, t]."""
    from jax.experimental.pallas import BlockSpec, pallas_call
    from jax.experimental.pallas.triton import CompilerParams

    b, G, R, t, K = q.shape
    blocks, _ = choose_blocks(K, q.dtype.itemsize)
    width = _pad_head(K)
    body = partial(
        _load_kernels().mha_forward_kernel,
        sm_scale=form.scale,
        causal=form.causal,
        block_q=blocks.held,
        block_k=blocks.read,
        head_dim=K,
    )
    # Program (i, j, h) computes block i of the queries of head h in sequence j.
    q_block = BlockSpec((None, None, None, blocks.held, width), lambda i, j, h: (j, *_find_group(h, R), i, 0))
    column_block = BlockSpec((None, None, None, blocks.held), lambda i, j, h: (j, *_find_group(h, R), i))
    k_head = BlockSpec((None, None, t, width), lambda i, j, h: (j, _find_group(h, R)[0], 0, 0))
    sequence = BlockSpec((None, t), lambda i, j, h: (j, 0))
    call = pallas_call(
        body,
        grid=(t // blocks.held, b, G * R),
        in_specs=[q_block, k_head, k_head, sequence if documents else None],
        out_specs=[q_block, column_block],
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32)],
        compiler_params=CompilerParams(num_warps=_WARPS, num_stages=2),
        name="attention",
    )
    return call(q, k, v, documents[0] if documents else None)


def _call_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dy: jax.Array,
    log2_total: jax.Array,
    y_dy: jax.Array,
    *documents: jax.Array,
    form: TileForm,
) -> Any:
    """The gradients of queries, keys and values, [b, G, R, t, K] each."""
    from jax.experimental.pallas import BlockSpec, pallas_call
    from jax.experimental.pallas.triton import CompilerParams

    b, G, R, t, K = q.shape
    _, blocks = choose_blocks(K, q.dtype.itemsize)
    width = _pad_head(K)
    body = partial(
        _load_kernels().mha_backward_kernel,
        sm_scale=form.scale,
        causal=form.causal,
        block_kv_dkv=blocks.held,
        block_q_dkv=blocks.read,
        block_q_dq=blocks.held,
        block_kv_dq=blocks.read,
        head_dim=K,
    )
    # Program (j, h, i) computes the gradients of block i of the keys and values of sequence j for query head h, and
    # then those of block i of the queries.
    q_head = BlockSpec((None, None, None, t, width), lambda j, h, i: (j, *_find_group(h, R), 0, 0))
    column = BlockSpec((None, None, None, t), lambda j, h, i: (j, *_find_group(h, R), 0))
    k_head = BlockSpec((None, None, t, width), lambda j, h, i: (j, _find_group(h, R)[0], 0, 0))
    sequence = BlockSpec((None, t), lambda j, h, i: (j, 0))
    gradient_block = BlockSpec((None, None, None, blocks.held, width), lambda j, h, i: (j, *_find_group(h, R), i, 0))
    no_result = None  # which the body does not read
    call = pallas_call(
        body,
        grid=(b, G * R, t // blocks.held),
        in_specs=[q_head, k_head, k_head, sequence if documents else None, no_result, q_head, column, column],
        out_specs=[gradient_block] * 3,
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype)] * 3,
        compiler_params=CompilerParams(num_warps=_WARPS, num_stages=2),
        name="attention_gradients",
    )
    return call(q, k, v, documents[0] if documents else None, no_result, dy, log2_total, y_dy)


def _find_group(head: Any, R: int) -> tuple[Any, Any]:
    """The group of a query head, which is the head of its keys, and its number in the group."""
    return lax.div(head, R), lax.rem(head, R)


def _pad_head(size: int) -> int:
    """The head size of blocks, a power of two; the bodies mask what is behind the head."""
    return 1 << (size - 1).bit_length()


def choose_blocks(size: int, itemsize: int) -> tuple[Blocks, Blocks]:
    """The blocks of the kernel of the result, and of the kernel of the gradients.

    They are chosen by the compiler, not timed: of bfloat16 the values of a program stay in registers on a100 and h100.
    """
    if _pad_head(size) * itemsize <= _ROW_BYTES:
        return Blocks(128, 64), Blocks(64, 32)
    return Blocks(64, 32), Blocks(32, 16)


def count_costs(sizes: TileSizes, *, causal: bool) -> tuple[KernelCost, KernelCost]:
    """What the kernels of a tile compute and move: that of the result, that of all gradients.

    Of a causal tile the blocks on and below the diagonal are visited. The gradients visit each block twice: once for
    keys and values, once for queries.

    Arrays are counted once: what further programs read of the same head is in the chip's cache, of tens of MB.

    Worked example: 1,024 queries and keys of size 128 in bfloat16, causal. A program of the result holds 128 queries:
    of 8 x 8 squares of 128 queries and 128 keys, 36 are visited. One of the gradients holds 64: 136 of 16 x 16.
    """
    blocks, backward_blocks = choose_blocks(sizes.head, sizes.itemsize)
    width = _pad_head(sizes.head)
    row = sizes.head * sizes.itemsize  # bytes of a token in q, k, v, y and their gradients
    queries = sizes.heads * sizes.tokens  # tokens of all heads
    keys = sizes.key_heads * sizes.tokens
    scores = sizes.heads * _count_scores(sizes.tokens, blocks, causal)
    backward_scores = sizes.heads * _count_scores(sizes.tokens, backward_blocks, causal)
    # Scores, and weights times values. Of queries q, y and the logarithm.
    forward = KernelCost(2 * 2 * width * scores, scores, queries * (2 * row + 4) + keys * 2 * row)
    # Scores and gradients of weights, twice; gradients of keys, of values and of queries. Of queries q, dy, three
    # gradients, the logarithm and y dy.
    moved = queries * (5 * row + 8) + keys * 2 * row
    return forward, KernelCost(7 * 2 * width * backward_scores, 2 * backward_scores, moved)


def _count_scores(tokens: int, blocks: Blocks, causal: bool) -> int:
    """Scores that the programs of a head compute: all, or those of blocks up to the diagonal's."""
    held = tokens // blocks.held
    squares = held * held
    if causal:
        squares = held * (held + 1) // 2
    return squares * blocks.held**2
