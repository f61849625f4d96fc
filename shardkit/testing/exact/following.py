"""Known values that follow from floats: which results of an equation do, and how a proof notes them.

Integers and booleans are known, also if they follow from unknown floats: then they are those of this draw. Such values
are marked, so that a comparison of them is noted as one that may go another way for other inputs.

Worked example: a router sends tokens to the expert with the largest score.

    expert = argmax(scores)         a known integer, marked: it follows from floats
    count = (expert == 2).sum()     marked, and natural: it is not negative for any input
    count < capacity                a comparison of a marked integer: it is noted by the proof
    min(count, capacity)            noted too: it asks whether the count is below the capacity
    count < 0                       not noted: it is false for all inputs
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from shardkit.testing.exact.naturals import NaturalFacts, keeps_natural, may_wrap
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.function_table import FUNCTIONS
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.rules.known import align
from shardkit.testing.exact.rules.operands import Known, Operand, is_key
from shardkit.testing.exact.rules.scope import Scope

_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
# Functions that jax computes of constants in floats, rounded: log(2) is no rational number.
_ROUNDED = {"exp", "expm1", "log", "log1p", "rsqrt"}
_ROUNDED |= {name for name, function in FUNCTIONS.items() if function.is_rounded}


def note_known(scope: Scope, equation: Any, operands: Sequence[Known], results: Sequence[Known]) -> None:
    """Notes for a proof an equation whose operands are all known: a rounded constant, random bits, a comparison."""
    field = scope.field
    name = equation.primitive.name
    if name == "random_bits":
        field.notes.chances = True
    if name in _ROUNDED:
        numbers = results[0][~np.isnan(results[0])]
        rounded = numbers[numbers != np.rint(numbers)]
        if rounded.size:
            field.notes.add_rounded(f"{name} of a constant", rounded, field.side)
    coverage = field.coverage
    if coverage is None or not _follows_floats(field, equation, operands):
        return
    line = scope.line(equation)
    for part, truth in _list_outcomes(scope, equation, operands, results):
        coverage.note_integers(field, equation, line, truth, operands, part)
    joins_decisions = name in ("and", "or") and all(field.marks.is_decision(x) for x in operands)
    if joins_decisions:
        coverage.note_joined(field, equation, line, results[0])


def _list_outcomes(
    scope: Scope, equation: Any, operands: Sequence[Known], results: Sequence[Known]
) -> Iterator[tuple[str, np.ndarray]]:
    """What an equation asks of integers: which part of it asks, and bool [...], the answers.

    Worked example: `clip(count, 1, 8)` asks whether the count is below 1 and whether it is above 8. `count // 8` is
    zero where the count is below 8.
    """
    name = equation.primitive.name
    result = results[0]
    # `counts < capacity`, where a router decides the counts, and `any(counts > capacity)`.
    if name in (*_COMPARISONS, "reduce_and", "reduce_or"):
        yield "", result
    elif name in ("max", "min"):
        # `max(count, 0)` is the count for all inputs.
        if not _is_natural_beside_zero(scope.field, *operands):
            x, y = align(operands, scope.rank)
            yield "", x >= y
    elif name == "clamp":
        low, x, high = align(operands, scope.rank)
        yield " from below", x < low
        yield " from above", x > high
    elif name == "convert_element_type" and result.dtype == bool:
        yield "", result
    elif name in ("div", "rem") and result.dtype.kind in "iu":
        x, y = align(operands, scope.rank)
        yield "", np.abs(x) >= np.abs(y)
    elif name in ("shift_right_logical", "shift_right_arithmetic"):
        yield "", result != 0
    elif name in ("sign", "abs"):
        [x] = operands
        if name == "sign":
            yield " above zero", x > 0
        if not scope.field.marks.is_natural(x):
            yield "", x < 0
    # A sorted mask says how many of its elements hold.
    elif name == "sort" and result.dtype == bool:
        yield "", result


def mark_results(
    field: Field, equation: Any, operands: Sequence[Operand], results: Sequence[Operand]
) -> Sequence[Operand]:
    """The results of an equation, of which the known ones are marked if they follow from floats."""
    if not _follows_floats(field, equation, operands):
        return results
    name = equation.primitive.name
    marks = field.marks
    are_natural = keeps_natural(name) and _are_natural(field, operands)
    # `(x > 0) & (y > 0)` is a decision too. `count < 3` is none, but a comparison of integers.
    are_decisions = name not in _COMPARISONS and _are_decisions(field, operands)
    marked: list[Operand] = []
    for x in results:
        # Numbers of the field need no mark: their keys are compared.
        if not isinstance(x, Exact) and not marks.follows_floats(x):
            x = np.asarray(x)
            is_natural = are_natural and not may_wrap(x.dtype)
            marks.add(x, decision=are_decisions and x.dtype == bool, natural=is_natural)
        marked.append(x)
    return marked


def mark_moved(field: Field, sources: Sequence[Operand], result: Operand) -> Operand:
    """What consists of elements of some values, as a row or a stack of them: marked if one of them follows floats."""
    marks = field.marks
    if isinstance(result, Exact) or marks.follows_floats(result) or not marks.any_follows_floats(sources):
        return result
    is_decision = result.dtype == bool and _are_decisions(field, sources)
    return marks.add(result, decision=is_decision, natural=_are_natural(field, sources))


def mark_chosen(field: Field, equation: Any, operands: Sequence[Operand], results: Sequence[Operand]) -> list[Operand]:
    """What a branch that a float chose returns, or a loop that a float ended: for other inputs it may be otherwise."""
    facts = []
    for x in operands:
        facts.append(not isinstance(x, Exact) and not is_key(x) and field.marks.is_natural(x))
    are_natural = NaturalFacts().step(equation, facts)
    marked: list[Operand] = []
    for x, is_natural in zip(results, are_natural, strict=True):
        if not isinstance(x, Exact):
            # Another array, because the same one may be a constant, or an operand, elsewhere.
            x = field.marks.add(x.view(), decision=x.dtype == bool, natural=is_natural)
        marked.append(x)
    return marked


def _are_decisions(field: Field, operands: Sequence[Operand]) -> bool:
    """Whether all operands that follow from floats are outcomes of comparisons."""
    marks = field.marks
    return all(marks.is_decision(x) for x in operands if marks.follows_floats(x))


def _follows_floats(field: Field, equation: Any, operands: Sequence[Operand]) -> bool:
    """Whether the known results of an equation follow from floats, because an operand does."""
    if not field.marks.any_follows_floats(operands):
        return False
    return not _is_forced(field, equation, operands)


def _is_forced(field: Field, equation: Any, operands: Sequence[Operand]) -> bool:
    """Whether a comparison has one answer for all inputs: whether a natural number is less than zero.

    jax asks this of every index, because a negative index counts from the end.
    """
    if equation.primitive.name not in ("lt", "ge"):
        return False
    x, y = operands
    if isinstance(x, Exact) or isinstance(y, Exact):
        return False
    # `count < 0` is false for all inputs. `count < limit` is not, where the limit follows from floats.
    return _is_at_most_zero(field, y) and field.marks.is_natural(x)


def _is_at_most_zero(field: Field, x: Known) -> bool:
    """Whether integers are zero or negative for all inputs: constants, that is."""
    return not field.marks.follows_floats(x) and bool((np.asarray(x) <= 0).all())


def _is_natural_beside_zero(field: Field, x: Known, y: Known) -> bool:
    """Whether one of two integers is not negative for any input, and the other is zero or a negative constant."""
    if _is_at_most_zero(field, y):
        return field.marks.is_natural(x)
    return _is_at_most_zero(field, x) and field.marks.is_natural(y)


def _are_natural(field: Field, operands: Sequence[Operand]) -> bool:
    """Whether no operand is negative for any input."""
    for x in operands:
        # A number of the field has no sign.
        if isinstance(x, Exact):
            return False
    return all(field.marks.is_natural(np.asarray(x)) for x in operands)
