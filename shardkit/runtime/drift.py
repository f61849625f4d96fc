"""Detects replica drift: compares a checksum of every leaf between the devices that must have the same bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh, PartitionSpec

from shardkit._arguments.checks import sized
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
        other = "there is no majority" if self.expected is None else f"most replicas {self.expected:08x}"
        return (
            f"{self.path} at {sized(self.coordinates.items())} (device {self.device}, process {self.process}) has "
            f"checksum {self.checksum:08x}, and {other}"
        )


class DriftError(RuntimeError):
    """Replicas of a leaf differ; `drifts` lists them."""

    def __init__(self, message: str, drifts: list[Drift]):
        super().__init__(message)
        self.drifts = drifts


@typed
def replica_drift(tree: Arrays, mesh: Mesh | None = None) -> list[Drift]:
    """Compares the bits of all replicas of every leaf; every process of the mesh must call it, and gets the same list.

    Replicas are the shards of devices that differ only along axes that the leaf's spec does not name. NaNs are compared
    by their bits. One changed element of up to 32 bits is always found; several are missed once in about 2**32.

    Args:
        tree: pytree of global arrays over one mesh, such as a TrainState: any dtype, typed keys too.
        mesh: the mesh, to check the tree's; by default that of its first leaf.

    Returns:
        The replicas in the minority, by leaf and device. Empty without drift, and on a process outside the mesh.

    Raises:
        TypeError: a leaf that is not an array over the mesh.

    Cost: 4 (n-1) bytes per leaf over the n devices of the mesh, in one all_gather for all leaves.

    Example:
        >>> sk.runtime.replica_drift(sk.runtime.from_full({"w": np.ones(8)}, mesh, P("model")))
        []
    """
    mesh, leaves = on_mesh("replica_drift", tree, mesh)
    if mesh is None:
        return []
    specs = tuple(x.sharding.spec for _, x in leaves)
    sums = shard_checksums([x for _, x in leaves], mesh=mesh, specs=specs)
    if not sums.addressable_shards:
        return []
    found: list[Drift] = []
    for (path, _), spec, every in zip(leaves, specs, np.asarray(sums).T, strict=True):
        found += _differing(path, spec, every.reshape(mesh.devices.shape), mesh)
    return found


@typed
def assert_no_drift(tree: Arrays, mesh: Mesh | None = None) -> None:
    """Raises if the replicas of a leaf differ, on every process of the mesh.

    Args:
        tree, mesh: as for `replica_drift`.

    Raises:
        DriftError: with the leaf, coordinates, device and process of up to eight differing replicas.
        TypeError: a leaf that is not an array over the mesh.

    Cost: that of `replica_drift`.

    Example:
        >>> sk.runtime.assert_no_drift(sk.runtime.from_full({"w": np.ones(8)}, mesh, P("model")))
    """
    drifts = replica_drift(tree, mesh)
    if drifts:
        more = f"; and {len(drifts) - 8} more" if len(drifts) > 8 else ""
        raise DriftError(
            "assert_no_drift: all replicas of a leaf must have the same bits; "
            f"{'; '.join(map(str, drifts[:8]))}{more}. Restore the last checkpoint, and look for a step or collective "
            "that only some processes ran.",
            drifts,
        )


def _differing(path: str, spec: PartitionSpec, sums: np.ndarray, mesh: Mesh) -> Iterator[Drift]:
    """The devices whose replica differs, given every device's checksum by its coordinates."""
    free = [k for k, axis in enumerate(mesh.axis_names) if axis not in all_axes(spec)]
    first = sums[tuple(slice(0, 1) if k in free else slice(None) for k in range(sums.ndim))]
    if (sums == first).all():
        return
    groups: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for at in np.ndindex(sums.shape):
        groups.setdefault(tuple(c for k, c in enumerate(at) if k not in free), []).append(at)
    for places in groups.values():
        (most, count), *others = Counter(int(sums[at]) for at in places).most_common(2)
        expected = None if others and others[0][1] == count else most  # None for a tie
        for at in places:
            if sums[at] != expected:
                device = mesh.devices[at]
                coordinates = dict(zip(mesh.axis_names, map(int, at), strict=True))
                yield Drift(path, coordinates, device.id, device.process_index, int(sums[at]), expected)
