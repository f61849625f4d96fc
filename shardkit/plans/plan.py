"""How mesh axes are used, as data: the splits of each leaf, and one spec for the batch.

A strategy says which dim of each leaf it splits, when the weight is gathered, and when its gradient is scattered (the
table of `Split`). The layouts at `rest` (in the state), as `seen` (in the GradFn) and for the `update` (gradients and
optimizer state) follow. `enter` and `leave` (in `on_device/seam.py`) read no more but the batch's
spec, so a new strategy is a new file with a placement rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from shardkit._arguments.checks import Axis, at_least, axis_names, dim_of, quoted, sized
from shardkit._arguments.typed import Arrays, typed
from shardkit.collectives.algorithms import PLAIN, Algorithm
from shardkit.meshes.layout import canonical, local_shape, path_name, split_dims
from shardkit.plans.describe import Planned, PlanTable, mesh_of, plan_table
from shardkit.plans.dim_rules import axes_of_rules, in_subtrees
from shardkit.plans.manual import leaving_automatic, manual_axes
from shardkit.plans.placement import Leaf, LeafLayout, Split, Strategy, check_feedback, in_order, is_layout, map_layouts
from shardkit.plans.storage import in_rows, is_padded, padded_shape, padding


class Plan(NamedTuple):
    """Strategies in the order of their rank: `dp` and the like make a plan of one, `chain` joins plans.

    Attributes:
        strategies: how the axes are used.
        automatic: by path, how the partitioner splits leaves over axes that the plan does not use.
    """

    strategies: tuple[Strategy, ...]
    automatic: tuple[tuple[str, PartitionSpec], ...] = ()

    def __str__(self) -> str:
        return " + ".join(s.name for s in self.strategies)

    @property
    def axes(self) -> tuple[str, ...]:
        """Every mesh axis the plan uses."""
        return tuple(axis for s in self.strategies for axis in s.axes)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh axes that split the batch."""
        return tuple(axis for s in self.strategies if s.batch_dim is not None for axis in s.axes)

    def accumulated(self) -> Plan:
        """This plan in a step of several microbatches."""
        return self._replace(strategies=tuple(s._replace(accumulated=True) for s in self.strategies))

    @typed
    def batch_spec(self, mesh: Mesh) -> PartitionSpec:
        """How the batch is split: for each dim its axes, in the mesh's order; a tuple of axes keeps its own.

        Axes of size 1 are left out, so that no collective over one device is traced.
        """
        self.check(mesh)
        splits = [s for s in self.strategies if s.batch_dim is not None]
        splits.sort(key=lambda s: mesh.axis_names.index(s.axes[0]))
        entries = [
            tuple(axis for s in splits if s.batch_dim == dim for axis in s.axes if mesh.shape[axis] > 1)
            for dim in range(max((s.batch_dim or 0 for s in splits), default=-1) + 1)
        ]
        return canonical(PartitionSpec(*entries))

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
        """Refuses a strategy that names a leaf or subtree which the parameters do not have."""
        paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_padded)]
        for strategy, name in [(s.name, name) for s in self.strategies for name in s.names]:
            if not any(in_subtrees(path, (name,)) for path in paths):
                raise ValueError(
                    f"{strategy}: every name must be a leaf or subtree of the parameters; got {name!r} for the leaves "
                    f"{quoted(paths[:8])}{', ...' * (len(paths) > 8)}. Name one of them, or none."
                )

    def placed(self, path: str, x: Any, mesh: Mesh) -> Iterator[tuple[Strategy, Split | str]]:
        """Where each strategy that splits leaves splits this one, or why it does not."""
        left, taken, stack = tuple(jnp.shape(x)), frozenset[int](), False
        automatic = frozenset(split_dims(self._automatic(path)))
        for s in self.strategies:
            if s.place is None:
                continue
            ways = math.prod(mesh.shape[axis] for axis in s.axes)
            split = s.place(Leaf(path, left, jnp.result_type(x), ways, taken, stack, automatic))
            if split is not None and not isinstance(split, Split | str):
                raise TypeError(
                    f"{s.name}: place must return a Split, the reason why a leaf stays whole, or None; got {split!r} "
                    f"for leaf {path}. Return for example Split(dim=0)."
                )
            split = split or "left whole"
            if not isinstance(split, str):
                dim = dim_of(f"{s.name}: leaf {path}", split.dim, len(left))
                axes = (*split.secondary, *(axis for axis in s.axes if axis not in split.secondary))
                if split.gather != "never":  # over one device nothing is gathered, nor does the batch vary
                    axes = tuple(axis for axis in axes if mesh.shape[axis] > 1)
                if (split.gather == "never") != (split.scatter == "never"):
                    raise ValueError(
                        f"{s.name}: a split must gather the weight and scatter its gradient, or neither; got "
                        f"gather={split.gather!r} with scatter={split.scatter!r} for leaf {path}. Pass 'never' for "
                        "both if the loss gets the part, else for none."
                    )
                split = split._replace(dim=dim, axes=axes, gather_by=s.gather, reduce_by=s.reduce)
                split = split._replace(scatter="step") if s.accumulated and split.once else split
            yield s, split
            if not isinstance(split, str):
                spec = PartitionSpec(*([None] * split.dim), axes)
                left = in_rows(left, split.rows)
                left = local_shape(padded_shape(left, spec, mesh) if split.pad else left, spec, mesh)
                taken, stack = taken | {split.dim}, stack or split.stack

    @typed
    def describe(self, params: Arrays, mesh: Mesh | None = None, manual: Axis | None = None) -> str:
        """A line for each leaf: its layouts, bytes per device, and why; `sk.describe(plan, params)` calls this."""
        return str(self.table(params, mesh, manual))

    def table(self, params: Any, mesh: Mesh | None = None, manual: Axis | None = None) -> PlanTable:
        """What `describe` prints, as rows."""
        mesh = mesh or mesh_of(params)
        plan = leaving_automatic(self, params, manual_axes("describe", manual, self, mesh))
        layouts = jax.tree.leaves(plan.layouts(params, mesh), is_leaf=is_layout)
        leaves = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_padded)[0]
        named = [(path_name(path), x) for path, x in leaves]
        planned = [Planned(*n, each, list(plan.placed(*n, mesh))) for n, each in zip(named, layouts, strict=True)]
        return plan_table(str(plan), planned, mesh)

    def _layout(self, path: str, x: Any, mesh: Mesh) -> LeafLayout:
        found = dict(self.placed(path, x, mesh))
        splits = [split for split in found.values() if isinstance(split, Split)]
        whole = [s for s in self.strategies if not isinstance(found.get(s), Split)]
        layout = LeafLayout(
            in_order(splits),
            varies=tuple(axis for s in whole if s.varies for axis in s.axes if mesh.shape[axis] > 1),
            rows=next((split.rows for split in splits if split.rows), ()),
            sums=tuple((s.axes, s.reduce) for s in whole if s.reduce is not PLAIN and s.reduce.all_reduce),
            automatic=self._automatic(path),
        )
        check_feedback(path, layout)
        stored = in_rows(tuple(jnp.shape(x)), layout.rows)
        return layout._replace(padded=padding(stored, layout.in_update().spec, mesh))

    def _automatic(self, path: str) -> PartitionSpec:
        return dict(self.automatic).get(path, PartitionSpec())

    def check(self, mesh: Mesh) -> None:
        """Refuses a plan that uses an axis which the mesh does not have."""
        for s in self.strategies:
            for axis in s.axes:
                if axis not in mesh.shape:
                    raise ValueError(
                        f"{s.name}: the mesh has no axis {axis!r}; its axes are {sized(mesh.shape.items())}. "
                        "Use one of them, or add the axis to make_mesh."
                    )
            for path, axis in s.rule_axes:
                if axis not in mesh.shape:
                    raise ValueError(
                        f"{s.name}: the rules may only name axes of the mesh, {sized(mesh.shape.items())}; they split "
                        f"leaf {path} over {axis!r}. Name those alone, also in the metadata behind them, or add "
                        f"the axis to make_mesh, as {axis}=1 if nothing is to be split over it."
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
        """How the state stores each leaf, as a Held."""
        return map_layouts(LeafLayout.at_rest, self.layouts)

    @cached_property
    def in_update(self) -> Any:
        """How gradients and optimizer state are stored, as a Held for each leaf."""
        return map_layouts(LeafLayout.in_update, self.layouts)

    @cached_property
    def split_leaf(self) -> str:
        """The path of a leaf of which the loss gets a part, as of tp, ep and pp; "" if it gets every leaf whole."""
        leaves = jax.tree_util.tree_leaves_with_path(self.layouts, is_leaf=is_layout)
        return next((path_name(path) for path, layout in leaves if len(layout.seen)), "")


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
    """A plan with a strategy that you write yourself; `chain` joins it with others.

    Layout: `params[.., D, ..] -> params[.., D_a, ..]` on the dim of each leaf that `place` names

    Args:
        name: the function's name, for descriptions and errors.
        axis: mesh axis or tuple of axes.
        rank: its order on a dim that several strategies split, major first: 0 inside the layer (as tp, pp, ep), 1 as
            fsdp, 2 as zero1; 3 for one that splits no leaf.
        batch_dim: the dim of the batch that it splits; None: all its devices get the same examples.
        place: the placement rule, `place(leaf)` of a leaf's `path`, `shape` after the strategies before, `dtype`,
            `ways` (devices of the axes) and `split` (dims that others split). It returns a Split, or in a few words why
            the leaf stays whole. None keeps every leaf whole.
        varies: whether its devices use the leaves that stay whole on different data, besides that of the batch.
        names: leaves or subtrees that its user named; each must be among the parameters.
        rules: the user's rules. If they are a pytree of PartitionSpecs, the leaves that they split over `axis` must be
            among the parameters, and their axes among those of the mesh; a function is not checked.
        gather: the algorithm that gathers weights.
        reduce: the algorithm that reduces gradients.

    Returns:
        A plan for `make_train_step`.

    Raises:
        TypeError: an argument of another type, or a tree of anything but specs.
        ValueError: an axis named twice, or over which an algorithm cannot run; a negative rank or dim; specs that never
            name `axis`.

    Cost: what the times in each Split say, by `gather` and `reduce`.

    Example:
        >>> rows = lambda leaf: sk.Split(0, gather="step", scatter="step") if leaf.shape[0] % leaf.ways == 0 else "odd"
        >>> plan = sk.strategy("rows", "model", rank=1, batch_dim=0, place=rows)
        >>> layout = plan.layouts({"w": jnp.ones((8, 3))}, mesh)["w"]
        >>> tuple(layout.rest), tuple(layout.seen)
        (('model',), ())
    """
    axes = axis_names(name, axis)
    at_least(name, 0, rank=rank, batch_dim=batch_dim)
    for algorithm in (gather, reduce):
        if algorithm.fits:
            algorithm.fits(name, axes)
    rule_axes = axes_of_rules(name, axes, rules)
    names = (*names, *dict.fromkeys(path for path, each in rule_axes if each in axes))
    made = Strategy(f"{name}({quoted(axes)})", axes, rank, batch_dim, place, varies, names, gather, reduce)
    made = made._replace(rule_axes=rule_axes)
    return Plan((made,))


@typed
def chain(*plans: Plan) -> Plan:
    """Joins plans over different axes into one, in any order.

    Args:
        *plans: plans such as `dp("data")` and `fsdp("fsdp")`.

    Returns:
        One plan. Where several split the same dim of a leaf, their axes are in order of rank: tp, pp and ep, then fsdp,
            then zero.

    Raises:
        ValueError: no plan, or an axis that two plans use.

    Example:
        >>> plan = sk.chain(sk.dp("data"), sk.fsdp("model", min_size=1))
        >>> tuple(plan.layouts({"w": jnp.ones((8, 4))}, mesh)["w"].rest)
        ('model',)
        >>> tuple(plan.batch_spec(mesh))
        (('data', 'model'),)
    """
    parts = [s for plan in plans for s in plan.strategies]
    if not parts:
        raise ValueError("chain: at least one plan is needed; got none. Pass for example dp('data').")
    owner: dict[str, str] = {}
    for s in parts:
        for axis in s.axes:
            if axis in owner:
                raise ValueError(
                    f"chain: axis {axis!r} is used by {owner[axis]} and by {s.name}. A mesh axis serves one strategy; "
                    "give one of them another axis."
                )
            owner[axis] = s.name
    return Plan(tuple(sorted(parts, key=lambda s: (s.rank, s.name))))
