"""Elements of several arrays put together in one: by a mask, along a dim, or from places.

An `Exact` has up to five parts: its number, facts, real value, factor and roots. Whatever moves elements moves all of
them, behind the leading dim that each part has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from shardkit.testing.exact.numbers.values import Exact


def where(mask: np.ndarray, x: Exact, y: Exact) -> Exact:
    """x where the mask [...] holds, else y."""
    number = np.where(mask, x.number, y.number)
    facts = np.where(mask, x.facts, y.facts)
    real = np.where(mask, x.real, y.real)
    # Beside a logarithm a number has the factor 1, and beside the multiple of a root it is a multiple of none.
    factor = None
    if x.factor is not None or y.factor is not None:
        factor = np.where(mask, x.factor_or_ones, y.factor_or_ones)
    roots = None
    if x.roots is not None or y.roots is not None:
        roots = np.where(mask, x.roots_or_zeros, y.roots_or_zeros)
    # A mask may go one way everywhere, as that of a block of a causal mask: then what is true of all elements of that
    # side is true of the result. Of `where(True, exp(x), y)` all are powers.
    if mask.all():
        degree = x.degree
        is_power = x.is_power
    elif not mask.any():
        degree = y.degree
        is_power = y.is_power
    else:
        degree = x.degree.plus(y.degree)
        is_power = x.is_power and y.is_power
    return Exact(number, facts, real, factor, degree, roots, is_power)


def join_exact(arrays: Sequence[Exact], dim: int, new: bool) -> Exact:
    """Arrays stacked along a `new` dim, or concatenated along one of theirs."""
    is_power = all(x.is_power for x in arrays)
    join = partial(join_arrays, dim=dim, new=new, lead=1)
    return join_parts(arrays, join, is_power)


def join_parts(arrays: Sequence[Exact], join: Callable[[list[np.ndarray]], np.ndarray], is_power: bool) -> Exact:
    """Several arrays as one: `join` makes each part of it of the same parts of all arrays.

    Args:
        arrays: the arrays.
        join: takes the numbers of all arrays, or their facts, real values, factors or roots.
        is_power: whether all elements are powers, as `Exact.is_power`.
    """
    number = join([x.number for x in arrays])
    facts = join([x.facts for x in arrays])
    real = join([x.real for x in arrays])
    # Beside a logarithm a number has the factor 1, and beside the multiple of a root it is a multiple of none.
    factor = None
    if any(x.factor is not None for x in arrays):
        factor = join([x.factor_or_ones for x in arrays])
    roots = None
    if any(x.roots is not None for x in arrays):
        roots = join([x.roots_or_zeros for x in arrays])
    degrees = [x.degree for x in arrays[1:]]
    degree = arrays[0].degree.plus(*degrees)
    return Exact(number, facts, real, factor, degree, roots, is_power)


def join_arrays(arrays: Sequence[np.ndarray], dim: int, new: bool, lead: int = 0) -> np.ndarray:
    """Arrays stacked or concatenated along a dim behind the first `lead`; their other dims broadcast.

    The dims of a mesh are of size 1 where all devices have the same. So arrays that differ between devices are joined
    with arrays that do not: [4, 3] and [1, 2] along dim 1 are [4, 3] and [4, 2], and make [4, 5].
    """
    shapes = [x.shape[lead:] for x in arrays]
    if new:
        shape = np.broadcast_shapes(*shapes)
        pieces = [np.broadcast_to(x, (*x.shape[:lead], *shape)) for x in arrays]
        return np.stack(pieces, lead + dim)
    # [4, 3] and [1, 2] along dim 1: without that dim they are [4, 1] and [1, 1], together [4, 1].
    shapes_without_dim = [(*shape[:dim], 1, *shape[dim + 1 :]) for shape in shapes]
    common = np.broadcast_shapes(*shapes_without_dim)
    pieces = []
    for x, shape in zip(arrays, shapes, strict=True):
        full_shape = (*common[:dim], shape[dim], *common[dim + 1 :])
        pieces.append(np.broadcast_to(x, (*x.shape[:lead], *full_shape)))
    return np.concatenate(pieces, lead + dim)


def take_elements(source: np.ndarray, places: np.ndarray, rank: int) -> np.ndarray:
    """The elements of [components, *lead, n] at places [*lead, ...], where a mesh has `rank` dims in front.

    Each device takes elements at places of its own: the result is [components, *lead, ...].

    Worked example: on two devices, of which both have the elements [a, b, c], the places [[2, 0], [1, 1]] are taken:
    that is [c, a] on the first device, and [b, b] on the second one.
    """
    devices = places.shape[:rank]
    shape = places.shape[rank:]
    if math.prod(devices) == 1:  # all devices take the same places
        elements = source[..., places.reshape(-1)]
        return elements.reshape(*source.shape[:-1], *shape)
    # Devices take other places. Source and places get a row for every device, and are taken row by row.
    lead = np.broadcast_shapes(source.shape[1:-1], devices)
    components = len(source)
    rows = places.reshape(*devices, -1)
    rows = np.broadcast_to(rows, (components, *lead, rows.shape[-1]))
    source = np.broadcast_to(source, (components, *lead, source.shape[-1]))
    return np.take_along_axis(source, rows, -1).reshape(components, *lead, *shape)
