"""Trip counts of a compiled program's loops: recorded by the compiler (GPU, CPU) or read from the condition (TPU)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from shardkit.analysis.hlo import proto

# Values are followed as small terms: ("const", 8), ("state", 2), ("add", 2, 1) for element 2 and one,
# ("compare", "LT", term, term). Only whole numbers and their comparisons are followed, one path at a time, so that the
# layers of an unrolled body are not walked.
Term = tuple[Any, ...] | None
_WHOLE = range(1, 10)  # xla's PrimitiveType: a truth value, then whole numbers of 8 to 64 bits
_PASSES_ON = {"copy", "bitcast", "convert", "reshape", "copy-done", "optimization-barrier"}


def trip_count(
    module: proto.Module, computation: proto.Computation, loop: proto.Instruction, known: Mapping[int, int]
) -> tuple[int | None, dict[int, int]]:
    """A `while` loop's trip count, None if the program does not show it, and the constants in its state.

    `known` are the constants in the parameter tuple of the computation around it, by their index.
    """
    recorded = loop.config.get("known_trip_count", {}).get("n")
    body, condition = (module.computations[call] for call in loop.calls)
    start = {i: _element(module, computation, loop.operands[0], i, known) for i in range(len(loop.shape.parts))}
    inside = {i: term[1] for i, term in start.items() if _is(term, "const") and _kept(module, body, i)}
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
    step = _step(_element(module, body, body.root, left[1], {}), left[1])
    if not _is(first, "const") or limit is None or not step:
        return None, inside
    distance = limit - first[1]
    if direction in ("LE", "GE"):
        distance += 1 if direction == "LE" else -1
    ends = {"LT": step > 0, "LE": step > 0, "GT": step < 0, "GE": step < 0, "NE": distance % step == 0}
    return (max(0, -(-distance // step)) if ends.get(direction) else None), inside


def _step(term: Term, index: int) -> int | None:
    """The constant that an iteration adds to an element of the state."""
    return term[2] if _is(term, "add") and term[1] == index else None


def _kept(module: proto.Module, body: proto.Computation, index: int) -> bool:
    """Whether a loop's body returns an element of its state unchanged."""
    return _element(module, body, body.root, index, {}) == ("state", index)


def _element(
    module: proto.Module, computation: proto.Computation, at: int, index: int, known: Mapping[int, int]
) -> Term:
    """The term of one element of a tuple."""
    each = computation.instructions[at]
    while each.opcode in _PASSES_ON:
        each = computation.instructions[each.operands[0]]
    if each.opcode == "parameter":
        return ("const", known[index]) if index in known else ("state", index)
    if each.opcode == "while":  # what a loop returns unchanged
        kept = _kept(module, module.computations[each.calls[0]], index)
        return _element(module, computation, each.operands[0], index, known) if kept else None
    return _term(module, computation, each.operands[index], known) if each.opcode == "tuple" else None


def _term(
    module: proto.Module,
    computation: proto.Computation,
    at: int,
    known: Mapping[int, int],
    argument: Callable[[int], Term] | None = None,
) -> Term:
    """The term of a value; inside a fusion or a call, `argument` gives the terms of its operands."""
    each = computation.instructions.get(at)
    if each is None or each.shape.dims or each.shape.type not in _WHOLE:
        return None

    def operand(i: int) -> Term:
        return _term(module, computation, each.operands[i], known, argument)

    if each.opcode == "constant":
        return None if each.literal is None else ("const", each.literal)
    if each.opcode == "parameter":
        return argument(each.parameter) if argument else None
    if each.opcode == "get-tuple-element":
        return None if argument else _element(module, computation, each.operands[0], each.tuple_index, known)
    if each.opcode in _PASSES_ON:
        return operand(0)
    if each.opcode in ("add", "subtract"):
        return _sum(operand, -1 if each.opcode == "subtract" else 1)
    if each.opcode == "compare":
        left = operand(0)
        right = operand(1) if left else None
        return ("compare", each.direction, left, right) if right else None
    if each.opcode in ("fusion", "call"):
        inner = module.computations[each.calls[0]]
        return _term(module, inner, inner.root, {}, operand)
    return None


def _sum(operand: Callable[[int], Term], sign: int) -> Term:
    """The term of a sum or, with sign -1, of a difference: of constants, or of the state and a constant."""
    left = operand(0)
    right = operand(1) if left else None
    if _is(left, "const") and sign > 0:
        left, right = right, left
    if left is None or not _is(right, "const"):
        return None
    step = sign * int(right[1])
    if left[0] == "const":
        return ("const", left[1] + step)
    if left[0] == "state":
        return ("add", left[1], step)
    return ("add", left[1], left[2] + step) if left[0] == "add" else None


def _is(term: Term, kind: str) -> TypeGuard[tuple[Any, ...]]:
    return term is not None and term[0] == kind
