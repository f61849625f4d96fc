"""Functions without a law in the field, as tanh: a random function in their place, and their real values.

Equal arguments have equal values, by one hash for a name; nothing else is known of them. So `tanh(x + y)` is
`tanh(y + x)`, because the arguments are equal, while a program that relies on `tanh(-x) = -tanh(x)` is not proved. Such
a function is called uninterpreted, and a certificate lists them.

A square root is one too, but for the laws of `roots.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from shardkit.testing.exact.numbers.assembly import where
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.logarithms import to_number
from shardkit.testing.exact.numbers.orders import find_equal
from shardkit.testing.exact.numbers.values import INPUT, NOT_A_NUMBER, OUTSIDE, TRULY, Exact, build_facts

# Functions that are 0, and those that are 1, at 0.
_ZERO_AT_ZERO = {"tanh", "sin", "tan", "sinh", "cbrt", "sqrt", "asin", "atan", "asinh", "atanh", "erf", "erf_inv"}
_ONE_AT_ZERO = {"cos", "cosh", "erfc", "exp2"}
# Functions that have no value beyond a bound, on either side of zero perhaps: asin(2), acosh(0).
_BOUNDED = {"asin", "acos", "acosh", "atanh", "erf_inv"}
# Those, and functions that have none for negative arguments.
_WITH_DOMAIN = {"sqrt", "pow", "log2", *_BOUNDED}
_OF_NUMPY = ("tanh", "sin", "cos", "tan", "sinh", "cosh", "cbrt", "exp2", "log2")
_INVERSES = ("asin", "acos", "atan", "asinh", "acosh", "atanh", "atan2")  # numpy's begin with arc
_OF_SCIPY = ("erf", "erfc", "digamma")


@cache
def _real_functions() -> dict[str, Callable[..., Any]]:
    """The functions on real values, in float64, by the name of their primitive."""
    from scipy import special  # type: ignore[import-untyped]  # a proof alone needs it, which takes a moment

    functions: dict[str, Callable[..., Any]] = {}
    for name in _OF_NUMPY:
        functions[name] = getattr(np, name)
    for name in _INVERSES:
        functions[name] = getattr(np, f"arc{name[1:]}")
    for name in _OF_SCIPY:
        functions[name] = getattr(special, name)
    functions["erf_inv"] = special.erfinv
    functions["lgamma"] = special.gammaln
    functions["logistic"] = special.expit
    functions["sqrt"] = np.sqrt
    functions["pow"] = np.power
    functions["rem"] = np.fmod
    functions["nextafter"] = np.nextafter
    functions["div of integers"] = _divide_integers
    return functions


def _divide_integers(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.trunc(x / y)


def apply_function(field: Field, name: str, *operands: Exact, sign: int = 0) -> Exact:
    """An uninterpreted function of each element, with the real values of the function of that name."""
    field.notes.uninterpreted.add(name)
    arguments = [to_number(field, x) for x in operands]
    number = _draw_values(field, name, arguments)
    # A prime that one of the arguments has used up has no meaning in the result either.
    used = arguments[0].used
    poison = arguments[0].poison
    for x in arguments[1:]:
        used = np.maximum(used, x.used)
        poison = np.maximum(poison, x.poison)
    shape = number.shape[1:]
    # A function that numpy does not have, as a function of a test, is unknown in real numbers too.
    function = _real_functions().get(name)
    if function is None:
        facts = build_facts(shape, sign, 0, used, poison=poison)
        real = np.full((1, *shape), math.nan)
        return field.settle(Exact(number, facts, real, degree=INPUT))
    # A sum that cancels may be rounded to a number below zero, and sqrt would be NaN: it is set to 0.0.
    reals = [np.where(field.is_zero(x), 0.0, x.real) for x in arguments]
    real = np.asarray(function(*reals))
    _note_domain(field, name, arguments)
    if field.settings.order is None:
        # arcsin(2) is outside of the domain in this draw. A NaN that comes from an argument has its poison from there.
        is_defined = np.isfinite(sum(x.real for x in arguments))[0]
        poison = np.maximum(poison, np.where(np.isnan(real[0]) & is_defined, OUTSIDE, 0))
    infinite, poison = _find_poles(field, name, arguments, poison)
    facts = build_facts(shape, sign, infinite, used, poison=poison)
    result = Exact(number, facts, real, degree=INPUT)
    if any(x.special for x in arguments):
        result = _take_limits(field, result, arguments)
    return field.settle(result)


def _find_poles(
    field: Field, name: str, arguments: Sequence[Exact], poison: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Where an argument is a pole, so that a function is infinite, as lgamma(0), or no number, as digamma(0).

    Without this `0 * lgamma(x - x)` would be zero, and it is NaN in floats. Whether an argument is a pole is asked of
    the field, and not of real values: tanh(1e4 * x) rounds to 1 for most x, and is 1 for none.

    Returns:
        int [...], as `Exact.infinite`, and `Exact.poison`.
    """
    infinite = np.zeros(poison.shape, int)
    if name not in _POLES:
        return infinite, poison
    infinite = np.where(poison == 0, _POLES[name](field, *arguments), 0)
    is_pole = infinite != 0
    if field.planted:  # only because this draw was planted so
        return np.zeros(poison.shape, int), np.maximum(poison, np.where(is_pole, OUTSIDE, 0))
    if name in _NAN_AT_POLES:
        return np.zeros(poison.shape, int), np.maximum(poison, np.where(is_pole, NOT_A_NUMBER, 0))
    if name == "pow":
        # Zero to a power whose sign is that of this draw alone: infinite here, and zero for other inputs.
        is_unknown = is_pole & bool(arguments[1].degree.total)
        field.notes.domains |= bool(is_unknown.any())
        return np.where(is_unknown, 0, infinite), np.maximum(poison, np.where(is_unknown, OUTSIDE, 0))
    return infinite, poison


def _find_poles_at_zero(field: Field, x: Exact) -> np.ndarray:
    return np.where(field.is_zero(x), -TRULY, 0)


def _find_poles_at_ones(field: Field, x: Exact) -> np.ndarray:
    one = field.lift(np.ones((1,) * len(x.shape), np.float32))
    minus_one = field.lift(np.full((1,) * len(x.shape), -1, np.float32))
    return np.where(find_equal(field, x, one), TRULY, np.where(find_equal(field, x, minus_one), -TRULY, 0))


def _find_poles_at_integers(field: Field, x: Exact) -> np.ndarray:
    """The poles at 0, -1, -2, ...: the real value says which of them an argument may be."""
    nearest = np.rint(x.real[0])
    may_be_pole = (nearest <= 0) & (nearest > -_LARGEST_POLE)
    candidate = field.lift(np.where(may_be_pole, nearest, 1).astype(np.float32))
    return np.where(may_be_pole & find_equal(field, x, candidate), TRULY, 0)


def _find_poles_of_powers(field: Field, x: Exact, exponent: Exact) -> np.ndarray:
    return np.where(field.is_zero(x) & (exponent.real[0] < 0), TRULY, 0)


_LARGEST_POLE = 2**20  # an integer beyond it may be a float that was rounded
# Functions that are infinite at a number, and with which sign; digamma has two limits there, and so is NaN.
_POLES: dict[str, Callable[..., np.ndarray]] = {
    "log2": _find_poles_at_zero,
    "atanh": _find_poles_at_ones,
    "erf_inv": _find_poles_at_ones,
    "lgamma": _find_poles_at_integers,
    "digamma": _find_poles_at_integers,
    "pow": _find_poles_of_powers,
}
_NAN_AT_POLES = {"digamma"}


def _draw_values(field: Field, name: str, arguments: Sequence[Exact]) -> np.ndarray:
    """uint64 [components, ...]: a random residue for the residues of all arguments, by another hash for each name."""
    number = field.residues.hash(name, *(x.number for x in arguments))
    # Values at zero are known, as tanh(0) = 0, and are kept: a gradient through tanh of a padded row must vanish.
    if name in _ZERO_AT_ZERO:
        number = np.where(field.is_zero(arguments[0]), np.uint64(0), number)
    if name in _ONE_AT_ZERO:
        number = np.where(field.is_zero(arguments[0]), np.uint64(1), number)
    return number


def _note_domain(field: Field, name: str, arguments: Sequence[Exact]) -> None:
    """Notes a function whose argument may be outside of its domain for other inputs, as a root.

    A proof then makes more draws: in one draw all arguments may be inside.
    """
    if name in _WITH_DOMAIN and any(x.degree.total for x in arguments):
        may_be_negative = (arguments[0].sign <= 0) & ~field.is_zero(arguments[0])
        field.notes.domains |= name in _BOUNDED or bool(may_be_negative.any())


def _take_limits(field: Field, x: Exact, arguments: Sequence[Exact]) -> Exact:
    """A function's values where an argument is truly infinite: those that it has in floats, as tanh(inf) = 1."""
    is_infinite = np.zeros(x.shape, bool)
    for argument in arguments:
        is_infinite = is_infinite | argument.is_truly_infinite
    # Only limits that floats know: NaN of sin(inf) becomes poison, 1 of tanh(inf) a constant.
    limit = field.lift(np.where(is_infinite, x.real[0], 0.0))
    return where(is_infinite & (x.poison == 0), limit, x)


def list_columns(x: np.ndarray) -> np.ndarray:
    """[elements, components]: the components of each element side by side, as a key has them."""
    return np.ascontiguousarray(x.reshape(len(x), -1).T)
