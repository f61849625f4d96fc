"""The tiles of attention by the Pallas kernel for TPUs that jax ships, `pallas.ops.tpu.flash_attention`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shardkit._jax.pallas import KernelCost, call_kernel
from shardkit.layers.tiles import TileForm, TileSizes

LANES = 128  # of a TPU's vector registers: the last dim of an array in its memory is a multiple of it
HEADS = f"at most {LANES} or a multiple of it"  # the sizes that the kernel takes
_BLOCKS = (512, 256, LANES)  # queries and keys of a block
_BLOCK_BYTES = 2**18  # of a block of queries or keys: a kernel holds several, and blocks of scores, in vector memory


def fits_head(size: int) -> bool:
    """Whether the kernel takes heads of this size."""
    return size <= LANES or size % LANES == 0


def attend_tile(
    q_bGRtK: jax.Array,
    k_bGsK: jax.Array,
    v_bGsK: jax.Array,
    documents: tuple[jax.Array, jax.Array] | None,
    form: TileForm,
) -> tuple[jax.Array, jax.Array]:
    """The result of a tile, and the logarithm of its denominator; see `attention_kernel.attend_tile`."""
    kernels = _load_kernels()
    block = _choose_block(q_bGRtK)

    def run_head(segments: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return kernels._flash_attention_impl(
            q,
            k,
            v,
            ab=None,
            segment_ids=segments,
            save_residuals=True,
            causal=form.causal,
            sm_scale=form.scale,
            block_b=1,
            block_q=block,
            block_k_major=block,
            block_k=block,
            debug=False,
        )

    forward, _, _ = count_costs(TileSizes.of(q_bGRtK, k_bGsK), causal=form.causal)
    y, total, largest = _call_for_heads(run_head, [forward], documents, (q_bGRtK,), (k_bGsK, v_bGsK))
    log_total = largest + jnp.log(total)
    return y, log_total[..., None]


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
    kernels = _load_kernels()
    block = _choose_block(q_bGRtK)
    # The kernel computes weights as exp(score - largest) / total. With log_total for the largest score, total is 1.
    largest = log_total_bGRt1[..., 0]
    total = jnp.ones_like(largest)

    def run_head(
        segments: Any,
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
        options |= {"mask_value": kernels.DEFAULT_MASK_VALUE, "debug": False}
        arrays = (q, k, v, None, segments, total, largest, dy, y_dy)
        dk, dv = kernels._flash_attention_bwd_dkv(*arrays, block_q=block, **options)
        dq, _ = kernels._flash_attention_bwd_dq(*arrays, **options)
        return dq, dk, dv

    _, of_keys, of_queries = count_costs(TileSizes.of(q_bGRtK, k_bGsK), causal=form.causal)
    rows = (q_bGRtK, largest, total, dy_bGRtK, y_dy_bGRt1[..., 0])
    dq, dk, dv = _call_for_heads(run_head, [of_keys, of_queries], documents, rows, (k_bGsK, v_bGsK))
    return dq, dk, dv


def _load_kernels() -> Any:
    """jax's module of the kernel, on first use: it takes a while to import, and it is experimental."""
    from jax.experimental.pallas.ops.tpu import flash_attention

    return flash_attention


def _call_for_heads(
    run_head: Callable[..., Any],
    costs: Sequence[KernelCost],
    documents: tuple[jax.Array, jax.Array] | None,
    of_queries: tuple[jax.Array, ...],
    of_keys: tuple[jax.Array, ...],
) -> Any:
    """The kernel for each of the R query heads of a group, which share keys and values: the results have R as dim 2.

    `run_head(segments, *of_queries, *of_keys)` is the kernel for arrays without the dim of R.
    """
    # Over R the kernel's grid has a dim more, and keys are not copied in memory. The kernel itself has as many heads of
    # keys as of queries, for which they would be copied R times.
    in_axes = (*[2] * len(of_queries), *[None] * len(of_keys))
    if documents is None:
        for_all_heads = jax.vmap(partial(run_head, None), in_axes, 2)
        return call_kernel(for_all_heads, costs, *of_queries, *of_keys)

    def run_documents(q_documents: jax.Array, k_documents: jax.Array, *arrays: jax.Array) -> Any:
        segments = _load_kernels().SegmentIds(q_documents, k_documents)
        return jax.vmap(partial(run_head, segments), in_axes, 2)(*arrays)

    pair = [x.astype(jnp.int32) for x in documents]
    return call_kernel(run_documents, costs, *pair, *of_queries, *of_keys)


def _choose_block(q_bGRtK: jax.Array) -> int:
    tokens, size = q_bGRtK.shape[-2:]
    return choose_block(tokens, size, q_bGRtK.dtype.itemsize)


def choose_block(tokens: int, size: int, itemsize: int) -> int:
    """The queries, and keys, of a block: the most that divide the tokens and fit."""
    for block in _BLOCKS[:-1]:
        if tokens % block == 0 and block * size * itemsize <= _BLOCK_BYTES:
            return block
    return _BLOCKS[-1]


def count_costs(sizes: TileSizes, *, causal: bool) -> list[KernelCost]:
    """What the kernels of a tile compute and move: forward, that of the gradients of keys and values, that of queries.

    Of a causal tile the blocks on and below the diagonal are visited.

    Worked example: 1,024 queries in two blocks. Of four blocks of scores three are visited if the tile is causal. The
    forward kernel holds a block of queries, and reads the keys and values of one block, then of two.
    """
    block = choose_block(sizes.tokens, sizes.head, sizes.itemsize)
    blocks = sizes.tokens // block
    visited = blocks * blocks
    if causal:
        visited = blocks * (blocks + 1) // 2
    row = sizes.head * sizes.itemsize  # bytes of a token in q, k, v, y and their gradients
    lanes = 4 * LANES  # of the largest score, of the sum, and of y dy, each of which fills a register
    scores = sizes.heads * visited * block * block

    def count(matmuls: int, held: int, streamed: int) -> KernelCost:
        moved = sizes.heads * (sizes.tokens * held + visited * block * streamed)
        return KernelCost(2 * matmuls * sizes.head * scores, scores, moved)

    return [
        # Scores, and weights times values. Reads q, writes y, the largest score and the sum; reads k and v.
        count(2, held=2 * row + 2 * lanes, streamed=2 * row),
        # Scores, gradients of weights, of keys and of values. Reads k and v, writes dk and dv; reads q, dy and three.
        count(4, held=4 * row, streamed=2 * row + 3 * lanes),
        # Scores, gradients of weights and of queries. Reads q, dy and three, of which y dy is as wide as a block.
        count(3, held=3 * row + 2 * lanes + 4 * block, streamed=2 * row),
    ]
