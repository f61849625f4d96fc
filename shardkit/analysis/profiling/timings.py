"""Collectives with their measured times, and the table of them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from shardkit import cost
from shardkit._arguments.checks import counted
from shardkit.analysis.hlo.collectives import CompiledRow
from shardkit.analysis.hlo.report import size
from shardkit.meshes.layout import table

SIMULATED = (
    "These devices are simulated: a collective's time is mostly threads waiting for each other and for a core. "
    "Counts, bytes and outliers are meaningful; bandwidths are not."
)


@dataclass(frozen=True)
class Machine:
    """Where a measurement ran."""

    jax: str  # its version
    platform: str  # "cpu", "gpu", "tpu"
    kind: str  # the name of the devices
    devices: int  # their number, over all processes
    cores: int  # CPU cores that this process may use

    @property
    def simulated(self) -> bool:
        """Whether the devices are threads that share the CPU's cores."""
        return self.platform == "cpu"

    def __str__(self) -> str:
        return f"jax {self.jax}, {self.devices} x {self.kind} ({self.platform}), {self.cores} CPU cores"


@dataclass(frozen=True)
class Timing:
    """One collective of a compiled program, as it ran.

    Attributes:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ppermute".
        name: the compiler's name for the instruction, also in the trace.
        axes: mesh axes.
        n: devices per group.
        count: executions per call according to the program; None where a loop's length is not in it.
        times: executions per call and device according to the trace; the mean over calls and devices.
        bytes: its size as nccl-tests counts it, per device: the result of an all_gather, the operand of all others.
        seconds: per device and call, waiting included; the mean over devices and calls. None where the trace does not
            show it.
        fastest: the same for the fastest device of each execution, which arrived last and waited least.
        asynchronous: whether it overlaps compute.
        source: the user's line, "file.py:12 (function)".
        branch: "" or "branch 1 of 2" inside a conditional.
    """

    kind: str
    name: str
    axes: tuple[str, ...]
    n: int
    count: int | None
    times: float
    bytes: int
    seconds: float | None
    fastest: float | None
    asynchronous: bool
    source: str
    branch: str

    @property
    def algorithm_bandwidth(self) -> float | None:
        """Bytes over the fastest device's time, bytes/s; algbw in nccl-tests."""
        return self.times * self.bytes / self.fastest if self.fastest else None

    @property
    def bus_bandwidth(self) -> float | None:
        """Algorithm bandwidth times `cost.bus_factor`, bytes/s, comparable with a link's; busbw in nccl-tests."""
        algorithm = self.algorithm_bandwidth
        return None if algorithm is None else algorithm * cost.bus_factor(self.kind, self.n)


@dataclass(frozen=True)
class Profile:
    """Measured calls of a program; `print` it, or read the rows.

    Attributes:
        rows: every collective of the compiled program, in the order in which they start.
        steps: wall-clock seconds of each call, from dispatch until its results are ready.
        devices: devices in the trace: those of this process.
        machine: where it ran.
        notes: caveats, one sentence each.
    """

    rows: tuple[Timing, ...]
    steps: tuple[float, ...]
    devices: int
    machine: Machine
    notes: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """Seconds per call, the mean of `steps`."""
        return sum(self.steps) / len(self.steps)

    def share(self, row: Timing) -> float | None:
        """The fraction of a call during which a device is in a collective; asynchronous ones may overlap."""
        return None if row.seconds is None else row.seconds / self.seconds

    def select(self, *, axis: str | None = None, kind: str | None = None) -> tuple[Timing, ...]:
        """The collectives that use an axis and are of a kind."""
        return tuple(r for r in self.rows if axis in (None, *r.axes) and kind in (None, r.kind))

    def to_json(self) -> str:
        """Everything in the profile, with the derived figures: seconds, bytes, bytes/s."""
        rows = [
            asdict(r)
            | {"share": self.share(r), "algorithm_bandwidth": r.algorithm_bandwidth, "bus_bandwidth": r.bus_bandwidth}
            for r in self.rows
        ]
        return json.dumps(asdict(self) | {"rows": rows, "seconds": self.seconds}, indent=1)

    def __str__(self) -> str:
        low, high = min(self.steps), max(self.steps)
        calls = counted(len(self.steps), "call")
        lines = [
            str(self.machine),
            f"one call: {_ms(self.seconds)} ms, the mean of {calls} from {_ms(low)} to {_ms(high)} ms",
        ]
        shown = sorted(_alike(self.rows), key=lambda r: -(r.seconds or 0))
        head = ("kind", "axes", "times", "bytes", "ms/call", "fastest device", "of the call", "alg GB/s", "bus GB/s")
        cells = [(*head, "source")] + [_line(r, self.share(r)) for r in shown]
        lines.append(table(cells) if self.rows else "no collectives")
        known = [r.seconds for r in self.rows if r.seconds is not None]
        if known:
            what = f"{_ms(sum(known))} ms, {sum(known) / self.seconds:.0%} of a call"
            beside = any(r.asynchronous for r in self.rows)
            lines.append(f"in collectives: {what}{'; asynchronous ones overlap compute' if beside else ''}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


class Span(NamedTuple):
    """One execution of an instruction on a device, nanoseconds."""

    start: float
    end: float


Spans = Mapping[str, Mapping[object, Sequence[Span]]]  # by the collective's name, then by device


def profile_of(rows: Sequence[CompiledRow], spans: Spans, steps: Sequence[float], where: Machine) -> Profile:
    """The profile of calls that took `steps` seconds each, from the spans of each device."""
    devices = {device for seen in spans.values() for device in seen}
    timings, notes = [], [SIMULATED] if where.simulated else []
    for row in rows:
        seen = spans.get(row.name, {})
        per_device = len(steps) * max(len(devices), 1)
        times = sum(map(len, seen.values())) / per_device
        seconds = sum(s.end - s.start for each in seen.values() for s in each) / per_device / 1e9
        # A lost event would shift all later ones of its device.
        together = len(seen) == len(devices) and len({len(each) for each in seen.values()}) == 1
        turns = zip(*seen.values(), strict=True) if together else ()
        fastest = sum(min(s.end - s.start for s in turn) for turn in turns) / len(steps) / 1e9
        if times and row.count is not None and times != row.count and not row.branch:
            notes.append(f"{row.name} runs {row.count} times per call, and the trace shows {times:g}.")
        timings.append(
            Timing(
                kind=row.kind,
                name=row.name,
                axes=row.axes,
                n=row.n,
                count=row.count,
                times=times,
                bytes=row.bytes_out if row.kind == "all_gather" else row.bytes_in,
                seconds=seconds if times else None,
                fastest=fastest if times and together else None,
                asynchronous=row.asynchronous,
                source=row.place,
                branch=row.branch,
            )
        )
    hidden = [t.name for t in timings if t.seconds is None and not t.branch]
    if hidden:
        some = ", ".join(hidden[:3]) + (f" and {len(hidden) - 3} more" if len(hidden) > 3 else "")
        notes.append(
            f"The trace of {where.platform} under jax {where.jax} does not show {len(hidden)} of {len(rows)} "
            f"collectives ({some}), whose times are unknown."
        )
    return Profile(tuple(timings), tuple(steps), len(devices), where, tuple(notes))


def _alike(rows: Iterable[Timing]) -> Iterator[Timing]:
    """Rows that differ in nothing that is shown, as one: several instructions of the same line of code."""
    groups: dict[tuple[Any, ...], list[Timing]] = defaultdict(list)
    for r in rows:
        groups[r.kind, r.axes, r.bytes, r.source, r.branch, r.asynchronous, r.seconds is None].append(r)
    for same in groups.values():
        both = {key: [getattr(r, key) for r in same] for key in ("seconds", "fastest", "count")}
        added: dict[str, Any] = {key: None if None in values else sum(values) for key, values in both.items()}
        yield Timing(**{**asdict(same[0]), **added, "times": sum(r.times for r in same)})


def _line(row: Timing, share: float | None) -> tuple[str, ...]:
    rates = (row.algorithm_bandwidth, row.bus_bandwidth)
    return (
        row.kind + (" (async)" if row.asynchronous else ""),
        f"{','.join(row.axes)}={row.n}",
        f"{row.times:g}",
        size(row.bytes),
        *("?" if seconds is None else _ms(seconds) for seconds in (row.seconds, row.fastest)),
        "?" if share is None else f"{share:.1%}",
        *("?" if rate is None else f"{rate / 1e9:.3f}" for rate in rates),
        row.source + (f" [{row.branch}]" if row.branch else ""),
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.3f}"
