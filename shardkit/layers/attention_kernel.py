"""The tiles of attention by the Pallas kernels that jax ships for TPUs and for GPUs, which write no scores to memory.

A tile's queries attend to its keys alone. Its result is a softmax of its own, and the logarithm of its denominator says
how it is joined with others. The backward pass of a tile gets the denominator of the whole softmax, so that a ring can
call it for one block of keys after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import jax
import jax.numpy as jnp

from shardkit._jax.pallas import KernelCost, kernel_platform
from shardkit.layers import attention_kernel_gpu, attention_kernel_tpu
from shardkit.layers.tiles import TileForm, TileSizes

TOKENS = 128  # the tokens of a tile are a multiple of it: the smallest block for TPUs, the largest for GPUs
_DTYPES = ("float32", "bfloat16")
_KERNELS = {"tpu": attention_kernel_tpu, "gpu": attention_kernel_gpu}


def check_kernel(
    where: str,
    arrays: Sequence[jax.Array],
    tokens: int,
    *,
    positions: bool,
    block: int | None,
    documents_in_ring: bool = False,
) -> None:
    """Refuses what the kernel does not compute; `arrays` are queries, keys and values [.., K], in tiles of `tokens`.

    The size of the heads, and documents in a ring, are judged where the kernel of a platform runs.
    """
    if positions:
        raise ValueError(
            f"{where}: the kernel must get tokens in order; got positions and kernel=True. Leave one of them out."
        )
    if block is not None:
        raise ValueError(
            f"{where}: the kernel has blocks of its own; got block={block} and kernel=True. Leave one of them out."
        )
    if tokens == 0 or tokens % TOKENS:
        raise ValueError(
            f"{where}: the tokens of a tile must be a multiple of {TOKENS} for the kernel; got {tokens}. Pad the "
            "sequence, or leave kernel= out."
        )
    dtypes = [jnp.dtype(x.dtype).name for x in arrays]
    if len(set(dtypes)) > 1 or dtypes[0] not in _DTYPES:
        raise ValueError(
            f"{where}: queries, keys and values must be of one dtype, float32 or bfloat16, for the kernel; got "
            f"{', '.join(dtypes)}. Cast them, or leave kernel= out."
        )
    platform = kernel_platform()
    if platform is not None:
        _check_on_platform(where, platform, arrays[0].shape[-1], documents_in_ring)


def _check_on_platform(where: str, platform: str, head: int, documents_in_ring: bool) -> None:
    wrong = find_wrong_head(platform, head)
    if wrong:
        raise ValueError(f"{where}: {wrong}. Pad the heads, or leave kernel= out.")
    if platform == "gpu" and documents_in_ring:
        raise ValueError(
            f"{where}: queries and keys of a tile must have the same documents for the kernel on GPUs, and those of a "
            "ring have not; got segments and kernel=True. Use ulysses_attention without a ring, or leave one of them "
            "out."
        )


def find_wrong_head(platform: str, head: int) -> str:
    """Why the kernel of a platform, "tpu" or "gpu", does not take heads of this size, as a clause; "" if it does."""
    kernel = _KERNELS[platform]
    if kernel.fits_head(head):
        return ""
    return f"the head size must be {kernel.HEADS} for the kernel; got {head}"


def attend_tile(
    q_bGRtK: jax.Array,
    k_bGsK: jax.Array,
    v_bGsK: jax.Array,
    documents: tuple[jax.Array, jax.Array] | None,
    form: TileForm,
) -> tuple[jax.Array, jax.Array]:
    """The attention of a tile's queries to its keys.

    Args:
        q_bGRtK, k_bGsK, v_bGsK: queries, keys and values; t is s, a multiple of 128.
        documents: the document of each query and of each key, integers [b, t] and [b, s]; None: all the same.
        form: the options.

    Returns:
        The result in the dtype of q, and the logarithm of its denominator, the sum of exp(score), float32
        [b, G, R, t, 1].
    """
    y, log_total = _choose_kernel().attend_tile(q_bGRtK, k_bGsK, v_bGsK, documents, form)
    return y, log_total


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
    arrays = (q_bGRtK, k_bGsK, v_bGsK, log_total_bGRt1, dy_bGRtK, y_dy_bGRt1)
    dq, dk, dv = _choose_kernel().tile_gradients(*arrays, documents, form)
    # Of each query head; a key head gets the sum over those that share it.
    return dq.astype(jnp.float32), dk.astype(jnp.float32).sum(2), dv.astype(jnp.float32).sum(2)


def _choose_kernel() -> ModuleType:
    """The one place where the platform decides; callers have asked whether it has a kernel."""
    platform = kernel_platform()
    assert platform is not None
    return _KERNELS[platform]


def count_costs(platform: str, sizes: TileSizes, *, causal: bool) -> list[KernelCost]:
    """What the kernels of a tile compute and move on a platform: that of the result, then those of the gradients."""
    costs: list[KernelCost] = _KERNELS[platform].count_costs(sizes, causal=causal)
    return costs
