"""Values that the partitioner makes whole on every device to move them from one sharding to another."""

from __future__ import annotations

import re
from collections.abc import Iterator

from shardkit._arguments.checks import quoted
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
    """What the compiler's log names, and the same in the program: a gather of which each device slices its piece."""
    named = set()
    for line in program.log:
        finding = _read_log_line(program, line)
        named.add(finding.source)
        yield finding
    largest: dict[str, tuple[CompiledRow, int]] = {}  # a value is gathered over one axis after the other
    for row, computation, gather in program.collectives("all_gather"):
        if is_written(row) or row.place in named:
            continue
        readers = list(program.uses.find_ends(Value(computation, gather), _passes_on))
        kept = sum(reader.value.instruction.shape.size for reader in readers)
        size = gather.shape.size
        if not readers or kept * row.n > size or not all(_takes_own_piece(program, reader) for reader in readers):
            continue
        if row.place not in largest or largest[row.place][0].bytes_out < row.bytes_out:
            largest[row.place] = row, size // max(kept, 1)
    for place, (row, parts) in largest.items():
        yield Finding(
            "full-rematerialization",
            f"all_gather over {quoted(row.axes)} makes a value of {row.bytes_out:,} bytes, of which each device keeps "
            f"1/{parts}.",
            place,
            _REMEDY,
        )


def _read_log_line(program: CompiledProgram, line: str) -> Finding:
    """The finding that a line of the compiler's log is."""
    what = "a value"
    operation = _OPERATION.search(line)
    if operation:
        what = f"{operation[1].lstrip('%')} {operation[2]}"
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
    for row in program.rows:
        if not source and row.kind == "all_gather" and row.op_name == name:
            source = row.source
    return Finding(
        "full-rematerialization",
        f"the partitioner makes {what} ({name}) whole on every device to change its sharding{change}.",
        source or program.line_of(name) or name or "unknown",
        _REMEDY,
    )


def _passes_on(use: CompiledUse) -> bool:
    """Whether what reads a gathered value makes another form of all of it."""
    return use.opcode in ("convert", "all-gather")


def _takes_own_piece(program: CompiledProgram, use: CompiledUse) -> bool:
    """Whether a reader takes the piece of a value that belongs to its device."""
    if use.opcode != "dynamic-slice" or use.position != 0:
        return False
    computation, slice_, around = use.value
    for operand in slice_.operands[1:]:
        start = Value(computation, computation.instructions[operand], around)
        for instruction in program.uses.find_sources(start):
            if instruction.opcode in ("partition-id", "replica-id"):
                return True
    return False
