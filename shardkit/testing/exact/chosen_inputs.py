"""Draws whose inputs are chosen: at real values that floats propose, or where a comparison changes its answer.

Few of the inputs that are drawn at random come near the place where one program branches otherwise than the other. So
some draws are led there: `float_inputs.py` proposes real values for which both sides differ in floats, `crossings.py`
solves for the value of one element at which a comparison compares equal numbers.

Worked example: `where(x > 1, x, 0)` and `where(x >= 1, x, 0)` differ for an x of 1 alone. No random draw meets it; a
draw across the crossing of x - 1 puts an element of x there, modulo each prime and as a float.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np

from shardkit.testing.exact.coverage import ALONE, ON_MESH, Coverage
from shardkit.testing.exact.crossings import Crossings, Differences
from shardkit.testing.exact.evidence import UndecidedError, UnprovableError
from shardkit.testing.exact.float_inputs import RealInputs
from shardkit.testing.exact.joint_crossings import JointCrossings, move_all
from shardkit.testing.exact.numbers.errors import NO_VALUE
from shardkit.testing.exact.numbers.field import ANY, Field
from shardkit.testing.exact.numbers.values import Element
from shardkit.testing.exact.program_pair import FEWEST_POINTS, ProgramPair


def draw_at(pair: ProgramPair, inputs: RealInputs) -> None:
    """One more draw, of which some inputs have these real values; it counts unless it has none for a number.

    Worked example: for {"0": [0.25, 3.0]} the argument 0 has these real values. Its residues are drawn as ever, so
    that the comparisons go as they do at these values, and results are compared at other numbers. For {"0": [2.0,
    -2.0]} the residues are those of 2 and -2, because the squares are to be equal.
    """
    seed = pair.seed
    pair.seed += 1
    # Whole numbers, and halves, may be equal or zero: such a draw is one of chosen inputs. Their roots have laws
    # that those of unknown numbers do not have.
    whole_inputs = set()
    if not pair.field.laws.roots.squares:
        for name, values in inputs.items():
            if (2 * values == np.rint(2 * values)).all():
                whole_inputs.add(name)
    field = pair.make_field(FEWEST_POINTS, seed, kind=ANY, crossed=bool(whole_inputs))
    rng = np.random.default_rng(seed)
    elements = []
    for name, values in inputs.items():
        for place, real in enumerate(values.ravel().tolist()):
            number = rng.integers(1, field.residues.moduli, dtype=np.uint64)
            if name in whole_inputs:
                number = field.lift(np.float32(real)).number
            elements.append(Element(name, place, number, real))
    field.choices.elements = tuple(elements)
    with suppress(*NO_VALUE):
        pair.compare(field)
        pair.count_run(field)


def draw_across(pair: ProgramPair, crossings: Crossings, count: int) -> None:
    """Draws of the same inputs, in each of which one element more is put where a comparison changes its answer.

    Worked example: `(x[0] > 1) & (x[1] > 2)`, with a count of 2.

        run      x              counts
        first    (0.3, 5.0)     no: it shows the differences -0.7 and 3.0 that are compared
        second   (1.0, 5.0)     yes: x[0] is put where the first comparison is of equal numbers
        third    (1.0, 1.4)     yes: x[1] is put where the second one is false

    Args:
        pair: both programs.
        crossings: chooses the elements.
        count: how many elements are put so, one after the other.
    """
    elements: list[Element] = []
    with _choosing_inputs(pair):
        draws = _DrawsOfSameInputs(pair, crossings)
        field, differences = draws.compare(elements)
        for _ in range(count):
            moved = crossings.move(field, elements)
            if moved is None:
                return
            after = draws.run([*elements, moved])
            element = crossings.solve(field, moved, differences, after, _find_preferred(pair))
            if element is None:
                return
            elements.append(element)
            field, differences = draws.compare(elements)
            draws.count(field)
            crossings.note_end(pair.coverage.tried)


def draw_together(pair: ProgramPair, crossings: Crossings, count: int) -> None:
    """Draws of the same inputs, in each of which one comparison changes its answer for a row, or all of an array.

    Args:
        pair: both programs.
        crossings: chooses the comparisons.
        count: the number of draws.
    """
    with _choosing_inputs(pair):
        draws = _DrawsOfSameInputs(pair, crossings)
        field, before = draws.compare([])
        moved = move_all(crossings, field)
        if moved is None:
            return
        alike = draws.run(moved.alike)
        apart = draws.run(moved.apart)
        joint = JointCrossings(crossings, field, moved, before, alike, apart)
        for _ in range(count):
            elements = joint.solve(_find_preferred(pair))
            if not elements:
                return
            field, _ = draws.compare(elements)
            draws.count(field)


@contextmanager
def _choosing_inputs(pair: ProgramPair) -> Iterator[None]:
    """Ends draws without a word where chosen inputs have no meaning."""
    try:
        yield
    # It is an UnprovableError too, but one that says something of the programs, and not only of these inputs.
    except UndecidedError:
        raise
    except (*NO_VALUE, UnprovableError):  # as of a loop that does not end for inputs like these
        return
    finally:
        pair.coverage.differences = None


class _DrawsOfSameInputs:
    """Draws that have all inputs in common, but for the elements that are put somewhere."""

    def __init__(self, pair: ProgramPair, crossings: Crossings) -> None:
        self._pair = pair
        self._kind = crossings.choose_kind()
        self._seed = pair.seed
        self._levels = pair.levels
        pair.seed += 1
        pair.coverage.asks_for_touches = pair.coverage.has_open_touches()

    def compare(self, elements: Sequence[Element]) -> tuple[Field, Differences]:
        """Compares both programs: the field of the draw, and the differences that the programs compared."""
        field = self._make_field(elements)
        differences = Differences()
        self._pair.coverage.differences = differences
        self._pair.compare(field)
        return field, differences

    def count(self, field: Field) -> None:
        """Counts a draw whose results were equal."""
        self._pair.count_run(field)
        self._pair.levels = self._levels  # the elements have a residue for each prime of these draws

    def run(self, elements: Sequence[Element]) -> Differences:
        """Runs both programs, and compares no results: the differences that the programs compared."""
        field = self._make_field(elements)
        differences = Differences()
        asks_for_touches = self._pair.coverage.asks_for_touches
        field.coverage = Coverage(differences=differences, identifies=False, asks_for_touches=asks_for_touches)
        for side, run in zip((ON_MESH, ALONE), self._pair.sides, strict=True):
            field.coverage.side = side
            run(field, None)
        return differences

    def _make_field(self, elements: Sequence[Element]) -> Field:
        return self._pair.make_field(FEWEST_POINTS, self._seed, kind=self._kind, crossed=True, elements=elements)


def _find_preferred(pair: ProgramPair) -> set[tuple[int, int]]:
    """The sides and equations whose comparisons, roundings or roots are most likely to tell both sides apart."""
    coverage = pair.coverage
    keys = [*coverage.list_foreign_keys(), *coverage.find_untied(), *coverage.list_foreign_rounding_keys()]
    places = {key.place for key in keys}
    if coverage.asks_for_touches:
        places |= coverage.touches
    return {(place.side, place.equation) for place in places}
