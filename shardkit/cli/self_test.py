"""Every collective on the devices that are here, compared with NumPy."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import shardkit as sk


def self_test(mesh: Mesh) -> dict[str, float]:
    """Runs every collective over the mesh's one axis; the largest difference of each from NumPy over a list of blocks.

    The values are small whole numbers, with sums that are exact in any order: every difference must be 0.
    """
    (axis,) = mesh.axis_names
    n = mesh.size
    blocks = [_make_block(device, n) for device in range(n)]
    array = sk.shard(np.concatenate(blocks), mesh, PartitionSpec(axis))
    differences = {}
    for name, (kernel, expected) in _make_cases(axis, blocks).items():
        shards = _run_kernel(kernel, array, mesh)
        shard_differences = []
        for shard, expected_shard in zip(shards, expected, strict=True):
            shard_differences.append(np.max(np.abs(shard - expected_shard)))
        # np.max, of which NaN is the largest: max leaves out one that is not the first, and the collective was right.
        differences[name] = float(np.max(shard_differences))
    return differences


def _make_block(device: int, n: int) -> np.ndarray:
    """The block of a device, [n, n]: other values on each, from -3 to 3."""
    numbers = np.arange(n * n, dtype=np.float32) * (device + 1)
    return (numbers % 7 - 3).reshape(n, n)


def _make_cases(
    axis: str, blocks: list[np.ndarray]
) -> dict[str, tuple[Callable[[jax.Array], jax.Array], list[np.ndarray]]]:
    """For each collective a kernel, and what every device must have after it."""
    n = len(blocks)
    stack = np.stack(blocks)
    columns = []
    for d in range(n):
        # After the all_to_all, device d has row d of every block, side by side: [1, n * n].
        rows = [block[d : d + 1] for block in blocks]
        columns.append(np.concatenate(rows, axis=1))
    # Device d gets the block of the one before it. blocks[-1] is that of the last device, which sends to the first.
    neighbours = [blocks[d - 1] for d in range(n)]
    numbers = [np.array([d]) for d in range(n)]
    return {
        "all_reduce sum": (lambda x: sk.all_reduce(x, axis), [stack.sum(0)] * n),
        # Times n, so that the mean is a whole number over any number of devices.
        "all_reduce mean": (lambda x: sk.all_reduce(x * n, axis, op="mean"), [stack.sum(0)] * n),
        "all_reduce max": (lambda x: sk.all_reduce(x, axis, op="max"), [stack.max(0)] * n),
        "all_reduce min": (lambda x: sk.all_reduce(x, axis, op="min"), [stack.min(0)] * n),
        "all_gather": (lambda x: sk.all_gather(x, axis), [np.concatenate(blocks)] * n),
        "reduce_scatter": (lambda x: sk.reduce_scatter(x, axis), np.split(stack.sum(0), n)),
        "all_to_all": (lambda x: sk.all_to_all(x, axis, split_dim=0, concat_dim=1), columns),
        "shift": (lambda x: sk.shift(x, axis), neighbours),
        "broadcast": (lambda x: sk.broadcast(x, axis, source=n - 1), [blocks[n - 1]] * n),
        # 0 * x makes an array [1] of the number, because out_specs split dim 0.
        "axis_index": (lambda x: sk.axis_index(axis) + 0 * x[:1, 0].astype(int), numbers),
    }


def _run_kernel(kernel: Callable[[jax.Array], jax.Array], array: jax.Array, mesh: Mesh) -> list[np.ndarray]:
    """What each device has after the kernel, in the order of the axis."""
    (axis,) = mesh.axis_names
    spec = PartitionSpec(axis)

    def per_device(x: jax.Array) -> jax.Array:
        return sk.vary(kernel(x), axis)

    run = jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=spec, out_specs=spec))
    # A shard that is the whole array, as on a single device, has None as its start.
    shards = sorted(run(array).addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return [np.asarray(shard.data) for shard in shards]
