"""Compiled collectives: their kinds, groups of devices and bytes, and the chip's time for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from shardkit.analysis.hlo import proto
from shardkit.analysis.hlo.collectives import CompiledRow, collectives_of
from shardkit.analysis.hlo.compute import NO_CLOCK, Clock, clock_of
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
    compiled = executable.runtime_executable().hlo_modules()[0]
    module = proto.read(compiled.as_serialized_hlo_module_proto())
    chip = chip_of(mesh)
    rows = collectives_of(module, dict(mesh.shape), _choose_clock(mesh, chip))
    texts = []
    entries = []
    for (kind, groups), times in _count_executions(module, rows, calls).items():
        text = f"{kind} {describe_groups(kind, groups)}"
        if times != 1:
            text = f"{times:g} {text}"
        texts.append(text)
        entries.append({"kind": kind, "times": times, "groups": groups})
    if hops is None:
        # The program is a loop of `calls` calls, and the census counts all of them.
        hops = sum(_count_hops(row) for row in written.rows) // calls
    chip_name = None
    chip_us = None
    if chip is not None:
        chip_name = chip.name
        seconds = sum(row.seconds * row.times for row in rows)
        chip_us = 1e6 * seconds / calls
    return {
        "hops": hops,
        "written_bytes": float(written.sent() / calls),
        "wire_bytes": float(sum((row.total for row in rows), 0) / calls),
        "compiled": "; ".join(texts) or "none",
        "compiled_groups": entries,
        "chip": chip_name,
        "chip_us": chip_us,
    }


def _choose_clock(mesh: Mesh, chip: Chip | None) -> Clock:
    """The model of time of a mesh's chip; without one, no time passes."""
    if chip is None:
        return NO_CLOCK
    platform = mesh.devices.flat[0].platform
    if platform == "gpu":
        platform = "cuda"
    return clock_of(platform, chip, places(mesh))


def _count_executions(module: proto.Module, rows: Sequence[CompiledRow], calls: int) -> dict[tuple[str, Groups], float]:
    """How often a call runs collectives of one kind over the same groups, or the same pairs of a permute.

    For example a bidirectional ring over 4 devices, in a loop of 20 calls: 3 ppermutes 0>1>2>3>0 and 3 of 0>3>2>1>0.
    """
    groups_of: dict[str, Groups] = {}
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            # A permute has pairs in place of groups.
            groups_of[instruction.name] = instruction.groups or instruction.pairs
    times: dict[tuple[str, Groups], float] = {}
    for row in rows:
        key = (row.kind, groups_of[row.name])
        times[key] = times.get(key, 0) + row.times / calls
    return times


def physical(mesh: Mesh, axes: Sequence[str]) -> str:
    """The dims of the machine along which the devices of a group differ: "x, y" of a torus, hosts, or nothing known."""
    positions = [mesh.axis_names.index(axis) for axis in axes]
    n = math.prod(mesh.shape[axis] for axis in axes)
    # [devices of a group, groups], of which the first group stands for all.
    group = np.moveaxis(mesh.devices, positions, range(len(positions))).reshape(n, -1)[:, 0]
    coords = [_coords(device) for device in group]
    names = []
    for dim, positions_along in enumerate(zip(*coords, strict=True)):
        if len(set(positions_along)) > 1:
            names.append("xyz"[dim])
    cores = {getattr(device, "core_on_chip", 0) for device in group}
    if coords[0] and len(cores) > 1:
        names.append("core")
    slices = {getattr(device, "slice_index", 0) for device in group}
    if len(slices) > 1:
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
    """A permute as chains, those that end first; devices that send to themselves are left out.

    For example (0, 1), (1, 0), (2, 3), (4, 4) are "2>3" and "0>1>0".
    """
    target_of = {source: target for source, target in pairs if source != target}
    # A chain that ends begins at a device to which no other sends. When those are taken out, only rings are left.
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


def _count_hops(row: CensusRow) -> int:
    if row.kind == "ppermute":
        hops = int(row.sent > 0)  # sending to itself is none
    else:
        hops = wire(row.kind, row.bytes_in, row.n).hops
    return hops * row.times


def _coords(device: jax.Device) -> tuple[int, ...]:
    return tuple(getattr(device, "coords", None) or ())
