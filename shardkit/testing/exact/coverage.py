"""Which way each comparison went: what a proof has seen of the branches of two programs, and what it has not.

Worked example: `where(x > 1, a, b)` on three elements. In one draw x is (2.0, 0.3, 0.5), in the next (1.5, 3.0, -1.0):
the comparison held for elements 0 and 1 and failed for 1 and 2. The line went both ways, and one element of three did.

A comparison that only one side makes is the dangerous one: where both programs compare x with 1, they branch alike, and
a draw sees both branches of both; where one compares x with 1 and the other with 1.01, they differ for few inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from dataclasses import field as attribute
from typing import Any

import numpy as np

from shardkit.testing.exact.field import Field, mixed
from shardkit.testing.exact.tower import PRIMES
from shardkit.testing.exact.values import Exact

ON_MESH, ALONE = 0, 1
_MOST_CONSTANTS = 16  # of one comparison


@dataclass
class Decision:
    """One comparison of one program, in all draws.

    Attributes:
        line: where it stands.
        what: the primitive, and which part of it.
        integers: whether it compares integers that follow from a comparison of floats.
        exactly: whether it asks if two numbers are equal.
        held: bool [...], where it was true in some draw.
        failed: where it was false.
        decided: where its operands leave no choice, as for a square and zero.
        words: which differences of numbers it compares with zero, but for a constant factor.
    """

    line: str
    what: str
    integers: bool
    exactly: bool
    held: np.ndarray
    failed: np.ndarray
    decided: np.ndarray
    words: frozenset[int]

    @property
    def open(self) -> bool:
        """Whether it could go both ways, and did not for any element."""
        free = ~self.decided
        if self.exactly:  # a number equals the largest of several where it is it: as the same number, which is decided
            return bool(free.any()) and not (self.held.any() and self.failed.any())
        return bool(free.any()) and not ((self.held & free).any() and (self.failed & free).any())

    @property
    def combined(self) -> bool:
        """Whether it joins others, as `x > 0.8 and x < 1.2` does."""
        return self.what in ("and", "or") or self.what.endswith(" between")

    @property
    def outcome(self) -> str:
        """What it always was."""
        return "true" if self.held.any() else "false"


@dataclass
class Coverage:
    """All comparisons of two programs.

    Attributes:
        comparisons: by side, equation and part of it.
        constants: the logarithms of constants that are compared, but for their signs.
        side: that of the program that runs.
        identifies: whether the differences of numbers are told apart, which takes longer than all else here.
    """

    comparisons: dict[Any, Decision] = attribute(default_factory=dict)
    constants: set[float] = attribute(default_factory=set)
    side: int = ALONE
    identifies: bool = True

    def note(
        self, field: Field, equation: Any, line: str, truth: np.ndarray, operands: tuple[Exact, Exact], part: str = ""
    ) -> None:
        """What a comparison of floats gave."""
        x, y = operands
        key = self.side, id(equation), part
        asked = (x.poison == 0) & (y.poison == 0) & (x.infinite == 0) & (y.infinite == 0)
        asked, truth = np.broadcast_arrays(asked, truth)
        words: frozenset[int] = frozenset()
        decided = None
        if self.identifies and field.points > 1:
            differences, fixed = _identify(field, x, y)
            decided = ~asked | fixed
            words = frozenset(np.broadcast_to(differences, asked.shape)[~decided].tolist())
            self.constants |= _constants(field, x) | _constants(field, y)
        what, exactly = equation.primitive.name + part, equation.primitive.name in ("eq", "ne")
        if field.kind == "zero" and not exactly:  # what is wrong on a branch is not seen where all inputs are zero
            return
        if decided is None:
            decided = ~asked
        comparison = Decision(line, what, False, exactly, truth & asked, ~truth & asked, decided, words)
        self._add(key, comparison, identified=bool(words))

    def note_known(self, field: Field, equation: Any, line: str, truth: np.ndarray, part: str = "") -> None:
        """What a comparison of integers gave, or an `and` or `or` of comparisons."""
        key = self.side, id(equation), part
        if field.kind == "zero":
            return
        never = np.zeros(truth.shape, bool)
        integers = not part and equation.primitive.name not in ("and", "or")
        self._add(
            key, Decision(line, equation.primitive.name + part, integers, False, truth, ~truth, never, frozenset())
        )

    def _add(self, key: Any, new: Decision, identified: bool = False) -> None:
        old = self.comparisons.get(key)
        if old is None or old.held.shape != new.held.shape:
            self.comparisons[key] = new
            return
        old.held, old.failed = old.held | new.held, old.failed | new.failed
        if identified:
            old.decided = old.decided & new.decided
        old.words = old.words | new.words

    def merge(self, other: Coverage) -> None:
        """What another run of a side noted."""
        for key, comparison in other.comparisons.items():
            self._add(key, replace(comparison), identified=bool(comparison.words))
        self.constants |= other.constants

    def foreign(self) -> Iterator[Decision]:
        """Comparisons that only one side makes."""
        words: list[set[int]] = [set(), set()]
        for (side, *_), comparison in self.comparisons.items():
            words[side] |= comparison.words
        for (side, *_), comparison in self.comparisons.items():
            if comparison.words - words[1 - side]:
                yield comparison

    def open(self, integers: bool, exactly: bool) -> list[Decision]:
        """Comparisons of a kind that could have gone both ways and have not.

        One for equality is none of them where the same numbers are put in order, as where the derivative of a maximum
        asks for ties: inputs that are equal are drawn for their own sake.
        """
        kinds = [x for x in self.comparisons.values() if x.integers == integers and x.exactly == exactly and x.open]
        if not exactly:
            return kinds
        ordered: set[int] = set()
        for comparison in self.comparisons.values():
            if not comparison.exactly:
                ordered |= comparison.words
        return [x for x in kinds if not x.words or x.words - ordered]


def _constants(field: Field, x: Exact) -> set[float]:
    top = field.plain(x).number[-2 * field.points : -field.points]
    constant = (top == top[0]).all(0) & (x.real[0] != 0) & np.isfinite(x.real[0])
    values = np.unique(np.abs(x.real[0][constant]))
    return set(np.log(values).tolist()) if len(values) <= _MOST_CONSTANTS else set()


def _identify(field: Field, x: Exact, y: Exact) -> tuple[np.ndarray, np.ndarray]:
    """Which difference is compared with zero, but for a constant factor; and where it cannot change its sign."""
    p = np.uint64(PRIMES[-2])
    difference = field.plain(field.sub(x, y)).number[-2 * field.points : -field.points]
    # c d(a) / (c d(b)) is d(a) / d(b) for every constant c, at points a and b; it is 1 for constants.
    ratio = difference[0] * _inverses(difference[1], p) % p
    zero = (difference == 0).all(0)
    nothing, none = field.is_zero(y), field.is_zero(x)
    opposite = (x.sign != 0) & (x.sign == -y.sign)
    fixed = zero | (ratio == 1) | opposite | (nothing & (x.sign != 0)) | (none & (y.sign != 0))
    if field.rounds and (x.degree.total or y.degree.total):  # what floats were rounded to is so in this draw alone
        fixed = np.zeros_like(fixed)
    return mixed(ratio), fixed


def _inverses(x: np.ndarray, p: np.uint64) -> np.ndarray:
    """x to the power p - 2, which is its inverse."""
    result, exponent = np.ones_like(x), int(p) - 2
    for bit in bin(exponent)[2:]:
        result = result * result % p
        if bit == "1":
            result = result * x % p
    return result
