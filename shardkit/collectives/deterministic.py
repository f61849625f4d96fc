"""A sum whose order depends on the data alone, so that its bits are the same on every number of devices and mesh.

The order is a binary tree over the global blocks: blocks 0 and 1, 2 and 3, ... are added, then those sums in pairs; an
odd last one is passed up. A run of 2^k blocks that starts at a multiple of 2^k is a subtree, so a device adds such runs
locally and sends one partial sum for each.

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
from shardkit.collectives.axes import axis_size, countable


def blocks_sum(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """The sum over dim 0 of all devices' blocks, in the tree's order; `x` varies over `names` and is [blocks, ...]."""
    if x.ndim == 0 or x.shape[0] == 0:
        raise ValueError(
            "all_reduce: with deterministic=True dim 0 of every leaf must count this device's blocks, at least one; "
            f"got shape {x.shape}. Pass x[None] if each device has one block."
        )
    if not jnp.issubdtype(x.dtype, jnp.inexact):  # exact in any order, and not differentiable
        return lax.psum(jnp.sum(countable(x), axis=0), names)
    return _tree(x, names)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _tree(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    count = axis_size(names)
    blocks, shape = x.shape[0], x.shape[1:]
    size = math.prod(shape)
    if not size:  # jax refuses to gather empty arrays
        return jnp.zeros(shape, x.dtype)
    if x.dtype.itemsize < 4:
        # Compilers may skip roundings between 16-bit additions, but not between float32 ones.
        kind = jnp.finfo(x.dtype)
        wide = lax.reduce_precision(x.astype(jnp.float32), kind.nexp, kind.nmant)
    else:
        wide = x
    wide = wide.reshape(blocks, size)
    if blocks > 1:
        wide = _written(wide)
    run = blocks & -blocks  # the largest power of two that divides the blocks per device
    partials = pairwise(jnp.moveaxis(wide.reshape(blocks // run, run, size), 1, 0))
    padded = jnp.pad(partials, ((0, 0), (0, -size % count))).reshape(blocks // run, count, -1)
    total = compat.all_gather_replicated(sum_of_pieces(jnp.moveaxis(padded, 1, 0), names), names, 0)
    return total[:size].reshape(shape).astype(x.dtype)


@_tree.defjvp
def _tree_jvp(names: tuple[str, ...], primals: Any, tangents: Any) -> Any:
    (x,), (dx,) = primals, tangents
    return _tree(x, names), lax.psum(jnp.sum(dx, axis=0), names)


def sum_of_pieces(pieces: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """This device's piece of the sum of all devices' runs, in the tree's order.

    Layout: `pieces[n, runs, M] -> sum[M]`, for n devices in the order of `names`; a run is the sum of a subtree.

    Cost: an all_to_all.
    """
    arrived = lax.all_to_all(pieces, names, 0, 0, tiled=True)
    return pairwise(arrived.reshape(-1, pieces.shape[2]))


def pairwise(x: jax.Array) -> jax.Array:
    """The sum over dim 0 in pairs; an odd last one is passed up."""
    while len(x) > 1:
        pairs = x[0 : len(x) - 1 : 2] + x[1::2]
        x = jnp.concatenate([pairs, x[-1:]]) if len(x) % 2 else pairs
    return x[0]


def _written(x: jax.Array) -> jax.Array:
    """`x`, copied block by block in a loop, which the compiler does not fuse with the producer of `x`.

    Otherwise a product that is added at once becomes a fused multiply-add, which does not round the product, for blocks
    on one device but not for blocks on two. An optimization_barrier does not prevent it (jax 0.10, CPU).
    """

    def copy(i: Any, out: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(out, lax.dynamic_index_in_dim(x, i, 0, keepdims=False), i, 0)

    return lax.fori_loop(0, len(x), copy, jnp.zeros_like(x))
