"""How mesh axes are used, as data: three layouts for each leaf, one spec for the batch, and one way in and out.

A strategy says for each leaf which dimension it splits, in which of three places: at `rest` (how the state holds the
leaf), as `seen` (what the GradFn gets) and for the `update` (gradients and optimizer state). `enter` and `leave` read
nothing else, so a new strategy is a new file with a placement rule, and no new code here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from shardkit._check import Axis, axis_names, named, quoted, sized
from shardkit._compat import varying_axes
from shardkit.collectives import all_gather, all_reduce, axis_index, axis_size, reduce_scatter, vary
from shardkit.layout import all_axes, canonical, local_shape, path_name, spec_axes
from shardkit.parallel.handles import Handle, cast


class Layout(NamedTuple):
    """The layouts of one leaf. On each dim, `seen` uses a prefix of the axes of `rest` and of `update`.

    Attributes:
        rest: how the state holds the leaf.
        seen: how the loss uses it.
        update: how gradients and optimizer state are held.
        grad: how its gradient leaves the GradFn, where a handle splits it further than `seen`; None for no handle.
        opens: the axes that opening the handle gathers.
        entry: whether the handle is opened before the loss sees it.
    """

    rest: PartitionSpec
    seen: PartitionSpec
    update: PartitionSpec
    grad: PartitionSpec | None = None
    opens: PartitionSpec = PartitionSpec()
    entry: bool = False


class Leaf(NamedTuple):
    """What a placement rule is told of a leaf: path, shape that is left to split, dtype, devices along its axes."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    ways: int


class Placement(NamedTuple):
    """A strategy's answer for a leaf: the dim that it splits, and in which of the three layouts.

    `handle` has the leaf travel behind a handle, whose gradient leaves the GradFn split: "loss" for one that the loss
    opens, "entry" for one that is opened before the loss sees it.
    """

    dim: int
    rest: bool
    seen: bool
    update: bool
    handle: Literal["loss", "entry"] | None = None


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
    """

    name: str
    axes: tuple[str, ...]
    rank: int
    batch_dim: int | None
    place: Callable[[Leaf], Placement | str | None] | None = None


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
        """How the batch is split: for each of its dims the axes, in the mesh's order.

        An axis of size 1 splits nothing; left out, it costs no one-device collective either.
        """
        dims: dict[int, set[str]] = {}
        for s in self.strategies:
            if s.batch_dim is not None:
                dims.setdefault(s.batch_dim, set()).update(s.axes)
        entries = [
            tuple(axis for axis in mesh.axis_names if axis in dims.get(dim, ()) and mesh.shape[axis] > 1)
            for dim in range(max(dims, default=-1) + 1)
        ]
        return canonical(PartitionSpec(*entries))

    def layouts(self, params: Any, mesh: Mesh) -> Any:
        """The three layouts of every leaf of `params` (arrays or their shapes)."""
        self.check(mesh)
        return jax.tree_util.tree_map_with_path(lambda path, x: self._layout(path_name(path), x, mesh), params)

    def placed(self, path: str, x: Any, mesh: Mesh) -> Iterator[tuple[Strategy, Placement | str]]:
        """What each strategy that splits leaves says of one: where it splits it, or why it does not."""
        left = tuple(jnp.shape(x))
        for s in self.strategies:
            if s.place is None:
                continue
            ways = math.prod(mesh.shape[axis] for axis in s.axes)
            place = s.place(Leaf(path, left, jnp.result_type(x), ways)) or "left whole"
            yield s, place
            if not isinstance(place, str):
                left = local_shape(left, PartitionSpec(*([None] * place.dim), s.axes), mesh)

    def describe(self, params: Any, mesh: Mesh | None = None) -> str:
        """A line for each leaf: its layouts, the bytes a device holds of it, and why; `sk.describe(plan, params)`."""
        from shardkit.parallel.describe import describe_plan

        return describe_plan(self, params, mesh)

    def _layout(self, path: str, x: Any, mesh: Mesh) -> Layout:
        shape = tuple(jnp.shape(x))
        kinds = ("rest", "seen", "update", "grad", "opens")
        entries: dict[str, list[tuple[str, ...]]] = {name: [()] * len(shape) for name in kinds}
        handles = set()
        for s, place in self.placed(path, x, mesh):
            if isinstance(place, str):
                continue
            handles |= {place.handle} - {None}
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
        if not handles:
            return Layout(specs["rest"], specs["seen"], specs["update"])
        return Layout(**specs, entry=handles == {"entry"})

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
) -> Plan:
    """A plan of one strategy; the fields are those of `Strategy`."""
    axes = axis_names(name, axis)
    return Plan((Strategy(f"{name}({quoted(axes)})", axes, rank, batch_dim, place),))


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


def enter(
    params: Any, layouts: Any, batch_axes: tuple[str, ...], compute: Any = jnp.float32, reduce: Any = jnp.float32
) -> Any:
    """From the leaves at rest to what the GradFn sees, inside shard_map: casts, gathers, then marks as varying.

    Every leaf is marked as varying over the batch's axes, so that gradients stay local sums until `leave`. A leaf
    with a handle is gathered when the handle is opened; gathers are in the compute dtype.

    Cost: an all_gather of `rest - seen` for each leaf without a handle.
    """

    def one(layout: Layout, x: jax.Array) -> Any:
        if layout.grad is not None:
            return _handled(layout, x, batch_axes, compute, reduce)
        x = cast(x, compute)
        for dim, axes in _beyond(layout.rest, layout.seen):
            x = all_gather(x, axes, dim=dim)
        return vary(x, batch_axes)

    return map_layouts(one, layouts, params)


def _handled(layout: Layout, x: jax.Array, batch_axes: tuple[str, ...], compute: Any, reduce: Any) -> Handle:
    """A leaf behind its handle: what is held in parts is gathered by opening it, what is whole is given its part."""
    assert layout.grad is not None
    opens, gathers, scatters = all_axes(layout.opens), [], []
    for dim, axes in _beyond(layout.rest, layout.seen):
        if set(axes) & opens:
            gathers.append((dim - x.ndim, tuple(axis for axis in axes if axis in opens)))
        here = tuple(axis for axis in axes if axis not in opens)
        if here:
            x = all_gather(x, here, dim=dim)
    part = x
    for dim, axes in _beyond(layout.grad, layout.seen):
        here = tuple(axis for axis in axes if axis not in opens)
        if here:
            scatters.append((dim - x.ndim, here))
            size = part.shape[dim] // axis_size(here)
            part = lax.dynamic_slice_in_dim(part, axis_index(here) * size, size, dim)
    if scatters:  # its value is never used, and its gradient is a sum
        part = cast(part, reduce)
    whole = vary(x if gathers else cast(x, compute), batch_axes) if scatters else None
    return Handle(vary(part, batch_axes), whole, tuple(gathers), tuple(scatters), compute, reduce, layout.entry)


def leave(grads: Any, layouts: Any, divisor: jax.Array, dtype: Any = jnp.float32) -> Any:
    """From this device's partial sums to the layout of the update, inside shard_map.

    The type says what is still to be summed: a reduce_scatter where the update is split further than what was seen, an
    all_reduce over every other axis over which the gradient still varies. The division comes last, in float32.

    Cost: a reduce_scatter of `update - seen` and one all_reduce of the rest, for each leaf.
    """

    def one(layout: Layout, grad: jax.Array) -> jax.Array:
        grad = grad.astype(dtype)
        for dim, axes in _beyond(layout.update, layout.seen if layout.grad is None else layout.grad):
            grad = _to_shards(grad, axes, dim)
        rest = varying_axes(grad) - all_axes(layout.update)
        if rest:
            grad = all_reduce(grad, tuple(sorted(rest)))
        return grad.astype(jnp.float32) / divisor

    return map_layouts(one, layouts, grads)


def to_rest(params: Any, layouts: Any) -> Any:
    """From updated shards to the leaves at rest, inside shard_map, by all_gathers typed as equal.

    Cost: an all_gather of `update - rest` for each leaf.
    """

    def one(layout: Layout, x: jax.Array) -> jax.Array:
        for dim, axes in _beyond(layout.update, layout.rest):
            x = all_gather(x, axes, dim=dim, replicated=True)
        return x

    return map_layouts(one, layouts, params)


def map_layouts(fn: Callable[..., Any], layouts: Any, *trees: Any) -> Any:
    """`jax.tree.map` with each Layout as a leaf."""
    return jax.tree.map(fn, layouts, *trees, is_leaf=lambda x: isinstance(x, Layout))


def _beyond(longer: PartitionSpec, shorter: PartitionSpec) -> Iterable[tuple[int, tuple[str, ...]]]:
    """The dims on which `longer` splits further than `shorter`, with the axes it adds there."""
    known = spec_axes(shorter)
    for dim, axes in enumerate(spec_axes(longer)):
        prefix = known[dim] if dim < len(known) else ()
        shared = tuple(axis for axis in axes if axis in prefix)
        assert axes[: len(shared)] == shared, f"{named(shared)} must come first in {longer}"
        if axes != shared:
            yield dim, axes[len(shared) :]


def _to_shards(grad: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    if varying_axes(grad) >= set(axes):
        return reduce_scatter(grad, axes, dim=dim)
    for axis in axes:  # a gradient that is already equal along an axis is complete there: take the shard
        if axis in varying_axes(grad):
            grad = reduce_scatter(grad, axis, dim=dim)
        else:
            size = grad.shape[dim] // axis_size(axis)
            grad = lax.dynamic_slice_in_dim(grad, axis_index(axis) * size, size, dim)
    return grad
