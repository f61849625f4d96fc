"""All-reduces of which only the sum is used, as those of a Python loop over microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from shardkit._arguments.checks import quoted
from shardkit.analysis.compiled_rules.program import CompiledProgram
from shardkit.analysis.hlo.collectives import CompiledRow
from shardkit.analysis.hlo.uses import CompiledUse, Uses, Value
from shardkit.analysis.rules.rule import Finding

# What the factor of a term may be: the same for all of them, as one over the number of microbatches.
_FACTORS = {"constant", "broadcast", "convert", "bitcast", "reshape"}


class _Term(NamedTuple):
    row: CompiledRow
    bytes: int
    adds: tuple[tuple[int, int], ...]  # the additions through which it goes and nothing else reads it


def sums(program: CompiledProgram) -> Iterator[Finding]:
    """Results of all-reduces over the same devices that nothing reads but their sum."""
    found: dict[tuple[int, int], list[_Term]] = {}
    for row, computation, each in program.collectives("all_reduce"):
        outs = [i for i, _ in program.uses.readers(computation, each.id) if i.opcode == "get-tuple-element"]
        for one in outs if each.shape.parts else [each]:
            term = _Term(row, one.shape.bytes, tuple(_additions(program.uses, Value(computation, one))))
            if term.bytes >= program.small and term.adds:
                found.setdefault(term.adds[-1], []).append(term)
    for terms in found.values():
        met = [t for t in terms if any(o is not t and o.row.axes == t.row.axes for o in terms)]
        if len(met) > 1:
            row = met[0].row
            yield Finding(
                "summed-separately",
                f"{len(met)} x all_reduce over {quoted(row.axes)} of {sum(t.bytes for t in met):,} bytes in all; only "
                "the sum of their results is used.",
                row.place,
                "Add up what each device has and reduce once, inside jax.shard_map, as "
                "sk.make_train_step(accumulate=...) does.",
            )


def _additions(uses: Uses, value: Value) -> Iterator[tuple[int, int]]:
    """The additions through which a value goes, as long as each result has one reader."""
    while True:
        ends = list(uses.ends(value, _scaled))
        if len(ends) != 1 or ends[0].opcode != "add":
            return
        value = ends[0].value
        yield value.computation.id, value.instruction.id


def _scaled(use: CompiledUse) -> bool:
    computation, each, _ = use.value
    if each.opcode == "multiply":
        other = computation.instructions[each.operands[1 - use.position]]
        return other.opcode in _FACTORS
    return each.opcode in ("convert", "negate")
