"""The groups of devices of a collective: decoded from a program, and as axes of a mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise, product

from shardkit.analysis.hlo.protobuf import integer, integers, message

Groups = tuple[tuple[int, ...], ...]


@lru_cache(maxsize=256)  # a program of thousands of devices lists the same few groups at every collective
def groups_in(form: int, data: bytes) -> Groups:
    """The groups of devices of a collective, from the number of the field that lists them."""
    f = message(data)
    if form == 87 and 2 in f:
        form, f = 92, message(f[2][0])
    if form == 92:
        return _iota(integer(f, 1), integer(f, 2), integers(f, 3), integers(f, 4))
    if form == 93:
        mesh = message(f[1][0])
        groups = _mesh_groups([integer(message(axis), 2) for axis in mesh.get(1, ())], f.get(2, ()))
        devices = integers(mesh, 2)
        if 3 in mesh:
            order = message(mesh[3][0])
            dims = integers(order, 1)
            devices = _iota(1, math.prod(dims), dims, integers(order, 2))[0]
        return tuple(tuple(devices[d] for d in group) for group in groups) if devices else groups
    return tuple(integers(message(group), 1) for group in f.get(1, ()))


def _iota(count: int, size: int, dims: tuple[int, ...], order: tuple[int, ...]) -> Groups:
    """0..n-1 as an array of shape `dims`, its dims put in `order`, read row by row in `count` groups of `size`."""
    strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    flat = [0]
    for dim in order or range(len(dims)):
        flat = [base + step * strides[dim] for base in flat for step in range(dims[dim])]
    return tuple(tuple(flat[g * size : (g + 1) * size]) for g in range(count))


def _mesh_groups(sizes: list[int], axes: Sequence[bytes]) -> Groups:
    """The groups over axes of a mesh, or over parts of axes: the digits between `pre_size` and `pre_size * size`."""
    taken = set()
    for axis in map(message, axes):
        number = integer(axis, 1)
        part = message(axis[2][0]) if 2 in axis else {}
        before = integer(part, 1) or 1
        taken.add((number, before, before * (integer(part, 2) or sizes[number])))
    digits: list[tuple[int, bool]] = []  # every axis as digits, major first, and whether the groups run over each
    for number, size in enumerate(sizes):
        cuts = sorted({1, size, *(cut for n, *ends in taken if n == number for cut in ends)})
        for low, high in pairwise(cuts):
            digits.append((high // low, any(n == number and a <= low and high <= b for n, a, b in taken)))
    order = tuple(sorted(range(len(digits)), key=lambda i: digits[i][1]))
    size = math.prod(s for s, inside in digits if inside)
    return _iota(math.prod(sizes) // size, size, tuple(s for s, _ in digits), order)


def direction(groups: Groups) -> int:
    """+1 or -1: which way round a permute goes, so that two opposite ones are known to use different links."""
    steps = [target - source for source, target in groups if source != target]
    return 1 if sum(step > 0 for step in steps) * 2 >= len(steps) else -1


@lru_cache(maxsize=1024)
def axes_of(kind: str, groups: Groups, sizes: tuple[tuple[str, int], ...]) -> tuple[tuple[str, ...], int]:
    """The mesh axes over which groups of devices, or the pairs of a permute, run, and the devices along them."""
    names, dims = [name for name, _ in sizes], [size for _, size in sizes]
    strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    if not groups:
        groups = (tuple(range(math.prod(dims))),)

    def differ(a: int, b: int) -> set[int]:
        return {i for i, (s, d) in enumerate(zip(strides, dims, strict=True)) if a // s % d != b // s % d}

    varying = set().union(*(differ(group[0], device) for group in groups for device in group[1:]))
    axes = tuple(names[i] for i in sorted(varying))
    n = math.prod(dims[i] for i in varying)
    if kind != "ppermute":
        inside = product(*(range(size) if i in varying else range(1) for i, size in enumerate(dims)))
        offsets = {sum(c * s for c, s in zip(corner, strides, strict=True)) for corner in inside}
        if any({device - min(group) for device in group} != offsets for group in groups):
            return (f"part of {','.join(axes)}",), len(groups[0])
    return axes, n
