"""What a plan specifies for one leaf, as data: which dims are split over which axes, and when each dim is whole.

Worked example: a 16x8 leaf on a mesh of data=4 and model=2. `tp("model")` splits dim 1 for the whole step, and another
strategy splits dim 0 over "data" for a part of it. Shapes on one device, with the times that the other strategy writes
into its Split:

| strategy over "data" | `gather`, `scatter` | `rest` | `seen` | `grad` | `update` |
|---|---|---|---|---|---|
| zero1 | update, step | [16, 4] | [16, 4] | [16, 4] | [4, 4] |
| zero2 | update, microbatch | [16, 4] | [16, 4] | [4, 4] | [4, 4] |
| fsdp | step, step | [4, 4] | [16, 4] | [16, 4] | [4, 4] |
| fsdp, layer-wise | layer, layer | [4, 4] | [16, 4] | [4, 4] | [4, 4] |

Under fsdp the step gathers [4, 4] to [16, 4] before the loss, because `rest` is split over "data" and `seen` is not. It
scatters the gradient to [4, 4] after the loss, because `grad` is not split over "data" and `update` is. The optimizer
runs on what the state holds, so nothing is gathered after it. All four are split over "model": over it the step sends
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import PartitionSpec

from shardkit._arguments.checks import name_axes
from shardkit.collectives.algorithms import PLAIN, Algorithm
from shardkit.meshes.layout import canonical, spec_axes, split_dims
from shardkit.plans.storage import Rows, Sizes, Storage
from shardkit.schedules.stages import Stages

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
    keep: bool = False  # the result of this gather, in a layer's forward pass, is kept for its backward pass
    automatic: tuple[tuple[int, tuple[str, ...]], ...] = ()  # the dims that the partitioner splits, with their axes


Cuts = tuple[Cut, ...]


def separate_kept_cuts(cuts: Cuts) -> tuple[Cuts, Cuts]:
    """The cuts that a layer gathers once, in its forward pass, and the cuts that its backward pass gathers again.

    Of `fsdp(("node", "gpu"), secondary="gpu")` a dim has the cuts "gpu", then "node" with `keep`. The forward pass
    gathers over "node" first, and keeps the result, the secondary part, which is split over "gpu" alone. So ("node",)
    is gathered once, and ("gpu",) again in the backward pass. A cut after one with `keep` cuts its parts further, and
    is gathered before it: also once.
    """
    kept: list[Cut] = []
    regathered: list[Cut] = []
    kept_dims: set[int] = set()
    for cut in cuts:
        if cut.keep:
            kept_dims.add(cut.dim)
        if cut.dim in kept_dims:
            kept.append(cut)
        else:
            regathered.append(cut)
    return tuple(kept), tuple(regathered)


class Split(NamedTuple):
    """One dim of a leaf, split over the axes of one strategy, and when it is whole. A placement rule returns it.

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
        once: whether a step of several microbatches scatters it once per "step", with any `scatter`.
        pad: whether to pad a dim that does not divide.
        stack: whether dim 0 counts layers that are gathered one by one. No other strategy may then split it.
        rows: the stored order of dim 0, as in `LeafLayout`.
        note: a remark on it for `describe`.
        secondary: axes for the backward pass. The forward pass gathers over the other axes, and keeps a part that is
            split over the secondary axes; the backward pass gathers over the secondary axes alone. The algorithms of
            the strategy are for the other axes.
        axes: the axes, major first. The plan fills in the axes of the strategy, the secondary ones first.
        gather_by: the algorithm of its gathers; the plan fills it in.
        reduce_by: the algorithm of its reductions; the plan fills it in.
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
        """The split as cuts: over its secondary axes by the plain algorithms, then over the other axes by its own."""
        near_axes = tuple(axis for axis in self.axes if axis in self.secondary)
        far_axes = tuple(axis for axis in self.axes if axis not in self.secondary)
        cuts = []
        if near_axes:
            cuts.append(Cut(self.dim, near_axes))
        if far_axes:
            keep = self.gather == "layer" and bool(near_axes)
            cuts.append(Cut(self.dim, far_axes, self.gather_by, self.reduce_by, keep))
        return tuple(cuts)


class LeafLayout(NamedTuple):
    """The layouts of one leaf in a step, and the splits from which they follow, in the order of their ranks.

    On each dim, the axes of `seen` are a prefix of those of `rest` and of `update`.

    Attributes:
        splits: which dims are split over which axes, and when they are whole.
        padded: the dims that are padded where they are split, each with its original size.
        varies: axes beyond those of the batch whose devices use the leaf on different data: its gradient is partial.
        rows: the original index of each stored row of dim 0, -1 for a row of zeros; () for original order.
        sums: the strategies that leave the leaf whole and sum its gradient by an algorithm that is not the plain one:
            the axes and the algorithm of each.
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
        return _merge_splits([split for split in self.splits if split.gather != "update"])

    @property
    def seen(self) -> PartitionSpec:
        """The layout in the loss."""
        return _merge_splits([split for split in self.splits if split.gather == "never"])

    @property
    def update(self) -> PartitionSpec:
        """The layout of the gradient and the optimizer state."""
        return _merge_splits(self.splits)

    @property
    def grad(self) -> PartitionSpec:
        """The layout of the gradient when it leaves the GradFn."""
        return _merge_splits([split for split in self.splits if split.scatter != "step"])

    @property
    def lazy(self) -> bool:
        """Whether the leaf reaches the GradFn as a handle."""
        return any(split.lazy for split in self.splits)

    @property
    def opened_before_loss(self) -> bool:
        """Whether a lazy leaf is opened just before the loss, instead of by the loss."""
        for split in self.splits:
            if split.gather == "layer" or split.scatter == "layer":
                return False
        return self.lazy

    def cuts(self, *, gather: Collection[str] = _GATHERS, scatter: Collection[str] = _SCATTERS) -> Cuts:
        """The cuts of the splits whose `gather` is one of these times, and whose `scatter` is one of these times too.

        Times that are left out match all splits. Splits of one dim by the same algorithms become one cut.

        Worked example: fsdp layer-wise (layer, layer) over "fsdp", then zero1 (update, step) over "data", both on dim
        0.

            cuts()                                          Cut(0, ("fsdp", "data")): both, as one cut
            cuts(gather=("layer",))                         Cut(0, ("fsdp",)): what a layer gathers
            cuts(scatter=("step",))                         Cut(0, ("data",)): what is scattered once per step
            cuts(gather=("layer",), scatter=("step",))      none: no split has both times
        """
        automatic = tuple(split_dims(self.automatic).items())
        cuts: list[Cut] = []
        for split in self.splits:
            if split.gather not in gather or split.scatter not in scatter:
                continue
            for cut in split.cuts:
                # Each cut knows the partitioner's dims, so that its collective can run on the partitioner's parts
                # (`in_automatic_parts`).
                _add_cut(cuts, cut._replace(automatic=automatic))
        return tuple(cuts)

    def at_rest(self) -> Storage:
        """How the state stores the leaf."""
        return Storage(_join_specs(self.rest, self.automatic), self.rows)

    def in_update(self) -> Storage:
        """How gradients and optimizer state are stored."""
        return Storage(_join_specs(self.update, self.automatic), self.rows)

    def padding(self, cuts: Cuts) -> Sizes:
        """The padded dims that some of these cuts split."""
        dims = {cut.dim for cut in cuts}
        return tuple((dim, size) for dim, size in self.padded if dim in dims)


def check_feedback(path: str, layout: LeafLayout) -> None:
    """Refuses error feedback for a leaf whose gradient is not reduced once per step, or that is stored out of order.

    Raises:
        ValueError: names the leaf, the algorithm and what to pass.
    """
    times = {"layer": "layer by layer", "microbatch": "in each microbatch"}
    algorithms = []
    for split in layout.splits:
        algorithms.append(split.reduce_by)
        # A residual is added once per step. In each microbatch it would be added as often as there are microbatches.
        if split.reduce_by.feedback and split.scatter in times:
            raise ValueError(
                f"{split.reduce_by}: the gradient of a leaf must be reduced once per step; the gradient of leaf "
                f"{path} is reduced {times[split.scatter]} over {name_axes(split.axes)}. Use it in dp, or in zero1 or "
                "fsdp without layerwise, or leave out feedback=True."
            )
    for _, algorithm in layout.sums:
        algorithms.append(algorithm)
    for algorithm in algorithms:
        if algorithm.feedback and layout.rows:
            raise ValueError(
                f"{algorithm}: a leaf must be stored in its original order; leaf {path} is stored in the order of "
                "pipeline stages. Use a schedule with one chunk on each stage and stages of equal length, or leave out "
                "feedback=True."
            )


def _add_cut(cuts: list[Cut], cut: Cut) -> None:
    """Appends a cut, or adds its axes to the last cut of its dim if the two cuts differ only in their axes."""
    for number in reversed(range(len(cuts))):
        last = cuts[number]
        if last.dim != cut.dim:
            continue
        # One collective over both axes in place of two: it sends as many bytes, and devices wait once.
        if last._replace(axes=cut.axes) == cut:
            cuts[number] = last._replace(axes=last.axes + cut.axes)
            return
        break
    cuts.append(cut)


def make_spec(axes_by_dim: Mapping[int, Sequence[str]]) -> PartitionSpec:
    """The spec of a leaf whose dims are split over these axes; dims that are left out are whole.

    Of {2: ("data",), 0: ("model", "fsdp")}: P(("model", "fsdp"), None, "data").
    """
    ndim = max(axes_by_dim, default=-1) + 1
    entries = [tuple(axes_by_dim.get(dim, ())) for dim in range(ndim)]
    return canonical(PartitionSpec(*entries))


def _merge_splits(splits: Iterable[Split]) -> PartitionSpec:
    """The spec of splits: if several splits have one dim, the axes of the first are major."""
    axes_by_dim: dict[int, tuple[str, ...]] = {}
    for split in splits:
        axes_by_dim[split.dim] = axes_by_dim.get(split.dim, ()) + split.axes
    return make_spec(axes_by_dim)


def _join_specs(major: PartitionSpec, minor: PartitionSpec) -> PartitionSpec:
    """The spec of a leaf whose dims are split by `major`, and the parts by `minor`."""
    axes_by_dim = dict(enumerate(spec_axes(major)))
    for dim, axes in enumerate(spec_axes(minor)):
        axes_by_dim[dim] = axes_by_dim.get(dim, ()) + axes
    return make_spec(axes_by_dim)


def align_times(splits: Iterable[Split]) -> tuple[Split, ...]:
    """Splits whose times fit together on each dim, where later splits cut the parts of earlier ones.

    The parts of later splits are gathered first. So if a later split is gathered in a layer, an earlier one cannot be
    gathered before, once per step: it is gathered in the layer too. Gradients are scattered over the first split first:
    it is scattered no later than the splits after it.

    Example: zero1 (update, step) after fsdp layer-wise (layer, layer) on one dim stays as it is. fsdp (step, step)
    before a strategy with (layer, layer) becomes (layer, layer).
    """
    aligned = list(splits)
    layer_dims = {split.dim for split in aligned if split.gather == "layer"}
    for number, split in enumerate(aligned):
        if split.gather == "step" and split.dim in layer_dims:
            aligned[number] = split._replace(gather="layer", scatter="layer")
    for number, split in enumerate(aligned):
        # After the loop above, which may have moved a scatter into the layer.
        if split.scatter == "never":
            continue
        earliest: Scatter = split.scatter
        for later in aligned[number + 1 :]:
            if later.dim == split.dim:
                earliest = min(earliest, later.scatter, key=_SCATTERS.index)
        aligned[number] = split._replace(scatter=earliest)
    return tuple(aligned)


class Leaf(NamedTuple):
    """A leaf as a placement rule gets it."""

    path: str
    shape: tuple[int, ...]  # the shape of a part, after the strategies before
    dtype: Any
    ways: int  # the number of devices along the strategy's axes
    split: frozenset[int] = frozenset()  # the dims that strategies before split; they must not be padded
    stack: bool = False  # whether dim 0 counts layers that a strategy before gathers one by one; it must not be split
    automatic: frozenset[int] = frozenset()  # dims that the partitioner splits: a collective of them would move data


class Strategy(NamedTuple):
    """One use of one mesh axis (or tuple of axes)."""

    name: str  # as the user writes it, `dp('data')`
    axes: tuple[str, ...]  # the mesh axes it uses
    # its order on a dim that several strategies split, major first: 0 inside the layer (tp, pp, ep), 1 fsdp, 2 zero; 3
    # for strategies that split no leaf
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
