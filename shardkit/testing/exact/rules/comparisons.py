"""Comparisons, and primitives that choose one of two numbers by a comparison: max, abs, sign, clamp, select.

A comparison looks at the keys of numbers (`orders.py`), and is noted by the `Coverage` of a proof. If it went only one
way, the proof runs again in an order in which it goes the other way.

Worked example: `max(x, 0)` compares x >= 0 and takes x or 0, element by element. In a draw in which all x are positive
the result is x, and so it is in a wrong program that computes x alone. The comparison is noted as one that never
failed; in an order in which x is negative, the wrong program differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from shardkit.testing.exact.numbers.arithmetic import negate
from shardkit.testing.exact.numbers.assembly import where
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.logarithms import to_number
from shardkit.testing.exact.numbers.orders import find_equal, find_keys, find_keys_of_two, highest_residues
from shardkit.testing.exact.numbers.values import NEVER_ZERO, OUTSIDE, SIGN, Exact
from shardkit.testing.exact.rules.operands import Known, Operand, require_known
from shardkit.testing.exact.rules.scope import Scope

_COMPARE: dict[str, Callable[..., Any]] = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def compare(scope: Scope, equation: Any, x: Operand, y: Operand) -> Known:
    """lt, le, gt and ge, by the keys."""
    x, y = scope.lift(x, y)
    x_keys, y_keys = find_keys_of_two(scope.field, x, y)
    # NaN is neither smaller nor larger than anything, as in floats.
    truth = _COMPARE[equation.primitive.name](x_keys, y_keys)
    return scope.decide(equation, truth, x, y)


def compare_totally(scope: Scope, equation: Any, x: Operand, y: Operand) -> Known:
    """lt_to and le_to of searchsorted: a total order, NaN last."""
    x, y = scope.lift(x, y)
    # searchsorted compares so, because a NaN that is neither smaller nor larger has no place in a sorted array.
    x_keys, y_keys = find_keys_of_two(scope.field, x, y)
    x_keys = put_nan_last(x_keys)
    y_keys = put_nan_last(y_keys)
    name = equation.primitive.name.removesuffix("_to")
    truth = _COMPARE[name](x_keys, y_keys)
    return scope.decide(equation, truth, x, y)


def put_nan_last(keys: np.ndarray) -> np.ndarray:
    """Keys in which NaN is as large as infinity."""
    return np.where(np.isnan(keys), np.inf, keys)


def compare_equal(scope: Scope, equation: Any, x: Operand, y: Operand) -> Known:
    """eq and ne: numbers are equal where they are so in the field, and have a place in the order."""
    field = scope.field
    x, y = scope.lift(x, y)
    # Before the keys, because `find_keys` turns a logarithm into a number: here logarithms are compared by their
    # arguments.
    has_equal_numbers = find_equal(field, x, y)
    # NaN has no place in the order: it is not equal to itself, though its residues are.
    has_equal_keys = find_keys(field, x) == find_keys(field, y)
    truth = has_equal_numbers & has_equal_keys
    # `isnan(x)` is `x != x`: it asks whether x is inside the domain of a function.
    asks_for_nan = equation.invars[0] is equation.invars[1]
    if field.coverage is not None:
        line = scope.line(equation)
        coincides = has_equal_keys & ~has_equal_numbers
        field.coverage.note_coincidence(field, equation, line, coincides)
        if field.notes.domains and asks_for_nan:
            is_inside = np.broadcast_to(x.poison != OUTSIDE, np.shape(truth))
            field.coverage.note_domain(field, equation, line, is_inside)
    if equation.primitive.name == "ne":
        truth = ~truth
    # Nothing was outside of a domain: the answer is the same for all inputs.
    if asks_for_nan and not field.notes.domains:
        return np.asarray(truth)
    return scope.decide(equation, truth, x, y)


def take_extreme(scope: Scope, equation: Any, x: Operand, y: Operand) -> Exact:
    """max and min; NaN if one of both is.

    Worked example: `max(x, 0)` where x was drawn as -0.7. The keys are -0.7 and 0, so the result is 0, which is noted
    as the outcome of `x >= 0` at this line. The result is known to be at least 0 for all inputs, because 0 is.
    """
    x, y = scope.lift(x, y)
    x_keys, y_keys = find_keys_of_two(scope.field, x, y)
    largest = equation.primitive.name == "max"
    # max(x, y) is not negative where one of both is not, and min(x, y) not positive where one of both is not.
    if largest:
        takes_x = x_keys >= y_keys
        sign = np.maximum(x.sign, y.sign)
        is_known = sign > 0
    else:
        takes_x = x_keys <= y_keys
        sign = np.minimum(x.sign, y.sign)
        is_known = sign < 0
    has_equal_keys = x_keys == y_keys
    if has_equal_keys.any():
        is_close = has_equal_keys & ~find_equal(scope.field, x, y)
        takes_x_of_close = _is_larger_of_close(scope.field, x, y)
        if not largest:
            takes_x_of_close = ~takes_x_of_close
        takes_x = np.where(is_close, takes_x_of_close, takes_x)
    # Where x is NaN no comparison holds: x is taken, so that NaN spreads.
    mask = scope.decide(equation, takes_x, x, y) | np.isnan(x_keys)
    chosen = where(mask, x, y)
    # Whichever was chosen here, the sign holds for all inputs: relu(x) is never negative.
    facts = chosen.facts.copy()
    facts[SIGN] = np.where(is_known, sign, chosen.sign)
    # max(x, 1) is never zero, because 1 is not; max(1 / x, 0) may be, though 1 / x is not.
    x_keeps_away = (x.sign == sign) & (x.never_zero != 0)
    y_keeps_away = (y.sign == sign) & (y.never_zero != 0)
    facts[NEVER_ZERO] = np.where(is_known, x_keeps_away | y_keeps_away, chosen.never_zero)
    return replace(chosen, facts=facts)


def _is_larger_of_close(field: Field, x: Exact, y: Exact) -> np.ndarray:
    """bool [...]: whether x counts as larger than y, where float64 does not tell them apart.

    In `max(1, g**2 / (g**2 + 1e-30))` either may be taken, but it must be the same in `max(g**2 / (g**2 + 1e-30), 1)`,
    as compilers write it, and the other one in `min`. So the larger one is the one with the smaller residue.
    """
    x_residues = highest_residues(field, to_number(field, x))[0]
    y_residues = highest_residues(field, to_number(field, y))[0]
    return x_residues < y_residues


def absolute(scope: Scope, equation: Any, x: Exact) -> Exact:
    """abs, by the order."""
    x = to_number(scope.field, x)
    zero = scope.constant(0, like=x)
    is_positive = scope.decide(equation, find_keys(scope.field, x) >= 0, x, zero)
    result = where(is_positive, x, negate(scope.field, x))
    return result.with_sign(1)  # whichever it is, for all inputs


def find_sign(scope: Scope, equation: Any, x: Exact) -> Exact:
    """sign, by the order, in which every number has a place."""
    keys = find_keys(scope.field, x)
    zero = scope.constant(0, like=x)
    is_positive = scope.decide(equation, keys > 0, x, zero)
    # 1, 0 or -1: a constant of this draw, which depends on x as the outcome of a comparison does.
    signs = np.where(is_positive, 1, -1)
    has_none = (keys == 0) | np.isnan(keys)  # the sign of 0 is 0, and that of NaN is NaN
    signs = np.where(has_none, keys, signs)
    return scope.field.lift(signs.astype(np.float32))


def clamp(scope: Scope, equation: Any, low: Operand, x: Operand, high: Operand) -> Exact:
    """clamp: below, between and above are three cases."""
    field = scope.field
    low, x, high = scope.lift(low, x, high)
    # As min(max(x, low), high): where low is above high it is high. NaN spreads from each of the three.
    # Each edge is a comparison: a wrong lower edge shows where x is below it.
    keys, low_keys = find_keys_of_two(field, x, low)
    below = scope.decide(equation, keys < low_keys, x, low, " from below")
    raised = where(below | np.isnan(low_keys), low, x)
    keys, high_keys = find_keys_of_two(field, raised, high)
    above = scope.decide(equation, keys > high_keys, raised, high, " from above")
    is_nan = np.isnan(keys)
    if field.coverage is not None:
        between = ~below & ~above & ~is_nan
        field.coverage.note_joined(field, equation, scope.line(equation), between, " between")
    takes_high = (above | np.isnan(high_keys)) & ~is_nan
    return where(takes_high, high, raised)


def select(scope: Scope, equation: Any, which: Operand, no: Operand, yes: Operand) -> Exact:
    """select_n of two cases, by a known mask, or by the known number of the case."""
    mask = np.asarray(require_known(which, "select_n"), bool)
    no, yes = scope.lift(no, yes)
    dims = len(no.shape)
    if mask.ndim < dims:  # one boolean for a whole array
        mask = scope.pad_part(mask[None], dims)[0]
    return where(mask, yes, no)
