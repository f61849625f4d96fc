"""How mesh axes are used, as data: the splits of each leaf, and one spec for the batch.

A strategy says which dim of each leaf it splits, when the weight is gathered, and when its gradient is scattered (the
table of `Split`). The layouts at `rest` (in the state), as `seen` (in the GradFn) and for the `update` (gradients and
optimizer state) follow. `enter` and `leave` (in `on_device/seam.py`) read only these layouts and the spec of the batch,
so a new strategy is a new file with a placement rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from shardkit._arguments.checks import Axis, at_least, axis_names, dim_of, format_sizes, quote
from shardkit._arguments.typed import Arrays, typed
from shardkit.collectives.algorithms import PLAIN, Algorithm
from shardkit.meshes.layout import count_devices, local_shape, path_name, split_dims
from shardkit.plans.describe import LeafRow, PlanTable, make_plan_table, mesh_of
from shardkit.plans.dim_rules import axes_of_rules, is_in_subtrees
from shardkit.plans.manual import manual_axes, record_automatic_splits
from shardkit.plans.splits import (
    Leaf,
    LeafLayout,
    Split,
    Strategy,
    align_times,
    check_feedback,
    is_layout,
    make_spec,
    map_layouts,
)
from shardkit.plans.storage import is_padded, padded_shape, padding, stored_shape


class Plan(NamedTuple):
    """Strategies in the order of their rank: `dp` and the like make a plan of one, `chain` joins plans.

    Attributes:
        strategies: one for each use of an axis.
        automatic: the path of a leaf, and its spec over axes that the plan does not use and the partitioner splits.
    """

    strategies: tuple[Strategy, ...]
    automatic: tuple[tuple[str, PartitionSpec], ...] = ()

    def __str__(self) -> str:
        return " + ".join(strategy.name for strategy in self.strategies)

    @property
    def axes(self) -> tuple[str, ...]:
        """Every mesh axis the plan uses."""
        return _list_axes(self.strategies)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh axes that split the batch."""
        return _list_axes([strategy for strategy in self.strategies if strategy.batch_dim is not None])

    @property
    def stage_axes(self) -> tuple[str, ...]:
        """The mesh axes along which each device has layers of its own: the axes of pp."""
        return _list_axes([strategy for strategy in self.strategies if strategy.stages is not None])

    def accumulate(self) -> Plan:
        """This plan in a step of several microbatches."""
        # `_complete` reads it: a Split with `once` then waits for the end of the step.
        strategies = [strategy._replace(accumulated=True) for strategy in self.strategies]
        return self._replace(strategies=tuple(strategies))

    @typed
    def batch_spec(self, mesh: Mesh) -> PartitionSpec:
        """How the batch is split: for each dim its axes, in the mesh's order; a tuple of axes keeps its own.

        Axes of size 1 are left out, so that no collective over one device is traced.

        Of `chain(fsdp("fsdp"), dp("data"), cp("context"))` on a mesh of data, fsdp, context: P(("data", "fsdp"),
        "context").
        """
        self.check(mesh)
        strategies = [strategy for strategy in self.strategies if strategy.batch_dim is not None]
        # In the mesh's order, not that of ranks, in which fsdp comes before dp: consecutive examples then go to devices
        # that are next to each other in the mesh.
        strategies.sort(key=lambda strategy: mesh.axis_names.index(strategy.axes[0]))
        axes_by_dim: dict[int, list[str]] = {}
        for strategy in strategies:
            axes = axes_by_dim.setdefault(strategy.batch_dim or 0, [])
            axes += [axis for axis in strategy.axes if mesh.shape[axis] > 1]
        return make_spec(axes_by_dim)

    @typed
    def layouts(self, params: Arrays, mesh: Mesh) -> Any:
        """The LeafLayout of each leaf of `params` (arrays or their shapes).

        Raises:
            ValueError: a tree without leaves, an axis that the mesh does not have, or a name that matches no leaf.
        """
        self.check(mesh)
        if not jax.tree.leaves(params):
            raise ValueError(
                f"{self}: the parameters must have at least one array; got {params!r}. Pass the model's pytree, or a "
                "function of a key that returns it."
            )
        self._check_names(params)

        def layout(path: Any, x: Any) -> LeafLayout:
            return self._layout(path_name(path), x, mesh)

        return jax.tree_util.tree_map_with_path(layout, params, is_leaf=is_padded)

    def placement(self, params: Any, mesh: Any) -> Placement:
        """Where this plan puts each leaf of `params` (arrays or their shapes), and the batch.

        Raises:
            ValueError: as `layouts`.
        """
        return Placement(self, mesh, self.layouts(params, mesh), self.batch_spec(mesh))

    def _check_names(self, params: Any) -> None:
        """Refuses a strategy that names a leaf or subtree which the parameters do not have, and stages of no stack."""
        leaves_with_path = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_padded)
        paths = [path_name(path) for path, _ in leaves_with_path]
        leaves = quote(paths[:8])
        if len(paths) > 8:
            leaves += ", ..."
        for strategy in self.strategies:
            # With a misspelled name no leaf would be lazy, and nothing would say so: the loss gathers plain arrays as
            # they are.
            for name in strategy.names:
                if not any(is_in_subtrees(path, (name,)) for path in paths):
                    raise ValueError(
                        f"{strategy.name}: every name must be a leaf or subtree of the parameters; got {name!r} for "
                        f"the leaves {leaves}. Name one of them, or none."
                    )
            if strategy.stages is None:
                continue
            # Without its stack every device along the axis would hold all leaves, and do the same work.
            stack = strategy.stages.stack
            if not any(is_in_subtrees(path, (stack,)) for path in paths):
                raise ValueError(
                    f"{strategy.name}: the parameters must have the stack {stack!r}, of which it splits the layers; "
                    f"got the leaves {leaves}. Pass stack=, the entry with the layers, or leave it out of the plan."
                )

    def split_leaf(self, path: str, x: Any, mesh: Mesh) -> list[tuple[Strategy, Split | str]]:
        """Says which dim of this leaf each strategy splits, or why it does not split it.

        Every strategy gets the shape that the strategies before it leave. Take a 16x8 leaf under `chain(tp("model",
        rules), fsdp("data"))`, with model=2 and data=4. tp gets [16, 8] and splits dim 1. fsdp gets [16, 4] with dim 1
        marked as split, and splits dim 0.
        """
        shape = tuple(jnp.shape(x))
        dtype = jnp.result_type(x)
        automatic = frozenset(split_dims(self._automatic_spec(path)))
        dims = frozenset[int]()
        stack = False
        decisions: list[tuple[Strategy, Split | str]] = []
        for strategy in self.strategies:
            if strategy.place is None:
                continue
            devices = count_devices(mesh, strategy.axes)
            answer = strategy.place(Leaf(path, shape, dtype, devices, dims, stack, automatic))
            split = self._complete(strategy, path, len(shape), answer, mesh)
            decisions.append((strategy, split))
            if isinstance(split, str):
                continue
            # The next strategy gets the shape of a part, and splits it further.
            shape = _split_shape(shape, split, mesh)
            dims |= {split.dim}
            stack = stack or split.stack
        return decisions

    def _complete(self, strategy: Strategy, path: str, ndim: int, answer: Any, mesh: Mesh) -> Split | str:
        """The answer of a placement rule, checked, with the axes and the algorithms of its strategy filled in."""
        if answer is not None and not isinstance(answer, Split | str):
            raise TypeError(
                f"{strategy.name}: place must return a Split, the reason why a leaf stays whole, or None; got "
                f"{answer!r} for leaf {path}. Return for example Split(dim=0)."
            )
        if isinstance(answer, str) or answer is None:
            return answer or "left whole"
        dim = dim_of(f"{strategy.name}: leaf {path}", answer.dim, ndim)
        # The gradient of a gathered weight has the shape of the whole: something must bring it back to that of the
        # part.
        if (answer.gather == "never") != (answer.scatter == "never"):
            raise ValueError(
                f"{strategy.name}: a split must gather the weight and scatter its gradient, or neither; got "
                f"gather={answer.gather!r} with scatter={answer.scatter!r} for leaf {path}. Pass 'never' for "
                "both if the loss gets the part, else for none."
            )
        # Secondary axes are major, so that gathering over the other axes gives one contiguous part of the dim.
        axes = list(answer.secondary)
        axes += [axis for axis in strategy.axes if axis not in answer.secondary]
        if answer.gather != "never":  # over one device nothing is gathered, nor does the batch vary
            axes = [axis for axis in axes if mesh.shape[axis] > 1]
        scatter = "step" if strategy.accumulated and answer.once else answer.scatter
        return answer._replace(
            dim=dim, scatter=scatter, axes=tuple(axes), gather_by=strategy.gather, reduce_by=strategy.reduce
        )

    @typed
    def describe(self, params: Arrays, mesh: Mesh | None = None, manual: Axis | None = None) -> str:
        """A line for each leaf: its layouts, bytes per device, and why; `sk.describe(plan, params)` calls this."""
        return str(self.table(params, mesh, manual))

    def table(self, params: Any, mesh: Mesh | None = None, manual: Axis | None = None) -> PlanTable:
        """The lines of `describe`, as rows."""
        mesh = mesh or mesh_of(params)
        # As `init` reads them: how the partitioner splits a leaf is known from the array alone.
        plan = record_automatic_splits(self, params, manual_axes("describe", manual, self, mesh))
        layouts = jax.tree.leaves(plan.layouts(params, mesh), is_leaf=is_layout)
        leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_padded)
        rows = []
        for (path, x), layout in zip(leaves, layouts, strict=True):
            name = path_name(path)
            rows.append(LeafRow(name, x, layout, plan.split_leaf(name, x, mesh)))
        return make_plan_table(str(plan), rows, mesh)

    def _layout(self, path: str, x: Any, mesh: Mesh) -> LeafLayout:
        """Where a leaf is at rest, in the loss and in the update, from the decisions of all strategies.

        The 16x8 leaf of `split_leaf` rests as [4, 4] on each device, P("data", "model"). The loss gets [16, 4],
        P(None, "model"): fsdp gathers dim 0 once per step, and tp never gathers dim 1. Its gradient [16, 4] is
        scattered to [4, 4], where the optimizer updates it.
        """
        decisions = dict(self.split_leaf(path, x, mesh))
        splits = []
        rows: tuple[int, ...] = ()
        for split in decisions.values():
            if isinstance(split, Split):
                splits.append(split)
                rows = rows or split.rows
        varying_axes: list[str] = []
        sums = []
        for strategy in self.strategies:
            # Its Split says how it reduces this gradient, or that it need not.
            if isinstance(decisions.get(strategy), Split):
                continue
            if strategy.varies:
                varying_axes += [axis for axis in strategy.axes if mesh.shape[axis] > 1]
            # Plain sums need no entry: the step sums a gradient over all axes that it still varies over, in one
            # collective.
            if strategy.reduce is not PLAIN and strategy.reduce.all_reduce:
                sums.append((strategy.axes, strategy.reduce))
        layout = LeafLayout(
            align_times(splits),
            varies=tuple(varying_axes),
            rows=rows,
            sums=tuple(sums),
            automatic=self._automatic_spec(path),
        )
        # After `align_times`, which may have moved a reduction into the layers.
        check_feedback(path, layout)
        # The update splits each dim over all axes that the state and the loss split it over: a dim that divides there
        # always divides.
        stored = stored_shape(tuple(jnp.shape(x)), layout.rows)
        return layout._replace(padded=padding(stored, layout.in_update().spec, mesh))

    def _automatic_spec(self, path: str) -> PartitionSpec:
        return dict(self.automatic).get(path, PartitionSpec())

    def check(self, mesh: Mesh) -> None:
        """Raises an error if the plan uses an axis that the mesh does not have."""
        for strategy in self.strategies:
            for axis in strategy.axes:
                if axis not in mesh.shape:
                    raise ValueError(
                        f"{strategy.name}: the mesh has no axis {axis!r}; its axes are "
                        f"{format_sizes(mesh.shape.items())}. Use one of them, or add the axis to make_mesh."
                    )
            # Rules may name the axes of other strategies. A misspelled one would belong to none, and leave its leaf
            # whole.
            for path, axis in strategy.rule_axes:
                if axis not in mesh.shape:
                    raise ValueError(
                        f"{strategy.name}: the rules may only name axes of the mesh, "
                        f"{format_sizes(mesh.shape.items())}; they split leaf {path} over {axis!r}. Name those alone, "
                        f"also in the metadata behind them, or add the axis to make_mesh, as {axis}=1 if nothing is "
                        "to be split over it."
                    )


@dataclass(frozen=True, eq=False)
class Placement:
    """Where a plan puts the leaves of some parameters, and the batch: read from the plan once, and handed on."""

    plan: Plan
    mesh: Any
    layouts: Any  # the LeafLayout of each leaf
    batch: PartitionSpec  # the spec of the batch

    @cached_property
    def rest(self) -> Any:
        """The spec of each leaf in the state."""
        return map_layouts(lambda layout: layout.rest, self.layouts)

    @cached_property
    def update(self) -> Any:
        """The spec of each gradient, and of what mirrors the leaf in the optimizer's state."""
        return map_layouts(lambda layout: layout.update, self.layouts)

    @cached_property
    def at_rest(self) -> Any:
        """How the state stores each leaf, as a Storage."""
        return map_layouts(LeafLayout.at_rest, self.layouts)

    @cached_property
    def in_update(self) -> Any:
        """How gradients and optimizer state are stored, as a Storage for each leaf."""
        return map_layouts(LeafLayout.in_update, self.layouts)

    @cached_property
    def part_in_loss(self) -> str:
        """The path of a leaf of which the loss gets a part, as under tp, ep and pp; "" if it gets every leaf whole."""
        leaves = jax.tree_util.tree_leaves_with_path(self.layouts, is_leaf=is_layout)
        for path, layout in leaves:
            if len(layout.seen):
                return path_name(path)
        return ""


def _list_axes(strategies: Sequence[Strategy]) -> tuple[str, ...]:
    axes: list[str] = []
    for strategy in strategies:
        axes += strategy.axes
    return tuple(axes)


def _split_shape(shape: tuple[int, ...], split: Split, mesh: Mesh) -> tuple[int, ...]:
    """The shape of a device's part of a leaf, with the padding that the split allows."""
    spec = PartitionSpec(*[None] * split.dim, split.axes)
    shape = stored_shape(shape, split.rows)
    if split.pad:
        shape = padded_shape(shape, spec, mesh)
    return local_shape(shape, spec, mesh)


@typed
def strategy(
    name: str,
    axis: Axis,
    *,
    rank: int = 3,
    batch_dim: int | None = None,
    place: Callable[[Any], Any] | None = None,
    varies: bool = False,
    names: tuple[str, ...] = (),
    rules: Any = None,
    gather: Algorithm = PLAIN,
    reduce: Algorithm = PLAIN,
) -> Plan:
    """Makes a plan from a strategy of your own; `chain` joins it with others.

    Layout: `params[.., D, ..] -> params[.., D_a, ..]` on the dim `place` names for each leaf

    Args:
        name: the function's name, for descriptions and errors.
        axis: mesh axis or tuple of axes.
        rank: its order on a dim that several strategies split, major first: 0 inside the layer (as tp, pp, ep), 1 as
            fsdp, 2 as zero1, 3 if it splits no leaf.
        batch_dim: the dim of the batch it splits. None: all its devices get the same examples.
        place: your placement rule, `place(leaf)`. The leaf has a `path`, a `shape` after the strategies before, a
            `dtype`, `ways` (devices of the axes) and `split` (dims that others split). Return a Split, or why the
            leaf stays whole, in a few words. None keeps every leaf whole.
        varies: whether its devices use whole leaves on different data, for another reason than the batch.
        names: leaves or subtrees the user of your strategy names; each must be among the parameters.
        rules: the rules the user of your strategy passes. In a pytree of PartitionSpecs, the leaves split over
            `axis` must be among the parameters, and the axes must be axes of the mesh. A function is not checked.
        gather: the algorithm that gathers weights.
        reduce: the algorithm that reduces gradients.

    Returns:
        A plan for `make_train_step`.

    Raises:
        TypeError: an argument of another type, or a tree of something other than specs.
        ValueError: an axis named twice, or over which an algorithm cannot run; a negative rank or dim; specs that never
            name `axis`.

    Cost: each Split says when `gather` and `reduce` run.

    Example:
        >>> rows = lambda leaf: sk.Split(0, gather="step", scatter="step") if leaf.shape[0] % leaf.ways == 0 else "odd"
        >>> plan = sk.strategy("rows", "model", rank=1, batch_dim=0, place=rows)
        >>> layout = plan.layouts({"w": jnp.ones((8, 3))}, mesh)["w"]
        >>> tuple(layout.rest), tuple(layout.seen)
        (('model',), ())
    """
    axes = axis_names(name, axis)
    at_least(name, 0, rank=rank, batch_dim=batch_dim)
    # Only whether it runs over these axes: which of its kernels are needed depends on the leaves.
    for algorithm in (gather, reduce):
        if algorithm.fits:
            algorithm.fits(name, axes)
    rule_axes = axes_of_rules(name, axes, rules)
    # A leaf that the specs split must be among the parameters, as one that the user names must.
    paths = [path for path, rule_axis in rule_axes if rule_axis in axes]
    part = Strategy(
        f"{name}({quote(axes)})",
        axes,
        rank,
        batch_dim,
        place,
        varies,
        names=(*names, *dict.fromkeys(paths)),
        gather=gather,
        reduce=reduce,
        rule_axes=rule_axes,
    )
    return Plan((part,))


@typed
def chain(*plans: Plan) -> Plan:
    """Joins plans over different axes into one, in any order.

    Args:
        *plans: plans such as `dp("data")` and `fsdp("fsdp")`.

    Returns:
        One plan. If several plans split the same dim of a leaf, their axes are in order of rank: tp, pp and ep, then
            fsdp, then zero.

    Raises:
        ValueError: no plan, or an axis that two plans use.

    Example:
        >>> plan = sk.chain(sk.dp("data"), sk.fsdp("model", min_size=1))
        >>> tuple(plan.layouts({"w": jnp.ones((8, 4))}, mesh)["w"].rest)
        ('model',)
        >>> tuple(plan.batch_spec(mesh))
        (('data', 'model'),)
    """
    strategies: list[Strategy] = []
    for plan in plans:
        strategies += plan.strategies
    if not strategies:
        raise ValueError("chain: at least one plan is needed; got none. Pass for example dp('data').")
    users: dict[str, str] = {}
    for strategy in strategies:
        for axis in strategy.axes:
            if axis in users:
                raise ValueError(
                    f"chain: axis {axis!r} is used by {users[axis]} and by {strategy.name}. A mesh axis serves one "
                    "strategy; give one of them another axis."
                )
            users[axis] = strategy.name
    # By name too, so that a plan is the same whatever the order in which its parts are passed.
    strategies.sort(key=lambda strategy: (strategy.rank, strategy.name))
    return Plan(tuple(strategies))
