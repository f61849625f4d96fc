"""Global arrays from what each process holds, and back: three ways in, and what a process can see of an array.

Every process must call `from_full`, `fetch`, `replicate` and `print_global`, in one order; nothing else sends anything.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit._check import named
from shardkit._kinds import Arrays, DType, Specs
from shardkit._typed import typed
from shardkit.layout import broadcast_specs, check_spec, path_name, spec_axes
from shardkit.runtime.cluster.join import absent
from shardkit.runtime.data.checksums import plain
from shardkit.runtime.data.slices import cut, on_host, sharding_of

_PRINTS = itertools.count()  # all processes print in one order, so that the numbers of their barriers agree


@typed
def from_full(tree: Arrays, mesh: Mesh, spec: Specs) -> Any:
    """Global arrays of which every process holds the whole: parameters made from one seed, a small data set.

    Args:
        tree: pytree of numpy arrays, numbers, typed keys, or jax arrays of this process, the same in every process.
        mesh: the mesh; it may leave processes out, which then get arrays without local data.
        spec: one PartitionSpec for all leaves, or a pytree of them (a prefix of `tree`), of which a leaf takes as many
            entries as it has dims.

    Returns:
        The pytree of `jax.Array` over the mesh.

    Raises:
        ValueError: a dim that does not divide or an integer too large for jax's dtype, before anything is sent; a leaf
            that differs between processes, on all of them alike.

    Cost: over a mesh of all processes, 4 bytes a leaf, by which the processes compare what they hold.
    """

    def sharding(path: Any, x: Any, spec: PartitionSpec) -> NamedSharding:
        return sharding_of("from_full", path, np.shape(x), mesh, spec)

    shardings = jax.tree_util.tree_map_with_path(sharding, tree, broadcast_specs(spec, tree))
    tree = jax.tree_util.tree_map_with_path(partial(on_host, "from_full"), tree)
    if len(_processes(mesh.devices.flat)) == jax.process_count() > 1:
        _refuse_different(tree)
    return jax.tree.map(lambda x, sharding: cut(x, sharding, x.shape), tree, shardings)


@typed
def from_process_local(tree: Arrays, mesh: Mesh, spec: PartitionSpec, *, batch: int | None = None) -> Any:
    """Global arrays of which every process holds its rows: the batch of a step.

    A process holds the rows of its own devices, as `local_rows` says: where dim 0 is split over all devices, batch /
    processes of them, and batch / devices for each device.

    Layout: `X[B_p, ..] of each process p -> X[B, ..] as spec`
    Args:
        tree: pytree of numpy arrays: this process's rows along dim 0, all other dims whole. Scalars are replicated.
        mesh: the mesh; a process outside passes any rows of the right shape and dtype, and must give `batch`.
        spec: how the batch is split, `plan.batch_spec(mesh)`; a leaf takes as many of its entries as it has dims.
        batch: the global number of rows, where it is to be checked; by default what the local rows amount to.

    Returns:
        The pytree of `jax.Array` over the mesh, laid out as the step wants its batch.

    Raises:
        ValueError: rows that do not divide over this process's devices, or are not this process's share of `batch`; a
            dim that does not divide; an integer too large for jax's dtype. Nothing is sent, so no process waits.
    """
    check_spec("from_process_local", spec, mesh, len(spec))
    pieces = math.prod(mesh.shape[axis] for axis in _row_axes(spec))
    mine = len(local_rows(pieces, mesh, spec))
    if not mine and batch is None:
        raise ValueError(
            f"from_process_local: batch must be given on a process outside the mesh; process {jax.process_index()} has "
            f"none of its {mesh.size} devices. Pass batch=, the global rows."
        )
    found = {path_name(path): np.shape(x)[0] for path, x in jax.tree_util.tree_leaves_with_path(tree) if np.ndim(x)}
    if batch is None:
        name, rows = next(iter(found.items()), ("", 0))
        batch, rest = rows // mine * pieces, rows % mine
        if rest:
            raise ValueError(
                f"from_process_local: a process's rows must divide over its parts of {named(_row_axes(spec))}; leaf "
                f"{name} has {rows} rows for {mine} of {pieces} parts. Choose another batch, or pad with examples of "
                "weight 0."
            )
    held = local_rows(batch, mesh, spec)
    for name, rows in found.items() if mine else ():
        if rows != len(held):
            raise ValueError(
                f"from_process_local: this process must hold its share of the batch; leaf {name} has {rows} rows, and "
                f"{mine} of {pieces} parts of {batch} rows are {len(held)}. Pass the rows that local_rows(batch, mesh, "
                "spec) names."
            )
    return from_rows(tree, held, batch, mesh, spec)


@typed
def from_rows(tree: Any, rows: np.ndarray, batch: int, mesh: Mesh, spec: PartitionSpec) -> Any:
    """Global arrays of `batch` rows, from a process's rows of them in ascending order; nothing is sent."""

    def one(path: Any, x: Any) -> jax.Array:
        x = on_host("from_process_local", path, x)
        shape = (batch, *x.shape[1:]) if x.ndim else ()
        return cut(x, sharding_of("from_process_local", path, shape, mesh, spec), shape, rows)

    return jax.tree_util.tree_map_with_path(one, tree)


@typed
def from_single_device(
    shards: Sequence[jax.Array], mesh: Mesh, spec: PartitionSpec, shape: Sequence[int], dtype: DType | None = None
) -> jax.Array:
    """A global array from the pieces that lie on this process's devices already.

    Args:
        shards: for each device of the mesh that this process has an array on it, in any order.
        mesh: the mesh.
        spec: how the array is split.
        shape: the global shape.
        dtype: the dtype; may be left out where there are shards.

    Returns:
        One `jax.Array`; the pieces are not copied.

    Raises:
        ValueError: a dim that does not divide, a device without a piece, another shape or dtype, or no dtype at all.
    """
    for x in shards:
        if not isinstance(x, jax.Array):
            raise TypeError(f"from_single_device: shards must be jax arrays; got {x!r}. Put each on its device.")
    sharding = sharding_of("from_single_device", (), tuple(shape), mesh, spec)
    held = [device for x in shards for device in list[Any](x.devices())]
    want, have = (sorted(d.id for d in devices) for devices in (list[Any](sharding.addressable_devices), held))
    if have != want:
        raise ValueError(
            f"from_single_device: there must be one piece on each of this process's devices of the mesh, {want}; got "
            f"pieces on {have}. Put each on its device with jax.device_put(piece, device)."
        )
    if dtype is None and not shards:
        raise ValueError(
            f"from_single_device: the dtype must be given on a process outside the mesh; process {jax.process_index()} "
            f"has none of its {mesh.size} devices. Pass dtype=, as on the other processes."
        )
    whole: Any = shards[0].dtype if dtype is None else jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)
    piece = sharding.shard_shape(tuple(shape))
    for x in shards:
        if x.shape != piece or x.dtype != whole:
            raise ValueError(
                f"from_single_device: every piece must be {whole}{list(piece)}, which {spec} makes of {list(shape)}; "
                f"got {x.dtype}{list(x.shape)} on {next(iter(x.devices()))}. Cut it so, or pass another shape or dtype."
            )
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, list(shards), dtype=whole)


@typed
def local_rows(batch: int, mesh: Mesh, spec: PartitionSpec) -> np.ndarray:
    """The rows of a global batch that this process's devices hold, ascending; none outside the mesh.

    Raises:
        ValueError: a batch that does not divide over the devices of the spec's first entry.
    """
    check_spec("local_rows", spec, mesh, len(spec))
    axes = _row_axes(spec)
    parts = math.prod(mesh.shape[axis] for axis in axes)
    if batch % parts:
        processes = len(_processes(mesh.devices.flat))
        over = f"{parts} devices" + (f" of {processes} processes" if processes > 1 else "")
        raise ValueError(
            f"local_rows: the batch must be divisible by {named(axes)}; got {batch} rows over {over}. Choose another "
            "batch, or pad with examples of weight 0."
        )
    pieces = NamedSharding(mesh, PartitionSpec(axes or None)).addressable_devices_indices_map((batch,))
    held = np.zeros(batch, bool)
    for (piece,) in filter(None, pieces.values()):
        held[piece] = True
    return np.flatnonzero(held)


@typed
def local_shards(x: jax.Array) -> dict[jax.Device, np.ndarray]:
    """What this process's devices hold of a global array, by device, if any; of typed keys, their integers."""
    if not isinstance(x, jax.Array):
        raise TypeError(f"local_shards: x must be a jax.Array; got a {type(x).__name__}. Place it with from_full.")
    return {shard.device: np.asarray(plain(shard.data)) for shard in x.addressable_shards}


@typed
def to_numpy(tree: Arrays) -> Any:
    """The arrays of a tree as NumPy arrays, where this process holds all of each; nothing is sent.

    Raises:
        ValueError: a leaf that is split over devices of several processes.
    """

    def one(path: Any, x: Any) -> np.ndarray:
        if not _is_whole_here(x):
            raise ValueError(
                f"to_numpy: the whole array must lie with this process; leaf {path_name(path)} lies with "
                f"{_numbered(_processes(x.sharding.device_set))}. Call fetch(tree) on every process, or look at this "
                "process's part with local_shards(x)."
            )
        return np.asarray(plain(x))

    return jax.tree_util.tree_map_with_path(one, tree)


@typed
def fetch(tree: Arrays) -> Any:
    """The whole arrays of a tree as NumPy arrays, on every process; every process must call it.

    What a process holds whole is not sent; of typed keys come the integers that they are made of.

    Raises:
        ValueError: on a process outside the mesh of a leaf, which has nothing to fetch it with.

    Cost: an all_gather of every leaf that is split over processes.
    """

    def one(path: Any, x: Any) -> np.ndarray:
        if _is_whole_here(x):
            return np.asarray(plain(x))
        if not x.addressable_shards:
            raise ValueError(
                f"fetch: a process must have a device of the array's mesh; leaf {path_name(path)} lies with "
                f"{_numbered(_processes(x.sharding.device_set))}, and this is process {jax.process_index()}. Fetch it "
                "there alone."
            )
        return np.asarray(multihost_utils.process_allgather(plain(x), tiled=True))

    return jax.tree_util.tree_map_with_path(one, tree)


@typed
def replicate(tree: Arrays, mesh: Mesh) -> Any:
    """The arrays of a tree, whole on every device of the mesh; every process of the mesh must call it.

    In place of `jax.device_put_replicated`, which jax 0.10 has no longer: that put a dim of devices in front of every
    leaf, for `jax.pmap`; here, and in a step of `make_train_step`, leaves keep their shape.

    Args:
        tree: pytree of global arrays over this mesh's devices, or of host arrays that are the same in every process.
        mesh: the mesh.

    Cost: what the compiler makes of it, an all_gather of every leaf that is split.
    """
    return jax.jit(_identity, out_shardings=NamedSharding(mesh, PartitionSpec()))(tree)


@typed
def print_global(tree: Any, *, timeout: float = 60.0) -> None:
    """Prints the whole arrays of a tree, once: every process fetches them, process 0 prints.

    Call it on every process. Under `if jax.process_index() == 0:` the others never come, and process 0 is refused.

    Args:
        tree: pytree of arrays.
        timeout: seconds within which all processes must call it.

    Raises:
        RuntimeError: not all came; what this one has to fetch from others is never waited for.

    Cost: that of `fetch`, and a barrier.
    """
    if jax.process_count() > 1:
        missing = absent(f"shardkit.print_global.{next(_PRINTS)}", timeout)
        if missing is not None:
            raise RuntimeError(
                f"print_global: every process must call it; {missing} did not within {timeout:g} s. Take it out from "
                "under `if jax.process_index() == 0:`, or raise timeout."
            )
    whole = fetch(tree)
    if jax.process_index() == 0:
        print(whole, flush=True)  # noqa: T201


def _identity(tree: Any) -> Any:
    return tree


def _row_axes(spec: PartitionSpec) -> tuple[str, ...]:
    return spec_axes(spec)[0] if len(spec) else ()


def _processes(devices: Iterable[Any]) -> list[int]:
    return sorted({device.process_index for device in devices})


def _refuse_different(tree: Any) -> None:
    """Compares a checksum of each leaf between all processes."""

    def checksum(x: np.ndarray) -> int:
        kind = zlib.crc32(f"{x.dtype}{x.shape}".encode())
        return zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data, kind)

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    sums = [checksum(np.asarray(plain(x))) for _, x in leaves]
    every = multihost_utils.process_allgather(np.array(sums, np.uint32))
    for (path, _), found in zip(leaves, every.T, strict=True):
        others = np.flatnonzero(found != found[0]).tolist()
        if others:
            raise ValueError(
                f"from_full: every process must hold the same array; leaf {path_name(path)} of process 0 differs from "
                f"that of {_numbered(others)}. Make it from the same seed or file, or pass each process's rows to "
                "from_process_local."
            )


def _is_whole_here(x: Any) -> bool:
    """Whether this process holds every element."""
    return (
        not isinstance(x, jax.Array) or x.is_fully_addressable or bool(x.is_fully_replicated and x.addressable_shards)
    )


def _numbered(processes: Sequence[int]) -> str:
    return f"process{'es' if processes[1:] else ''} {', '.join(map(str, processes))}"
