"""Exps, which go from one prime of the tower to the next, and logarithms, which are kept beside the number.

exp(x) is a power of an element of order p modulo 2p + 1, so that exp(x + y) is exp(x) exp(y) exactly. Each exp on the
way from an input to a result uses up one prime.

A logarithm is not computed but kept, as the factor of `Exact`: log(x) has the number 0 and the factor x. Worked
example, with (number, factor) of each line:

    log(x)           (0, x)
    log(x) + log(y)  (0, x y)        so log(x y) is log(x) + log(y)
    3 log(x)         (0, x**3)       a small whole number
    log(x) + 1       (1, x)
    exp(log(x) + 1)  exp(1) x        so exp(log(x)) is x

Where a factor is not enough, as for log(x) * y, the logarithm becomes a number: the exponent of x squared, one prime
lower. So log(exp x) is x, and log(x y) * z is log(x) * z + log(y) * z. Lost are the sign of x and the highest prime.
The logarithm of a number that was itself a logarithm loses the next prime too (`Degree.log_depth`); an exp gives one
back. With the primes 0 to 7:

    log(x) * y           has a meaning modulo 0 to 6
    log(log(x) + 1) * y  modulo 0 to 5
    exp(log(x) * y)      modulo 1 to 7
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shardkit.testing.exact.numbers.errors import NestedLogarithmsError
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.same_keys import recall_keys
from shardkit.testing.exact.numbers.tower import LEVELS
from shardkit.testing.exact.numbers.values import (
    CONSTANT,
    INPUT,
    NOT_A_NUMBER,
    OUTSIDE,
    TRULY,
    Degree,
    Exact,
    build_facts,
    list_columns,
)

_LARGEST_WHOLE = 64  # multiples of a logarithm up to which it stays one


def exp(field: Field, x: Exact) -> Exact:
    """exp, one prime higher; 0 where x is minus infinity."""
    field.notes.exps = True
    number = field.residues.exp(x.number)
    used = x.used + 1
    # One prime higher, so that one more of the highest primes has a meaning.
    depth = max(x.degree.log_depth - 1, 0)
    degree = CONSTANT
    if x.degree.total:
        # A random function of its argument.
        degree = Degree(1, log_depth=depth)
    if x.factor is not None:
        # exp(number + log(factor)) is exp(number) times the factor.
        number = number * x.factor % field.residues.primes_of(number)
        used = np.maximum(used, x.factor_used)
        depth = max(depth, x.degree.log_depth_of_factor)
        degree = degree.times(x.degree)._replace(log_depth=depth, log_depth_of_factor=0)
    # exp(-inf) is 0, also of a constant that stands for -inf in a mask. That zero has a meaning in all components.
    number = np.where(x.is_low, np.uint64(0), number)
    used = np.where(x.is_low, 0, np.minimum(used, LEVELS))
    real = np.where(x.is_low, 0.0, np.exp(x.real))
    # What stands for infinity has no finite exp in floats either.
    infinite = np.where(x.infinite > 0, TRULY, 0)
    facts = build_facts(x.shape, 1, infinite, used, poison=x.poison, never_zero=~x.is_low)
    is_power = x.factor is None
    return field.settle(Exact(number, facts, real, degree=degree, is_power=is_power))


def log(field: Field, x: Exact) -> Exact:
    """log(x), kept as the factor x; log(0) is minus infinity."""
    x = to_number(field, x)
    is_zero = field.is_zero(x)
    may_be_negative = (x.sign <= 0) & ~is_zero
    if x.degree.total and may_be_negative.any():
        field.notes.domains = True
    # Where x is zero the logarithm is -inf, and where it is known to be negative NaN.
    infinite = np.where(is_zero, -TRULY, 0)
    infinite = np.where(x.infinite == TRULY, TRULY, infinite)
    is_negative = ~is_zero & ((x.sign < 0) & (x.infinite == 0) | (x.infinite < 0))
    poison = np.maximum(x.poison, np.where(is_negative, NOT_A_NUMBER, 0))
    if field.settings.order is None:
        # Negative in this draw, but not known to be so for all inputs.
        keys = recall_keys(field, x.number, x.real[0])
        happens_to_be_negative = ~is_zero & (keys < 0) & (poison == 0)
        poison = np.maximum(poison, np.where(happens_to_be_negative, OUTSIDE, 0))
    # The whole number moves to the factor, with the primes that it has used up.
    number = np.zeros_like(x.number)
    factor = np.where(is_zero, np.uint64(1), x.number)
    facts = build_facts(x.shape, 0, infinite, 0, x.used, poison)
    degree = x.degree._replace(log_depth=0, log_depth_of_factor=x.degree.log_depth)
    return field.settle(Exact(number, facts, np.log(x.real), factor, degree))


def to_number(field: Field, x: Exact) -> Exact:
    """The same array without a factor: its logarithm becomes a number.

    Worked example, modulo 5 and 11 with g = 1: the number (1, 2) with the factor (4, 9). 9 is 4**3 modulo 11, so that
    the logarithm of the factor is 3 modulo 5. Modulo 11 it is not known. The result is (1 + 3, random) = (4, random).
    """
    if x.factor is None:
        return x
    is_one = _find_ones(field, x.factor, x.factor_used)
    used = np.where(is_one, x.used, np.maximum(x.used, x.factor_used - 1))
    number = x.number
    depth = x.degree.log_depth
    if not is_one.all():
        depth = max(depth, x.degree.log_depth_of_factor + 1)
        if depth > field.settings.log_depth:
            raise NestedLogarithmsError
        field.notes.logs = True
        p = field.residues.primes_of(number)
        # The logarithm of the factor is minus the logarithm of 1 / factor. The inverse is taken because zero has no
        # logarithm: where the factor is zero at one of the points by chance, it asks for another draw.
        factor, is_root = _find_squares(field, x.factor)
        inverse = field.invert_residues(factor, x.factor_used)
        used_of_factor = np.where(is_one, 0, x.factor_used)
        logarithm = (p - field.residues.log(inverse, used_of_factor)) % p
        half = (p + np.uint64(1)) // np.uint64(2)
        logarithm = np.where(is_root, logarithm * half % p, logarithm)
        number = np.where(is_one, number, (number + logarithm) % p)
    facts = build_facts(x.shape, 0, x.infinite, used, poison=x.poison)
    degree = x.degree.plus(INPUT)._replace(log_depth=depth, log_depth_of_factor=0)
    return field.settle(Exact(number, facts, x.real, degree=degree))


def _find_ones(field: Field, factor: np.ndarray, used: np.ndarray) -> np.ndarray:
    """bool [...]: which factors are 1: log(1) is 0 in every way, and uses up no prime. Other logarithms are one lower.

    A factor that was computed from a logarithm, as 1 + log(x) of x = 1, is 1 modulo the primes for which it has a
    meaning, and not modulo the highest.
    """
    is_one = ((factor == 1) | ~field.valid(used)).all(0)
    # Behind more exps than there are primes none has a meaning: then it is not known to be 1.
    return is_one & (used < field.end_level)


def _find_squares(field: Field, factor: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Factors with x in place of sqrt(x), which doubles the logarithm; and bool [...], which elements were roots."""
    is_root = np.zeros(factor.shape[1:], bool)
    squares = field.laws.roots.squares
    if not field.settings.laws_of_roots or not squares:
        return factor, is_root
    # A copy: the factor of this array stays a root wherever else the array is used.
    number = factor.copy()
    columns = number.reshape(len(number), -1)
    for place, word in enumerate(list_columns(factor)):
        square = squares.get(word.tobytes())
        if square is not None:
            columns[:, place] = square.number
            is_root.flat[place] = True
    return number, is_root


def multiply_logarithm(field: Field, x: Exact, y: Exact) -> Exact | None:
    """A logarithm x times a small whole number or a mask y, which stays one; None for other products."""
    # A sum of n equal logarithms, or a mean over examples with a mask: these keep the logarithm.
    multiple = find_whole_number(field, y)
    if multiple is None and not _is_mask(y):
        return None
    number = x.number * y.number % field.residues.primes_of(x.number)
    if multiple is not None:
        # -3 log(f) is log(1 / f**3).
        factor = field.residues.power(x.factor_or_ones, abs(multiple))
        if multiple < 0:
            factor = field.invert_residues(factor, x.factor_used)
        infinite = x.infinite * np.sign(multiple)
    else:
        is_one = (y.number == 1).all(0)
        factor = np.where(is_one, x.factor_or_ones, np.uint64(1))
        infinite = x.infinite * is_one
    factor = np.broadcast_to(factor, number.shape)
    facts = build_facts(number.shape[1:], 0, infinite, x.used, x.factor_used, x.poison)
    return Exact(number, facts, x.real * y.real, factor, x.degree)


def _is_mask(y: Exact) -> bool:
    """Whether a constant is 1 or 0 in each element."""
    is_one = (y.number == 1).all(0)
    is_zero = (y.number == 0).all(0)
    return not y.degree.total and bool((is_one | is_zero).all())


def find_whole_number(field: Field, x: Exact) -> int | None:
    """The small whole number that all elements of a constant are equal to; None if they are not."""
    if x.factor is not None or x.degree.total or x.number.size == 0:
        return None
    # [components]: the residues of the first element, which all others must have.
    columns = x.number.reshape(len(x.number), -1)
    first = columns[:, 0]
    if not (columns == first[:, None]).all():
        return None
    # Its residues are n, or p - n if it is -n, for the same n modulo every prime.
    moduli = field.residues.moduli
    positive = int(first[0])
    if positive <= _LARGEST_WHOLE and (first == positive).all():
        return positive
    negative = int(moduli[0] - first[0])
    if negative <= _LARGEST_WHOLE and (moduli - first == negative).all():
        return -negative
    return None


def exp_keeping_infinity(field: Field, x: Exact) -> Exact:
    """exp(x), but minus infinity, and not 0, where x is minus infinity: exps can be compared in place of logarithms."""
    result = exp(field, x)
    facts = np.where(x.is_truly_infinite, x.facts, result.facts)
    return field.settle(replace(result, facts=facts))
