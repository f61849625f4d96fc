"""Checksums of arrays, computed on their devices while the caller goes on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit.collectives import vary
from shardkit.layout import all_axes, spec_axes
from shardkit.runtime.data.checksums import checksum_of_part

_PIECE = 2**18  # elements: a MiB of words, which stays in a CPU's cache


def checksums(arrays: Mapping[str, Any]) -> dict[str, int]:
    """For each array a checksum of its bits and their indices, below 2^32; the same on every mesh."""
    return start_checksums(arrays)()


def start_checksums(arrays: Mapping[str, Any]) -> Callable[[], dict[str, int]]:
    """Starts to compute `checksums`, and returns what waits for them, in any thread.

    The arrays may be donated at once: what runs on a device after this runs after it.

    Cost: one pass over the first copy of each array, and a psum of 4 bytes per array.
    """
    by_mesh: dict[Mesh, dict[str, Any]] = {}
    for path, x in arrays.items():
        by_mesh.setdefault(x.sharding.mesh, {})[path] = x
    started = [_started(mesh, own) for mesh, own in by_mesh.items()]

    def wait() -> dict[str, int]:
        found: dict[str, int] = {}
        for paths, sums in started:
            found.update(zip(paths, np.asarray(sums).tolist(), strict=True))
        return {path: found[path] for path in arrays}

    return wait


def _started(mesh: Mesh, arrays: Mapping[str, Any]) -> tuple[list[str], jax.Array]:
    """Paths, in some order, and their sums."""
    piece = _PIECE if mesh.devices.flat[0].platform == "cpu" else None
    # A loop takes long to compile: each has its own program, once for all arrays of one shape and layout.
    alone = [path for path, x in arrays.items() if piece is not None and x.size > piece]
    groups = [[path for path in arrays if path not in alone], *([path] for path in alone)]
    groups = [paths for paths in groups if paths]
    parts = [
        _parts(tuple(arrays[path] for path in paths), tuple(arrays[path].sharding for path in paths), piece)
        for paths in groups
    ]
    return [path for paths in groups for path in paths], _sums(tuple(parts), NamedSharding(mesh, PartitionSpec()))


@partial(jax.jit, static_argnums=1)
def _sums(parts: tuple[jax.Array, ...], replicated: NamedSharding) -> jax.Array:
    return lax.with_sharding_constraint(jnp.sum(jnp.concatenate(parts, axis=1), axis=0, dtype=jnp.uint32), replicated)


@partial(jax.jit, static_argnums=(1, 2))
def _parts(arrays: tuple[jax.Array, ...], shardings: tuple[NamedSharding, ...], piece: int | None) -> jax.Array:
    """What each device adds to the checksums, [devices, arrays]."""
    mesh = shardings[0].mesh

    def one(x: jax.Array, spec: PartitionSpec) -> jax.Array:
        axes = [*spec_axes(spec), *[()] * x.ndim][: x.ndim]
        start = [lax.axis_index(each) * size if each else 0 for each, size in zip(axes, x.shape, strict=True)]
        shape = [size * math.prod(mesh.shape[axis] for axis in each) for each, size in zip(axes, x.shape, strict=True)]
        total = lambda x: vary(checksum_of_part(x, start, shape, piece), mesh.axis_names)  # noqa: E731
        copies = tuple(axis for axis in mesh.axis_names if axis not in all_axes(spec) and mesh.shape[axis] > 1)
        if not copies:
            return total(x)
        # Of copies that have drifted apart this is the one that is written.
        none = lambda x: vary(jnp.uint32(0), mesh.axis_names)  # noqa: E731
        return lax.cond(lax.axis_index(copies) == 0, total, none, x)

    def local(*shards: jax.Array) -> jax.Array:
        return jnp.stack([one(x, sharding.spec) for x, sharding in zip(shards, shardings, strict=True)])[None]

    specs, devices = tuple(sharding.spec for sharding in shardings), PartitionSpec(mesh.axis_names)
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=devices)(*arrays)
