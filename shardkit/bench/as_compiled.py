"""Compiled collectives: their kinds, groups of devices and bytes, and the chip's time for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
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


def read_program(traced: Any, executable: Any, mesh: Mesh, calls: int, hops: int | None = None) -> Record:
    """Fields of a record: what one of the `calls` of a kernel in a program sends, as written and as compiled.

    `hops` are messages one after the other; None: as the census lists them.
    """
    # The program is a loop of `calls` calls: the census and the compiled rows count all of them.
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
        hops = sum(_count_hops(row) for row in written.rows) // calls
    chip_name = None
    chip_us = None
    if chip is not None:
        chip_name = chip.name
        seconds = sum(row.seconds * row.times for row in rows)
        chip_us = 1e6 * seconds / calls
    wire_bytes = sum((row.total for row in rows), Fraction(0))
    return {
        "hops": hops,
        "written_bytes": float(written.sent() / calls),
        "wire_bytes": float(wire_bytes / calls),
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
    return clock_of(platform, chip, list_places(mesh))


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


def describe_dims(mesh: Mesh, axes: Sequence[str]) -> str:
    """The dims of the machine along which the devices of a group differ: "x, y" of a torus, hosts, or nothing known."""
    # The axes of the group first: [devices of a group, groups]. The first group stands for all.
    dims = [mesh.axis_names.index(axis) for axis in axes]
    n = math.prod(mesh.shape[axis] for axis in axes)
    groups = np.moveaxis(mesh.devices, dims, range(len(dims))).reshape(n, -1)
    group = groups[:, 0]
    coords = [_coords(device) for device in group]
    names = []
    # Of devices without coordinates there is no dim to go through.
    for name, coordinates in zip("xyz", zip(*coords, strict=True), strict=False):
        if len(set(coordinates)) > 1:
            names.append(name)
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


def list_places(mesh: Mesh) -> list[tuple[int, ...]]:
    """Where each device is, as `clock_of` takes it: on a torus, or (slice, host, GPU)."""
    result = []
    for device in mesh.devices.flat:
        place = _coords(device)
        if not place:
            slice_index = getattr(device, "slice_index", None) or 0
            place = (slice_index, device.process_index, device.id)
        result.append(place)
    return result


def describe_groups(kind: str, groups: Groups) -> str:
    """Groups of devices in a few characters: `{0-3} {4-7}`, and `0>1>2>3>0` for the pairs of a permute."""
    if not groups:
        return "{all}"
    if kind == "ppermute":
        texts = _describe_chains(groups)
    else:
        texts = ["{" + _describe_range(group) + "}" for group in groups]
    if len(texts) <= _SHOWN:
        return " ".join(texts)
    return f"{' '.join(texts[:_SHOWN])} .. ({len(texts)})"


def _describe_chains(pairs: Groups) -> list[str]:
    """A permute as chains, those that end first; devices that send to themselves are left out.

    For example (0, 1), (1, 0), (2, 3), (4, 4) are "2>3" and "0>1>0".
    """
    target_of = {}
    for source, target in pairs:
        if source != target:
            target_of[source] = target
    # A chain that ends begins at a device to which no other sends. When those are taken out, only rings are left.
    starts = sorted(target_of.keys() - set(target_of.values()))
    starts += sorted(target_of)
    texts: list[str] = []
    for start in starts:
        chain = [start]
        while chain[-1] in target_of:
            chain.append(target_of.pop(chain[-1]))
        if len(chain) > 1:
            texts.append(">".join(_shorten(chain, most=9, first=3, last=2)))
    return texts


def _describe_range(group: Sequence[int]) -> str:
    """The devices of a group: "0-3" of neighbours, "0,4" or "0,2,..,30" of others."""
    first = group[0]
    if len(group) > 2 and list(group) == list(range(first, first + len(group))):
        return f"{first}-{group[-1]}"
    return ",".join(_shorten(group, most=2 * _SHOWN, first=2, last=1))


def _shorten(devices: Sequence[int], *, most: int, first: int, last: int) -> list[str]:
    """The numbers of devices as text; of more than `most` the first ones and the last."""
    names = [str(device) for device in devices]
    if len(names) > most:
        names[first:-last] = [".."]
    return names


def _count_hops(row: CensusRow) -> int:
    """Messages one after the other, in all executions of a collective."""
    if row.kind != "ppermute":
        return row.times * wire(row.kind, row.bytes_in, row.n).hops
    if row.sent == 0:  # each device sends to itself
        return 0
    return row.times


def _coords(device: jax.Device) -> tuple[int, ...]:
    return tuple(getattr(device, "coords", None) or ())
