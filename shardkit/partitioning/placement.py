"""What a plan says of one leaf, as data: which dim each strategy splits, and the three layouts that follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import PartitionSpec

from shardkit.layout import spec_axes
from shardkit.partitioning.storage import Held, Rows, Sizes
from shardkit.schedules import Stages


class Layout(NamedTuple):
    """The layouts of one leaf. On each dim, the axes of `seen` are a prefix of those of `rest` and of `update`.

    Attributes:
        rest: layout in the state.
        seen: layout in the loss.
        update: layout of the gradient and the optimizer state.
        grad: of a lazy leaf the layout of its gradient when it leaves the GradFn; None for any other leaf.
        opens: of a lazy leaf the axes over which the loss gathers it.
        entry: whether a lazy leaf is opened just before the loss, and not by it.
        padded: the dims that are padded where they are split, each with its natural size.
        varies: axes beyond those of the batch whose devices use the leaf on different data: its gradient is partial.
        rows: the natural index of each stored row of dim 0, -1 for a row of zeros; () for natural order.
    """

    rest: PartitionSpec
    seen: PartitionSpec
    update: PartitionSpec
    grad: PartitionSpec | None = None
    opens: PartitionSpec = PartitionSpec()
    entry: bool = False
    padded: Sizes = ()
    varies: tuple[str, ...] = ()
    rows: Rows = ()

    def at_rest(self) -> Held:
        """How the state stores the leaf."""
        return Held(self.rest, self.rows)

    def in_update(self) -> Held:
        """How gradients and optimizer state are stored."""
        return Held(self.update, self.rows)

    def padding(self, spec: PartitionSpec) -> Sizes:
        """The dims that are padded under one of the layouts."""
        split = [dim for dim, axes in enumerate(spec_axes(spec)) if axes]
        return tuple((dim, size) for dim, size in self.padded if dim in split)


class Leaf(NamedTuple):
    """What a placement rule gets: a leaf's path, its shape after the strategies before, dtype, devices of the axes.

    `split` are the dims that other strategies split already; these must not be padded.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    ways: int
    split: frozenset[int] = frozenset()


class Placement(NamedTuple):
    """Where a strategy splits a leaf: on which dim, and in which of the three layouts.

    `handle` makes the leaf lazy, so that its gradient leaves the GradFn already split: "loss" for a leaf that the loss
    opens, "entry" for one that is opened just before. `pad` pads a dim that does not divide. `rows` is the stored order
    of dim 0, as in `Layout`, and `note` a remark on it for `describe`.
    """

    dim: int
    rest: bool
    seen: bool
    update: bool
    handle: Literal["loss", "entry"] | None = None
    pad: bool = False
    rows: Rows = ()
    note: str = ""


class Strategy(NamedTuple):
    """One use of one mesh axis (or tuple of axes).

    Attributes:
        name: as the user writes it, `dp('data')`.
        axes: the mesh axes it uses.
        rank: its order on a dim that several strategies split, major first: 0 inside the layer (tp, pp, ep), 1 fsdp,
            2 zero; 3 for those that split no leaf.
        batch_dim: the dim of the batch that it splits, or None.
        place: the placement rule: a Placement, or the reason in a few words why the leaf stays whole. None keeps every
            leaf whole.
        varies: whether devices along its axes use the leaves that stay whole on different data.
        names: leaves or subtrees that the user named; each must be among the parameters.
        stages: of `pp`, which device has which layers; None for any other strategy.
    """

    name: str
    axes: tuple[str, ...]
    rank: int
    batch_dim: int | None
    place: Callable[[Leaf], Placement | str | None] | None = None
    varies: bool = False
    names: tuple[str, ...] = ()
    stages: Stages | None = None


def map_layouts(fn: Callable[..., Any], layouts: Any, *trees: Any) -> Any:
    """`jax.tree.map` with each Layout as a leaf."""
    return jax.tree.map(fn, layouts, *trees, is_leaf=lambda x: isinstance(x, Layout))
