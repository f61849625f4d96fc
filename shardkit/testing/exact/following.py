"""Known values that follow from floats: which results of an equation do, and how a proof notes them.

Integers and booleans are known, also if they follow from unknown floats: then they are those of this draw. Such values
are marked, so that a comparison of them is noted as one that may go another way for other inputs.

Worked example: a router sends tokens to the expert with the largest score.

    expert = argmax(scores)         a known integer, marked: it follows from floats
    count = (expert == 2).sum()     marked, and natural: it is not negative for any input
    count < capacity                a comparison of a marked integer: it is noted by the proof
    count < 0                       not noted: it is false for all inputs
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardkit._jax.jaxprs import source_line
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.function_table import FUNCTIONS
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.rules.operands import Known, Operand

# Primitives that give integers which are not negative, of such integers.
_NATURAL = {
    "add",
    "mul",
    "max",
    "min",
    "rem",
    "reduce_sum",
    "reduce_max",
    "cumsum",
    "convert_element_type",
    "select_n",
    "reshape",
    "broadcast_in_dim",
    "squeeze",
    "transpose",
    "concatenate",
    "slice",
    "dynamic_slice",
    "sort",
    "lu_pivots_to_permutation",
}
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
# Functions that jax computes of constants in floats, rounded: log(2) is no rational number.
_ROUNDED = {"exp", "expm1", "log", "log1p", "rsqrt"}
_ROUNDED |= {name for name, function in FUNCTIONS.items() if function.is_rounded}


def note_known(field: Field, equation: Any, around: str, operands: Sequence[Known], results: Sequence[Known]) -> None:
    """Notes for a proof an equation whose operands are all known: a rounded constant, random bits, a comparison.

    Args:
        field: the field of the run, which keeps the notes.
        equation: the equation.
        around: the line of the call around the equation.
        operands: its operands.
        results: its results.
    """
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
    # `counts < capacity`, where a router decides the counts.
    if name in _COMPARISONS:
        coverage.note_integers(field, equation, source_line(equation, around), results[0], operands)
    joins_decisions = name in ("and", "or") and all(field.marks.is_decision(x) for x in operands)
    if joins_decisions:
        coverage.note_joined(field, equation, source_line(equation, around), results[0])


def mark_results(
    field: Field, equation: Any, operands: Sequence[Operand], results: Sequence[Operand]
) -> Sequence[Operand]:
    """The results of an equation, of which the known ones are marked if they follow from floats."""
    if not _follows_floats(field, equation, operands):
        return results
    name = equation.primitive.name
    marks = field.marks
    are_natural = name in _NATURAL and _are_natural(field, operands)
    # `(x > 0) & (y > 0)` is a decision too. `count < 3` is none, but a comparison of integers.
    are_decisions = name not in _COMPARISONS
    for x in operands:
        if marks.follows_floats(x) and not marks.is_decision(x):
            are_decisions = False
    marked: list[Operand] = []
    for x in results:
        # Numbers of the field need no mark: their keys are compared.
        if not isinstance(x, Exact) and not marks.follows_floats(x):
            x = np.asarray(x)
            is_decision = are_decisions and x.dtype == bool
            is_natural = are_natural and not _may_wrap(x)
            marks.add(x, decision=is_decision, natural=is_natural)
        marked.append(x)
    return marked


def _may_wrap(x: np.ndarray) -> bool:
    """Whether integers are so narrow that a count may be negative in them: of int8, 128 is -128."""
    return x.dtype.kind == "i" and x.dtype.itemsize < 4


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
    is_at_most_zero = bool((np.asarray(y) <= 0).all())
    if field.marks.follows_floats(y) or not is_at_most_zero:
        return False
    return field.marks.is_natural(x)


def _are_natural(field: Field, operands: Sequence[Operand]) -> bool:
    """Whether no operand is negative for any input."""
    for x in operands:
        # A number of the field has no sign.
        if isinstance(x, Exact):
            return False
    return all(field.marks.is_natural(np.asarray(x)) for x in operands)
