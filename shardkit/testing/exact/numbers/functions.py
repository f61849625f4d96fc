"""Functions without a law in the field, as tanh: a random function in their place, and their real values.

Equal arguments have equal values, by one hash for a name; nothing else is known of them. So `tanh(x + y)` is
`tanh(y + x)`, because the arguments are equal, while a program that relies on `tanh(-x) = -tanh(x)` is not proved. Such
a function is called uninterpreted, and a certificate lists them.

A square root is one too, but for the laws of `roots.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardkit.testing.exact.numbers.assembly import where
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.function_table import (
    BOUNDED,
    EVERYWHERE,
    FUNCTIONS,
    Function,
    is_integer,
    load_real,
)
from shardkit.testing.exact.numbers.logarithms import to_number
from shardkit.testing.exact.numbers.values import NOT_A_NUMBER, OUTSIDE, Exact, build_facts


def apply_function(field: Field, name: str, *operands: Exact, sign: int = 0, never_zero: Any = 0) -> Exact:
    """An uninterpreted function of each element, with the real values of the function of that name.

    Worked example: `tanh(x)` where x is (3, 7) modulo 5 and 11, and was drawn as 0.5. A hash named "tanh" makes 1 of
    the 3 and 8 of the 7, say: the result is (1, 8), wherever tanh is taken of this number. Its real value is 0.46.

    Args:
        field: the field.
        name: the name of the function, mostly that of the primitive.
        operands: its arguments.
        sign: the sign of its values, if all have one (`SIGN`).
        never_zero: where they are zero for no input (`NEVER_ZERO`).
    """
    field.notes.uninterpreted.add(name)
    arguments = [to_number(field, x) for x in operands]
    residues = [x.number for x in arguments]
    number = field.residues.hash(name, *residues)
    # A prime that one of the arguments has used up has no meaning in the result either.
    used = arguments[0].used
    poison = arguments[0].poison
    for x in arguments[1:]:
        used = np.maximum(used, x.used)
        poison = np.maximum(poison, x.poison)
    degrees = [x.degree for x in arguments[1:]]
    degree = arguments[0].degree.of_function(*degrees)
    shape = number.shape[1:]

    # A function that numpy does not have, as a function of a test, is unknown in real numbers too.
    function = FUNCTIONS.get(name)
    if function is None:
        facts = build_facts(shape, sign, 0, used, poison=poison, never_zero=never_zero)
        real = np.full((1, *shape), math.nan)
        return field.settle(Exact(number, facts, real, degree=degree))

    are_zero = [field.is_zero(x) for x in arguments]
    _note_domain(field, function, arguments, are_zero[0])
    real = _compute_real(function, arguments, are_zero)
    values = _find_known_values(field, function, arguments)
    is_known = ~np.isnan(values)
    number = np.where(is_known, np.nan_to_num(values).astype(np.uint64), number)
    real = np.where(is_known, values, real)
    if field.settings.order is None:
        # arcsin(2) is outside of the domain in this draw. A NaN that comes from an argument has its poison from there.
        is_outside = np.isnan(real[0])
        for x in arguments:
            is_outside = is_outside & np.isfinite(x.real[0])
        poison = np.maximum(poison, np.where(is_outside, OUTSIDE, 0))
    infinite, poison = _find_poles(field, function, arguments, poison)
    facts = build_facts(shape, sign, infinite, used, poison=poison, never_zero=never_zero)
    result = Exact(number, facts, real, degree=degree)
    if any(x.special for x in arguments):
        result = _take_limits(field, result, arguments)
    return field.settle(result)


def _find_known_values(field: Field, function: Function, arguments: Sequence[Exact]) -> np.ndarray:
    """float64 [...]: the values that a function is known to have, NaN elsewhere.

    tanh(0) is 0: a gradient through tanh of a padded row must vanish. acos(1) is 0: what is divided by it is no number.
    """
    if function.find_values is not None:
        return function.find_values(field, *arguments)
    values = np.full(arguments[0].shape, math.nan)
    for argument, value in function.values.items():
        values = np.where(is_integer(field, arguments[0], argument), float(value), values)
    return values


def _compute_real(function: Function, arguments: Sequence[Exact], are_zero: Sequence[np.ndarray]) -> np.ndarray:
    """float64 [1, ...]: the function of real values, in which what is zero in the field is 0.0."""
    # A sum that cancels may be rounded to a number below zero, and sqrt would be NaN.
    reals = []
    for x, is_zero in zip(arguments, are_zero, strict=True):
        reals.append(np.where(is_zero, 0.0, x.real))
    compute = load_real(function.real)
    return np.asarray(compute(*reals))


def _find_poles(
    field: Field, function: Function, arguments: Sequence[Exact], poison: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Where an argument is a pole, so that a function is infinite, as lgamma(0), or no number, as digamma(0).

    Without this `0 * lgamma(x - x)` would be zero, and it is NaN in floats. Whether an argument is a pole is asked of
    the field, and not of real values: tanh(1e4 * x) rounds to 1 for most x, and is 1 for none.

    Returns:
        int [...], as `Exact.infinite`, and `Exact.poison`.
    """
    finite = np.zeros(poison.shape, int)
    if function.find_poles is None:
        return finite, poison
    infinite = np.where(poison == 0, function.find_poles(field, *arguments), 0)
    is_pole = infinite != 0
    if field.planted:  # only because this draw was planted so
        poison = np.maximum(poison, np.where(is_pole, OUTSIDE, 0))
        return finite, poison
    if function.is_nan_at_poles:
        poison = np.maximum(poison, np.where(is_pole, NOT_A_NUMBER, 0))
        return finite, poison
    if len(arguments) > 1:
        # Zero to a power whose sign is that of this draw alone: infinite here, and zero for other inputs.
        is_unknown = is_pole & bool(arguments[1].degree.total)
        field.notes.domains |= bool(is_unknown.any())
        infinite = np.where(is_unknown, 0, infinite)
        poison = np.maximum(poison, np.where(is_unknown, OUTSIDE, 0))
    return infinite, poison


def _note_domain(field: Field, function: Function, arguments: Sequence[Exact], is_zero: np.ndarray) -> None:
    """Notes a function whose argument may be outside of its domain for other inputs, as a root.

    A proof then makes more draws: in one draw all arguments may be inside.
    """
    is_constant = not any(x.degree.total for x in arguments)
    if function.domain == EVERYWHERE or is_constant:
        return
    may_be_negative = (arguments[0].sign <= 0) & ~is_zero
    if function.domain == BOUNDED or may_be_negative.any():
        field.notes.domains = True


def _take_limits(field: Field, x: Exact, arguments: Sequence[Exact]) -> Exact:
    """A function's values where an argument is truly infinite: those that it has in floats, as tanh(inf) = 1."""
    is_infinite = np.zeros(x.shape, bool)
    for argument in arguments:
        is_infinite = is_infinite | argument.is_truly_infinite
    # Only limits that floats know: NaN of sin(inf) becomes poison, 1 of tanh(inf) a constant.
    limit = field.lift(np.where(is_infinite, x.real[0], 0.0))
    return where(is_infinite & (x.poison == 0), limit, x)
