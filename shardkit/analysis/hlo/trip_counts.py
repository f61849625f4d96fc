"""Trip counts of a compiled program's loops: recorded by the compiler (GPU, CPU) or read from the condition (TPU)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from shardkit.analysis.hlo import proto

# Values are followed as small terms: ("const", 8), ("state", 2), ("add", 2, 1) for element 2 and one,
# ("compare", "LT", term, term). Only whole numbers and their comparisons are followed, one path at a time, so that the
# layers of an unrolled body are not walked.
#
# For example the loop of a scan over 12 layers. Its state starts as (0, 12, x), which is {0: ("const", 0),
# 1: ("const", 12)}; the condition is ("compare", "LT", ("state", 0), ("state", 1)); the body returns
# ("add", 0, 1) as element 0 and ("state", 1) as element 1. From 0 to 12 in steps of 1: 12 iterations.
Term = tuple[Any, ...] | None
_WHOLE = range(1, 10)  # xla's PrimitiveType: a truth value, then whole numbers of 8 to 64 bits
_PASSES_ON = {"copy", "bitcast", "convert", "reshape", "copy-done", "optimization-barrier"}
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}


def trip_count(
    module: proto.Module, computation: proto.Computation, loop: proto.Instruction, constants: Mapping[int, int]
) -> tuple[int | None, dict[int, int]]:
    """A `while` loop's trip count, None if the program does not show it, and the constants in its state.

    `constants` are those in the parameter tuple of the computation around it, by their index.
    """
    body = module.computations[loop.calls[0]]
    condition = module.computations[loop.calls[1]]
    start = {}
    for index in range(len(loop.shape.parts)):
        start[index] = _element(module, computation, loop.operands[0], index, constants)
    loop_constants = {}
    for index, term in start.items():
        if _is(term, "const") and _is_unchanged(module, body, index):
            loop_constants[index] = term[1]
    recorded = loop.config.get("known_trip_count", {}).get("n")
    if recorded is not None:
        return int(recorded), loop_constants
    test = _term(module, condition, condition.root, {})
    if not _is(test, "compare"):
        return None, loop_constants
    return _count_iterations(module, body, start, loop_constants, test), loop_constants


def _count_iterations(
    module: proto.Module,
    body: proto.Computation,
    start: Mapping[int, Term],
    loop_constants: Mapping[int, int],
    test: tuple[Any, ...],
) -> int | None:
    """The iterations of a loop that counts an element of its state up or down to a limit."""
    _, direction, counter, limit_term = test
    if _is(limit_term, "state") and limit_term[1] not in loop_constants and not _is(counter, "state"):
        # The limit is on the left: 12 > i.
        counter, limit_term = limit_term, counter
        direction = _MIRRORED.get(direction, direction)
    if not _is(counter, "state"):
        return None
    index = counter[1]
    first = start.get(index)
    limit = _find_limit(limit_term, loop_constants)
    step = _find_step(_element(module, body, body.root, index, {}), index)
    if not _is(first, "const") or limit is None or not step:
        return None
    distance = limit - first[1]
    if direction == "LE":
        distance += 1
    elif direction == "GE":
        distance -= 1
    if not _reaches_limit(direction, distance, step):
        return None
    iterations = -(-distance // step)  # the last step may pass the limit
    return max(0, iterations)


def _reaches_limit(direction: str, distance: int, step: int) -> bool:
    """Whether a counter that runs while `counter direction limit` holds comes to an end that is known."""
    if direction in ("LT", "LE"):
        return step > 0
    if direction in ("GT", "GE"):
        return step < 0
    return direction == "NE" and distance % step == 0


def _find_limit(term: Term, loop_constants: Mapping[int, int]) -> int | None:
    """The number up to which a loop counts: a constant, or one in its state."""
    if _is(term, "const"):
        limit: int = term[1]
        return limit
    if _is(term, "state"):
        return loop_constants.get(term[1])
    return None


def _find_step(term: Term, index: int) -> int | None:
    """The constant that an iteration adds to an element of the state."""
    if _is(term, "add") and term[1] == index:
        step: int = term[2]
        return step
    return None


def _is_unchanged(module: proto.Module, body: proto.Computation, index: int) -> bool:
    """Whether a loop's body returns an element of its state as it was."""
    return _element(module, body, body.root, index, {}) == ("state", index)


def _element(
    module: proto.Module, computation: proto.Computation, number: int, index: int, constants: Mapping[int, int]
) -> Term:
    """The term of element `index` of the tuple that instruction `number` returns."""
    instruction = computation.instructions[number]
    while instruction.opcode in _PASSES_ON:
        instruction = computation.instructions[instruction.operands[0]]
    if instruction.opcode == "parameter":
        if index in constants:
            return ("const", constants[index])
        return ("state", index)
    if instruction.opcode == "tuple":
        return _term(module, computation, instruction.operands[index], constants)
    if instruction.opcode == "while" and _is_unchanged(module, module.computations[instruction.calls[0]], index):
        return _element(module, computation, instruction.operands[0], index, constants)
    return None


def _term(
    module: proto.Module,
    computation: proto.Computation,
    number: int,
    constants: Mapping[int, int],
    argument: Callable[[int], Term] | None = None,
) -> Term:
    """The term of a value; inside a fusion or a call, `argument` gives the terms of its operands."""
    instruction = computation.instructions.get(number)
    if instruction is None or instruction.shape.dims or instruction.shape.type not in _WHOLE:
        return None

    def operand(position: int) -> Term:
        return _term(module, computation, instruction.operands[position], constants, argument)

    opcode = instruction.opcode
    if opcode == "constant":
        if instruction.literal is None:
            return None
        return ("const", instruction.literal)
    if opcode == "parameter":
        if argument is None:
            return None
        return argument(instruction.parameter)
    if opcode == "get-tuple-element" and argument is None:
        return _element(module, computation, instruction.operands[0], instruction.tuple_index, constants)
    if opcode in _PASSES_ON:
        return operand(0)
    if opcode == "add":
        return _add(operand, sign=1)
    if opcode == "subtract":
        return _add(operand, sign=-1)
    if opcode == "compare":
        left, right = _follow_both(operand)
        if right is None:
            return None
        return ("compare", instruction.direction, left, right)
    if opcode in ("fusion", "call"):
        inner = module.computations[instruction.calls[0]]
        return _term(module, inner, inner.root, {}, operand)
    return None


def _follow_both(operand: Callable[[int], Term]) -> tuple[Term, Term]:
    """The terms of two operands. The second is not followed where the first has none: one path at a time."""
    left = operand(0)
    if left is None:
        return None, None
    return left, operand(1)


def _add(operand: Callable[[int], Term], sign: int) -> Term:
    """The term of a sum or, with sign -1, of a difference: of constants, or of the state and a constant."""
    left, right = _follow_both(operand)
    if _is(left, "const") and sign > 0:  # 1 + i is i + 1
        left, right = right, left
    if left is None or not _is(right, "const"):
        return None
    step = sign * int(right[1])
    if left[0] == "const":
        return ("const", left[1] + step)
    if left[0] == "state":
        return ("add", left[1], step)
    if left[0] == "add":
        return ("add", left[1], left[2] + step)
    return None


def _is(term: Term, kind: str) -> TypeGuard[tuple[Any, ...]]:
    return term is not None and term[0] == kind
