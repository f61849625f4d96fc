"""Values that the partitioner makes whole on every device to move them from one sharding to another."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from shardkit._arguments.checks import quote
from shardkit.analysis.compiled_rules.program import CompiledProgram
from shardkit.analysis.hlo.collectives import CompiledRow
from shardkit.analysis.hlo.differences import is_written
from shardkit.analysis.hlo.uses import CompiledUse, Value
from shardkit.analysis.rules.rule import Finding

_MESSAGE = re.compile(r"from sharding (.+?) to (.+?) (?:efficiently|without)")
_OPERATION = re.compile(r"HLO operation:? (%\S+) = (\w+\[[\d,]*\])")
_METADATA = re.compile(r'op_name="([^"]*)"(?:.*?stack_frame_id=(\d+))?')
_REMEDY = (
    "Pass through a sharding that shares axes with both, by jax.lax.with_sharding_constraint, or give both ends the "
    "same one."
)


def rematerialized(program: CompiledProgram) -> Iterator[Finding]:
    """Values that the compiler's log names, and gathers in the program after which each device slices its piece."""
    logged_places = set()
    for line in program.log:
        finding = _read_log_line(program, line)
        logged_places.add(finding.source)
        yield finding
    largest: dict[str, _Gather] = {}  # by place: a value is gathered over one axis after the other
    for gather in _find_gathers_to_slice(program):
        place = gather.row.place
        if place in logged_places:
            continue
        if place not in largest or largest[place].row.bytes_out < gather.row.bytes_out:
            largest[place] = gather
    for place, gather in largest.items():
        yield Finding(
            "full-rematerialization",
            f"all_gather over {quote(gather.row.axes)} makes a value of {gather.row.bytes_out:,} bytes, of which each "
            f"device keeps 1/{gather.parts}.",
            place,
            _REMEDY,
        )


class _Gather(NamedTuple):
    """A gather that the compiler added, after which each device keeps one of `parts` pieces."""

    row: CompiledRow
    parts: int


def _find_gathers_to_slice(program: CompiledProgram) -> Iterator[_Gather]:
    """Finds gathers that the compiler added, where every reader slices this device's piece out of the result.

    For example a value split by rows over 8 devices is wanted split by columns: f32[64,64] is gathered on each, and
    each slices f32[64,8]. An all_to_all would send an eighth.
    """
    for row, computation, instruction in program.collectives("all_gather"):
        if is_written(row):
            continue
        readers = list(program.uses.find_ends(Value(computation, instruction), _passes_on))
        size = instruction.shape.size
        size_of_pieces = sum(reader.value.instruction.shape.size for reader in readers)
        # All readers together keep more than one of the n pieces: then the gather sends what is needed.
        if not readers or size_of_pieces * row.n > size:
            continue
        if all(_takes_own_piece(program, reader) for reader in readers):
            yield _Gather(row, size // max(size_of_pieces, 1))


def _read_log_line(program: CompiledProgram, line: str) -> Finding:
    """The finding for a line of the compiler's log.

    For example "Involuntary full rematerialization. The compiler cannot go from sharding {devices=[8,1]<=[8]} to
    {devices=[1,8]<=[8]} efficiently for HLO operation %dot.1 = f32[64,64]{1,0} dot(...), metadata={op_name="jit(f)/dot"
    stack_frame_id=3}".
    """
    value = "a value"
    operation = _OPERATION.search(line)
    if operation:
        name_in_program = operation[1].lstrip("%")
        value = f"{name_in_program} {operation[2]}"
    change = ""
    shardings = _MESSAGE.search(line)
    if shardings:
        change = f", from {shardings[1]} to {shardings[2]}"
    name = ""
    source = ""
    metadata = _METADATA.search(line)
    if metadata:
        name = metadata[1]
        if not program.target:  # the TPU compiler numbers the lines anew
            source = program.module.frames.get(int(metadata[2] or 0), "")
    if not source:
        source = _find_line_of_gather(program, name) or program.line_of(name) or name or "unknown"
    return Finding(
        "full-rematerialization",
        f"the partitioner makes {value} ({name}) whole on every device to change its sharding{change}.",
        source,
        _REMEDY,
    )


def _find_line_of_gather(program: CompiledProgram, name: str) -> str:
    """The line of the first all-gather that comes from the operation of this name; "" if none has one."""
    for row in program.rows:
        if row.kind == "all_gather" and row.op_name == name and row.source:
            return row.source
    return ""


def _passes_on(use: CompiledUse) -> bool:
    """Whether what reads a gathered value makes another form of all of it."""
    return use.opcode in ("convert", "all-gather")


def _takes_own_piece(program: CompiledProgram, use: CompiledUse) -> bool:
    """Whether a reader takes the piece of a value that belongs to its device."""
    if use.opcode != "dynamic-slice" or use.position != 0:
        return False
    computation, slice_, callers = use.value
    for operand in slice_.operands[1:]:
        start = Value(computation, computation.instructions[operand], callers)
        for instruction in program.uses.find_sources(start):
            if instruction.opcode in ("partition-id", "replica-id"):
                return True
    return False
