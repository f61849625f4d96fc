"""Which collectives move an array from one layout to another, found by a search over layouts; no jax.

A layout is, for each dim, the axes that split it, major to minor. Four kinds of step lead from one to another:

- `slice` splits a dim by axes over which the array is replicated, and sends nothing;
- `all_to_all` moves axes from the minor end of one dim to the minor end of another, several axes and dims at once;
- `ppermute` changes the order of a layout's axes, while every dim stays split into as many parts as before;
- `all_gather` removes axes from the minor end of a dim.

Each step gives every device the part that the next layout assigns to it, so any chain of steps is right. The search
takes the chain that sends least. No layout on the way has larger shards than both source and target. The layouts are
layouts of a `View` of the array, which has more dims than the array.

Worked example: an 8x4 array in float32 over data=2 and model=4, from rows over "model" to columns over "model". A shard
is [2, 4], 8 elements. Two ways lead to [8, 1]:

| way | a device sends | and holds |
|---|--:|--:|
| all_gather of the rows, then a slice of the columns | 8 elements to each of 3 others: 96 bytes | [8, 4], 128 bytes |
| all_to_all: its piece [2, 1] to each of 3 others | 6 elements: 24 bytes | [2, 4], then [8, 1], 32 bytes each |

A device has 2 of the 8 elements of its new shard already, so it must receive at least 6: 24 bytes, and no way sends
less.

Source: Rink, Paszke, Grewe et al., Memory-efficient array redistribution through portable collective communication
(2021, arXiv:2112.01075), whose order of steps (slice, exchange, permute, gather) the search finds where it is best.
"""

from __future__ import annotations

import heapq
import itertools
import math
import operator
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from shardkit.resharding.views import (
    Axes,
    DimAxes,
    Shape,
    Sizes,
    View,
    count_parts,
    divide_shape,
    divides,
    find_common_prefix,
    find_joint_index,
    make_view,
    refine_axes,
)

# Of axes that are split into parts: with more, the search takes seconds.
MOST_PARTS = 6


class MoveStep(NamedTuple):
    """One step of a redistribution."""

    kind: Literal["slice", "all_to_all", "ppermute", "all_gather"]
    before: DimAxes  # the axes that split each dim before the step
    after: DimAxes  # the axes that split each dim after the step
    sent: int  # elements that each device sends; in a ppermute, the busiest device

    def find_removed_axes(self) -> DimAxes:
        """For each dim the axes that the step takes from its minor end."""
        return _remove_common_prefixes(self.before, self.after)

    def find_added_axes(self) -> DimAxes:
        """For each dim the axes that the step adds at its minor end."""
        return _remove_common_prefixes(self.after, self.before)

    def describe(self, dims: Shape) -> str:
        """The step in words, with dims of the array instead of dims of the view."""
        sources = _map_axes_to_dims(self.find_removed_axes(), dims)
        targets = _map_axes_to_dims(self.find_added_axes(), dims)
        changes = []
        if self.kind == "ppermute":
            for dim, before, after in zip(dims, self.before, self.after, strict=True):
                if before != after:
                    changes.append(f"{_format_axes(before)} to {_format_axes(after)} on dim {dim}")
        elif self.kind == "all_to_all":
            for axis, dim in targets.items():
                changes.append(f"{axis} from dim {sources[axis]} to dim {dim}")
        else:  # a slice has no sources, a gather no targets
            for axis, dim in (sources | targets).items():
                changes.append(f"dim {dim} over {axis}")
        return f"{self.kind} {', '.join(changes)}"


class Redistribution(NamedTuple):
    """The steps from one layout to another, in a view of the array. Sizes are in elements, per device.

    The view has a dim for each part of a dim that the steps treat separately, and omits the axes that do not move. If
    axes of different sizes swap dims, it also splits an axis into parts: `model.0` is the major part of `model`.
    """

    shape: Shape  # the shape of the view
    dims: Shape  # for each dim of the view the dim of the array that it is a part of
    axes: tuple[tuple[str, int], ...]  # the axes that move, or their parts, with their sizes
    # the sizes of the parts of every axis that is split into parts, major to minor
    parts: tuple[tuple[str, Shape], ...]
    source: DimAxes  # the axes that split each dim of the view at first
    steps: tuple[MoveStep, ...]  # in order
    sent: int  # what each device sends; the sum over the steps
    least: int  # what some device must receive at least: the elements of its new shard that it does not hold
    shard_sizes: tuple[int, ...]  # the source shard, and the shard after each step

    @property
    def untouched_dims(self) -> tuple[int, ...]:
        """The dims of the view that no step splits or puts together."""
        dims = set(range(len(self.shape)))
        for layout in _list_layouts(self.source, self.steps):
            for dim, axes in enumerate(layout):
                if axes:
                    dims.discard(dim)
        return tuple(sorted(dims))

    @property
    def peak(self) -> int:
        """The most that one step holds at once: its operand and its result."""
        peak = self.shard_sizes[0]
        for operand, result in itertools.pairwise(self.shard_sizes):
            peak = max(peak, operand + result)
        return peak


@lru_cache(maxsize=4096)
def find_redistribution(
    shape: Shape, source: DimAxes, target: DimAxes, axes: tuple[tuple[str, int], ...]
) -> Redistribution:
    """The steps from one layout of an array to another that send least; of equal ones, the fewest steps.

    Source and target have, for each dim, the axes that split it; they must divide the global shape.
    """
    sizes = {axis: size for axis, size in axes if size > 1}  # an axis of one device splits nothing
    source = _keep_axes(source, sizes)
    target = _keep_axes(target, sizes)
    # Axes with which both layouts of a dim begin do not move: to the search, the shards over them are the array.
    fixed_axes = tuple(map(find_common_prefix, source, target))
    shape = divide_shape(shape, fixed_axes, sizes)
    minor_source = _remove_common_prefixes(source, target)
    minor_target = _remove_common_prefixes(target, source)
    candidates = []
    for view in _make_views(shape, minor_source, minor_target, sizes):
        candidate = _search(view)
        candidates.append(candidate)
        if candidate.sent == candidate.least:
            break
    return min(candidates, key=operator.attrgetter("sent"))  # of equal ones the first


def _make_views(shape: Shape, source: DimAxes, target: DimAxes, sizes: Sizes) -> Iterator[View]:
    """The views to search in. Coarse views come first: their collectives move longer runs of elements."""
    undivided: dict[str, Shape] = {}
    for axis in (*_list_axes(source), *_list_axes(target)):
        undivided[axis] = (sizes[axis],)
    yield make_view(shape, source, target, undivided, "last")
    yield make_view(shape, source, target, undivided, "none")
    yield make_view(shape, source, target, undivided, "all")
    parts = refine_axes(source, target, undivided)
    if sum(map(len, parts.values())) <= MOST_PARTS:
        yield make_view(shape, source, target, parts, "all")


def _keep_axes(split: DimAxes, names: Container[str]) -> DimAxes:
    """For each dim those of its axes that are among the names."""
    dims = []
    for axes in split:
        dims.append(tuple(axis for axis in axes if axis in names))
    return tuple(dims)


def _remove_common_prefixes(split: DimAxes, reference: DimAxes) -> DimAxes:
    """The axes of each dim after those with which the dim begins in both layouts."""
    # Of ("x", "y") beside ("x", "z"): ("y",).
    dims = []
    for axes, reference_axes in zip(split, reference, strict=True):
        prefix = find_common_prefix(axes, reference_axes)
        dims.append(axes[len(prefix) :])
    return tuple(dims)


class _Path(NamedTuple):
    """Steps from the source to a layout. The heap returns the least path, compared field by field."""

    bound: int  # elements that the steps send, and that must still be received
    length: int  # how many steps
    shard_elements: int  # of the shards after the steps, added up
    number: int  # differs, so that layouts are not compared
    sent: int
    layout: DimAxes
    steps: tuple[MoveStep, ...]


def _search(view: View) -> Redistribution:
    """A* over layouts: the cost of a path is the elements that it sends, then its steps, then the sizes of its shards.

    The bound of a path, what it has sent and must still receive, never exceeds what it will have sent at its end. So
    the first path from the heap that ends at the target is the best.
    """
    largest = max(view.count_elements(view.source), view.count_elements(view.target))
    least = _count_least_received(view, view.source)
    numbers = itertools.count(1)
    paths = [_Path(bound=least, length=0, shard_elements=0, number=0, sent=0, layout=view.source, steps=())]
    finished = set()
    while True:
        path = heapq.heappop(paths)
        if path.layout == view.target:
            break
        if path.layout in finished:
            continue
        finished.add(path.layout)
        for step in _find_steps(view, path.layout):
            size = view.count_elements(step.after)
            if step.after in finished or size > largest:
                continue
            sent = path.sent + step.sent
            longer_path = _Path(
                bound=sent + _count_least_received(view, step.after),
                length=path.length + 1,
                shard_elements=path.shard_elements + size,
                number=next(numbers),
                sent=sent,
                layout=step.after,
                steps=(*path.steps, step),
            )
            heapq.heappush(paths, longer_path)
    layouts = _list_layouts(view.source, path.steps)
    return Redistribution(
        shape=view.shape,
        dims=view.dims,
        axes=tuple(view.sizes.items()),
        parts=tuple(view.parts.items()),
        source=view.source,
        steps=path.steps,
        sent=path.sent,
        least=least,
        shard_sizes=tuple(map(view.count_elements, layouts)),
    )


def _list_layouts(source: DimAxes, steps: Sequence[MoveStep]) -> list[DimAxes]:
    """The source, and the layout after each step."""
    layouts = [source]
    for step in steps:
        layouts.append(step.after)
    return layouts


def _find_steps(view: View, layout: DimAxes) -> Iterator[MoveStep]:
    """The steps that lead out of a layout."""
    # Gathers and exchanges take axes from the minor end of a dim, because the devices along its last axis have parts
    # that are next to each other. Along an earlier axis the parts lie apart: gathered, they would have the right shape
    # and no error, but an order of rows that no spec can name. So an earlier axis leaves after the axes behind it, or
    # after a ppermute has put it last. Slices send nothing and make later steps smaller, gathers make them larger: the
    # search puts gathers at the end.
    yield from _find_slices(view, layout)
    yield from _find_gathers(view, layout)
    yield from _find_exchanges(view, layout)
    yield from _find_permutes(view, layout)


def _find_slices(view: View, layout: DimAxes) -> Iterator[MoveStep]:
    shard = divide_shape(view.shape, layout, view.sizes)
    unused_axes = _exclude_axes(view.sizes, _list_axes(layout))
    for dim, size in enumerate(shard):
        for axis in unused_axes:
            if size % view.sizes[axis] == 0:
                after = _add_axis(layout, dim, axis)
                yield MoveStep("slice", layout, after, 0)


def _find_gathers(view: View, layout: DimAxes) -> Iterator[MoveStep]:
    elements = view.count_elements(layout)
    for dim, axes in enumerate(layout):
        for start in range(len(axes)):
            arriving_shards = count_parts(axes[start:], view.sizes) - 1
            after = _replace_dim(layout, dim, axes[:start])
            yield MoveStep("all_gather", layout, after, elements * arriving_shards)


def _find_exchanges(view: View, layout: DimAxes) -> Iterator[MoveStep]:
    shard = divide_shape(view.shape, layout, view.sizes)
    elements = math.prod(shard)
    for after in _list_exchange_layouts(layout, view.target):
        step = MoveStep("all_to_all", layout, after, 0)
        added_axes = step.find_added_axes()
        if divides(shard, added_axes, view.sizes):
            # Worked example: 8x4 over "x" of 4 devices, rows to columns. A device has 2x4 = 8 elements, in 4 pieces of
            # 2x1; it keeps one piece, and sends the other three: 6 elements.
            pieces = count_parts(_list_axes(added_axes), view.sizes)
            yield step._replace(sent=elements - elements // pieces)


def _list_exchange_layouts(layout: DimAxes, target: DimAxes) -> Iterator[DimAxes]:
    """The layouts in which axes from the minor ends of dims have moved to the minor ends of other dims.

    A single axis may move to any other dim; several axes at once move only to their dims in the target.

    Worked example: from ((x, y), ()), y may move to dim 1: ((x,), (y,)). If the target has x and y on dim 1, in this
    order, both may move at once: ((), (x, y)).
    """
    target_dims = _map_axes_to_dims(target, range(len(target)))
    counts = [range(len(axes) + 1) for axes in layout]
    for staying_counts in itertools.product(*counts):
        staying = []
        moving_axes: list[str] = []
        open_dims = []  # a dim that loses axes gets none in the same step
        for dim, (axes, count) in enumerate(zip(layout, staying_counts, strict=True)):
            staying.append(axes[:count])
            moving_axes += axes[count:]
            if count == len(axes):
                open_dims.append(dim)
        if len(moving_axes) == 1:
            for dim in open_dims:
                yield _add_axis(tuple(staying), dim, moving_axes[0])
        elif moving_axes:
            destinations = set(map(target_dims.get, moving_axes))
            if destinations <= set(open_dims):
                arriving = _keep_axes(target, moving_axes)
                yield tuple(map(operator.add, staying, arriving))


def _find_permutes(view: View, layout: DimAxes) -> Iterator[MoveStep]:
    used_axes = _list_axes(layout)
    counts = [count_parts(axes, view.sizes) for axes in layout]
    homes = []
    for axes, count in zip(view.target, counts, strict=True):
        homes.append(_find_home(axes, count, used_axes, view.sizes))
    free_axes = _exclude_axes(used_axes, _list_axes(homes))
    for after in _arrange(free_axes, homes, counts, view.sizes):
        if after != layout:
            yield MoveStep("ppermute", layout, after, view.count_elements(layout))


def _find_home(axes: Axes, count: int, used_axes: Sequence[str], sizes: Sizes) -> Axes:
    """The first axes of the target on a dim, if they are used and split the dim into `count` parts; else none."""
    for number in range(len(axes) + 1):
        home = axes[:number]
        if count_parts(home, sizes) == count and set(home) <= set(used_axes):
            return home
    return ()


def _arrange(axes: Axes, homes: Sequence[Axes], counts: Sequence[int], sizes: Sizes) -> Iterator[DimAxes]:
    """The layouts in which each dim has its axes of `homes`, or is split into its count of parts by free `axes`."""
    # Of two dims in 2 parts each, free axes x and y of 2 devices, and no homes: ((x,), (y,)) and ((y,), (x,)). If x is
    # at home on dim 0, only y is free: ((x,), (y,)).
    if not counts:
        yield ()
        return
    choices: Iterable[Axes] = [homes[0]]
    if not homes[0]:
        choices = _fill_dim(axes, counts[0], sizes)
    for dim_axes in choices:
        remaining = _exclude_axes(axes, dim_axes)
        for later_dims in _arrange(remaining, homes[1:], counts[1:], sizes):
            yield (dim_axes, *later_dims)


def _fill_dim(axes: Axes, count: int, sizes: Sizes) -> Iterator[Axes]:
    """All tuples of some of these axes that split a dim into `count` parts."""
    if count == 1:
        yield ()
        return
    for axis in axes:
        if count % sizes[axis] == 0:
            remaining = _exclude_axes(axes, (axis,))
            for minor_axes in _fill_dim(remaining, count // sizes[axis], sizes):
                yield (axis, *minor_axes)


def _count_least_received(view: View, layout: DimAxes) -> int:
    """The elements that some device must receive: the part of its target shard that is not in its shard of the layout.

    Along a dim, if the axes of one layout begin with the axes of the other, every device's smaller shard lies in its
    larger one. Otherwise some device's shards do not overlap at all.
    """
    overlap = 1
    for size, axes, target_axes in zip(view.shape, layout, view.target, strict=True):
        if find_common_prefix(axes, target_axes) in (axes, target_axes):
            longer_axes = max(axes, target_axes, key=len)
            overlap *= size // count_parts(longer_axes, view.sizes)
        else:
            overlap = 0
    return view.count_elements(view.target) - overlap


def find_permutation(step: MoveStep, sizes: Sizes) -> tuple[Axes, list[tuple[int, int]]]:
    """The axes of a ppermute, and its (source, target) pairs as joint indices over them, the first axis major.

    From x=2, y=2 on one dim to y, x: the device (x, y) held part 2 x + y and gets part 2 y + x, which (y, x) held. So
    (0, 1) and (1, 0), the joint indices 1 and 2, trade their parts: [(0, 0), (2, 1), (1, 2), (3, 3)].
    """
    changed_dims = []
    axes: Axes = ()
    for dim, (before, after) in enumerate(zip(step.before, step.after, strict=True)):
        if before != after:
            changed_dims.append(dim)
            axes += before
    coordinate_ranges = [range(sizes[axis]) for axis in axes]
    devices = []
    for coordinates in itertools.product(*coordinate_ranges):
        devices.append(dict(zip(axes, coordinates, strict=True)))

    def find_part(layout: DimAxes, device: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(find_joint_index(layout[dim], device, sizes) for dim in changed_dims)

    source_of_part = {}
    for index, device in enumerate(devices):
        source_of_part[find_part(step.before, device)] = index
    pairs = []
    for target, device in enumerate(devices):
        source = source_of_part[find_part(step.after, device)]
        pairs.append((source, target))
    return axes, pairs


def _list_axes(split: Iterable[Axes]) -> list[str]:
    """The axes of all dims."""
    return list(itertools.chain(*split))


def _exclude_axes(axes: Iterable[str], others: Container[str]) -> Axes:
    return tuple(axis for axis in axes if axis not in others)


def _replace_dim(split: DimAxes, dim: int, axes: Axes) -> DimAxes:
    return (*split[:dim], axes, *split[dim + 1 :])


def _add_axis(split: DimAxes, dim: int, axis: str) -> DimAxes:
    return _replace_dim(split, dim, (*split[dim], axis))


def _format_axes(axes: Axes) -> str:
    return ", ".join(axes) or "()"


def _map_axes_to_dims(split: DimAxes, dims: Iterable[int]) -> dict[str, int]:
    """The dim of the array that each axis splits."""
    dim_of_axis: dict[str, int] = {}
    for dim, axes in zip(dims, split, strict=True):
        dim_of_axis |= dict.fromkeys(axes, dim)
    return dim_of_axis
