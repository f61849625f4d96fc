"""An array seen with more dims than it has, in which the parts of its layouts move as whole axes; no jax.

A layout is, for each dim, the axes that split it, major to minor. A dim that axes split in two ways, as `R[x, y]` and
`R[y]`, is several dims of a `View`, one for each part that the layouts treat apart, so that axes can move between the
parts of a dim as between dims. An axis may have parts too: `model.0` is the major part of `model`.

Worked example: 12 rows over x=2 and y=3, from (x, y) to (x,). Both layouts end a part of the rows after 2, and the
source another after 6, where the target has ended. Cut at all of them, the view has the shape (2, 3, 2): x splits dim 0
in both layouts, y splits dim 1 in the source alone, and no axis splits dim 2.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

Cuts = Literal["last", "none", "all"]
Axes = tuple[str, ...]
DimAxes = tuple[Axes, ...]
Shape = tuple[int, ...]
Sizes = Mapping[str, int]  # of axes: how many devices
Parts = Mapping[str, Shape]  # of axes: the sizes of the parts of each


class View(NamedTuple):
    """An array as one with more dims, and the two layouts there."""

    shape: Shape
    dims: Shape  # for each dim of the view the dim of the array that it is a part of
    source: DimAxes
    target: DimAxes
    sizes: Sizes  # of each axis, or of its parts
    parts: Parts  # of every axis that has several

    def count_elements(self, layout: DimAxes) -> int:
        """The elements of a shard."""
        return math.prod(divide_shape(self.shape, layout, self.sizes))


def find_common_prefix(a: Axes, b: Axes) -> Axes:
    """The axes with which both begin."""
    prefix = []
    for axis, other_axis in zip(a, b, strict=False):
        if axis != other_axis:
            break
        prefix.append(axis)
    return tuple(prefix)


def count_parts(axes: Sequence[str], sizes: Sizes) -> int:
    """Into how many parts these axes split a dim."""
    return math.prod(sizes[axis] for axis in axes)


def divides(shape: Sequence[int], dim_axes: Sequence[Sequence[str]], sizes: Sizes) -> bool:
    """Whether each dim divides into the parts of its axes."""
    for size, axes in zip(shape, dim_axes, strict=True):
        if size % count_parts(axes, sizes):
            return False
    return True


def divide_shape(shape: Shape, layout: DimAxes, sizes: Sizes) -> Shape:
    """The shape of a shard."""
    shard_shape = []
    for size, axes in zip(shape, layout, strict=True):
        shard_shape.append(size // count_parts(axes, sizes))
    return tuple(shard_shape)


def find_joint_index(axes: Axes, device: Mapping[str, int], sizes: Sizes) -> int:
    """The index of a device along several axes, the first one major; `device` has its coordinates."""
    index = 0
    for axis in axes:
        index = index * sizes[axis] + device[axis]
    return index


class _Span(NamedTuple):
    """A part of an axis that splits a dim."""

    axis: str
    part: int  # its number among the parts of the axis
    start: int  # into how many the dim is split by what is major to it
    end: int  # and with it


def _find_spans(axes: Axes, parts: Parts) -> list[_Span]:
    """The parts of the axes of a dim, major to minor. Of x=4 as (2, 2) and y=3: x.0 1-2, x.1 2-4, y 4-12."""
    spans = []
    start = 1
    for axis in axes:
        for part, size in enumerate(parts[axis]):
            spans.append(_Span(axis, part, start, start * size))
            start *= size
    return spans


def refine_axes(source: DimAxes, target: DimAxes, parts: Parts) -> Parts:
    """The parts of axes, cut wherever one layout ends a part of a dim inside an axis of the other.

    Of a dim that x=2 splits in the source, and y=4 in the target: x ends after 2, inside y. So y has the parts (2, 2).
    Its major part splits the dim as x does, and may trade places with it by a ppermute of whole shards.
    """
    # An axis that is cut in one dim may end a part inside an axis of another dim, so all dims are asked again.
    while True:
        finer_parts = parts
        for source_axes, target_axes in zip(source, target, strict=True):
            finer_parts = _cut_at_ends(target_axes, source_axes, finer_parts)
            finer_parts = _cut_at_ends(source_axes, target_axes, finer_parts)
        if finer_parts == parts:
            return parts
        parts = finer_parts


def _cut_at_ends(axes: Axes, other_axes: Axes, parts: Parts) -> Parts:
    """The parts of axes, after those of `axes` are cut where one of `other_axes` ends a part of the same dim."""
    for end in _find_ends(_find_spans(other_axes, parts)):
        for span in _find_spans(axes, parts):
            is_inside = span.start < end < span.end
            if is_inside and end % span.start == 0 and span.end % end == 0:
                sizes = parts[span.axis]
                major_sizes = sizes[: span.part]
                minor_sizes = sizes[span.part + 1 :]
                finer_sizes = (*major_sizes, end // span.start, span.end // end, *minor_sizes)
                parts = {**parts, span.axis: finer_sizes}
    return parts


def make_view(shape: Shape, source: DimAxes, target: DimAxes, parts: Parts, cuts: Cuts) -> View:
    """An array as one with more dims: each dim is cut where both layouts end a part of it, or have ended.

    `cuts` says which of these cuts are made: "last", the one after which the dim is whole in both layouts, "none" or
    "all".

    Of 12 rows that x=3 splits in the source and nothing in the target, "last" makes two dims: 3, split by x or by
    nothing, and 4, which no step touches.
    """
    view_shape: list[int] = []
    dims: list[int] = []
    view_source: list[Axes] = []
    view_target: list[Axes] = []
    for dim, size in enumerate(shape):
        source_spans = _find_spans(source[dim], parts)
        target_spans = _find_spans(target[dim], parts)
        starts = _find_cuts(source_spans, target_spans)
        if cuts == "none":
            starts = [1]
        elif cuts == "last":
            starts = sorted({1, starts[-1]})
        for start, end in itertools.pairwise([*starts, size]):
            view_size = end // start
            if view_size == 1:
                continue
            view_shape.append(view_size)
            dims.append(dim)
            view_source.append(_select_parts(source_spans, start, end, parts))
            view_target.append(_select_parts(target_spans, start, end, parts))
    sizes: dict[str, int] = {}
    parts_by_axis = {}
    for axis, part_sizes in parts.items():
        sizes.update(zip(name_parts(axis, parts), part_sizes, strict=True))
        if len(part_sizes) > 1:
            parts_by_axis[axis] = part_sizes
    return View(
        shape=tuple(view_shape),
        dims=tuple(dims),
        source=tuple(view_source),
        target=tuple(view_target),
        sizes=sizes,
        parts=parts_by_axis,
    )


def _find_cuts(source_spans: Sequence[_Span], target_spans: Sequence[_Span]) -> list[int]:
    """Into how many a dim is split where both layouts end a part of it, or have ended, in rising order."""
    # Worked example: 12 rows over x=2 and y=3, from (x, y) to (x,). The source ends parts at 2 and 6, the target at 2.
    # Both end one at 2. At 6 the target has ended, and 2 divides 6: the cuts are 1, 2 and 6.
    source_ends = [1, *_find_ends(source_spans)]
    target_ends = [1, *_find_ends(target_spans)]
    cuts = []
    for cut in sorted({*source_ends, *target_ends}):
        in_source = cut in source_ends or cut % source_ends[-1] == 0
        in_target = cut in target_ends or cut % target_ends[-1] == 0
        if in_source and in_target:
            cuts.append(cut)
    return cuts


def _find_ends(spans: Sequence[_Span]) -> list[int]:
    return [span.end for span in spans]


def _select_parts(spans: Sequence[_Span], start: int, end: int, parts: Parts) -> Axes:
    """The names of the parts of axes that split a dim between two cuts."""
    names = []
    for span in spans:
        if start <= span.start < end:
            names.append(name_parts(span.axis, parts)[span.part])
    return tuple(names)


def name_parts(axis: str, parts: Parts) -> Axes:
    """The names of the parts of an axis; its own name if the axis is not split into parts."""
    count = len(parts.get(axis, ()))
    if count < 2:
        return (axis,)
    return tuple(f"{axis}.{part}" for part in range(count))
