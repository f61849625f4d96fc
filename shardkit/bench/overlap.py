"""How much communication hides behind compute: each kernel beside its compute alone and its communication alone.

On hardware all three are timed. Without, the chip's own compiler schedules the program, and the time model of
`analysis/hlo/time_model.py` gives both times, and what of the wire no compute covers. A table is of one kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

import shardkit as sk
from shardkit._check import counted
from shardkit.analysis.hlo.topology import parse_topology
from shardkit.bench.environment import environment
from shardkit.bench.overlap_cases import AXIS, Parts, Size, chosen
from shardkit.bench.records import FORMAT, VERSION, Record
from shardkit.bench.rounds import measure_functions
from shardkit.layout import table

METHODS = {"measured": "measured", "predicted": "predicted from the compiled schedule", "written": "as written"}
_MIB = 2**20


def share_hidden(compute: float, communication: float, together: float) -> float:
    """The share of communication, or of compute where that is shorter, that runs beside the other.

    Args:
        compute: time of the compute alone.
        communication: time of the communication alone, in the same unit.
        together: time of both.

    Returns:
        1 where they take as long as the longer of the two, 0 where as long as their sum, and below where longer.

    Raises:
        ValueError: a time that is not positive.

    Example:
        >>> sk.bench.share_hidden(compute=10.0, communication=4.0, together=11.0)
        0.75
    """
    for name, time in (("compute", compute), ("communication", communication), ("together", together)):
        if not time > 0:
            raise ValueError(f"share_hidden: {name} must be a time above 0; got {time}. Measure it.")
    return (compute + communication - together) / min(compute, communication)


def overlap(
    *,
    topology: str | None = None,
    only: Sequence[str] = (),
    size: Size | None = None,
    rounds: int = 20,
    progress: Callable[[str], None] = lambda name: None,
) -> list[Record]:
    """What each kernel hides: measured on this machine's devices, or predicted for a topology.

    Args:
        topology: chips whose compiler schedules the programs, such as "v5e:2x4"; None measures.
        only: names of cases; none means all.
        size: the sizes.
        rounds: of a measurement.
        progress: called with the name of each case before it is compiled.

    Returns:
        For each case a record with "method", "compute_us", "communication_us", "together_us" and "hidden_share",
        which is None where nothing is sent.

    Raises:
        ValueError: simulated devices to measure on, fewer than two, or no case of such a name.
        RuntimeError: the compiler's package is missing.

    Example:
        records = sk.bench.overlap(topology="v5e:2x4", only=["all_gather_matmul, ring"])
    """
    if topology is None:
        _check_hardware()
        mesh: Mesh | AbstractMesh = sk.make_mesh(**{AXIS: -1})  # type: ignore[arg-type]
    else:
        mesh = sk.abstract_mesh(**{AXIS: parse_topology(topology).devices})
    records = []
    for name, make in chosen(mesh, size or Size(), only).items():
        parts = make()
        if topology is None and parts.alone is None:
            continue
        progress(name)
        times = _measured(parts, rounds) if topology is None else _predicted(parts, topology)
        method = "measured" if topology is None else "predicted"
        where = topology or f"{mesh.size} x {jax.devices()[0].device_kind}"
        records.append(_record(name, where, size or Size(), method, times))
    return records


def written(*, devices: int = 8, only: Sequence[str] = (), size: Size | None = None) -> list[Record]:
    """The collectives of each case as written, where neither hardware nor a compiler is there; no times.

    Args:
        devices: of the mesh.
        only: names of cases; none means all.
        size: the sizes.

    Returns:
        For each case a record with "collectives" and "written_bytes".

    Example:
        >>> [record] = sk.bench.written(only=["all_gather_matmul, ring"], size=sk.bench.Size(16, 8, 32))
        >>> record["collectives"], record["method"]
        (7, 'written')
    """
    size, found = size or Size(), {}
    for name, make in chosen(sk.abstract_mesh(**{AXIS: devices}), size, only).items():
        parts = make()
        census = sk.census(parts.together, *parts.args)
        found[name] = {
            "collectives": sum(row.times for row in census.rows if row.n > 1),
            "written_bytes": float(census.sent()),
        }
    return [_record(name, f"{devices} devices", size, "written", each) for name, each in found.items()]


def text(records: Sequence[Record]) -> str:
    """The records as a table, of one method; times in milliseconds."""
    [method] = {record["method"] for record in records}
    if method == "written":
        lines: list[tuple[str, ...]] = [("case", "collectives", "sent, MiB")]
        lines += [(r["case"], str(r["collectives"]), f"{r['written_bytes'] / _MIB:.3f}") for r in records]
    else:
        lines = [("case", "compute ms", "communication ms", "their sum", "their maximum", "together", "hidden")]
        for r in records:
            one, other, both = (r[f"{name}_us"] / 1e3 for name in ("compute", "communication", "together"))
            hidden = "" if r["hidden_share"] is None else f"{r['hidden_share']:.0%}"
            times = [f"{t:.3f}" for t in (one, other, one + other, max(one, other), both)]
            lines.append((r["case"], *times, hidden))
    return f"{table(lines)}\n{records[0]['row']}, {METHODS[method]}"


def _record(name: str, where: str, size: Size, method: str, fields: Mapping[str, Any]) -> Record:
    shared = {"format": FORMAT, "version": VERSION, "benchmark": "overlap", "row": where, "case": name}
    return {**shared, "method": method, **size._asdict(), **fields, "environment": environment()}


def _check_hardware() -> None:
    devices = jax.devices()
    if devices[0].platform == "cpu":
        raise ValueError(
            f"overlap: overlap must be measured on hardware; got {counted(len(devices), 'CPU device')}, which share "
            "the same cores. Pass --topology v5e:2x4, which reads it from the compiled schedule."
        )
    if len(devices) < 2:
        raise ValueError(
            "overlap: overlap must be measured on at least 2 devices; got 1, which sends nothing. Pass --topology "
            "v5e:2x4, which reads it from the compiled schedule."
        )


def _predicted(parts: Parts, topology: str) -> dict[str, Any]:
    report = sk.aot.compile(parts.together, parts.args, topology=topology)
    compute, wire = report.compute.seconds * 1e6, report.wire_seconds * 1e6
    return _times(compute, wire, compute + report.exposed_seconds * 1e6)


def _measured(parts: Parts, rounds: int) -> dict[str, Any]:
    assert parts.alone is not None
    (compute, of_compute), (communication, of_communication) = parts.alone
    pairs = {"compute": (compute, of_compute), "communication": (communication, of_communication)}
    functions = {name: _ready(*pair) for name, pair in (pairs | {"together": (parts.together, parts.args)}).items()}
    found = measure_functions("overlap", "", functions, rounds=rounds)
    return _times(*(record["wall_us_median"] for record in found))


def _times(compute: float, communication: float, together: float) -> dict[str, Any]:
    hidden = share_hidden(compute, communication, together) if communication else None
    return {
        "compute_us": round(compute, 3),
        "communication_us": round(communication, 3),
        "together_us": round(together, 3),
        "hidden_share": hidden and round(hidden, 4),
    }


def _ready(function: Any, shapes: tuple[Any, ...]) -> Callable[[], Any]:
    """The function on arrays of these shapes, compiled and called once."""
    args = jax.tree.map(lambda s: jax.device_put(jnp.ones(s.shape, s.dtype), s.sharding), shapes)
    jax.block_until_ready(function(*args))
    return partial(function, *args)
