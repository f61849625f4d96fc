"""Values that the partitioner makes whole on every device to move them from one sharding to another."""

from __future__ import annotations

import re
from collections.abc import Iterator

from shardkit._arguments.checks import quoted
from shardkit.analysis.compiled_rules.program import CompiledProgram
from shardkit.analysis.hlo.collectives import CompiledRow
from shardkit.analysis.hlo.differences import written
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
        finding = _logged(program, line)
        named.add(finding.source)
        yield finding
    largest: dict[str, tuple[CompiledRow, int]] = {}  # a value is gathered over one axis after the other
    for row, computation, each in program.collectives("all_gather"):
        moved = Value(computation, each)
        ends = list(program.uses.ends(moved, lambda use: use.opcode in ("convert", "all-gather")))
        kept = sum(use.value.instruction.shape.size for use in ends)
        whole = each.shape.size
        if written(row) or row.place in named or kept * row.n > whole or not all(_own_piece(program, u) for u in ends):
            continue
        if ends and (row.place not in largest or largest[row.place][0].bytes_out < row.bytes_out):
            largest[row.place] = row, whole // max(kept, 1)
    for place, (row, parts) in largest.items():
        yield Finding(
            "full-rematerialization",
            f"all_gather over {quoted(row.axes)} makes a value of {row.bytes_out:,} bytes, of which each device keeps "
            f"1/{parts}.",
            place,
            _REMEDY,
        )


def _logged(program: CompiledProgram, line: str) -> Finding:
    """The finding that a line of the compiler's log is."""
    between, operation, metadata = (each.search(line) for each in (_MESSAGE, _OPERATION, _METADATA))
    what = f"{operation[1].lstrip('%')} {operation[2]}" if operation else "a value"
    name, frame = (metadata[1], metadata[2]) if metadata else ("", None)
    source = "" if program.target else program.module.frames.get(int(frame or 0), "")
    if not source:  # the TPU compiler numbers the lines anew
        source = next((row.source for row in program.rows if row.kind == "all_gather" and row.op_name == name), "")
    change = f", from {between[1]} to {between[2]}" if between else ""
    return Finding(
        "full-rematerialization",
        f"the partitioner makes {what} ({name}) whole on every device to change its sharding{change}.",
        source or program.line_of(name) or name or "unknown",
        _REMEDY,
    )


def _own_piece(program: CompiledProgram, use: CompiledUse) -> bool:
    """Whether a reader takes the piece of a value that belongs to its device."""
    if use.opcode != "dynamic-slice" or use.position != 0:
        return False
    computation, each, around = use.value
    starts = (Value(computation, computation.instructions[o], around) for o in each.operands[1:])
    return any(i.opcode in ("partition-id", "replica-id") for value in starts for i in program.uses.made_from(value))
