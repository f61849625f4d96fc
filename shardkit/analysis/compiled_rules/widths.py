"""Float32 that is sent and then rounded to 16 bits."""

from __future__ import annotations

from collections.abc import Iterator

from shardkit.analysis.compiled_rules.program import CompiledProgram, describe_rows
from shardkit.analysis.hlo.collectives import CompiledRow
from shardkit.analysis.hlo.uses import CompiledUse, Value
from shardkit.analysis.rules.rule import Finding

# Numbers of xla's PrimitiveType.
_FLOAT32 = 11
_SHORT = {10: "float16", 16: "bfloat16"}
_MOVES = ("all_gather", "all_to_all", "ppermute")  # a reduction in 16 bits would be another result
_IN_PARTS = ("slice", "dynamic-slice", "all-gather", "concatenate")


def widths(program: CompiledProgram) -> Iterator[Finding]:
    """Collectives that move float32 which nothing reads but a conversion to 16 bits."""
    groups: dict[tuple[str, tuple[str, ...], str, str], list[CompiledRow]] = {}
    for row, computation, instruction in program.collectives(*_MOVES):
        short = _find_short_type(program, Value(computation, instruction))
        if short is None:
            continue
        operands = [Value(computation, computation.instructions[number]) for number in instruction.operands]
        if all(_is_float32(program, operand) for operand in operands):
            groups.setdefault((row.kind, row.axes, row.place, short), []).append(row)
    for (_, _, place, short), rows in groups.items():
        yield Finding(
            "float32-traffic",
            f"{describe_rows(rows)} in float32: the values are converted to {short} directly after.",
            place,
            f"Convert to {short} before, while the value is still in parts: you then send half.",
        )


def _find_short_type(program: CompiledProgram, value: Value) -> str | None:
    """The 16-bit type to which every reader of a value converts it; None if some reader does something else."""
    types = set()
    for use in program.uses.find_ends(value, _takes_part):
        if use.opcode != "convert":
            return None
        types.add(use.value.instruction.shape.type)
    if not types or not types <= _SHORT.keys():
        return None
    return _SHORT[types.pop()]


def _takes_part(use: CompiledUse) -> bool:
    return use.opcode in _IN_PARTS


def _is_float32(program: CompiledProgram, value: Value) -> bool:
    """Whether a value is float32 and was not widened to it: a backend without 16-bit collectives does that itself."""
    if value.instruction.shape.type != _FLOAT32:
        return False
    computation, instruction, callers = program.uses.find_maker(value)
    if instruction.opcode != "convert":
        return True
    # Two converts, bfloat16 to float32 before the collective and back after it, are the backend's own.
    operand = Value(computation, computation.instructions[instruction.operands[0]], callers)
    return program.uses.find_maker(operand).instruction.shape.type not in _SHORT
