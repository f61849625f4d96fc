"""A reference for each kernel, over a Python list of blocks: one block per device, in the order of the axis.

Every function takes the list of all devices' blocks and returns the list of results; its options are the options of the
kernel of the same name. `xp` is numpy, or jax.numpy for gradients. The code is simple enough to trust by reading it.
`over_mesh` applies a reference to arrays whose first dims are the mesh.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np

# References for a user's own collectives; the other functions are references for kernels of this package.
__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "reduce_scatter",
    "shift",
]

Blocks = Sequence[Any]


def all_reduce(blocks: Blocks, *, op: str = "sum", xp: Any = np) -> list[Any]:
    """Every device gets the sum, mean, max, min, any or all; ties share the derivative of a max or min.

    Example:
        >>> sk.testing.reference.all_reduce([np.array([1, 2]), np.array([3, 4])])
        [array([4, 6]), array([4, 6])]
    """
    if op in ("sum", "mean"):
        result = _add(blocks, op, xp)
    else:
        result = getattr(xp, op)(xp.stack(blocks), axis=0)
    return [result] * len(blocks)


def all_gather(blocks: Blocks, *, dim: int = 0, xp: Any = np) -> list[Any]:
    """Every device gets the blocks, concatenated along dim.

    Example:
        >>> sk.testing.reference.all_gather([np.array([1, 2]), np.array([3, 4])])
        [array([1, 2, 3, 4]), array([1, 2, 3, 4])]
    """
    return [xp.concatenate(blocks, dim)] * len(blocks)


def reduce_scatter(blocks: Blocks, *, dim: int = 0, op: str = "sum", xp: Any = np) -> list[Any]:
    """Device i gets part i of the sum or mean.

    Example:
        >>> sk.testing.reference.reduce_scatter([np.array([1, 2]), np.array([3, 4])])
        [array([4]), array([6])]
    """
    return list(xp.split(_add(blocks, op, xp), len(blocks), dim))


def all_to_all(blocks: Blocks, *, split_dim: int, concat_dim: int, xp: Any = np) -> list[Any]:
    """Device j gets part j of every block, joined in the order of the senders.

    Example:
        >>> sk.testing.reference.all_to_all([np.array([1, 2]), np.array([3, 4])], split_dim=0, concat_dim=0)
        [array([1, 3]), array([2, 4])]
    """
    n = len(blocks)
    parts = [xp.split(block, n, split_dim) for block in blocks]  # parts[sender][receiver]
    results = []
    for receiver in range(n):
        received = [pieces[receiver] for pieces in parts]
        results.append(xp.concatenate(received, concat_dim))
    return results


def shift(blocks: Blocks, *, by: int = 1, wrap: bool = True, xp: Any = np) -> list[Any]:
    """Device i gets the block of device i - by, or zeros beyond an open end.

    Example:
        >>> sk.testing.reference.shift([np.array([1, 2]), np.array([3, 4])])
        [array([3, 4]), array([1, 2])]
    """
    n = len(blocks)
    results = []
    for device in range(n):
        source = device - by
        if wrap or 0 <= source < n:
            results.append(blocks[source % n])
        else:
            results.append(xp.zeros_like(blocks[device]))
    return results


def broadcast(blocks: Blocks, *, source: int = 0, xp: Any = np) -> list[Any]:
    """Every device gets the block of the source.

    Example:
        >>> sk.testing.reference.broadcast([np.array([1, 2]), np.array([3, 4])], source=1)
        [array([3, 4]), array([3, 4])]
    """
    return [blocks[source]] * len(blocks)


def vary(blocks: Blocks, *, xp: Any = np) -> list[Any]:
    """Every device keeps its block.

    Example:
        >>> sk.testing.reference.vary([np.array([1, 2]), np.array([3, 4])])
        [array([1, 2]), array([3, 4])]
    """
    return list(blocks)


def prefix_scan(
    blocks: Blocks,
    combine: Callable[[Any, Any], Any] | None = None,
    identity: Any = None,
    *,
    op: str = "sum",
    exclusive: bool = False,
    reverse: bool = False,
    xp: Any = np,
) -> list[Any]:
    """Device i gets the blocks of devices 0 to i combined; exclusive: 0 to i - 1, and the identity on device 0.

    In reverse these are devices i to n - 1, or i + 1 to n - 1. With `combine` a block may be a pytree.

    Example:
        >>> sk.testing.reference.prefix_scan([np.array([1, 2]), np.array([3, 4])])
        [array([1, 2]), array([4, 6])]
    """
    if combine is None:
        if op == "sum":
            blocks = [_count_bools(block, xp) for block in blocks]
        combine = {"sum": xp.add, "max": xp.maximum, "min": xp.minimum}[op]
        if exclusive:
            identity = xp.full_like(blocks[0], _neutral_element(op, blocks[0].dtype))
    # accumulate gives the running results: of blocks 1, 2, 3 and a sum these are 1, 3, 6.
    if not reverse:
        results = list(itertools.accumulate(blocks, combine))
        if exclusive:
            results = [identity, *results[:-1]]
        return results
    results = list(itertools.accumulate(reversed(blocks), lambda later, earlier: combine(earlier, later)))[::-1]
    if exclusive:
        results = [*results[1:], identity]
    return results


def halo_exchange(
    blocks: Blocks, *, dim: int = 0, before: int = 1, after: int = 1, wrap: bool = False, xp: Any = np
) -> list[Any]:
    """Every block with the rows before and after it; beyond the ends zeros, or with wrap the rows of the other end.

    Example:
        >>> sk.testing.reference.halo_exchange([np.array([1, 2]), np.array([3, 4])])
        [array([0, 1, 2, 3]), array([2, 3, 4, 0])]
    """
    size = blocks[0].shape[dim]
    joined = xp.concatenate(blocks, dim)
    total = joined.shape[dim]
    zero_row = xp.zeros_like(xp.take(joined, np.arange(1), axis=dim))
    rows = xp.concatenate([joined, zero_row], dim)  # row `total` is beyond an open end
    results = []
    for device in range(len(blocks)):
        indices = []
        for index in range(device * size - before, (device + 1) * size + after):
            if wrap:
                indices.append(index % total)
            elif 0 <= index < total:
                indices.append(index)
            else:
                indices.append(total)
        results.append(xp.take(rows, np.array(indices, int), axis=dim))
    return results


def gather_to_one(blocks: Blocks, *, dim: int = 0, target: int = 0, xp: Any = np) -> list[Any]:
    """The target gets the joined blocks, the others zeros.

    Example:
        >>> sk.testing.reference.gather_to_one([np.array([1, 2]), np.array([3, 4])])
        [array([1, 2, 3, 4]), array([0, 0, 0, 0])]
    """
    joined = xp.concatenate(blocks, dim)
    zeros = xp.zeros_like(joined)
    results = [zeros] * len(blocks)
    results[target] = joined
    return results


def all_gather_uneven(blocks: Blocks, *, sizes: Sequence[int], dim: int = 0, xp: Any = np) -> list[Any]:
    """Every device gets the first sizes[i] rows of every block i, joined.

    Example:
        >>> sk.testing.reference.all_gather_uneven([np.array([1, 2]), np.array([3, 4])], sizes=(2, 1))
        [array([1, 2, 3]), array([1, 2, 3])]
    """
    used = []
    for block, size in zip(blocks, sizes, strict=True):
        used.append(xp.take(block, np.arange(size), axis=dim))
    return [xp.concatenate(used, dim)] * len(blocks)


def reduce_scatter_uneven(
    blocks: Blocks, *, sizes: Sequence[int], dim: int = 0, op: str = "sum", xp: Any = np
) -> list[Any]:
    """Device i gets its sizes[i] rows of the sum or mean, padded with zeros to the largest size.

    Example:
        >>> sk.testing.reference.reduce_scatter_uneven([np.array([1, 2]), np.array([3, 4])], sizes=(1, 1))
        [array([4]), array([6])]
    """
    total = _add(blocks, op, xp)
    dim %= total.ndim
    results = []
    start = 0
    for size in sizes:
        piece = xp.take(total, np.arange(start, start + size), axis=dim)
        padding = [(0, 0)] * piece.ndim
        padding[dim] = (0, max(sizes) - size)
        results.append(xp.pad(piece, padding))
        start += size
    return results


def over_mesh(
    blockwise: Callable[..., list[Any]], x: Any, sizes: Mapping[str, int], axis: str | Sequence[str], *, xp: Any = np
) -> Any:
    """Applies a reference along one axis, or a tuple of axes, of a whole mesh.

    Args:
        blockwise: a function of a list of blocks, with `xp` as its keyword.
        x: array of shape [*sizes, ...]: the blocks of all devices.
        sizes: the mesh: axis name and size, in its order.
        axis: the axis of the collective; of a tuple, the first is major.
        xp: numpy, or jax.numpy for gradients.

    Returns:
        Array of shape [*sizes, ...]: the results of all devices.

    Example:
        >>> blocks = np.arange(4).reshape(2, 2)  # one number on each device of a mesh data=2, model=2
        >>> all_reduce = sk.testing.reference.all_reduce
        >>> sk.testing.reference.over_mesh(all_reduce, blocks, {"data": 2, "model": 2}, "model").tolist()
        [[1, 1], [5, 5]]
    """
    if isinstance(axis, str):
        axis = (axis,)
    group_axes = tuple(axis)
    other_axes = [name for name in sizes if name not in group_axes]
    results: dict[tuple[int, ...], Any] = {}  # by the coordinates of the device
    for other_coordinates in _list_coordinates(other_axes, sizes):
        # The devices that differ in the group's axes alone: on a mesh data=2, model=2, along "model", (0, 0) and
        # (0, 1) form one group, and (1, 0) and (1, 1) another.
        members = []
        for group_coordinates in _list_coordinates(group_axes, sizes):
            coordinates = {**other_coordinates, **group_coordinates}
            members.append(tuple(coordinates[name] for name in sizes))
        blocks = [x[member] for member in members]
        outputs = blockwise(blocks, xp=xp)
        results.update(zip(members, outputs, strict=True))
    mesh_shape = tuple(sizes.values())
    in_mesh_order = [results[device] for device in np.ndindex(mesh_shape)]
    rows = xp.stack(in_mesh_order)  # [devices, ...]
    return rows.reshape(mesh_shape + rows.shape[1:])


def _list_coordinates(axes: Sequence[str], sizes: Mapping[str, int]) -> list[dict[str, int]]:
    """The coordinates along some axes of all devices, the first axis major: a dict of axis name and index each."""
    shape = [sizes[name] for name in axes]
    return [dict(zip(axes, index, strict=True)) for index in np.ndindex(*shape)]


def _add(blocks: Blocks, op: str, xp: Any) -> Any:
    """The sum of the blocks, or their mean."""
    terms = [_count_bools(block, xp) for block in blocks]
    total = reduce(xp.add, terms)
    if op == "sum":
        return total
    # A mean of integers is float32 on the mesh, where numpy would make it float64.
    if total.dtype == np.int32:
        total = total.astype(xp.float32)
    return total / xp.asarray(len(blocks), total.dtype)


def _count_bools(block: Any, xp: Any) -> Any:
    """Booleans as 0 and 1, so that a sum counts the True ones; other blocks as they are."""
    if block.dtype == bool:
        return block.astype(xp.int32)
    return block


def _neutral_element(op: str, dtype: Any) -> Any:
    """The element that changes no result: 0 in a sum, the smallest value in a maximum, the largest in a minimum."""
    if op == "sum":
        return 0
    smallest, largest = _find_limits(dtype)
    if op == "max":
        return smallest
    return largest


def _find_limits(dtype: Any) -> tuple[Any, Any]:
    """The smallest and the largest value of a dtype."""
    if dtype.kind == "b":
        return False, True
    if dtype == np.int32:
        return np.iinfo(np.int32).min, np.iinfo(np.int32).max
    return -np.inf, np.inf
