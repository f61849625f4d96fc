"""What the further kernels mean, over a Python list of blocks: one block a device, in the order of the axis.

`xp` is numpy, or jax.numpy where a gradient is wanted.
"""

from functools import reduce

import numpy as np


def extremum(blocks, *, op, xp=np):
    """Every device gets the max or min; reduced at once, so that ties share the derivative equally."""
    return [getattr(xp, op)(xp.stack(blocks), axis=0)] * len(blocks)


def boolean(blocks, *, op, xp=np):
    """Every device gets "any" or "all"."""
    return [getattr(xp, op)(xp.stack(blocks), axis=0)] * len(blocks)


def broadcast(blocks, *, source, xp=np):
    """Every device gets the block of the source."""
    return [blocks[source]] * len(blocks)


def scan(blocks, *, op="sum", exclusive=False, xp=np):
    """Device i gets what devices 0 to i give together, or to i - 1; the first then gets the neutral element."""
    if op == "sum" and blocks[0].dtype == bool:
        blocks = [block.astype(xp.int32) for block in blocks]
    combine = {"sum": xp.add, "max": xp.maximum, "min": xp.minimum}[op]
    out = [reduce(combine, blocks[: i + 1]) for i in range(len(blocks))]
    return [xp.full_like(out[0], neutral(op, out[0].dtype)), *out[:-1]] if exclusive else out


def neutral(op, dtype):
    """What leaves every other value as it is."""
    if op == "sum":
        return 0
    if dtype.kind == "b":
        return op == "min"
    if dtype == np.int32:
        return np.iinfo(np.int32).min if op == "max" else np.iinfo(np.int32).max
    return -np.inf if op == "max" else np.inf


def halo_exchange(blocks, *, dim=0, before=1, after=1, wrap=False, xp=np):
    """Every block with rows of the joined array before and behind it; zeros, or the other end, beyond the ends."""
    size, whole = blocks[0].shape[dim], xp.concatenate(blocks, dim)
    if wrap:  # as often as the halo is long
        turns = 1 + max(before, after) // whole.shape[dim]
        whole, start = xp.concatenate([whole] * (2 * turns + 1), dim), turns * whole.shape[dim]
    else:
        rows = [(before, after) if d == dim % whole.ndim else (0, 0) for d in range(whole.ndim)]
        whole, start = xp.pad(whole, rows), before
    at = [range(start + i * size - before, start + (i + 1) * size + after) for i in range(len(blocks))]
    return [xp.take(whole, np.array(rows), axis=dim) for rows in at]


def gather_to_one(blocks, *, dim=0, target=0, xp=np):
    """The target gets the blocks joined, the others zeros."""
    whole = xp.concatenate(blocks, dim)
    return [whole if i == target else xp.zeros_like(whole) for i in range(len(blocks))]


def all_gather_uneven(blocks, *, sizes, dim=0, xp=np):
    """Every device gets the first sizes[i] rows of every block i, joined."""
    rows = [xp.take(block, np.arange(size), axis=dim) for block, size in zip(blocks, sizes, strict=True)]
    return [xp.concatenate(rows, dim)] * len(blocks)


def reduce_scatter_uneven(blocks, *, sizes, dim=0, xp=np):
    """Device i gets its sizes[i] rows of the sum, padded with zeros to the largest size."""
    if blocks[0].dtype == bool:
        blocks = [block.astype(xp.int32) for block in blocks]
    total, out, start = reduce(xp.add, blocks), [], 0
    for size in sizes:
        piece = xp.take(total, np.arange(start, start + size), axis=dim)
        out.append(xp.pad(piece, [(0, max(sizes) - size if d == dim % piece.ndim else 0) for d in range(piece.ndim)]))
        start += size
    return out


def tree_sum(blocks):
    """The sum of all global blocks, neighbours first, one float32 addition at a time."""
    while len(blocks) > 1:
        pairs = [a + b for a, b in zip(blocks[0::2], blocks[1::2], strict=False)]
        blocks = pairs + blocks[len(blocks) - len(blocks) % 2 :]
    return blocks[0]
