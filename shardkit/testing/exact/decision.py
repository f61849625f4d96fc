"""One comparison of one program: which way it went in all draws, and which difference it compares with zero.

Worked example: `where(x > 1, a, b)` on three elements.

    draw      x                   was true so far          was false so far
    first     (2.0, 0.3, 0.5)     (True, False, False)     (False, True, True)
    second    (1.5, 3.0, -1.0)    (True, True, False)      (False, True, True)

The first draw already shows both branches: one element took a, two took b. The comparison has gone both ways, and is
not open any more. Of single elements, only element 1 has gone both ways after the second draw.

What a comparison compares is told by its difference d = x - y at two random points, modulo the highest prime. Where d
is the same at both, it is a constant, and the comparison goes one way for all inputs. Else the quotient of both names
the difference, whatever constant it was multiplied by. Worked example modulo 7, for an x that is 3 and 6 at the points:

    x > 1          d is 2 and 5        2 / 5 = 2 * 3 = 6
    2 * x > 2      d is 4 and 3        4 / 3 = 4 * 5 = 6: the same difference
    x > 2          d is 1 and 4        1 / 4 = 2: another one
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardkit.testing.exact.numbers.arithmetic import subtract
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.hashing import mix
from shardkit.testing.exact.numbers.logarithms import to_number
from shardkit.testing.exact.numbers.tower import invert_by_power
from shardkit.testing.exact.numbers.values import Exact

# What a decision is about: two numbers, which is larger; whether they are equal; integers that follow from others.
ORDER, EQUALITY, INTEGERS = "order", "equality", "integers"
_MOST_CONSTANTS = 16  # of one comparison
# Equal numbers go the way of a larger first operand (1), or of a smaller one (-1). The sign of a number asks twice, as
# `x > 0` and `x < 0` do.
_WAYS_OF_EQUAL_NUMBERS = {
    "ge": (1,),
    "lt": (1,),
    "gt": (-1,),
    "le": (-1,),
    "lt_to": (1,),
    "le_to": (-1,),
    "sign": (1, -1),
}


class DecisionPlace(NamedTuple):
    """Where a program compares.

    Attributes:
        side: ON_MESH or ALONE.
        equation: the id of the equation.
        part: which part of the equation compares, as of a clamp, which makes two comparisons; "" where it makes one.
    """

    side: int
    equation: int
    part: str


class Key(NamedTuple):
    """A decision of a program: a place, for arrays of one rank. A loop may run an equation for arrays of another.

    Attributes:
        place: where the program compares.
        rank: the number of dims that are compared.
    """

    place: DecisionPlace
    rank: int


class Ties(NamedTuple):
    """What a comparison would do in a draw if its two numbers were equal.

    Worked example: `x > 1` and `x >= 1`, where x was drawn as 2. Both are true. Of an x of 1 the first one is false,
    and so goes the other way (-1); the second one goes the same way (1).

    Attributes:
        hashes: uint64 [...], the differences that are compared.
        ways: int8 [...], 1 where equal numbers would go the way of the drawn ones, -1 where they would go the other
            way, 0 where they cannot be equal.
    """

    hashes: np.ndarray
    ways: np.ndarray


@dataclass
class Decision:
    """One comparison of one program, in all draws.

    Attributes:
        line: where it stands.
        what: the primitive, and which part of it.
        kind: ORDER, EQUALITY or INTEGERS.
        was_true: bool [...], where it was true in some draw.
        was_false: where it was false.
        is_forced: where its operands leave no choice, as for a square and zero.
        is_forced_by_signs: where only their signs leave none: a square may still equal zero.
        hashes: which differences of numbers it compares with zero, but for a constant factor.
        ties: what it does with equal numbers, by draw.
        was_tied: where its operands were equal in some draw, and all results were compared.
        was_freely_tied: likewise, in a draw whose other numbers are neither zeros nor small whole numbers.
        tells_constants: whether this run has told `is_forced`, by two points.
        difference: float64 [...], the real difference of the operands in the first draw that has one; None in an order.
        rounding: float64 [...], by how much it may be rounded.
        excess: how many of the numbers that it compares with a constant were beyond it in all draws, as seen from zero,
            less how many were on this side of it.
        joins: whether it joins comparisons, as `x > 0.8 and x < 1.2` does.
    """

    line: str
    what: str
    kind: str
    was_true: np.ndarray
    was_false: np.ndarray
    is_forced: np.ndarray
    is_forced_by_signs: np.ndarray | bool = False
    hashes: frozenset[int] = frozenset()
    ties: tuple[Ties, ...] = ()
    was_tied: np.ndarray | bool = False
    was_freely_tied: np.ndarray | bool = False
    tells_constants: bool = False
    difference: np.ndarray | None = None
    rounding: np.ndarray | float = 0.0
    excess: int = 0
    joins: bool = False

    @property
    def is_open(self) -> bool:
        """Whether it could go both ways, and has not."""
        is_free = ~self.is_forced
        if not is_free.any():
            return False
        # `x == max(x)` is true where x is the largest element itself, which is forced. It counts as one way.
        if self.kind == EQUALITY:
            return not (self.was_true.any() and self.was_false.any())
        return not ((self.was_true & is_free).any() and (self.was_false & is_free).any())

    @property
    def is_unidentified(self) -> bool:
        """Whether it could go both ways, and no draw told which difference it compares with zero."""
        if self.kind == INTEGERS or self.joins:  # these have no hashes
            return False
        return not self.hashes and not self.is_forced.all()

    @property
    def outcome(self) -> str:
        """The outcome in all draws."""
        return "true" if self.was_true.any() else "false"

    def add(self, other: Decision) -> None:
        """Adds the outcomes of another draw."""
        self.was_true = self.was_true | other.was_true
        self.was_false = self.was_false | other.was_false
        # A minimum may be the constant 0 in the draws that tell constants from unknowns, and an unknown in a later one.
        # So where the operands left no choice because their difference was a constant, it must stay that constant.
        is_forced = other.is_forced
        if self.difference is not None and other.difference is not None:
            # Of x and x - 1 the difference is 1, but for the rounding of x.
            is_constant = np.abs(other.difference - self.difference) <= self.rounding + other.rounding
            # Outside of a domain there was no difference. `isnan(x)` is `x != x`, which is zero.
            is_new = np.isnan(self.difference)
            is_forced = is_forced | is_constant | (is_new & (other.difference == 0))
            self.difference = np.where(is_new, other.difference, self.difference)
            self.rounding = np.where(is_new, other.rounding, self.rounding)
        if other.tells_constants or other.difference is not None:
            self.is_forced = self.is_forced & is_forced
        self.hashes = self.hashes | other.hashes
        self.ties = self.ties + other.ties
        self.is_forced_by_signs = self.is_forced_by_signs | other.is_forced_by_signs
        self.was_tied = self.was_tied | other.was_tied
        self.was_freely_tied = self.was_freely_tied | other.was_freely_tied
        self.excess += other.excess


# What two numbers leave open


def find_known_signs(field: Field, x: Exact, y: Exact) -> np.ndarray:
    """Where two numbers have opposite signs for all inputs, or one is zero and the sign of the other is known."""
    x_sign = x.sign
    y_sign = y.sign
    has_opposite_signs = (x_sign != 0) & (x_sign == -y_sign)
    if _follows_roundings(field, x, y):
        return np.zeros_like(has_opposite_signs)
    if not x_sign.any() and not y_sign.any():
        return np.asarray(has_opposite_signs)
    is_y_zero = field.is_zero(y) & (x_sign != 0)
    is_x_zero = field.is_zero(x) & (y_sign != 0)
    return np.asarray(has_opposite_signs | is_y_zero | is_x_zero)


def subtract_at_points(field: Field, x: Exact, y: Exact) -> np.ndarray:
    """uint64 [points, ...]: the residues of a difference modulo the highest prime that every number has."""
    return to_number(field, subtract(field, x, y)).number[field.residues.top]


def find_constants(field: Field, x: Exact, y: Exact, difference: np.ndarray) -> np.ndarray:
    """Where the difference of x and y is a constant: it is the same at two points."""
    if _follows_roundings(field, x, y):
        return np.zeros(difference.shape[1:], bool)
    return np.asarray(difference[0] == difference[1])


def _follows_roundings(field: Field, x: Exact, y: Exact) -> bool:
    """Whether two numbers may follow from integers to which floats were rounded, which are so in this draw alone."""
    return field.notes.rounds and bool(x.degree.total or y.degree.total)


def count_excess(x: Exact, y: Exact) -> int:
    """How many unknown numbers are beyond the constants beside them, less how many are on this side of them.

    Worked example: 3 is beyond 1, as seen from zero, and 0.5 and -3 are not.
    """
    if bool(x.degree.total) == bool(y.degree.total):
        return 0
    if x.degree.total:
        unknown = x.real[0]
        constant = y.real[0]
    else:
        unknown = y.real[0]
        constant = x.real[0]
    excess = np.sign(unknown - constant) * np.sign(constant)
    return int(np.nan_to_num(excess).sum())


# What is compared


def hash_difference(field: Field, difference: np.ndarray) -> np.ndarray:
    """uint64 [...]: which difference is compared with zero, but for a constant factor."""
    # c d(a) / (c d(b)) is d(a) / d(b) for every constant c, at points a and b.
    p = field.residues.top_prime
    return mix(difference[0] * invert_by_power(difference[1], p) % p)


def find_ties(name: str, hashes: np.ndarray, x: Exact, y: Exact, may_tie: np.ndarray) -> tuple[Ties, ...]:
    """What a comparison would do with equal numbers, in place of the x and y of this draw, where they may be equal."""
    if name not in _WAYS_OF_EQUAL_NUMBERS:  # as of a maximum, which is the same whichever of equal numbers is taken
        return ()
    # The way of the drawn numbers: 1 where x is larger. Both sides have the same real inputs, so that `x < y` and
    # `y > x`, of opposite differences, say the same of equal numbers.
    drawn_ways = np.nan_to_num(np.sign(np.broadcast_to(x.real[0] - y.real[0], may_tie.shape)))
    drawn_ways = np.where(may_tie, drawn_ways, 0).astype(np.int8)
    if not drawn_ways.any():
        return ()
    return tuple(Ties(hashes, way * drawn_ways) for way in _WAYS_OF_EQUAL_NUMBERS[name])


def list_logs_of_constants(field: Field, x: Exact) -> set[float]:
    """The logarithms of the constants among numbers that are compared, but for their signs."""
    if field.notes.rounds and x.degree.total:  # integers that inputs were rounded to are no constants
        return set()
    residues = to_number(field, x).number[field.residues.top]
    real = x.real[0]
    is_constant = (residues == residues[0]).all(0) & (real != 0) & np.isfinite(real)
    return list_logs(np.abs(real[is_constant]))


def list_logs(values: np.ndarray) -> set[float]:
    """The logarithms of positive values; none if there are many, as of a table of constants."""
    values = np.unique(values)
    if len(values) > _MOST_CONSTANTS:
        return set()
    return set(np.log(values).tolist())
