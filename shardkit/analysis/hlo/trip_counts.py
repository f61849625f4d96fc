"""Trip counts of a compiled program's loops: recorded by the compiler (GPU, CPU) or read from the condition (TPU)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shardkit.analysis.hlo import proto

_WHOLE = range(1, 10)  # xla's PrimitiveType: a truth value, then whole numbers of 8 to 64 bits
_PASSES_ON = {"copy", "bitcast", "convert", "reshape", "copy-done", "optimization-barrier"}
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}


# Values are followed as small terms. Only whole numbers and their comparisons are followed, one path at a time, so that
# the layers of an unrolled body are not walked.
#
# For example the loop of a scan over 12 layers. Its state is (i, 12, x), and starts as (0, 12, x):
#
#     start         0: _Constant(0), 1: _Constant(12)
#     condition     i < 12         _Comparison("LT", _Element(0), _Element(1))
#     body          i + 1          _Sum(0, 1), as element 0
#                   12             _Element(1), as element 1: it does not change, so that the limit is 12
#
# From 0 to 12 in steps of 1: 12 iterations.
@dataclass(frozen=True)
class _Constant:
    """A whole number."""

    value: int


@dataclass(frozen=True)
class _Element:
    """An element of a loop's state."""

    index: int


@dataclass(frozen=True)
class _Sum:
    """An element of a loop's state plus a constant."""

    index: int
    step: int


@dataclass(frozen=True)
class _Comparison:
    """A comparison of two terms; the direction is xla's: "LT", "LE", "GT", "GE", "EQ" or "NE"."""

    direction: str
    left: Term
    right: Term


Term = _Constant | _Element | _Sum | _Comparison


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
        start[index] = _follow_element(module, computation, loop.operands[0], index, constants)
    loop_constants = {}
    for index, term in start.items():
        if isinstance(term, _Constant) and _is_unchanged(module, body, index):
            loop_constants[index] = term.value
    recorded = loop.config.get("known_trip_count", {}).get("n")
    if recorded is not None:
        return int(recorded), loop_constants
    test = _follow(module, condition, condition.root, {})
    if not isinstance(test, _Comparison):
        return None, loop_constants
    return _count_iterations(module, body, start, loop_constants, test), loop_constants


def _count_iterations(
    module: proto.Module,
    body: proto.Computation,
    start: Mapping[int, Term | None],
    loop_constants: Mapping[int, int],
    test: _Comparison,
) -> int | None:
    """The iterations of a loop that counts an element of its state up or down to a limit."""
    test = _put_limit_right(test, loop_constants)
    counter = test.left
    if not isinstance(counter, _Element):
        return None
    first = start.get(counter.index)
    limit = _find_limit(test.right, loop_constants)
    step = _find_step(module, body, counter.index)
    if not isinstance(first, _Constant) or limit is None or not step:
        return None
    return _count_steps(test.direction, first.value, limit, step)


def _count_steps(direction: str, first: int, limit: int, step: int) -> int | None:
    """How often `counter direction limit` holds of a counter that starts at `first` and goes on by `step`.

    i < 10     from 0 by 3     0, 3, 6, 9        4
    i <= 12    from 0 by 3     0, 3, 6, 9, 12    5
    i > 0      from 6 by -3    6, 3              2
    i != 12    from 0 by 3     0, 3, 6, 9        4
    i != 10    from 0 by 3     never 10          None
    i < 10     from 0 by -3    never up to 10    None
    """
    end = limit  # the first number of which it does not hold
    if direction in ("LT", "LE"):
        is_counted = step > 0
        if direction == "LE":
            end = limit + 1
    elif direction in ("GT", "GE"):
        is_counted = step < 0
        if direction == "GE":
            end = limit - 1
    else:
        # Not where a counter moves away from the number that ends the loop.
        is_counted = direction == "NE" and (limit - first) % step == 0 and (limit - first) // step >= 0
    if not is_counted:
        return None
    steps = -((first - end) // step)  # rounded up, because the last step may pass the end
    return max(0, steps)


def _put_limit_right(test: _Comparison, loop_constants: Mapping[int, int]) -> _Comparison:
    """A comparison with the counter on the left: 12 > i as i < 12."""
    is_counter_right = isinstance(test.right, _Element) and test.right.index not in loop_constants
    if not is_counter_right or isinstance(test.left, _Element):
        return test
    return _Comparison(_MIRRORED.get(test.direction, test.direction), test.right, test.left)


def _find_limit(term: Term, loop_constants: Mapping[int, int]) -> int | None:
    """The number up to which a loop counts: a constant, or one in its state."""
    if isinstance(term, _Constant):
        return term.value
    if isinstance(term, _Element):
        return loop_constants.get(term.index)
    return None


def _find_step(module: proto.Module, body: proto.Computation, index: int) -> int | None:
    """The constant that an iteration adds to an element of the state."""
    term = _follow_element(module, body, body.root, index, {})
    if isinstance(term, _Sum) and term.index == index:
        return term.step
    return None


def _is_unchanged(module: proto.Module, body: proto.Computation, index: int) -> bool:
    """Whether a loop's body returns an element of its state as it was."""
    return _follow_element(module, body, body.root, index, {}) == _Element(index)


def _follow_element(
    module: proto.Module, computation: proto.Computation, number: int, index: int, constants: Mapping[int, int]
) -> Term | None:
    """The term of element `index` of the tuple that instruction `number` returns."""
    instruction = computation.instructions[number]
    while instruction.opcode in _PASSES_ON:
        instruction = computation.instructions[instruction.operands[0]]
    if instruction.opcode == "parameter":
        if index in constants:
            return _Constant(constants[index])
        return _Element(index)
    if instruction.opcode == "tuple":
        return _follow(module, computation, instruction.operands[index], constants)
    if instruction.opcode == "while" and _is_unchanged(module, module.computations[instruction.calls[0]], index):
        return _follow_element(module, computation, instruction.operands[0], index, constants)
    return None


def _follow(
    module: proto.Module,
    computation: proto.Computation,
    number: int,
    constants: Mapping[int, int],
    follow_argument: Callable[[int], Term | None] | None = None,
) -> Term | None:
    """The term of a value; inside a fusion or a call, `follow_argument` gives the terms of its operands."""
    instruction = computation.instructions.get(number)
    if instruction is None or instruction.shape.dims or instruction.shape.type not in _WHOLE:
        return None

    def follow_operand(position: int) -> Term | None:
        return _follow(module, computation, instruction.operands[position], constants, follow_argument)

    opcode = instruction.opcode
    if opcode == "constant":
        if instruction.literal is None:
            return None
        return _Constant(instruction.literal)
    if opcode == "parameter":
        if follow_argument is None:
            return None
        return follow_argument(instruction.parameter)
    if opcode == "get-tuple-element" and follow_argument is None:
        return _follow_element(module, computation, instruction.operands[0], instruction.tuple_index, constants)
    if opcode in _PASSES_ON:
        return follow_operand(0)
    if opcode == "add":
        return _add(follow_operand, sign=1)
    if opcode == "subtract":
        return _add(follow_operand, sign=-1)
    if opcode == "compare":
        left, right = _follow_both(follow_operand)
        if left is None or right is None:
            return None
        return _Comparison(instruction.direction, left, right)
    if opcode in ("fusion", "call"):
        inner = module.computations[instruction.calls[0]]
        return _follow(module, inner, inner.root, {}, follow_operand)
    return None


def _follow_both(follow_operand: Callable[[int], Term | None]) -> tuple[Term | None, Term | None]:
    """The terms of two operands. The second is not followed where the first has none: one path at a time."""
    left = follow_operand(0)
    if left is None:
        return None, None
    return left, follow_operand(1)


def _add(follow_operand: Callable[[int], Term | None], sign: int) -> Term | None:
    """The term of a sum or, with sign -1, of a difference: of constants, or of an element and a constant."""
    left, right = _follow_both(follow_operand)
    if isinstance(left, _Constant) and sign > 0:  # 1 + i is i + 1
        left, right = right, left
    if not isinstance(right, _Constant):
        return None
    step = sign * right.value
    if isinstance(left, _Constant):
        return _Constant(left.value + step)
    if isinstance(left, _Element):
        return _Sum(left.index, step)
    if isinstance(left, _Sum):
        return _Sum(left.index, left.step + step)
    return None
