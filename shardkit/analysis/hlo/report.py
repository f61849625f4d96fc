"""A step as compiled for absent chips: memory, collectives, overlap, time by a stated model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

from shardkit._arguments.checks import sized
from shardkit.analysis.hlo import proto
from shardkit.analysis.hlo.collectives import CompiledRow, collectives_of, total_work
from shardkit.analysis.hlo.compute import NO_WORK, Work, clock_of
from shardkit.analysis.hlo.differences import account, describe_differences, group_alike
from shardkit.analysis.hlo.memory import Memory
from shardkit.analysis.hlo.topology import Topology, device_memory, device_of, parse_topology
from shardkit.analysis.jaxpr.census import Census, CensusRow, census_of
from shardkit.meshes.layout import table

# The two forms of the message with which a compiler refuses a program.
_REQUIRED = (r"\(([\d.]+)([KMGT]?)\) exceeds available", r"[Uu]sed ([\d.]+)([KMGT]?) of")
_AVAILABLE = (r"exceeds available \w+ \(([\d.]+)([KMGT]?)\)", r"[Uu]sed [\d.]+[KMGT]? of ([\d.]+)([KMGT]?)")
_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class Report:
    """One call of a step, compiled for chips that need not be present.

    Attributes:
        topology: the chips, "v5p:8x8x8".
        mesh: names and sizes of the mesh axes.
        fits: whether the program fits the memory of a device.
        message: the compiler's message when it does not.
        memory: bytes per device; None when the compiler refused.
        limit: bytes of a device's memory that the compiler lets a program use.
        rows: every collective of the compiled program.
        census: every collective as written.
        compute: matmul FLOPs, bytes moved and seconds of compute per device, by the model in `compute.py`.
        lowering_seconds: time to trace and lower.
        compile_seconds: time in the compiler.
        compiler_rss: peak memory of the compiler's process, bytes.
        versions: of jax and the compiler.
    """

    topology: str
    mesh: dict[str, int]
    fits: bool
    message: str
    memory: Memory | None
    limit: int
    census: Census
    lowering_seconds: float
    rows: tuple[CompiledRow, ...] = ()
    compute: Work = NO_WORK
    compile_seconds: float = 0.0
    compiler_rss: int = 0
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def available(self) -> int:
        """Bytes that a program may use per device: the compiler's figure when it refused, else `limit`."""
        return self._in_message(_AVAILABLE) or self.limit

    @property
    def needed(self) -> int:
        """Bytes that the program needs per device; as the compiler rounds them when it does not fit."""
        if self.memory is None:
            return self._in_message(_REQUIRED)
        return self.memory.peak

    @property
    def wire_seconds(self) -> float:
        """Seconds on the wire per call, by the model."""
        return sum(r.seconds * r.times for r in self.rows)

    @property
    def exposed_seconds(self) -> float:
        """Seconds on the wire per call that no compute hides, by the model."""
        return sum(r.exposed * r.times for r in self.rows)

    @property
    def seconds(self) -> float:
        """Seconds of a step by the model: its compute, and what no compute hides."""
        return self.compute.seconds + self.exposed_seconds

    @property
    def utilization(self) -> float:
        """The FLOPs of the compiled matmuls over what the chip could do in a step's seconds, a fraction."""
        flops = device_of(parse_topology(self.topology)).flops
        return self.compute.flops / flops / self.seconds if self.seconds else 0.0

    def select(self, *, axis: str | None = None, kind: str | None = None) -> tuple[CompiledRow, ...]:
        """The compiled collectives that use an axis and are of a kind."""
        return tuple(r for r in self.rows if axis in (None, *r.axes) and kind in (None, r.kind))

    def count(self, *, axis: str | None = None, kind: str | None = None) -> int:
        """Compiled collectives per call."""
        return sum(r.times for r in self.select(axis=axis, kind=kind))

    def sent(self, *, axis: str | None = None, kind: str | None = None) -> Fraction:
        """Bytes sent per device and call."""
        return sum((r.total for r in self.select(axis=axis, kind=kind)), Fraction(0))

    def differences(self) -> list[str]:
        """What the compiler added, merged, dropped or changed in the program as written, one line each."""
        return account(self.census, self.rows) if self.memory else []

    def to_json(self) -> str:
        """Everything in the report, with the derived figures."""
        data = asdict(self) | {
            "rows": [plain_row(r) for r in self.rows],
            "census": [plain_row(r) for r in self.census.rows],
        }
        data["compute"] = self.compute._asdict()
        derived = {"needed": self.needed, "available": self.available, "differences": self.differences()}
        derived |= {"wire_seconds": self.wire_seconds, "exposed_seconds": self.exposed_seconds}
        if self.memory:
            derived |= {"seconds": self.seconds, "utilization": self.utilization}
            derived |= {"held": self.memory.held, "peak": self.memory.peak}
        return json.dumps(data | {"derived": derived}, indent=1)

    def __str__(self) -> str:
        versions = ", ".join(f"{k} {v.splitlines()[0]}" for k, v in self.versions.items())
        head = f"{self.topology}, mesh {sized(self.mesh.items())}" + (f" ({versions})" if versions else "")
        if not self.memory:
            needed = (
                f"{size(self.needed)} of {size(self.available)} per device"
                if self.needed
                else "the compiler gives no number"
            )
            return f"{head}\ndoes not fit: {needed}\n{self.message}"
        lines = [head, *(f"{name}: {of(self)}" for name, of in _FIGURES.items())]
        rows: list[tuple[str, ...]] = [
            ("kind", "axes", "times", "arrays", "bytes in", "sent/device", "runs", "hidden by", "exposed", "source")
        ]
        rows += [_line(same) for same in group_alike(self.rows)]
        lines.append(table(rows) if self.rows else "no collectives")
        return "\n".join([*lines, describe_differences(self.differences())])

    def _in_message(self, patterns: tuple[str, ...]) -> int:
        found = next(filter(None, (re.search(pattern, self.message) for pattern in patterns)), None)
        return int(float(found[1]) * _UNITS[found[2]]) if found else 0


class Built(NamedTuple):
    """A program that the compiler of absent chips has seen."""

    traced: Any  # the traced step
    sizes: dict[str, int]  # names and sizes of the mesh axes
    module: bytes | None  # the serialized program; None where it does not fit the chip's memory
    answer: dict[str, Any]  # what the compiler's process said of it: memory, times, versions, and its log
    lowering_seconds: float  # time to lower

    def report(self, where: Topology) -> Report:
        """The report on it for these chips; of a program that does not fit, with the compiler's message."""
        base: dict[str, Any] = {
            "topology": str(where),
            "mesh": self.sizes,
            "census": census_of(self.traced.jaxpr.jaxpr),
            "lowering_seconds": self.lowering_seconds,
        }
        if self.module is None:
            return Report(fits=False, message=self.answer["message"], memory=None, limit=device_memory(where), **base)
        return report_of(self.module, self.answer, **base)


def report_of(
    serialized: bytes, answer: Mapping[str, Any], *, topology: str, mesh: Mapping[str, int], **base: Any
) -> Report:
    """The report on a compiled module: `serialized` by the compiler, `answer` from the child process."""
    where = parse_topology(topology)
    chip, limit = device_of(where), device_memory(where)
    clock = clock_of(where.platform, chip, answer["places"])
    module = proto.read(serialized)
    memory = Memory(**answer["memory"])
    return Report(
        topology=topology,
        mesh=dict(mesh),
        fits=memory.peak <= limit,
        limit=limit,
        message="",
        memory=memory,
        rows=collectives_of(module, mesh, clock),
        compute=total_work(module, clock),
        compile_seconds=answer["seconds"],
        compiler_rss=answer["rss"],
        versions=dict(answer["versions"]),
        **base,
    )


_FIGURES = {
    "fits": lambda r: f"{'yes' if r.fits else 'NO'}, {size(r.needed)} of {size(r.available)} per device",
    "held": lambda r: size(r.memory.held) if r.memory else "?",
    "temp": lambda r: size(r.memory.temp) if r.memory else "?",
    "code": lambda r: size(r.memory.generated_code) if r.memory else "?",
    "compute": lambda r: (
        f"{r.compute.flops / 1e12:,.3f} TFLOP in matmuls, at least {1e3 * r.compute.seconds:,.3f} ms"
        + (f", kernel calls not counted: {r.compute.kernels:,}" if r.compute.kernels else "")
    ),
    "wire": lambda r: f"{1e3 * r.wire_seconds:,.3f} ms, of which {1e3 * r.exposed_seconds:,.3f} ms exposed",
    "step": lambda r: (
        f"at least {1e3 * r.seconds:,.3f} ms, in which the matmuls take {r.utilization:.1%} of the chip's peak"
    ),
    "compiled in": lambda r: (
        f"{r.compile_seconds:.1f} s after {r.lowering_seconds:.1f} s of lowering, {size(r.compiler_rss)}"
    ),
}


def size(count: float | Fraction) -> str:
    """Bytes with a binary unit."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:,.2f} {unit}"


def _line(rows: list[CompiledRow]) -> tuple[str, ...]:
    first = rows[0]
    times = sum(r.times for r in rows)
    hidden = sum(r.hidden_flops * r.times for r in rows)
    exposed = sum(r.exposed * r.times for r in rows)
    where = first.place + (f" [{first.branch}]" if first.branch else "")
    return (
        first.kind,
        f"{','.join(first.axes)}={first.n}",
        f"{times}" + ("?" if first.count is None else ""),
        str(first.arrays),
        f"{first.bytes_in:,}",
        size(sum((r.total for r in rows), Fraction(0))),
        "overlapped" if first.asynchronous else "synchronous",
        f"{hidden / 1e9:,.1f} GFLOP" if first.asynchronous else "",
        f"{1e3 * exposed:,.3f} ms",
        where,
    )


def plain_row(row: CensusRow | CompiledRow) -> dict[str, Any]:
    """A row as JSON can hold it."""
    return asdict(row) | {"sent": [row.sent.numerator, row.sent.denominator]}


def read_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a row that `plain_row` wrote."""
    return {**row, "axes": tuple(row["axes"]), "sent": Fraction(*row["sent"])}
