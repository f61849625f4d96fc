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
from types import MappingProxyType
from typing import NamedTuple

from shardkit._jax.jaxprs import find_share
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
        if self.count is None:
            return 1
        return self.count

    @property
    def total(self) -> Fraction:
        """Bytes sent per device and call."""
        return self.sent * self.times


@dataclass
class _Slot:
    """One scheduled instruction: its compute, and how many seconds of that can still hide a collective.

    Collectives over different links run at the same time, and each may be hidden by the same compute. Collectives over
    the same links share it: `unused` holds the seconds that are left, by links.
    """

    work: Work
    unused: dict[tuple[tuple[str, ...], bool], float] = field(default_factory=dict)


def collectives_of(module: proto.Module, sizes: Mapping[str, int], clock: Clock = NO_CLOCK) -> tuple[CompiledRow, ...]:
    """Every collective of a compiled program, in the order in which they start.

    `sizes` are those of the mesh axes, in mesh order; device i of the program is device i of the mesh.
    """
    return tuple(Reader(module, dict(sizes), clock).rows(ComputationRun(module.entry)))


def total_work(module: proto.Module, clock: Clock = NO_CLOCK) -> Work:
    """FLOPs, bytes and seconds of one call's compute on one device."""
    return ModuleWork(module, clock.compute).of_computation(module.entry)


class ComputationRun(NamedTuple):
    """A computation, and how one call of the program runs it.

    Attributes:
        number: its id.
        times: how often; None if that is not known.
        constants: the whole numbers in the tuple that is its parameter, by their index.
        branch: "" or "branch 1 of 2" inside a conditional.
    """

    number: int
    times: int | None = 1
    constants: Mapping[int, int] = MappingProxyType({})
    branch: str = ""


# Worked example. A step on fsdp=4 has these scheduled instructions:
#
#     %start = (f32[8,64], f32[32,64]) all-gather-start(%w), replica_groups={{0,1,2,3}},
#              metadata={op_name="jit(step)/all_gather" stack_frame_id=7}
#     %y     = f32[32,64] dot(%a, %b), lhs_contracting_dims={1}
#     %whole = f32[32,64] all-gather-done(%start)
#
# They are one row: an all_gather over ("fsdp",), n=4, count=1, bytes_in=2048, bytes_out=8192, sent=3 x 2048. It is
# asynchronous, %y is between its start and its end: hidden_flops are those of %y, and exposed are its seconds on the
# wire without those of %y. In the body of a loop of 12 layers it is the same row with count=12.
class Reader:
    """Reads the scheduled computations of a module, one instruction after the other."""

    def __init__(self, module: proto.Module, sizes: dict[str, int], clock: Clock):
        self.module = module
        self.sizes = sizes
        self.clock = clock
        self.workload = ModuleWork(module, clock.compute)
        self.pairs = Pairs(module)

    def rows(self, run: ComputationRun, under_way: frozenset[int] = frozenset()) -> Iterator[CompiledRow]:
        """The rows of a computation; `under_way` are the channels of collectives that start before it and end after."""
        computation = self.module.computations[run.number]
        instructions = list(computation.instructions.values())
        pairings, unended = self.pairs.pair(computation, under_way)
        slots = [_Slot(self.workload.of(computation, instruction)) for instruction in instructions]
        for position, instruction in enumerate(instructions):
            if position not in pairings:
                channels = under_way | _find_channels_under_way(pairings, position)
                for inner_run in self._list_runs(run, computation, instruction):
                    yield from self.rows(inner_run, channels)
                continue
            pairing = pairings[position]
            if pairing is None:  # an asynchronous collective starts or continues here; its row stands at its end
                continue
            collective, start = pairing
            between = None
            if start is not None:
                between = slots[start + 1 : position]
            yield self._make_row(run, collective, between)
        for collective in unended:  # nothing is known to hide it
            yield self._make_row(run, collective, None)

    def _list_runs(
        self, run: ComputationRun, computation: proto.Computation, instruction: proto.Instruction
    ) -> Iterator[ComputationRun]:
        """The computations that an instruction runs, in a run of the computation that has it."""
        times = run.times
        branch = run.branch
        if instruction.opcode == "while":
            body, condition = instruction.calls
            length, constants = trip_count(self.module, computation, instruction, run.constants)
            if length is None or times is None:
                yield ComputationRun(body, None, constants, branch)
                yield ComputationRun(condition, None, constants, branch)
            else:
                yield ComputationRun(body, times * length, constants, branch)
                yield ComputationRun(condition, times * (length + 1), constants, branch)  # once more, to end the loop
        elif instruction.opcode == "conditional":
            # The empty branch sends nothing, so that its count does not matter.
            share = find_share(instruction.op_name)
            if share:
                times = share.count_runs(times)
            for number, call in enumerate(instruction.calls, 1):
                inner_branch = f"branch {number} of {len(instruction.calls)}"
                if branch:  # a conditional in a conditional
                    inner_branch = f"{branch}, {inner_branch}"
                yield ComputationRun(call, times, branch=inner_branch)
        elif instruction.opcode in ("call", "async-start"):
            for call in instruction.calls:
                yield ComputationRun(call, times, branch=branch)

    def _make_row(self, run: ComputationRun, collective: FoundCollective, between: list[_Slot] | None) -> CompiledRow:
        """The row of a collective; `between` is the compute between its start and its end; None if synchronous."""
        instruction = collective.instruction
        kind = collective.kind
        axes, n = axes_of(kind, collective.groups, tuple(self.sizes.items()))
        operands = _measure_operands(collective)
        sent = wire(kind, operands.payload, n, instruction.pairs).sent
        seconds = self.clock.wire(kind, collective.groups, sent)
        exposed = seconds
        hidden_flops = 0
        asynchronous = between is not None and not collective.is_synchronous_pair
        if asynchronous and between:
            # Permutes both ways round a ring use the two directions of the same links.
            goes_down = kind == "ppermute" and direction(collective.groups) < 0
            exposed = _hide(seconds, between, (axes, goes_down))
            hidden_flops = sum(slot.work.flops for slot in between)
        return CompiledRow(
            kind=kind,
            name=instruction.name,
            axes=axes,
            n=n,
            count=run.times,
            arrays=operands.arrays,
            bytes_in=operands.bytes,
            bytes_out=_count_result_bytes(kind, operands.bytes, n),
            sent=sent,
            asynchronous=asynchronous,
            hidden_flops=hidden_flops,
            seconds=seconds,
            exposed=exposed,
            op_name=instruction.op_name or collective.carrier.op_name,
            source=collective.find_source(self.module),
            branch=run.branch,
        )


def _hide(seconds: float, between: list[_Slot], links: tuple[tuple[str, ...], bool]) -> float:
    """The seconds of a collective that the compute between its start and its end does not hide.

    What hides it is taken from the slots, for the next collective over the same links in the same direction. For
    example two gathers of 3 s over "fsdp" around one product of 4 s: the first is hidden, the second for 1 s.
    """
    # The earliest compute first: what is left later may still hide a collective that starts later.
    exposed = seconds
    for slot in between:
        unused = slot.unused.setdefault(links, slot.work.seconds)
        covered = min(exposed, unused)
        slot.unused[links] = unused - covered
        exposed -= covered
    return exposed


class _Operands(NamedTuple):
    """The operands of a collective: how many arrays, their bytes, and how many of these can be sent."""

    arrays: int
    bytes: int
    payload: int


def _measure_operands(collective: FoundCollective) -> _Operands:
    """The operands as written; those of a ragged all-to-all are the rows, a buffer for results, sizes and offsets."""
    operands = _list_operands(collective)
    if collective.instruction.opcode.startswith("ragged"):
        # Either the rows or the buffer has the padding of the larger one, so no more than the smaller one is sent.
        rows, buffer, *_ = operands
        return _Operands(1, rows.bytes, min(rows.bytes, buffer.bytes))
    size = sum(shape.bytes for shape in operands)
    return _Operands(max(len(operands), 1), size, size)


def _count_result_bytes(kind: str, operand_bytes: int, n: int) -> int:
    """Bytes of the result, without the compiler's own padding, which the result's shape would have."""
    if kind == "all_gather":
        return operand_bytes * n
    if kind == "reduce_scatter":
        return operand_bytes // n
    return operand_bytes


def _list_operands(collective: FoundCollective) -> list[proto.Shape]:
    """The shapes of the operands, before the compiler's own padding and without a permute's flags."""
    computation = collective.computation
    shapes = [_shape_before_padding(computation, number) for number in collective.instruction.operands]
    if collective.kind != "ppermute":
        return shapes
    arrays = [shape for shape in shapes if shape.dims]
    return arrays or shapes[:1]


def _shape_before_padding(computation: proto.Computation, number: int) -> proto.Shape:
    """The shape of an operand before the compiler padded it for its own reduce-scatter; a pad that is written stays."""
    operand = computation.instructions[number]
    is_written = operand.op_name.endswith("/pad")
    if operand.opcode == "pad" and not is_written:
        return computation.instructions[operand.operands[0]].shape
    return operand.shape


@dataclass
class FoundCollective:
    """A collective and the scheduled instruction that runs it."""

    computation: proto.Computation
    instruction: proto.Instruction
    carrier: proto.Instruction
    kind: str
    groups: Groups

    @property
    def is_synchronous_pair(self) -> bool:
        """Whether the compiler for GPUs marked a start and its end as a pair that it does not overlap."""
        return bool(self.carrier.config.get("collective_backend_config", {}).get("is_sync"))

    def find_source(self, module: proto.Module) -> str:
        """The user's line that led to it, "" if the module does not say."""
        return module.source(self.instruction) or module.source(self.carrier)


# One collective of a computation, and the position of the instruction that starts it where it is asynchronous.
Pairing = tuple[FoundCollective, int | None]


class Pairs:
    """Finds the collectives of a module's computations."""

    def __init__(self, module: proto.Module):
        self.module = module

    def pair(
        self, computation: proto.Computation, under_way: frozenset[int] = frozenset()
    ) -> tuple[dict[int, Pairing | None], list[FoundCollective]]:
        """The collectives of a computation, each asynchronous start paired with its end.

        The compiler of TPUs lets a collective go on beside the matmuls of a loop: it starts before the loop, has copies
        in the body, and ends after it. All of them have its channel.

        Returns:
            Pairings by the position of the instruction that ends them, None where one starts or continues; and the
            collectives without an end. For example

                0  all-gather-start          None
                1  dot
                2  all-gather-done           (the all-gather, 0)
                3  all-reduce                (the all-reduce, None)
        """
        pairings: dict[int, Pairing | None] = {}
        started: dict[int, Pairing] = {}  # by the id of the instruction that starts it
        start_of: dict[int, int] = {}  # that id, by the id of what starts or continues the collective
        for position, instruction in enumerate(computation.instructions.values()):
            collective = self.collective_of(computation, instruction)
            start = _find_start(instruction, start_of, started)
            if start is None and collective is not None:
                start = self._find_start_of_copy(collective, started)
            if start is not None and self._continues(instruction, collective, started[start][0]):
                start_of[instruction.id] = start
                pairings[position] = None
                if self._ends(instruction):
                    pairings[position] = started.pop(start)
                continue
            if collective is None:
                continue
            if self._is_copy_of(collective, under_way):  # counted where it ends, after this loop
                pairings[position] = None
            elif self._starts(instruction):
                started[instruction.id] = (collective, position)
                start_of[instruction.id] = instruction.id
                pairings[position] = None
            else:
                pairings[position] = (collective, None)
        unended = [collective for collective, _ in started.values()]
        return pairings, unended

    def _find_start_of_copy(self, copy: FoundCollective, started: Mapping[int, Pairing]) -> int | None:
        """The id of the started collective of which a fusion after a loop holds a copy, None without one."""
        for number, (collective, _) in started.items():
            if self._is_copy_of(copy, frozenset([collective.instruction.channel])):
                return number
        return None

    def _is_copy_of(self, collective: FoundCollective, channels: frozenset[int]) -> bool:
        """Whether a fusion holds a copy of a collective that one of these channels belongs to."""
        channel = collective.instruction.channel
        if collective.carrier.opcode != "fusion" or self._starts(collective.carrier):
            return False
        return channel > 0 and channel in channels

    def collective_of(self, computation: proto.Computation, instruction: proto.Instruction) -> FoundCollective | None:
        """The collective that an instruction is, starts or contains."""
        opcode = instruction.opcode.removesuffix("-start")
        if opcode in KIND_OF_OPCODE:
            groups = instruction.groups or instruction.pairs
            return FoundCollective(computation, instruction, instruction, KIND_OF_OPCODE[opcode], groups)
        if instruction.opcode not in ("fusion", "async-start"):
            return None
        for call in instruction.calls:
            collective = self._collective_in(self.module.computations[call])
            if collective is not None:
                returned = instruction.shape.bytes
                if collective.kind == "all_reduce" and 0 < returned < collective.instruction.shape.bytes:
                    collective.kind = "reduce_scatter"  # the fusion returns only this device's slice
                collective.carrier = instruction
                return collective
        return None

    def _collective_in(self, computation: proto.Computation) -> FoundCollective | None:
        """The first collective of a computation that is part of an instruction."""
        for instruction in computation.instructions.values():
            collective = self.collective_of(computation, instruction)
            if collective is None and instruction.opcode == "call":
                # A call inside of an asynchronous computation is part of it, and is searched as that is.
                collective = self.collective_of(computation, replace(instruction, opcode="async-start"))
            if collective is not None:
                return collective
        return None

    def _starts(self, instruction: proto.Instruction) -> bool:
        if instruction.opcode == "fusion":
            return self._has_target(instruction, "AsyncCollectiveStart")
        return instruction.opcode.endswith("-start")

    def _ends(self, instruction: proto.Instruction) -> bool:
        return instruction.opcode.endswith("-done") or self._has_target(instruction, "AsyncCollectiveDone")

    def _has_target(self, instruction: proto.Instruction, target: str) -> bool:
        for call in instruction.calls:
            for inner in self.module.computations[call].instructions.values():
                if inner.target == target:
                    return True
        return False

    def _continues(
        self, instruction: proto.Instruction, collective: FoundCollective | None, start: FoundCollective
    ) -> bool:
        """Whether an instruction that reads a started collective continues or ends it."""
        opcode = instruction.opcode
        if opcode != "fusion":
            return opcode == "get-tuple-element" or opcode.endswith(("-update", "-done"))
        if collective is None or self._starts(instruction):
            return False
        # On TPU each fusion between start and end holds a copy of the collective.
        copy = collective.instruction
        first = start.instruction
        return copy.opcode == first.opcode and copy.shape.dims == first.shape.dims and collective.groups == start.groups


def _find_channels_under_way(pairings: Mapping[int, Pairing | None], position: int) -> frozenset[int]:
    """The channels of the collectives that start before a position and end after it."""
    channels = set()
    for end, pairing in pairings.items():
        if pairing is None:
            continue
        collective, start = pairing
        if start is not None and start < position < end:
            channels.add(collective.instruction.channel)
    return frozenset(channels)


def _find_start(
    instruction: proto.Instruction, start_of: Mapping[int, int], started: Mapping[int, Pairing]
) -> int | None:
    """The id of the started collective that an instruction reads, None if it reads none."""
    for operand in instruction.operands:
        start = start_of.get(operand)
        if start in started:
            return start
    return None
