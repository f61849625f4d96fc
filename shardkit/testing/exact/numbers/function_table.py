"""What is known of each function without a law in the field: its real values, its domain, its poles, its values.

A proof is unsound if a pole or a zero is missing here: `0 * lgamma(x - x)` and `0 / lgamma(x / x)` would be zero, and
are NaN in floats. A test compares each row with what jax computes at a few numbers.

A function is used only if `RULES` (`rules/primitive_rules.py`) has its primitive too; a proof of gradients needs those
that its derivative calls, as that of i0e calls i1e.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np

from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.orders import find_equal
from shardkit.testing.exact.numbers.values import TRULY, Exact

EVERYWHERE: Literal["everywhere"] = "everywhere"
NOT_NEGATIVE: Literal["not negative"] = "not negative"  # as sqrt
BOUNDED: Literal["bounded"] = "bounded"  # on either side of zero perhaps, as asin and acosh
_LARGEST_POLE = 2**20  # an integer beyond it may be a float that was rounded


class Function(NamedTuple):
    """A function of one or two floats.

    Attributes:
        real: the function of float64 values, or where it is, as "numpy:tanh".
        values: its values at integers, where they are natural numbers: tanh(0) = 0, acos(1) = 0.
        find_values: float64 [...], its values for any arguments, NaN where they are not known.
        domain: where it has a value.
        find_poles: int [...], as `Exact.infinite`: where it is infinite for its arguments.
        is_nan_at_poles: whether it has two limits there, and so is NaN.
        is_rounded: whether jax rounds its values, as of most functions.
    """

    real: str | Callable[..., Any]
    values: Mapping[int, int] = MappingProxyType({})
    find_values: Callable[..., np.ndarray] | None = None
    domain: Literal["everywhere", "not negative", "bounded"] = EVERYWHERE
    find_poles: Callable[..., np.ndarray] | None = None
    is_nan_at_poles: bool = False
    is_rounded: bool = True


@cache
def load_real(real: str | Callable[..., Any]) -> Callable[..., Any]:
    """The function of float64 values. scipy is loaded here, because it takes a moment, and a proof alone needs it."""
    if isinstance(real, str):
        function: Callable[..., Any] = pkgutil.resolve_name(real)
        return function
    return real


def _find_poles_at_zero(field: Field, x: Exact) -> np.ndarray:
    return np.where(field.is_zero(x), -TRULY, 0)


def _find_poles_at_ones(field: Field, x: Exact) -> np.ndarray:
    """Infinity at 1, and minus infinity at -1."""
    infinite = np.where(is_integer(field, x, -1), -TRULY, 0)
    return np.where(is_integer(field, x, 1), TRULY, infinite)


def _find_poles_at_integers(field: Field, x: Exact) -> np.ndarray:
    """The poles at 0, -1, -2, ...

    The real value says which of them an argument may be: -2.9999999 may be -3, and is if its residues are those of -3.
    """
    nearest = np.rint(x.real[0])
    may_be_pole = (nearest <= 0) & (nearest > -_LARGEST_POLE)
    candidates = np.where(may_be_pole, nearest, 1).astype(np.float32)
    is_candidate = find_equal(field, x, field.lift(candidates))
    return np.where(may_be_pole & is_candidate, TRULY, 0)


def _find_poles_of_powers(field: Field, x: Exact, exponent: Exact) -> np.ndarray:
    """Zero to a negative power."""
    is_negative = exponent.real[0] < 0
    return np.where(field.is_zero(x) & is_negative, TRULY, 0)


def _find_values_of_powers(field: Field, x: Exact, exponent: Exact) -> np.ndarray:
    """One, of base one or of exponent zero."""
    is_one = is_integer(field, x, 1) | field.is_zero(exponent)
    return np.where(is_one, 1.0, math.nan)


def _find_values_of_remainders(field: Field, x: Exact, y: Exact) -> np.ndarray:
    """Zero, of y over itself and of -y over y. That of 3 * y is not said: floats round 3 * y, and leave a remainder."""
    primes = field.residues.primes_of(y.number)
    minus_y = replace(y, number=(primes - y.number) % primes, real=-y.real)
    is_zero = (find_equal(field, x, y) | find_equal(field, x, minus_y)) & ~field.is_zero(y)
    return np.where(is_zero, 0.0, math.nan)


def is_integer(field: Field, x: Exact, integer: int) -> np.ndarray:
    """bool [...]: where a number is a certain integer."""
    if integer == 0:
        return field.is_zero(x)
    ones = np.ones((1,) * len(x.shape), np.float32)
    return find_equal(field, x, field.lift(integer * ones))


def _divide_integers(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.trunc(x / y)


# By the name of the primitive.
FUNCTIONS = {
    "tanh": Function("numpy:tanh", values={0: 0}),
    "sin": Function("numpy:sin", values={0: 0}),
    "cos": Function("numpy:cos", values={0: 1}),
    "tan": Function("numpy:tan", values={0: 0}),
    "sinh": Function("numpy:sinh", values={0: 0}),
    "cosh": Function("numpy:cosh", values={0: 1}),
    "asin": Function("numpy:arcsin", values={0: 0}, domain=BOUNDED),
    "acos": Function("numpy:arccos", values={1: 0}, domain=BOUNDED),
    "atan": Function("numpy:arctan", values={0: 0}),
    "asinh": Function("numpy:arcsinh", values={0: 0}),
    "acosh": Function("numpy:arccosh", values={1: 0}, domain=BOUNDED),
    "atanh": Function("numpy:arctanh", values={0: 0}, domain=BOUNDED, find_poles=_find_poles_at_ones),
    "atan2": Function("numpy:arctan2"),
    "sqrt": Function("numpy:sqrt", values={0: 0}, domain=NOT_NEGATIVE),
    "cbrt": Function("numpy:cbrt", values={0: 0, 1: 1}),
    "exp2": Function("numpy:exp2", values={0: 1, 1: 2}),
    "log2": Function("numpy:log2", values={1: 0, 2: 1}, domain=NOT_NEGATIVE, find_poles=_find_poles_at_zero),
    "pow": Function(
        "numpy:power", find_values=_find_values_of_powers, domain=NOT_NEGATIVE, find_poles=_find_poles_of_powers
    ),
    "erf": Function("scipy.special:erf", values={0: 0}),
    "erfc": Function("scipy.special:erfc", values={0: 1}),
    "erf_inv": Function("scipy.special:erfinv", values={0: 0}, domain=BOUNDED, find_poles=_find_poles_at_ones),
    "lgamma": Function("scipy.special:gammaln", values={1: 0, 2: 0}, find_poles=_find_poles_at_integers),
    "digamma": Function("scipy.special:digamma", find_poles=_find_poles_at_integers, is_nan_at_poles=True),
    "logistic": Function("scipy.special:expit"),
    "rem": Function("numpy:fmod", find_values=_find_values_of_remainders, is_rounded=False),
    "nextafter": Function("numpy:nextafter", is_rounded=False),
    "div of integers": Function(_divide_integers, is_rounded=False),
}
