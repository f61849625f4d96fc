"""Arrays and their pieces on devices: what goes into a shard_map is cut, and what comes out of it is joined.

Worked example: x [8, 3] under P("data") on data=2, model=2, into a shard_map and out of it as P("data").

    cut         [2, 1] + [4, 3]: the pieces of both devices along "data"; along "model" all have the same
    joined      [8, 3], if the pieces are equal along "model", which the spec does not name
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from shardkit.meshes.layout import all_axes
from shardkit.testing._interpreter import join_shards, split_shards
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.orders import find_equal
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.rules.exact_constants import move_constant
from shardkit.testing.exact.rules.operands import Operand, move_operand


class DiffersError(Exception):
    """A value that must be equal on all devices is not.

    Attributes:
        value: the value of all devices.
    """

    def __init__(self, what: str, value: Operand):
        super().__init__(what)
        self.value = value


def cut_array(field: Field, rank: int, x: Operand, spec: PartitionSpec, sizes: dict[str, int]) -> Operand:
    """An array as the pieces of all devices, with a dim in front for each axis of a shard_map.

    Args:
        field: the arithmetic.
        rank: the number of axes that are bound around the shard_map, whose dims come first.
        x: the array.
        spec: the axes that split each dim of x.
        sizes: the axes of the shard_map, with their sizes.
    """
    # x [8, 3] under P("data") on data=2, model=2 becomes [2, 1] + [4, 3].
    split_axes = all_axes(spec)
    front = _list_front_sizes(sizes, split_axes)

    def move(part: Any, lead: int) -> Any:
        # split_shards reads a global array after `lead` dims: the components, and the axes around.
        part = split_shards(part, _shift_spec(spec, lead), sizes)
        # The dims of the axes that split it come first; they belong after the dims that were there before.
        count = len(split_axes)
        end = lead + count
        part = np.moveaxis(part, range(count), range(lead, end))
        return part.reshape(*part.shape[:lead], *front, *part.shape[end:])

    piece = move_operand(x, rank, move)
    move_constant(field, x, piece, lambda exact: move_operand(exact, rank, move))
    return piece


def join_pieces(field: Field, rank: int, x: Operand, spec: PartitionSpec, sizes: dict[str, int]) -> Operand:
    """The pieces of all devices as an array; along axes that do not split it, the pieces must be equal."""
    split_axes = all_axes(spec)
    for number, name in enumerate(sizes):
        if name not in split_axes:
            # Here a missing psum is found: a result that P() calls replicated and that differs.
            x = take_first(field, x, rank + number, f"a result that is replicated along {name!r}")
    front = _list_front_sizes(sizes, split_axes)
    count = len(sizes)

    def move(part: Any, lead: int) -> Any:
        # join_shards reads the dims of the devices first.
        part = np.moveaxis(part, range(lead, lead + count), range(count))
        part = np.broadcast_to(part, (*front, *part.shape[count:]))
        return join_shards(part, _shift_spec(spec, lead), sizes)

    array = move_operand(x, rank, move)
    move_constant(field, x, array, lambda exact: move_operand(exact, rank, move))
    return array


def take_first(field: Field, x: Operand, dim: int, what: str) -> Operand:
    """The value of the first device along a dim in front, if all devices have the same.

    Raises:
        DiffersError: the devices have other values of `what`.
    """
    # Nothing ever differed along this axis.
    if x.shape[dim] == 1:
        return x

    def take(part: Any, lead: int) -> Any:
        return np.take(part, [0], lead + dim)

    first = move_operand(x, 0, take)
    # No equation takes it, so that it is noted here of which constant it is a part.
    move_constant(field, x, first, lambda exact: move_operand(exact, 0, take))
    if isinstance(x, Exact):
        equal = find_equal(field, x, first)
    else:
        # NaN equals no number, itself neither; all devices may have it.
        both_are_nan = (x != x) & (first != first)
        equal = (x == first) | both_are_nan
    if not equal.all():
        raise DiffersError(what, x)
    return first


def _list_front_sizes(sizes: dict[str, int], split_axes: Collection[str]) -> list[int]:
    """The sizes of the dims in front: that of each axis which splits the array, and 1 for the others."""
    front = []
    for name, size in sizes.items():
        if name in split_axes:
            front.append(size)
        else:
            front.append(1)
    return front


# Cached, because each part of each array that crosses a shard_map asks for it.
@lru_cache(maxsize=2**10)
def _shift_spec(spec: PartitionSpec, lead: int) -> PartitionSpec:
    """The same spec after `lead` dims that nothing splits."""
    unsplit = [None] * lead
    return PartitionSpec(*unsplit, *spec)
