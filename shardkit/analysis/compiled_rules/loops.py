"""Collectives that every iteration of a loop repeats, and that one after or before the loop would do."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardkit.analysis.compiled_rules.program import CompiledProgram, together
from shardkit.analysis.hlo import proto
from shardkit.analysis.hlo.collectives import CompiledRow
from shardkit.analysis.hlo.report import size
from shardkit.analysis.hlo.trip_counts import trip_count
from shardkit.analysis.hlo.uses import CompiledUse, Uses, Value
from shardkit.analysis.rules.rule import Finding

_SUM = (
    "Add up what each device has and reduce once after the loop, inside jax.shard_map, as "
    "sk.make_train_step(accumulate=...) does."
)
Loop = tuple[proto.Computation, proto.Instruction]  # the computation around a `while`, and that
_BARRIERS = ("opt-barrier", "optimization-barrier")
Passes = Callable[[CompiledUse], bool]
# A sum of what these make of each term is what they make of the sum; `_linear` looks at the operands.
_LINEAR = {"add", "subtract", "negate", "convert", "broadcast", "pad", "slice", "concatenate", "all-reduce"}


def loops(program: CompiledProgram) -> Iterator[Finding]:
    """All-reduces of which a loop adds up the results, and all-gathers of what the loop does not change."""
    found: dict[tuple[str, tuple[str, ...], str, int], list[tuple[CompiledRow, Loop]]] = {}
    for row, computation, each in program.collectives("all_reduce", "all_gather"):
        loop = None
        if row.kind == "all_reduce":
            loop = _summing_loop(program.uses, computation, each)
        elif computation.id in program.uses.loops and _unchanged(computation, each, {}):
            loop = program.uses.loops[computation.id]
        if loop is not None:
            found.setdefault((row.kind, row.axes, row.place, loop[1].id), []).append((row, loop))
    for (kind, *_), pairs in found.items():
        rows = [row for row, _ in pairs]
        runs = _runs(program, rows, pairs[0][1])
        if kind == "all_reduce":
            yield Finding("summed-each-iteration", f"{runs}, which only adds up the results.", rows[0].place, _SUM)
        else:
            more = size(sum(row.bytes_out for row in rows))
            remedy = f"Gather before the loop, if {more} more per device fit."
            message = f"{runs}, on the same operand each time."
            yield Finding("gathered-each-iteration", message, rows[0].place, remedy)


def _runs(program: CompiledProgram, rows: list[CompiledRow], loop: Loop) -> str:
    times = trip_count(program.module, *loop, {})[0]
    often = "an unknown number of times" if times is None else f"{times} times"
    where = program.module.source(loop[1])
    verb = "runs" if len(rows) == 1 else "run"
    return f"{together(rows)} {verb} {often} in the loop{f' at {where}' if where else ''}"


def _summing_loop(uses: Uses, computation: proto.Computation, each: proto.Instruction) -> Loop | None:
    """The innermost loop around an all-reduce that only adds up its results; None if there is none."""
    values = [Value(computation, each)]
    while computation.id in uses.loops:
        loop = uses.loops[computation.id]
        if _reached(uses, values, _linear):
            return loop
        stacked = _reached(
            uses, values, lambda use: _linear(use) or (use.opcode == "dynamic-update-slice" and use.position < 2)
        )
        if not stacked:
            return None
        computation, instruction = loop
        values = [
            Value(computation, element)
            for element, _ in uses.readers(computation, instruction.id)
            if element.opcode == "get-tuple-element" and element.tuple_index in stacked
        ]
    return None


def _reached(uses: Uses, values: list[Value], passes: Passes) -> set[int]:
    """The elements of a loop's state that only add up these values; none if they are used in any other way."""
    elements = _elements(uses, values, passes)
    if not elements:
        return set()
    body = values[0].computation
    reads = [i for i, _ in uses.readers(body, body.parameters[0].id) if i.opcode == "get-tuple-element"]
    begun = {i.tuple_index: i for i in reversed(reads)}  # the first of each element
    for element in elements:
        carried = begun.get(element)
        if carried is None or _elements(uses, [Value(body, carried)], passes) != {element}:
            return set()
    return elements


def _elements(uses: Uses, values: list[Value], passes: Passes) -> set[int]:
    """The elements of the loop's state that values become; none if anything else reads them."""
    ends = [use.leaves for value in values for use in uses.ends(value, passes)]
    return set() if None in ends else {end for end in ends if end is not None}


def _linear(use: CompiledUse) -> bool:
    each = use.value.instruction
    if each.opcode == "multiply":
        return each.operands[0] != each.operands[1]
    if each.opcode == "divide":
        return use.position == 0
    return each.opcode in _LINEAR or (each.opcode == "select" and use.position > 0)


def _unchanged(body: proto.Computation, each: proto.Instruction, known: dict[int, bool]) -> bool:
    """Whether what a collective sends is the same in every iteration of the loop with this body."""

    def same(number: int) -> bool:
        if number not in known:
            known[number] = False
            one = _behind_barrier(body, body.instructions[number])
            if one.opcode == "get-tuple-element" and one.operands == (body.parameters[0].id,):
                root = body.instructions[body.root]
                known[number] = root.opcode == "tuple" and _is_read(body, root.operands[one.tuple_index], one)
            elif one.opcode not in ("parameter", "while", "rng", "rng-bit-generator", "custom-call"):
                known[number] = all(map(same, one.operands))
        return known[number]

    return all(map(same, each.operands))


def _behind_barrier(body: proto.Computation, each: proto.Instruction) -> proto.Instruction:
    """The value that jax.checkpoint keeps the compiler from moving; any other as it is.

    The GPU's compiler takes the barrier away when it has moved all it would, and leaves the tuple.
    """
    while each.opcode == "get-tuple-element":
        values = body.instructions[each.operands[0]]
        if values.opcode in _BARRIERS:
            values = body.instructions[values.operands[0]]
        if values.opcode != "tuple":
            break
        each = body.instructions[values.operands[each.tuple_index]]
    return each


def _is_read(body: proto.Computation, number: int, element: proto.Instruction) -> bool:
    """Whether a value is an element of the state as it was read, perhaps copied."""
    each = body.instructions[number]
    while each.opcode in ("copy", "bitcast"):
        each = body.instructions[each.operands[0]]
    return each.opcode == "get-tuple-element" and (each.operands, each.tuple_index) == (
        element.operands,
        element.tuple_index,
    )
