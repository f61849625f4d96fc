"""Inputs for which a comparison compares equal numbers, or goes another way: by solving an equation for one element.

The difference of the compared numbers is mostly linear in one element of an input. So two runs, between which that
element is moved, show for which value of the element the difference is zero: that is a crossing.

Worked example: `2 * x[0] < y[0] + 1` was compared at x[0] = 3, y[0] = 4, a difference of 1. With x[0] a sixteenth
larger it is 1.125, so the slope is 2 and the zero at x[0] = 3 - 1 / 2 = 2.5. The next draw has x[0] = 2.5, where `<`
and `<=` differ, or an x[0] some way below or above it. The same is computed modulo each prime, so that both sides of
the comparison are equal there, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardkit.testing.exact.numbers.arithmetic import subtract
from shardkit.testing.exact.numbers.field import ANY, MIXED, SIMILAR, Field
from shardkit.testing.exact.numbers.logarithms import to_number
from shardkit.testing.exact.numbers.values import Element, Exact

# Places that are no comparisons: a divisor, which must not be zero, and a rounding, which jumps at an integer.
DIVISOR, JUMP = "divisor", "jump"
_STEP = 1 / 16  # an element is moved by this: a power of two, so that real values stay exact
_LARGEST = 1e6  # the largest value that an element gets
_ANY = 0.5  # how often any comparison is chosen, although there are preferred ones
_DIVISORS = 0.25  # how often a divisor is chosen in this case
_NEXT = 0.5  # how often the new value lies between the crossing and the next one
_APART = 1e-7  # crossings that differ by less than this share may differ by rounding alone
_EXACTLY = 0.5  # how often a comparison gets equal numbers; else it goes one way or the other


class Difference(NamedTuple):
    """The difference of the two numbers that a comparison compares.

    Attributes:
        number: uint64 [components, ...].
        real: float64 [...].
        asked: bool [...], where the difference is a number: neither NaN nor infinite.
        valid: bool [components, ...], which components have a meaning.
    """

    number: np.ndarray
    real: np.ndarray
    asked: np.ndarray
    valid: np.ndarray


class Differences:
    """The differences that a run compared.

    Attributes:
        by_place: the differences, by side, equation, part of the equation, and how often the equation ran before.
    """

    def __init__(self) -> None:
        self.by_place: dict[Any, Difference] = {}
        self._times: Counter[Any] = Counter()

    def note(self, place: Any, field: Field, x: Exact, y: Exact) -> None:
        """Notes the comparison of x with y at a place: side, equation and part of the equation."""
        difference = to_number(field, subtract(field, x, y))
        asked = (difference.poison == 0) & (difference.infinite == 0)
        valid = np.broadcast_to(field.valid(difference.used), difference.number.shape)
        self.by_place[*place, self._times[place]] = Difference(difference.number, difference.real[0], asked, valid)
        self._times[place] += 1


class Crossings:
    """Chooses elements of inputs, and values for them at which comparisons change.

    Attributes:
        rng: the source of random choices.
        crossed: how often each comparison was solved for.
    """

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.crossed: Counter[Any] = Counter()
        self._tie: tuple[Any, int] | None = None

    def note_end(self, tried: dict[Any, set[int]]) -> None:
        """Adds the comparison at whose tie the last element was put to those that were tried, even if that failed."""
        if self._tie is not None:
            place, index = self._tie
            tried.setdefault(place, set()).add(index)

    def choose_kind(self) -> str:
        """The kind of all other elements in the next draws."""
        return str(self.rng.choice([ANY, "near", "wide", MIXED, SIMILAR]))

    def moved(self, field: Field, others: Sequence[Element]) -> Element | None:
        """An element that is not among the others, moved by a step; None if there is none."""
        taken = {(element.name, element.place) for element in others}
        names = [name for name, x in field.notes.inputs.items() if x.number[0].size]
        if not names:
            return None
        name = str(self.rng.choice(names))
        x = field.notes.inputs[name]
        place = int(self.rng.integers(x.number[0].size))
        if (name, place) in taken:
            return None
        number = x.number.reshape(len(x.number), -1)[:, place]
        step = np.array([pow(round(1 / _STEP), -1, int(p)) for p in field.residues.moduli], np.uint64)
        return Element(name, place, (number + step) % field.residues.moduli, float(x.real.reshape(-1)[place]) + _STEP)

    def solve(
        self, field: Field, moved: Element, before: Differences, after: Differences, preferred: Container[Any] = ()
    ) -> Element | None:
        """The moved element with a value at which a comparison changes; None if none depends on it linearly.

        Args:
            field: the field of the second run.
            moved: the element, as it is in the second run.
            before: the differences of the first run.
            after: the differences of the second run, in which the element is larger by a step.
            preferred: the places of comparisons of which one is chosen half of the time, if there is one.
        """
        crossings_by_place = self._find_crossings(field, moved, before, after)
        if not crossings_by_place:
            return None
        place = self._choose_place(list(crossings_by_place), preferred)
        self.crossed[place[:3]] += 1
        self._tie = None
        # One element of the comparison, at random, and the value of the moved element at which it is zero.
        index, crossing = crossings_by_place[place][self.rng.integers(len(crossings_by_place[place]))]
        if place[2] == DIVISOR or self.rng.random() < _EXACTLY:
            self._tie = place[:3], index
            number = _find_residues_of_crossing(field, moved, before.by_place[place], after.by_place[place], index)
            return moved._replace(number=number, real=crossing)
        crossings = []
        for elements in crossings_by_place.values():
            crossings += [other for _, other in elements]
        return moved._replace(real=self._choose_beyond(crossing, np.array(crossings)))

    def _choose_place(self, candidates: Sequence[Any], preferred: Container[Any]) -> Any:
        """One of the comparisons: often a preferred one, and of these one that was solved for least often.

        A place is a side, an equation, its part, and how often the equation ran before: all its runs count together.
        """
        places = [place for place in candidates if place[:3] in preferred]
        if not places or self.rng.random() < _ANY:
            is_divisor = self.rng.random() < _DIVISORS
            places = [place for place in candidates if (place[2] == DIVISOR) == is_divisor] or list(candidates)
        fewest = min(self.crossed[place[:3]] for place in places)
        places = [place for place in places if self.crossed[place[:3]] == fewest]
        return places[self.rng.integers(len(places))]

    def _find_crossings(
        self, field: Field, moved: Element, before: Differences, after: Differences
    ) -> dict[Any, list[tuple[int, float]]]:
        """For each comparison its elements that depend on the moved element, with the value at which each is zero.

        Worked example: `x < y` of x [2] and y [2], of which x[0] is moved: {the place of `<`: [(0, 2.5)]}, because
        element 0 of the difference is zero at x[0] = 2.5, and element 1 does not depend on x[0].
        """
        crossings_by_place = {}
        for place, first in before.by_place.items():
            second = after.by_place.get(place)
            if second is None or second.number.shape != first.number.shape:
                continue
            crossings, is_known = _find_real_crossings(field, moved, first, second)
            indices = np.flatnonzero(is_known)
            if len(indices):
                values = crossings.reshape(-1)[indices]
                crossings_by_place[place] = list(zip(indices.tolist(), values.tolist(), strict=True))
        return crossings_by_place

    def _choose_beyond(self, crossing: float, others: np.ndarray) -> float:
        """A value on one side of a crossing: between it and the next one, or farther away."""
        direction = float(self.rng.choice([-1.0, 1.0]))
        distances = (others - crossing) * direction
        distances = distances[distances > _APART * (1 + abs(crossing))]
        # Between two crossings no comparison changes: a value there shows results that hold only in a narrow range.
        if len(distances) and self.rng.random() < _NEXT:
            return crossing + direction * float(distances.min()) * self.rng.uniform(0.1, 0.9)
        return crossing + direction * math.exp(self.rng.normal()) * (0.3 + 0.3 * abs(crossing))


def _find_real_crossings(
    field: Field, moved: Element, first: Difference, second: Difference
) -> tuple[np.ndarray, np.ndarray]:
    """For each element of a difference the value of the moved element at which it is zero, and where that is known.

    Worked example: a difference of 1 at 3.0 and of 1.125 at 3.0625, which is moved: the slope is 2, the crossing 2.5.
    """
    slope = (second.real - first.real) / _STEP
    crossing = moved.real - _STEP - first.real / np.where(slope == 0, math.nan, slope)
    top = field.residues.top
    changes = (first.number[top] != second.number[top]).all(0)
    return crossing, changes & first.asked & second.asked & (np.abs(crossing) < _LARGEST)


def _find_residues_of_crossing(
    field: Field, moved: Element, first: Difference, second: Difference, at: int
) -> np.ndarray:
    """The residues of the moved element at which element `at` of a difference is zero, modulo each prime.

    Worked example, modulo 7 with a step of 1 in place of a sixteenth: the difference is 1 at 3 and 3 at 4, so that the
    slope is 2. Its inverse is 4, and 3 - 1 * 4 = -1 = 6: at 6 the difference is 1 + (6 - 3) * 2 = 7 = 0.
    """
    components = []
    columns = (x.reshape(len(x), -1)[:, at].tolist() for x in (first.number, second.number))
    for p, a, b, number in zip(field.residues.moduli.tolist(), *columns, moved.number.tolist(), strict=True):
        # Solves first + (x - start) (second - first) / step = 0 for x. A prime that exps have used up tells nothing.
        start = number - pow(round(1 / _STEP), -1, p)
        slope = (b - a) * round(1 / _STEP) % p
        components.append((start - a * pow(slope, -1, p)) % p if slope else number)
    residues = np.array(components, np.uint64)
    valid = first.valid.reshape(len(residues), -1)[:, at]
    return _complete_residues(residues, valid, field.residues.moduli)


def _complete_residues(residues: np.ndarray, valid: np.ndarray, moduli: np.ndarray) -> np.ndarray:
    """The residues of a simple rational in all components, if those with a meaning are its residues.

    Worked example: `floor(log(exp(x)))` jumps at x = 2. An exp and a logarithm have used up the lowest prime and the
    highest, so that they say nothing of x, and the others say that it is 2. Then it is 2 modulo all primes: of an x
    that is 2 modulo some primes alone, `floor(x)` would not be 2.
    """
    if valid.all() or not valid.any():
        return residues
    place = int(np.flatnonzero(valid)[-1])  # of the largest prime
    numerator, denominator = _find_ratio(int(residues[place]), int(moduli[place]))
    completed = []
    for p in moduli.tolist():
        completed.append(numerator * pow(denominator, -1, p) % p)
    if not (np.array(completed, np.uint64) == residues)[valid].all():
        return residues
    return np.array(completed, np.uint64)


def _find_ratio(residue: int, p: int) -> tuple[int, int]:
    """The numerator and the denominator of the simplest rational of a residue, by Euclid's algorithm.

    Worked example: 6 modulo 11 is 1/2, because 2 * 6 is 12. The remainders of 11 and 6 are 5 and 1, and 1 = 2 * 6 - 11.
    """
    remainder_before, remainder = p, residue
    factor_before, factor = 0, 1
    while remainder * remainder > p:
        quotient = remainder_before // remainder
        remainder_before, remainder = remainder, remainder_before - quotient * remainder
        factor_before, factor = factor, factor_before - quotient * factor
    return remainder, factor
