"""Which of two numbers is the larger one, and which are equal.

Residues have no order. Each number gets a key in float64 that says where it stands, in one of two ways:

- In a draw the key is the real value, but for its last digits.
- In an order the key is a hash of the residues, so that each of two unknown numbers is the larger one in some order.
  Only what holds for all inputs is kept: x < y when -y < -x, the signs that are known, and the order of constants. So
  a branch is taken that no draw has reached. Of any two numbers, one of them unknown, each is above the other in one of
  the first four orders, unless their signs decide.

Worked example: `max(exp(x), 1)` in order 0. The sign of exp(x) is known to be positive, and its size is hashed to
1.37, say: unknown sizes lie between 1 and 2. The constant 1 has the size 1 / (1 + 1) = 0.5, because all constants of an
even order lie below 1. So the maximum is exp(x) here. In order 1 constants lie between 2 and 3, above all unknown
sizes: there the maximum is 1. Two programs that agree in both orders agree whichever is larger.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from shardkit.testing.exact.numbers.errors import TooDeepError, UnknownValueError
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.hashing import mix
from shardkit.testing.exact.numbers.logarithms import exp, exp_keeping_infinity, to_number
from shardkit.testing.exact.numbers.same_keys import recall_keys
from shardkit.testing.exact.numbers.values import HUGE, INFINITE, OUTSIDE, TRULY, Exact

_DIGITS = 34  # bits of a real value, by which numbers are put in order
_SMALLEST = float(np.finfo(np.float64).smallest_subnormal)


def find_keys(field: Field, x: Exact) -> np.ndarray:
    """float64 [...]: the place of each element in the order, equal where the numbers are; NaN for no number."""
    field.notes.compared += 1
    x = to_number(field, x)
    used = int(x.used.max(initial=0))
    field.notes.deepest = max(field.notes.deepest, used)
    if used >= field.settings.levels - field.settings.log_depth:
        raise TooDeepError
    is_zero = field.is_zero(x)
    if field.settings.order is None:
        keys = recall_keys(field, x.number, _find_real_keys(x, is_zero))
    else:
        keys = _find_random_keys(field, x, field.settings.order)
    if field.choices.same_keys:
        is_lost = (keys == 0) & ~is_zero & (x.poison == 0)
        field.notes.lost |= bool(is_lost.any())
    # Zero is the middle of every order, infinity its ends, and NaN has no place.
    keys = np.where(is_zero, 0.0, keys)
    if x.special:
        keys = np.where(x.infinite == TRULY, math.inf, keys)
        keys = np.where(x.infinite == -TRULY, -math.inf, keys)
        keys = np.where(x.poison > 0, math.nan, keys)
    return keys


def find_keys_of_two(field: Field, x: Exact, y: Exact) -> tuple[np.ndarray, np.ndarray]:
    """The keys of two arrays that are compared with one another.

    Worked example: `(x + 2) - 2 > 0`, and `x + 2 > 2`, of an x that was drawn as 1e-20. Float64 rounds both sums to 2,
    and the first program compares 0 with 0, or 1e-20 with 0 if it is written `x > 0`. Where equal numbers have the same
    keys, it is the difference that has one: x in each of these programs.
    """
    x_keys = find_keys(field, x)
    y_keys = find_keys(field, y)
    if not field.choices.same_keys or field.settings.order is not None:
        return x_keys, y_keys
    x = to_number(field, x)
    y = to_number(field, y)
    p = field.residues.primes_of(x.number)
    difference = (x.number + p - y.number) % p
    are_finite = np.isfinite(x_keys) & np.isfinite(y_keys)
    finite_x_keys = np.where(are_finite, x_keys, 0.0)
    finite_y_keys = np.where(are_finite, y_keys, 0.0)
    keys = recall_keys(field, difference, finite_x_keys - finite_y_keys)
    # The difference in place of x, and zero in place of y.
    return np.where(are_finite, keys, x_keys), np.where(are_finite, 0.0, y_keys)


def _find_real_keys(x: Exact, is_zero: np.ndarray) -> np.ndarray:
    """The real values, but for their last digits: numbers that are equal may be rounded in other ways."""
    real = x.real[0]
    is_beyond_floats = ~np.isfinite(real)
    if is_beyond_floats.any():
        is_number = ~is_zero & (x.poison == 0) & ~x.is_truly_infinite
        if (is_beyond_floats & is_number).any():
            raise UnknownValueError
    keys = _drop_last_digits(real)
    # A number that is too small for a float, as a product of exps, still has its sign.
    is_too_small = (real == 0) & (x.sign != 0)
    return np.where(is_too_small, x.sign * _SMALLEST, keys)


def _drop_last_digits(real: np.ndarray) -> np.ndarray:
    """Real values of 34 of 53 bits: x + y + z in two orders of summation differ in the last few."""
    mantissa, exponent = np.frexp(real)
    digits = np.rint(mantissa * 2.0**_DIGITS)
    return np.asarray(np.ldexp(digits, exponent - _DIGITS))


def _find_random_keys(field: Field, x: Exact, order: int) -> np.ndarray:
    """A random total order.

    Unknown sizes are between 1 and 2. Constants are below them in even orders and above them in odd ones; from the
    fourth on they are among them, and spread about one of those that were compared, so that what is between two
    constants is seen.
    """
    residues = highest_residues(field, x)
    # Every element gets a hash; constants and infinities replace theirs.
    sizes, is_negative = _hash_sizes(field, x, residues, order)
    # A number that is the same at all points is a constant, as a count of tokens or its share. It keeps its place among
    # constants, because the other program may have computed it without an unknown, and compares its value.
    real = x.real[0]
    is_constant = (residues == residues[0]).all(0) & np.isfinite(real)
    constants = np.where(is_constant, _drop_last_digits(real), math.nan)
    sizes = np.where(is_constant, _place_constants(field, constants, order), sizes)
    is_negative = np.where(is_constant, constants < 0, is_negative)
    keys = np.where(is_negative, -sizes, sizes)
    # What stands for infinity is beyond all of them, which are below 3.
    is_huge = np.abs(x.infinite) == HUGE
    return np.where(is_huge, 4.0 * np.sign(x.infinite), keys)


def highest_residues(field: Field, x: Exact) -> np.ndarray:
    """uint64 [points, ...]: residues of the highest prime in which every number that can be ordered has a meaning."""
    return x.number[field.residues.top]


def _hash_sizes(field: Field, x: Exact, residues: np.ndarray, order: int) -> tuple[np.ndarray, np.ndarray]:
    """Random sizes between 1 and 2 for all elements, and whether each is negative.

    x and -x have the same size, and opposite signs. So both are hashed from the one of them that has the lower half of
    the residues at the first point.
    """
    p = field.residues.top_prime
    is_upper = residues[0] > p // np.uint64(2)
    # [points, ...]
    lower_residues = np.where(is_upper, p - residues, residues) % p
    hashes = np.zeros(x.shape, np.uint64)
    salts = field.residues.salt(f"order {order // 4}")
    for residues_at_point, salt in zip(lower_residues, salts, strict=False):
        hashes = mix(hashes, residues_at_point, salt)
    # Of four orders that share their hashes, the last two turn all unknown signs round, and the odd ones all sizes.
    turns_signs = order % 4 >= 2
    has_odd_hash = hashes % np.uint64(2) == 1
    is_below = is_upper ^ turns_signs ^ has_odd_hash
    is_negative = np.where(x.sign == 0, is_below, x.sign < 0)
    # 52 bits of the hash, as a share of 1.
    share = (hashes >> np.uint64(12)).astype(np.float64) * 2.0**-52
    sizes = 1 + share
    if order % 2:
        sizes = 3 - sizes
    return sizes, is_negative


def _place_constants(field: Field, constants: np.ndarray, order: int) -> np.ndarray:
    """The sizes of constants, in their own order: below all unknown ones, above them, or among them."""
    sizes = np.abs(constants)
    # From [0, inf) to [0, 1), in the order of sizes.
    share = sizes / (1 + sizes)
    if order < 4:
        return share + 2 * (order % 2)
    # From the fourth order on: on a logistic curve about a constant that was compared, or about two neighbours.
    middle, steepness = _choose_curve(field, order)
    distances = np.clip(steepness * (middle - np.log(sizes)), -700, 700)
    spread = 1 / (1 + np.exp(distances))
    return 1.01 + 0.97 * spread + 0.01 * share  # the share tells apart constants that are spread to one place


def _choose_curve(field: Field, order: int) -> tuple[float, float]:
    """The middle of the curve that spreads the logarithms of constants, and its steepness.

    Worked example: programs compare with 1, 1.0001 and 8. A curve of a random steepness about 1 leaves a ten-thousandth
    of all unknown sizes between 1 and 1.0001. So half of the orders choose two neighbours: for these two the middle is
    1.00005, and a steepness of 20,000 leaves half of all unknown sizes between them.
    """
    rng = np.random.default_rng([field.settings.seed, order])
    centres = field.choices.centres
    steepness = math.exp(rng.normal() + 1)
    middle = rng.choice(centres or (0.0,)) + rng.normal() / steepness
    gaps = np.diff(centres)
    is_between = order % 4 in (1, 2)  # of the orders that share their hashes one of each sign, and of each direction
    if is_between and (gaps > 0).any():
        place = rng.choice(np.flatnonzero(gaps > 0))
        middle = centres[place] + gaps[place] / 2
        steepness = 2 / gaps[place]
    return float(middle), float(steepness)


def _take_huge_for_numbers(x: Exact) -> Exact:
    """The same array, in which no constant stands for infinity."""
    is_huge = np.abs(x.infinite) == HUGE
    if not is_huge.any():
        return x
    facts = x.facts.copy()
    facts[INFINITE] = np.where(is_huge, 0, x.infinite)
    return replace(x, facts=facts)


def find_equal(field: Field, x: Exact, y: Exact) -> np.ndarray:
    """bool [...]: where arrays are equal, in the components that have a meaning for both.

    If one side is a logarithm, the exps of both are compared; otherwise both are compared as numbers. Two values that
    are no numbers are equal if they are of the same kind. Where one side is outside of a function's domain in this
    draw, they count as equal: the draw tells nothing there.
    """
    if not field.notes.logs and (x.factor is not None or y.factor is not None):
        # As long as no logarithm became a number, exp gives back the argument of each, with its sign.
        take_exp = exp
        if x.special or y.special:
            take_exp = exp_keeping_infinity
        # What stands for infinity is a number here: log(x) - 1e30 is not log(y) - 1e30.
        x = take_exp(field, _take_huge_for_numbers(x))
        y = take_exp(field, _take_huge_for_numbers(y))
    x = to_number(field, x)
    y = to_number(field, y)
    are_equal = x.number == y.number
    used = np.maximum(x.used, y.used)
    if field.notes.logs or used.any():
        # A component is compared where it has a meaning on both sides.
        are_equal = are_equal | ~field.valid(used)
    are_equal = are_equal.all(0)
    if x.special or y.special:
        is_infinite = x.is_truly_infinite | y.is_truly_infinite
        are_equal = np.where(is_infinite, x.infinite == y.infinite, are_equal)
        is_no_number = (x.poison > 0) | (y.poison > 0)
        are_equal = np.where(is_no_number, x.poison == y.poison, are_equal)
        are_equal = are_equal | (x.poison == OUTSIDE) | (y.poison == OUTSIDE)
    return np.asarray(are_equal)
