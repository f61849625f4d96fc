"""Inputs for which one comparison compares equal numbers in many places at once: in a row, or in all of an array.

`crossings.py` puts one element after the other. What depends on all elements of a row, as the smallest of those that
are masked, or a count that must not be zero, shows only where all of them are put: four runs do that for any number.

Worked example: `any(x < 2)` of a row [2] on one side and `any(x <= 2)` on the other differ where the smallest x is 2.

    run       x                   x - 2               changes
    first     (5.0,    3.0)       (3.0,    1.0)
    second    (5.0625, 3.0625)    (3.0625, 1.0625)    (0.0625, 0.0625): the slopes are 1
    third     (5.0938, 3.1250)    (3.0938, 1.1250)    (0.0938, 0.1250): 1.5 and 2 times as much, as x[0] and x[1] moved
    fourth    (2.0,    2.0)       (0.0,    0.0)       counts as a draw

The third run tells which element each difference depends on, whatever moved it there: a transpose, a shard, a gather.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

import numpy as np

from shardkit.testing.exact.crossings import (
    JUMP,
    STEP,
    STEPS,
    Crossing,
    Crossings,
    Difference,
    Differences,
    Round,
    find_distances,
    find_residues_of_crossing,
)
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.values import Element

_SHARES = 4096  # of a step, by which an element is moved more
_MOST = 1024  # elements that are put together
_ONE_INPUT = 0.25  # how often one input moves alone
_ANY = 0.2  # how often any comparison is chosen, although there are preferred ones
_TOLERANCE = 1e-3  # of a share, for what rounding does to it
_EXACTLY = 0.5  # how often all are put at the crossing; else some are, and the others on one side of it


class MovedElements(NamedTuple):
    """Elements of inputs, moved in two ways.

    Attributes:
        alike: all by the same step.
        apart: each by another step: element j by 1 + shares[j] / 4096 times the step.
        shares: int [elements].
    """

    alike: list[Element]
    apart: list[Element]
    shares: np.ndarray


def move_all(crossings: Crossings, field: Field) -> MovedElements | None:
    """All elements of one input of a run, or of all inputs, moved; None if there are none, or too many.

    Where all inputs move, it is known at once which element of which input each comparison depends on; `x < y` then
    depends on two, and is met only where one of both moves.
    """
    names = [name for name, x in field.notes.inputs.items() if x.number[0].size]
    if not names:
        return None
    if crossings.rng.random() < _ONE_INPUT:
        names = [str(crossings.rng.choice(names))]
    count = sum(field.notes.inputs[name].number[0].size for name in names)
    if count > _MOST:
        return None
    shares = crossings.rng.permutation(_SHARES)[:count]
    moduli = field.residues.moduli
    smallest_step = np.array([pow(STEPS * _SHARES, -1, p) for p in moduli.tolist()], np.uint64)
    alike: list[Element] = []
    apart = []
    for name in names:
        x = field.notes.inputs[name]
        numbers = x.number.reshape(len(x.number), -1)
        for place, real in enumerate(x.real.ravel().tolist()):
            multiple = _SHARES + int(shares[len(alike)])
            number = (numbers[:, place] + smallest_step * np.uint64(_SHARES)) % moduli
            alike.append(Element(name, place, number, real + STEP))
            number = (numbers[:, place] + smallest_step * np.uint64(multiple)) % moduli
            apart.append(Element(name, place, number, real + STEP * multiple / _SHARES))
    return MovedElements(alike, apart, shares)


class JointCrossings:
    """Where comparisons change in many places, seen by three runs.

    Args:
        crossings: chooses the comparisons.
        field: the field of one of the runs.
        moved: the elements, as they were in the second and in the third run.
        before: the differences of the first run.
        alike: those of the second run.
        apart: those of the third run.
    """

    def __init__(
        self,
        crossings: Crossings,
        field: Field,
        moved: MovedElements,
        before: Differences,
        alike: Differences,
        apart: Differences,
    ) -> None:
        self.chooser = crossings
        self.field = field
        self.moved = moved
        self.before = before
        self.alike = alike
        self.crossings_by_round: dict[Round, dict[int, Crossing]] = {}
        for compared_round, first in before.by_round.items():
            if compared_round.place.part == JUMP:  # of each element to another integer
                continue
            second = alike.by_round.get(compared_round)
            third = apart.by_round.get(compared_round)
            if second is None or third is None or not first.number.shape == second.number.shape == third.number.shape:
                continue
            crossing_by_element = _find_crossings(field, moved, first, second, third)
            if len(crossing_by_element) > 1:
                self.crossings_by_round[compared_round] = crossing_by_element

    def solve(self, preferred: Container[tuple[int, int]]) -> list[Element]:
        """The elements that put one comparison where it changes, for a row or all of an array; empty if none does.

        Args:
            preferred: the sides and equations of which one is mostly chosen, if there is one.
        """
        if not self.crossings_by_round:
            return []
        rng = self.chooser.rng
        compared_round = self.chooser.choose_round(list(self.crossings_by_round), preferred, _ANY)
        first = self.before.by_round[compared_round]
        second = self.alike.by_round[compared_round]
        in_part = _choose_part(rng, first.real.shape)
        direction = float(rng.choice([-1.0, 1.0]))
        share_beyond = 0.0 if rng.random() < _EXACTLY else 0.5
        elements = []
        for index, crossing in self.crossings_by_round[compared_round].items():
            if not in_part[crossing.position]:
                continue
            element = self.moved.alike[index]
            if rng.random() < share_beyond:
                distance = float(np.exp(rng.normal())) * (0.3 + 0.3 * abs(crossing.value))
                elements.append(element._replace(real=crossing.value + direction * distance))
            else:
                number = find_residues_of_crossing(self.field, element, first, second, crossing.position)
                elements.append(element._replace(number=number, real=crossing.value))
        return elements


def _find_crossings(
    field: Field, moved: MovedElements, first: Difference, second: Difference, third: Difference
) -> dict[int, Crossing]:
    """By the index of a moved element, where a difference is zero that depends on this element alone."""
    # What depends on one element alone changes in the third run by that element's multiple of the change in the second.
    with np.errstate(all="ignore"):
        multiples = (third.real - first.real) / (second.real - first.real)
    shares = np.nan_to_num(multiples.ravel() - 1) * _SHARES
    nearest = np.clip(np.rint(shares), 0, _SHARES - 1).astype(int)
    index_of_share = np.full(_SHARES, -1)
    index_of_share[moved.shares] = np.arange(len(moved.shares))
    indices = index_of_share[nearest]
    distances, is_known = find_distances(field, first, second)
    depends = is_known.ravel() & third.is_finite.ravel() & (indices >= 0) & (np.abs(shares - nearest) < _TOLERANCE)
    crossings = {}
    for position in np.flatnonzero(depends).tolist():
        index = int(indices[position])
        start = moved.alike[index].real - STEP
        crossings[index] = Crossing(position, start + float(distances.ravel()[position]))
    return crossings


def _choose_part(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """bool [elements]: all elements of an array, or those of one index of some of its dims, as of a row."""
    is_chosen = np.ones(shape, bool)
    dims = [dim for dim, size in enumerate(shape) if size > 1]
    if not dims:
        return is_chosen.ravel()
    for dim in rng.permutation(dims)[: rng.integers(len(dims))].tolist():
        index = rng.integers(shape[dim])
        indices = np.arange(shape[dim]).reshape(-1, *(1,) * (len(shape) - dim - 1))
        is_chosen = is_chosen & (indices == index)
    return is_chosen.ravel()
