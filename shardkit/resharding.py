"""Arrays moved from one layout to another on the same mesh, by explicit collectives: a training state between plans.

`partitioning/redistribute.py` finds the steps; here they run, leaf by leaf.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit._typed import typed
from shardkit.layout import canonical, check_spec, local_shape, path_name, spec_axes, table
from shardkit.partitioning.array_views import Split
from shardkit.partitioning.placement import Layout, map_layouts
from shardkit.partitioning.plan import Plan
from shardkit.partitioning.redistribute import Redistribution, redistribution
from shardkit.partitioning.run_steps import mesh_apart, parts_of, run_steps
from shardkit.partitioning.storage import Held, as_stored, in_rows, is_padded, padded_shape, padding, stored_array
from shardkit.state import TrainState, optimizer_held

Layouts = Any  # a Plan, or a PartitionSpec or NamedSharding for each leaf


class Move(NamedTuple):
    """How one leaf gets from one layout to another. Bytes are per device.

    Attributes:
        path: the leaf.
        shape: its global shape as the steps see it, padding included.
        dtype: its dtype.
        source: its spec before.
        target: its spec after.
        found: the steps, as a `Redistribution`; its sizes are in elements.
        cut: the shape that the leaf is stored with afterwards: padding that the target does not need is cut off.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    source: PartitionSpec
    target: PartitionSpec
    found: Redistribution
    cut: tuple[int, ...]

    @property
    def sent(self) -> int:
        """Bytes that each device sends."""
        return self.found.sent * self.dtype.itemsize

    @property
    def least(self) -> int:
        """Bytes that some device must receive: the part of its new shard that it does not hold."""
        return self.found.least * self.dtype.itemsize

    @property
    def peak(self) -> int:
        """Bytes of the two largest consecutive shards."""
        return self.found.peak * self.dtype.itemsize


class Moves(NamedTuple):
    """The steps of `reshard`, leaf by leaf; `print` them."""

    leaves: tuple[Move, ...]

    @property
    def sent(self) -> int:
        """Bytes that each device sends."""
        return sum(each.sent for each in self.leaves)

    @property
    def least(self) -> int:
        """Bytes that each device must receive, summed over the leaves."""
        return sum(each.least for each in self.leaves)

    def __str__(self) -> str:
        rows = [("leaf", "from", "to", "steps", "sent/device", "at least", "two shards")]
        for each in self.leaves:
            steps = "; ".join(step.told(each.found.dims) for step in each.found.steps) or "none"
            sizes = (f"{each.sent:,}", f"{each.least:,}", f"{each.peak:,}")
            rows.append((each.path, str(each.source), str(each.target), steps, *sizes))
        return f"{table(rows)}\n{self.sent:,} bytes sent by each device, at least {self.least:,}"


@typed
def reshard(
    tree: Any, source: Layouts, target: Layouts, *, mesh: Mesh, donate: bool = False, piece_bytes: int = 2**24
) -> Any:
    """Moves arrays from one layout to another on the same mesh, by explicit collectives; no bit of them changes.

    Layout: `X[A_a, B] -> X[A, B_a]`, and every other pair of layouts
    Args:
        tree: a TrainState, or a pytree of global arrays on the mesh; leaves that `uneven="pad"` padded may be among
            them.
        source: the layout that they have: a Plan, or a PartitionSpec or NamedSharding for all leaves or for each (a
            prefix of the tree). For a TrainState under a plan, optimizer state is laid out as the plan's `update`.
        target: the layout that they get, likewise.
        mesh: the mesh of both.
        donate: delete each leaf of `tree` as soon as it is moved, so that source and target are never both whole in
            memory.
        piece_bytes: a leaf with larger shards moves piece by piece, along a dim that no step touches, so that a device
            holds little more than the two shards while it moves.

    Returns:
        The same tree with every leaf in its new layout, stored as the target plan stores it.

    Raises:
        ValueError: a leaf that is not laid out as `source` says or does not divide under `target`, a layout with an
            axis that the mesh does not have, or a leaf that both plans pad, but differently, or store in another order
            of layers.
        TypeError: layouts of another kind.

    Cost: `reshard_steps` prints it. Each leaf is one program, so that a device holds at most two shards of one leaf
    beside the tree: those before and after a step. Slices send nothing, one all_to_all moves all axes that change
    dims, an all_gather comes last. Where no axis goes to where another one comes from, each device sends exactly the
    part of its new shard that it does not hold, and no way to move the data sends less; otherwise at most about twice
    as much.

    Example:
        >>> params = sk.shard({"w": np.arange(32.0).reshape(8, 4)}, mesh, P("model"))
        >>> moved = sk.reshard(params, P("model"), P(None, "model"), mesh=mesh)
        >>> moved["w"].sharding.spec, bool((moved["w"] == params["w"]).all())
        (P(None, 'model'), True)

    Source: Rink et al., Memory-efficient array redistribution through portable collective communication (2021,
    arXiv:2112.01075).
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_padded)
    befores, afters = _both("reshard", tree, source, target, mesh)
    moves = _moves("reshard", tree, befores, afters, mesh)
    for x, move in zip(leaves, moves, strict=True):
        _check_placed(stored_array(x), move, mesh)
    moved = []
    for x, move, (after, _) in zip(leaves, moves, afters, strict=True):
        array = _moved(stored_array(x), move, mesh, piece_bytes, donate)
        moved.append(as_stored(array, padding(in_rows(x.shape, after.rows), after.spec, mesh), after.rows))
    return jax.tree.unflatten(structure, moved)


@typed
def reshard_steps(tree: Any, source: Layouts, target: Layouts, *, mesh: Any) -> Moves:
    """The collectives of `reshard`, leaf by leaf, with the bytes that each device sends, without moving anything.

    Args:
        tree: as for `reshard`; `jax.ShapeDtypeStruct`s are enough.
        source: as for `reshard`.
        target: as for `reshard`.
        mesh: the mesh; an AbstractMesh is enough.

    Returns:
        Moves: `print` it, or read its leaves; `sent` is what the census of `reshard` counts.

    Raises:
        ValueError: as `reshard`.

    Example:
        >>> print(sk.reshard_steps({"w": jnp.ones((8, 4))}, P("model"), P(None, "model"), mesh=mesh))
        leaf  from         to                steps                                 sent/device  at least  two shards
        w     P('model',)  P(None, 'model')  all_to_all model from dim 0 to dim 1  24           24        64
        24 bytes sent by each device, at least 24
    """
    return Moves(_moves("reshard_steps", tree, *_both("reshard_steps", tree, source, target, mesh), mesh))


Stored = list[tuple[Held, bool]]  # for each leaf how it is stored, and whether a plan says so, which may pad it


def _both(where: str, tree: Any, source: Layouts, target: Layouts, mesh: Any) -> tuple[Stored, Stored]:
    return _held(where, "source", source, tree, mesh), _held(where, "target", target, tree, mesh)


def _held(where: str, name: str, layouts: Layouts, tree: Any, mesh: Any) -> Stored:
    if isinstance(layouts, Plan):
        if not isinstance(tree, TrainState):
            return [(each, True) for each in jax.tree.leaves(map_layouts(Layout.at_rest, layouts.layouts(tree, mesh)))]
        each = layouts.layouts(tree.params, mesh)
        rest, update = map_layouts(Layout.at_rest, each), map_layouts(Layout.in_update, each)
        whole = partial(jax.tree.map, lambda _: Held(PartitionSpec()))
        opt_state = optimizer_held(tree.opt_state, tree.params, update)
        held = TrainState(whole(tree.step), rest, opt_state, whole(tree.key), whole(tree.loss_scale))
        return [(each, True) for each in jax.tree.leaves(held)]

    def spread(layout: Any, part: Any) -> Any:
        spec = _spec(where, name, layout, mesh)
        return jax.tree.map(lambda x: (Held(spec, x.rows if is_padded(x) else ()), False), part, is_leaf=is_padded)

    is_layout = lambda x: isinstance(x, PartitionSpec | NamedSharding)  # noqa: E731
    held = jax.tree.map(spread, layouts, tree, is_leaf=is_layout)
    return jax.tree.leaves(held, is_leaf=lambda x: isinstance(x, tuple) and isinstance(x[0], Held))


def _spec(where: str, name: str, layout: Any, mesh: Any) -> PartitionSpec:
    if isinstance(layout, NamedSharding):
        if layout.mesh != mesh:
            raise ValueError(
                f"{where}: source and target must be layouts on the mesh; got a NamedSharding in {name} over "
                f"{dict(layout.mesh.shape)}, and mesh is {dict(mesh.shape)}. Pass its mesh, or move the array to the "
                "other mesh with jax.device_put."
            )
        return layout.spec
    if not isinstance(layout, PartitionSpec):
        raise TypeError(
            f"{where}: {name} must be a Plan, or a PartitionSpec or NamedSharding for each leaf; got {layout!r}. Pass "
            "for example P('model')."
        )
    return layout


def _moves(where: str, tree: Any, befores: Stored, afters: Stored, mesh: Any) -> tuple[Move, ...]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_padded)
    return tuple(
        _move(f"{where}: leaf {path_name(path)}", path_name(path), x, before, after, mesh)
        for (path, x), before, after in zip(leaves, befores, afters, strict=True)
    )


def _move(where: str, path: str, x: Any, before: tuple[Held, bool], after: tuple[Held, bool], mesh: Any) -> Move:
    """The steps of one leaf; the padding of either layout counts."""
    if before[0].rows != after[0].rows:
        raise ValueError(
            f"{where} is stored in the order of the stages of a pipeline, which source and target do not share. Pass "
            "unpadded(...) of it to the init of the other plan."
        )
    natural = in_rows(tuple(x.shape), before[0].rows)
    shapes = []
    for held, by_plan in (before, after):
        check_spec(where, held.spec, mesh, len(natural))
        if not by_plan and not is_padded(x):
            local_shape(natural, held.spec, mesh)  # refuses what does not divide
        shapes.append(padded_shape(natural, held.spec, mesh))
    for dim, (size, a, b) in enumerate(zip(natural, *shapes, strict=True)):
        if a != b and size not in (a, b):
            raise ValueError(
                f"{where}: dim {dim} of {size} is padded to {a} by source and to {b} by target, which would move every "
                "shard. Pass unpadded(...) of it to the init of the other plan."
            )
    stored = tuple(jnp.shape(stored_array(x)))
    if stored != shapes[0]:
        raise ValueError(
            f"{where} must be stored as source says, with the shape {shapes[0]}; got {stored}. Pass the plan that made "
            "it as source."
        )
    shape = tuple(map(max, *shapes)) if natural else ()
    first, last = canonical(before[0].spec), canonical(after[0].spec)
    found = redistribution(shape, _split(first, len(shape)), _split(last, len(shape)), tuple(mesh.shape.items()))
    return Move(path, shape, jnp.result_type(stored_array(x)), first, last, found, shapes[1])


def _split(spec: PartitionSpec, ndim: int) -> Split:
    axes = spec_axes(spec)
    return (*axes, *[()] * (ndim - len(axes)))


def _check_placed(x: Any, move: Move, mesh: Mesh) -> None:
    """Refuses an array whose layout is not the source: jax would move it silently."""
    if isinstance(x, jax.core.Tracer):
        return
    sharding = getattr(x, "sharding", None)
    if sharding is None or not sharding.is_equivalent_to(NamedSharding(mesh, move.source), x.ndim):
        found = sharding.spec if isinstance(sharding, NamedSharding) else sharding or type(x).__name__
        raise ValueError(
            f"reshard: leaf {move.path} must be laid out on the mesh as source says, {move.source}; got "
            f"{found}. Pass the layout that it has as source, or place it with shard."
        )


def _moved(x: Any, move: Move, mesh: Mesh, piece_bytes: int, donate: bool) -> Any:
    if move.source == move.target and x.shape == move.cut:
        return x
    moved = _program(mesh, move._replace(path=""), piece_bytes)(x)
    if donate and not isinstance(x, jax.core.Tracer):
        x.delete()
    return moved


@lru_cache(maxsize=1024)
def _program(mesh: Any, move: Move, piece_bytes: int) -> Any:
    """The jitted program that moves one leaf; leaves that are alike share it."""
    parts = dict(move.found.parts)

    def spec(spec: PartitionSpec) -> PartitionSpec:  # an axis of size 1 would have to be gathered to be left
        dims = [[axis for axis in axes if mesh.shape[axis] > 1] for axes in spec_axes(spec)]
        return PartitionSpec(*(tuple(part for axis in axes for part in parts_of(axis, parts)) for axes in dims))

    def device(x: jax.Array) -> jax.Array:
        whole = local_shape(move.shape, move.source, mesh)
        x = jnp.pad(x, [(0, size - held) for size, held in zip(whole, x.shape, strict=True)])
        varying = tuple(axis for axes in spec_axes(spec(move.target)) for axis in axes)
        x = run_steps(x, move.found, varying, piece_bytes // move.dtype.itemsize)
        x = x.reshape(local_shape(move.shape, move.target, mesh))
        return x[tuple(slice(size) for size in local_shape(move.cut, move.target, mesh))]

    on_mesh = jax.shard_map(
        device, mesh=mesh_apart(mesh, parts), in_specs=spec(move.source), out_specs=spec(move.target)
    )
    return jax.jit(on_mesh, out_shardings=NamedSharding(mesh, move.target))
