"""A step as compiled for absent chips: memory, collectives, overlap, time by a stated model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

from shardkit._arguments.checks import format_sizes
from shardkit.analysis.hlo import proto
from shardkit.analysis.hlo.collectives import CompiledRow, collectives_of, total_work
from shardkit.analysis.hlo.compute import NO_WORK, Work, clock_of
from shardkit.analysis.hlo.differences import account, describe_differences, format_place, format_times, group_alike
from shardkit.analysis.hlo.memory import Memory
from shardkit.analysis.hlo.topology import Topology, device_memory, device_of, parse_topology
from shardkit.analysis.jaxpr.census import Census, CensusRow, census_of, select_rows, sum_bytes
from shardkit.meshes.layout import table

# A compiler refuses a program in one of two forms, as "(21.50G) exceeds available memory (15.75G)" and
# "Used 21.50G of 15.75G hbm"; `aot.py` says why they are known by their text.
_REQUIRED = (r"\(([\d.]+)([KMGT]?)\) exceeds available", r"[Uu]sed ([\d.]+)([KMGT]?) of")
_AVAILABLE = (r"exceeds available \w+ \(([\d.]+)([KMGT]?)\)", r"[Uu]sed [\d.]+[KMGT]? of ([\d.]+)([KMGT]?)")
_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class Report:
    """One call of a step, compiled for chips that you do not need to have.

    Attributes:
        topology: the chips, "v5p:8x8x8".
        mesh: names and sizes of the mesh axes.
        fits: whether the program fits the memory of a device.
        message: the compiler's message if it does not fit.
        memory: bytes per device; None if the compiler refused the program.
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
        return self._find_in_message(_AVAILABLE) or self.limit

    @property
    def needed(self) -> int:
        """Bytes that the program needs per device; as the compiler rounds them when it does not fit."""
        if self.memory is None:
            return self._find_in_message(_REQUIRED)
        return self.memory.peak

    @property
    def wire_seconds(self) -> float:
        """Seconds on the wire per call, by the model."""
        return sum(row.seconds * row.times for row in self.rows)

    @property
    def exposed_seconds(self) -> float:
        """Seconds on the wire per call that no compute hides, by the model."""
        return sum(row.exposed * row.times for row in self.rows)

    @property
    def seconds(self) -> float:
        """Seconds of a step by the model: its compute, and what no compute hides."""
        return self.compute.seconds + self.exposed_seconds

    @property
    def utilization(self) -> float:
        """The FLOPs of the compiled matmuls over what the chip could do in a step's seconds, a fraction."""
        # A program that neither computes nor sends takes no time by the model.
        if not self.seconds:
            return 0.0
        device = device_of(parse_topology(self.topology))
        return self.compute.flops / device.flops / self.seconds

    def select(self, *, axis: str | None = None, kind: str | None = None) -> tuple[CompiledRow, ...]:
        """The compiled collectives that use an axis and are of a kind."""
        return select_rows(self.rows, axis, kind)

    def count(self, *, axis: str | None = None, kind: str | None = None) -> int:
        """Compiled collectives per call."""
        return sum(row.times for row in self.select(axis=axis, kind=kind))

    def sent(self, *, axis: str | None = None, kind: str | None = None) -> int | Fraction:
        """Bytes sent per device and call; a Fraction only if they are no whole number."""
        return sum_bytes(row.total for row in self.select(axis=axis, kind=kind))

    def differences(self) -> list[str]:
        """What the compiler added, merged, dropped or changed in the program as written, one line each."""
        if self.memory is None:
            return []
        return account(self.census, self.rows)

    def to_json(self) -> str:
        """Everything in the report, with the derived figures."""
        data = asdict(self)
        data["rows"] = [plain_row(row) for row in self.rows]
        data["census"] = [plain_row(row) for row in self.census.rows]
        data["compute"] = self.compute._asdict()
        derived = {
            "needed": self.needed,
            "available": self.available,
            "differences": self.differences(),
            "wire_seconds": self.wire_seconds,
            "exposed_seconds": self.exposed_seconds,
        }
        if self.memory is not None:
            derived["seconds"] = self.seconds
            derived["utilization"] = self.utilization
            derived["held"] = self.memory.held
            derived["peak"] = self.memory.peak
        data["derived"] = derived
        return json.dumps(data, indent=1)

    def __str__(self) -> str:
        lines = [self._format_head()]
        if self.memory is None:
            lines += [f"does not fit: {self._format_needed()}", self.message]
            return "\n".join(lines)
        lines += self._format_figures(self.memory)
        if self.rows:
            lines.append(_format_rows(self.rows))
        else:
            lines.append("no collectives")
        lines.append(describe_differences(self.differences()))
        return "\n".join(lines)

    def _format_head(self) -> str:
        """The chips, the mesh and the versions: "v5e:2x4, mesh data=8 (jax 0.10.2, libtpu 0.0.42)"."""
        head = f"{self.topology}, mesh {format_sizes(self.mesh.items())}"
        if self.versions:
            head += f" ({format_versions(self.versions)})"
        return head

    def _format_needed(self) -> str:
        if not self.needed:
            return "the compiler gives no number"
        return f"{format_bytes(self.needed)} of {format_bytes(self.available)} per device"

    def _format_figures(self, memory: Memory) -> list[str]:
        """A line for each figure of a program that the compiler has compiled."""
        fits = "NO"
        if self.fits:
            fits = "yes"
        compute = f"{self.compute.flops / 1e12:,.3f} TFLOP in matmuls, at least {_format_ms(self.compute.seconds)}"
        if self.compute.kernels:
            compute += f", kernel calls not counted: {self.compute.kernels:,}"
        wire = f"{_format_ms(self.wire_seconds)}, of which {_format_ms(self.exposed_seconds)} exposed"
        share = f"{self.utilization:.1%} of the chip's peak"
        step = f"at least {_format_ms(self.seconds)}, in which the matmuls take {share}"
        compiling = f"{self.compile_seconds:.1f} s after {self.lowering_seconds:.1f} s of lowering"
        return [
            f"fits: {fits}, {self._format_needed()}",
            f"held: {format_bytes(memory.held)}",
            f"temp: {format_bytes(memory.temp)}",
            f"code: {format_bytes(memory.generated_code)}",
            f"compute: {compute}",
            f"wire: {wire}",
            f"step: {step}",
            f"compiled in: {compiling}, {format_bytes(self.compiler_rss)}",
        ]

    def _find_in_message(self, patterns: Sequence[str]) -> int:
        """The bytes in the compiler's message, in the first of its forms that it has; 0 where it has none."""
        for pattern in patterns:
            # For example "Used 21.50G of 15.75G hbm" needs 21.5 * 2^30 bytes. They are rounded: good for a report, not
            # for a comparison of bytes.
            match = re.search(pattern, self.message)
            if match is not None:
                number, unit = match.groups()
                return int(float(number) * _UNITS[unit])
        return 0


class Built(NamedTuple):
    """A program that the compiler of absent chips has compiled or refused."""

    traced: Any  # the traced step
    sizes: dict[str, int]  # names and sizes of the mesh axes
    module: bytes | None  # the serialized program; None where it does not fit the chip's memory
    answer: dict[str, Any]  # from the compiler's process: memory, times, versions and its log
    lowering_seconds: float  # time to lower

    def report(self, where: Topology) -> Report:
        """The report on it for these chips; of a program that does not fit, with the compiler's message."""
        census = census_of(self.traced.jaxpr.jaxpr)
        if self.module is None:
            return Report(
                topology=str(where),
                mesh=self.sizes,
                fits=False,
                message=self.answer["message"],
                memory=None,
                limit=device_memory(where),
                census=census,
                lowering_seconds=self.lowering_seconds,
            )
        return report_of(
            self.module,
            self.answer,
            topology=str(where),
            mesh=self.sizes,
            census=census,
            lowering_seconds=self.lowering_seconds,
        )


def report_of(
    serialized: bytes,
    answer: Mapping[str, Any],
    *,
    topology: str,
    mesh: Mapping[str, int],
    census: Census,
    lowering_seconds: float,
) -> Report:
    """The report on a compiled module: `serialized` by the compiler, `answer` from the child process."""
    where = parse_topology(topology)
    limit = device_memory(where)
    clock = clock_of(where.platform, device_of(where), answer["places"])
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
        census=census,
        lowering_seconds=lowering_seconds,
    )


def format_bytes(count: float | Fraction) -> str:
    """Bytes with a binary unit."""
    value = float(count)
    if value < 1024:
        return f"{value:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1024:
            return f"{value:,.2f} {unit}"
    return f"{value / 1024:,.2f} TiB"


def format_versions(versions: Mapping[str, str]) -> str:
    """Packages with their versions, as "jax 0.10.2, libtpu 0.0.42"; of a version of several lines the first."""
    texts = []
    for package, version in versions.items():
        first_line = version.splitlines()[0]
        texts.append(f"{package} {first_line}")
    return ", ".join(texts)


def _format_ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.3f} ms"


_HEADS = ("kind", "axes", "times", "arrays", "bytes in", "sent/device", "runs", "hidden by", "exposed", "source")


def _format_rows(rows: tuple[CompiledRow, ...]) -> str:
    """A table of collectives, a line for those that are alike in all that it shows."""
    lines: list[tuple[str, ...]] = [_HEADS]
    for group in group_alike(rows):
        lines.append(_make_line(group))
    return table(lines)


def _make_line(rows: list[CompiledRow]) -> tuple[str, ...]:
    """The cells of collectives that are alike, under the heads."""
    first = rows[0]
    sent = sum((row.total for row in rows), Fraction(0))
    exposed = sum(row.exposed * row.times for row in rows)
    runs = "synchronous"
    hidden_by = ""
    if first.asynchronous:
        runs = "overlapped"
        flops = sum(row.hidden_flops * row.times for row in rows)
        hidden_by = f"{flops / 1e9:,.1f} GFLOP"
    return (
        first.kind,
        f"{','.join(first.axes)}={first.n}",
        format_times(rows),
        str(first.arrays),
        f"{first.bytes_in:,}",
        format_bytes(sent),
        runs,
        hidden_by,
        _format_ms(exposed),
        format_place(first),
    )


def plain_row(row: CensusRow | CompiledRow) -> dict[str, Any]:
    """A row as JSON can hold it."""
    fields = asdict(row)
    # JSON has no fractions, and a float would not be read back exactly.
    fields["sent"] = [row.sent.numerator, row.sent.denominator]
    return fields


def read_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a row that `plain_row` wrote."""
    numerator, denominator = row["sent"]
    fields = dict(row)
    fields["axes"] = tuple(row["axes"])
    fields["sent"] = Fraction(numerator, denominator)
    return fields
