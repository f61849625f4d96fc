"""Collectives over groups of devices: over axes of the mesh, or as gathers along all of them.

A compiled module numbers its devices and knows no mesh: the number of a device is its index along all axes. Groups that
are those of axes of the mesh become a psum or an all_gather over these. Worked example of all others, an all-reduce
over the groups {0, 2} and {1, 3} of a mesh with one axis of four devices:

    x           [5] on every device; device 1 has x1
    gathered    all_gather of x along all axes: [4, 5], rows x0, x1, x2, x3 on every device
    members     a table of groups by device, [[0, 2], [1, 3], [0, 2], [1, 3]]; device 1 takes row axis_index = 1: [1, 3]
    places      a table of places in the group by device, [0, 0, 1, 1]; device 1 is the first of its group: 0
    result      gathered[members].sum(0), [5]: x1 + x3 on devices 1 and 3

A reduce-scatter takes of this result the slice of its place, and an all-gather puts gathered[members] side by side in
the order of the group. So a wrong group or a wrong order of its devices are other numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit.analysis.hlo.groups import axes_of
from shardkit.testing.exact.stablehlo.attributes import (
    UnreadableError,
    find_body,
    name_combiner,
    read_integer,
    read_numbers,
    read_pairs,
    read_shape,
)
from shardkit.testing.exact.stablehlo.block_reader import BlockReader
from shardkit.testing.exact.stablehlo.reduction_rules import REDUCTIONS


class _Group(NamedTuple):
    """The group of this device in a collective.

    Attributes:
        axes: the mesh axes over which the group runs; None for a part of an axis, or devices in another order.
        members: the numbers of the group's devices, in the order of the group.
        place: the place of this device in that order.
    """

    axes: tuple[str, ...] | None
    members: Any
    place: Any


def _find_group(reader: BlockReader, operation: Any) -> _Group:
    """The group of this device, as traced arrays: each device takes its own row of a table of all devices."""
    mesh = reader.module.mesh
    devices = math.prod(mesh.values())
    groups = _read_groups(operation)
    if groups.size == 0:
        groups = np.arange(devices)[None]
    # A device in no group has no result, and one in two groups would have two.
    if sorted(groups.flat) != list(range(devices)):
        raise UnreadableError(f"{operation.operation.name} over groups that leave out a device")
    axes = _find_axes(mesh, groups)
    # Row i is that of device i: its group, and its place in the group.
    member_table = np.zeros((devices, groups.shape[1]), np.int32)
    place_table = np.zeros(devices, np.int32)
    for group in groups:
        for place, device in enumerate(group):
            member_table[device] = group
            place_table[device] = place
    # All devices run the same function. So the tables are its constants, and each device looks up its own row.
    number = lax.axis_index(reader.module.axes)
    members = _take_row(reader, member_table, number)
    place = _take_row(reader, place_table, number)
    return _Group(axes, members, place)


def _find_axes(mesh: dict[str, int], groups: np.ndarray) -> tuple[str, ...] | None:
    """The mesh axes over which groups of all devices run, in the order of the mesh; None if there are no such axes.

    For example data=2, model=2: the groups {0, 2} and {1, 3} run over data, {2, 0} and {1, 3} over no axes, because the
    devices of the first group are in another order.
    """
    is_in_order = bool((groups == np.sort(groups, 1)).all())
    if not is_in_order:
        return None
    members = tuple(map(tuple, groups.tolist()))
    axes, _ = axes_of("all_reduce", members, tuple(mesh.items()))
    # Groups that run over a part of an axis have a name that is none of the mesh.
    if not axes or not set(axes) <= mesh.keys():
        return None
    return axes


_BY_REPLICA = ("stablehlo.all_reduce", "stablehlo.all_gather", "stablehlo.reduce_scatter")


def _read_groups(operation: Any) -> np.ndarray:
    """The groups of a collective, [groups, members]; empty if all devices are one."""
    name = operation.operation.name
    # Without the flag groups number replicas, and all devices of a program by jit are one replica.
    has_flag = "use_global_device_ids" in operation.attributes
    if name in _BY_REPLICA and not has_flag:
        raise UnreadableError(f"{name} over replicas")
    groups = np.asarray(operation.attributes["replica_groups"])
    if (groups < 0).any():  # -1 fills the rows of groups with fewer members
        raise UnreadableError(f"{name} over groups of different sizes")
    return groups


def _take_row(reader: BlockReader, table: np.ndarray, number: Any) -> Any:
    """The row of a table that belongs to the device with this number."""
    return lax.dynamic_index_in_dim(reader.vary(table), number, 0, keepdims=False)


def _gather_group(reader: BlockReader, x: Any, group: _Group) -> Any:
    """[members, ...]: x of each device of this device's group."""
    if group.axes is not None:
        return lax.all_gather(x, group.axes)
    # No axes say which devices are a group: each device gets x of all, and takes those of its group.
    gathered = lax.all_gather(x, reader.module.axes)
    return jnp.take(gathered, group.members, 0, mode="clip")


def _sum_groups(reader: BlockReader, operation: Any, *operands: Any) -> Any:
    """all_reduce: the sum of each array over the group, or another reduction of it."""
    group = _find_group(reader, operation)
    return [_combine_group(reader, operation, x, group) for x in operands]


def _combine_group(reader: BlockReader, operation: Any, x: Any, group: _Group) -> Any:
    """The sum, or another reduction, of x over the devices of this device's group."""
    name = name_combiner(find_body(operation))
    if name not in REDUCTIONS:
        raise UnreadableError(f"{operation.operation.name} by another function")
    if group.axes is not None and name in _OVER_AXES:
        return reader.vary(_OVER_AXES[name](x, group.axes))
    gathered = _gather_group(reader, x, group)  # [members, ...]
    return REDUCTIONS[name](gathered, (0,))


_OVER_AXES = {
    "stablehlo.add": lax.psum,
    "stablehlo.maximum": lax.pmax,
    "stablehlo.minimum": lax.pmin,
}


def _scatter_groups(reader: BlockReader, operation: Any, *operands: Any) -> Any:
    """reduce_scatter: of the sum over the group, the piece at this device's place in the group."""
    group = _find_group(reader, operation)
    dim = read_integer(operation, "scatter_dimension")
    results = []
    for number, x in enumerate(operands):
        # More than a device would compute, but the same numbers: a proof measures no time.
        total = _combine_group(reader, operation, x, group)
        # Of [8, 3] on two devices, scattered over dim 0, the device at place 1 keeps the rows 4 to 7: it starts at 4.
        size = read_shape(operation, number)[dim]
        start = group.place * size
        results.append(lax.dynamic_slice_in_dim(total, start, size, dim))
    return results


def _gather_groups(reader: BlockReader, operation: Any, *operands: Any) -> Any:
    """all_gather: the pieces of the group's devices side by side, in the order of the group."""
    group = _find_group(reader, operation)
    dim = read_integer(operation, "all_gather_dim")
    results = []
    for number, x in enumerate(operands):
        # Of x [2, 3] on four devices, gathered over dim 1: [4, 2, 3], [2, 4, 3], and then [2, 12].
        gathered = _gather_group(reader, x, group)
        pieces = jnp.moveaxis(gathered, 0, dim)
        results.append(lax.reshape(pieces, read_shape(operation, number)))
    return results


def _exchange(reader: BlockReader, operation: Any, *operands: Any) -> Any:
    """all_to_all: devices exchange the pieces of one array along a dim, or the arrays of a list."""
    group = _find_group(reader, operation)
    if "split_dimension" not in operation.attributes:
        return _exchange_pieces(reader, operands, group)
    (x,) = operands
    split_dim = read_integer(operation, "split_dimension")
    concat_dim = read_integer(operation, "concat_dimension")
    count = read_integer(operation, "split_count")
    pieces = jnp.split(x, count, split_dim)
    received = _exchange_pieces(reader, pieces, group)
    return lax.concatenate(received, concat_dim)


def _exchange_pieces(reader: BlockReader, pieces: Sequence[Any], group: _Group) -> list[Any]:
    """The pieces that this device receives, one from each device of its group.

    Worked example: of two devices, device 0 has the pieces a0, a1 and device 1 has b0, b1. Gathered are [[a0, a1],
    [b0, b1]], and device 1 takes column 1: a1, b1.
    """
    # [sender, receiver, ...]
    gathered = _gather_group(reader, jnp.stack(pieces), group)
    column = lax.dynamic_index_in_dim(gathered, group.place, 1, keepdims=False)
    received = []
    for sender in range(len(pieces)):
        received.append(lax.index_in_dim(column, sender, 0, keepdims=False))
    return received


def _permute(reader: BlockReader, operation: Any, *operands: Any) -> Any:
    """collective_permute: each receiver has the sender's array, and a device to which nothing is sent has zeros."""
    # A module numbers devices along all axes of the mesh, and so does jax for a ppermute over all of them.
    pairs = read_pairs(read_numbers(operation, "source_target_pairs"))
    return [lax.ppermute(x, reader.module.axes, pairs) for x in operands]


def _number_device(reader: BlockReader, operation: Any) -> Any:
    """The number of this device, as StableHLO types it."""
    return lax.convert_element_type(lax.axis_index(reader.module.axes), np.uint32)


def _make_zero_id(reader: BlockReader, operation: Any) -> Any:
    """The number of this device's replica: all devices of a program by jit are replica 0."""
    return reader.vary(np.zeros((), np.uint32))


DEVICE_RULES: dict[str, Callable[..., Any]] = {
    "stablehlo.partition_id": _number_device,
    "stablehlo.replica_id": _make_zero_id,
    "stablehlo.all_reduce": _sum_groups,
    "stablehlo.all_gather": _gather_groups,
    "stablehlo.reduce_scatter": _scatter_groups,
    "stablehlo.collective_permute": _permute,
    "stablehlo.all_to_all": _exchange,
    "mhlo.all_to_all": _exchange,
}
