"""The collectives of a compiled program: their axes, how often they run, and the compute that hides them.

Read from the module that the compiler scheduled (`proto.py`), in which a collective is:

- a plain instruction, synchronous (TPU, CPU);
- a pair `X-start`, `X-done` (GPU, TPU permutes), or `async-start`, `async-done` around a computation that holds it
  (GPU, and the sparse cores of TPU v6e and 7x); on GPU a pair may still be marked synchronous;
- on TPU, a fusion that ends in a custom call AsyncCollectiveStart, fusions that hold a copy of the collective beside
  the compute that hides it, and one with AsyncCollectiveDone: only the first is counted;
- on TPU, a fusion of an all-reduce and a slice of it, which is a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

from shardkit._jax.primitives import KIND_OF_OPCODE
from shardkit.analysis.hlo import proto
from shardkit.analysis.hlo.compute import NO_CLOCK, Clock, ModuleWork, Work
from shardkit.analysis.hlo.groups import Groups, axes_of, direction
from shardkit.analysis.hlo.trip_counts import trip_count
from shardkit.cost import wire


@dataclass(frozen=True)
class CompiledRow:
    """One collective of a compiled program.

    Attributes:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ppermute".
        name: the compiler's name for the instruction.
        axes: mesh axes in mesh order; ("part of data",) where the groups match no set of axes.
        n: devices per group.
        count: executions per call, loops included; None where a loop's length is not in the program.
        arrays: operands; more than 1 where the compiler merged several collectives.
        bytes_in: bytes of the operands per device.
        bytes_out: bytes of the result per device.
        sent: bytes sent per device and execution by the ring algorithm.
        asynchronous: whether it overlaps with compute.
        hidden_flops: matmul FLOPs scheduled between its start and its end, per execution.
        seconds: time on the wire per execution, by the model of the report; 0 without one.
        exposed: the part of `seconds` that no compute hides.
        op_name: jax's name of the operation that it comes from.
        source: the user's line, "file.py:12 (function)".
        branch: "" or "branch 1 of 2" inside a conditional.
    """

    kind: str
    name: str
    axes: tuple[str, ...]
    n: int
    count: int | None
    arrays: int
    bytes_in: int
    bytes_out: int
    sent: Fraction
    asynchronous: bool
    hidden_flops: int
    seconds: float
    exposed: float
    op_name: str
    source: str
    branch: str

    @property
    def place(self) -> str:
        """The line that led to it, or what the compiler calls it."""
        return self.source or self.op_name or "unknown"

    @property
    def times(self) -> int:
        """Executions per call; a loop of unknown length counts once."""
        return 1 if self.count is None else self.count

    @property
    def total(self) -> Fraction:
        """Bytes sent per device and call."""
        return self.sent * self.times


@dataclass
class _Slot:
    """A scheduled instruction's compute, and how much of that is left to hide collectives, by their links."""

    work: Work
    left: dict[tuple[tuple[str, ...], bool], float] = field(default_factory=dict)


def collectives_of(module: proto.Module, sizes: Mapping[str, int], clock: Clock = NO_CLOCK) -> tuple[CompiledRow, ...]:
    """Every collective of a compiled program, in the order in which they start.

    `sizes` are those of the mesh axes, in mesh order; device i of the program is device i of the mesh.
    """
    return tuple(Reader(module, dict(sizes), clock).rows(module.entry, 1, {}, ""))


def total_work(module: proto.Module, clock: Clock = NO_CLOCK) -> Work:
    """FLOPs, bytes and seconds of one call's compute on one device."""
    return ModuleWork(module, clock.compute).of_computation(module.entry)


class Reader:
    """Reads the scheduled computations of a module, one instruction after the other."""

    def __init__(self, module: proto.Module, sizes: dict[str, int], clock: Clock):
        self.module, self.sizes, self.clock = module, sizes, clock
        self.workload, self.pairs = ModuleWork(module, clock.compute), Pairs(module)

    def rows(self, number: int, times: int | None, known: Mapping[int, int], branch: str) -> Iterator[CompiledRow]:
        """Rows of a computation that runs `times` times; `known` are constants in its parameter's tuple."""
        computation = self.module.computations[number]
        instructions = computation.instructions.values()
        runs, unended = self.pairs.paired(computation)
        slots = [_Slot(self.workload.of(computation, each)) for each in instructions]
        for at, each in enumerate(instructions):
            run = runs.get(at)
            if run is not None:
                found, start = run
                yield self._row(found, times, branch, None if start is None else slots[start + 1 : at])
            elif at not in runs:
                for call in self._calls(computation, each, times, known, branch):
                    yield from self.rows(*call)
        for found in unended:  # nothing is known to hide it
            yield self._row(found, times, branch, None)

    def _calls(
        self,
        computation: proto.Computation,
        each: proto.Instruction,
        times: int | None,
        known: Mapping[int, int],
        branch: str,
    ) -> Iterator[tuple[int, int | None, Mapping[int, int], str]]:
        """The computations that an instruction runs, with the other arguments of `rows`."""
        if each.opcode == "while":
            length, inside = trip_count(self.module, computation, each, known)
            for call, tests in zip(each.calls, (0, 1), strict=True):  # the condition is evaluated once more
                yield call, None if length is None or times is None else times * (length + tests), inside, branch
        elif each.opcode == "conditional":
            for i, call in enumerate(each.calls):
                yield call, times, {}, f"{branch + ', ' if branch else ''}branch {i + 1} of {len(each.calls)}"
        elif each.opcode in ("call", "async-start"):
            for call in each.calls:
                yield call, times, {}, branch

    def _row(self, found: FoundCollective, times: int | None, branch: str, between: list[_Slot] | None) -> CompiledRow:
        """The row of a collective, hidden by the compute between its start and its end."""
        each, kind = found.instruction, found.kind
        operands = [_unpadded(found.computation, o) for o in each.operands]
        if kind == "ppermute":
            operands = [shape for shape in operands if shape.dims] or operands[:1]  # without its flags
        axes, n = axes_of(kind, found.groups, tuple(self.sizes.items()))
        moved = bytes_in = sum(shape.bytes for shape in operands)
        if each.opcode.startswith("ragged"):  # rows, the buffer they go to, sizes and offsets; one of the two is full
            moved, operands = min(shape.bytes for shape in operands[:2]), operands[:1]
            bytes_in = operands[0].bytes
        sent = wire(kind, moved, n, each.pairs).sent
        # The GPU compiler marks a pair that it does not overlap.
        marked = found.carrier.config.get("collective_backend_config", {}).get("is_sync")
        asynchronous = between is not None and not marked
        seconds = exposed = self.clock.wire(kind, found.groups, sent)
        flops = 0
        # Those over the same links, in the same direction, share the compute that hides them.
        links = (axes, kind == "ppermute" and direction(found.groups) < 0)
        if asynchronous and between:
            flops = sum(slot.work.flops for slot in between)
            for slot in between:
                left = slot.left.setdefault(links, slot.work.seconds)
                covered = min(exposed, left)
                slot.left[links] -= covered
                exposed -= covered
        out = {"all_gather": bytes_in * n, "reduce_scatter": bytes_in // n}.get(kind, bytes_in)
        source = self.module.source(each) or self.module.source(found.carrier)
        return CompiledRow(
            kind, each.name, axes, n, times, max(len(operands), 1), bytes_in, out, sent, asynchronous,
            flops, seconds, exposed, each.op_name or found.carrier.op_name, source, branch,
        )  # fmt: skip


def _unpadded(computation: proto.Computation, at: int) -> proto.Shape:
    """The shape of an operand before the compiler padded it for its own reduce-scatter; a pad that is written stays."""
    each = computation.instructions[at]
    own = each.opcode == "pad" and not each.op_name.endswith("/pad")
    return computation.instructions[each.operands[0]].shape if own else each.shape


@dataclass
class FoundCollective:
    """A collective and the scheduled instruction that runs it."""

    computation: proto.Computation
    instruction: proto.Instruction
    carrier: proto.Instruction
    kind: str
    groups: Groups


# One collective of a computation, and the position of the instruction that starts it where it is asynchronous.
Pairing = tuple[FoundCollective, int | None]


class Pairs:
    """Finds the collectives of a module's computations."""

    def __init__(self, module: proto.Module):
        self.module = module

    def paired(self, computation: proto.Computation) -> tuple[dict[int, Pairing | None], list[FoundCollective]]:
        """The collectives of a computation, each asynchronous start paired with its end.

        Returns:
            Runs by the position of the instruction that ends them, None where one starts or continues; and the
            collectives without an end.
        """
        runs: dict[int, Pairing | None] = {}
        started: dict[int, Pairing] = {}
        carries: dict[int, int] = {}  # what continues a started collective, and its start
        for at, each in enumerate(computation.instructions.values()):
            found = self.collective_of(computation, each)
            start = next((carries[o] for o in each.operands if carries.get(o) in started), None)
            if start is not None and self._continues(each, found, started[start][0]):
                carries[each.id] = start
                ends = each.opcode.endswith("-done") or self._has_target(each, "AsyncCollectiveDone")
                runs[at] = started.pop(start) if ends else None
            elif found and self._starts(each):
                started[each.id], carries[each.id], runs[at] = (found, at), each.id, None
            elif found:
                runs[at] = found, None
        return runs, [found for found, _ in started.values()]

    def collective_of(self, computation: proto.Computation, each: proto.Instruction) -> FoundCollective | None:
        """The collective that an instruction is, starts or contains."""
        opcode = each.opcode.removesuffix("-start")
        if opcode in KIND_OF_OPCODE:
            return FoundCollective(computation, each, each, KIND_OF_OPCODE[opcode], each.groups or each.pairs)
        if each.opcode not in ("fusion", "async-start"):
            return None
        for call in each.calls:
            inner = self.module.computations[call]
            for other in inner.instructions.values():
                found = self.collective_of(inner, other)
                if found is None and other.opcode == "call":  # inside an asynchronous computation: it is searched too
                    found = self.collective_of(inner, replace(other, opcode="async-start"))
                if found:
                    if found.kind == "all_reduce" and 0 < each.shape.bytes < found.instruction.shape.bytes:
                        found.kind = "reduce_scatter"  # the fusion returns only this device's slice
                    found.carrier = each
                    return found
        return None

    def _starts(self, each: proto.Instruction) -> bool:
        if each.opcode == "fusion":
            return self._has_target(each, "AsyncCollectiveStart")
        return each.opcode.endswith("-start")

    def _has_target(self, each: proto.Instruction, target: str) -> bool:
        inner = (i for call in each.calls for i in self.module.computations[call].instructions.values())
        return any(i.target == target for i in inner)

    def _continues(self, each: proto.Instruction, found: FoundCollective | None, start: FoundCollective) -> bool:
        """Whether an instruction that reads a started collective continues or ends it."""
        if each.opcode != "fusion":
            return each.opcode == "get-tuple-element" or each.opcode.endswith(("-update", "-done"))
        if found is None or self._starts(each):
            return False
        copy, first = found.instruction, start.instruction
        return (copy.opcode, copy.shape.dims, found.groups) == (first.opcode, first.shape.dims, start.groups)
