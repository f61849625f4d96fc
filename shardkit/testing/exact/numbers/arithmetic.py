"""Sums, products, quotients and powers of numbers of the field, with the facts that are known of the results.

Each function computes four things: the residues; the real values, in float64; the facts, of which sign, infinity and
NaN follow the rules of floats; and a bound of the degree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.infinities import (
    add_infinities,
    contract_infinities,
    multiply_infinities,
    sum_infinities,
)
from shardkit.testing.exact.numbers.logarithms import multiply_logarithm, to_number
from shardkit.testing.exact.numbers.roots import NO_ROOT
from shardkit.testing.exact.numbers.square_roots import find_common_roots, find_squares, multiply_roots
from shardkit.testing.exact.numbers.values import OUTSIDE, TRULY, Degree, Exact, build_facts

_MOST_TERMS = 2**18  # of a product of matrices that is taken term by term


def add(field: Field, x: Exact, y: Exact) -> Exact:
    """x + y; the factors of logarithms are multiplied.

    Worked example, modulo 5: 3 + log(x) and 4 + log(y) have the numbers 3 and 4 and the factors x and y. Their sum is
    (3 + 4) modulo 5 + log(x y), of the number 2 and the factor x y.
    """
    p = field.residues.primes_of(x.number)
    # (a + log f) + (b + log g) is (a + b) + log(f g).
    number = (x.number + y.number) % p
    factor = x.factor
    if x.factor is None:
        factor = y.factor
    elif y.factor is not None:
        factor = x.factor * y.factor % p
    if factor is not None:
        factor = np.broadcast_to(factor, number.shape)
    # The sum of two numbers that are not negative is not negative. If their signs differ, that of the sum is not known.
    sign = np.where(x.sign == y.sign, x.sign, 0)
    # inf - inf is NaN, 1e30 + 1 stays HUGE: what floats would make of them.
    infinite, poison = add_infinities(field, x, y)
    used = np.maximum(x.both_used, y.both_used)
    never_zero = (sign != 0) & ((x.never_zero | y.never_zero) != 0)
    facts = build_facts(number.shape[1:], sign, infinite, used[0], used[1], poison, never_zero)
    # c sqrt(x) + d sqrt(x) is (c + d) sqrt(x); a sum of other terms is a multiple of no root.
    roots = None
    if x.roots is not None and y.roots is not None:
        roots = np.where(x.roots == y.roots, x.roots, NO_ROOT)
    degree = x.degree.plus(y.degree)
    return field.settle(Exact(number, facts, x.real + y.real, factor, degree, roots))


def negate(field: Field, x: Exact) -> Exact:
    """-x."""
    p = field.residues.primes_of(x.number)
    # -(a + log f) is -a + log(1 / f).
    factor = None
    if x.factor is not None:
        factor = field.invert_residues(x.factor, x.factor_used)
    number = (p - x.number) % p
    facts = build_facts(x.shape, -x.sign, -x.infinite, x.used, x.factor_used, x.poison, x.never_zero)
    return Exact(number, facts, -x.real, factor, x.degree, x.roots)


def subtract(field: Field, x: Exact, y: Exact) -> Exact:
    """x - y."""
    return add(field, x, negate(field, y))


def multiply(field: Field, x: Exact, y: Exact) -> Exact:
    """x * y; a logarithm times a small whole number or a mask stays one."""
    product = _multiply_as_logarithm(field, x, y)
    if product is not None:
        return product
    x = to_number(field, x)
    y = to_number(field, y)
    p = field.residues.primes_of(x.number)
    number = x.number * y.number % p
    infinite, poison = multiply_infinities(field, x, y)
    used = np.maximum(x.used, y.used)
    sign = x.sign * y.sign
    never_zero = x.never_zero * y.never_zero
    facts = build_facts(number.shape[1:], sign, infinite, used, poison=poison, never_zero=never_zero)
    degree = x.degree.times(y.degree)
    roots = None
    if x.roots is not None or y.roots is not None:
        factor, roots, degree_of_factor = multiply_roots(field, x.roots_or_zeros, y.roots_or_zeros)
        if factor is not None:
            number = number * factor % p
            degree = degree.times(degree_of_factor)
    is_power = x.is_power and y.is_power
    return field.settle(Exact(number, facts, x.real * y.real, None, degree, roots, is_power))


def _multiply_as_logarithm(field: Field, x: Exact, y: Exact) -> Exact | None:
    """x * y as a logarithm; None if neither is one, or the product is none.

    log(x) times 3 is log(x**3), and log(x) times a mask is log(x) or 0. For log(x) times any y the logarithm must
    become a number. So it must where a number is infinite or NaN, because a factor is neither.
    """
    if x.special or y.special:
        return None
    if x.factor is not None and y.factor is None:
        return multiply_logarithm(field, x, y)
    if y.factor is not None and x.factor is None:
        return multiply_logarithm(field, y, x)
    return None


def power(field: Field, x: Exact, n: int) -> Exact:
    """x to a whole power. Even powers of a square root are powers of its argument: sqrt(y)**4 is y**2."""
    x = to_number(field, x)
    if n == 0:  # 1, as in floats, even if x is NaN
        return field.lift(np.ones(x.shape, np.float32))
    if n < 0:
        inverse_of_power = power(field, x, -n)
        return invert(field, inverse_of_power)
    # The number of a root is random: its square, computed from it, would be another random number.
    if n >= 2 and x.roots is not None:
        square = multiply(field, x, x).with_sign(1)
        return _power_of_square(field, x, square, n)
    if n >= 2:
        known_square = find_squares(field, x)
        if known_square is not None:
            return _power_of_square(field, x, known_square, n)
    sign: Any = x.sign
    if n % 2 == 0:
        sign = 1
    # (-inf)**3 is -inf.
    infinite = np.where(x.is_truly_infinite, TRULY * np.sign(x.infinite) ** n, 0)
    facts = build_facts(x.shape, sign, infinite, x.used, poison=x.poison, never_zero=x.never_zero)
    number = field.residues.power(x.number, n)
    degree = x.degree.to_the(n)
    return field.settle(Exact(number, facts, x.real**n, None, degree, x.roots, x.is_power))


def _power_of_square(field: Field, x: Exact, square: Exact, n: int) -> Exact:
    """x**n from x**2, which is known from the law of roots: (c sqrt(y))**3 is c**2 y times c sqrt(y)."""
    result = power(field, square, n // 2)
    if n % 2:
        result = multiply(field, result, x)
    return result


def invert(field: Field, x: Exact) -> Exact:
    """1 / x, which is infinite for x = 0, and 0 for an infinite x."""
    x = to_number(field, x)
    number, roots, degree = _invert_numbers(field, x)
    is_zero = field.is_zero(x)
    infinite: Any = 0
    poison = x.poison
    if field.planted:  # x is zero only because this draw was planted so
        poison = np.where(is_zero, OUTSIDE, poison)
    else:
        infinite = np.where(is_zero, TRULY, 0)
    # 1 / inf is a zero like any other: it has a meaning in all components.
    number = np.where(x.is_truly_infinite, np.uint64(0), number)
    used = np.where(x.is_truly_infinite, 0, x.used)
    never_zero = ~x.is_truly_infinite
    facts = build_facts(x.shape, x.sign, infinite, used, poison=poison, never_zero=never_zero)
    return field.settle(Exact(number, facts, 1 / x.real, None, degree, roots, x.is_power))


def _invert_numbers(field: Field, x: Exact) -> tuple[np.ndarray, np.ndarray | None, Degree]:
    """The residues of 1 / x, the ids of the roots of which they are multiples, and their degree."""
    size = x.number[0].size
    if x.roots is None:
        number = field.invert_residues(x.number, x.used)
        return number, None, field.degree_of_inverses(x.degree, size)
    roots = field.laws.roots
    if roots.ids_of_squares(x.roots).any():
        # x is the root of a multiple of a root, such as sqrt(sqrt(y)). 1 / x is x / x**2, and x**2 has fewer roots.
        squares = multiply(field, x, x)
        inverse, roots_of_inverse, degree = _invert_numbers(field, squares)
        facts = build_facts(x.shape, used=x.used)
        dividend = Exact(x.number, facts, x.real, None, x.degree, x.roots)
        inverse_of_squares = Exact(inverse, facts, x.real, None, degree, roots_of_inverse)
        quotient = multiply(field, dividend, inverse_of_squares)
        return quotient.number, quotient.roots, quotient.degree
    # 1 / (c sqrt(y)) is sqrt(y) / (c y). The number is c h of a root h, and y / h**2 takes it to c y / h.
    correction = roots.corrections(x.roots[0])
    divisor = x.number * correction % field.residues.primes_of(x.number)
    degree_of_divisor = x.degree.times(roots.degree_of_squares)
    inverse = field.invert_residues(divisor, x.used)
    degree_of_inverse = field.degree_of_inverses(degree_of_divisor, size)
    return inverse, x.roots, roots.degree.times(degree_of_inverse)


def divide(field: Field, x: Exact, y: Exact) -> Exact:
    """x / y."""
    return multiply(field, x, invert(field, y))


def sum_dims(field: Field, x: Exact, dims: Sequence[int], keep: bool = False) -> Exact:
    """The sum over dims of the array; `keep` leaves them, with size 1."""
    dims = tuple(dims)
    dims_of_parts = tuple(dim + 1 for dim in dims)  # behind the components
    # The number is [components, ...]. A sum of 2**32 residues of 32 bits fits a word, so one remainder is enough.
    number = x.number.sum(dims_of_parts, np.uint64, keepdims=keep)
    number = number % field.residues.primes_of(number)
    factor = x.factor
    if factor is not None:
        for dim in sorted(dims_of_parts, reverse=True):
            factor = _multiply_along(field, factor, dim, keep)
    # The sign of a sum is known if all its terms have this sign.
    is_positive = (x.sign == 1).all(dims, keepdims=keep)
    is_negative = (x.sign == -1).all(dims, keepdims=keep)
    sign = np.where(is_negative, -1, 0)
    sign = np.where(is_positive, 1, sign)
    # [...] without the dims, or with size 1 in their place.
    infinite, poison = sum_infinities(field, x, dims, keep)
    used = x.both_used.max(dims_of_parts, keepdims=keep, initial=0)
    # A sum of terms that are not negative is zero only where all of them are.
    never_zero = (sign != 0) & (x.never_zero != 0).any(dims, keepdims=keep)
    facts = build_facts(number.shape[1:], sign, infinite, used[0], used[1], poison, never_zero)
    real = x.real.sum(dims_of_parts, keepdims=keep)
    roots = None
    if x.roots is not None:
        roots = find_common_roots(x.roots, dims_of_parts, keep)
    return field.settle(Exact(number, facts, real, factor, x.degree, roots))


def _multiply_along(field: Field, x: np.ndarray, dim: int, keep: bool) -> np.ndarray:
    """The product of residues along a dim."""
    p = field.residues.primes_of(x)
    result = np.ones((*x.shape[:dim], 1, *x.shape[dim + 1 :]), np.uint64)
    for i in range(x.shape[dim]):
        result = result * np.take(x, [i], dim) % p
    if keep:
        return result
    return np.squeeze(result, dim)


def matmul(field: Field, x: Exact, y: Exact) -> Exact:
    """[..., m, k] @ [..., k, n]."""
    x = to_number(field, x)
    y = to_number(field, y)
    if x.roots is not None and y.roots is not None and not _have_common_roots(x, y):
        # The terms of a sum have different products of roots, as in Q R, where columns of Q and rows of R have roots.
        # So each term is a number of its own: [..., m, k, 1] times [..., 1, k, n], of which the sum is over k.
        left = x.move(lambda part: part[..., None])
        right = y.move(lambda part: part[..., None, :, :])
        terms = multiply(field, left, right)
        return sum_dims(field, terms, [len(terms.shape) - 2])
    number = field.residues.matmul(x.number, y.number)
    # [..., m, 1] and [..., 1, n]: a sum has used up as many primes as the worst of its terms.
    used_of_rows = x.used.max(-1, keepdims=True, initial=0)
    used_of_columns = y.used.max(-2, keepdims=True, initial=0)
    used = np.maximum(used_of_rows, used_of_columns)
    infinite: Any = 0
    poison: Any = 0
    if x.special or y.special:
        infinite, poison = contract_infinities(field, x, y)
    sign = _find_common_sign(x, y)
    never_zero = sign != 0 and x.shape[-1] > 0 and bool(x.never_zero.all()) and bool(y.never_zero.all())
    facts = build_facts(number.shape[1:], sign, infinite, used, poison=poison, never_zero=never_zero)
    real = np.matmul(x.real, y.real)
    degree = x.degree.times(y.degree)
    roots = None
    if x.roots is not None or y.roots is not None:
        # [..., m, 1] and [..., 1, n]: the root of a row, or of a column, that all terms of its sums have.
        roots_of_rows = find_common_roots(x.roots_or_zeros, (-1,), keep=True)
        roots_of_columns = find_common_roots(y.roots_or_zeros, (-2,), keep=True)
        # All terms of a sum have the same product of roots, so that the law of roots acts on the sum: with the roots g
        # and h of a and b, the sum of c g d h is (sum of c d) g h, and the factor makes it a multiple of sqrt(a b).
        factor, roots, degree_of_factor = multiply_roots(field, roots_of_rows, roots_of_columns)
        if factor is not None:
            number = number * factor % field.residues.primes_of(number)
            degree = degree.times(degree_of_factor)
    return field.settle(Exact(number, facts, real, None, degree, roots))


def _have_common_roots(x: Exact, y: Exact) -> bool:
    """Whether all terms of each sum in a product of matrices have the same two roots; True too for too many terms."""
    if x.shape[-2] * y.number[0].size > _MOST_TERMS:
        return True
    x_roots = x.roots_or_zeros
    y_roots = y.roots_or_zeros
    are_equal_in_rows = (x_roots == x_roots[..., :1]).all()
    are_equal_in_columns = (y_roots == y_roots[..., :1, :]).all()
    return bool(are_equal_in_rows and are_equal_in_columns)


def _find_common_sign(x: Exact, y: Exact) -> int:
    """The sign that all products of elements have; 0 if there is none."""
    for x_sign in (1, -1):
        if not (x.sign == x_sign).all():
            continue
        for y_sign in (1, -1):
            if (y.sign == y_sign).all():
                return x_sign * y_sign
    return 0
