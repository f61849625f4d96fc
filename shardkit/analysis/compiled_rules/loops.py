"""Collectives that every iteration of a loop repeats, and that one after or before the loop would do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from shardkit.analysis.compiled_rules.program import CompiledProgram, describe_rows
from shardkit.analysis.hlo import proto
from shardkit.analysis.hlo.collectives import CompiledRow
from shardkit.analysis.hlo.report import format_bytes
from shardkit.analysis.hlo.trip_counts import trip_count
from shardkit.analysis.hlo.uses import CompiledUse, Uses, Value
from shardkit.analysis.rules.rule import Finding

_SUM = (
    "Add up each device's part and reduce once after the loop, inside jax.shard_map, as "
    "sk.make_train_step(accumulate=...) does."
)
Loop = tuple[proto.Computation, proto.Instruction]  # the computation around a `while`, and that
_BARRIERS = ("opt-barrier", "optimization-barrier")
Passes = Callable[[CompiledUse], bool]
# A sum of what these make of each term is what they make of the sum; `_is_linear` looks at the operands.
_LINEAR = {"add", "subtract", "negate", "convert", "broadcast", "pad", "slice", "concatenate", "all-reduce"}
# What may give another value in each iteration, of whatever operands.
_MAY_CHANGE = ("parameter", "while", "rng", "rng-bit-generator", "custom-call")


def loops(program: CompiledProgram) -> Iterator[Finding]:
    """All-reduces in a loop that only adds up their results, and all-gathers of operands that no iteration changes."""
    groups: dict[_Repetition, list[CompiledRow]] = {}
    loop_of: dict[_Repetition, Loop] = {}
    for row, computation, instruction in program.collectives("all_reduce", "all_gather"):
        loop = None
        if row.kind == "all_reduce":
            loop = _find_summing_loop(program.uses, computation, instruction)
        elif computation.id in program.uses.loops and _is_same_each_time(computation, instruction):
            loop = program.uses.loops[computation.id]
        if loop is not None:
            _, while_instruction = loop
            key = _Repetition(row.kind, row.axes, row.place, while_instruction.id)
            groups.setdefault(key, []).append(row)
            loop_of[key] = loop
    for key, rows in groups.items():
        runs = _describe_runs(program, rows, loop_of[key])
        if key.kind == "all_reduce":
            yield Finding("summed-each-iteration", f"{runs}, which only adds up the results.", key.place, _SUM)
        else:
            more = format_bytes(sum(row.bytes_out for row in rows))
            remedy = f"Gather before the loop, if {more} more per device fit."
            yield Finding("gathered-each-iteration", f"{runs}, on the same operand each time.", key.place, remedy)


class _Repetition(NamedTuple):
    """Collectives of one kind, place and loop, which are one finding."""

    kind: str
    axes: tuple[str, ...]
    place: str
    loop: int


def _describe_runs(program: CompiledProgram, rows: list[CompiledRow], loop: Loop) -> str:
    """As "2 x all_gather over 'fsdp' of 8,192 bytes in all run 12 times in the loop at model.py:40 (layers)"."""
    computation, while_instruction = loop
    count, _ = trip_count(program.module, computation, while_instruction, {})
    times = "an unknown number of times"
    if count is not None:
        times = f"{count} times"
    verb = "run"
    if len(rows) == 1:
        verb = "runs"
    text = f"{describe_rows(rows)} {verb} {times} in the loop"
    source = program.module.source(while_instruction)
    if source:
        text += f" at {source}"
    return text


def _find_summing_loop(uses: Uses, computation: proto.Computation, all_reduce: proto.Instruction) -> Loop | None:
    """The innermost loop around an all-reduce that only adds up its results; None if there is none.

    A loop around may instead stack the results (a scan over layers that returns their gradients), and the loop around
    that adds up the stacks: accumulation over microbatches. For example

        while over 4 microbatches:              adds up the stack, element 2 of its state: this loop
            while over 12 layers:               writes each sum into a stack, element 5 of its state
                all-reduce of one gradient
    """
    values = [Value(computation, all_reduce)]
    while computation.id in uses.loops:
        loop = uses.loops[computation.id]
        if _find_accumulators(uses, values, _is_linear):
            return loop
        stacks = _find_accumulators(uses, values, _is_linear_or_stacks)
        if not stacks:
            return None
        # What the loop around does with the stacks: they are elements of what this loop returns.
        computation, instruction = loop
        values = []
        for reader, _ in uses.readers(computation, instruction.id):
            if reader.opcode == "get-tuple-element" and reader.tuple_index in stacks:
                values.append(Value(computation, reader))
    return None


def _find_accumulators(uses: Uses, values: list[Value], passes: Passes) -> set[int]:
    """The elements of a loop's state that only accumulate these values; none if they are used in any other way."""
    elements = _find_elements(uses, values, passes)
    body = values[0].computation
    state_reads: dict[int, proto.Instruction] = {}  # the first read of each element
    for reader, _ in uses.readers(body, body.parameters[0].id):
        if reader.opcode == "get-tuple-element":
            state_reads.setdefault(reader.tuple_index, reader)
    for element in elements:
        carried = state_reads.get(element)
        # The old value of the element may only go into the new one.
        if carried is None or _find_elements(uses, [Value(body, carried)], passes) != {element}:
            return set()
    return elements


def _find_elements(uses: Uses, values: list[Value], passes: Passes) -> set[int]:
    """The elements of the loop's state that values become; none if anything else reads them."""
    elements = set()
    for value in values:
        for use in uses.find_ends(value, passes):
            if use.element is None:
                return set()
            elements.add(use.element)
    return elements


def _is_linear(use: CompiledUse) -> bool:
    """Whether an instruction makes of a sum of values the sum of what it makes of each of them."""
    instruction = use.value.instruction
    if instruction.opcode == "multiply":
        return instruction.operands[0] != instruction.operands[1]  # no square
    if instruction.opcode == "divide":
        return use.position == 0  # the dividend
    if instruction.opcode == "select":
        return use.position > 0  # one of the values, and not the predicate
    return instruction.opcode in _LINEAR


def _is_linear_or_stacks(use: CompiledUse) -> bool:
    """The same, or the write of a value into a stack: of the stack (operand 0) or of the value (operand 1)."""
    if use.opcode == "dynamic-update-slice":
        return use.position < 2
    return _is_linear(use)


def _is_same_each_time(body: proto.Computation, collective: proto.Instruction) -> bool:
    """Whether what a collective sends is the same in every iteration of the loop with this body.

    It is if nothing from which it is computed changes: this walks back from its operands, and the first instruction
    that may give another value decides. A loop and no recursion, because a body may compute in thousands of steps.
    """
    visited = set()  # ids of instructions: many share operands
    waiting = list(collective.operands)
    while waiting:
        number = waiting.pop()
        if number in visited:
            continue
        visited.add(number)
        instruction = _skip_barrier(body, body.instructions[number])
        if instruction.opcode == "get-tuple-element" and instruction.operands == (body.parameters[0].id,):
            if not _is_returned_unchanged(body, instruction):
                return False
        elif instruction.opcode in _MAY_CHANGE:
            return False
        else:
            waiting += instruction.operands
    return True


def _skip_barrier(body: proto.Computation, instruction: proto.Instruction) -> proto.Instruction:
    """The value that jax.checkpoint keeps the compiler from moving; any other as it is.

    The GPU's compiler takes the barrier away when it has moved all it would, and leaves the tuple.
    """
    while instruction.opcode == "get-tuple-element":
        source = body.instructions[instruction.operands[0]]
        if source.opcode in _BARRIERS:
            source = body.instructions[source.operands[0]]
        if source.opcode != "tuple":
            break
        instruction = body.instructions[source.operands[instruction.tuple_index]]
    return instruction


def _is_returned_unchanged(body: proto.Computation, read: proto.Instruction) -> bool:
    """Whether the body returns an element of the loop's state as it was read, perhaps copied."""
    root = body.instructions[body.root]
    if root.opcode != "tuple":
        return False
    instruction = body.instructions[root.operands[read.tuple_index]]
    while instruction.opcode in ("copy", "bitcast"):
        instruction = body.instructions[instruction.operands[0]]
    if instruction.opcode != "get-tuple-element":
        return False
    return instruction.operands == read.operands and instruction.tuple_index == read.tuple_index
