"""Makes the asynchronous instructions of a module synchronous, before jaxlib reads it.

A start and its end are one operation of arrays; the time between them changes no number. jaxlib refuses some of them
(an all-gather of several arrays, an end that is passed the number of a stream, seen with jaxlib 0.10.2), and gives
others no types.

Worked example, of which `%start` has the type (f32[2], f32[8]):

    %start = all-gather-start(%x)                              %start = f32[8] all-gather(%x)
    %y = multiply(%z, %z)                             becomes  %y = multiply(%z, %z)
    %whole = f32[8] all-gather-done(%start)                    ROOT %sum = add(%start, %y)
    ROOT %sum = add(%whole, %y)

A start stays as it is, and has no meaning, if it has no end in its computation or if another instruction reads it.

Some instructions say only what runs first. `%later = add-dependency(%x, %token)` is the array %x, to be used when
%token is there, and `%token = after-all(%y)` is there when %y is. So what reads %later reads %x in its place.
"""

from __future__ import annotations

from typing import NamedTuple

from shardkit.testing.exact.stablehlo.instructions import WrittenComputation, WrittenInstruction, list_parts


class _Pair(NamedTuple):
    """How a start is written as one operation.

    Attributes:
        done: the opcode of the end.
        update: the opcode of instructions between them, which pass the start on; "" if there are none.
        opcode: that of the one operation.
    """

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
    """Writes each start with its end as one operation, and leaves out instructions that only say what runs first."""
    # By the number of each instruction that is left out: the number of the one that is read in its place.
    replacements = _join_starts(computation)
    for instruction in computation.instructions:
        if instruction.opcode == "add-dependency":
            array = instruction.operands[0]
            replacements[instruction.number] = replacements.get(array, array)
    if replacements:
        _replace_instructions(computation, replacements)
        _drop_unread_tokens(computation)


def _join_starts(computation: WrittenComputation) -> dict[int, int]:
    """Makes each start with an end the whole operation, and says for each of its ends the start.

    Worked example: of the module's example {number of %whole: number of %start}, where %start is an all-gather now.
    """
    users: dict[int, list[WrittenInstruction]] = {}  # by the number of what they read
    for instruction in computation.instructions:
        for operand in set(instruction.operands):
            users.setdefault(operand, []).append(instruction)
    starts = {}
    for start in computation.instructions:
        if start.opcode not in _PAIRS:
            continue
        ends = _find_ends(start, users, computation.root)
        if not ends:
            continue
        for end in ends:
            starts[end.number] = start.number
        # The start becomes the operation: it has what it sends as its operand, and the shape of what arrives.
        last = ends[-1]
        start.shape = last.shape
        start.opcode = _PAIRS[start.opcode].opcode
    return starts


def _replace_instructions(computation: WrittenComputation, replacements: dict[int, int]) -> None:
    """Leaves out instructions, where others are read in their place."""
    remaining = []
    for instruction in computation.instructions:
        if instruction.number not in replacements:
            operands = instruction.operands
            instruction.operands = [replacements.get(operand, operand) for operand in operands]
            remaining.append(instruction)
    computation.instructions = remaining
    computation.root = replacements.get(computation.root, computation.root)


def _drop_unread_tokens(computation: WrittenComputation) -> None:
    """Leaves out each after-all that nothing reads: without its add-dependency it has no purpose."""
    needed = {computation.root}
    for instruction in computation.instructions:
        needed.update(instruction.operands)
    remaining = []
    for instruction in computation.instructions:
        if instruction.opcode != "after-all" or instruction.number in needed:
            remaining.append(instruction)
    computation.instructions = remaining


def _find_ends(
    start: WrittenInstruction, users_by_number: dict[int, list[WrittenInstruction]], root: int
) -> list[WrittenInstruction]:
    """The updates of a start in their order, and its end; none if other instructions read it.

    Worked example: `%s = async-start(%x)`, `%u = async-update(%s)`, `%e = async-done(%u)` has the ends %u and %e. If
    something else reads %s too, it has none.
    """
    pair = _PAIRS[start.opcode]
    ends: list[WrittenInstruction] = []
    last = start
    while last.opcode != pair.done:
        users = users_by_number.get(last.number, [])
        # The root of a computation is read by whatever calls the computation: it ends elsewhere.
        if len(users) != 1 or last.number == root:
            return []
        [last] = users
        if last.opcode not in (pair.done, pair.update) or len(last.operands) != 1:
            return []
        ends.append(last)
    # With further operands, as places in the arrays that are sent, it is another function.
    if pair.opcode != "call" and len(list_parts(last.shape)) != len(start.operands):
        return []
    return ends
