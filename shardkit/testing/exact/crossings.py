"""Inputs for which a comparison compares equal numbers, or goes another way: by solving an equation for one element.

The difference of the compared numbers is mostly linear in one element of an input. So two runs, between which that
element is moved by a sixteenth, show for which value of the element the difference is zero: that is a crossing.

Worked example: `x / 2 < x / 3 + 1`, two shares of one number.

    x                     x / 2      x / 3 + 1    difference
    3.0, as drawn         1.5        2.0          -0.5         true
    3.0625, moved         1.53125    2.02083      -0.48958     so the slope is (0.5 - 0.48958) * 16 = 1 / 6
    6.0, the crossing     3.0        3.0           0.0         false; 3 - -0.5 / (1 / 6) = 6
    7.5, beyond it        3.75       3.5           0.25        false: the order has flipped

The next draw has an x of 6, where `<` and `<=` differ, or one some way below or above it. The same is computed modulo
each prime, so that both sides of the comparison are equal there, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Sequence
from typing import NamedTuple

import numpy as np

from shardkit.testing.exact.decision import DecisionPlace
from shardkit.testing.exact.numbers.arithmetic import subtract
from shardkit.testing.exact.numbers.field import ANY, MIXED, SIMILAR, Field
from shardkit.testing.exact.numbers.logarithms import to_number
from shardkit.testing.exact.numbers.values import Element, Exact

# Places that are no comparisons: a divisor, which must not be zero; a rounding, which jumps at an integer; and the root
# of a square, of which one side alone asks whether it is above zero.
DIVISOR, JUMP, TOUCH = "divisor", "jump", "touch"
# Of a rounding that is compared with 3 the part is "jump to 3".
JUMP_TO = "jump to "
STEPS = 16
STEP = 1 / STEPS  # an element is moved by this: a power of two, so that real values stay exact
_LARGEST = 1e6  # the longest distance of an element from where it was
_ANY = 0.5  # how often any comparison is chosen, although there are preferred ones
# How often a comparison is chosen where all are candidates, a divisor, and an integer that a rounding is compared with.
_FAMILIES = ("comparisons", "divisors", "integers")
_SHARES = (0.6, 0.25, 0.15)
_NEXT = 0.5  # how often the new value lies between the crossing and the next one
_APART = 1e-7  # crossings that differ by less than this share may differ by rounding alone
_EXACTLY = 0.5  # how often a comparison gets equal numbers; else it goes one way or the other


class Difference(NamedTuple):
    """The difference of the two numbers that a comparison compares.

    Attributes:
        number: uint64 [components, ...].
        real: float64 [...].
        is_finite: bool [...], where the difference is a number: neither NaN nor infinite.
        valid: bool [components, ...], which components have a meaning.
    """

    number: np.ndarray
    real: np.ndarray
    is_finite: np.ndarray
    valid: np.ndarray


class Round(NamedTuple):
    """One run of an equation that compares.

    Attributes:
        place: where the program compares.
        number: how often the equation ran before, as in the rounds of a loop.
    """

    place: DecisionPlace
    number: int


class Crossing(NamedTuple):
    """Where one element of a difference is zero.

    Attributes:
        position: the place of the element in the difference, in row-major order.
        value: the value of the moved element of an input at which it is zero.
    """

    position: int
    value: float


class Differences:
    """The differences that a run compared.

    Attributes:
        by_round: the differences, by the run of the equation that compared them.
    """

    def __init__(self) -> None:
        self.by_round: dict[Round, Difference] = {}
        self._rounds: Counter[DecisionPlace] = Counter()

    def note(self, place: DecisionPlace, field: Field, x: Exact, y: Exact) -> None:
        """Notes the comparison of x with y at a place."""
        difference = to_number(field, subtract(field, x, y))
        is_finite = (difference.poison == 0) & (difference.infinite == 0)
        valid = np.broadcast_to(field.valid(difference.used), difference.number.shape)
        compared_round = Round(place, self._rounds[place])
        self.by_round[compared_round] = Difference(difference.number, difference.real[0], is_finite, valid)
        self._rounds[place] += 1


class Crossings:
    """Chooses elements of inputs, and values for them at which comparisons change.

    Attributes:
        rng: the source of random choices.
        crossed: how often each comparison was solved for; all rounds of a loop count together.
    """

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.crossed: Counter[DecisionPlace] = Counter()
        self._tie: tuple[DecisionPlace, int] | None = None

    def note_end(self, tried: dict[DecisionPlace, set[int]]) -> None:
        """Adds the comparison at whose tie the last element was put to those that were tried, even if that failed."""
        if self._tie is not None:
            place, index = self._tie
            tried.setdefault(place, set()).add(index)

    def choose_kind(self) -> str:
        """The kind of all other elements in the next draws."""
        return str(self.rng.choice([ANY, "near", "wide", MIXED, SIMILAR]))

    def move(self, field: Field, placed: Sequence[Element]) -> Element | None:
        """An element that is not among those that were placed, moved by a step; None if the one that is chosen is."""
        names = [name for name, x in field.notes.inputs.items() if x.number[0].size]
        if not names:
            return None
        name = str(self.rng.choice(names))
        x = field.notes.inputs[name]
        index = int(self.rng.integers(x.number[0].size))
        if (name, index) in {(element.name, element.place) for element in placed}:
            return None
        moduli = field.residues.moduli
        number = x.number.reshape(len(x.number), -1)[:, index]
        real = float(x.real.reshape(-1)[index])
        steps = [pow(STEPS, -1, p) for p in moduli.tolist()]
        number = (number + np.array(steps, np.uint64)) % moduli
        return Element(name, index, number, real + STEP)

    def solve(
        self,
        field: Field,
        moved: Element,
        before: Differences,
        after: Differences,
        preferred: Container[tuple[int, int]] = (),
    ) -> Element | None:
        """The moved element with a value at which a comparison changes; None if none depends on it linearly.

        Args:
            field: the field of the second run.
            moved: the element, as it is in the second run.
            before: the differences of the first run.
            after: the differences of the second run, in which the element is larger by a step.
            preferred: the sides and equations of which one is chosen half of the time, if there is one.
        """
        crossings_by_round = self._find_crossings(field, moved, before, after)
        if not crossings_by_round:
            return None
        compared_round = self.choose_round(list(crossings_by_round), preferred)
        place = compared_round.place
        self.crossed[place] += 1
        self._tie = None
        # One element of the comparison, at random.
        candidates = crossings_by_round[compared_round]
        index, value = candidates[self.rng.integers(len(candidates))]
        if place.part in (DIVISOR, TOUCH) or self.rng.random() < _EXACTLY:
            self._tie = place, index
            first = before.by_round[compared_round]
            second = after.by_round[compared_round]
            number = find_residues_of_crossing(field, moved, first, second, index)
            return moved._replace(number=number, real=value)
        values = []
        for crossings in crossings_by_round.values():
            values += [crossing.value for crossing in crossings]
        # The residues stay: results are compared at other numbers, and only the comparison goes another way.
        return moved._replace(real=self._choose_beyond(value, np.array(values)))

    def choose_round(
        self, candidates: Sequence[Round], preferred: Container[tuple[int, int]], share_of_any: float = _ANY
    ) -> Round:
        """One of the comparisons: often a preferred one, and of these one that was solved for least often."""
        rounds = [candidate for candidate in candidates if candidate.place[:2] in preferred]
        if not rounds or self.rng.random() < share_of_any:
            family = self.rng.choice(_FAMILIES, p=_SHARES)
            rounds = [candidate for candidate in candidates if _find_family(candidate.place.part) == family]
        if not rounds:
            rounds = list(candidates)
        counts = [self.crossed[candidate.place] for candidate in rounds]
        fewest = min(counts)
        rounds = [candidate for candidate, count in zip(rounds, counts, strict=True) if count == fewest]
        return rounds[self.rng.integers(len(rounds))]

    def _find_crossings(
        self, field: Field, moved: Element, before: Differences, after: Differences
    ) -> dict[Round, list[Crossing]]:
        """For each comparison its elements that depend on the moved element, with the value at which each is zero.

        Worked example: `x < y` of x [2] and y [2], of which x[0] is moved. The round of `<` has one crossing, (0, 2.5):
        element 0 of the difference is zero at x[0] = 2.5, and element 1 does not depend on x[0].
        """
        crossings_by_round = {}
        for compared_round, first in before.by_round.items():
            second = after.by_round.get(compared_round)
            if second is None or second.number.shape != first.number.shape:
                continue
            distances, is_known = find_distances(field, first, second)
            indices = np.flatnonzero(is_known)
            if not len(indices):
                continue
            start = moved.real - STEP
            known_values = start + distances.reshape(-1)[indices]
            crossings = map(Crossing, indices.tolist(), known_values.tolist())
            crossings_by_round[compared_round] = list(crossings)
        return crossings_by_round

    def _choose_beyond(self, crossing: float, crossings: np.ndarray) -> float:
        """A value on one side of a crossing: between it and the next one, or farther away."""
        direction = float(self.rng.choice([-1.0, 1.0]))
        distances = (crossings - crossing) * direction
        distances = distances[distances > _APART * (1 + abs(crossing))]
        # Between two crossings no comparison changes: a value there shows results that hold only in a narrow range.
        if len(distances) and self.rng.random() < _NEXT:
            return crossing + direction * float(distances.min()) * self.rng.uniform(0.1, 0.9)
        return crossing + direction * math.exp(self.rng.normal()) * (0.3 + 0.3 * abs(crossing))


def _find_family(part: str) -> str:
    """Which of the families a place is of, by the part of its equation."""
    if part == DIVISOR:
        return "divisors"
    if part.startswith(JUMP_TO):
        return "integers"
    return "comparisons"


def find_distances(field: Field, first: Difference, second: Difference) -> tuple[np.ndarray, np.ndarray]:
    """For each element of a difference how far its zero is from where an element was before a step, if that is known.

    Worked example: a difference of 1 at 3.0 and of 1.125 at 3.0625, which is moved: the slope is 2, and the difference
    is zero at 2.5, a distance of -0.5.
    """
    slope = (second.real - first.real) / STEP
    distances = -first.real / np.where(slope == 0, math.nan, slope)
    top = field.residues.top
    changes = (first.number[top] != second.number[top]).all(0)
    return distances, changes & first.is_finite & second.is_finite & (np.abs(distances) < _LARGEST)


def find_residues_of_crossing(
    field: Field, moved: Element, first: Difference, second: Difference, index: int
) -> np.ndarray:
    """The residues of the moved element at which one element of a difference is zero, modulo each prime.

    Worked example, modulo 7 with a step of 1 in place of a sixteenth: x / 2 - x / 3 - 1 is 4 x - 5 x - 1, and so 3 at
    x = 3 and 2 at x = 4. The slope is -1 = 6, whose inverse is 6, and 3 - 3 * 6 = -15 = 6: the crossing is at 6.
    """
    components = []
    first_residues = first.number.reshape(len(first.number), -1)[:, index].tolist()
    second_residues = second.number.reshape(len(second.number), -1)[:, index].tolist()
    moduli = field.residues.moduli
    rows = zip(moduli.tolist(), first_residues, second_residues, moved.number.tolist(), strict=True)
    for p, first_residue, second_residue, moved_residue in rows:
        # Solves first + (x - start) (second - first) / step = 0 for x.
        slope = (second_residue - first_residue) * STEPS % p
        # A prime that exps have used up tells nothing: the residue may be any.
        if not slope:
            components.append(moved_residue)
            continue
        start = moved_residue - pow(STEPS, -1, p)
        components.append((start - first_residue * pow(slope, -1, p)) % p)
    residues = np.array(components, np.uint64)
    valid = first.valid.reshape(len(residues), -1)[:, index]
    return _complete_residues(residues, valid, moduli)


def _complete_residues(residues: np.ndarray, valid: np.ndarray, moduli: np.ndarray) -> np.ndarray:
    """The residues of a simple rational in all components, if those with a meaning are its residues.

    Worked example: `floor(log(exp(x)))` jumps at x = 2. An exp and a logarithm have used up the lowest prime and the
    highest, so that they say nothing of x, and the others say that it is 2. Then it is 2 modulo all primes: of an x
    that is 2 modulo some primes alone, `floor(x)` would not be 2.
    """
    if valid.all() or not valid.any():
        return residues
    largest_prime = int(np.flatnonzero(valid)[-1])
    numerator, denominator = _find_ratio(int(residues[largest_prime]), int(moduli[largest_prime]))
    components = [numerator * pow(denominator, -1, p) % p for p in moduli.tolist()]
    completed = np.array(components, np.uint64)
    if (completed != residues)[valid].any():
        return residues
    return completed


def _find_ratio(residue: int, p: int) -> tuple[int, int]:
    """The numerator and the denominator of the simplest rational of a residue, by Euclid's algorithm.

    Worked example: 6 modulo 11 is 1/2, because 2 * 6 is 12. The remainders of 11 and 6 are 5 and 1, and 1 = 2 * 6 - 11.
    """
    remainder_before = p
    remainder = residue
    factor_before = 0
    factor = 1
    while remainder * remainder > p:
        quotient = remainder_before // remainder
        remainder_before, remainder = remainder, remainder_before - quotient * remainder
        factor_before, factor = factor, factor_before - quotient * factor
    return remainder, factor
