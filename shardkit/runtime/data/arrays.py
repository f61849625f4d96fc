"""Creates global arrays from the data of processes; `from_full` alone communicates, so every process must call it."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit._arguments.checks import mesh_in_context, name_axes
from shardkit._arguments.typed import Arrays, DType, Specs, typed
from shardkit.meshes.layout import (
    WHOLE,
    broadcast_specs,
    canonical,
    check_spec,
    count_devices,
    local_shape_of,
    path_name,
    split_dims,
)
from shardkit.plans.storage import is_key, to_storable
from shardkit.runtime.channel.place import name_processes
from shardkit.runtime.data.reading import processes_of


@typed
def from_full(tree: Arrays, mesh: Mesh | None = None, spec: Specs = WHOLE) -> Any:
    """Creates global arrays from data that every process has: parameters from one seed, a small data set.

    Args:
        tree: pytree of numpy arrays, numbers, typed keys, or jax arrays of this process, the same in every process.
        mesh: the mesh, by default the mesh of `jax.set_mesh`; processes outside it get arrays without local data.
        spec: one PartitionSpec for all leaves, or a pytree of them (a prefix of `tree`); a leaf with fewer dims uses
            its first entries.

    Raises:
        ValueError: a dim that does not divide or an integer too large for jax's dtype, before any communication; a
            leaf that differs between processes, on all of them.

    Cost: over a mesh of all processes, an all_gather of 4 bytes per leaf, to compare the data of the processes.

    Example:
        >>> x = sk.runtime.from_full(np.ones((8, 3), np.float32), mesh, P("data"))
        >>> x.sharding.shard_shape(x.shape)
        (4, 3)
    """
    mesh = mesh_in_context("from_full", mesh, devices=True)

    def sharding(path: Any, x: Any, spec: PartitionSpec) -> NamedSharding:
        return sharding_of("from_full", path, np.shape(x), mesh, spec)

    shardings = jax.tree_util.tree_map_with_path(sharding, tree, broadcast_specs(spec, tree))
    tree = jax.tree_util.tree_map_with_path(partial(on_host, "from_full"), tree)
    if len(processes_of(mesh.devices.flat)) == jax.process_count() > 1:
        _refuse_different(tree)
    return jax.tree.map(lambda x, sharding: global_array(x, sharding, x.shape), tree, shardings)


@typed
def from_process_local(
    tree: Arrays, mesh: Mesh | None = None, spec: PartitionSpec = WHOLE, *, batch: int | None = None
) -> Any:
    """Creates global arrays from the rows of each process: the batch of a step.

    Pass the rows of this process's devices: `local_rows` tells you which they are.

    Layout: `X[B_p, ..] of each process p -> X[B, ..] as spec`
    Args:
        tree: pytree of numpy arrays: this process's rows along dim 0, all other dims whole. Scalars are replicated.
        mesh: the mesh, by default the mesh of `jax.set_mesh`; a process outside it passes any rows of the right shape
            and dtype, and must pass `batch`.
        spec: the layout of the batch, `plan.batch_spec(mesh)`. A leaf with fewer dims uses its first entries.
        batch: the global number of rows, to check it; by default derived from the local rows.

    Returns:
        The pytree of `jax.Array` over the mesh, sharded as the step expects its batch.

    Raises:
        ValueError: rows that do not divide over this process's devices, or are not its share of `batch`; a dim that
            does not divide; an integer too large for jax's dtype. There is no communication, so no deadlock.

    Example:
        >>> rows = sk.runtime.local_rows(8, mesh, P("data"))  # alone, all of them
        >>> batch = sk.runtime.from_process_local({"x": np.float32(rows)}, mesh, P("data"))
        >>> batch["x"].shape
        (8,)
    """
    mesh = mesh_in_context("from_process_local", mesh, devices=True)
    check_spec("from_process_local", spec, mesh, len(spec))
    pieces = count_devices(mesh, _row_axes(spec))
    # Of a batch with one row for each part, the rows of this process are the number of its parts.
    mine = len(local_rows(pieces, mesh, spec))
    if not mine and batch is None:
        raise ValueError(
            f"from_process_local: batch must be given on a process outside the mesh; process {jax.process_index()} has "
            f"none of its {mesh.size} devices. Pass batch=, the global number of rows."
        )
    rows_of_leaves = {}
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if np.ndim(x):
            rows_of_leaves[path_name(path)] = np.shape(x)[0]
    if batch is None:
        name, rows = next(iter(rows_of_leaves.items()), ("", 0))
        if rows % mine:
            raise ValueError(
                f"from_process_local: a process's rows must divide over its parts of {name_axes(_row_axes(spec))}; "
                f"leaf {name} has {rows} rows for {mine} of {pieces} parts. Pass another number of rows, or pad with "
                "examples of weight 0."
            )
        # 6 rows of a process that has 2 of 8 parts: 3 rows a part, 24 in all.
        batch = rows // mine * pieces
    rows_here = local_rows(batch, mesh, spec)
    for name, rows in rows_of_leaves.items():
        if mine and rows != len(rows_here):
            raise ValueError(
                f"from_process_local: each process must pass its share of the batch; leaf {name} has {rows} rows, and "
                f"{mine} of {pieces} parts of {batch} rows are {len(rows_here)}. Pass the rows of local_rows(batch, "
                "mesh, spec)."
            )
    return from_rows(tree, rows_here, batch, mesh, spec)


@typed
def from_rows(tree: Any, rows: np.ndarray, batch: int, mesh: Mesh | None = None, spec: PartitionSpec = WHOLE) -> Any:
    """Creates global arrays of `batch` rows from this process's rows in ascending order, without communication.

    Example:
        >>> from shardkit.runtime.data.arrays import from_rows
        >>> rows = sk.runtime.local_rows(8, mesh, P("data"))
        >>> from_rows(np.float32(rows), rows, 8, mesh, P("data")).shape
        (8,)
    """
    mesh = mesh_in_context("from_rows", mesh, devices=True)

    def make_leaf(path: Any, x: Any) -> jax.Array:
        x = on_host("from_process_local", path, x)
        shape: tuple[int, ...] = ()
        if x.ndim:
            shape = (batch, *x.shape[1:])
        sharding = sharding_of("from_process_local", path, shape, mesh, spec)
        return global_array(x, sharding, shape, rows)

    return jax.tree_util.tree_map_with_path(make_leaf, tree)


@typed
def from_single_device(
    shards: Sequence[jax.Array], mesh: Mesh, spec: PartitionSpec, shape: Sequence[int], dtype: DType | None = None
) -> jax.Array:
    """Creates a global array from shards on this process's devices, without copies.

    Args:
        shards: an array on each of this process's devices of the mesh, in any order.
        mesh: the mesh.
        spec: the layout of the array.
        shape: the global shape.
        dtype: the dtype; required on a process without shards.

    Raises:
        ValueError: a dim that does not divide, a device without a shard, another shape or dtype, or no dtype.

    Example:
        >>> shards = [jax.device_put(np.ones(2, np.float32), device) for device in mesh.devices.flat]
        >>> sk.runtime.from_single_device(shards, mesh, P("model"), (8,)).sum()
        Array(8., dtype=float32)
    """
    for x in shards:
        if not isinstance(x, jax.Array):
            raise TypeError(f"from_single_device: shards must be jax arrays; got {x!r}. Put each on its device.")
    sharding = sharding_of("from_single_device", (), tuple(shape), mesh, spec)
    expected_devices = _list_ids(sharding.addressable_devices)
    devices: list[int] = []
    for x in shards:
        devices += _list_ids(x.devices())
    if sorted(devices) != expected_devices:
        raise ValueError(
            "from_single_device: there must be one shard on each of this process's devices of the mesh, "
            f"{expected_devices}; got shards on {sorted(devices)}. Put each on its device with jax.device_put(shard, "
            "device)."
        )
    if dtype is None and not shards:
        raise ValueError(
            f"from_single_device: the dtype must be given on a process outside the mesh; process {jax.process_index()} "
            f"has none of its {mesh.size} devices. Pass dtype=, as on the other processes."
        )
    array_dtype: Any
    if dtype is None:
        array_dtype = shards[0].dtype
    else:
        array_dtype = jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)
    shard_shape = sharding.shard_shape(tuple(shape))
    for x in shards:
        if x.shape != shard_shape or x.dtype != array_dtype:
            raise ValueError(
                f"from_single_device: every shard must be {array_dtype}{list(shard_shape)}, by {spec} of "
                f"{list(shape)}; got {x.dtype}{list(x.shape)} on {next(iter(x.devices()))}. Pass such a shard, or "
                "another shape or dtype."
            )
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, list(shards), dtype=array_dtype)


def _list_ids(devices: Iterable[Any]) -> list[int]:
    return sorted(device.id for device in devices)


@typed
def local_rows(batch: int, mesh: Mesh | None = None, spec: PartitionSpec = WHOLE) -> np.ndarray:
    """Returns the rows of a global batch on this process's devices, ascending; none outside the mesh.

    Raises:
        ValueError: a batch that does not divide over the devices of the spec's first entry.

    Example:
        >>> sk.runtime.local_rows(8, mesh, P("data"))
        array([0, 1, 2, 3, 4, 5, 6, 7])
    """
    mesh = mesh_in_context("local_rows", mesh, devices=True)
    check_spec("local_rows", spec, mesh, len(spec))
    axes = _row_axes(spec)
    parts = count_devices(mesh, axes)
    if batch % parts:
        count = len(processes_of(mesh.devices.flat))
        devices = f"{parts} devices"
        if count > 1:
            devices += f" of {count} processes"
        raise ValueError(
            f"local_rows: the batch must be divisible by {name_axes(axes)}; got {batch} rows over {devices}. Pass "
            "another batch, or pad with examples of weight 0."
        )
    # By the layout of a vector of the rows, which has the devices of the batch along its first dim alone. With tokens
    # split over another axis several devices have the same rows.
    layout = NamedSharding(mesh, PartitionSpec(axes or None))
    rows_of_devices = layout.addressable_devices_indices_map((batch,))
    is_here = np.zeros(batch, bool)
    for index in rows_of_devices.values():
        if index is not None:
            is_here[index] = True
    return np.flatnonzero(is_here)


def _row_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """The axes that split the rows, dim 0."""
    return split_dims(spec).get(0, ())


def _refuse_different(tree: Any) -> None:
    """Compares a checksum of each leaf between all processes.

    Here, before an array is made: jax takes each shard from the process that has the device, so of leaves that differ
    it would make an array of pieces of both, and replicas that are none. An error on one process alone would leave the
    others waiting in their next collective: all of them see all checksums.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    sums = [_checksum_of_host(np.asarray(to_storable(x))) for _, x in leaves]
    sums_of_processes = multihost_utils.process_allgather(np.array(sums, np.uint32))  # [processes, leaves]
    for (path, _), leaf_sums in zip(leaves, sums_of_processes.T, strict=True):
        differing = np.flatnonzero(leaf_sums != leaf_sums[0]).tolist()
        if differing:
            raise ValueError(
                f"from_full: every process must pass the same array; leaf {path_name(path)} of process 0 differs from "
                f"that of {name_processes(differing)}. Create it from the same seed or file, or pass each process's "
                "rows to from_process_local."
            )


def _checksum_of_host(x: np.ndarray) -> int:
    """The checksum of an array's dtype, shape and bytes."""
    # With dtype and shape: zeros have the same bytes in many of them.
    kind = zlib.crc32(f"{x.dtype}{x.shape}".encode())
    return zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data, kind)


def sharding_of(where: str, path: Any, shape: tuple[int, ...], mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    """A leaf's sharding, by as many entries of the spec as it has dims; refuses dims that do not divide."""
    spec = canonical(PartitionSpec(*spec[: len(shape)]))
    local_shape_of(_leaf(where, path), shape, spec, mesh)
    return NamedSharding(mesh, spec)


def _leaf(where: str, path: Any) -> str:
    if path:
        return f"{where}: leaf {path_name(path)}"
    return where


def on_host(where: str, path: Any, x: Any) -> Any:
    """A leaf as a NumPy array of a jax dtype, or as typed keys; refuses integers that are too large for the dtype."""
    if is_key(x):
        return x
    x = np.asarray(x)
    dtype = jax.dtypes.canonicalize_dtype(x.dtype)
    if x.size and np.issubdtype(dtype, np.integer) and dtype.itemsize < x.dtype.itemsize:
        for value in (x.min(), x.max()):
            if value != value.astype(dtype):  # the cast below would wrap it
                raise ValueError(
                    f"{_leaf(where, path)}: {x.dtype} values must fit jax's {dtype}; got {value}. Pass smaller "
                    "numbers, or set jax_enable_x64."
                )
    return x.astype(dtype, copy=False)


def global_array(x: Any, sharding: NamedSharding, shape: tuple[int, ...], rows: np.ndarray | None = None) -> jax.Array:
    """A global array, from this process's rows of it in ascending order, or from all of it."""

    def take_shard(index: Any) -> Any:
        if rows is None or not shape:
            return x[index]
        # Rows 6 and 7 of the array are the third and the fourth here if this process has rows 0, 1, 6, 7.
        row_index, *other_indices = index
        first, stop, _ = row_index.indices(shape[0])
        start = int(np.searchsorted(rows, first))
        rows_here = slice(start, start + stop - first)
        return x[(rows_here, *other_indices)]

    return jax.make_array_from_callback(shape, sharding, take_shard, dtype=x.dtype)
