"""Checksums of arrays, computed on their devices: of each device's shard, or of a whole array, the same on every mesh.

Both sum words of the bits, each mixed with its index in the shard or in the array: so an array may be cut anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit.collectives import vary
from shardkit.collectives.axes import vary_like
from shardkit.meshes.layout import all_axes, spec_axes
from shardkit.runtime.data.reading import from_every_device, to_storable

_PIECE = 2**18  # elements: a MiB of words, which stays in a CPU's cache


@partial(jax.jit, static_argnames=("mesh", "specs"))
def shard_checksums(leaves: Sequence[jax.Array], *, mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> jax.Array:
    """The checksum of each device's shard of each leaf, uint32 [devices, leaves], on all devices of the mesh.

    Cost: an all_gather of 4 bytes per leaf.
    """

    def per_device(leaves: Sequence[jax.Array]) -> jax.Array:
        return from_every_device(jnp.stack([vary(checksum(x), mesh.axis_names) for x in leaves]), mesh.axis_names)

    return jax.shard_map(per_device, mesh=mesh, in_specs=(list(specs),), out_specs=PartitionSpec())(list(leaves))


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

        def total(x: jax.Array) -> jax.Array:
            return vary(checksum_of_part(x, start, shape, piece), mesh.axis_names)

        copies = tuple(axis for axis in mesh.axis_names if axis not in all_axes(spec) and mesh.shape[axis] > 1)
        if not copies:
            return total(x)
        # Of copies that have drifted apart the first is the one that is written.
        return lax.cond(lax.axis_index(copies) == 0, total, lambda x: vary(jnp.uint32(0), mesh.axis_names), x)

    def local(*shards: jax.Array) -> jax.Array:
        return jnp.stack([one(x, sharding.spec) for x, sharding in zip(shards, shardings, strict=True)])[None]

    specs, devices = tuple(sharding.spec for sharding in shardings), PartitionSpec(mesh.axis_names)
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=devices)(*arrays)


def checksum(x: jax.Array) -> jax.Array:
    """A uint32 scalar of an array's bits and their indices along its dims, so that the array may be sharded."""
    return checksum_of_part(x, (0,) * x.ndim, x.shape)


def checksum_of_part(x: jax.Array, start: Sequence[Any], shape: Sequence[int], piece: int | None = None) -> jax.Array:
    """What a part of an array, which begins at `start` in one of this shape, adds to the checksum of the whole.

    With `piece`, in a loop over so many elements. On CPU XLA writes what it sums to memory first: in one piece that is
    as large as the part, or larger, and takes ten times as long as in pieces that stay in a cache.
    """
    if piece is None or x.size <= piece:
        return jnp.sum(_words(x, start, shape), dtype=jnp.uint32)
    tile = _tile(x.shape, piece)
    counts = [-(-size // step) for size, step in zip(x.shape, tile, strict=True)]

    def add(number: jax.Array, total: jax.Array) -> jax.Array:
        first: list[jax.Array] = []
        for count, step in zip(reversed(counts), reversed(tile), strict=True):
            first.insert(0, number % count * step)
            number = number // count
        # The last piece of a dim reaches back over the one before, whose words do not count twice.
        begin = [jnp.minimum(at, size - step) for at, size, step in zip(first, x.shape, tile, strict=True)]
        place = [here + there for here, there in zip(begin, start, strict=True)]
        words = _words(lax.dynamic_slice(x, begin, tile), place, shape)
        for dim, size in enumerate(x.shape):
            if size % tile[dim]:
                index = begin[dim] + lax.broadcasted_iota(jnp.int32, words.shape, dim + _lead(x))
                words = jnp.where(index >= first[dim], words, jnp.uint32(0))
        return total + jnp.sum(words, dtype=jnp.uint32)

    return lax.fori_loop(0, math.prod(counts), add, vary_like(jnp.uint32(0), x))


def _tile(shape: Sequence[int], piece: int) -> list[int]:
    """The shape of pieces of about so many elements, whole along the last dims."""
    tile, left = [1] * len(shape), piece
    for dim in reversed(range(len(shape))):
        tile[dim] = max(1, min(shape[dim], left))
        left //= tile[dim]
    return tile


def _lead(x: jax.Array) -> int:
    """How many dims `_bit_words` adds in front."""
    return int(jnp.iscomplexobj(x))


def _words(x: jax.Array, start: Sequence[Any], shape: Sequence[int]) -> jax.Array:
    """The bits of a part of an array, mixed with their indices in the array: summed, they are its checksum.

    A plain sum would miss swapped values or two flipped signs, and a sum weighted by index a value swapped with its
    negative. Mixing is one to one, so a single changed word always changes the sum.
    """
    lead, bits, place = _lead(x), _bit_words(to_storable(x)).astype(jnp.uint32), jnp.uint32(0)
    more = bits.shape[lead + x.ndim :]
    sizes, firsts = (*bits.shape[:lead], *shape, *more), (*(0,) * lead, *start, *(0,) * len(more))
    for dim, (size, first) in enumerate(zip(sizes, firsts, strict=True)):
        index = lax.broadcasted_iota(jnp.uint32, bits.shape, dim)
        place = place * jnp.uint32(size % 2**32) + index + jnp.asarray(first).astype(jnp.uint32)
    return _mixed(bits ^ _mixed(place))


def _mixed(x: jax.Array) -> jax.Array:
    """The finalizer of MurmurHash3, in which every bit of a word affects every bit of the result."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _bit_words(x: jax.Array) -> jax.Array:
    """An array's bits as unsigned integers of up to 32 bits; wider elements get a new last dim."""
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag])
    if not jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize <= 4:
        return x.astype(jnp.uint32)  # bitcast does not accept booleans and integers below a byte
    bits = jnp.finfo(x.dtype).bits if jnp.issubdtype(x.dtype, jnp.floating) else 64
    return lax.bitcast_convert_type(x, f"uint{min(bits, 32)}")
