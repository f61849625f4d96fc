"""What a collective is as compiled: its kinds, its groups of devices, its bytes, and the chip's time for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from shardkit.analysis.hlo import proto
from shardkit.analysis.hlo.collectives import collectives_of
from shardkit.analysis.hlo.compute import NO_CLOCK, clock_of
from shardkit.analysis.hlo.groups import Groups
from shardkit.analysis.jaxpr.census import CensusRow, census_of
from shardkit.bench.records import Record
from shardkit.cost import Chip, hardware, wire

_SHOWN = 4  # groups, and devices of one that is no range


def reading(traced: Any, executable: Any, mesh: Mesh, calls: int, hops: int | None = None) -> Record:
    """Fields of a record: what one of the `calls` of a kernel in a program sends, as written and as compiled.

    `hops` are messages one after the other; None: as the census lists them.
    """
    written = census_of(traced.jaxpr.jaxpr)
    module = proto.read(executable.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto())
    chip = chip_of(mesh)
    clock = NO_CLOCK
    if chip is not None:
        platform = mesh.devices.flat[0].platform
        clock = clock_of("cuda" if platform == "gpu" else platform, chip, places(mesh))
    rows = collectives_of(module, dict(mesh.shape), clock)
    times: dict[tuple[str, Groups], float] = {}  # executions in a call, by kind and groups
    groups = _groups_by_name(module)
    for row in rows:
        key = (row.kind, groups[row.name])
        times[key] = times.get(key, 0) + row.times / calls
    texts = []
    entries = []
    for (kind, members), count in times.items():
        texts.append(f"{_prefix(count)}{kind} {describe_groups(kind, members)}")
        entries.append({"kind": kind, "times": count, "groups": members})
    if hops is None:
        hops = sum(_count_hops(row) for row in written.rows) // calls
    seconds = sum(row.seconds * row.times for row in rows)
    return {
        "hops": hops,
        "written_bytes": float(written.sent() / calls),
        "wire_bytes": float(sum((row.total for row in rows), 0) / calls),
        "compiled": "; ".join(texts) or "none",
        "compiled_groups": entries,
        "chip": None if chip is None else chip.name,
        "chip_us": None if chip is None else 1e6 * seconds / calls,
    }


def _groups_by_name(module: proto.Module) -> dict[str, Groups]:
    """The groups of devices, or the pairs of a permute, by the name of the instruction."""
    groups: dict[str, Groups] = {}
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            groups[instruction.name] = instruction.groups or instruction.pairs
    return groups


def physical(mesh: Mesh, axes: Sequence[str]) -> str:
    """The dims of the machine along which the devices of a group differ: "x, y" of a torus, hosts, or nothing known."""
    positions = [mesh.axis_names.index(axis) for axis in axes]
    n = math.prod(mesh.shape[axis] for axis in axes)
    group = np.moveaxis(mesh.devices, positions, range(len(positions))).reshape(n, -1)[:, 0]
    coords = [_coords(device) for device in group]
    names = []
    for dim in range(len(coords[0])):
        if len({coord[dim] for coord in coords}) > 1:
            names.append("xyz"[dim])
    if coords[0] and len({getattr(device, "core_on_chip", 0) for device in group}) > 1:
        names.append("core")
    if len({getattr(device, "slice_index", 0) for device in group}) > 1:
        names.append("slice")
    processes = len({device.process_index for device in group})
    if processes > 1:
        names.append(f"{processes} processes")
    return ", ".join(names)


def chip_of(mesh: Mesh) -> Chip | None:
    """The chip of a mesh's devices, where its figures are known."""
    return hardware.chip_of(mesh.devices.flat[0].device_kind)


def places(mesh: Mesh) -> list[tuple[int, ...]]:
    """Where each device is, as `clock_of` takes it: on a torus, or (slice, host, GPU)."""
    result = []
    for device in mesh.devices.flat:
        slice_index = getattr(device, "slice_index", None) or 0
        result.append(_coords(device) or (slice_index, device.process_index, device.id))
    return result


def describe_groups(kind: str, groups: Groups) -> str:
    """Groups of devices in a few characters: `{0-3} {4-7}`, and `0>1>2>3>0` for the pairs of a permute."""
    if not groups:
        return "{all}"
    if kind == "ppermute":
        texts = _chains(groups)
    else:
        texts = [f"{{{_range(group)}}}" for group in groups]
    if len(texts) <= _SHOWN:
        return " ".join(texts)
    return f"{' '.join(texts[:_SHOWN])} .. ({len(texts)})"


def _chains(pairs: Groups) -> list[str]:
    """A permute as chains, those that end first; what stays where it is is left out."""
    target_of = {source: target for source, target in pairs if source != target}
    ends_first = sorted(set(target_of) - set(target_of.values()))
    starts = [*ends_first, *sorted(target_of)]
    texts: list[str] = []
    for start in starts:
        chain = [start]
        while chain[-1] in target_of:
            chain.append(target_of.pop(chain[-1]))
        names = [str(device) for device in chain]
        if len(names) > 9:
            names = [*names[:3], "..", *names[-2:]]
        if len(names) > 1:
            texts.append(">".join(names))
    return texts


def _range(group: Sequence[int]) -> str:
    if len(group) > 2 and list(group) == list(range(group[0], group[0] + len(group))):
        return f"{group[0]}-{group[-1]}"
    names = [str(device) for device in group]
    if len(names) > 2 * _SHOWN:
        names = [*names[:2], "..", names[-1]]
    return ",".join(names)


def _prefix(count: float) -> str:
    return "" if count == 1 else f"{count:g} "


def _count_hops(row: CensusRow) -> int:
    if row.kind == "ppermute":
        hops = 1 if row.sent > 0 else 0
    else:
        hops = wire(row.kind, row.bytes_in, row.n).hops
    return hops * row.times


def _coords(device: jax.Device) -> tuple[int, ...]:
    return tuple(getattr(device, "coords", None) or ())
