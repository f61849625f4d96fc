"""Float32 that is sent and then rounded to 16 bits."""

from __future__ import annotations

from collections.abc import Iterator

from shardkit.analysis.compiled_rules.program import CompiledProgram, together
from shardkit.analysis.hlo.collectives import CompiledRow
from shardkit.analysis.hlo.uses import Value
from shardkit.analysis.rules.rule import Finding

_FLOAT32, _SHORT = 11, {10: "float16", 16: "bfloat16"}  # xla's PrimitiveType
_MOVES = ("all_gather", "all_to_all", "ppermute")  # a reduction in 16 bits would be another result
_IN_PARTS = ("slice", "dynamic-slice", "all-gather", "concatenate")


def widths(program: CompiledProgram) -> Iterator[Finding]:
    """Collectives that move float32 which nothing reads but a conversion to 16 bits."""
    found: dict[tuple[str, tuple[str, ...], str, str], list[CompiledRow]] = {}
    for row, computation, each in program.collectives(*_MOVES):
        ends = list(program.uses.ends(Value(computation, each), lambda use: use.opcode in _IN_PARTS))
        kinds = {use.value.instruction.shape.type for use in ends}
        if not ends or any(use.opcode != "convert" for use in ends) or not kinds <= set(_SHORT):
            continue
        sent = [Value(computation, computation.instructions[o]) for o in each.operands]
        if {one.instruction.shape.type for one in sent} == {_FLOAT32} and not any(_rounded(program, v) for v in sent):
            found.setdefault((row.kind, row.axes, row.place, _SHORT[kinds.pop()]), []).append(row)
    for (*_, place, short), rows in found.items():
        yield Finding(
            "float32-traffic",
            f"{together(rows)} in float32: the values are converted to {short} directly after.",
            place,
            f"Convert to {short} before, where the value is still in parts, which sends half.",
        )


def _rounded(program: CompiledProgram, value: Value) -> bool:
    """Whether a value was 16 bits wide before: a backend without 16-bit collectives widens them itself."""
    computation, each, around = program.uses.maker(value)
    if each.opcode != "convert":
        return False
    before = program.uses.maker(Value(computation, computation.instructions[each.operands[0]], around))
    return before.instruction.shape.type in _SHORT
