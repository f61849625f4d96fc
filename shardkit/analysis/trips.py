"""How often a loop of a compiled program runs: recorded by the compiler (GPU, CPU) or read off its condition (TPU)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from shardkit.analysis import hlo

# Values are followed as small terms: ("const", 8), ("state", 2), ("add", term, term), ("compare", "LT", term, term).
Term = tuple[Any, ...] | None
_PASSES_ON = {"copy", "bitcast", "convert", "reshape", "copy-done", "optimization-barrier"}


def trip_count(
    module: hlo.Module, computation: hlo.Computation, loop: hlo.Instruction, known: Mapping[int, int]
) -> tuple[int | None, dict[int, int]]:
    """The times a `while` runs, None if the program does not say, and the constants its state carries throughout.

    Args:
        module: the program.
        computation: where the loop stands.
        loop: the `while` instruction.
        known: constants among the elements of the tuple that the computation is given, by their index.
    """
    recorded = loop.config.get("known_trip_count", {}).get("n")
    body, condition = (module.computations[call] for call in loop.calls)
    start = _elements(module, computation, loop.operands[0], known)
    update = _elements(module, body, body.root, {})
    inside = {i: term[1] for i, term in start.items() if _is(term, "const") and update.get(i) == ("state", i)}
    if recorded is not None:
        return int(recorded), inside

    test = _term(module, condition, condition.root, {})
    if not _is(test, "compare"):
        return None, inside
    _, direction, left, right = test
    if _is(right, "state") and right[1] not in inside and not _is(left, "state"):
        left, right = right, left
        direction = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(direction, direction)
    if not _is(left, "state"):
        return None, inside
    first = start.get(left[1])
    limit = right[1] if _is(right, "const") else inside.get(right[1]) if _is(right, "state") else None
    step = _step(update.get(left[1]), left[1])
    if not _is(first, "const") or limit is None or not step:
        return None, inside
    distance = limit - first[1]
    if direction in ("LE", "GE"):
        distance += 1 if direction == "LE" else -1
    ends = {"LT": step > 0, "LE": step > 0, "GT": step < 0, "GE": step < 0, "NE": distance % step == 0}
    return (max(0, -(-distance // step)) if ends.get(direction) else None), inside


def _step(term: Term, index: int) -> int | None:
    """The constant that an iteration adds to an element of the state."""
    if term is not None and term[0] == "add":
        for value, other in ((term[1], term[2]), (term[2], term[1])):
            if value == ("state", index) and _is(other, "const"):
                return int(other[1])
    return None


def _elements(module: hlo.Module, computation: hlo.Computation, at: int, known: Mapping[int, int]) -> dict[int, Term]:
    """The terms of a tuple's elements."""
    each = computation.instructions[at]
    while each.opcode in _PASSES_ON:
        each = computation.instructions[each.operands[0]]
    if each.opcode == "parameter":
        return {i: _state(i, known) for i in range(len(each.shape.parts))}
    if each.opcode == "while":  # what a loop hands on unchanged
        inside = trip_count(module, computation, each, known)[1]
        return {i: ("const", value) for i, value in inside.items()}
    if each.opcode != "tuple":
        return {}
    return {i: _term(module, computation, operand, known) for i, operand in enumerate(each.operands)}


def _state(index: int, known: Mapping[int, int]) -> Term:
    return ("const", known[index]) if index in known else ("state", index)


def _term(
    module: hlo.Module,
    computation: hlo.Computation,
    at: int,
    known: Mapping[int, int],
    arguments: tuple[Term, ...] | None = None,
) -> Term:
    each = computation.instructions.get(at)
    if each is None:
        return None

    def operand(i: int) -> Term:
        return _term(module, computation, each.operands[i], known, arguments)

    if each.opcode == "constant":
        return None if each.literal is None else ("const", each.literal)
    if each.opcode == "parameter":
        return arguments[each.parameter] if arguments is not None else None
    if each.opcode == "get-tuple-element":
        source = computation.instructions[each.operands[0]]
        if source.opcode == "parameter" and arguments is None:
            return _state(each.tuple_index, known)
        return _elements(module, computation, source.id, known).get(each.tuple_index) if arguments is None else None
    if each.opcode in _PASSES_ON:
        return operand(0)
    if each.opcode in ("add", "subtract"):
        left, right = operand(0), operand(1)
        if each.opcode == "subtract":
            right = ("const", -right[1]) if right is not None and right[0] == "const" else None
        return ("add", left, right) if left and right else None
    if each.opcode == "compare":
        left, right = operand(0), operand(1)
        return ("compare", each.direction, left, right) if left and right else None
    if each.opcode in ("fusion", "call"):
        inner = module.computations[each.calls[0]]
        return _term(module, inner, inner.root, {}, tuple(operand(i) for i in range(len(each.operands))))
    return None


def _is(term: Term, kind: str) -> TypeGuard[tuple[Any, ...]]:
    return term is not None and term[0] == kind
