"""Constants of a program as numbers of the field.

Worked example: 0.33333334 in float32 stands for 1/3 (`constants.py`). Modulo 11 that is the inverse of 3, which is 4,
because 3 * 4 is 12. Its real value is 1/3 in float64, its sign is "not negative", and it is neither infinite nor NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from shardkit.testing.exact.numbers.constants import LEAST_INFINITE, simplest
from shardkit.testing.exact.numbers.folded import Constant, Folded
from shardkit.testing.exact.numbers.residues import Residues
from shardkit.testing.exact.numbers.tower import PRIMES
from shardkit.testing.exact.numbers.values import HUGE, NOT_A_NUMBER, TRULY, Exact, build_facts

MOST_KEPT = 64  # elements of a constant that is kept


class Lifted(NamedTuple):
    """A constant array in the field.

    Attributes:
        exact: its numbers.
        constants: its distinct values, with their dtype.
    """

    exact: Exact
    constants: tuple[Constant, ...]


def lift_array(x: np.ndarray, residues: Residues, folded: Mapping[Constant, Folded]) -> Lifted:
    """A constant array in a field.

    Args:
        x: floats, integers or booleans.
        residues: the primes and points of the field.
        folded: constants that stand for other numbers than the simplest rational.
    """
    # Runs lift the same few masks and fillings hundreds of times. A finite number has the same residues in all fields
    # of so many primes and points; the number that stands for infinity is another one in each.
    is_small = x.size <= MOST_KEPT
    if is_small and not folded and np.isfinite(np.asarray(x, np.float64)).all():
        return _lift_finite(x.tobytes(), x.dtype, x.shape, residues.points, residues.levels)
    return _lift_values(x, residues.moduli, folded, residues)


@lru_cache(maxsize=2**12)
def _lift_finite(content: bytes, dtype: np.dtype[Any], shape: tuple[int, ...], points: int, levels: int) -> Lifted:
    """A small array of finite numbers in all fields of so many points and primes."""
    x = np.frombuffer(content, dtype).reshape(shape)
    moduli = np.repeat(np.array(PRIMES[-levels:], np.uint64), points)
    return _lift_values(x, moduli, {}, None)


def _lift_values(
    x: np.ndarray, moduli: np.ndarray, folded: Mapping[Constant, Folded], residues: Residues | None
) -> Lifted:
    """A constant array modulo some primes; `residues` has the numbers that stand for infinity.

    Worked example: [0, 0.5, 0.5] modulo 5 and 11. The distinct values 0 and 0.5 have the residues [[0, 3], [0, 6]] and
    the real values [0, 1 / 2], and are taken to the places [0, 1, 1].
    """
    # Constants are mostly masks and fillings: each distinct value is lifted once, and taken to its places.
    values: Any = x.reshape(-1)
    places: Any = np.zeros(x.shape, np.int64)
    if x.size > 1:
        values, places = np.unique(x, return_inverse=True)
        places = places.reshape(x.shape)
    constants: list[Constant] = []
    columns: list[np.ndarray] = []
    reals: list[float] = []
    dtype = str(x.dtype)
    for element in values:
        value = element.item()
        constant = (value, dtype)
        constants.append(constant)
        if not math.isfinite(value):
            columns.append(_find_number_of_special(value, moduli, residues))
            reals.append(value)
            continue
        if constant in folded:
            ratio = folded[constant].ratio
        else:
            ratio = find_ratio(value, x.dtype)
        columns.append(_reduce(ratio, moduli))
        reals.append(float(ratio))
    if not columns:  # of an empty array
        columns = [moduli]
        reals = [0.0]
    # [components, distinct values]
    table = np.stack(columns, 1)
    number = np.take(table, places.reshape(-1), 1).reshape(len(table), *x.shape)
    real = np.take(np.array(reals), places)[None]
    facts = _list_facts(values, places, x.dtype)
    return Lifted(Exact(number, facts, real), tuple(constants))


def _find_number_of_special(value: float, moduli: np.ndarray, residues: Residues | None) -> np.ndarray:
    """uint64 [components]: what stands for infinity; zero for NaN."""
    if math.isnan(value) or residues is None:
        return np.zeros_like(moduli)
    return residues.infinity(value < 0)


@lru_cache(maxsize=2**14)
def find_ratio(value: float, dtype: Any) -> Fraction:
    """The rational for which a finite constant stands."""
    if jnp.issubdtype(dtype, jnp.floating):
        return simplest(float(value), dtype)
    return Fraction(int(value))


def _reduce(ratio: Fraction, moduli: np.ndarray) -> np.ndarray:
    """uint64 [components]: n / d, which is n times the inverse of d modulo each prime."""
    residues = []
    for p in moduli.tolist():
        residues.append(ratio.numerator * pow(ratio.denominator, -1, p) % p)
    return np.array(residues, np.uint64)


def _list_facts(values: np.ndarray, places: np.ndarray, dtype: Any) -> np.ndarray:
    """int8 [6, ...]: the facts of constants, from those of their distinct values."""
    if not len(values):  # of an empty array
        return build_facts(places.shape)
    wide = np.asarray(values, np.float64)
    # The sign 1 means "not negative", so it is that of zero too; NaN has none.
    sign = np.where(wide < 0, -1, wide >= 0)
    # Integers are never a mask's infinity.
    is_huge = (np.abs(wide) >= LEAST_INFINITE) & jnp.issubdtype(dtype, jnp.floating)
    infinite = np.where(is_huge, HUGE, 0)
    infinite = np.where(np.isinf(wide), TRULY, infinite) * sign
    poison = np.where(np.isnan(wide), NOT_A_NUMBER, 0)
    never_zero = wide != 0
    # From the distinct values to all places.
    sign = np.take(sign, places)
    infinite = np.take(infinite, places)
    poison = np.take(poison, places)
    never_zero = np.take(never_zero, places)
    return build_facts(places.shape, sign, infinite, poison=poison, never_zero=never_zero)
