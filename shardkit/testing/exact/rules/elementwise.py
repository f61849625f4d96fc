"""Elementwise arithmetic and functions of numbers of the field."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from shardkit.testing.exact.numbers import arithmetic, logarithms
from shardkit.testing.exact.numbers.assembly import where
from shardkit.testing.exact.numbers.bits import from_bits, to_bits
from shardkit.testing.exact.numbers.functions import apply_function
from shardkit.testing.exact.numbers.square_roots import raise_power, square_root
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.rules.operands import Known, Operand
from shardkit.testing.exact.rules.scope import Scope

_LARGEST_POWER = 1024  # up to which pow is a product


def add(scope: Scope, equation: Any, x: Operand, y: Operand) -> Exact:
    """add, and add_any of gradients."""
    return arithmetic.add(scope.field, *scope.lift(x, y))


def subtract(scope: Scope, equation: Any, x: Operand, y: Operand) -> Exact:
    """sub."""
    return arithmetic.subtract(scope.field, *scope.lift(x, y))


def negate(scope: Scope, equation: Any, x: Exact) -> Exact:
    """neg."""
    return arithmetic.negate(scope.field, x)


def multiply(scope: Scope, equation: Any, x: Operand, y: Operand) -> Exact:
    """A product; of a value with itself it is a square, which is positive."""
    # x * x is not negative, and x * y may be: so a variance is known to have a root.
    is_square = equation.invars[0] is equation.invars[1]
    x, y = scope.lift(x, y)
    if not is_square and x.factor is None and y.factor is None:  # a root and itself, computed twice
        is_square = np.array_equal(x.number, y.number) and np.array_equal(x.facts, y.facts)
    if is_square:
        return arithmetic.power(scope.field, x, 2)
    return arithmetic.multiply(scope.field, x, y)


def divide(scope: Scope, equation: Any, x: Operand, y: Operand) -> Exact:
    """A quotient; that of integers drops its rest, and is uninterpreted."""
    x, y = scope.lift(x, y)
    if jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.integer):
        return apply_function(scope.field, "div of integers", x, y)
    return arithmetic.divide(scope.field, x, y)


def square(scope: Scope, equation: Any, x: Exact) -> Exact:
    """square."""
    return arithmetic.power(scope.field, x, 2)


def integer_power(scope: Scope, equation: Any, x: Exact) -> Exact:
    """integer_pow."""
    return arithmetic.power(scope.field, x, equation.params["y"])


def power(scope: Scope, equation: Any, x: Operand, y: Operand) -> Exact:
    """pow: to a whole number that is known, a product; to halves and quarters, by roots; else uninterpreted."""
    # x**2.0 traces to pow with an array of 2.0.
    exponent = _find_common_value(y)
    if exponent is not None and exponent == np.round(exponent) and abs(int(exponent)) <= _LARGEST_POWER:
        return arithmetic.power(scope.field, scope.lift_one(x), int(exponent))
    x, y = scope.lift(x, y)
    if exponent is not None and x.is_power:  # exp(x)**0.3 is exp(0.3 x)
        result = raise_power(scope.field, x, abs(float(exponent)))
        return result if exponent > 0 else arithmetic.invert(scope.field, result)
    if exponent is not None and 4 * exponent == np.round(4 * exponent) and abs(exponent) <= _LARGEST_POWER:
        # x**0.75 is the third power of the root of the root.
        root = square_root(scope.field, x)
        halves = 2 * exponent
        if halves == np.round(halves):
            return arithmetic.power(scope.field, root, int(halves))
        return arithmetic.power(scope.field, square_root(scope.field, root), int(4 * exponent))
    return apply_function(scope.field, "pow", x, y)


def _find_common_value(x: Operand) -> Any:
    """The value that all elements of a known array have; None if there is none."""
    if isinstance(x, Exact) or not x.size or np.ptp(x) != 0:
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
    return logarithms.log(scope.field, x)


def log_plus_one(scope: Scope, equation: Any, x: Exact) -> Exact:
    """log1p: log(1 + x)."""
    return logarithms.log(scope.field, arithmetic.add(scope.field, x, scope.constant(1, like=x)))


def exp_minus_one(scope: Scope, equation: Any, x: Exact) -> Exact:
    """expm1: exp(x) - 1."""
    return arithmetic.subtract(scope.field, logarithms.exp(scope.field, x), scope.constant(1, like=x))


def one_minus_square(scope: Scope, equation: Any, x: Exact) -> Exact:
    """one_minus_square: 1 - x**2."""
    return arithmetic.subtract(scope.field, scope.constant(1, like=x), arithmetic.power(scope.field, x, 2))


def logistic(scope: Scope, equation: Any, x: Exact) -> Exact:
    """logistic: 1 / (1 + exp(-x)); uninterpreted where it would use up too many primes."""
    field = scope.field
    if field.shallow:
        return apply_function(field, "logistic", x, sign=1)
    # The exp is one prime higher; where programs nest more of them than there are primes, `shallow` was set.
    exp_of_minus_x = logarithms.exp(field, arithmetic.negate(field, x))
    result = arithmetic.invert(field, arithmetic.add(field, scope.constant(1, like=x), exp_of_minus_x))
    # sigmoid(-inf) is 0, where 1 / (1 + exp(inf)) would be 1 / inf.
    return where(x.is_low, field.lift(np.zeros(x.shape, np.float32)), result)


def function_without_law(scope: Scope, equation: Any, *operands: Operand) -> Exact:
    """A function of which nothing but its name is known."""
    return apply_function(scope.field, equation.primitive.name, *scope.lift(*operands))


def is_finite(scope: Scope, equation: Any, x: Exact) -> Known:
    """is_finite: inputs are, and what follows from them unless it divides by zero."""
    return (x.poison == 0) & ~x.is_truly_infinite


def bitcast(scope: Scope, equation: Any, x: Exact) -> Exact:
    """bitcast_convert_type: a float as the integer of its bits, and back."""
    if jnp.issubdtype(equation.invars[0].aval.dtype, jnp.floating):
        return to_bits(scope.field, x)
    return from_bits(scope.field, x)
