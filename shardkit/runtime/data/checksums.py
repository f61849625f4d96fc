"""Checksums of arrays, computed on their devices: of each device's shard, or of a whole array, the same on every mesh.

Both sum words of the bits, each mixed with its index in the shard or in the array: so an array may be cut anywhere.

For example x = [5, 7, 9, 11] over two devices, with `mix` for what `_mix_bits` does, mod 2^32:

    device 0    mix(5 ^ mix(0)) + mix(7 ^ mix(1))
    device 1    mix(9 ^ mix(2)) + mix(11 ^ mix(3))     its first element is the third of the array
    checksum    the sum of both, on one device too

No library has it: a hash of bytes on the host (crc32, xxhash) needs the array there, whole and in one order. This one
runs on the devices before the next step, and compares what one mesh has restored with what another has saved.
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
from shardkit.meshes.layout import all_axes, count_devices, split_dims
from shardkit.runtime.data.reading import from_every_device, to_storable

_PIECE = 2**18  # elements: a MiB of words, which stays in a CPU's cache


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
        piece = _PIECE
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


def checksum(x: jax.Array) -> jax.Array:
    """A uint32 scalar of an array's bits and their indices along its dims, so that the array may be sharded."""
    return checksum_of_part(x, (0,) * x.ndim, x.shape)


def checksum_of_part(x: jax.Array, start: Sequence[Any], shape: Sequence[int], piece: int | None = None) -> jax.Array:
    """What a part of an array, which begins at `start` in one of this shape, adds to the checksum of the whole.

    With `piece`, in a loop over so many elements. On CPU XLA writes what it sums to memory first: in one piece that is
    as large as the part, or larger, and takes ten times as long as in pieces that stay in a cache.
    """
    if piece is None or x.size <= piece:
        return jnp.sum(_make_words(x, start, shape), dtype=jnp.uint32)
    tile = _choose_tile(x.shape, piece)
    counts = []  # of tiles along each dim, rounded up
    for size, step in zip(x.shape, tile, strict=True):
        counts.append(-(-size // step))

    def add_tile(number: jax.Array, total: jax.Array) -> jax.Array:
        first = _find_tile(number, counts, tile)
        # The last tile of a dim reaches back over the one before, with words that do not count twice.
        # Worked example: 10 rows in tiles of 4 begin at 0, 4 and 6; the last tile, for rows 8 and 9, has 6 and 7 again.
        begin = []
        place = []
        for index, size, step, offset in zip(first, x.shape, tile, start, strict=True):
            tile_begin = jnp.minimum(index, size - step)
            begin.append(tile_begin)
            place.append(tile_begin + offset)
        words = _make_words(lax.dynamic_slice(x, begin, tile), place, shape)
        leading = _count_leading_dims(x)
        for dim, size in enumerate(x.shape):
            if size % tile[dim]:
                index = begin[dim] + lax.broadcasted_iota(jnp.int32, words.shape, dim + leading)
                words = jnp.where(index >= first[dim], words, jnp.uint32(0))
        return total + jnp.sum(words, dtype=jnp.uint32)

    return lax.fori_loop(0, math.prod(counts), add_tile, vary_like(jnp.uint32(0), x))


def _find_tile(number: jax.Array, counts: Sequence[int], tile: Sequence[int]) -> list[jax.Array]:
    """The index at which a tile begins: number 4 of [2, 3] tiles of 5 x 7 is (1, 1), which begins at [5, 7]."""
    first: list[jax.Array] = []
    for count, step in zip(reversed(counts), reversed(tile), strict=True):
        first.insert(0, number % count * step)
        number = number // count
    return first


def _choose_tile(shape: Sequence[int], piece: int) -> list[int]:
    """The shape of pieces of about so many elements, whole along the last dims."""
    tile = [1] * len(shape)
    room = piece
    for dim in reversed(range(len(shape))):
        tile[dim] = max(1, min(shape[dim], room))
        room //= tile[dim]
    return tile


def _count_leading_dims(x: jax.Array) -> int:
    """How many dims `_split_words` adds in front."""
    return int(jnp.iscomplexobj(x))


def _make_words(x: jax.Array, start: Sequence[Any], shape: Sequence[int]) -> jax.Array:
    """The bits of a part of an array, mixed with their indices in the array: summed, they are its checksum.

    A plain sum would miss swapped values or two flipped signs, and a sum weighted by index a value swapped with its
    negative. Mixing is one to one, so a single changed word always changes the sum.
    """
    leading = _count_leading_dims(x)
    bits = _split_words(to_storable(x)).astype(jnp.uint32)
    trailing = bits.shape[leading + x.ndim :]  # the words of an element wider than 32 bits
    # Dims of words are whole in each part: they begin at 0.
    sizes = [*bits.shape[:leading], *shape, *trailing]
    firsts = [0] * leading + list(start) + [0] * len(trailing)
    # The number of each word in the array, row-major: in [4, 6], word [1, 2] is number 1 * 6 + 2 = 8.
    place = jnp.uint32(0)
    for dim, (size, first) in enumerate(zip(sizes, firsts, strict=True)):
        index = lax.broadcasted_iota(jnp.uint32, bits.shape, dim)
        # Modulo 2**32, as all of this arithmetic is: uint32 takes no larger number.
        place = place * jnp.uint32(size % 2**32) + index + jnp.asarray(first).astype(jnp.uint32)
    return _mix_bits(bits ^ _mix_bits(place))


def _mix_bits(x: jax.Array) -> jax.Array:
    """The finalizer of MurmurHash3, in which every bit of a word affects every bit of the result."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _split_words(x: jax.Array) -> jax.Array:
    """An array's bits as unsigned integers of up to 32 bits; wider elements get a new last dim."""
    if jnp.iscomplexobj(x):
        # [2, ...]: the dim in front that `_count_leading_dims` counts.
        x = jnp.stack([x.real, x.imag])
    if jnp.issubdtype(x.dtype, jnp.floating):
        bits = min(jnp.finfo(x.dtype).bits, 32)
        return lax.bitcast_convert_type(x, f"uint{bits}")
    if x.dtype.itemsize <= 4:
        return x.astype(jnp.uint32)  # bitcast does not accept booleans and integers below a byte
    return lax.bitcast_convert_type(x, "uint32")  # of 64 bits
