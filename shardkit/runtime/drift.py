"""Detects replica drift: compares a checksum of every leaf between the devices that must have the same bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh, PartitionSpec

from shardkit._arguments.checks import format_sizes
from shardkit._arguments.typed import Arrays, typed
from shardkit.meshes.layout import all_axes
from shardkit.runtime.data.checksums import shard_checksums
from shardkit.runtime.data.reading import on_mesh


class Drift(NamedTuple):
    """A device whose replica of a leaf differs from the others.

    Attributes:
        path: the leaf.
        coordinates: the device's index along each mesh axis.
        device: its id.
        process: its process.
        checksum: of its shard.
        expected: the checksum of most replicas; None if there is no majority, and then each of them is listed.
    """

    path: str
    coordinates: dict[str, int]
    device: int
    process: int
    checksum: int
    expected: int | None

    def __str__(self) -> str:
        majority = "there is no majority"
        if self.expected is not None:
            majority = f"most replicas {self.expected:08x}"
        return (
            f"{self.path} at {format_sizes(self.coordinates.items())} (device {self.device}, process {self.process}) "
            f"has checksum {self.checksum:08x}, and {majority}"
        )


class DriftError(RuntimeError):
    """Replicas of a leaf differ; `drifts` lists them."""

    def __init__(self, message: str, drifts: list[Drift]):
        super().__init__(message)
        self.drifts = drifts


@typed
def replica_drift(tree: Arrays, mesh: Mesh | None = None) -> list[Drift]:
    """Compares the bits of all replicas of every leaf. Call it in every process of the mesh; all get the same list.

    Replicas are the shards of devices that differ only along axes missing from the leaf's spec. It compares NaNs by
    their bits. It always finds one changed element of up to 32 bits; it misses several changed elements once in about
    2**32.

    Args:
        tree: pytree of global arrays over one mesh, such as a TrainState: any dtype, typed keys too.
        mesh: the expected mesh of the tree; by default the mesh of its first leaf.

    Returns:
        The replicas in the minority, by leaf and device. Empty without drift, and on a process outside the mesh.

    Raises:
        TypeError: a leaf other than an array over the mesh.

    Cost: 4 (n-1) bytes per leaf over the n devices of the mesh, in one all_gather for all leaves.

    Example:
        >>> sk.runtime.replica_drift(sk.runtime.from_full({"w": np.ones(8)}, mesh, P("model")))
        []
    """
    mesh, leaves = on_mesh("replica_drift", tree, mesh)
    if mesh is None:
        return []
    arrays = [x for _, x in leaves]
    specs = tuple(x.sharding.spec for x in arrays)
    sums = shard_checksums(arrays, mesh=mesh, specs=specs)
    if not sums.addressable_shards:
        return []
    drifts: list[Drift] = []
    sums_of_leaves = np.asarray(sums).T  # [leaves, devices]
    for (path, _), spec, leaf_sums in zip(leaves, specs, sums_of_leaves, strict=True):
        sums_of_mesh = leaf_sums.reshape(mesh.devices.shape)
        drifts += _find_minority(path, spec, sums_of_mesh, mesh)
    return drifts


@typed
def assert_no_drift(tree: Arrays, mesh: Mesh | None = None) -> None:
    """Raises an error, on every process of the mesh, if the replicas of a leaf differ.

    Args:
        tree, mesh: as for `replica_drift`.

    Raises:
        DriftError: with the leaf, coordinates, device and process of up to eight differing replicas.
        TypeError: a leaf other than an array over the mesh.

    Cost: the cost of `replica_drift`.

    Example:
        >>> sk.runtime.assert_no_drift(sk.runtime.from_full({"w": np.ones(8)}, mesh, P("model")))
    """
    drifts = replica_drift(tree, mesh)
    if drifts:
        texts = list(map(str, drifts[:8]))
        if len(drifts) > 8:
            texts.append(f"and {len(drifts) - 8} more")
        raise DriftError(
            f"assert_no_drift: all replicas of a leaf must have the same bits; {'; '.join(texts)}. Restore the last "
            "checkpoint, and look for a step or collective that only some processes ran.",
            drifts,
        )


def _find_minority(path: str, spec: PartitionSpec, sums: np.ndarray, mesh: Mesh) -> Iterator[Drift]:
    """The devices with a replica that differs from most others, from the checksums by mesh coordinates.

    For example w over "model" of a mesh data=3, model=2: the three devices of each column are replicas. Checksums
    [[5, 8], [5, 9], [5, 8]]: the device at data=1, model=1 differs.
    """
    split_axes = all_axes(spec)
    replica_dims = []
    for dim, axis in enumerate(mesh.axis_names):
        if axis not in split_axes:
            replica_dims.append(dim)
    # Replicas are equal if each equals the smallest of them; above, [[5, 8], [5, 9], [5, 8]] against [[5, 8]].
    smallest = sums.min(axis=tuple(replica_dims), keepdims=True)
    if (sums == smallest).all():  # the usual case, on thousands of devices too
        return
    # The coordinates of the devices with one shard, by the place of their first: above (0, 0) and (0, 1).
    replicas: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for coordinates in np.ndindex(sums.shape):
        first = list(coordinates)
        for dim in replica_dims:
            first[dim] = 0
        replicas.setdefault(tuple(first), []).append(coordinates)
    for members in replicas.values():
        checksums = [int(sums[coordinates]) for coordinates in members]
        expected = _find_majority(checksums)
        for coordinates, checksum in zip(members, checksums, strict=True):
            if checksum != expected:
                device = mesh.devices[coordinates]
                where = dict(zip(mesh.axis_names, coordinates, strict=True))
                yield Drift(path, where, device.id, device.process_index, checksum, expected)


def _find_majority(checksums: list[int]) -> int | None:
    """The checksum of most replicas; None if two are as common."""
    # Of two replicas that differ, nothing says which of them is right.
    (most, count), *second = Counter(checksums).most_common(2)
    if second and second[0][1] == count:
        return None
    return most
