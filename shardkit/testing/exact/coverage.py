"""Which way each comparison went: what a proof has seen of the branches of two programs, and what it has not.

Worked example: `where(x > 1, a, b)` on three elements. In one draw x is (2.0, 0.3, 0.5), in the next (1.5, 3.0, -1.0):
the comparison held for elements 0 and 1 and failed for 1 and 2. The line went both ways, and one element of three did.

A comparison that only one side makes is the dangerous one: where both programs compare x with 1, they branch alike, and
a draw sees both branches of both; where one compares x with 1 and the other with 1.01, they differ for few inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from dataclasses import field as attribute
from typing import Any

import numpy as np

from shardkit.testing.exact.crossings import DIVISOR, Differences
from shardkit.testing.exact.numbers.arithmetic import subtract
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.hashing import mix
from shardkit.testing.exact.numbers.logarithms import to_number
from shardkit.testing.exact.numbers.tower import PRIMES, invert_by_power
from shardkit.testing.exact.numbers.values import Exact

ON_MESH, ALONE = 0, 1
# What a decision is about: two numbers, which is larger; whether they are equal; integers that follow from others.
ORDER, EQUALITY, INTEGERS = "order", "equality", "integers"
# What asks which number is the largest, as `x == max(x)` does.
_EQUALITIES = ("eq", "ne", "select_and_scatter_add", "select_and_gather_add")
_MOST_CONSTANTS = 16  # of one comparison
# With which numbers equal ones are taken together: 1 for those where the first operand is the larger one.
_TIES = {"ge": 1, "lt": 1, "gt": -1, "le": -1}


@dataclass
class Decision:
    """One comparison of one program, in all draws.

    Attributes:
        line: where it stands.
        what: the primitive, and which part of it.
        kind: ORDER, EQUALITY or INTEGERS.
        held: bool [...], where it was true in some draw.
        failed: where it was false.
        decided: where its operands leave no choice, as for a square and zero.
        words: which differences of numbers it compares with zero, but for a constant factor.
        ties: of these words, on which side of zero equal numbers are counted.
        tied: where its operands were equal in some draw.
    """

    line: str
    what: str
    kind: str
    held: np.ndarray
    failed: np.ndarray
    decided: np.ndarray
    words: frozenset[int] = frozenset()
    ties: frozenset[tuple[int, int]] = frozenset()
    tied: np.ndarray | bool = False

    @property
    def open(self) -> bool:
        """Whether it could go both ways, and did not for any element."""
        free = ~self.decided
        if not free.any():
            return False
        # A number equals the largest of several where it is it: as the same number, which is decided.
        counted = np.ones_like(free) if self.kind == EQUALITY else free
        return not ((self.held & counted).any() and (self.failed & counted).any())

    @property
    def joined(self) -> bool:
        """Whether it joins others, as `x > 0.8 and x < 1.2` does."""
        return self.what in ("and", "or") or self.what.endswith(" between")

    @property
    def outcome(self) -> str:
        """What it always was."""
        return "true" if self.held.any() else "false"

    def add(self, other: Decision) -> None:
        """What it was in another draw."""
        self.held, self.failed = self.held | other.held, self.failed | other.failed
        if other.words:  # else nothing was told apart, and nothing is known to be decided
            self.decided = self.decided & other.decided
        self.words = self.words | other.words
        self.ties = self.ties | other.ties
        self.tied = self.tied | other.tied


@dataclass
class Coverage:
    """All comparisons of two programs.

    Attributes:
        decisions: by side, equation, part of it and number of dims.
        constants: the logarithms of constants that are compared, but for their signs.
        side: that of the program that runs.
        identifies: whether the differences of numbers are told apart, which takes longer than all else here.
        differences: those of the run, where they are asked for.
    """

    decisions: dict[Any, Decision] = attribute(default_factory=dict)
    constants: set[float] = attribute(default_factory=set)
    side: int = ALONE
    identifies: bool = True
    differences: Differences | None = None

    def note(
        self, field: Field, equation: Any, line: str, truth: np.ndarray, operands: tuple[Exact, Exact], part: str = ""
    ) -> None:
        """What a comparison of floats gave."""
        x, y = operands
        if self.differences is not None:
            self.differences.note((self.side, id(equation), part), field, x, y)
        kind = EQUALITY if equation.primitive.name in _EQUALITIES else ORDER
        asked = (x.poison == 0) & (y.poison == 0) & (x.infinite == 0) & (y.infinite == 0)
        asked, truth = np.broadcast_arrays(asked, truth)
        decision = Decision(line, equation.primitive.name + part, kind, truth & asked, ~truth & asked, ~asked)
        if self.identifies and field.points > 1:
            differences, fixed = _identify(field, x, y)
            decision.decided = decision.decided | fixed
            words = np.broadcast_to(differences, asked.shape)[~decision.decided].tolist()
            decision.words = frozenset(words)
            decision.ties = _find_ties(equation.primitive.name, words, x, y, ~decision.decided)
            self.constants |= _constants(field, x) | _constants(field, y)
        if field.planted and x.factor is None and y.factor is None:
            decision.tied = asked & (x.number == y.number).all(0)
        if field.kind == "zero" and kind == ORDER:  # a wrong branch is not seen where all inputs are zero
            return
        self._add(equation, part, decision)

    def note_divisor(self, field: Field, equation: Any, x: Exact) -> None:
        """What is divided by, or what a logarithm is taken of: inputs are put where it is zero."""
        if self.differences is not None and x.degree.total:
            zero = field.lift(np.zeros((1,) * len(x.shape), np.float32))
            self.differences.note((self.side, id(equation), DIVISOR), field, x, zero)

    def note_integers(
        self, field: Field, equation: Any, line: str, truth: np.ndarray, operands: Sequence[np.ndarray]
    ) -> None:
        """What a comparison of integers gave that follow from floats."""
        for x in operands:
            if self.identifies and not field.marks.follows_floats(x):
                self.constants |= _logarithms(np.abs(x[x != 0].astype(np.float64)))
        if field.kind != "zero":
            never = np.zeros(truth.shape, bool)
            self._add(equation, "", Decision(line, equation.primitive.name, INTEGERS, truth, ~truth, never))

    def note_joined(self, field: Field, equation: Any, line: str, truth: np.ndarray, part: str = "") -> None:
        """What several comparisons of floats gave together."""
        if field.kind != "zero":
            never = np.zeros(truth.shape, bool)
            self._add(equation, part, Decision(line, equation.primitive.name + part, ORDER, truth, ~truth, never))

    def _add(self, equation: Any, part: str, decision: Decision) -> None:
        key = self.side, id(equation), part, decision.held.ndim
        if key in self.decisions:
            self.decisions[key].add(decision)
        else:
            self.decisions[key] = decision

    def merge(self, other: Coverage) -> None:
        """What another run of a side noted."""
        for key, decision in other.decisions.items():
            if key in self.decisions:
                self.decisions[key].add(decision)
            else:
                self.decisions[key] = replace(decision)
        self.constants |= other.constants

    def free(self) -> list[Decision]:
        """Those that could go both ways."""
        return [decision for decision in self.decisions.values() if not decision.decided.all()]

    def foreign(self) -> list[Decision]:
        """Comparisons that only one side makes."""
        return [self.decisions[key] for key in self.foreign_keys()]

    def foreign_keys(self) -> list[tuple[Any, ...]]:
        """Their keys among all decisions."""
        words: list[set[int]] = [set(), set()]
        for (side, *_), decision in self.decisions.items():
            words[side] |= decision.words
        return [key for key, decision in self.decisions.items() if decision.words - words[1 - key[0]]]

    def untied(self) -> list[Decision]:
        """Comparisons that both sides make, that differ for equal numbers, and that no draw made of equal numbers.

        Worked example: one side asks `x / y > 1`, the other `x / y >= 1`. Both compare the same difference. Where it is
        zero, one side takes what it takes for negative ones, the other what it takes for positive ones.
        """
        ties: list[dict[int, set[int]]] = [{}, {}]
        for (side, *_), decision in self.decisions.items():
            for word, tie in decision.ties:
                ties[side].setdefault(word, set()).add(tie)
        differing = {word for word in ties[0].keys() & ties[1].keys() if ties[0][word] != ties[1][word]}
        decisions = []
        for decision in self.decisions.values():
            is_met = bool((decision.tied & ~decision.decided).any())
            if not is_met and any(word in differing for word, _ in decision.ties):
                decisions.append(decision)
        return decisions

    def open(self, kind: str) -> list[Decision]:
        """Comparisons of a kind that could have gone both ways and have not.

        One for equality is none of them where the same numbers are put in order, as where the derivative of a maximum
        asks for ties: inputs that are equal are drawn for their own sake.
        """
        ordered: set[int] = set()
        if kind == EQUALITY:
            for decision in self.decisions.values():
                if decision.kind == ORDER:
                    ordered |= decision.words
        decisions = [decision for decision in self.decisions.values() if decision.kind == kind and decision.open]
        return [decision for decision in decisions if not decision.words or decision.words - ordered]


def _find_ties(name: str, words: list[int], x: Exact, y: Exact, free: np.ndarray) -> frozenset[tuple[int, int]]:
    """For the words of free elements, the sign of the difference with which a comparison counts zero."""
    if name not in _TIES:  # as of a maximum, which is the same whichever of equal numbers is taken
        return frozenset()
    signs = np.sign(np.broadcast_to(x.real[0] - y.real[0], free.shape)[free]).tolist()
    # Both sides have the same real inputs, so `x < y` and `y > x`, of opposite differences, count zero alike.
    return frozenset((word, int(_TIES[name] * sign)) for word, sign in zip(words, signs, strict=True) if abs(sign) == 1)


def _constants(field: Field, x: Exact) -> set[float]:
    if field.rounds and x.degree.total:  # integers that inputs were rounded to are no constants
        return set()
    top = to_number(field, x).number[-2 * field.points : -field.points]
    constant = (top == top[0]).all(0) & (x.real[0] != 0) & np.isfinite(x.real[0])
    return _logarithms(np.abs(x.real[0][constant]))


def _logarithms(values: np.ndarray) -> set[float]:
    distinct = np.unique(values)
    return set(np.log(distinct).tolist()) if len(distinct) <= _MOST_CONSTANTS else set()


def _identify(field: Field, x: Exact, y: Exact) -> tuple[np.ndarray, np.ndarray]:
    """Which difference is compared with zero, but for a constant factor; and where it cannot change its sign."""
    p = np.uint64(PRIMES[-2])
    difference = to_number(field, subtract(field, x, y)).number[-2 * field.points : -field.points]
    # c d(a) / (c d(b)) is d(a) / d(b) for every constant c, at points a and b; it is 1 for constants.
    ratio = difference[0] * invert_by_power(difference[1], p) % p
    zero = (difference == 0).all(0)
    nothing, none = field.is_zero(y), field.is_zero(x)
    opposite = (x.sign != 0) & (x.sign == -y.sign)
    fixed = zero | (ratio == 1) | opposite | (nothing & (x.sign != 0)) | (none & (y.sign != 0))
    if field.rounds and (x.degree.total or y.degree.total):  # what floats were rounded to is so in this draw alone
        fixed = np.zeros_like(fixed)
    return mix(ratio), fixed
