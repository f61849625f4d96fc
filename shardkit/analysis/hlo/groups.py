"""The groups of devices of a collective: decoded from a program, and as axes of a mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from shardkit.analysis.hlo.protobuf import Message, integer, integers, message

Groups = tuple[tuple[int, ...], ...]


@lru_cache(maxsize=256)  # a program of thousands of devices lists the same few groups at every collective
def groups_in(form: int, data: bytes) -> Groups:
    """The groups of devices of a collective, from the number of the field that lists them.

    87 wraps field 92. 92 is an array of all devices that is transposed and cut into rows. 93 names axes of a mesh.
    49 lists every device.
    """
    fields = message(data)
    if form == 87 and 2 in fields:
        form = 92
        fields = message(fields[2][0])
    if form == 92:
        return _cut_iota(integer(fields, 1), integer(fields, 2), integers(fields, 3), integers(fields, 4))
    if form == 93:
        mesh = message(fields[1][0])
        sizes = [integer(message(axis), 2) for axis in mesh.get(1, ())]
        groups = _mesh_groups(sizes, fields.get(2, ()))
        return _number_devices(groups, mesh)
    return tuple(integers(message(group), 1) for group in fields.get(1, ()))


def _number_devices(groups: Groups, mesh: Message) -> Groups:
    """Groups of positions in a mesh as groups of devices; a mesh that lists no devices has them in order."""
    devices = integers(mesh, 2)
    if 3 in mesh:
        order = message(mesh[3][0])
        dims = integers(order, 1)
        devices = _cut_iota(1, math.prod(dims), dims, integers(order, 2))[0]
    if not devices:
        return groups
    return tuple(tuple(devices[position] for position in group) for group in groups)


def _cut_iota(count: int, size: int, dims: tuple[int, ...], order: tuple[int, ...]) -> Groups:
    """0..n-1 as an array of shape `dims`, its dims put in `order`, read row by row in `count` groups of `size`.

    For example 4 groups of 2, dims (2, 4), order (1, 0): the array [[0, 1, 2, 3], [4, 5, 6, 7]] is transposed, and its
    rows are the groups (0, 4), (1, 5), (2, 6), (3, 7).
    """
    strides = _strides(dims)
    flat = [0]
    for dim in order or range(len(dims)):
        flat = [base + step * strides[dim] for base in flat for step in range(dims[dim])]
    return tuple(tuple(flat[start : start + size]) for start in range(0, count * size, size))


def _strides(dims: Sequence[int]) -> list[int]:
    """The distance between neighbours along each dim of an array that is stored row by row."""
    return [math.prod(dims[dim + 1 :]) for dim in range(len(dims))]


def _mesh_groups(sizes: list[int], axes: Sequence[bytes]) -> Groups:
    """The groups over axes of a mesh, or over parts of axes.

    A part of an axis of 8 may be its middle digit: `pre_size` 2, `size` 2. The axis is then three digits of 2, and the
    groups run over the one between.
    """
    parts = []  # the number of an axis, and the product of sizes before and after the part
    for axis in map(message, axes):
        number = integer(axis, 1)
        part = message(axis[2][0]) if 2 in axis else {}
        before = integer(part, 1) or 1
        size = integer(part, 2) or sizes[number]
        parts.append((number, before, before * size))

    digits = []  # the sizes of the digits of every axis, major first
    inside = []  # whether the groups run over each
    for number, size in enumerate(sizes):
        ranges = [(before, after) for axis, before, after in parts if axis == number]
        cuts = {1, size}
        for before, after in ranges:
            cuts |= {before, after}
        for low, high in pairwise(sorted(cuts)):
            digits.append(high // low)
            inside.append(any(before <= low and high <= after for before, after in ranges))
    order = tuple(sorted(range(len(digits)), key=inside.__getitem__))
    group_size = math.prod(size for size, is_inside in zip(digits, inside, strict=True) if is_inside)
    return _cut_iota(math.prod(sizes) // group_size, group_size, tuple(digits), order)


def direction(groups: Groups) -> int:
    """+1 or -1: which way round a permute goes, so that two opposite ones are known to use different links."""
    steps = [target - source for source, target in groups if source != target]
    forward = sum(step > 0 for step in steps)
    return 1 if forward * 2 >= len(steps) else -1


@lru_cache(maxsize=1024)
def axes_of(kind: str, groups: Groups, sizes: tuple[tuple[str, int], ...]) -> tuple[tuple[str, ...], int]:
    """The mesh axes over which groups of devices, or the pairs of a permute, run, and the devices along them.

    For example sizes data=2, model=4: the groups (0, 1, 2, 3), (4, 5, 6, 7) run over "model", 4 devices; the groups
    (0, 1), (2, 3), (4, 5), (6, 7) over "part of model", 2 devices.
    """
    names = [name for name, _ in sizes]
    dims = [size for _, size in sizes]
    strides = _strides(dims)
    if not groups:
        groups = (tuple(range(math.prod(dims))),)
    varying = set()
    for group in groups:
        for device in group[1:]:
            for dim, (stride, size) in enumerate(zip(strides, dims, strict=True)):
                if group[0] // stride % size != device // stride % size:
                    varying.add(dim)
    axes = tuple(names[dim] for dim in sorted(varying))
    n = math.prod(dims[dim] for dim in varying)
    if kind != "ppermute":
        # A group over whole axes has all devices that differ in these coordinates, and no other.
        offsets = {0}
        for dim in varying:
            offsets = {offset + step * strides[dim] for offset in offsets for step in range(dims[dim])}
        for group in groups:
            if {device - min(group) for device in group} != offsets:
                return (f"part of {','.join(axes)}",), len(groups[0])
    return axes, n
