"""Trees moved to a mesh that shares no device with theirs: the plan of all leaves, the move, and what arrived."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh

from shardkit._arguments.checks import format_count
from shardkit._jax import compat
from shardkit.meshes.layout import path_name, table
from shardkit.plans.storage import is_key, is_padded, to_storable
from shardkit.resharding.arrival import Arrival, compare, start_sums
from shardkit.resharding.between_meshes import InFlight, is_here, run_transfer
from shardkit.resharding.moves import LeafStorage
from shardkit.resharding.transfers import Staging, Transfer, make_transfer


class Transfers(NamedTuple):
    """The steps of `reshard` to another mesh, leaf by leaf; `print` them, or one of the leaves with each send.

    Attributes:
        leaves: the transfer of each leaf.
        mesh: where they are.
        to: where they go.
        piece_bytes: bytes that a device may hold besides source and target.
    """

    leaves: tuple[Transfer, ...]
    mesh: Any
    to: Any
    piece_bytes: int

    @property
    def crossing(self) -> int:
        """Bytes that go from one mesh to the other, of all devices together."""
        return sum(leaf.crossing for leaf in self.leaves)

    @property
    def least(self) -> int:
        """Bytes that must: every element once, in the narrower dtype."""
        return sum(leaf.least for leaf in self.leaves)

    @property
    def sent(self) -> int:
        """Bytes that the census counts: what a device sends that has a part in every step."""
        return sum(leaf.sent for leaf in self.leaves)

    @property
    def staging(self) -> int:
        """Bytes that a device holds at most besides source and target."""
        staging = Staging(self.piece_bytes)
        for leaf in self.leaves:
            for _ in range(len(leaf.list_batches()) * math.prod(leaf.pieces)):
                staging.admit(leaf.staging)
        return staging.most

    def arrived(self, before: Any, after: Any) -> Arrival:
        """Compares checksums of all leaves on both meshes, which depend on no layout. Every process calls it.

        Args:
            before: the tree on `mesh`; in a process without a device of it, anything of this structure.
            after: what `reshard` returned, on `to`.

        Returns:
            Arrival: `print` it. It names what is lost by leaf, device and place. Changed bits are missed once in 2^32.
        """
        source_leaves = jax.tree.leaves(before, is_leaf=is_padded)
        target_leaves = jax.tree.leaves(after, is_leaf=is_padded)
        sums_before = []
        sums_after = []
        for transfer, x, y in zip(self.leaves, source_leaves, target_leaves, strict=True):
            sums_before.append(_start_sums(x, transfer, self.mesh, of_target=False))
            sums_after.append(_start_sums(y, transfer, self.to, of_target=True))
        return compare(self.leaves, sums_before, sums_after, self.mesh, self.to)

    def __str__(self) -> str:
        rows = [("leaf", "from", "to", "wire", "steps", "bytes", "must cross", "staging/device")]
        for leaf in self.leaves:
            sizes = (f"{leaf.crossing:,}", f"{leaf.least:,}", f"{leaf.staging:,}")
            specs = (str(leaf.source_spec), str(leaf.target_spec))
            rows.append((leaf.path, *specs, leaf.wire.name, leaf.words, *sizes))
        devices = f"{format_count(self.mesh.size, 'device')} to {self.to.size} others"
        return (
            f"{table(rows)}\n{self.crossing:,} bytes cross from {devices}, and {self.least:,} must; staging is at most "
            f"{self.staging:,} bytes on a device"
        )


def make_transfers(
    where: str,
    tree: Any,
    source_storage: Sequence[LeafStorage],
    target_storage: Sequence[LeafStorage],
    mesh: Any,
    to: Any,
    dtype: Any,
    piece_bytes: int,
) -> Transfers:
    """The transfers of all leaves; `where` begins errors."""
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"{where}: dtype is for floating leaves, others keep theirs; got {jnp.dtype(dtype).name}. Pass for example "
            "jnp.bfloat16."
        )
    if isinstance(mesh, Mesh) and isinstance(to, Mesh):
        shared = sorted(device.id for device in set(mesh.devices.flat) & set(to.devices.flat))
        if shared:
            raise ValueError(
                f"{where}: mesh and to must share no device, or be equal; got {format_count(len(shared), 'device')} in "
                f"both, the first with id {shared[0]}. Make them of other devices, as make_mesh(jax.devices()[:4], "
                "data=4)."
            )
    transfers = []
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_padded)
    for (path, x), before, after in zip(leaves, source_storage, target_storage, strict=True):
        name = path_name(path)
        leaf = f"{where}: leaf {name}"
        transfers.append(make_transfer(leaf, name, x, before, after, mesh, to, dtype, piece_bytes))
    return Transfers(tuple(transfers), mesh, to, piece_bytes)


def refuse_tracing(where: str, leaves: Sequence[Any], mesh: Any, to: Any, *, check: bool) -> None:
    """Refuses what a census cannot read; jax itself refuses to compile one program for the devices of two meshes."""
    if not any(isinstance(x, jax.core.Tracer) for x in leaves):
        return
    obstacles = []
    if not jax.sharding.get_abstract_mesh().empty:
        obstacles.append("a mesh of jax.set_mesh")
    if not _is_auto(mesh) or not _is_auto(to):
        obstacles.append("axes that are not Auto")
    if check:
        obstacles.append("check=True")
    if obstacles:
        raise ValueError(
            f"{where}: a move to another mesh is several programs, which jax traces for a census alone, over Auto "
            f"axes, without jax.set_mesh and check; got {' and '.join(obstacles)}. Call it outside of jit."
        )


def _is_auto(mesh: Any) -> bool:
    return all(axis_type == AxisType.Auto for axis_type in mesh.axis_types)


def move_across(leaves: Sequence[Any], transfers: Transfers, *, donate: bool, check: bool) -> list[Any]:
    """The leaves on the other mesh."""
    mesh, to = transfers.mesh, transfers.to
    in_flight = InFlight(transfers.piece_bytes)
    results = []
    sums_before = []
    sums_after = []
    for x, transfer in zip(leaves, transfers.leaves, strict=True):
        data = x
        if isinstance(x, jax.core.Tracer) or is_here(mesh):
            data = to_storable(x)
        if check:
            sums_before.append(start_sums(data, transfer, mesh, of_target=False))
        result = run_transfer(data, transfer, mesh, to, in_flight)
        if donate and isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
            x.delete()
        if check:
            sums_after.append(start_sums(result, transfer, to, of_target=True))
        if is_key(x):
            result = jax.random.wrap_key_data(result, impl=compat.key_impl(x.dtype))
        results.append(result)
    if check:
        _refuse_loss(compare(transfers.leaves, sums_before, sums_after, mesh, to))
    return results


def _start_sums(x: Any, transfer: Transfer, mesh: Mesh, *, of_target: bool) -> Any:
    if not is_here(mesh):
        return None
    return start_sums(to_storable(x), transfer, mesh, of_target=of_target)


def _refuse_loss(arrival: Arrival) -> None:
    lost = arrival.lost
    if not lost:
        return
    texts = [f"{leaf.path} is {leaf}" for leaf in lost[:8]]
    if len(lost) > 8:
        texts.append(f"and {len(lost) - 8} more")
    raise RuntimeError(
        f"reshard: every bit must arrive; {'; '.join(texts)}. Move the tree again, and look for copies that differ on "
        "its own mesh with runtime.replica_drift."
    )
