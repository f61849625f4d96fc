"""Elementwise arithmetic and functions of numbers of the field."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np

from shardkit.testing.exact.numbers import arithmetic, logarithms
from shardkit.testing.exact.numbers.assembly import where
from shardkit.testing.exact.numbers.bits import from_bits, to_bits
from shardkit.testing.exact.numbers.constants import simplest
from shardkit.testing.exact.numbers.errors import UnsupportedError
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.functions import apply_function
from shardkit.testing.exact.numbers.square_roots import raise_power, square_root
from shardkit.testing.exact.numbers.values import OUTSIDE, Exact
from shardkit.testing.exact.rules.operands import Known, Operand
from shardkit.testing.exact.rules.scope import Scope

_LARGEST_POWER = 1024  # up to this exponent pow is a product


def add(scope: Scope, equation: Any, x: Operand, y: Operand) -> Exact:
    """add, and add_any of gradients."""
    x, y = scope.lift(x, y)
    return arithmetic.add(scope.field, x, y)


def subtract(scope: Scope, equation: Any, x: Operand, y: Operand) -> Exact:
    """sub."""
    x, y = scope.lift(x, y)
    return arithmetic.subtract(scope.field, x, y)


def negate(scope: Scope, equation: Any, x: Exact) -> Exact:
    """neg."""
    return arithmetic.negate(scope.field, x)


def multiply(scope: Scope, equation: Any, x: Operand, y: Operand) -> Exact:
    """mul. The product of a value with itself is a square, and known not to be negative: so a variance has a root."""
    is_square = equation.invars[0] is equation.invars[1]
    x, y = scope.lift(x, y)
    if not is_square and x.factor is None and y.factor is None:  # the same value, computed twice
        is_square = np.array_equal(x.number, y.number) and np.array_equal(x.facts, y.facts)
    if is_square:
        return _raise_to_power(scope, equation, x, 2)
    return arithmetic.multiply(scope.field, x, y)


def divide(scope: Scope, equation: Any, x: Operand, y: Operand) -> Exact:
    """div; the quotient of integers drops the remainder, and is an uninterpreted function."""
    x, y = scope.lift(x, y)
    if jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.integer):
        return apply_function(scope.field, "div of integers", x, y)
    scope.divide_by(equation, y)
    return arithmetic.divide(scope.field, x, y)


def square(scope: Scope, equation: Any, x: Exact) -> Exact:
    """square."""
    return _raise_to_power(scope, equation, x, 2)


def integer_power(scope: Scope, equation: Any, x: Exact) -> Exact:
    """integer_pow."""
    return _raise_to_power(scope, equation, x, equation.params["y"])


def _raise_to_power(scope: Scope, equation: Any, x: Exact, exponent: int) -> Exact:
    """A whole power. An even one is above zero, but where its base is zero."""
    result = arithmetic.power(scope.field, x, exponent)
    if exponent > 0 and exponent % 2 == 0:
        scope.note_touch(equation, x)
    return result


def power(scope: Scope, equation: Any, x: Operand, y: Operand) -> Exact:
    """pow: a product for a known whole exponent, a product of roots for quarters, else uninterpreted.

    Worked example: x**3.0 = x x x; x**-2.0 = 1 / (x x); x**1.5 = sqrt(x)**3; exp(y)**0.3 = exp(0.3 y), by the laws of
    roots; x**0.3 is an uninterpreted function of x and 0.3.
    """
    field = scope.field
    # x**2.0 traces to pow with an array of 2.0.
    exponent = _find_common_value(y)
    if exponent is None:
        return function_without_law(scope, equation, x, y)
    base = scope.lift_one(x)
    if exponent == np.round(exponent) and abs(int(exponent)) <= _LARGEST_POWER:
        return _raise_to_power(scope, equation, base, int(exponent))
    if base.is_power:  # exp(x)**0.3 is exp(0.3 x)
        field.laws.roots.of_powers = True
        if field.settings.laws_of_roots:
            return _raise_exp(field, base, simplest(float(exponent), np.asarray(y).dtype))
    quarters = 4 * exponent
    if quarters == np.round(quarters) and abs(exponent) <= _LARGEST_POWER:
        return _multiply_roots_of(field, base, int(quarters))
    return function_without_law(scope, equation, base, y)


def _raise_exp(field: Field, x: Exact, exponent: Fraction) -> Exact:
    """A product of exps to a rational power: exp(x)**0.3 is exp(0.3 x)."""
    result = raise_power(field, x, abs(exponent))
    if exponent < 0:
        return arithmetic.invert(field, result)
    return result


def _multiply_roots_of(field: Field, x: Exact, quarters: int) -> Exact:
    """x to the power quarters / 4: x**1.5 is sqrt(x)**3, and x**0.75 is sqrt(sqrt(x))**3."""
    root = square_root(field, x)
    if quarters % 2 == 0:
        return arithmetic.power(field, root, quarters // 2)
    return arithmetic.power(field, square_root(field, root), quarters)


def _find_common_value(x: Operand) -> Any:
    """The value that all elements of a known array have; None if there is none."""
    if isinstance(x, Exact) or not x.size:
        return None
    if np.ptp(x) != 0:
        return None
    return x.flat[0]


def root(scope: Scope, equation: Any, x: Exact) -> Exact:
    """sqrt and rsqrt: inverses of each other."""
    result = square_root(scope.field, x)
    if equation.primitive.name == "sqrt":
        return result
    return arithmetic.invert(scope.field, result)


def exp(scope: Scope, equation: Any, x: Exact) -> Exact:
    """exp."""
    return logarithms.exp(scope.field, x)


def log(scope: Scope, equation: Any, x: Exact) -> Exact:
    """log."""
    scope.divide_by(equation, x)
    return logarithms.log(scope.field, x)


def log_plus_one(scope: Scope, equation: Any, x: Exact) -> Exact:
    """log1p: log(1 + x). So log1p(x + y + x * y) is log((1 + x) * (1 + y)) = log1p(x) + log1p(y)."""
    ones = scope.constant(1, like=x)
    argument = arithmetic.add(scope.field, x, ones)
    return logarithms.log(scope.field, argument)


def exp_minus_one(scope: Scope, equation: Any, x: Exact) -> Exact:
    """expm1: exp(x) - 1."""
    ones = scope.constant(1, like=x)
    power_of_e = logarithms.exp(scope.field, x)
    return arithmetic.subtract(scope.field, power_of_e, ones)


def one_minus_square(scope: Scope, equation: Any, x: Exact) -> Exact:
    """one_minus_square: 1 - x**2."""
    ones = scope.constant(1, like=x)
    squares = arithmetic.power(scope.field, x, 2)
    return arithmetic.subtract(scope.field, ones, squares)


def logistic(scope: Scope, equation: Any, x: Exact) -> Exact:
    """logistic: 1 / (1 + exp(-x)); uninterpreted where it would use up too many primes."""
    field = scope.field
    if field.settings.shallow:
        return apply_function(field, "logistic", x, sign=1, never_zero=1)
    # The exp is one prime higher; where programs nest more of them than there are primes, `shallow` was set.
    exp_of_minus_x = logarithms.exp(field, arithmetic.negate(field, x))
    ones = scope.constant(1, like=x)
    divisor = arithmetic.add(field, ones, exp_of_minus_x)
    result = arithmetic.invert(field, divisor)
    # logistic(-1e30) is 0, as in floats: exp(1e30) would be a number of the field like any other.
    zeros = field.lift(np.zeros(x.shape, np.float32))
    return where(x.is_low, zeros, result)


def function_without_law(scope: Scope, equation: Any, *operands: Operand) -> Exact:
    """A function without a law, as erf_inv: a random number for each argument, the same for equal arguments."""
    arguments = scope.lift(*operands)
    return apply_function(scope.field, equation.primitive.name, *arguments)


def is_finite(scope: Scope, equation: Any, x: Exact) -> Known:
    """is_finite: inputs are finite, and so are their results unless a program divides by zero.

    Where a value is outside of the domain of a function in this draw, as sqrt(x) of a negative x, it may be a number in
    another one: that is noted as the outcome of a comparison.
    """
    field = scope.field
    truth = (x.poison == 0) & ~x.is_truly_infinite
    if not field.notes.domains:
        return truth
    if field.coverage is not None:
        is_inside = x.poison != OUTSIDE
        field.coverage.note_domain(field, equation, scope.line(equation), is_inside)
    return field.marks.add(truth, decision=True)


def bitcast(scope: Scope, equation: Any, x: Exact) -> Exact:
    """bitcast_convert_type: a float as the integer of its bits, and back."""
    source = equation.invars[0].aval.dtype
    target = equation.outvars[0].aval.dtype
    if source.itemsize != target.itemsize:
        raise UnsupportedError("bitcast of floats to another width")
    if jnp.issubdtype(source, jnp.floating):
        x = to_bits(scope.field, x, str(source))
    if jnp.issubdtype(target, jnp.floating):
        return from_bits(scope.field, x, str(target))
    return x  # the same word with another sign
