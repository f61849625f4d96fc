"""What each process does at a snapshot of a state: which shards it keeps, and which programs send the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from shardkit.partitioning.storage import is_padded, stored_array
from shardkit.runtime.snapshots.moving import to_neighbour
from shardkit.runtime.snapshots.pieces import Grid, Kept, Sharing, sharing


class Plan(NamedTuple):
    """What is kept and sent of a state, the same on every process but for `mine`.

    Attributes:
        grids: how each array is cut, by path.
        mesh: the mesh of all arrays; devices are counted in its order.
        sharing: what all hosts keep and send.
        host_bytes: what this process's host keeps.
        mine: what this process keeps.
    """

    grids: dict[str, Grid]
    mesh: Mesh
    sharing: Sharing
    host_bytes: int
    mine: tuple[Kept, ...]


def grid_of(leaf: Any, array: Any) -> Grid:
    """How a leaf's storable array is cut."""
    shard = array.sharding.shard_shape(array.shape)
    parts = tuple(size // piece if piece else 1 for size, piece in zip(array.shape, shard, strict=True))
    hidden = (leaf.sizes, leaf.rows) if is_padded(leaf) else ((), ())
    return Grid(array.shape, str(array.dtype), parts, *hidden)


def plan_of(leaves: Mapping[str, Any], arrays: Mapping[str, jax.Array], host: Callable[[jax.Device], str]) -> Plan:
    """The plan for storable arrays of leaves, with the host of each device."""
    grids = {path: grid_of(leaves[path], x) for path, x in arrays.items()}
    mesh: Mesh = next(iter(arrays.values())).sharding.mesh  # type: ignore[attr-defined]
    devices = mesh.devices.flatten().tolist()
    held = []
    for path, x in arrays.items():
        places = x.sharding.devices_indices_map(x.shape)
        held.append([grids[path].number(places[device]) for device in devices])
    sizes = [grid.nbytes for grid in grids.values()]
    host_of = [host(device) for device in devices]
    names = sorted(set(host_of))
    shared = sharing(held, sizes, [names.index(each) for each in host_of])
    own = [device.process_index == jax.process_index() for device in devices]
    here = {name for name, is_own in zip(host_of, own, strict=True) if is_own}
    host_bytes = sum(sizes[each.leaf] for each in shared.kept if host_of[each.device] in here)
    mine = tuple(each for each in shared.kept if own[each.device])
    return Plan(grids, mesh, shared, host_bytes, mine)


def firsts(grids: Mapping[str, Grid]) -> dict[str, int]:
    """The number of each array's first piece among the pieces of all arrays, and at "" how many these are."""
    found, number = dict[str, int](), 0
    for path, grid in grids.items():
        found[path] = number
        number += grid.total
    return found | {"": number}


class Copies:
    """The pieces that this process keeps of a state, on their way to the host.

    Once it is made, the state may be donated: what devices received is in arrays of its own, and the rest on the host.
    """

    def __init__(self, plan: Plan, arrays: Mapping[str, jax.Array]):
        values, devices = list(arrays.values()), plan.mesh.devices.flatten().tolist()
        sent = [values[leaf] for leaf in plan.sharing.sent]
        received: dict[int, jax.Array] = {}
        if sent:
            specs = tuple(x.sharding.spec for x in sent)  # type: ignore[attr-defined]
            program = to_neighbour(plan.mesh, specs, plan.sharing.targets)
            received = dict(zip(plan.sharing.sent, program(tuple(sent)), strict=True))
        begins = list(firsts(plan.grids).values())
        own, self._received = list[tuple[int, jax.Array]](), list[tuple[int, jax.Array]]()
        shards: dict[tuple[bool, int], dict[Any, Any]] = {}
        for each in plan.mine:
            of = (each.received, each.leaf)
            if of not in shards:
                x = received[each.leaf] if each.received else values[each.leaf]
                shards[of] = {shard.device: shard.data for shard in x.addressable_shards}
            data = shards[of][devices[each.device]]
            data.copy_to_host_async()
            (self._received if each.received else own).append((begins[each.leaf] + each.piece, data))
        self._own = [(number, on_host(data)) for number, data in own]

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        """The pieces by number; waits for those that are received."""
        yield from self._own
        while self._received:
            number, data = self._received.pop()
            yield number, np.asarray(data)


def on_host(data: Any) -> np.ndarray:
    """The array of one device in memory of its own: that of a CPU, or offloaded, is what the next step overwrites."""
    [device] = data.devices()
    shares = device.platform == "cpu" or "host" in (data.sharding.memory_kind or "")
    return np.array(data) if shares else np.asarray(data)


def storable(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves' arrays as they are stored on the devices."""
    return {path: stored_array(x) for path, x in leaves.items()}
