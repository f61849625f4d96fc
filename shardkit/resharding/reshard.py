"""Arrays moved from one layout to another by explicit collectives: a training state between plans, or between meshes.

On the same mesh `redistribution.py` finds the steps, in a view of the array (`views.py`), and `moves.py` runs them.
Between meshes that share no device `rounds.py` finds them, and `between_meshes.py` runs them. Here it is done leaf by
leaf.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardkit._arguments.checks import at_least, mesh_in_context
from shardkit._arguments.typed import Arrays, DType, typed
from shardkit.meshes.layout import path_name
from shardkit.plans.plan import Plan
from shardkit.plans.splits import LeafLayout, map_layouts
from shardkit.plans.storage import Storage, is_padded, padding, stored_array, stored_shape, wrap_stored
from shardkit.resharding.across import Transfers, make_transfers, move_across, refuse_tracing
from shardkit.resharding.between_meshes import is_here
from shardkit.resharding.moves import LeafStorage, Move, Moves, make_move, make_program
from shardkit.steps.state import TrainState
from shardkit.steps.state_check import state_storage

Layouts = Any  # a Plan, or a PartitionSpec or NamedSharding for each leaf


@typed
def reshard(
    tree: Arrays,
    source: Layouts,
    target: Layouts,
    *,
    mesh: Mesh | None = None,
    to: Mesh | None = None,
    dtype: DType | None = None,
    check: bool = False,
    donate: bool = False,
    piece_bytes: int = 2**24,
) -> Any:
    """Moves arrays to another layout, on their mesh or on another, by explicit collectives; no bit of them changes.

    Layout: `X[A_a, B] -> X[A, B_a]`, and every other pair of layouts
    Args:
        tree: a TrainState, or a pytree of global arrays on the mesh; leaves that `uneven="pad"` padded may be among
            them.
        source: their layout now: a Plan, or a PartitionSpec or NamedSharding for all leaves or for each (a prefix of
            the tree). For a TrainState under a plan, optimizer state is laid out as the plan's `update`.
        target: their new layout, in the same form.
        mesh: the mesh of both; by default the mesh of `jax.set_mesh`.
        to: the mesh of `target`, if it is another one, which shares no device with `mesh`. Every process with a device
            of either calls `reshard`; where `mesh` has none, leaves may be `jax.ShapeDtypeStruct`s.
        dtype: with `to`, the dtype of floating leaves there; others keep theirs. The narrower of both is sent.
        check: with `to`, compare checksums of every leaf on both meshes, and wait for them.
        donate: delete each leaf of `tree` as soon as it is moved. Memory then never holds all of source and target.
        piece_bytes: a leaf with larger shards moves piece by piece, along a dim no step touches. A device then
            holds little more than the two shards while it moves. With `to`, the pieces that are on their way take at
            most so many bytes on a device, or those of one element.

    Returns:
        The same tree with every leaf in its new layout, stored as the target plan stores it. If a leaf already has its
            new layout, you get the same array.

    Raises:
        ValueError: a leaf with another layout than `source`, or one that does not divide under `target`, a layout with
            an axis the mesh does not have, or a leaf that both plans store in different orders of layers. With `to`, a
            mesh that shares devices with it, or a leaf that is stored padded or in the order of stages.
        TypeError: layouts of another kind.
        RuntimeError: with `check`, a leaf of which a device did not get every bit, the device, and what it lacks.

    Cost: `reshard_steps` prints it. Each leaf is one program. So a device holds the tree, two shards of one leaf
        (before and after a step), and the memory of the collective for a piece. Slices send nothing, one all_to_all
        moves all axes that change dims, an all_gather comes last. A device must receive the missing part of its new
        shard. If no axis moves to a dim that another axis leaves, as between dp, zero1, fsdp and tp over an axis each,
        every device sends exactly this much. If two axes swap dims it sends up to about twice as much, and with three
        axes more, because it permutes whole shards in one step and exchanges parts in another. If padding cuts a dim at
        other places in the two layouts (8 columns over 6 devices, then over 2), the dim is whole, or split elsewhere,
        in between: a device then holds more than two shards of this leaf. With `to` every element crosses once, in the
        narrower dtype, which is the least there is, in as many rounds as the busiest device has units. Copies of a
        shard share the sends; copies in the target receive a part each, and then all_gather them there. The check
        reads both arrays once, and sends 4 bytes for each block where both layouts cut.

    Example:
        >>> params = sk.shard({"w": np.arange(32.0).reshape(8, 4)}, mesh, P("model"))
        >>> moved = sk.reshard(params, P("model"), P(None, "model"), mesh=mesh)
        >>> moved["w"].sharding.spec, bool((moved["w"] == params["w"]).all())
        (P(None, 'model'), True)
        >>> trainer, rollout = sk.make_mesh(mesh.devices[0], model=4), sk.make_mesh(mesh.devices[1], model=4)
        >>> params = sk.shard({"w": np.arange(32.0).reshape(8, 4)}, trainer, P("model"))
        >>> moved = sk.reshard(params, P("model"), P(None, "model"), mesh=trainer, to=rollout, dtype=jnp.bfloat16)
        >>> moved["w"].sharding.mesh == rollout, moved["w"].dtype.name
        (True, 'bfloat16')

    Source: Rink et al., Memory-efficient array redistribution through portable collective communication (2021,
    arXiv:2112.01075).
    """
    mesh = mesh_in_context("reshard", mesh)
    at_least("reshard", 1, piece_bytes=piece_bytes)
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_padded)
    _refuse_options("reshard", mesh, to, dtype=dtype, check=check)
    source_storage = _read_layouts("reshard", "source", source, tree, mesh)
    if _is_other(mesh, to):
        target_storage = _read_layouts("reshard", "target", target, tree, to)
        _check_arrays("reshard", tree)
        refuse_tracing("reshard", leaves, mesh, to, check=check)
        transfers = make_transfers("reshard", tree, source_storage, target_storage, mesh, to, dtype, piece_bytes)
        for x, transfer in zip(leaves, transfers.leaves, strict=True):
            if is_here(mesh):
                _check_layout(x, transfer.path, transfer.source_spec, mesh)
        arrays = move_across(leaves, transfers, donate=donate, check=check)
        return jax.tree.unflatten(structure, arrays)
    target_storage = _read_layouts("reshard", "target", target, tree, mesh)
    moves = _make_moves("reshard", tree, source_storage, target_storage, mesh)
    for x, move in zip(leaves, moves, strict=True):
        _check_layout(stored_array(x), move.path, move.source, mesh)
    results = []
    for x, move, target_leaf in zip(leaves, moves, target_storage, strict=True):
        array = _move_array(stored_array(x), move, mesh, piece_bytes, donate)
        rows = target_leaf.storage.rows
        sizes = padding(stored_shape(x.shape, rows), target_leaf.storage.spec, mesh)
        results.append(wrap_stored(array, sizes, rows))
    return jax.tree.unflatten(structure, results)


@overload
def reshard_steps(
    tree: Arrays, source: Layouts, target: Layouts, *, mesh: Mesh | AbstractMesh | None = None, piece_bytes: int = ...
) -> Moves: ...


@overload
def reshard_steps(
    tree: Arrays,
    source: Layouts,
    target: Layouts,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    to: Mesh | AbstractMesh,
    dtype: DType | None = None,
    piece_bytes: int = ...,
) -> Transfers: ...


@typed
def reshard_steps(
    tree: Arrays,
    source: Layouts,
    target: Layouts,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    to: Mesh | AbstractMesh | None = None,
    dtype: DType | None = None,
    piece_bytes: int = 2**24,
) -> Moves | Transfers:
    """Lists the collectives of `reshard`, leaf by leaf, with the bytes each device sends. It moves nothing.

    Args:
        tree: as for `reshard`; `jax.ShapeDtypeStruct`s are enough.
        source: as for `reshard`.
        target: as for `reshard`.
        mesh: the mesh, or an AbstractMesh; by default the mesh of `jax.set_mesh`.
        to: as for `reshard`, or an AbstractMesh.
        dtype: as for `reshard`.
        piece_bytes: as for `reshard`; only the staging between two meshes depends on it.

    Returns:
        Moves: `print` it, or read its leaves. The census of `reshard` counts the same bytes as `sent`.
            With `to`: of the devices of both meshes together the bytes that cross, and the staging of one. `print` a
            leaf of it for each send, where devices are numbered through both meshes. Its `arrived(before, after)`
            compares the checksums of all leaves on both meshes, and names what is lost.

    Raises:
        ValueError: as `reshard`.

    Example:
        >>> print(sk.reshard_steps({"w": jnp.ones((8, 4))}, P("model"), P(None, "model"), mesh=mesh))
        leaf  from         to                steps                                 sent/device  must receive  two shards
        w     P('model',)  P(None, 'model')  all_to_all model from dim 0 to dim 1  24           24            64
        24 bytes sent by each device; some device must receive 24
    """
    mesh = mesh_in_context("reshard_steps", mesh)
    at_least("reshard_steps", 1, piece_bytes=piece_bytes)
    _refuse_options("reshard_steps", mesh, to, dtype=dtype, check=False)
    source_storage = _read_layouts("reshard_steps", "source", source, tree, mesh)
    if _is_other(mesh, to):
        target_storage = _read_layouts("reshard_steps", "target", target, tree, to)
        _check_arrays("reshard_steps", tree)
        return make_transfers("reshard_steps", tree, source_storage, target_storage, mesh, to, dtype, piece_bytes)
    target_storage = _read_layouts("reshard_steps", "target", target, tree, mesh)
    return Moves(_make_moves("reshard_steps", tree, source_storage, target_storage, mesh))


def _is_other(mesh: Any, to: Any) -> bool:
    """Whether the target is on another mesh."""
    return to is not None and to != mesh


def _refuse_options(where: str, mesh: Any, to: Any, *, dtype: Any, check: bool) -> None:
    """Refuses what is there for another mesh alone."""
    if _is_other(mesh, to):
        return
    for name, value in (("dtype", dtype), ("check", check or None)):
        if value is not None:
            raise ValueError(
                f"{where}: {name} is for a move to another mesh; got {name}={value!r}, and to is "
                f"{'none' if to is None else 'the same mesh'}. Pass to=, or leave {name} out."
            )


def _read_layouts(
    where: str,
    name: str,
    layouts: Layouts,
    tree: Any,
    mesh: Any,
) -> list[LeafStorage]:
    """How each leaf of the tree is stored, from a plan or from layouts, of which one may be for a part of the tree."""
    if isinstance(layouts, Plan):
        if isinstance(tree, TrainState):
            storage_tree = state_storage(f"{where}: {name}", tree, mesh, layouts)
        else:
            storage_tree = map_layouts(LeafLayout.at_rest, layouts.layouts(tree, mesh))
        return [LeafStorage(storage, by_plan=True) for storage in jax.tree.leaves(storage_tree)]

    def spread(layout: Any, subtree: Any) -> list[Any]:
        return [layout] * len(_list_leaves(subtree))

    try:
        per_leaf = jax.tree.map(spread, layouts, tree, is_leaf=_is_layout)
    except ValueError as error:
        raise ValueError(
            f"{where}: {name} must have the structure of the tree, or be a prefix of it; {error}. Pass one layout for "
            "all leaves, or one for each."
        ) from None
    leaf_layouts = jax.tree.leaves(per_leaf, is_leaf=_is_layout)
    leaf_storage = []
    for layout, x in zip(leaf_layouts, _list_leaves(tree), strict=True):
        rows = x.rows if is_padded(x) else ()
        spec = _read_spec(where, name, layout, mesh)
        leaf_storage.append(LeafStorage(Storage(spec, rows), by_plan=False))
    return leaf_storage


def _list_leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=is_padded)


def _is_layout(x: Any) -> bool:
    return isinstance(x, PartitionSpec | NamedSharding)


def _read_spec(where: str, name: str, layout: Any, mesh: Any) -> PartitionSpec:
    if isinstance(layout, NamedSharding):
        if layout.mesh != mesh:
            raise ValueError(
                f"{where}: source and target must be layouts on the mesh; got a NamedSharding in {name} over "
                f"{dict(layout.mesh.shape)}, and mesh is {dict(mesh.shape)}. Pass its mesh; for a target on another "
                "mesh pass that one as to."
            )
        return layout.spec
    if not isinstance(layout, PartitionSpec):
        raise TypeError(
            f"{where}: {name} must be a Plan, or a PartitionSpec or NamedSharding for each leaf; got {layout!r}. Pass "
            "for example P('model')."
        )
    return layout


def _make_moves(
    where: str,
    tree: Any,
    source_storage: Sequence[LeafStorage],
    target_storage: Sequence[LeafStorage],
    mesh: Any,
) -> tuple[Move, ...]:
    _check_arrays(where, tree)
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_padded)
    moves = []
    for (path, x), before, after in zip(leaves, source_storage, target_storage, strict=True):
        name = path_name(path)
        move = make_move(f"{where}: leaf {name}", name, x, before, after, mesh)
        moves.append(move)
    return tuple(moves)


def _check_arrays(where: str, tree: Any) -> None:
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_padded):
        if not hasattr(x, "shape"):
            raise TypeError(
                f"{where}: every leaf must be an array; leaf {path_name(path)} is {x!r}. Pass jnp.asarray of it, or "
                "take it out of the tree."
            )


def _check_layout(x: Any, path: str, source: PartitionSpec, mesh: Mesh) -> None:
    """Refuses an array whose layout is not the source: jax would move it silently."""
    if isinstance(x, jax.core.Tracer):
        return
    sharding = getattr(x, "sharding", None)
    if sharding is not None and sharding.is_equivalent_to(NamedSharding(mesh, source), x.ndim):
        return
    actual = sharding or type(x).__name__
    if isinstance(sharding, NamedSharding):
        actual = sharding.spec
    raise ValueError(
        f"reshard: leaf {path} must be laid out on the mesh as source says, {source}; got "
        f"{actual}. Pass the layout that it has as source, or place it with shard."
    )


def _move_array(x: Any, move: Move, mesh: Mesh, piece_bytes: int, donate: bool) -> Any:
    if move.stays:
        return x
    piece = piece_bytes // move.dtype.itemsize
    for number, leg in enumerate(move.legs):
        run_leg = make_program(mesh, leg, piece)
        result = run_leg(x)
        may_delete = donate or number > 0  # the array between two legs is nobody else's
        if may_delete and not isinstance(x, jax.core.Tracer):
            x.delete()
        x = result
    return x
