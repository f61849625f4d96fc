"""The portable form of a training state, in which checkpoints store it: plain arrays by path, independent of the mesh.

Leaves that are padded or in pipeline-stage order on the devices get their original shape and order of layers. Keys are
stored as their integers, with the name of the implementation in the record.

For example w of 10 rows over "fsdp" of 4 devices, which a plan with uneven="pad" stores as 12:

    on the devices    padded [12, 6], 3 rows on each
    in a checkpoint   [10, 6], whole on each device until it is written
    restored on 2     [10, 6], 5 rows on each: not padded there
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit.meshes.layout import by_path, canonical, count_devices, spec_axes, split_dims
from shardkit.plans.storage import (
    Storage,
    is_key,
    is_padded,
    pad_leaves,
    padding,
    stored_array,
    to_storable,
    unpadded,
)
from shardkit.runtime.checkpoint.record import Records, is_residual

Leaves = dict[str, Any]
# XLA fails or aborts with the first two, and the files of orbax have none of the others.
_NOT_STORED = ("int1", "uint1", "uint2", "uint4", "float8_e4m3")
_MOVED = 2**26  # bytes of leaves that a restore moves at once


def flatten_state(where: str, state: Any) -> Leaves:
    """The leaves of a state by path, each as stored on the devices; refuses what a checkpoint cannot hold."""
    # A padded leaf is a tree of its own; here it is one leaf, by the path that it has without padding too.
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


def describe_leaf(x: Any) -> dict[str, Any]:
    """What the record of a checkpoint contains about a leaf: its original shape, dtype, and a key's implementation."""
    shape = list(x.shape)
    if not is_key(x):
        return {"shape": shape, "dtype": str(x.dtype)}
    description: dict[str, Any] = {"shape": shape, "dtype": "key"}
    if not isinstance(x, jax.ShapeDtypeStruct):
        description["implementation"] = str(jax.random.key_impl(x))
    return description


def to_portable(leaves: Leaves) -> dict[str, jax.Array]:
    """The leaves in portable form; those that are portable already are the same arrays, not copies.

    A leaf keeps its sharding, except for padded dims, which are whole on every device.
    """
    portable = dict(leaves)
    for group in _group_by_devices(_select_not_portable(leaves)):
        # Not a constraint inside, which jax refuses over Explicit axes.
        shardings = [_portable_sharding(x) for x in group.values()]
        arrays = jax.jit(_unpad, out_shardings=shardings)([*group.values()])
        portable |= zip(group, arrays, strict=True)
    return portable


def _unpad(leaves: list[Any]) -> list[jax.Array]:
    return [to_storable(unpadded(x)) for x in leaves]


def _group_by_devices(leaves: Leaves) -> list[Leaves]:
    """The leaves in groups on the same devices: those of several workers are on different ones."""
    groups: dict[frozenset[Any], Leaves] = {}
    for path, x in leaves.items():
        devices = frozenset(stored_array(x).sharding.device_set)
        groups.setdefault(devices, {})[path] = x
    return list(groups.values())


def _select_not_portable(leaves: Leaves) -> Leaves:
    return {path: x for path, x in leaves.items() if is_padded(x) or is_key(x)}


def _portable_sharding(x: Any) -> NamedSharding:
    """The sharding of a leaf in its original shape: over the axes of its dims, but whole along padded ones."""
    sharding = stored_array(x).sharding
    if not is_padded(x):
        return sharding
    entries: list[Any] = list(spec_axes(sharding.spec))
    for dim, _ in padding(x.shape, sharding.spec, sharding.mesh):
        entries[dim] = None
    return NamedSharding(sharding.mesh, canonical(PartitionSpec(*entries)))


def describe_stored(leaves: Leaves, records: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, dtypes and shardings of the arrays to read for a target's leaves; `records` are the checkpoint's.

    Leaves without a record are not read.
    """
    shapes = {}
    for path, x in leaves.items():
        if path in records:
            shapes[path] = _describe_array(path, x, records)
    return shapes


def _describe_array(path: str, x: Any, records: Mapping[str, Any]) -> jax.ShapeDtypeStruct:
    sharding = _portable_sharding(x)
    shape = x.shape
    dtype = x.dtype
    rows = _find_other_rows(path, x, records)
    if rows is not None:
        shape = (rows, *shape[1:])
        sharding = _choose_sharding(sharding, shape)
    elif is_key(x):
        implementation = records[path]["implementation"]
        data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=implementation)))
        shape = shape + data.shape
        dtype = data.dtype
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def from_portable(arrays: dict[str, jax.Array], leaves: Leaves, records: Mapping[str, Any]) -> Leaves:
    """Portable arrays as the target's leaves are stored on the devices; unchanged ones are the same arrays.

    Leaves that were not read are zeros. Takes the arrays out of `arrays`: some at a time are moved, and then freed.
    """
    changed = _select_not_portable(leaves)
    for path, x in leaves.items():
        if path not in arrays or _find_other_rows(path, x, records) is not None:
            changed[path] = x
    restored: Leaves = {}
    for group in _group_by_devices(changed):
        for part in _group_by_size(group):
            shardings = {path: stored_array(x).sharding for path, x in part.items()}

            def restore(inputs: dict[str, jax.Array], part: Leaves = part) -> Leaves:
                results = {}
                for path, x in part.items():
                    results[path] = _restore_leaf(path, x, inputs.get(path), records)
                return results

            inputs = {path: arrays.pop(path) for path in part if path in arrays}
            # Waited for, so that what this group was made of is freed before the next one takes memory.
            restored |= jax.block_until_ready(jax.jit(restore, out_shardings=shardings)(inputs))
    in_order = {}
    for path in leaves:
        if path in restored:
            in_order[path] = restored[path]
        else:
            in_order[path] = arrays.pop(path)
    return in_order


def _restore_leaf(path: str, x: Any, array: Any, records: Mapping[str, Any]) -> Any:
    """A leaf like `x`, of the array that was read, or of zeros where there is none."""
    if is_key(x):
        return jax.random.wrap_key_data(array, impl=records[path]["implementation"])
    if array is None:
        array = jnp.zeros(x.shape, x.dtype)
    elif _find_other_rows(path, x, records) is not None:
        array = _spread_sum(array, x.shape[0])
    if not is_padded(x):
        return array
    sharding = x.array.sharding
    return pad_leaves(array, Storage(sharding.spec, x.rows), sharding.mesh)


def _spread_sum(residuals: jax.Array, rows: int) -> jax.Array:
    """Residuals in another number of rows, with the same sum: what the devices have not sent yet is not lost.

    For example [[2], [4]] of two devices as three rows: [[2], [2], [2]].
    """
    # Each device adds its row to its gradient before it sends that, so that only the sum of the rows counts.
    mean = residuals.sum(axis=0, keepdims=True) / rows
    return jnp.broadcast_to(mean, (rows, *residuals.shape[1:]))


def _group_by_size(leaves: Leaves) -> list[Leaves]:
    """The leaves in groups of at most `_MOVED` bytes, or one that is larger: each group is one program."""
    nbytes = {path: _count_bytes(x) for path, x in leaves.items()}
    # The largest first: while it is moved, its old and its new arrays are both held, and later nothing as large is.
    groups: list[Leaves] = []
    room = 0
    for path in sorted(leaves, key=nbytes.__getitem__, reverse=True):
        if not groups or room < nbytes[path]:
            groups.append({})
            room = _MOVED
        groups[-1][path] = leaves[path]
        room -= nbytes[path]
    return groups


def _count_bytes(x: Any) -> int:
    if is_key(x):  # a few words
        return 0
    return math.prod(x.shape) * x.dtype.itemsize


def _find_other_rows(path: str, x: Any, records: Records) -> int | None:
    """How many rows of a residual were saved, if not as many as the target has."""
    if not is_residual(path) or path not in records:
        return None
    rows = records[path]["shape"][0]
    if rows == x.shape[0]:
        return None
    return rows


def _choose_sharding(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """The layout in which to read another number of rows: split over the same axes, by rows or along another dim."""
    # Residuals [3, 8] of three devices, to be read on "data" of 2: 2 does not divide 3 rows, but it divides 8, so that
    # each device reads [3, 4]. If no dim divides, each reads all.
    entries: list[tuple[str, ...]] = [()] * len(shape)
    for dim, axes in split_dims(sharding.spec).items():
        entries[dim] = axes
    row_axes = entries[0]
    entries[0] = ()
    for dim, size in enumerate(shape):
        axes = entries[dim] + row_axes
        if size % count_devices(sharding.mesh, axes) == 0:
            entries[dim] = axes
            break
    return NamedSharding(sharding.mesh, canonical(PartitionSpec(*entries)))
