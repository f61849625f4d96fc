"""What each kernel means, over a Python list of blocks: one block a device, in the order of the axis.

`xp` is numpy, or jax.numpy where a gradient is wanted.
"""

from functools import reduce

import numpy as np


def all_reduce(blocks, *, op="sum", xp=np):
    """Every device gets the sum, mean, max or min."""
    if op in ("max", "min"):
        result = reduce(xp.maximum if op == "max" else xp.minimum, blocks)
    else:
        result = _total(blocks, op, xp)
    return [result] * len(blocks)


def all_gather(blocks, *, dim=0, xp=np):
    """Every device gets the blocks joined along dim."""
    return [xp.concatenate(blocks, dim)] * len(blocks)


def reduce_scatter(blocks, *, dim=0, op="sum", xp=np):
    """Device i gets part i of the sum or mean."""
    return xp.split(_total(blocks, op, xp), len(blocks), dim)


def all_to_all(blocks, *, split_dim, concat_dim, xp=np):
    """Device j gets part j of every block, joined in the order of the senders."""
    parts = [xp.split(block, len(blocks), split_dim) for block in blocks]
    return [xp.concatenate([part[j] for part in parts], concat_dim) for j in range(len(blocks))]


def shift(blocks, *, by=1, wrap=True, xp=np):
    """Device i gets what device i - by held, or zeros beyond an open end."""
    n = len(blocks)
    inside = [wrap or 0 <= i - by < n for i in range(n)]
    return [blocks[(i - by) % n] if inside[i] else xp.zeros_like(blocks[i]) for i in range(n)]


def broadcast(blocks, *, source=0, xp=np):
    """Every device gets the block of the source."""
    return [blocks[source]] * len(blocks)


def _total(blocks, op, xp):
    if blocks[0].dtype == bool:
        blocks = [block.astype(xp.int32) for block in blocks]
    total = reduce(xp.add, blocks)
    if op == "sum":
        return total
    if total.dtype == xp.int32:
        total = total.astype(xp.float32)
    return total / xp.asarray(len(blocks), total.dtype)
