"""Which float constants of a program are computed in the field too, and by which rules (`numbers/computed.py`).

Worked example: `0.9 * one_hot + 0.0125` of known labels. Both operations are of constants, so numpy computes them in
float32: 0.9125 where the label is, but rounded. Here is noted how. If the sum meets an unknown, as in a product with
logits, the rules for `mul` and `add` compute it again in the field, as 9/10 + 1/80 = 73/80 exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from shardkit._jax.primitives import registered
from shardkit.testing.exact.numbers.assembly import join_parts
from shardkit.testing.exact.numbers.computed import are_numbers, are_whole
from shardkit.testing.exact.numbers.errors import UnsupportedError
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.values import INPUT, Exact, build_facts
from shardkit.testing.exact.rules.exchanges import apply_collective
from shardkit.testing.exact.rules.movement import MOVED_OPERANDS, MOVES_OF_ONE
from shardkit.testing.exact.rules.operands import Known, Operand
from shardkit.testing.exact.rules.primitive_rules import apply_rule
from shardkit.testing.exact.rules.scope import Scope
from shardkit.testing.exact.rules.sorting import sort_by

# What the field computes exactly.
_ARITHMETIC = {
    "add",
    "add_any",
    "sub",
    "mul",
    "div",
    "neg",
    "square",
    "integer_pow",
    "pow",
    "one_minus_square",
    "reduce_sum",
    "reduce_prod",
    "cumsum",
    "cumprod",
    "dot_general",
}
# What the field computes with laws, as log(2 x) = log(2) + log(x). It does so where both sides would differ otherwise:
# a program may as well have 0.6931472 in place of log(2).
_FUNCTIONS = {"exp", "expm1", "log", "log1p", "sqrt", "rsqrt"}
# What moves constants that were computed, beside collectives.
_MOVES = {*MOVES_OF_ONE, *MOVED_OPERANDS, "concatenate", "stack", "convert_element_type", "copy", "sort"}
_EXTREMES = ("maximum", "minimum")
# What chooses one of several constants, on one device.
_CHOICES = {"max", "min", "reduce_max", "reduce_min", "cummax", "cummin"}
_LARGEST_POWER = 1024


def note_constants(
    scope: Scope, axes: Mapping[str, int], equation: Any, operands: Sequence[Operand], results: Sequence[Operand]
) -> None:
    """Notes how an equation computed a float constant, if float32 may have rounded it or an operand."""
    if len(results) != 1:
        return
    [result] = results
    if isinstance(result, Exact) or result.dtype.kind != "f":
        return
    for x in operands:
        if isinstance(x, Exact) or result is x:
            return
    computed = scope.field.computed
    follows_computed = any(x in computed for x in operands)
    if _needs_note(scope.field, equation, operands, result, follows_computed):
        computed.note(result, operands, partial(_compute, scope, axes, equation, operands, result))


def _needs_note(field: Field, equation: Any, operands: Sequence[Known], result: Known, follows_computed: bool) -> bool:
    """Whether a constant may differ from what its equation computes exactly.

    `follows_computed` says whether one of the operands is such a constant.
    """
    name = equation.primitive.name
    if _is_arithmetic(name):
        return _may_be_rounded(equation, operands, result, follows_computed)
    if name in _FUNCTIONS and field.choices.exact_functions:
        return _may_be_rounded(equation, operands, result, follows_computed)
    return follows_computed and (name in _MOVES or _is_extreme(name))


def _is_extreme(name: str) -> bool:
    """Whether a primitive gives the largest or the smallest of some constants, on one device or over devices."""
    return name in _CHOICES or registered(name).reduces in _EXTREMES


def _is_arithmetic(name: str) -> bool:
    """Whether a primitive computes sums, products or quotients, on one device or over devices."""
    row = registered(name)
    return name in _ARITHMETIC or (row.kind is not None and row.reduces not in _EXTREMES)


def _may_be_rounded(equation: Any, operands: Sequence[Known], result: Known, follows_computed: bool) -> bool:
    """Whether float32 may have rounded the result of an arithmetic equation, or one of its operands.

    Whole numbers are exact: 2.0 + 3.0 is 5.0. But 0.1 + 0.2 is rounded, and so is a sum with a computed constant.
    """
    arrays = [*operands, result]
    if not are_numbers(arrays):
        return False
    if are_whole(arrays) and not follows_computed:
        return False
    return equation.primitive.name != "pow" or _is_whole_power(operands[1])


def _is_whole_power(exponent: Known) -> bool:
    """Whether all elements of a known exponent are the same whole number, for which pow is a product."""
    if not exponent.size:
        return True
    first = exponent.flat[0]
    is_whole = first == np.rint(first) and abs(first) <= _LARGEST_POWER
    return bool(is_whole and (exponent == first).all())


def _compute(scope: Scope, axes: Mapping[str, int], equation: Any, operands: Sequence[Known], result: Known) -> Exact:
    """What an equation computes of constants, in the field."""
    field = scope.field
    name = equation.primitive.name
    if _is_extreme(name):
        return _take_extremes(field, operands, result)
    try:
        exact = _apply(scope, axes, equation, operands)
    except UnsupportedError:
        return field.lift_as_stored(result)
    if name in _MOVES:
        return exact
    # The rules know little of the sign of a sum, and a constant has one.
    zero = field.is_zero(exact)
    real = np.where(zero, 0.0, exact.real)
    sign = np.where(real[0] < 0, -1, 1)
    facts = build_facts(exact.shape, sign, 0, exact.used, exact.factor_used, exact.poison, ~zero)
    degree = exact.degree
    if name in _FUNCTIONS:
        degree = degree.plus(INPUT)  # exp has a random base, and a root is drawn
    return replace(exact, facts=facts, real=real, degree=degree)


def _apply(scope: Scope, axes: Mapping[str, int], equation: Any, operands: Sequence[Known]) -> Exact:
    """The result of an equation whose floats are lifted to the field, by the rule of its primitive."""
    name = equation.primitive.name
    lifted: list[Operand] = []
    for number, x in enumerate(operands):
        is_exponent = name == "pow" and number == 1  # the rule reads which power it is
        if x.dtype.kind == "f" and not is_exponent:
            lifted.append(scope.field.lift(x))
        else:
            lifted.append(x)
    if name == "sort":  # in the order of the floats, which are known: the rule orders unknown numbers
        return sort_by(operands[0], lifted[0], scope.rank + equation.params["dimension"])
    if registered(name).kind is not None:
        [exact] = apply_collective(scope, axes, equation, lifted)
    else:
        [exact] = apply_rule(scope, equation, lifted)
    return exact


def _take_extremes(field: Field, operands: Sequence[Known], result: Known) -> Exact:
    """The exact values of the operands' elements that are the largest or the smallest ones in floats.

    Worked example: the maximum 0.6666667 of [0.33333334, 0.6666667], which are 1 / 3 and 2 / 3, is 2 / 3.
    """
    values = np.concatenate([x.reshape(-1) for x in operands])
    extremes = result.reshape(-1)
    # The place of each extreme among the operands' elements, by a search in their order. NaN is beyond the last one.
    order = np.argsort(values, kind="stable")
    places_in_order = np.searchsorted(values[order], extremes)
    places = order[np.minimum(places_in_order, len(values) - 1)]
    if not (values[places] == extremes).all():  # as of NaN
        return field.lift_as_stored(result)

    def take(parts: list[np.ndarray]) -> np.ndarray:
        flat = np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)
        return flat[:, places].reshape(len(flat), *result.shape)

    return join_parts([field.lift(x) for x in operands], take, is_power=False)


def move_constant(field: Field, x: Operand, result: Operand, move: Callable[[Exact], Exact]) -> None:
    """Notes that a known array was moved out of another by no equation, as the piece of a device is."""
    if not isinstance(x, Exact) and result is not x and x in field.computed:
        field.computed.note(result, [x], lambda: move(field.lift(x)))
