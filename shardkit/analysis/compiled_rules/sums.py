"""All-reduces of which only the sum is used, as those of a Python loop over microbatches."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from shardkit._arguments.checks import quote
from shardkit.analysis.compiled_rules.program import CompiledProgram
from shardkit.analysis.hlo import proto
from shardkit.analysis.hlo.collectives import CompiledRow
from shardkit.analysis.hlo.uses import CompiledUse, Uses, Value
from shardkit.analysis.rules.rule import Finding

# Opcodes of a factor that may be the same for all terms, as one over the number of microbatches.
_FACTORS = {"constant", "broadcast", "convert", "bitcast", "reshape"}


class _Term(NamedTuple):
    """One result of an all-reduce that only enters a sum, and its bytes."""

    row: CompiledRow
    bytes: int


def sums(program: CompiledProgram) -> Iterator[Finding]:
    """Results of all-reduces over the same devices that nothing reads but their sum.

    For example psum(a) + psum(b), where psum(a + b) sends half. Terms that end in the same addition are one sum.
    """
    terms_of_sum: dict[tuple[int, int], list[_Term]] = {}
    for row, computation, instruction in program.collectives("all_reduce"):
        for result in _list_results(program.uses, computation, instruction):
            if result.shape.bytes < program.small:
                continue
            addition = _find_last_addition(program.uses, Value(computation, result))
            if addition is not None:
                terms_of_sum.setdefault(addition, []).append(_Term(row, result.shape.bytes))
    for terms in terms_of_sum.values():
        count_of_axes = Counter(term.row.axes for term in terms)
        repeated = [term for term in terms if count_of_axes[term.row.axes] > 1]
        if not repeated:
            continue
        row = repeated[0].row
        size = sum(term.bytes for term in repeated)
        yield Finding(
            "summed-separately",
            f"{len(repeated)} x all_reduce over {quote(row.axes)} of {size:,} bytes in all; only the sum of their "
            "results is used.",
            row.place,
            "Add up each device's part and reduce once, inside jax.shard_map, as sk.make_train_step(accumulate=...) "
            "does.",
        )


def _list_results(uses: Uses, computation: proto.Computation, all_reduce: proto.Instruction) -> list[proto.Instruction]:
    """The arrays that an all-reduce returns: of a merged one, the instructions that take them out of its tuple."""
    if not all_reduce.shape.parts:
        return [all_reduce]
    results = []
    for reader, _ in uses.readers(computation, all_reduce.id):
        if reader.opcode == "get-tuple-element":
            results.append(reader)
    return results


def _find_last_addition(uses: Uses, value: Value) -> tuple[int, int] | None:
    """The last of the additions through which a value goes, as long as each result has one reader; None without one.

    Of psum(a), psum(b) and psum(c) in `y = (psum(a) + psum(b)) + psum(c)` it is the outer addition. The result is the
    ids of its computation and its instruction.
    """
    addition = None
    while True:
        readers = list(itertools.islice(uses.find_ends(value, _scales), 2))  # a second one ends the sum
        if len(readers) != 1 or readers[0].opcode != "add":
            return addition
        value = readers[0].value
        addition = (value.computation.id, value.instruction.id)


def _scales(use: CompiledUse) -> bool:
    """Whether an instruction multiplies a term by what may be the factor of all terms."""
    computation, instruction, _ = use.value
    if instruction.opcode == "multiply":
        factor = computation.instructions[instruction.operands[1 - use.position]]
        return factor.opcode in _FACTORS
    return instruction.opcode in ("convert", "negate")
