"""A sum whose order depends on the data alone, so that its bits are the same on every number of devices and mesh.

The order is a binary tree over the global blocks: blocks 0 and 1, 2 and 3, ... are added, then their sums in pairs, and
so on; an odd last term is passed up. A run of 2^k blocks that starts at a multiple of 2^k is a subtree, so a device
adds such runs locally and sends one partial sum for each.

Source: Demmel, Nguyen, Parallel Reproducible Summation (2015), for the problem; pairwise summation, Higham (1993).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardkit._jax import compat
from shardkit.collectives.axes import as_numbers, axis_size


def sum_blocks(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """Sums the blocks of all devices in the order of the tree; `x[blocks, ...]` varies over `names`."""
    if x.ndim == 0 or x.shape[0] == 0:
        raise ValueError(
            "all_reduce: with deterministic=True dim 0 of every leaf must count this device's blocks, at least one; "
            f"got shape {x.shape}. Pass x[None] if each device has one block."
        )
    if not jnp.issubdtype(x.dtype, jnp.inexact):  # exact in any order, and not differentiable
        return lax.psum(jnp.sum(as_numbers(x), axis=0), names)
    return _sum_tree(x, names)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _sum_tree(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    count = axis_size(names)
    blocks = x.shape[0]
    shape = x.shape[1:]
    size = math.prod(shape)
    if not size:  # jax refuses to gather empty arrays
        return jnp.zeros(shape, x.dtype)
    addends = x
    if x.dtype.itemsize < 4:
        # Compilers may skip roundings between 16-bit additions, but not between float32 ones.
        finfo = jnp.finfo(x.dtype)
        addends = lax.reduce_precision(x.astype(jnp.float32), finfo.nexp, finfo.nmant)
    addends = addends.reshape(blocks, size)
    if blocks > 1:
        addends = _copy_blocks(addends)
    # 6 blocks a device: runs of 2, each a subtree on every number of devices that have 6 blocks. Device 1 has the
    # blocks 6 to 11 and sums 6+7, 8+9, 10+11; a run of 4 would begin at block 6, which is no multiple of 4.
    run_length = blocks & -blocks  # the largest power of two that divides the blocks per device
    runs = blocks // run_length
    terms = jnp.moveaxis(addends.reshape(runs, run_length, size), 1, 0)
    run_sums = sum_pairwise(terms)  # [runs, size]
    # Each device adds the runs of all devices for 1/n of the elements, and all gather the results. An all_gather of the
    # runs would do the same, and send n/2 times as much for one run a device.
    padded = jnp.pad(run_sums, ((0, 0), (0, -size % count)))
    pieces = jnp.moveaxis(padded.reshape(runs, count, -1), 1, 0)
    piece = sum_pieces(pieces, names)
    total = compat.all_gather_replicated(piece, names, 0)
    return total[:size].reshape(shape).astype(x.dtype)


@_sum_tree.defjvp
def _differentiate_sum(names: tuple[str, ...], primals: Any, tangents: Any) -> Any:
    (x,) = primals
    (dx,) = tangents
    return _sum_tree(x, names), lax.psum(jnp.sum(dx, axis=0), names)


def sum_pieces(pieces: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """This device's piece of the sum of all devices' runs, in the tree's order.

    Layout: `pieces[n, runs, M] -> sum[M]`, for n devices in the order of `names`; a run is the sum of a subtree.

    Cost: an all_to_all.
    """
    # By one all_to_all every device gets its piece of all runs, in the order of the devices, so in that of the blocks.
    arrivals = lax.all_to_all(pieces, names, 0, 0, tiled=True)
    return sum_pairwise(arrivals.reshape(-1, pieces.shape[2]))


def sum_pairwise(x: jax.Array) -> jax.Array:
    """Sums dim 0 in pairs; an odd last one is passed up: of 5 terms ((0+1) + (2+3)) + 4."""
    while len(x) > 1:
        sums = x[0 : len(x) - 1 : 2] + x[1::2]
        if len(x) % 2:
            sums = jnp.concatenate([sums, x[-1:]])
        x = sums
    return x[0]


def _copy_blocks(x: jax.Array) -> jax.Array:
    """Copies `x` block by block in a loop, which the compiler does not fuse with the producer of `x`.

    If blocks are products, the compiler would fuse a product with its addition, into a multiply-add that does not round
    the product: for two blocks on one device, but not for blocks on two devices. An optimization_barrier does not
    prevent the fusion (jax 0.10, CPU).
    """

    def copy_block(i: Any, out: jax.Array) -> jax.Array:
        block = lax.dynamic_index_in_dim(x, i, 0, keepdims=False)
        return lax.dynamic_update_index_in_dim(out, block, i, 0)

    return lax.fori_loop(0, len(x), copy_block, jnp.zeros_like(x))
