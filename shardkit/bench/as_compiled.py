"""What a collective is as compiled: its kinds, its groups of devices, its bytes, and the chip's time for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from shardkit import cost
from shardkit.analysis.hlo import proto
from shardkit.analysis.hlo.collectives import collectives_of
from shardkit.analysis.hlo.compute import NO_CLOCK, clock_of
from shardkit.analysis.hlo.groups import Groups
from shardkit.analysis.jaxpr.census import CensusRow, census_of
from shardkit.bench.records import Record
from shardkit.cost import Chip, wire

_SHOWN = 4  # groups, and devices of one that is no range


def reading(traced: Any, executable: Any, mesh: Mesh, calls: int, hops: int | None = None) -> Record:
    """Fields of a record: what one of the `calls` of a kernel in a program sends, as written and as compiled.

    `hops` are messages one after the other; None: as the census lists them.
    """
    written = census_of(traced.jaxpr.jaxpr)
    module = proto.read(executable.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto())
    known = chip_of(mesh)
    platform = mesh.devices.flat[0].platform
    clock = clock_of("cuda" if platform == "gpu" else platform, known, places(mesh)) if known else NO_CLOCK
    rows = collectives_of(module, dict(mesh.shape), clock)
    inside = {i.name: i.groups or i.pairs for c in module.computations.values() for i in c.instructions.values()}
    groups = [inside[row.name] for row in rows]
    kinds: dict[tuple[str, Groups], float] = {}
    for row, of in zip(rows, groups, strict=True):
        kinds[row.kind, of] = kinds.get((row.kind, of), 0) + row.times / calls
    return {
        "hops": hops if hops is not None else sum(map(_hops, written.rows)) // calls,
        "written_bytes": float(written.sent() / calls),
        "wire_bytes": float(sum((row.total for row in rows), 0) / calls),
        "compiled": "; ".join(f"{_times(t)}{kind} {grouped(kind, of)}" for (kind, of), t in kinds.items()) or "none",
        "compiled_groups": [{"kind": kind, "times": t, "groups": of} for (kind, of), t in kinds.items()],
        "chip": known.name if known else None,
        "chip_us": 1e6 * sum(row.seconds * row.times for row in rows) / calls if known else None,
    }


def physical(mesh: Mesh, axes: Sequence[str]) -> str:
    """The dims of the machine along which the devices of a group differ: "x, y" of a torus, hosts, or nothing known."""
    at = [mesh.axis_names.index(axis) for axis in axes]
    n = math.prod(mesh.shape[axis] for axis in axes)
    group = np.moveaxis(mesh.devices, at, range(len(at))).reshape(n, -1)[:, 0]
    coords = [_coords(device) for device in group]
    names = ["xyz"[d] for d in range(len(coords[0])) if len({c[d] for c in coords}) > 1]
    names += ["core"] if coords[0] and len({getattr(d, "core_on_chip", 0) for d in group}) > 1 else []
    names += ["slice"] if len({getattr(d, "slice_index", 0) for d in group}) > 1 else []
    processes = len({d.process_index for d in group})
    return ", ".join([*names, *([f"{processes} processes"] if processes > 1 else [])])


def chip_of(mesh: Mesh) -> Chip | None:
    """The chip of a mesh's devices, where its figures are known."""
    return cost.chip_of(mesh.devices.flat[0].device_kind)


def places(mesh: Mesh) -> list[tuple[int, ...]]:
    """Where each device is, as `clock_of` takes it: on a torus, or (slice, host, GPU)."""
    return [_coords(d) or (getattr(d, "slice_index", None) or 0, d.process_index, d.id) for d in mesh.devices.flat]


def grouped(kind: str, groups: Groups) -> str:
    """Groups of devices in a few characters: `{0-3} {4-7}`, and `0>1>2>3>0` for the pairs of a permute."""
    if not groups:
        return "{all}"
    texts = _chains(groups) if kind == "ppermute" else [f"{{{_range(group)}}}" for group in groups]
    more = len(texts) - _SHOWN
    return " ".join(texts[: _SHOWN if more > 0 else None]) + (f" .. ({len(texts)})" if more > 0 else "")


def _chains(pairs: Groups) -> list[str]:
    """A permute as chains, those that end first; what stays where it is is left out."""
    target = {pair[0]: pair[1] for pair in pairs if pair[0] != pair[1]}
    starts = [*sorted(set(target) - set(target.values())), *sorted(target)]
    texts: list[str] = []
    for start in starts:
        chain = [start]
        while chain[-1] in target:
            chain.append(target.pop(chain[-1]))
        if len(chain) > 1:
            shown = chain if len(chain) <= 9 else [*chain[:3], "..", *chain[-2:]]
            texts.append(">".join(map(str, shown)))
    return texts


def _range(group: Sequence[int]) -> str:
    if len(group) > 2 and list(group) == list(range(group[0], group[0] + len(group))):
        return f"{group[0]}-{group[-1]}"
    shown = list(map(str, group))
    return ",".join(shown if len(shown) <= 2 * _SHOWN else [*shown[:2], "..", shown[-1]])


def _times(count: float) -> str:
    return "" if count == 1 else f"{count:g} "


def _hops(row: CensusRow) -> int:
    once = int(row.sent > 0) if row.kind == "ppermute" else wire(row.kind, row.bytes_in, row.n).hops
    return once * row.times


def _coords(device: jax.Device) -> tuple[int, ...]:
    return tuple(getattr(device, "coords", None) or ())
