"""Layouts as the search over them sees them: for each dim the axes that split it, in a view of the array; no jax.

A view has more dims than the array. A dim that axes split in two ways, as `R[x, y]` and `R[y]`, is several dims there,
one for each part that the layouts treat apart, so that axes can move between the parts of a dim as between dims.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Literal

Ends = Literal["last", "none", "all"]
Axes = tuple[str, ...]
DimAxes = tuple[Axes, ...]
Shape = tuple[int, ...]
View = tuple[Shape, Shape, DimAxes, DimAxes, Mapping[str, int], Mapping[str, Shape]]


def shared(a: Axes, b: Axes) -> Axes:
    """The axes with which both begin."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    return tuple(axis for axis, _ in pairs)


def ways_of(axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    """Into how many parts these axes split a dim."""
    return math.prod(sizes[axis] for axis in axes)


def local_of(shape: Shape, split: DimAxes, sizes: Mapping[str, int]) -> Shape:
    """The shape of a shard."""
    return tuple(size // ways_of(axes, sizes) for size, axes in zip(shape, split, strict=True))


def elements_of(shape: Shape, split: DimAxes, sizes: Mapping[str, int]) -> int:
    """The elements of a shard."""
    return math.prod(local_of(shape, split, sizes))


def taken_apart(source: DimAxes, target: DimAxes, parts: Mapping[str, Shape]) -> Mapping[str, Shape]:
    """The parts of axes, cut wherever one layout ends a part of a dim inside an axis of the other."""
    for pair in zip(source, target, strict=True):
        for ours, theirs in (pair, pair[::-1]):
            ends = {end for _, _, _, end in _spans(ours, parts)}
            for axis, part, start, end in _spans(theirs, parts):
                for cut in ends:
                    if start < cut < end and cut % start == 0 and end % cut == 0:
                        sizes = parts[axis]
                        finer = (*sizes[:part], cut // start, end // cut, *sizes[part + 1 :])
                        return taken_apart(source, target, {**parts, axis: finer})
    return parts


def _spans(axes: Axes, parts: Mapping[str, Shape]) -> list[tuple[str, int, int, int]]:
    """For each part of the axes of a dim: its axis, its number, and into how many the dim is split before and after."""
    spans, ways = [], 1
    for axis in axes:
        for part, size in enumerate(parts[axis]):
            spans.append((axis, part, ways, ways * size))
            ways *= size
    return spans


def view(shape: Shape, source: DimAxes, target: DimAxes, parts: Mapping[str, Shape], cut: Ends) -> View:
    """An array as one with more dims: each dim is cut where both layouts end a part of it, or have ended.

    `cut` says which of these cuts are made: "last", the one after which the dim is whole in both layouts, "none" or
    "all".
    """

    def name(axis: str, part: int) -> str:
        return axis if len(parts[axis]) == 1 else f"{axis}.{part}"

    sizes = {name(axis, part): size for axis, each in parts.items() for part, size in enumerate(each)}
    rows: list[tuple[int, int, Axes, Axes]] = []
    for dim, (size, *layouts) in enumerate(zip(shape, source, target, strict=True)):
        spans = [_spans(axes, parts) for axes in layouts]
        ends = [[1, *(end for _, _, _, end in each)] for each in spans]
        cuts = [c for c in sorted({*ends[0], *ends[1]}) if all(c in e or c % e[-1] == 0 for e in ends)]
        made = {"last": dict.fromkeys([1, cuts[-1]]), "none": [1], "all": cuts}[cut]
        for a, b in itertools.pairwise([*made, size]):
            first, second = (tuple(name(x, part) for x, part, at, end in each if a <= at < b) for each in spans)
            rows.append((dim, b // a, first, second))
    rows = [row for row in rows if row[1] != 1]
    dims, shape, source, target = zip(*rows, strict=True) if rows else ((), (), (), ())
    return shape, dims, source, target, sizes, {axis: each for axis, each in parts.items() if len(each) > 1}
