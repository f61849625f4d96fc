"""When each instruction of a compiled program runs on a device, by the model of reports.

Compute runs in the order of the schedule. A collective runs beside the compute that hides it, as in its row, and what
no compute hides stands between its end and what follows, where compute waits for it. So the timeline is as long as a
report's compute and exposed seconds together, but for conditionals, of which it has the branch that takes longest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shardkit._check import counted
from shardkit.analysis.hlo import proto
from shardkit.analysis.hlo.collectives import Reader, Step
from shardkit.analysis.hlo.compute import NO_CLOCK, Clock

_MOST = 2000  # spans that a loop may have; of a longer one the rest is one span


class Span(NamedTuple):
    """Something that a device does without interruption.

    Attributes:
        name: the compiler's name of the instruction; of compute that stands together, of the longest one.
        kind: "compute", a kind of collective, or "loop" for iterations that are not listed.
        lane: "compute", or the mesh axes whose links a collective uses, and "backward" for a permute that way round.
        start: seconds from the beginning of the call.
        end: seconds from the beginning of the call.
        exposed: of a collective, whether compute waits for it.
        place: the user's line, or jax's name of the operation.
        longest: of compute, seconds of its longest instruction.
    """

    name: str
    kind: str
    lane: str
    start: float
    end: float
    exposed: bool = False
    place: str = ""
    longest: float = 0.0

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.end - self.start


class Timeline(NamedTuple):
    """The spans of one call on one device, in the order in which they begin.

    Attributes:
        spans: what is done when.
        compute_seconds: seconds of compute.
        exposed_seconds: seconds in which compute waits for a collective.
    """

    spans: tuple[Span, ...] = ()
    compute_seconds: float = 0.0
    exposed_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """The length of the call."""
        return self.compute_seconds + self.exposed_seconds

    def lanes(self) -> list[str]:
        """Compute, then the links that are used, each once."""
        return list(dict.fromkeys(["compute", *(span.lane for span in self.spans)]))

    @staticmethod
    def from_json(data: Any) -> Timeline:
        """The timeline that a report's JSON holds."""
        spans, compute, exposed = data
        return Timeline(tuple(Span(*span) for span in spans), compute, exposed)


NOTHING = Timeline()


def timeline_of(module: proto.Module, sizes: Mapping[str, int], clock: Clock = NO_CLOCK) -> Timeline:
    """When each instruction of a compiled program runs.

    Args:
        module: the program, from `proto.read`.
        sizes: names and sizes of the mesh axes, in mesh order.
        clock: the model of time.
    """
    whole = _Builder(module, Reader(module, dict(sizes), clock)).of(module.entry, {})
    return whole._replace(spans=tuple(sorted(whole.spans, key=lambda span: (span.start, span.end))))


class _Builder:
    def __init__(self, module: proto.Module, reader: Reader):
        self.module, self.reader = module, reader

    def of(self, number: int, known: Mapping[int, int], computes: bool = True) -> Timeline:
        """The timeline of a computation; without its compute where that is no work of the program."""
        spans: list[Span] = []
        begins: list[float] = []
        compute = exposed = 0.0
        for step in self.reader.steps(number, 1, known, ""):
            if step.row is not None:
                spans += _collective(step, begins, compute + exposed)
                exposed += step.row.exposed
            begins.append(compute + exposed)
            inside = self._inside(step) if step.calls else self._alone(step)
            if not computes:
                inside = _waits(inside)
            spans += _shifted(inside.spans, compute + exposed)
            compute, exposed = compute + inside.compute_seconds, exposed + inside.exposed_seconds
        return Timeline(tuple(_together(spans)), compute, exposed)

    def _alone(self, step: Step) -> Timeline:
        """An instruction that runs no other computation."""
        seconds, each = step.work.seconds, step.instruction
        if not seconds:
            return Timeline()
        place = self.module.source(each) or each.op_name
        return Timeline((Span(each.name, "compute", "compute", 0.0, seconds, False, place, seconds),), seconds)

    def _inside(self, step: Step) -> Timeline:
        """What an instruction runs: the iterations of a loop, the longest branch, or calls one after the other."""
        parts = [(self.of(number, known), times) for number, times, known, _ in step.calls]
        if step.instruction.opcode == "while":
            (body, times), (condition, _) = parts
            test = _waits(condition)  # its compute is no work, as in `Workload`
            if times is None:  # counts once, and so does its condition
                return _after([test, body])
            return _after([_repeated(_after([test, body]), times, step.instruction.name), test])
        if step.instruction.opcode == "conditional":
            return max((part for part, _ in parts), key=lambda part: part.seconds)
        plain = step.instruction.opcode == "call"
        return _after([part if plain else _waits(part) for part, _ in parts])


def _collective(step: Step, begins: Sequence[float], now: float) -> list[Span]:
    """The parts of a collective that compute hides, and the one for which it waits, which begins now."""
    row = step.row
    assert row is not None
    parts = [(begins[cover.at] + cover.start, cover.seconds, False) for cover in step.covers]
    parts += [(now, row.exposed, True)] if row.exposed > 0 else []
    return [Span(row.name, row.kind, step.lane, t, t + length, alone, row.place) for t, length, alone in parts]


def _shifted(spans: Sequence[Span], by: float) -> list[Span]:
    return [span._replace(start=span.start + by, end=span.end + by) for span in spans]


def _after(parts: Sequence[Timeline]) -> Timeline:
    """Timelines one after the other."""
    out = Timeline()
    for part in parts:
        spans = (*out.spans, *_shifted(part.spans, out.seconds))
        out = Timeline(spans, out.compute_seconds + part.compute_seconds, out.exposed_seconds + part.exposed_seconds)
    return out


def _repeated(body: Timeline, times: int, name: str) -> Timeline:
    """The iterations of a loop; of many, those after the first are one span."""
    listed = times if times * len(body.spans) <= _MOST else max(1, _MOST // len(body.spans))
    spans = [span for i in range(listed) for span in _shifted(body.spans, i * body.seconds)]
    if listed < times:
        rest = f"{name}: {counted(times - listed, 'more iteration')}"
        spans.append(Span(rest, "loop", "compute", listed * body.seconds, times * body.seconds))
    return Timeline(tuple(spans), times * body.compute_seconds, times * body.exposed_seconds)


def _waits(part: Timeline) -> Timeline:
    """A timeline without its compute: the collectives for which it waits, one after the other."""
    out = Timeline()
    for span in part.spans:
        if span.exposed:
            spans = (*out.spans, span._replace(start=out.seconds, end=out.seconds + span.seconds))
            out = Timeline(spans, 0.0, out.exposed_seconds + span.seconds)
    return out


def _together(spans: Sequence[Span]) -> list[Span]:
    """Compute that follows on compute without a wait is one span."""
    out: list[Span] = []
    last: int | None = None
    for span in spans:
        before = None if last is None else out[last]
        if span.kind == "compute" and before is not None and abs(before.end - span.start) <= 1e-9 * span.end:
            first = before if before.longest >= span.longest else span
            out[last or 0] = first._replace(start=before.start, end=span.end)
            continue
        out.append(span)
        last = len(out) - 1 if span.kind == "compute" else last
    return out
