"""The tiles of attention by the Pallas kernel for TPUs that jax ships, which writes no scores to memory.

A tile's queries attend to its keys alone. Its result is a softmax of its own, and the maximum and the sum of its
exponentials say how it is joined with others. The backward pass of a tile gets the denominator of the whole softmax, so
that a ring can call it for one block of keys after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import CostEstimate
from jax.experimental.pallas.ops.tpu import flash_attention

from shardkit._jax import backends
from shardkit._jax.pallas import call_kernel, is_interpreting

_BLOCKS = (512, 256, 128)  # of queries and keys, in a TPU's vector memory; 128 is the width of its registers
# [b, G, t, K] and [b, G, t] of one query head of each group, and [b, t] of documents.
_Tile = Callable[..., Any]


class TileForm(NamedTuple):
    """The static options of a tile."""

    causal: bool  # whether the first query is at the place of the first key, and sees none behind it
    scale: float  # factor of the scores


def uses_kernel() -> bool:
    """Whether a program that asks for the kernel has it: on TPUs, and in tests that interpret it."""
    return is_interpreting() or backends.platform() == "tpu"


def check_kernel(where: str, tokens: int, *, positions: bool, block: int | None) -> None:
    """Refuses what the kernel does not compute."""
    if positions:
        raise ValueError(
            f"{where}: the kernel must get tokens in order; got positions and kernel=True. Leave one of them out."
        )
    if block is not None:
        raise ValueError(
            f"{where}: the kernel has blocks of its own; got block={block} and kernel=True. Leave one of them out."
        )
    if tokens % _BLOCKS[-1]:
        raise ValueError(
            f"{where}: the tokens of a tile must be a multiple of {_BLOCKS[-1]} for the kernel; got {tokens}. Pad the "
            "sequence, or leave kernel= out."
        )
    if backends.platform() == "gpu":
        raise ValueError(f"{where}: the kernel must run on TPUs; got kernel=True for GPUs. Leave it out there.")


def attend_tile(
    q_bGRtK: jax.Array,
    k_bGsK: jax.Array,
    v_bGsK: jax.Array,
    documents: tuple[jax.Array, jax.Array] | None,
    form: TileForm,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The attention of a tile's queries to its keys.

    Args:
        q_bGRtK, k_bGsK, v_bGsK: queries, keys and values; t is s, a multiple of 128.
        documents: the document of each query and of each key, int32 [b, t] and [b, s]; None: all the same.
        form: the options.

    Returns:
        The result in the dtype of q, the largest score of each query, and the sum of exp(score - largest), float32
        [b, G, R, t, 1].
    """
    block = _choose_block(q_bGRtK.shape[-2])

    def run_head(documents: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return flash_attention._flash_attention_impl(
            q, k, v, None, documents, True, form.causal, form.scale, 1, block, block, block, False
        )

    costs = [_estimate_cost(q_bGRtK, block, form, matmuls=2)]  # the scores, and the weights times the values
    y, total, largest = _call_for_heads(run_head, costs, documents, (q_bGRtK,), (k_bGsK, v_bGsK))
    return y, largest[..., None], total[..., None]


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
    """The gradients of a tile's queries, keys and values, float32, as `attention_gradients` gives partial sums.

    The kernel has rounded each to the dtype of its array.

    `log_total` is the logarithm of the denominator over all keys, so that exp(score - log_total) are the weights of the
    whole softmax, of which this tile has some.
    """
    block = _choose_block(q_bGRtK.shape[-2])
    largest = log_total_bGRt1[..., 0]
    total = jnp.ones_like(largest)  # exp(score - log_total) / 1

    def run_head(
        documents: Any,
        q: jax.Array,
        largest: jax.Array,
        total: jax.Array,
        dy: jax.Array,
        y_dy: jax.Array,
        k: jax.Array,
        v: jax.Array,
    ) -> Any:
        options: dict[str, Any] = {"sm_scale": form.scale, "causal": form.causal}
        options |= {"block_q_major": block, "block_k_major": block, "block_k": block}
        options |= {"mask_value": flash_attention.DEFAULT_MASK_VALUE, "debug": False}
        arrays = (q, k, v, None, documents, total, largest, dy, y_dy)
        dk, dv = flash_attention._flash_attention_bwd_dkv(*arrays, block_q=block, **options)
        dq, _ = flash_attention._flash_attention_bwd_dq(*arrays, **options)
        return dq, dk, dv

    of_queries = (q_bGRtK, largest, total, dy_bGRtK, y_dy_bGRt1[..., 0])
    # Both kernels compute scores and gradients of weights: one then those of keys and values, the other of queries.
    costs = [_estimate_cost(q_bGRtK, block, form, matmuls) for matmuls in (4, 3)]
    dq, dk, dv = _call_for_heads(run_head, costs, documents, of_queries, (k_bGsK, v_bGsK))
    # Of each query head; a key head gets the sum over those that share it.
    return dq.astype(jnp.float32), dk.astype(jnp.float32).sum(2), dv.astype(jnp.float32).sum(2)


def _call_for_heads(
    run_head: _Tile,
    costs: Sequence[CostEstimate],
    documents: tuple[jax.Array, jax.Array] | None,
    of_queries: tuple[jax.Array, ...],
    of_keys: tuple[jax.Array, ...],
) -> Any:
    """The kernel for each of the R query heads of a group, which share keys and values: the results have R as dim 2."""
    # Over R the kernel's grid has a dim more, and the keys of a group stay where they are. The kernel itself has as
    # many heads of keys as of queries, for which they would be copied R times.
    in_axes = (*[2] * len(of_queries), *[None] * len(of_keys))
    if documents is None:
        for_all_heads = jax.vmap(partial(run_head, None), in_axes, 2)
        return call_kernel(for_all_heads, costs, *of_queries, *of_keys)

    def run_documents(q_documents: jax.Array, k_documents: jax.Array, *arrays: jax.Array) -> Any:
        pair = flash_attention.SegmentIds(q_documents, k_documents)
        return jax.vmap(partial(run_head, pair), in_axes, 2)(*arrays)

    return call_kernel(run_documents, costs, *documents, *of_queries, *of_keys)


def _estimate_cost(q_bGRtK: jax.Array, block: int, form: TileForm, matmuls: int) -> CostEstimate:
    """What a kernel computes and moves: of a causal tile the blocks on and below the diagonal.

    Worked example: 1,024 queries in two blocks. Of four blocks of scores three are computed if the tile is causal. The
    kernel holds a block of queries and reads the keys and values that go with it: one block, then two.
    """
    tokens, size = q_bGRtK.shape[-2:]
    heads = q_bGRtK.size // (tokens * size)
    blocks = tokens // block
    visited = blocks * blocks
    if form.causal:
        visited = blocks * (blocks + 1) // 2
    scores = heads * visited * block * block
    # Two arrays are read for each visited block, and two are read or written once.
    moved = heads * (2 * visited * block + 2 * tokens) * size * q_bGRtK.dtype.itemsize
    return CostEstimate(flops=2 * matmuls * size * scores, transcendentals=scores, bytes_accessed=moved)


def _choose_block(tokens: int) -> int:
    """The largest block that divides the tokens."""
    for block in _BLOCKS:
        if tokens % block == 0:
            return block
    raise AssertionError(tokens)  # `check_kernel` has refused it
