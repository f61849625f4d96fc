"""Which collectives move an array from one layout to another, found by a search over layouts; no jax.

A layout is, for each dim, the axes that split it, major to minor. Four kinds of step lead from one to another:

- `slice` splits a dim by axes over which the array is replicated, and sends nothing;
- `all_to_all` moves axes from the minor end of one dim to the minor end of another, several axes and dims at once;
- `ppermute` puts the axes of a layout in another order, where every dim stays split into as many parts;
- `all_gather` removes axes from the minor end of a dim.

A `view` has more dims than the array. A dim that axes split in two ways, as `R[x, y]` and `R[y]`, is several dims
there, one for each part that the layouts treat apart, so that axes can move between the parts of a dim as between dims.

Each gives every device the part that the next layout assigns to it, so any chain of steps is right, and the search
takes the one that sends least. No layout on the way has larger shards than the larger of source and target.

Source: Rink, Paszke, Grewe et al., Memory-efficient array redistribution through portable collective communication
(2021, arXiv:2112.01075), whose order of steps (slice, exchange, permute, gather) the search finds where it is best.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

Ends = Literal["last", "none", "all"]
Axes = tuple[str, ...]
DimAxes = tuple[Axes, ...]
Shape = tuple[int, ...]
View = tuple[Shape, Shape, DimAxes, DimAxes, Mapping[str, int], Mapping[str, Shape]]

MOST_PARTS = 6  # of axes that are split into parts: with more, the search takes seconds


class MoveStep(NamedTuple):
    """One step of a redistribution."""

    kind: Literal["slice", "all_to_all", "ppermute", "all_gather"]
    before: DimAxes  # the axes that split each dim before the step
    after: DimAxes  # and after it
    sent: int  # elements that each device sends; for a ppermute the busiest

    def leaving(self) -> DimAxes:
        """For each dim the axes that a step takes from its minor end."""
        return tuple(a[len(shared(a, b)) :] for a, b in zip(self.before, self.after, strict=True))

    def arriving(self) -> DimAxes:
        """For each dim the axes that a step adds at its minor end."""
        return tuple(b[len(shared(a, b)) :] for a, b in zip(self.before, self.after, strict=True))

    def told(self, dims: Shape) -> str:
        """The step in words, with the dims of the array for those of the view."""
        if self.kind == "ppermute":
            pairs = enumerate(zip(self.before, self.after, strict=True))
            return "ppermute " + ", ".join(
                f"{_names(a)} to {_names(b)} on dim {dims[d]}" for d, (a, b) in pairs if a != b
            )
        came = {axis: dims[d] for d, axes in enumerate(self.leaving()) for axis in axes}
        goes = {axis: dims[d] for d, axes in enumerate(self.arriving()) for axis in axes}
        if self.kind != "all_to_all":
            return f"{self.kind} " + ", ".join(f"dim {dim} over {axis}" for axis, dim in (came or goes).items())
        return "all_to_all " + ", ".join(f"{axis} from dim {came[axis]} to dim {goes[axis]}" for axis in goes)


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
    held: tuple[int, ...]  # the source shard, and the shard after each step

    @property
    def untouched(self) -> tuple[int, ...]:
        """The dims of the view that no step splits or puts together."""
        layouts = [self.source, *(step.after for step in self.steps)]
        return tuple(dim for dim in range(len(self.shape)) if not any(split[dim] for split in layouts))

    @property
    def peak(self) -> int:
        """The most that one step holds at once: its operand and its result."""
        return max((a + b for a, b in itertools.pairwise(self.held)), default=self.held[0])


@lru_cache(maxsize=4096)
def redistribution(shape: Shape, source: DimAxes, target: DimAxes, axes: tuple[tuple[str, int], ...]) -> Redistribution:
    """The steps that send least from one layout of an array to another; among equals the fewest.

    Source and target are for each dim the axes that split it, and divide the global shape.
    """
    sizes = {axis: size for axis, size in axes if size > 1}
    source, target = (tuple(tuple(a for a in each if a in sizes) for each in split) for split in (source, target))
    fixed = [shared(*both) for both in zip(source, target, strict=True)]
    shape = tuple(size // ways_of(axes, sizes) for size, axes in zip(shape, fixed, strict=True))
    source, target = (tuple(s[len(f) :] for s, f in zip(split, fixed, strict=True)) for split in (source, target))
    moving = {axis: (sizes[axis],) for axes in (*source, *target) for axis in axes}
    parts = taken_apart(source, target, moving)
    views: list[tuple[Mapping[str, Shape], Ends]] = [
        (moving, "last"),
        (moving, "none"),
        (moving, "all"),
        (parts, "all"),
    ]
    if sum(map(len, parts.values())) > MOST_PARTS:
        views.pop()
    best: Redistribution | None = None
    for each, cut in views:  # the coarsest that will do: its collectives move the longest runs of elements
        found = _search(*view(shape, source, target, each, cut))
        best = found if best is None or found.sent < best.sent else best
        if best.sent == best.least:
            break
    assert best is not None
    return best


def _search(
    shape: Shape, dims: Shape, source: DimAxes, target: DimAxes, sizes: Mapping[str, int], parts: Mapping[str, Shape]
) -> Redistribution:
    """A* over layouts: the cost of a path is what it sends, then its steps, then what it holds."""
    largest = max(elements_of(shape, split, sizes) for split in (source, target))
    least = least_received(shape, source, target, sizes)
    number = itertools.count()  # layouts are not compared
    queue: list[tuple[int, int, int, int, int, DimAxes, tuple[MoveStep, ...]]] = [(least, 0, 0, 0, 0, source, ())]
    done = set()
    while True:
        _, count, held, _, sent, split, steps = heapq.heappop(queue)
        if split == target:
            break
        if split in done:
            continue
        done.add(split)
        for step in _steps(shape, split, target, sizes):
            size = elements_of(shape, step.after, sizes)
            if step.after not in done and size <= largest:
                total = sent + step.sent
                bound = total + least_received(shape, step.after, target, sizes)
                heapq.heappush(queue, (bound, count + 1, held + size, next(number), total, step.after, (*steps, step)))
    shards = tuple(elements_of(shape, each, sizes) for each in (source, *(step.after for step in steps)))
    return Redistribution(shape, dims, tuple(sizes.items()), tuple(parts.items()), source, steps, sent, least, shards)


def _steps(shape: Shape, split: DimAxes, target: DimAxes, sizes: Mapping[str, int]) -> Iterator[MoveStep]:
    """The steps that lead out of a layout."""
    # Gathers and exchanges take axes from the minor end of a dim: the devices along its last axis hold parts that are
    # next to each other. Along an axis before it the parts lie apart: gathered, they would have the right shape, no
    # error, and an order of rows that no spec can name. Such an axis leaves after those behind it, or a ppermute puts
    # it last. Slices send nothing and make later steps smaller, gathers larger: the search finds gathers at the end.
    local = local_of(shape, split, sizes)
    elements = math.prod(local)
    used = [axis for axes in split for axis in axes]
    unused = [axis for axis in sizes if axis not in used]
    for dim, axis in itertools.product(range(len(shape)), unused):
        if local[dim] % sizes[axis] == 0:
            yield MoveStep("slice", split, _replaced(split, dim, (*split[dim], axis)), 0)
    for dim, axes in enumerate(split):
        for start in range(len(axes)):
            gathered = elements * (ways_of(axes[start:], sizes) - 1)
            yield MoveStep("all_gather", split, _replaced(split, dim, axes[:start]), gathered)
    for after in _exchanges(split, target):
        step = MoveStep("all_to_all", split, after, 0)
        if all(local[dim] % ways_of(axes, sizes) == 0 for dim, axes in enumerate(step.arriving())):
            moved = [axis for axes in step.arriving() for axis in axes]
            yield step._replace(sent=elements - elements // ways_of(moved, sizes))
    ways = [ways_of(axes, sizes) for axes in split]
    home = [_home(axes, way, used, sizes) for axes, way in zip(target, ways, strict=True)]
    rest = tuple(axis for axis in used if not any(axis in axes for axes in home))
    for after in _arrangements(rest, home, ways, sizes):
        if after != split:
            yield MoveStep("ppermute", split, after, elements)


def _exchanges(split: DimAxes, target: DimAxes) -> Iterator[DimAxes]:
    """The layouts in which axes from the minor ends of dims have moved to the minor ends of other dims.

    One axis may go anywhere; several together go where the target has them.
    """
    dims = range(len(split))
    home = {axis: dim for dim, axes in enumerate(target) for axis in axes}
    for kept in itertools.product(*(range(len(axes) + 1) for axes in split)):
        moved = [axis for dim in dims for axis in split[dim][kept[dim] :]]
        whole = [dim for dim in dims if kept[dim] == len(split[dim])]  # one that loses axes is put together, not split
        if len(moved) == 1:
            for dim in whole:
                yield tuple(split[to][: kept[to]] + (moved[0],) * (to == dim) for to in dims)
        elif moved and all(home.get(axis) in whole for axis in moved):
            arriving = [tuple(axis for axis in axes if axis in moved) for axes in target]
            yield tuple(axes[:n] + more for axes, n, more in zip(split, kept, arriving, strict=True))


def _home(axes: Axes, ways: int, used: Sequence[str], sizes: Mapping[str, int]) -> Axes:
    """The first of the axes that the target has on a dim, where they split it into so many parts; else none."""
    first = next((axes[:n] for n in range(len(axes) + 1) if ways_of(axes[:n], sizes) == ways), ())
    return first if set(first) <= set(used) else ()


def _arrangements(rest: Axes, home: Sequence[Axes], ways: Sequence[int], sizes: Mapping[str, int]) -> Iterator[DimAxes]:
    """The layouts in which each dim has its axes of `home`, or is split into as many parts by some of the rest."""
    if not ways:
        yield ()
        return
    for first in [home[0]] if home[0] else _fill(rest, ways[0], sizes):
        for others in _arrangements(tuple(axis for axis in rest if axis not in first), home[1:], ways[1:], sizes):
            yield (first, *others)


def _fill(axes: Axes, ways: int, sizes: Mapping[str, int]) -> Iterator[Axes]:
    """The orders of some of these axes that split a dim into so many parts."""
    if ways == 1:
        yield ()
    for axis in axes if ways > 1 else ():
        if ways % sizes[axis] == 0:
            others = tuple(other for other in axes if other != axis)
            yield from ((axis, *more) for more in _fill(others, ways // sizes[axis], sizes))


def least_received(shape: Shape, source: DimAxes, target: DimAxes, sizes: Mapping[str, int]) -> int:
    """The elements that some device must receive: those of its target shard that are not in its source shard.

    Along each dim the two shards overlap by the smaller one where the axes of one layout begin with those of the other;
    otherwise not at all, on some device.
    """
    overlap = 1
    for size, a, b in zip(shape, source, target, strict=True):
        begin = shared(a, b)
        overlap *= size // ways_of(max(a, b, key=len), sizes) if begin in (a, b) else 0
    return elements_of(shape, target, sizes) - overlap


def permutation(step: MoveStep, sizes: Mapping[str, int]) -> tuple[Axes, list[tuple[int, int]]]:
    """The axes of a ppermute, and its (source, target) pairs as joint indices over them, the first axis major."""
    changed = [dim for dim, (a, b) in enumerate(zip(step.before, step.after, strict=True)) if a != b]
    axes = tuple(axis for dim in changed for axis in step.before[dim])
    places = [dict(zip(axes, at, strict=True)) for at in itertools.product(*(range(sizes[axis]) for axis in axes))]

    def part(split: DimAxes, at: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(_joint(split[dim], at, sizes) for dim in changed)

    holder = {part(step.before, at): index for index, at in enumerate(places)}
    return axes, [(holder[part(step.after, at)], index) for index, at in enumerate(places)]


def _joint(axes: Axes, at: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    index = 0
    for axis in axes:
        index = index * sizes[axis] + at[axis]
    return index


def _replaced(split: DimAxes, dim: int, axes: Axes) -> DimAxes:
    return (*split[:dim], axes, *split[dim + 1 :])


def _names(axes: Axes) -> str:
    return ", ".join(axes) or "()"


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
