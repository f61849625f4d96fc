"""Detects replica drift: compares a checksum of every leaf between the devices that must have the same bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit._check import sized
from shardkit._kinds import Arrays
from shardkit._typed import typed
from shardkit.collectives import all_gather, vary
from shardkit.layout import all_axes, path_name
from shardkit.partitioning.storage import is_padded, stored_array
from shardkit.runtime.data.checksums import checksum


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
    sums = checksums([x for _, x in leaves], mesh=mesh, specs=specs)
    if not sums[0].addressable_shards:
        return []
    found: list[Drift] = []
    for (path, _), spec, every in zip(leaves, specs, sums, strict=True):
        found += _differing(path, spec, np.asarray(every).reshape(mesh.devices.shape), mesh)
    return found


@typed
def assert_no_drift(tree: Arrays, mesh: Mesh | None = None) -> None:
    """Raises if the replicas of a leaf differ, on every process of the mesh.

    Args:
        tree: as for `replica_drift`.
        mesh: as for `replica_drift`.

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


@partial(jax.jit, static_argnames=("mesh", "specs"))
def checksums(leaves: list[jax.Array], *, mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> list[jax.Array]:
    """The checksum of each device's shard of each leaf, uint32 [devices, 1], replicated.

    Cost: an all_gather of 4 bytes per leaf.
    """

    def per_device(leaves: list[jax.Array]) -> list[jax.Array]:
        return from_every_device([checksum(x)[None] for x in leaves], mesh.axis_names)

    return jax.shard_map(per_device, mesh=mesh, in_specs=(list(specs),), out_specs=PartitionSpec())(leaves)


def from_every_device(tree: Any, axes: tuple[str, ...]) -> Any:
    """Gathers each device's small vectors `[k]` of one dtype to `[devices, k]` on all devices, inside shard_map.

    Cost: one all_gather over `axes` of all vectors together.
    """
    vectors, structure = jax.tree.flatten(tree)
    whole = all_gather(jnp.concatenate(vary(vectors, axes))[None], axes, replicated=True)
    ends = np.cumsum([x.size for x in vectors])[:-1]
    return jax.tree.unflatten(structure, jnp.split(whole, ends, axis=1))


def on_mesh(where: str, tree: Any, mesh: Mesh | None) -> tuple[Mesh | None, list[tuple[str, Any]]]:
    """The mesh of all leaves (None without leaves), and each leaf as stored on the devices, with its path."""
    leaves = [
        (path_name(path), stored_array(x)) for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_padded)
    ]
    for path, x in leaves:
        sharding = getattr(x, "sharding", None)
        over: Any = sharding.mesh if isinstance(sharding, NamedSharding) else None
        mesh = over if mesh is None else mesh
        if over is None or over != mesh:
            found = f"has {sharding}" if sharding else f"is a {type(x).__name__}"
            raise TypeError(
                f"{where}: every leaf must be an array over one mesh; leaf {path} {found}. Create it with "
                "from_full(tree, mesh, spec), or remove it from the tree."
            )
    return mesh if leaves else None, leaves


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
        expected = _majority([int(sums[at]) for at in places])
        for at in places:
            if sums[at] != expected:
                device = mesh.devices[at]
                coordinates = dict(zip(mesh.axis_names, map(int, at), strict=True))
                yield Drift(path, coordinates, device.id, device.process_index, int(sums[at]), expected)


def _majority(values: Sequence[int]) -> int | None:
    """The most common value; None for a tie."""
    (value, count), *others = Counter(values).most_common(2)
    return None if others and others[0][1] == count else value
