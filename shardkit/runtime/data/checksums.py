"""Checksums of arrays, computed on their devices: of each device's shard, or of a whole array, the same on every mesh.

What one device computes is in `on_device/checksum.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit.collectives import vary
from shardkit.meshes.layout import all_axes, count_devices, split_dims
from shardkit.on_device.checksum import PIECE, checksum, checksum_of_part
from shardkit.runtime.data.reading import from_every_device


@partial(jax.jit, static_argnames=("mesh", "specs"))
def shard_checksums(leaves: Sequence[jax.Array], *, mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> jax.Array:
    """The checksum of each device's shard of each leaf, uint32 [devices, leaves], on all devices of the mesh.

    Cost: an all_gather of 4 bytes per leaf.
    """

    def per_device(leaves: Sequence[jax.Array]) -> jax.Array:
        sums = [vary(checksum(x), mesh.axis_names) for x in leaves]
        return from_every_device(jnp.stack(sums), mesh.axis_names)

    in_specs = (list(specs),)
    gathered = jax.shard_map(per_device, mesh=mesh, in_specs=in_specs, out_specs=PartitionSpec())
    return gathered(list(leaves))


def checksums(arrays: Mapping[str, Any]) -> dict[str, int]:
    """For each array a checksum of its bits and their indices, below 2^32; the same on every mesh."""
    wait = start_checksums(arrays)
    return wait()


def start_checksums(arrays: Mapping[str, Any]) -> Callable[[], dict[str, int]]:
    """Starts to compute `checksums`, and returns what waits for them, in any thread.

    The arrays may be donated at once: what runs on a device after this runs after it.

    Cost: one pass over the first copy of each array, and a psum of 4 bytes per array.
    """
    # One program for each mesh, because a program runs on the devices of one.
    by_mesh: dict[Mesh, dict[str, Any]] = {}
    for path, x in arrays.items():
        by_mesh.setdefault(x.sharding.mesh, {})[path] = x
    running = [_start_on_mesh(mesh, arrays_of_mesh) for mesh, arrays_of_mesh in by_mesh.items()]

    def wait() -> dict[str, int]:
        results: dict[str, int] = {}
        for paths, sums in running:
            results.update(zip(paths, np.asarray(sums).tolist(), strict=True))
        # In the order of the arrays, and not that of the programs.
        return {path: results[path] for path in arrays}

    return wait


def _start_on_mesh(mesh: Mesh, arrays: Mapping[str, Any]) -> tuple[list[str], jax.Array]:
    """The paths of arrays over one mesh, in some order, and their sums."""
    piece = None
    if mesh.devices.flat[0].platform == "cpu":
        piece = PIECE
    # A loop takes long to compile: an array with one has its own program, which serves all of its shape and layout.
    small_arrays = []
    large_arrays = []
    for path, x in arrays.items():
        if piece is not None and x.size > piece:
            large_arrays.append([path])
        else:
            small_arrays.append(path)
    groups = large_arrays
    if small_arrays:
        groups = [small_arrays, *large_arrays]
    sums_of_devices = []
    order = []
    for paths in groups:
        group = tuple(arrays[path] for path in paths)
        shardings = tuple(x.sharding for x in group)
        sums_of_devices.append(_sum_on_devices(group, shardings, piece))
        order += paths
    return order, _sum_over_devices(tuple(sums_of_devices), NamedSharding(mesh, PartitionSpec()))


@partial(jax.jit, static_argnums=1)
def _sum_over_devices(sums: tuple[jax.Array, ...], replicated: NamedSharding) -> jax.Array:
    """[devices, arrays] of each group to [arrays] of all; the compiler adds the psum over devices, of 4 bytes each."""
    total = jnp.sum(jnp.concatenate(sums, axis=1), axis=0, dtype=jnp.uint32)
    return lax.with_sharding_constraint(total, replicated)


@partial(jax.jit, static_argnums=(1, 2))
def _sum_on_devices(
    arrays: tuple[jax.Array, ...], shardings: tuple[NamedSharding, ...], piece: int | None
) -> jax.Array:
    """What each device adds to the checksums, [devices, arrays]."""
    mesh = shardings[0].mesh
    specs = tuple(sharding.spec for sharding in shardings)

    def per_device(*shards: jax.Array) -> jax.Array:
        sums = []
        for x, spec in zip(shards, specs, strict=True):
            sums.append(_sum_shard(x, spec, mesh, piece))
        return jnp.stack(sums)[None]

    out_specs = PartitionSpec(mesh.axis_names)
    return jax.shard_map(per_device, mesh=mesh, in_specs=specs, out_specs=out_specs)(*arrays)


def _sum_shard(x: jax.Array, spec: PartitionSpec, mesh: Any, piece: int | None) -> jax.Array:
    """What this device's shard adds to the checksum of its array: nothing if it is not the first copy."""
    axes_of_dim = split_dims(spec)
    start: list[Any] = [0] * x.ndim
    shape = list(x.shape)
    for dim, axes in axes_of_dim.items():
        # x is a shard, so that its size is that of a device's part: it begins so many parts into the array.
        start[dim] = lax.axis_index(axes) * x.shape[dim]
        shape[dim] *= count_devices(mesh, axes)

    def sum_words(x: jax.Array) -> jax.Array:
        return vary(checksum_of_part(x, start, shape, piece), mesh.axis_names)

    def add_nothing(x: jax.Array) -> jax.Array:
        return vary(jnp.uint32(0), mesh.axis_names)

    split_axes = all_axes(spec)
    copy_axes = []
    for axis in mesh.axis_names:
        if axis not in split_axes and mesh.shape[axis] > 1:
            copy_axes.append(axis)
    if not copy_axes:
        return sum_words(x)
    # Of copies that have drifted apart the first is the one that is written.
    return lax.cond(lax.axis_index(tuple(copy_axes)) == 0, sum_words, add_nothing, x)
