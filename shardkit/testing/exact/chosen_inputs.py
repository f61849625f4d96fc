"""Draws whose inputs are chosen: at real values that floats propose, or where a comparison changes its answer.

Few of the inputs that are drawn at random come near the place where one program branches otherwise than the other. So
some draws are led there: `float_inputs.py` proposes real values for which both sides differ in floats, `crossings.py`
solves for the value of one element at which a comparison compares equal numbers.

Worked example: `where(x > 1, x, 0)` and `where(x >= 1, x, 0)` differ for an x of 1 alone. No random draw meets it; a
draw across the crossing of x - 1 puts an element of x there, modulo each prime and as a float.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from shardkit.testing.exact.coverage import ALONE, ON_MESH, Coverage
from shardkit.testing.exact.crossings import Crossings, Differences
from shardkit.testing.exact.decision import DecisionPlace
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
    kind = crossings.choose_kind()
    seed = pair.seed
    pair.seed += 1
    levels = pair.levels
    pair.coverage.asks_for_touches = pair.coverage.has_open_touches()
    elements: list[Element] = []
    try:
        field, differences = _compare_with_differences(pair, seed, kind, elements)
        for _ in range(count):
            element = _find_crossing(pair, field, crossings, elements, differences)
            if element is None:
                return
            elements.append(element)
            field, differences = _compare_with_differences(pair, seed, kind, elements)
            pair.count_run(field)
            pair.levels = levels  # the elements have a residue for each prime of these draws
            crossings.note_end(pair.coverage.tried)
    except NO_VALUE:
        return
    # It is an UnprovableError too, but one that says something of the programs, and not only of these inputs.
    except UndecidedError:
        raise
    except UnprovableError:  # as of a loop that does not end for inputs like these
        return
    finally:
        pair.coverage.differences = None


def draw_together(pair: ProgramPair, crossings: Crossings, count: int) -> None:
    """Draws of the same inputs, in each of which one comparison changes its answer for a row, or all of an array.

    Args:
        pair: both programs.
        crossings: chooses the comparisons.
        count: the number of draws.
    """
    kind = crossings.choose_kind()
    seed = pair.seed
    pair.seed += 1
    levels = pair.levels
    pair.coverage.asks_for_touches = pair.coverage.has_open_touches()
    try:
        field, before = _compare_with_differences(pair, seed, kind, ())
        moved = move_all(crossings, field)
        if moved is None:
            return
        alike = _find_differences(pair, field, moved.alike)
        apart = _find_differences(pair, field, moved.apart)
        joint = JointCrossings(crossings, field, moved, before, alike, apart)
        for _ in range(count):
            elements = joint.solve(_find_preferred(pair))
            if not elements:
                return
            field, _ = _compare_with_differences(pair, seed, kind, elements)
            pair.count_run(field)
            pair.levels = levels  # the elements have a residue for each prime of these draws
    except NO_VALUE:
        return
    # It is an UnprovableError too, but one that says something of the programs, and not only of these inputs.
    except UndecidedError:
        raise
    except UnprovableError:  # as of a loop that does not end for inputs like these
        return
    finally:
        pair.coverage.differences = None


def _compare_with_differences(
    pair: ProgramPair, seed: int, kind: str, elements: Sequence[Element]
) -> tuple[Field, Differences]:
    """Compares both programs in a draw with these elements: its field, and the differences that were compared."""
    field = pair.make_field(FEWEST_POINTS, seed, kind=kind, crossed=True, elements=elements)
    differences = Differences()
    pair.coverage.differences = differences
    pair.compare(field)
    return field, differences


def _find_crossing(
    pair: ProgramPair, field: Field, crossings: Crossings, elements: Sequence[Element], before: Differences
) -> Element | None:
    """One more element with a value at which a comparison changes, by a run in which the element is moved."""
    moved = crossings.move(field, elements)
    if moved is None:
        return None
    after = _find_differences(pair, field, [*elements, moved])
    return crossings.solve(field, moved, before, after, _find_preferred(pair))


def _find_differences(pair: ProgramPair, field: Field, elements: Sequence[Element]) -> Differences:
    """The differences that both programs compare in the draw of a field, with these elements; nothing is compared."""
    settings = field.settings
    field = pair.make_field(FEWEST_POINTS, settings.seed, kind=settings.kind, crossed=True, elements=elements)
    differences = Differences()
    field.coverage = Coverage(
        differences=differences, identifies=False, asks_for_touches=pair.coverage.asks_for_touches
    )
    for side, run in zip((ON_MESH, ALONE), pair.sides, strict=True):
        field.coverage.side = side
        run(field, None)
    return differences


def _find_preferred(pair: ProgramPair) -> set[DecisionPlace]:
    """The comparisons that are most likely to tell both sides apart."""
    keys = [*pair.coverage.list_foreign_keys(), *pair.coverage.find_untied()]
    preferred = {key.place for key in keys}
    if pair.coverage.asks_for_touches:
        preferred |= pair.coverage.touches
    return preferred
