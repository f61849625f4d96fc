"""How mesh axes are used, as data: three layouts for each leaf, and one spec for the batch.

A strategy says for each leaf which dimension it splits, in which of three places: at `rest` (how the state holds the
leaf), as `seen` (what the GradFn gets) and for the `update` (gradients and optimizer state). `enter` and `leave` (in
`reshard.py`) read nothing else, so a new strategy is a new file with a placement rule, and no new code here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from shardkit._check import Axis, axis_names, dim_of, quoted, sized
from shardkit._typed import typed
from shardkit.layout import canonical, local_shape, path_name, spec_axes
from shardkit.partitioning.dim_rules import inside
from shardkit.partitioning.storage import Held, Rows, Sizes, in_rows, is_padded, padded_shape, padding


class Layout(NamedTuple):
    """The layouts of one leaf. On each dim, `seen` uses a prefix of the axes of `rest` and of `update`.

    Attributes:
        rest: how the state holds the leaf.
        seen: how the loss uses it.
        update: how gradients and optimizer state are held.
        grad: how its gradient leaves the GradFn, where a handle splits it further than `seen`; None for no handle.
        opens: the axes that opening the handle gathers.
        entry: whether the handle is opened before the loss sees it.
        padded: the dims that are padded where they are split, each with its natural size.
        varies: axes, beyond those of the batch, whose devices use the leaf on different data: its gradient is partial.
        rows: the natural row of each row of dim 0 as it is held, with -1 for one of zeros; () for the natural order.
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
        """How the state holds the leaf, rows and all."""
        return Held(self.rest, self.rows)

    def in_update(self) -> Held:
        """How the update holds it, rows and all."""
        return Held(self.update, self.rows)

    def padding(self, spec: PartitionSpec) -> Sizes:
        """The dims that are padded in this one of the layouts."""
        split = [dim for dim, axes in enumerate(spec_axes(spec)) if axes]
        return tuple((dim, size) for dim, size in self.padded if dim in split)


class Leaf(NamedTuple):
    """What a placement rule is told of a leaf: path, shape that is left to split, dtype, devices along its axes.

    `split` are the dims that other strategies split already; these must not be padded.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    ways: int
    split: frozenset[int] = frozenset()


class Placement(NamedTuple):
    """A strategy's answer for a leaf: the dim that it splits, and in which of the three layouts.

    `handle` has the leaf travel behind a handle, whose gradient leaves the GradFn split: "loss" for one that the loss
    opens, "entry" for one that is opened before the loss sees it. `pad` has a dim that does not divide padded. `rows`
    is the order in which dim 0 is held, as in `Layout`, and `note` what a description adds of it.
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
        name: how it is written, `dp('data')`.
        axes: the mesh axes it uses.
        rank: its order on a dim that several strategies split, major first: 0 inside the layer (tp, pp, ep), 1 fsdp,
            2 zero; 3 for those that split no leaf.
        batch_dim: the dim of the batch that it splits, or None.
        place: the placement rule, which may also say in a few words why it leaves a leaf whole; None keeps every leaf
            whole.
        varies: whether the leaves that it leaves whole are used on data that differ along its axes.
        names: leaves or subtrees that its user named: each must be among the parameters.
    """

    name: str
    axes: tuple[str, ...]
    rank: int
    batch_dim: int | None
    place: Callable[[Leaf], Placement | str | None] | None = None
    varies: bool = False
    names: tuple[str, ...] = ()


class Plan(NamedTuple):
    """Strategies in the order of their rank. Made by `dp` and its like, joined by `chain`."""

    strategies: tuple[Strategy, ...]

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

    def batch_spec(self, mesh: Mesh) -> PartitionSpec:
        """How the batch is split: for each of its dims the axes, in the mesh's order; a tuple of axes keeps its own.

        An axis of size 1 splits nothing; left out, it costs no one-device collective either.
        """
        splits = [s for s in self.strategies if s.batch_dim is not None]
        splits.sort(key=lambda s: mesh.axis_names.index(s.axes[0]))
        entries = [
            tuple(axis for s in splits if s.batch_dim == dim for axis in s.axes if mesh.shape[axis] > 1)
            for dim in range(max((s.batch_dim or 0 for s in splits), default=-1) + 1)
        ]
        return canonical(PartitionSpec(*entries))

    def layouts(self, params: Any, mesh: Mesh) -> Any:
        """The layouts of every leaf of `params` (arrays or their shapes).

        Raises:
            ValueError: a tree without leaves, an axis that the mesh does not have, or a name that is no leaf's.
        """
        self.check(mesh)
        if not jax.tree.leaves(params):
            raise ValueError(
                f"{self}: the parameters must have at least one array; got {params!r}. Pass the model's pytree, or the "
                "function of a key that makes it."
            )
        self._check_names(params)
        layout = lambda path, x: self._layout(path_name(path), x, mesh)  # noqa: E731
        return jax.tree_util.tree_map_with_path(layout, params, is_leaf=is_padded)

    def _check_names(self, params: Any) -> None:
        """Refuses a name in a strategy that is no leaf's."""
        named = [(s.name, name) for s in self.strategies for name in s.names]
        if not named:
            return
        paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_padded)]
        for strategy, name in named:
            if not any(inside(path, (name,)) for path in paths):
                raise ValueError(
                    f"{strategy}: whatever it names must be among the parameters; {name!r} is not, and the leaves are "
                    f"{quoted(paths[:8])}{', ...' * (len(paths) > 8)}. Correct the name, or leave it out."
                )

    def placed(self, path: str, x: Any, mesh: Mesh) -> Iterator[tuple[Strategy, Placement | str]]:
        """What each strategy that splits leaves says of one: where it splits it, or why it does not."""
        left, split = tuple(jnp.shape(x)), frozenset[int]()
        for s in self.strategies:
            if s.place is None:
                continue
            ways = math.prod(mesh.shape[axis] for axis in s.axes)
            place = s.place(Leaf(path, left, jnp.result_type(x), ways, split)) or "left whole"
            if not isinstance(place, str):
                place = place._replace(dim=dim_of(f"{s.name}: leaf {path}", place.dim, len(left)))
            yield s, place
            if not isinstance(place, str):
                spec = PartitionSpec(*([None] * place.dim), s.axes)
                left = in_rows(left, place.rows)
                left = local_shape(padded_shape(left, spec, mesh) if place.pad else left, spec, mesh)
                split |= {place.dim}

    def describe(self, params: Any, mesh: Mesh | None = None) -> str:
        """A line for each leaf: its layouts, the bytes a device holds of it, and why; `sk.describe(plan, params)`."""
        from shardkit.partitioning.describe import describe_plan

        return describe_plan(self, params, mesh)

    def _layout(self, path: str, x: Any, mesh: Mesh) -> Layout:
        shape = tuple(jnp.shape(x))
        kinds = ("rest", "seen", "update", "grad", "opens")
        entries: dict[str, list[tuple[str, ...]]] = {name: [()] * len(shape) for name in kinds}
        handles, varies = set(), []
        rows: Rows = ()
        for s, place in self.placed(path, x, mesh):
            if isinstance(place, str):
                varies += [axis for axis in s.axes if s.varies and mesh.shape[axis] > 1]
                continue
            handles |= {place.handle} - {None}
            rows = rows or place.rows
            used = {name: getattr(place, name) for name in Layout._fields[:3]}
            used |= {"grad": place.seen or place.handle, "opens": place.rest and place.handle}
            for name in kinds:
                if used[name]:
                    entries[name][place.dim] += s.axes
        # A dim is scattered, and gathered, in the order in which it is split: its other strategies join the handle.
        for dim, (grad, update) in enumerate(zip(entries["grad"], entries["update"], strict=True)):
            entries["grad"][dim] = update[: max((update.index(axis) + 1 for axis in grad), default=0)]
            if entries["opens"][dim]:
                entries["opens"][dim] = tuple(a for a in entries["rest"][dim] if a not in entries["seen"][dim])
        specs = {name: canonical(PartitionSpec(*axes)) for name, axes in entries.items()}
        sizes = padding(in_rows(shape, rows), specs["update"], mesh)
        if not handles:
            return Layout(specs["rest"], specs["seen"], specs["update"], padded=sizes, varies=tuple(varies), rows=rows)
        return Layout(**specs, entry=handles == {"entry"}, padded=sizes, varies=tuple(varies), rows=rows)

    def check(self, mesh: Mesh) -> None:
        """Refuses a plan that uses an axis which the mesh does not have."""
        for s in self.strategies:
            for axis in s.axes:
                if axis not in mesh.shape:
                    raise ValueError(
                        f"{s.name}: the mesh has no axis {axis!r}; its axes are {sized(mesh.shape.items())}. "
                        "Use one of them, or add the axis to make_mesh."
                    )


def strategy(
    name: str,
    axis: Axis,
    *,
    rank: int = 3,
    batch_dim: int | None = None,
    place: Callable[[Leaf], Placement | str | None] | None = None,
    varies: bool = False,
    names: tuple[str, ...] = (),
) -> Plan:
    """A plan of one strategy; the fields are those of `Strategy`."""
    axes = axis_names(name, axis)
    return Plan((Strategy(f"{name}({quoted(axes)})", axes, rank, batch_dim, place, varies, names),))


@typed
def chain(*plans: Plan) -> Plan:
    """Joins plans over different axes into one; the order in which they are written does not matter.

    Args:
        *plans: plans such as `dp("data")` and `fsdp("fsdp")`.

    Returns:
        One plan. Where two split the same dim of a leaf, the axes stand in the order of their rank.

    Raises:
        ValueError: no plan, or an axis that two plans use.
    """
    parts = [s for plan in plans for s in plan.strategies]
    if not parts:
        raise ValueError("chain: at least one plan is needed; got none. Write for example chain(dp('data')).")
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


def map_layouts(fn: Callable[..., Any], layouts: Any, *trees: Any) -> Any:
    """`jax.tree.map` with each Layout as a leaf."""
    return jax.tree.map(fn, layouts, *trees, is_leaf=lambda x: isinstance(x, Layout))
