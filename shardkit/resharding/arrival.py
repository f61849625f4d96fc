"""Whether every bit arrived on another mesh: checksums by block, computed on each side alone, and compared.

Cut wherever either layout cuts it, an array is a grid of blocks, each of which is in one shard on either side. A device
computes the checksum of each block in its shard, from the bits and their indices in the array. That depends on neither
layout, nor on how the array was sent: a plan that forgets a unit sends nothing, and its receiver has another checksum.

Worked example: 8x4 from P("fsdp", "tp") of devices 0 to 3 to P(None, "tp") of devices 4 to 7. The grid is 2x4 blocks of
4x1. A device of the source has 1x2 of them, one of the target 2x1. If the upper block of device 5 differs, it lacks
[0:4, 1:2].
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit._arguments.checks import apart, format_count, format_sizes
from shardkit.collectives import all_gather, vary
from shardkit.meshes.layout import spec_axes, table
from shardkit.on_device.checksum import PIECE, checksum_of_part
from shardkit.resharding.between_meshes import (
    JOINT,
    find_index,
    is_here,
    join,
    join_meshes,
)
from shardkit.resharding.rounds import Side, cut_at_both, divide_sizes
from shardkit.resharding.transfers import Transfer
from shardkit.resharding.views import Shape


class LostBlock(NamedTuple):
    """A block of a leaf that a device of the target mesh does not have as the source has it."""

    device: int  # its id
    coordinates: dict[str, int]  # its index along each axis of the target mesh
    block: tuple[slice, ...]  # where in the leaf

    def __str__(self) -> str:
        ranges = ", ".join(f"{part.start}:{part.stop}" for part in self.block)
        where = format_sizes(self.coordinates.items())
        return f"device {self.device} ({where}) lacks [{ranges}]"


class LeafArrival(NamedTuple):
    """Whether a leaf arrived."""

    path: str
    checksum: int  # of the leaf on the source mesh, in the dtype of the target; the same on every mesh
    lost: tuple[LostBlock, ...]  # () if it arrived

    def __str__(self) -> str:
        if not self.lost:
            return "arrived"
        more = ""
        if len(self.lost) > 1:
            more = f", and {format_count(len(self.lost) - 1, 'more block')}"
        return f"lost: {self.lost[0]}{more}"


class Arrival(NamedTuple):
    """What arrived on the target mesh, leaf by leaf; `print` it."""

    leaves: tuple[LeafArrival, ...]

    @property
    def lost(self) -> tuple[LeafArrival, ...]:
        """The leaves of which something is lost."""
        return tuple(leaf for leaf in self.leaves if leaf.lost)

    def __str__(self) -> str:
        rows = [("leaf", "checksum", "")]
        for leaf in self.leaves:
            rows.append((leaf.path, f"{leaf.checksum:08x}", str(leaf)))
        return table(rows)


def start_sums(x: Any, transfer: Transfer, mesh: Mesh, *, of_target: bool) -> Any:
    """[devices, blocks] on the mesh of x: the checksum of each block in each device's shard; None without its devices.

    Cost: one pass over the array, on its devices. It may be donated at once: what runs on a device after this runs
    after it.
    """
    if not is_here(mesh):
        return None
    spec, side = transfer.source_spec, transfer.source
    if of_target:
        spec, side = transfer.target_spec, transfer.target
    piece = None
    if mesh.devices.flat[0].platform == "cpu":
        piece = PIECE
    grid = cut_at_both(transfer.source, transfer.target)
    with apart(mesh):
        return _make_sums(mesh, spec, side, grid, transfer.shape, transfer.result, piece)(x)


@lru_cache(maxsize=1024)
def _make_sums(
    mesh: Mesh, spec: PartitionSpec, side: Side, grid: Shape, shape: Shape, result: Any, piece: int | None
) -> Any:
    axes = mesh.axis_names
    local_grid = divide_sizes(grid, side.parts)
    block = divide_sizes(shape, grid)

    def sum_blocks(x: jax.Array) -> jax.Array:
        # Where this device's shard begins in the array.
        first = []
        for size, dim_axes in zip(x.shape, spec_axes(spec), strict=False):
            first.append(find_index(dim_axes) * size)
        first += [0] * (x.ndim - len(first))

        def sum_block(number: jax.Array) -> jax.Array:
            begin: list[Any] = []
            if local_grid:  # of a scalar there is one block, at no index
                for index, size in zip(jnp.unravel_index(number, local_grid), block, strict=True):
                    begin.append(index * size)
            start = [offset + index for offset, index in zip(first, begin, strict=True)]
            part = lax.dynamic_slice(x, begin, block).astype(result)
            return vary(checksum_of_part(part, start, shape, piece), axes)

        return vary(lax.map(sum_block, jnp.arange(math.prod(local_grid)))[None], axes)

    out_specs = PartitionSpec(axes)
    return jax.jit(jax.shard_map(sum_blocks, mesh=mesh, in_specs=spec, out_specs=out_specs))


def compare(
    transfers: Sequence[Transfer], sums_before: Sequence[Any], sums_after: Sequence[Any], mesh: Mesh, to: Mesh
) -> Arrival:
    """The same answer in every process of either mesh.

    Cost: an all_gather over both meshes of 4 bytes for each block of a device.
    """
    lengths_before = []
    lengths_after = []
    for transfer in transfers:
        grid = cut_at_both(transfer.source, transfer.target)
        lengths_before.append(math.prod(divide_sizes(grid, transfer.source.parts)))
        lengths_after.append(math.prod(divide_sizes(grid, transfer.target.parts)))
    length = max(sum(lengths_before), sum(lengths_after))
    source_part = _make_message(sums_before, mesh, length)
    target_part = _make_message(sums_after, to, length)
    joined = join(source_part, target_part, (length,), jnp.uint32, mesh, to)
    joint = join_meshes(mesh, to)
    with apart(joint):
        gathered = np.asarray(_make_gather(joint)(joined))
    before = _split(gathered[: mesh.size], lengths_before)
    after = _split(gathered[mesh.size :], lengths_after)
    leaves = []
    for transfer, leaf_sums, target_sums in zip(transfers, before, after, strict=True):
        leaves.append(_compare_leaf(transfer, leaf_sums, target_sums, to))
    return Arrival(tuple(leaves))


def _make_message(sums: Sequence[Any], mesh: Mesh, length: int) -> Any:
    """[devices, length]: the sums of all leaves in one message."""
    if not is_here(mesh):
        return None
    with apart(mesh):
        return _make_concatenation(mesh, length)(list(sums))


@lru_cache(maxsize=64)
def _make_concatenation(mesh: Mesh, length: int) -> Any:
    def concatenate(sums: list[jax.Array]) -> jax.Array:
        message = jnp.concatenate(sums, axis=1)
        return jnp.pad(message, ((0, 0), (0, length - message.shape[1])))

    spec = PartitionSpec(mesh.axis_names)
    return jax.jit(jax.shard_map(concatenate, mesh=mesh, in_specs=spec, out_specs=spec))


@lru_cache(maxsize=64)
def _make_gather(joint: Mesh) -> Any:
    # Every process must come to the same answer, or some would raise an error and the rest wait for them in their next
    # collective. So all get all sums, a few bytes for each leaf, and not only those of the other side.
    def gather(sums: jax.Array) -> jax.Array:
        return all_gather(sums, (JOINT,), dim=0, replicated=True)

    mapped = jax.shard_map(gather, mesh=joint, in_specs=PartitionSpec(JOINT), out_specs=PartitionSpec())
    return jax.jit(mapped, out_shardings=NamedSharding(joint, PartitionSpec()))


def _split(sums: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    """[devices, blocks] of each leaf, from those of all; what is behind them is padding."""
    ends = list(itertools.accumulate(lengths))
    return np.split(sums, ends, axis=1)[:-1]


def _compare_leaf(transfer: Transfer, sums_before: np.ndarray, sums_after: np.ndarray, to: Mesh) -> LeafArrival:
    grid = cut_at_both(transfer.source, transfer.target)
    expected = np.zeros(grid, np.uint32)
    # Backwards, so that of copies the first one counts.
    devices = list(transfer.source.devices())
    for device, sums in reversed(list(zip(devices, sums_before, strict=True))):
        expected[_find_blocks(transfer.source, device, grid)] = sums.reshape(divide_sizes(grid, transfer.source.parts))
    block = divide_sizes(transfer.shape, grid)
    lost = []
    for number, (device, sums) in enumerate(zip(transfer.target.devices(), sums_after, strict=True)):
        blocks = _find_blocks(transfer.target, device, grid)
        differs = expected[blocks] != sums.reshape(divide_sizes(grid, transfer.target.parts))
        for index in np.argwhere(differs):
            place = []
            for offset, block_range, size in zip(index.tolist(), blocks, block, strict=True):
                start = (block_range.start + offset) * size
                place.append(slice(start, start + size))
            lost.append(LostBlock(to.devices.flat[number].id, device, tuple(place)))
    checksum = int(np.sum(expected, dtype=np.uint32))
    return LeafArrival(transfer.path, checksum, tuple(lost))


def _find_blocks(side: Side, device: dict[str, int], grid: Shape) -> tuple[slice, ...]:
    """Which blocks of the grid are in a device's shard."""
    blocks = []
    for index, count in zip(side.find_shard(device), divide_sizes(grid, side.parts), strict=True):
        blocks.append(slice(index * count, (index + 1) * count))
    return tuple(blocks)
