"""`Exact` stands for an array of floats in a proof: numbers of the field, known facts of each, and real values.

Worked example: the value of `x / 2` where x is an input that was drawn as 3.0 has, modulo each prime p, the number
x * (p + 1) / 2 for x's random number, the real value 1.5, and degree 1, that of a linear function of the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

# The rows of `Exact.facts`.
SIGN, NEVER_ZERO, INFINITE, USED, FACTOR_USED, POISON = range(6)
# What `Exact.infinite` says: a constant that stands for infinity in a mask, or infinity itself; negative for minus.
HUGE = 1
TRULY = 2
# What `Exact.poison` says: not a number, or outside of a function's domain for the inputs of this draw.
NOT_A_NUMBER = 1
OUTSIDE = 2


class Degree(NamedTuple):
    """The degree of values as polynomials of inputs, inverses and values of functions: bounds for every element.

    A proof needs it because a polynomial of degree d that is not zero is zero at a random point modulo p with a chance
    of at most d / p.

    Worked example: x x / y has degree 3 in x, x and the inverse of y. It is Degree(3, {1: (1, 1)}) if y was the first
    divisor: one term has the inverse once, and the divisor has degree 1.

    Attributes:
        total: the degree.
        inverses: for each division by its number, the degree in its inverses, and the sum of the degrees of all
            elements that it divides by.
        log_depth: how many of the highest primes have no meaning in the number, because logarithms became numbers on
            the way to it: two for that of log(1 + log(x)) * y.
        log_depth_of_factor: likewise for the factor, of a logarithm that is none yet.
    """

    total: int = 0
    inverses: Mapping[int, tuple[int, int]] = MappingProxyType({})
    log_depth: int = 0
    log_depth_of_factor: int = 0

    def plus(self, *others: Degree) -> Degree:
        """The degree of a sum, or of an array with elements of all operands: the largest of their degrees."""
        # For each division, the highest power of its inverse that a term may have.
        total = self.total
        inverses = self.inverses
        depth = self.log_depth
        depth_of_factor = self.log_depth_of_factor
        for other in others:
            total = max(total, other.total)
            depth = max(depth, other.log_depth)
            depth_of_factor = max(depth_of_factor, other.log_depth_of_factor)
            # Mostly both operands have the same divisions, or one has none.
            if other.inverses is inverses or not other.inverses:
                continue
            inverses = dict(inverses)
            for division, (power, weight) in other.inverses.items():
                power_before, _ = inverses.get(division, (0, 0))
                inverses[division] = max(power, power_before), weight
        return Degree(total, inverses, depth, depth_of_factor)

    def times(self, other: Degree) -> Degree:
        """The degree of a product: degrees add up."""
        total = self.total + other.total
        depth = max(self.log_depth, other.log_depth)
        depth_of_factor = max(self.log_depth_of_factor, other.log_depth_of_factor)
        if not other.inverses:
            return Degree(total, self.inverses, depth, depth_of_factor)
        inverses = dict(self.inverses)
        for division, (power, weight) in other.inverses.items():
            power_before, _ = inverses.get(division, (0, 0))
            inverses[division] = power + power_before, weight
        return Degree(total, inverses, depth, depth_of_factor)

    def to_the(self, n: int) -> Degree:
        """The degree of a power: that of (x / y)**3 has the inverse of y three times."""
        inverses = {}
        for division, (power, weight) in self.inverses.items():
            inverses[division] = n * power, weight
        return Degree(self.total * n, inverses, self.log_depth, self.log_depth_of_factor)

    def of_function(self, *others: Degree) -> Degree:
        """The degree of a random function of such numbers: it counts as an input does."""
        depths = [self.log_depth]
        for other in others:
            depths.append(other.log_depth)
        return Degree(1, log_depth=max(depths))


CONSTANT = Degree()
INPUT = Degree(1)


class Element(NamedTuple):
    """The value that one element of an input gets in a draw, in place of a random one.

    Attributes:
        name: the name of the input.
        place: the place of the element, in row-major order.
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

    A logarithm is kept as its argument, the factor, so that exp gives it back: log(x y) + 1 has the factor x y and the
    number 1. Most arrays have no factor.

    The leading dim of `number` and `factor` has their components, prime by prime and point by point. The leading dim
    of `facts` has the known facts of each element, in six rows:

    - SIGN: 1 where it is not negative, -1 where it is not positive, 0 where nothing is known;
    - NEVER_ZERO: 1 where it is zero for no input, as exp(x), 0 where it may be, as x**2;
    - INFINITE: HUGE or TRULY, negative for minus, else 0;
    - USED and FACTOR_USED: how many of the lowest primes exps have used up on the way to the number and to the factor.
      Their components have no meaning there;
    - POISON: NOT_A_NUMBER or OUTSIDE, 0 for a number.

    Attributes:
        number: uint64 [components, ...].
        facts: int8 [6, ...].
        real: float64 [1, ...], the values for the inputs that were drawn.
        factor: uint64 [components, ...]; None for 1.
        degree: bounds of its degree.
        roots: int32 [1, ...], the id of the square root of which an element is a multiple (`roots.py`), 0 if it is a
            multiple of no known root; None if no element is.
        is_power: whether all elements are NaN, or products of exps and of their powers. Such a number is a power of 4
            modulo each prime, so that its roots are known powers too. Only the laws of roots use it.
    """

    # The parts that `move` moves, each behind its leading dim.
    number: np.ndarray
    facts: np.ndarray
    real: np.ndarray
    factor: np.ndarray | None = None
    degree: Degree = CONSTANT
    roots: np.ndarray | None = None
    is_power: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array, without the components."""
        return self.number.shape[1:]

    @property
    def sign(self) -> np.ndarray:
        """int8 [...]."""
        return self.facts[SIGN]

    @property
    def never_zero(self) -> np.ndarray:
        """int8 [...]."""
        return self.facts[NEVER_ZERO]

    @property
    def infinite(self) -> np.ndarray:
        """int8 [...]."""
        return self.facts[INFINITE]

    @property
    def is_low(self) -> np.ndarray:
        """bool [...], whether it is minus infinity, of both kinds."""
        return self.facts[INFINITE] < 0

    @property
    def is_truly_infinite(self) -> np.ndarray:
        """bool [...], whether it is infinity itself, of both signs."""
        return np.abs(self.facts[INFINITE]) == TRULY

    @property
    def used(self) -> np.ndarray:
        """int8 [...], how many primes are used up on the way to the number: one by exp(x), two by exp(exp(x))."""
        return self.facts[USED]

    @property
    def factor_used(self) -> np.ndarray:
        """int8 [...], how many are used up on the way to the factor: one by log(exp(x) + 1), whose number is 0."""
        return self.facts[FACTOR_USED]

    @property
    def both_used(self) -> np.ndarray:
        """int8 [2, ...]: `used` and `factor_used`."""
        return self.facts[USED : FACTOR_USED + 1]

    @property
    def poison(self) -> np.ndarray:
        """int8 [...], 0 for a number."""
        return self.facts[POISON]

    # Both are asked of every array, by each rule that it meets, and kept: no rule writes into the facts of an array.
    @cached_property
    def has_infinite(self) -> bool:
        """Whether an element is infinite, of both kinds."""
        return bool(self.infinite.any())

    @cached_property
    def special(self) -> bool:
        """Whether an element is no number, or truly infinite."""
        if self.poison.any():
            return True
        return self.has_infinite and bool(self.is_truly_infinite.any())

    @property
    def factor_or_ones(self) -> np.ndarray:
        """uint64 [components, ...]: the factor, 1 for numbers without a logarithm."""
        if self.factor is None:
            return np.ones_like(self.number)
        return self.factor

    @property
    def roots_or_zeros(self) -> np.ndarray:
        """int32 [1, ...]: the ids of roots, 0 for numbers that are multiples of no known root."""
        if self.roots is None:
            return np.zeros((1, *self.shape), np.int32)
        return self.roots

    def move(self, move: Callable[[np.ndarray], np.ndarray]) -> Exact:
        """Moves elements to other places: `move` acts on each part, behind its leading dim."""
        number = move(self.number)
        facts = move(self.facts)
        real = move(self.real)
        factor = None
        if self.factor is not None:
            factor = move(self.factor)
        roots = None
        if self.roots is not None:
            roots = move(self.roots)
        return Exact(number, facts, real, factor, self.degree, roots, self.is_power)

    def row(self, dim: int, i: int) -> Exact:
        """The elements at a place of a dim, without it."""
        return self.move(lambda part: np.take(part, i, dim + 1))

    def with_sign(self, sign: int) -> Exact:
        """The same numbers, with a sign that is known for all inputs."""
        facts = self.facts.copy()
        facts[SIGN] = sign
        return replace(self, facts=facts)

    def as_positive(self) -> Exact:
        """The same numbers, which are positive for all inputs, and zero for none."""
        facts = self.facts.copy()
        facts[SIGN] = 1
        facts[NEVER_ZERO] = 1
        return replace(self, facts=facts)

    def as_unknown(self, degree: Degree) -> Exact:
        """The same numbers, as some of an unknown sign, which may be zero: of constants that stand for inputs."""
        facts = self.facts.copy()
        facts[SIGN] = 0
        facts[NEVER_ZERO] = 0
        return replace(self, facts=facts, degree=degree)


def build_facts(
    shape: Sequence[int],
    sign: Any = 0,
    infinite: Any = 0,
    used: Any = 0,
    factor_used: Any = 0,
    poison: Any = 0,
    never_zero: Any = 0,
) -> np.ndarray:
    """int8 [6, ...]: the facts of an array of this shape: each a number for all elements, or an array [...]."""
    rows = np.empty((6, *shape), np.int8)
    rows[SIGN] = sign
    rows[NEVER_ZERO] = never_zero
    rows[INFINITE] = infinite
    rows[USED] = used
    rows[FACTOR_USED] = factor_used
    rows[POISON] = poison
    return rows


def list_columns(x: np.ndarray) -> np.ndarray:
    """[elements, components]: the components of each element side by side, as a key has them."""
    return np.ascontiguousarray(x.reshape(len(x), -1).T)
