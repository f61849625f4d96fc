"""What stands for an array of floats in a proof: numbers of the field, what is known of each, and their real values.

Worked example: the value of `x / 2` where x is an input that was drawn as 3.0 has, modulo each prime p, the number
x * (p + 1) / 2 for x's random number, the real value 1.5, and degree 1, that of a linear function of the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

INFINITE = 1e9
# What `Exact.infinite` says: a constant that stands for infinity in a mask, or infinity itself; negative for minus.
HUGE, TRULY = 1, 2
# What `Exact.poison` says: not a number, or what is outside of a function's domain for the inputs of this draw.
NOT_A_NUMBER, OUTSIDE = 1, 2
_LARGEST_DENOMINATOR, _MOST_DIGITS = 2**14, 3


class Degree(NamedTuple):
    """Of values as polynomials of inputs, inverses and values of functions: bounds for every element.

    Attributes:
        total: the degree.
        inverses: the degree in the inverses of one division, and the sum of the degrees of what is divided by, for
            each division by its number.
    """

    total: int = 0
    inverses: Mapping[int, tuple[int, int]] = MappingProxyType({})

    def plus(self, *others: Degree) -> Degree:
        """That of a sum, or of an array with elements of all."""
        inverses = dict(self.inverses)
        for number, (most, weight) in (item for each in others for item in each.inverses.items()):
            inverses[number] = max(most, inverses.get(number, (0, 0))[0]), weight
        return Degree(max(self.total, *(each.total for each in others)), inverses)

    def times(self, other: Degree) -> Degree:
        """That of a product."""
        inverses = dict(self.inverses)
        for number, (most, weight) in other.inverses.items():
            inverses[number] = most + inverses.get(number, (0, 0))[0], weight
        return Degree(self.total + other.total, inverses)

    def to_the(self, n: int) -> Degree:
        """That of a power."""
        return Degree(self.total * n, {number: (n * most, weight) for number, (most, weight) in self.inverses.items()})


CONSTANT, INPUT = Degree(), Degree(1)


class Element(NamedTuple):
    """What one element of an input is to be.

    Attributes:
        name: that of the input.
        place: of the element, in row-major order.
        number: uint64 [components].
        real: its real value.
    """

    name: str
    place: int
    number: np.ndarray
    real: float


@dataclass(frozen=True, eq=False)
class Exact:
    """An array of numbers of the field, `number + log(factor)`.

    The leading dim of `number` and `factor` has their components, prime by prime and point by point. That of `facts`
    has what is known of each element, in rows: its sign, 1 where it is not negative and -1 where it is not positive;
    whether it is infinite, HUGE or TRULY, negative for minus; how many of the lowest primes exps have used up on its
    way, in the number and in the factor, whose components have no meaning; and whether it is NOT_A_NUMBER or OUTSIDE.

    Attributes:
        number: uint64 [components, ...].
        facts: int8 [5, ...].
        real: float64 [1, ...], the values for the inputs that were drawn.
        factor: uint64 [components, ...]; None for 1.
        degree: bounds of its degree.
    """

    number: np.ndarray
    facts: np.ndarray
    real: np.ndarray
    factor: np.ndarray | None = None
    degree: Degree = CONSTANT

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the array, without the components."""
        return self.number.shape[1:]

    @property
    def sign(self) -> np.ndarray:
        """int8 [...]."""
        return self.facts[0]

    @property
    def infinite(self) -> np.ndarray:
        """int8 [...]."""
        return self.facts[1]

    @property
    def low(self) -> np.ndarray:
        """bool [...], whether it is minus infinity."""
        return self.facts[1] < 0

    @property
    def used(self) -> np.ndarray:
        """int8 [2, ...], the used primes of number and factor."""
        return self.facts[2:4]

    @property
    def poison(self) -> np.ndarray:
        """int8 [...], 0 for a number."""
        return self.facts[4]

    @property
    def special(self) -> bool:
        """Whether an element is no number, or truly infinite."""
        return bool(self.facts[4].any() or (np.abs(self.facts[1]) == TRULY).any())

    def moved(self, move: Callable[[np.ndarray], np.ndarray]) -> Exact:
        """With its elements at other places: `move` acts on each part, behind its leading dim."""
        factor = None if self.factor is None else move(self.factor)
        return Exact(move(self.number), move(self.facts), move(self.real), factor, self.degree)

    def row(self, dim: int, i: int) -> Exact:
        """The elements at a place of a dim, without it."""
        return self.moved(lambda part: np.take(part, i, dim + 1))

    def signed(self, sign: int) -> Exact:
        """The same, known to have a sign."""
        return replace(
            self, facts=facts(self.shape, sign, self.infinite, self.used[0], self.used[1], poison=self.poison)
        )


def facts(
    shape: Sequence[int], sign: Any = 0, infinite: Any = 0, used: Any = 0, factor_used: Any = 0, poison: Any = 0
) -> np.ndarray:
    """The facts of an array of this shape."""
    rows = np.empty((5, *shape), np.int8)
    for number, value in enumerate((sign, infinite, used, factor_used, poison)):
        rows[number] = value
    return rows


def simplest(value: float, dtype: Any) -> Fraction:
    """The simplest rational that rounds to a constant, so that 1/3 is a third; else the constant itself.

    One with a small denominator, or one of few decimal digits, as an epsilon is written.
    """
    exact = Fraction(value)
    for bits in range(_LARGEST_DENOMINATOR.bit_length()):
        near = exact.limit_denominator(1 << bits)
        if np.asarray(float(near)).astype(dtype) == np.asarray(value).astype(dtype):
            return near
    digits = f"{value:.{_MOST_DIGITS - 1}e}"
    return Fraction(digits) if np.asarray(float(digits)).astype(dtype) == np.asarray(value).astype(dtype) else exact


def widened(x: np.ndarray) -> np.ndarray:
    """Constants of less than 32 bits as what they stand for, because rounding is not modelled."""
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize >= 4:
        return x
    values, where = np.unique(x.astype(np.float32), return_inverse=True)
    simple = [float(simplest(float(value), x.dtype)) if np.isfinite(value) else float(value) for value in values]
    return np.array(simple, np.float32)[where].reshape(x.shape)
