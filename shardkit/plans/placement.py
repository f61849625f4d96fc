"""What a plan specifies for one leaf, as data: which dims are split over which axes, and when each of them is whole."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import PartitionSpec

from shardkit._arguments.checks import named
from shardkit.collectives.algorithms import PLAIN, Algorithm
from shardkit.meshes.layout import canonical, spec_axes, split_dims
from shardkit.plans.storage import Held, Rows, Sizes
from shardkit.schedules import Stages

Gather = Literal["never", "layer", "step", "update"]
Scatter = Literal["layer", "microbatch", "step", "never"]
_GATHERS: tuple[Gather, ...] = ("never", "layer", "step", "update")
_SCATTERS: tuple[Scatter, ...] = ("layer", "microbatch", "step", "never")  # from the earliest on


class Cut(NamedTuple):
    """A dim that is split over some axes, and the algorithms that gather it and reduce its gradient."""

    dim: int
    axes: tuple[str, ...]
    gather_by: Algorithm = PLAIN
    reduce_by: Algorithm = PLAIN
    keep: bool = False  # what is gathered in a layer's forward pass is kept for its backward pass
    automatic: tuple[tuple[int, tuple[str, ...]], ...] = ()  # the dims that the partitioner splits, with their axes


Cuts = tuple[Cut, ...]


def kept_cuts(cuts: Cuts) -> tuple[Cuts, Cuts]:
    """The cuts that are gathered for a secondary part, with those that cut its parts further; and the others."""
    first = {cut.dim: i for i, cut in reversed(list(enumerate(cuts))) if cut.keep}
    kept = tuple(i >= first.get(cut.dim, len(cuts)) for i, cut in enumerate(cuts))
    return tuple(itertools.compress(cuts, kept)), tuple(cut for cut, found in zip(cuts, kept, strict=True) if not found)


class Split(NamedTuple):
    """One dim of a leaf, split over the axes of one strategy, and when it is whole: what a placement rule returns.

    | plan | `gather` | `scatter` |
    |---|---|---|
    | tp, pp, ep | never | never |
    | zero1 | update | step |
    | zero1, layer-wise | update | layer, or `once` |
    | zero2 | update | microbatch |
    | zero2, layer-wise | update | layer |
    | fsdp | step | step |
    | fsdp, layer-wise | layer | layer |

    Attributes:
        dim: the dim that is split.
        gather: when the weight is gathered: "never", in each "layer" that uses it, once per "step" before the loss, or
            after the "update", so that it is whole in the state.
        scatter: when its gradient is summed and split: "never" by the step, because the loss gets the part; in the
            backward pass of its "layer"; at the end of each "microbatch"; or once per "step".
        once: whether a step of several microbatches scatters it once per "step", whatever `scatter` says.
        pad: whether a dim that does not divide is padded.
        stack: whether dim 0 counts layers that are gathered one by one, so that no other strategy may split it.
        rows: the stored order of dim 0, as in `LeafLayout`.
        note: a remark on it for `describe`.
        secondary: axes over which a part, gathered over the others in the forward pass of its layer, is kept for the
            backward pass, which gathers over these alone. The algorithms of the strategy are for the other axes.
        axes: the axes, major first; the plan fills in those of the strategy, of which the secondary ones come first.
        gather_by: the algorithm of its gathers; the plan fills in that of the strategy.
        reduce_by: the algorithm of its reductions; the plan fills in that of the strategy.
    """

    dim: int
    gather: Gather = "never"
    scatter: Scatter = "never"
    once: bool = False
    pad: bool = False
    stack: bool = False
    rows: Rows = ()
    note: str = ""
    secondary: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()
    gather_by: Algorithm = PLAIN
    reduce_by: Algorithm = PLAIN

    @property
    def lazy(self) -> bool:
        """Whether the leaf reaches the GradFn as a handle."""
        return self.gather == "layer" or self.scatter in ("layer", "microbatch")

    @property
    def cuts(self) -> Cuts:
        """What it cuts, and by which algorithms."""
        near = tuple(axis for axis in self.axes if axis in self.secondary)
        far = tuple(axis for axis in self.axes if axis not in self.secondary)
        keep = self.gather == "layer" and bool(near)
        cuts = Cut(self.dim, near), Cut(self.dim, far, self.gather_by, self.reduce_by, keep)
        return tuple(cut for cut in cuts if cut.axes)


class LeafLayout(NamedTuple):
    """The layouts of one leaf in a step, and the splits from which they follow, in the order of their ranks.

    On each dim, the axes of `seen` are a prefix of those of `rest` and of `update`.

    Attributes:
        splits: which dims are split over which axes, and when they are whole.
        padded: the dims that are padded where they are split, each with its original size.
        varies: axes beyond those of the batch whose devices use the leaf on different data: its gradient is partial.
        rows: the original index of each stored row of dim 0, -1 for a row of zeros; () for original order.
        sums: axes over which the strategies that leave the leaf whole sum its gradient, each with its algorithm, where
            that is not the plain one.
        automatic: how the partitioner splits it over axes that are not Manual; not visible inside shard_map.
    """

    splits: tuple[Split, ...] = ()
    padded: Sizes = ()
    varies: tuple[str, ...] = ()
    rows: Rows = ()
    sums: tuple[tuple[tuple[str, ...], Algorithm], ...] = ()
    automatic: PartitionSpec = PartitionSpec()

    @property
    def rest(self) -> PartitionSpec:
        """The layout in the state."""
        return _spec(s for s in self.splits if s.gather != "update")

    @property
    def seen(self) -> PartitionSpec:
        """The layout in the loss."""
        return _spec(s for s in self.splits if s.gather == "never")

    @property
    def update(self) -> PartitionSpec:
        """The layout of the gradient and the optimizer state."""
        return _spec(self.splits)

    @property
    def grad(self) -> PartitionSpec:
        """The layout of the gradient when it leaves the GradFn."""
        return _spec(s for s in self.splits if s.scatter != "step")

    @property
    def lazy(self) -> bool:
        """Whether the leaf reaches the GradFn as a handle."""
        return any(s.lazy for s in self.splits)

    @property
    def entry(self) -> bool:
        """Whether a lazy leaf is opened just before the loss, and not by it."""
        return self.lazy and not any("layer" in (s.gather, s.scatter) for s in self.splits)

    def cuts(self, *, gather: Collection[str] = _GATHERS, scatter: Collection[str] = _SCATTERS) -> Cuts:
        """What its splits of these times cut, in their order; splits of a dim by the same algorithms are one cut."""
        found: list[Cut] = []
        automatic = tuple(split_dims(self.automatic).items())
        for cut in [c for s in self.splits if s.gather in gather and s.scatter in scatter for c in s.cuts]:
            cut = cut._replace(automatic=automatic)
            same = [i for i, each in enumerate(found) if each.dim == cut.dim][-1:]
            if same and found[same[0]]._replace(axes=cut.axes) == cut:
                found[same[0]] = cut._replace(axes=found[same[0]].axes + cut.axes)
            else:
                found.append(cut)
        return tuple(found)

    def at_rest(self) -> Held:
        """How the state stores the leaf."""
        return Held(_joined(self.rest, self.automatic), self.rows)

    def in_update(self) -> Held:
        """How gradients and optimizer state are stored."""
        return Held(_joined(self.update, self.automatic), self.rows)

    def padding(self, cuts: Cuts) -> Sizes:
        """The dims that are padded among those of some cuts."""
        split = {cut.dim for cut in cuts}
        return tuple((dim, size) for dim, size in self.padded if dim in split)


def check_feedback(path: str, layout: LeafLayout) -> None:
    """Refuses error feedback for a leaf whose gradient is not reduced once per step, or that is stored out of order.

    Raises:
        ValueError: names the leaf, the algorithm and what to pass.
    """
    often = {"layer": "layer by layer", "microbatch": "in each microbatch"}
    for s in layout.splits:
        if s.reduce_by.feedback and s.scatter in often:
            raise ValueError(
                f"{s.reduce_by}: the gradient of a leaf must be reduced once per step; that of leaf {path} is reduced "
                f"{often[s.scatter]} over {named(s.axes)}. Use it in dp, or in zero1 or fsdp without layerwise, or "
                "leave out feedback=True."
            )
    algorithms = [*(s.reduce_by for s in layout.splits), *(algorithm for _, algorithm in layout.sums)]
    fed = next((algorithm for algorithm in algorithms if algorithm.feedback), None)
    if fed and layout.rows:
        raise ValueError(
            f"{fed}: a leaf must be stored in its original order; leaf {path} is stored in the order of pipeline "
            "stages. Use a schedule with one chunk on each stage and stages of equal length, or leave out "
            "feedback=True."
        )


def _spec(splits: Iterable[Split]) -> PartitionSpec:
    axes: dict[int, tuple[str, ...]] = {}
    for s in splits:
        axes[s.dim] = axes.get(s.dim, ()) + s.axes
    return canonical(PartitionSpec(*(axes.get(dim, ()) for dim in range(max(axes, default=-1) + 1))))


def _joined(major: PartitionSpec, minor: PartitionSpec) -> PartitionSpec:
    """Two splits of a leaf as one."""
    both = itertools.zip_longest(spec_axes(major), spec_axes(minor), fillvalue=())
    return canonical(PartitionSpec(*(first + then for first, then in both)))


def in_order(splits: Iterable[Split]) -> tuple[Split, ...]:
    """Splits whose times fit together on each dim, where later splits cut the parts of earlier ones.

    A part is gathered before what it is a part of: where one is gathered in a layer, so are the others that are not
    whole before. A gradient is scattered over the first axes first: one is scattered no later than those after it.
    """
    found = list(splits)
    in_layer = {s.dim for s in found if s.gather == "layer"}
    for i, s in enumerate(found):
        if s.gather == "step" and s.dim in in_layer:
            found[i] = s._replace(gather="layer", scatter="layer")
    for i, s in enumerate(found):
        if s.scatter != "never":
            after = [later.scatter for later in found[i:] if later.dim == s.dim]
            found[i] = s._replace(scatter=min(after, key=_SCATTERS.index))
    return tuple(found)


class Leaf(NamedTuple):
    """What a placement rule gets: a leaf's path, its shape after the strategies before, dtype, devices of the axes.

    `split` are the dims that other strategies split already; these must not be padded. `stack` says that dim 0 counts
    layers that another one gathers one by one; it must not be split. `automatic` are dims that the partitioner splits:
    a collective over one of them would make it move data.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    ways: int
    split: frozenset[int] = frozenset()
    stack: bool = False
    automatic: frozenset[int] = frozenset()


class Strategy(NamedTuple):
    """One use of one mesh axis (or tuple of axes)."""

    name: str  # as the user writes it, `dp('data')`
    axes: tuple[str, ...]  # the mesh axes it uses
    # its order on a dim that several strategies split, major first: 0 inside the layer (tp, pp, ep), 1 fsdp, 2 zero; 3
    # for those that split no leaf
    rank: int
    batch_dim: int | None  # the dim of the batch that it splits, or None
    # the placement rule: a Split, or the reason in a few words why the leaf stays whole. None keeps every leaf whole.
    place: Callable[[Leaf], Split | str | None] | None = None
    varies: bool = False  # whether devices along its axes use the leaves that stay whole on different data
    names: tuple[str, ...] = ()  # leaves or subtrees that the user named; each must be among the parameters
    gather: Algorithm = PLAIN  # the algorithm that gathers weights
    reduce: Algorithm = PLAIN  # the algorithm that reduces gradients
    stages: Stages | None = None  # of `pp`, which device has which layers; None for any other strategy
    accumulated: bool = False  # whether the step has several microbatches
    # leaves of the user's tree of specs, each with an axis over which it is split and that the mesh must have
    rule_axes: tuple[tuple[str, str], ...] = ()


def is_layout(x: Any) -> bool:
    """Whether a node of a tree is a LeafLayout, which is a leaf of it."""
    return isinstance(x, LeafLayout)


def map_layouts(fn: Callable[..., Any], layouts: Any, *trees: Any) -> Any:
    """`jax.tree.map` with each LeafLayout as a leaf."""
    return jax.tree.map(fn, layouts, *trees, is_leaf=is_layout)
