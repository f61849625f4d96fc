"""The groups of devices of a collective: decoded from a program, and as axes of a mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from shardkit.analysis.hlo.protobuf import Message, integer, integers, message

Groups = tuple[tuple[int, ...], ...]

# The fields of an instruction that give its groups: axes of a mesh; an array of all devices that is transposed and cut
# into rows; lists of devices, or in newer programs a message that holds either of the last two.
MESH_AXES = 93
IOTA = 92
COLLECTIVE_DEVICES = 87
LISTS = 49


@lru_cache(maxsize=256)  # a program of thousands of devices lists the same few groups at every collective
def groups_in(form: int, data: bytes) -> Groups:
    """The groups of devices of a collective, from the number of the field that lists them.

    The same groups of the first axis of a 2x4 mesh, in the text of the three forms:

        lists           {{0,4},{1,5},{2,6},{3,7}}
        an iota         [4,2]<=[2,4]T(1,0)            see `_cut_iota`
        axes of a mesh  "x" of a mesh x=2, y=4        see `_find_mesh_groups`
    """
    fields = message(data)
    if form == COLLECTIVE_DEVICES and 2 in fields:
        form = IOTA
        fields = message(fields[2][0])
    if form == IOTA:
        return _cut_iota(
            count=integer(fields, 1), size=integer(fields, 2), dims=integers(fields, 3), order=integers(fields, 4)
        )
    if form == MESH_AXES:
        mesh = message(fields[1][0])
        sizes = [integer(message(axis), 2) for axis in mesh.get(1, ())]
        groups = _find_mesh_groups(sizes, fields.get(2, ()))
        return _number_devices(groups, mesh)
    return read_lists(fields.get(1, ()))


def read_lists(groups: Sequence[bytes]) -> Groups:
    """Groups that list their devices, one message a group."""
    return tuple(integers(message(group), 1) for group in groups)


def _number_devices(groups: Groups, mesh: Message) -> Groups:
    """Groups of positions in a mesh as groups of devices; a mesh that lists no devices has them in order."""
    devices = integers(mesh, 2)
    if 3 in mesh:
        iota = message(mesh[3][0])
        dims = integers(iota, 1)
        [devices] = _cut_iota(count=1, size=math.prod(dims), dims=dims, order=integers(iota, 2))
    if not devices:
        return groups
    numbered = []
    for group in groups:
        numbered.append(tuple(devices[position] for position in group))
    return tuple(numbered)


def _cut_iota(count: int, size: int, dims: tuple[int, ...], order: tuple[int, ...]) -> Groups:
    """0..n-1 as an array of shape `dims`, its dims put in `order`, read row by row in `count` groups of `size`.

    For example 4 groups of 2, dims (2, 4), order (1, 0): the array [[0, 1, 2, 3], [4, 5, 6, 7]] is transposed, and its
    rows are the groups (0, 4), (1, 5), (2, 6), (3, 7).
    """
    strides = _find_strides(dims)
    devices = [0]
    for dim in order or range(len(dims)):
        devices = _add_offsets(devices, dims[dim], strides[dim])
    groups = []
    for start in range(0, count * size, size):
        groups.append(tuple(devices[start : start + size]))
    return tuple(groups)


def _add_offsets(devices: Sequence[int], size: int, stride: int) -> list[int]:
    """For each device, it and its neighbours along one more dim: of [0, 1], size 2 and stride 4, [0, 4, 1, 5]."""
    extended = []
    for device in devices:
        for step in range(size):
            extended.append(device + step * stride)
    return extended


def _find_strides(dims: Sequence[int]) -> list[int]:
    """The distance between neighbours along each dim of an array that is stored row by row."""
    return [math.prod(dims[dim + 1 :]) for dim in range(len(dims))]


class _Part(NamedTuple):
    """A mesh axis or a part of it, between two cuts that are products of sizes from the major end.

    An axis of 8 has low 1 and high 8; the middle one of its three digits of 2 has low 2 and high 4. In xla's fields
    `low` is `pre_size`, and `high` is `pre_size * size`.
    """

    axis: int
    low: int
    high: int

    def contains(self, other: _Part) -> bool:
        """Whether the other is inside this one."""
        return self.axis == other.axis and self.low <= other.low and other.high <= self.high


def _find_mesh_groups(sizes: Sequence[int], axes: Sequence[bytes]) -> Groups:
    """The groups over axes of a mesh, or over parts of axes.

    For example the groups over a middle part of one axis of 8, `pre_size` 2 and `size` 2. The axis is cut into three
    digits of 2. The digits become the dims of an iota, with the middle one last because the groups run over it:

        digits  (2, 2, 2), inside (False, True, False), order (0, 2, 1)
        groups  (0, 2), (1, 3), (4, 6), (5, 7)

    The first axis that is named is the major one in a group: over "y" and "x" of a mesh x=2, y=2 the group is 0, 2, 1,
    3.
    """
    parts = [_read_part(message(axis), sizes) for axis in axes]
    digits = []
    for axis in range(len(sizes)):
        digits += _cut_axis(axis, sizes[axis], parts)

    inside = []
    group_size = 1
    for part in parts:
        for number, digit in enumerate(digits):
            if part.contains(digit):
                inside.append(number)
                group_size *= digit.high // digit.low
    outside = [number for number in range(len(digits)) if number not in inside]
    return _cut_iota(
        count=math.prod(sizes) // group_size,
        size=group_size,
        dims=tuple(digit.high // digit.low for digit in digits),
        order=(*outside, *inside),
    )


def _read_part(axis: Message, sizes: Sequence[int]) -> _Part:
    """The part of an axis that a message names; without one it is the whole axis.

    Worked example, of an axis 1 of size 8: {1: [1]} is the whole axis, low 1 and high 8. {1: [1], 2: [...]} with a
    message {1: [2], 2: [2]} inside is the middle part, of `pre_size` 2 and `size` 2: low 2 and high 4.
    """
    number = integer(axis, 1)
    pre_size = 1
    size = sizes[number]
    if 2 in axis:
        part = message(axis[2][0])
        # A field that is not written reads as 0, and stands for what the whole axis has.
        pre_size = integer(part, 1) or pre_size
        size = integer(part, 2) or size
    return _Part(number, low=pre_size, high=pre_size * size)


def _cut_axis(axis: int, size: int, parts: Sequence[_Part]) -> list[_Part]:
    """An axis, cut where one of the parts begins or ends, major digits first."""
    cuts = {1, size}
    for part in parts:
        if part.axis == axis:
            cuts |= {part.low, part.high}
    return [_Part(axis, low, high) for low, high in pairwise(sorted(cuts))]


def direction(groups: Groups) -> int:
    """+1 or -1: which way round a permute goes, so that two opposite ones are known to use different links.

    For example (0, 1), (1, 2), (2, 3), (3, 0) goes up in three steps of four: +1.
    """
    up = 0
    down = 0
    for source, target in groups:
        if target > source:
            up += 1
        elif target < source:
            down += 1
    # A swap of two halves goes as often up as down: it is its own opposite, and either answer will do.
    if down > up:
        return -1
    return 1


@lru_cache(maxsize=1024)
def axes_of(kind: str, groups: Groups, sizes: tuple[tuple[str, int], ...]) -> tuple[tuple[str, ...], int]:
    """The mesh axes over which groups of devices, or the pairs of a permute, run, and the devices along them.

    For example sizes data=2, model=4: the groups (0, 1, 2, 3), (4, 5, 6, 7) run over "model", 4 devices; the groups
    (0, 1), (2, 3), (4, 5), (6, 7) over "part of model", 2 devices.
    """
    names = [name for name, _ in sizes]
    dims = [size for _, size in sizes]
    if not groups:
        groups = (tuple(range(math.prod(dims))),)
    varying = _find_varying_dims(groups, dims)
    axes = tuple(names[dim] for dim in varying)
    # The pairs of a permute need not be all pairs along its axes.
    if kind != "ppermute" and not _are_complete(groups, dims, varying):
        return (f"part of {','.join(axes)}",), len(groups[0])
    return axes, math.prod(dims[dim] for dim in varying)


def _find_varying_dims(groups: Groups, dims: Sequence[int]) -> list[int]:
    """The dims of a mesh along which the members of some group differ."""
    varying = []
    for dim, stride in enumerate(_find_strides(dims)):
        size = dims[dim]
        for group in groups:
            coordinates = {device // stride % size for device in group}
            if len(coordinates) > 1:
                varying.append(dim)
                break
    return varying


def _are_complete(groups: Groups, dims: Sequence[int], varying: Sequence[int]) -> bool:
    """Whether each group has all devices that differ in the coordinates of these dims alone, and no other device."""
    strides = _find_strides(dims)
    offsets = [0]
    for dim in varying:
        offsets = _add_offsets(offsets, dims[dim], strides[dim])
    complete = set(offsets)
    for group in groups:
        # If the group is complete, its smallest number has the coordinate 0 along these dims.
        first = min(group)
        if {device - first for device in group} != complete:
            return False
    return True
