"""Runs the transfer of an array between two meshes that share no device, in one process or several.

Three programs for each batch of units, because a program runs on the devices of one mesh:

| program | mesh | what a device does |
|---|---|---|
| pack | source | cuts its units out of its shard, in the dtype that is sent |
| send | both meshes joined, one axis "joint" | a ppermute for each step; nothing else |
| unpack | target | with copies an all_gather of the units; then writes them into its new shard |

Between them no byte moves: the arrays of the joint mesh are made of the buffers that the devices have. A device of the
target, which sends nothing, gives a buffer of zeros, and what a device of the source receives is dropped. So a program
of the joint mesh needs as much memory as units are on their way, and never the arrays.

Small floats travel as integers of their bits. On CPU XLA sends bfloat16 as float32, which is twice the bytes.

Why a joint mesh: `jax.device_put` to the devices of other processes is only there between equal layouts, and on CPU it
needs the addresses of servers as flags (jax 0.10 to 0.12, `_is_supported_cross_host_transfer` in jax/_src/dispatch.py).
What it sends stands nowhere in a program. A ppermute is the one collective in which a device sends to one other alone.
It works between processes, on every platform, and the census counts it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardkit._arguments.checks import apart
from shardkit.collectives import all_gather, vary
from shardkit.collectives.permute import permute
from shardkit.resharding.rounds import Pairs, Side, divide_sizes
from shardkit.resharding.transfers import Batch, Staging, Transfer
from shardkit.resharding.views import Shape, count_parts, find_joint_index

JOINT = "joint"  # the axis of the joint mesh: the devices of the source in their order, then those of the target


class InFlight:
    """The staging of programs that may still run; `admit` waits before there is too much of it.

    Python runs ahead of the devices, and a buffer is free when its program has ended: without waiting, all pieces of
    an array could be in memory at once.
    """

    def __init__(self, limit: int):
        self.staging = Staging(limit)
        self.results: dict[str, Any] = {}

    def admit(self, staging: int) -> None:
        """Waits until so many bytes fit."""
        if self.staging.admit(staging):
            return
        jax.block_until_ready(self.results)
        self.results.clear()

    def add(self, path: str, results: Any) -> None:
        """What the newest program of a leaf returned; it has overwritten what the ones before it returned."""
        self.results[path] = results


def run_transfer(x: Any, transfer: Transfer, mesh: Mesh, to: Mesh, in_flight: InFlight) -> jax.Array:
    """The array on the target mesh. Every process of either mesh calls it; x need not be there without its devices."""
    traced = isinstance(x, jax.core.Tracer)
    sends = traced or is_here(mesh)
    receives = traced or is_here(to)
    out = None
    if receives:
        out = _make_empty(to, transfer, traced)
    for batch in transfer.list_batches():
        for offset in transfer.list_offsets():
            if not traced:
                in_flight.admit(transfer.staging)
            parts = None
            if sends:
                parts = _pack(x, transfer, batch, offset, mesh)
            joined = _send(parts, transfer, batch, mesh, to)
            if receives:
                received = tuple(_take_target(array, mesh, to) for array in joined)
                out = _unpack(out, received, transfer, batch, offset, to)
            if not traced:
                in_flight.add(transfer.path, (joined, out))
    if out is None:
        return make_global(transfer.shape, NamedSharding(to, transfer.target_spec), [], transfer.result)
    return out


def is_here(mesh: Mesh) -> bool:
    """Whether this process has a device of the mesh."""
    process = jax.process_index()
    return any(device.process_index == process for device in mesh.devices.flat)


def join_meshes(mesh: Mesh, to: Mesh) -> Mesh:
    """The devices of both meshes along one axis."""
    devices = np.concatenate([mesh.devices.ravel(), to.devices.ravel()])
    return Mesh(devices, (JOINT,), axis_types=(AxisType.Auto,))


def list_axes(mesh: Any) -> tuple[str, ...]:
    """The axes of more than one device: an array that is split over others too would count as varying over them."""
    return tuple(axis for axis, size in mesh.shape.items() if size > 1)


def find_index(axes: Sequence[str]) -> Any:
    """This device's joint index, 0 of none."""
    if not axes:
        return jnp.int32(0)
    return lax.axis_index(tuple(axes))


def make_global(shape: Shape, sharding: NamedSharding, shards: Sequence[jax.Array], dtype: Any) -> jax.Array:
    """An array of the shards on this process's devices; no byte moves."""
    return jax.make_array_from_single_device_arrays(shape, sharding, list(shards), dtype=dtype)


def join(source_part: Any, target_part: Any, shape: Shape, dtype: Any, mesh: Mesh, to: Mesh) -> Any:
    """[devices of mesh, *shape] and [devices of to, *shape] as one array of the joint mesh.

    Either is None in a process without a device of its mesh.
    """
    if isinstance(source_part, jax.core.Tracer):
        # Only to be read: a census reads the three programs as they run, and this stands for what no program does.
        return jnp.concatenate([source_part, target_part])
    shards: list[jax.Array] = []
    for array in (source_part, target_part):
        if array is not None:
            shards += [shard.data for shard in array.addressable_shards]
    count = mesh.size + to.size
    sharding = NamedSharding(join_meshes(mesh, to), PartitionSpec(JOINT))
    return make_global((count, *shape), sharding, shards, dtype)


def _take_target(joined: Any, mesh: Mesh, to: Mesh) -> Any:
    """What the devices of the target have of an array of the joint mesh, as one of the target mesh."""
    if isinstance(joined, jax.core.Tracer):
        return joined[mesh.size :]
    by_device = {shard.device: shard.data for shard in joined.addressable_shards}
    shards = []
    for device in to.devices.flat:
        if device in by_device:
            shards.append(by_device[device])
    sharding = NamedSharding(to, PartitionSpec(list_axes(to)))
    return make_global((to.size, *joined.shape[1:]), sharding, shards, joined.dtype)


def find_carrier(dtype: Any) -> Any:
    """The dtype in which an array travels: of small floats integers of as many bits, else the array's own."""
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        return jnp.dtype(f"uint{jnp.finfo(dtype).bits}")
    return jnp.dtype(dtype)


def _to_bits(x: jax.Array) -> jax.Array:
    carrier = find_carrier(x.dtype)
    if carrier == x.dtype:
        return x
    return lax.bitcast_convert_type(x, carrier)


def _from_bits(x: jax.Array, dtype: Any) -> jax.Array:
    if x.dtype == dtype:
        return x
    return lax.bitcast_convert_type(x, dtype)


# Pack: on the source mesh.


def _pack(x: Any, transfer: Transfer, batch: Batch, offset: Shape, mesh: Mesh) -> Any:
    """For each step [devices, rounds, *piece]: what each device of the source sends in it."""
    tables = _find_starts_to_send(transfer, batch)
    starts = tuple(table + np.array(offset, np.int32) for table in tables)
    pack = _make_pack(mesh, transfer.source_spec, transfer.piece, transfer.wire)
    with apart(mesh):
        return pack(x, starts)


def _find_starts_to_send(transfer: Transfer, batch: Batch) -> list[np.ndarray]:
    """For each step [devices, rounds, dims]: where in its shard the unit begins that a device sends in each round."""
    source = transfer.source
    unit = transfer.route.unit
    shard_shape = divide_sizes(transfer.shape, source.parts)
    tables = []
    for step in batch:
        # A device without a message in this step cuts a unit too, which nobody gets.
        starts = np.zeros((math.prod(source.sizes.values()), len(step.rounds), len(unit)), np.int32)
        for number, messages in enumerate(step.rounds):
            for message in messages:
                begin = np.multiply(message.unit, unit)
                starts[message.sender, number] = begin % np.maximum(shard_shape, 1)
        tables.append(starts)
    return tables


@lru_cache(maxsize=1024)
def _make_pack(mesh: Mesh, spec: PartitionSpec, piece: Shape, wire: Any) -> Any:
    axes = mesh.axis_names

    # The cast is before the wire, and of what is sent alone: a whole shard in the other dtype would be memory as well.
    def pack(x: jax.Array, starts: Sequence[jax.Array]) -> Any:
        def cut(start: jax.Array) -> jax.Array:
            begin = [start[dim] for dim in range(len(piece))]
            return _to_bits(lax.dynamic_slice(x, begin, piece).astype(wire))

        device = find_index(axes)
        parts = []
        for table in starts:
            units = lax.map(cut, table[device])
            parts.append(vary(units[None], axes))
        return tuple(parts)

    in_specs = (spec, PartitionSpec())
    return jax.jit(jax.shard_map(pack, mesh=mesh, in_specs=in_specs, out_specs=PartitionSpec(axes)))


# Send: on both meshes, joined.


def _send(parts: Any, transfer: Transfer, batch: Batch, mesh: Mesh, to: Mesh) -> Any:
    """For each step [devices, rounds, *piece] on the joint mesh: what each device received."""
    pairs_of_steps = []
    joined = []
    for number, step in enumerate(batch):
        pairs_of_steps.append(tuple((sender, mesh.size + receiver) for sender, receiver in step.pairs))
        shape = (len(step.rounds), *transfer.piece)
        part = None
        if parts is not None:
            part = parts[number]
        zeros = None
        if isinstance(part, jax.core.Tracer) or is_here(to):
            with apart(to):
                zeros = _make_zeros(to, shape, find_carrier(transfer.wire))()
        joined.append(join(part, zeros, shape, find_carrier(transfer.wire), mesh, to))
    joint = join_meshes(mesh, to)
    with apart(joint):
        return _make_send(joint, tuple(pairs_of_steps))(tuple(joined))


@lru_cache(maxsize=1024)
def _make_zeros(to: Mesh, shape: Shape, dtype: Any) -> Any:
    """What a device of the target gives to the joint mesh, where it only receives."""
    sharding = NamedSharding(to, PartitionSpec(list_axes(to)))
    return jax.jit(lambda: jnp.zeros((to.size, *shape), dtype), out_shardings=sharding)


@lru_cache(maxsize=1024)
def _make_send(joint: Mesh, pairs_of_steps: tuple[Pairs, ...]) -> Any:
    # Here all bytes cross, and nothing else does: each pair is a device of the source and one of the target, and of two
    # pairs neither sender nor receiver are the same. With an all_to_all over the joint mesh every device would send to
    # all others, those of its own mesh as well. With an all_gather the whole array would be on each of them.
    def send(parts: Sequence[jax.Array]) -> Any:
        received = []
        for part, pairs in zip(parts, pairs_of_steps, strict=True):
            received.append(permute(part, (JOINT,), list(pairs)))
        return tuple(received)

    spec = PartitionSpec(JOINT)
    return jax.jit(jax.shard_map(send, mesh=joint, in_specs=spec, out_specs=spec))


# Unpack: on the target mesh.


def _make_empty(to: Mesh, transfer: Transfer, traced: bool) -> Any:
    """The array on the target mesh, of zeros, which the units overwrite."""
    if 0 in transfer.shape and not traced:
        # Nothing will overwrite it, and XLA does not split what has no elements: shards would have the whole shape.
        sharding = NamedSharding(to, transfer.target_spec)
        shard = np.zeros(sharding.shard_shape(transfer.shape), transfer.result)
        return jax.make_array_from_callback(transfer.shape, sharding, lambda index: shard, dtype=transfer.result)
    with apart(to):
        return _make_empty_program(to, transfer.target_spec, transfer.shape, transfer.result)()


@lru_cache(maxsize=1024)
def _make_empty_program(to: Mesh, spec: PartitionSpec, shape: Shape, dtype: Any) -> Any:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=NamedSharding(to, spec))


def _unpack(out: Any, received: Any, transfer: Transfer, batch: Batch, offset: Shape, to: Mesh) -> Any:
    """The array with the received units in it."""
    tables = []
    for writes in _find_writes(transfer, batch):
        tables.append(writes._replace(starts=writes.starts + np.array(offset, np.int32)))
    unpack = _make_unpack(to, transfer.target_spec, transfer.target, transfer.wire, transfer.result)
    with apart(to):
        return unpack(out, received, tuple(tables))


class _Writes(NamedTuple):
    """What a step brings to each shard of the target."""

    counts: Any  # [shards]: how many units
    units: Any  # [shards, copies * rounds]: which of the units that all copies have received; behind `counts` none
    starts: Any  # [shards, copies * rounds, dims]: where in the shard it begins


def _find_writes(transfer: Transfer, batch: Batch) -> list[_Writes]:
    """For each step what a shard gets. It has copies, of which each received another unit in a round, or none."""
    target = transfer.target
    unit = transfer.route.unit
    shard_shape = np.maximum(np.floor_divide(transfer.shape, target.parts), 1)
    shards = count_parts(target.split_axes, target.sizes)
    devices = list(target.devices())
    tables = []
    for step in batch:
        rounds = len(step.rounds)
        counts = np.zeros(shards, np.int32)
        units = np.zeros((shards, target.copies * rounds), np.int32)
        starts = np.zeros((*units.shape, len(unit)), np.int32)
        for number, messages in enumerate(step.rounds):
            for message in messages:
                device = devices[message.receiver]
                shard = find_joint_index(target.split_axes, device, target.sizes)
                copy = find_joint_index(target.copy_axes, device, target.sizes)
                place = (shard, counts[shard])
                units[place] = copy * rounds + number
                starts[place] = np.multiply(message.unit, unit) % shard_shape
                counts[shard] += 1
        tables.append(_Writes(counts, units, starts))
    return tables


@lru_cache(maxsize=1024)
def _make_unpack(to: Mesh, spec: PartitionSpec, target: Side, wire: Any, result: Any) -> Any:
    # The all_gather is here, in the target mesh, and not on the way: each unit crosses once, to one of the copies, and
    # reaches the others over the links within their mesh, which are the faster ones.
    def unpack(out: jax.Array, received: Sequence[jax.Array], tables: Sequence[_Writes]) -> jax.Array:
        shard = find_index(target.split_axes)
        for units, writes in zip(received, tables, strict=True):
            gathered = units
            if target.copy_axes:
                gathered = all_gather(units, target.copy_axes, dim=0, replicated=True)
            shard_writes = _Writes(writes.counts[shard], writes.units[shard], writes.starts[shard])
            out = _write_units(out, gathered, shard_writes, wire)
        return out

    in_specs = (spec, PartitionSpec(list_axes(to)), PartitionSpec())
    on_mesh = jax.shard_map(unpack, mesh=to, in_specs=in_specs, out_specs=spec)
    return jax.jit(on_mesh, donate_argnums=0, out_shardings=NamedSharding(to, spec))


def _write_units(out: jax.Array, units: jax.Array, writes: _Writes, wire: Any) -> jax.Array:
    """A shard with the units that it gets, of those of all copies, [copies, rounds, *piece]."""
    piece = units.shape[2:]
    units = units.reshape(-1, *piece)

    def write(number: jax.Array, out: jax.Array) -> jax.Array:
        unit = _from_bits(units[writes.units[number]], wire).astype(out.dtype)
        begin = [writes.starts[number, dim] for dim in range(len(piece))]
        return lax.dynamic_update_slice(out, unit, begin)

    # A loop over the units that there are, not over all with a select: on CPU XLA selects bfloat16 in float32, and
    # would hold a copy of the whole shard.
    return lax.fori_loop(0, writes.counts, write, out)
