"""Makes the asynchronous instructions of a module synchronous, before jaxlib reads it.

A start and its end are one operation of arrays: what lies between is time. jaxlib refuses some of them (an all-gather
of several arrays, an end that is passed the number of a stream, seen with jaxlib 0.10.2), and gives others no types.

Worked example, of which `%start` has the type (f32[2], f32[8]):

    %start = all-gather-start(%x)                              %start = f32[8] all-gather(%x)
    %y = multiply(%z, %z)                             becomes  %y = multiply(%z, %z)
    %whole = f32[8] all-gather-done(%start)                    ROOT %sum = add(%start, %y)
    ROOT %sum = add(%whole, %y)

A start that has no end in its computation, or that something else reads, stays as it is, and has no meaning.
What only says what runs first, an add-dependency on an after-all, is its first operand.
"""

from __future__ import annotations

from typing import NamedTuple

from shardkit.testing.exact.stablehlo.instructions import WrittenComputation, WrittenInstruction, list_parts


class _Pair(NamedTuple):
    """How a start is written as one operation: what ends it, what passes it on, and the operation."""

    done: str
    update: str
    opcode: str


# One row for each contract of xla's operation semantics. An `async-start` runs the computation that it calls.
_PAIRS = {
    "all-gather-start": _Pair("all-gather-done", "", "all-gather"),
    "all-reduce-start": _Pair("all-reduce-done", "", "all-reduce"),
    "collective-permute-start": _Pair("collective-permute-done", "", "collective-permute"),
    "copy-start": _Pair("copy-done", "", "copy"),
    "async-start": _Pair("async-done", "async-update", "call"),
}


def wait_for_starts(computation: WrittenComputation) -> None:
    """Writes each start with its end as one operation, and leaves out what only says what runs first."""
    readers: dict[int, list[WrittenInstruction]] = {}
    for instruction in computation.instructions:
        for operand in set(instruction.operands):
            readers.setdefault(operand, []).append(instruction)
    results: dict[int, int] = {}  # the start whose result an end or an update is
    for start in computation.instructions:
        if start.opcode not in _PAIRS:
            continue
        ends = _find_ends(start, readers, computation.root)
        if ends:
            results.update({end.number: start.number for end in ends})
            start.shape = ends[-1].shape
            start.opcode = _PAIRS[start.opcode].opcode
    for instruction in computation.instructions:
        if instruction.opcode == "add-dependency":
            first = instruction.operands[0]
            results[instruction.number] = results.get(first, first)
    if not results:
        return
    kept = []
    for instruction in computation.instructions:
        if instruction.number not in results:
            instruction.operands = [results.get(operand, operand) for operand in instruction.operands]
            kept.append(instruction)
    computation.root = results.get(computation.root, computation.root)
    read = {computation.root}
    for instruction in kept:
        read.update(instruction.operands)
    computation.instructions = []
    for instruction in kept:
        if instruction.opcode != "after-all" or instruction.number in read:
            computation.instructions.append(instruction)


def _find_ends(
    start: WrittenInstruction, readers: dict[int, list[WrittenInstruction]], root: int
) -> list[WrittenInstruction]:
    """The updates of a start in their order, and its end; none if it is not read by these alone, one after the other.

    A start that is the root of its computation ends elsewhere, and one with other operands than the arrays that it
    sends, as places in them, is another function.
    """
    pair = _PAIRS[start.opcode]
    ends: list[WrittenInstruction] = []
    last = start
    while last.opcode != pair.done:
        after = readers.get(last.number, [])
        if len(after) != 1 or last.number == root:
            return []
        [last] = after
        if last.opcode not in (pair.done, pair.update) or len(last.operands) != 1:
            return []
        ends.append(last)
    if pair.opcode != "call" and len(list_parts(last.shape)) != len(start.operands):
        return []
    return ends
