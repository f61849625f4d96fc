"""Infinity and NaN in sums and products.

There are two kinds of infinity. TRULY is the infinity of floats: 1 / 0, or -inf in a mask. HUGE is a constant beyond
1e9, which programs write for infinity in masks. HUGE plus a number is HUGE, and so is HUGE times a number of known
sign; exp of -HUGE is 0. In all other respects HUGE is a number, and cancels if it is added and subtracted.

Worked example: in `softmax(where(mask, x, -1e30))` the masked x - max is HUGE and negative, and its exp is 0, whatever
x is. In `x + 1e30 - 1e30` the constant is a number, and the sum is x.

Each function returns two facts of a result as arrays [...]: INFINITE and POISON.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.orders import find_keys
from shardkit.testing.exact.numbers.values import HUGE, NOT_A_NUMBER, OUTSIDE, TRULY, Exact


def add_infinities(field: Field, x: Exact, y: Exact) -> tuple[np.ndarray | int, np.ndarray]:
    """The two facts of x + y."""
    infinite: np.ndarray | int = 0
    if x.has_infinite or y.has_infinite:
        # HUGE less HUGE is a number: 1e30 - 1e30 is 0.
        infinite = np.clip(x.infinite + y.infinite, -HUGE, HUGE)
    poison = np.maximum(x.poison, y.poison)
    if x.special or y.special:
        # inf + x is inf, whatever x is, but for -inf.
        infinite = np.where(y.is_truly_infinite, y.infinite, infinite)
        infinite = np.where(x.is_truly_infinite, x.infinite, infinite)
        are_infinite = x.is_truly_infinite & y.is_truly_infinite
        are_opposite = are_infinite & (x.infinite != y.infinite)
        poison = np.maximum(poison, np.where(are_opposite, field.undefined, 0))
    return infinite, poison


def multiply_infinities(field: Field, x: Exact, y: Exact) -> tuple[np.ndarray | int, np.ndarray]:
    """The two facts of x y; neither has a factor."""
    infinite: np.ndarray | int = 0
    poison = np.maximum(x.poison, y.poison)
    if x.has_infinite or y.has_infinite:
        # HUGE times a number whose sign is not known is a number like any other.
        known_sign = _find_known_sign(field, x) * _find_known_sign(field, y)
        is_infinite = (x.infinite != 0) | (y.infinite != 0)
        infinite = np.where(is_infinite, known_sign, 0)
    if x.special or y.special:
        x_is_zero = field.is_zero(x)
        y_is_zero = field.is_zero(y)
        x_is_infinite = x.is_truly_infinite
        y_is_infinite = y.is_truly_infinite
        zero_times_infinity = (x_is_infinite & y_is_zero) | (y_is_infinite & x_is_zero)
        poison = np.maximum(poison, np.where(zero_times_infinity, field.undefined, 0))
        # What is outside of a domain in this draw is mostly not compared, because a law may give it a value: log(x) +
        # log(y) is the logarithm of x y, also where both are negative. But no law makes `mask * log(x)` a number where
        # x is negative and the mask 0: it is NaN, and compared as NaN. In a planted draw it may be 0 / 0.
        if not field.planted:
            x_is_outside = x.poison == OUTSIDE
            y_is_outside = y.poison == OUTSIDE
            zero_times_outside = (x_is_outside & y_is_zero) | (y_is_outside & x_is_zero)
            poison = np.where(zero_times_outside, NOT_A_NUMBER, poison)
        # If the sign of a number is not known for all inputs, its place in the order of this draw decides.
        x_sign = np.sign(find_keys(field, x))
        y_sign = np.sign(find_keys(field, y))
        sign = np.nan_to_num(x_sign * y_sign)
        infinite = np.where(x_is_infinite | y_is_infinite, TRULY * sign, infinite)
    return infinite, poison


def _find_known_sign(field: Field, x: Exact) -> np.ndarray:
    """1, -1, or 0 where it is not known or the number is zero."""
    sign = np.where(x.infinite != 0, np.sign(x.infinite), x.sign)
    is_zero = ((x.number == 0) | ~field.valid(x.used)).all(0)
    return np.where(is_zero, 0, sign)


def sum_infinities(field: Field, x: Exact, dims: Sequence[int], keep: bool) -> tuple[np.ndarray | int, np.ndarray]:
    """The two facts of a sum over dims."""
    dims = tuple(dims)
    poison = x.poison.max(dims, keepdims=keep, initial=0)
    if not x.has_infinite:
        return 0, poison
    # The largest and the smallest code of all terms: -TRULY, -HUGE, 0, HUGE or TRULY.
    highest = x.infinite.max(dims, keepdims=keep, initial=0)
    lowest = x.infinite.min(dims, keepdims=keep, initial=0)
    infinite = np.clip(highest, 0, HUGE) + np.clip(lowest, -HUGE, 0)
    if x.special:
        has_plus = highest == TRULY
        has_minus = lowest == -TRULY
        infinite = np.where(has_minus, -TRULY, infinite)
        infinite = np.where(has_plus, TRULY, infinite)
        poison = np.maximum(poison, np.where(has_plus & has_minus, field.undefined, 0))
    return infinite, poison


def contract_infinities(field: Field, x: Exact, y: Exact) -> tuple[np.ndarray, np.ndarray]:
    """The two facts of [..., m, k] @ [..., k, n], from the number of infinite products in each sum.

    A count of products is itself a product of matrices: with a mask of where x is infinity and one of where y is
    positive, `mask_x @ mask_y > 0` says which sums have infinity times a positive number.

    Worked example: [[inf, 2]] @ [[3, 0], [1, -inf]]. The first sum has inf times 3, and is infinite. The second one has
    inf times 0, and is undefined; its 2 times -inf alone would make it minus infinity.
    """
    x_keys = find_keys(field, x)
    y_keys = find_keys(field, y)
    x_is_positive = x_keys > 0
    x_is_negative = x_keys < 0
    y_is_positive = y_keys > 0
    y_is_negative = y_keys < 0
    x_is_infinite = x.is_truly_infinite
    y_is_infinite = y.is_truly_infinite
    x_is_plus = x_is_infinite & x_is_positive
    x_is_minus = x_is_infinite & x_is_negative
    y_is_plus = y_is_infinite & y_is_positive
    y_is_minus = y_is_infinite & y_is_negative
    has_plus = (
        _has_product(x_is_plus, y_is_positive)
        | _has_product(x_is_minus, y_is_negative)
        | _has_product(x_is_positive, y_is_plus)
        | _has_product(x_is_negative, y_is_minus)
    )
    has_minus = (
        _has_product(x_is_plus, y_is_negative)
        | _has_product(x_is_minus, y_is_positive)
        | _has_product(x_is_positive, y_is_minus)
        | _has_product(x_is_negative, y_is_plus)
    )
    x_is_zero = field.is_zero(x)
    y_is_zero = field.is_zero(y)
    is_undefined = (
        (has_plus & has_minus)
        | _has_product(x_is_plus | x_is_minus, y_is_zero)
        | _has_product(x_is_zero, y_is_plus | y_is_minus)
    )
    poison = np.where(is_undefined, field.undefined, 0)
    # A NaN makes all sums NaN that contain it: the sums of its row of x, or of its column of y.
    all_of_x = np.ones(x.shape, bool)
    all_of_y = np.ones(y.shape, bool)
    for code in (NOT_A_NUMBER, OUTSIDE):
        has_code = _has_product(x.poison == code, all_of_y) | _has_product(all_of_x, y.poison == code)
        poison = np.maximum(poison, np.where(has_code, code, 0))
    if not field.planted:  # as in `multiply_infinities`: a zero weight times log(-1) is NaN
        x_is_outside = x.poison == OUTSIDE
        y_is_outside = y.poison == OUTSIDE
        zero_times_outside = _has_product(x_is_outside, y_is_zero) | _has_product(x_is_zero, y_is_outside)
        poison = np.where(zero_times_outside, NOT_A_NUMBER, poison)
    infinite = np.where(has_plus, TRULY, 0) + np.where(has_minus, -TRULY, 0)
    return infinite, poison


def _has_product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """bool [..., m, n]: which sums of [..., m, k] @ [..., k, n] have a term where both masks hold."""
    return np.matmul(x.astype(np.float64), y.astype(np.float64)) > 0
