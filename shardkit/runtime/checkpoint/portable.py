"""The portable form of a training state, in which checkpoints store it: plain arrays by path, independent of the mesh.

Leaves that are padded or in pipeline-stage order on the devices get their original shape and order of layers. Keys are
stored as their integers, with the name of the implementation in the record.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit.meshes.layout import by_path, canonical, spec_axes
from shardkit.plans.storage import Storage, is_padded, pad_leaves, padding, stored_array, unpadded
from shardkit.runtime.checkpoint.record import Records, is_residual
from shardkit.runtime.data.reading import is_key, to_storable

Leaves = dict[str, Any]
# XLA fails or aborts with the first two, and the files of orbax have none of the others.
_NOT_STORED = ("int1", "uint1", "uint2", "uint4", "float8_e4m3")
_MOVED = 2**26  # bytes of leaves that a restore moves at once


def leaves_of(where: str, state: Any) -> Leaves:
    """The leaves of a state by path, each as stored on the devices; refuses what a checkpoint cannot hold."""
    leaves = by_path(where, jax.tree_util.tree_leaves_with_path(state, is_leaf=is_padded))
    for path, x in leaves.items():
        sharding = getattr(stored_array(x), "sharding", None)
        if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
            raise ValueError(
                f"{where}: every leaf must be sharded over a mesh of devices; leaf {path!r} has {sharding}. Pass the "
                "result of init or init.abstract of make_train_step, over a mesh from make_mesh."
            )
        if str(x.dtype) in _NOT_STORED:
            raise ValueError(
                f"{where}: every leaf must have a dtype that XLA and orbax support; leaf {path!r} is {x.dtype}. "
                "Convert it, for example to uint8."
            )
    return leaves


def leaf_record(x: Any) -> dict[str, Any]:
    """What the record of a checkpoint contains about a leaf: its original shape, dtype, and a key's implementation."""
    shape = list(x.shape)
    if not is_key(x):
        return {"shape": shape, "dtype": str(x.dtype)}
    implementation = {} if isinstance(x, jax.ShapeDtypeStruct) else {"implementation": str(jax.random.key_impl(x))}
    return {"shape": shape, "dtype": "key", **implementation}


def to_portable(leaves: Leaves) -> dict[str, jax.Array]:
    """The leaves in portable form; those that are portable already are the same arrays, not copies.

    A leaf keeps its sharding, except for padded dims, which are whole on every device.
    """
    changed = _not_portable(leaves)
    made: dict[str, jax.Array] = {}
    for some in _by_devices(changed):
        # Not a constraint inside, which jax refuses over Explicit axes.
        layouts = [_portable_sharding(x) for x in some.values()]
        made |= zip(some, jax.jit(_portable, out_shardings=layouts)([*some.values()]), strict=True)
    return leaves | made


def _by_devices(leaves: Leaves) -> list[Leaves]:
    """The leaves in groups on the same devices: those of several workers are on their own."""
    groups: dict[frozenset[Any], Leaves] = {}
    for path, x in leaves.items():
        groups.setdefault(frozenset(stored_array(x).sharding.device_set), {})[path] = x
    return [*groups.values()]


def _not_portable(leaves: Leaves) -> Leaves:
    return {path: x for path, x in leaves.items() if is_padded(x) or is_key(x)}


def _portable(leaves: list[Any]) -> list[jax.Array]:
    return [to_storable(unpadded(x)) for x in leaves]


def _portable_sharding(x: Any) -> NamedSharding:
    sharding = stored_array(x).sharding
    if not is_padded(x):
        return sharding
    uneven = {dim for dim, _ in padding(x.shape, sharding.spec, sharding.mesh)}
    entries = [None if dim in uneven else axes for dim, axes in enumerate(spec_axes(sharding.spec))]
    return NamedSharding(sharding.mesh, canonical(PartitionSpec(*entries)))


def to_read(leaves: Leaves, records: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, dtypes and shardings of the arrays to read for a target's leaves; `records` are the checkpoint's.

    Leaves without a record are not read.
    """

    def one(path: str, x: Any) -> jax.ShapeDtypeStruct:
        shape, dtype = x.shape, x.dtype
        rows = rows_of(path, x, records)
        if rows is not None:
            shape = (rows, *shape[1:])
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding_of_rows(_portable_sharding(x), shape))
        if is_key(x):
            data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=records[path]["implementation"])))
            shape, dtype = shape + data.shape, data.dtype
        return jax.ShapeDtypeStruct(shape, dtype, sharding=_portable_sharding(x))

    return {path: one(path, x) for path, x in leaves.items() if path in records}


def from_portable(arrays: dict[str, jax.Array], leaves: Leaves, records: Mapping[str, Any]) -> Leaves:
    """Portable arrays as the target's leaves are stored on the devices; unchanged ones are the same arrays.

    Leaves that were not read are zeros. Takes the arrays out of `arrays`: some at a time are moved, and then freed.
    """
    resized = {path for path, x in leaves.items() if path not in arrays or rows_of(path, x, records) is not None}
    changed = _not_portable(leaves) | {path: leaves[path] for path in resized}

    def one(path: str, x: Any, array: Any) -> Any:
        if is_key(x):
            return jax.random.wrap_key_data(array, impl=records[path]["implementation"])
        array = jnp.zeros(x.shape, x.dtype) if array is None else array
        if path in resized:  # residuals with the same sum over the rows, in another number of rows
            array = jnp.broadcast_to(array.sum(axis=0, keepdims=True) / x.shape[0], (x.shape[0], *array.shape[1:]))
        if not is_padded(x):
            return array
        sharding = x.array.sharding
        return pad_leaves(array, Storage(sharding.spec, x.rows), sharding.mesh)

    made: Leaves = {}
    for paths in (paths for some in _by_devices(changed) for paths in _together(some)):
        shardings = {path: stored_array(changed[path]).sharding for path in paths}

        def moved(some: dict[str, jax.Array], paths: list[str] = paths) -> Leaves:
            return {path: one(path, changed[path], some.get(path)) for path in paths}

        some = {path: arrays.pop(path) for path in paths if path in arrays}
        made |= jax.block_until_ready(jax.jit(moved, out_shardings=shardings)(some))
    return {path: made[path] if path in made else arrays.pop(path) for path in leaves}


def _together(leaves: Leaves) -> list[list[str]]:
    """The paths, in groups of leaves of at most `_MOVED` bytes, or one that is larger: each group is one program."""
    groups, room = list[list[str]](), 0
    for path, x in sorted(leaves.items(), key=lambda leaf: -_nbytes(leaf[1])):
        if not groups or room < _nbytes(x):
            groups.append([])
            room = _MOVED
        groups[-1].append(path)
        room -= _nbytes(x)
    return groups


def _nbytes(x: Any) -> int:
    return 0 if is_key(x) else math.prod(x.shape) * x.dtype.itemsize


def rows_of(path: str, x: Any, records: Records) -> int | None:
    """How many rows of a residual were saved, if not as many as the target has."""
    saved = records[path]["shape"][0] if is_residual(path) and path in records else None
    return None if saved is None or saved == x.shape[0] else saved


def sharding_of_rows(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """The layout in which to read another number of rows: split over the same axes, by rows or along another dim."""
    entries = [*spec_axes(sharding.spec), *[()] * len(shape)][: len(shape)]
    axes, entries[0] = entries[0], ()
    for dim, size in enumerate(shape):
        if size % math.prod(sharding.mesh.shape[axis] for axis in entries[dim] + axes) == 0:
            entries[dim] += axes
            break
    return NamedSharding(sharding.mesh, canonical(PartitionSpec(*entries)))
