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

from shardkit._jax import backends
from shardkit._jax.pallas import KernelCost, call_kernel

LANES = 128  # of a TPU's vector registers: the last dim of an array in its memory is a multiple of it
_BLOCKS = (512, 256, LANES)  # queries and keys of a block
_BLOCK_BYTES = 2**18  # of a block of queries or keys: a kernel holds several, and blocks of scores, in vector memory
_DTYPES = ("float32", "bfloat16")


class TileForm(NamedTuple):
    """The static options of a tile."""

    causal: bool  # whether the first query is at the place of the first key, and sees none behind it
    scale: float  # factor of the scores


def check_kernel(where: str, arrays: Sequence[jax.Array], tokens: int, *, positions: bool, block: int | None) -> None:
    """Refuses what the kernel does not compute; `arrays` are queries, keys and values [.., K], in tiles of `tokens`."""
    if positions:
        raise ValueError(
            f"{where}: the kernel must get tokens in order; got positions and kernel=True. Leave one of them out."
        )
    if block is not None:
        raise ValueError(
            f"{where}: the kernel has blocks of its own; got block={block} and kernel=True. Leave one of them out."
        )
    if tokens == 0 or tokens % LANES:
        raise ValueError(
            f"{where}: the tokens of a tile must be a multiple of {LANES} for the kernel; got {tokens}. Pad the "
            "sequence, or leave kernel= out."
        )
    dtypes = [jnp.dtype(x.dtype).name for x in arrays]
    if len(set(dtypes)) > 1 or dtypes[0] not in _DTYPES:
        raise ValueError(
            f"{where}: queries, keys and values must be of one dtype, float32 or bfloat16, for the kernel; got "
            f"{', '.join(dtypes)}. Cast them, or leave kernel= out."
        )
    if not fits_lanes(arrays[0].shape[-1]):
        raise ValueError(
            f"{where}: the head size must be at most {LANES} or a multiple of it for the kernel; got "
            f"{arrays[0].shape[-1]}. Pad the heads, or leave kernel= out."
        )
    if backends.platform() == "gpu":
        raise ValueError(f"{where}: the kernel must run on TPUs; got kernel=True for GPUs. Leave it out there.")


def fits_lanes(size: int) -> bool:
    """Whether the kernel takes heads of this size."""
    return size <= LANES or size % LANES == 0


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
        documents: the document of each query and of each key, integers [b, t] and [b, s]; None: all the same.
        form: the options.

    Returns:
        The result in the dtype of q, the largest score of each query, and the sum of exp(score - largest), float32
        [b, G, R, t, 1].
    """
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

    forward, _, _ = _count_costs(q_bGRtK, form)
    y, total, largest = _call_for_heads(run_head, [forward], documents, (q_bGRtK,), (k_bGsK, v_bGsK))
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
        options: dict[str, Any] = {
            "sm_scale": form.scale,
            "causal": form.causal,
            "block_q_major": block,
            "block_k_major": block,
            "block_k": block,
            "mask_value": kernels.DEFAULT_MASK_VALUE,
            "debug": False,
        }
        arrays = (q, k, v, None, segments, total, largest, dy, y_dy)
        dk, dv = kernels._flash_attention_bwd_dkv(*arrays, block_q=block, **options)
        dq, _ = kernels._flash_attention_bwd_dq(*arrays, **options)
        return dq, dk, dv

    _, of_keys, of_queries = _count_costs(q_bGRtK, form)
    rows = (q_bGRtK, largest, total, dy_bGRtK, y_dy_bGRt1[..., 0])
    dq, dk, dv = _call_for_heads(run_head, [of_keys, of_queries], documents, rows, (k_bGsK, v_bGsK))
    # Of each query head; a key head gets the sum over those that share it.
    return dq.astype(jnp.float32), dk.astype(jnp.float32).sum(2), dv.astype(jnp.float32).sum(2)


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
    in_axes = (2,) * len(of_queries) + (None,) * len(of_keys)
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


def _count_costs(q_bGRtK: jax.Array, form: TileForm) -> list[KernelCost]:
    tokens, size = q_bGRtK.shape[-2:]
    heads = q_bGRtK.size // (tokens * size)
    return count_costs(heads, tokens, size, q_bGRtK.dtype.itemsize, causal=form.causal)


def count_costs(heads: int, tokens: int, size: int, itemsize: int, *, causal: bool) -> list[KernelCost]:
    """What the kernels of a tile compute and move: forward, that of the gradients of keys and values, that of queries.

    Of a causal tile the blocks on and below the diagonal are visited.

    Worked example: 1,024 queries in two blocks. Of four blocks of scores three are visited if the tile is causal. The
    forward kernel holds a block of queries, and reads the keys and values of one block, then of two.
    """
    block = choose_block(tokens, size, itemsize)
    blocks = tokens // block
    visited = blocks * blocks
    if causal:
        visited = blocks * (blocks + 1) // 2
    row = size * itemsize  # bytes of a token in q, k, v, y and their gradients
    lanes = 4 * LANES  # of the largest score, of the sum, and of y dy, each of which fills a register
    scores = heads * visited * block * block

    # A kernel reads or writes `held` bytes of each row once, and `streamed` bytes of each row of each visited block.
    def count(matmuls: int, held: int, streamed: int) -> KernelCost:
        moved = heads * (tokens * held + visited * block * streamed)
        return KernelCost(2 * matmuls * size * scores, scores, moved)

    return [
        # Scores, and weights times values. Reads q, writes y, the largest score and the sum; reads k and v.
        count(2, held=2 * row + 2 * lanes, streamed=2 * row),
        # Scores, gradients of weights, of keys and of values. Reads k and v, writes dk and dv; reads q, dy and three.
        count(4, held=4 * row, streamed=2 * row + 3 * lanes),
        # Scores, gradients of weights and of queries. Reads q, dy and three, of which y dy is as wide as a block.
        count(3, held=3 * row + 2 * lanes + 4 * block, streamed=2 * row),
    ]
