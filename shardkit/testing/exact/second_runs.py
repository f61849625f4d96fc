"""Second runs of two programs that differ: they may be equal if a constant is another number, or if no float decides.

A run takes constants as they are written, and decides comparisons by float64. Neither is the last word: a compiler has
computed 0.81 in float32, and float64 rounds log(exp(x)) of a tiny x to zero. So before a difference is told, the same
field is run with other choices (`Choices`), and the programs are equal if they are so with one of these. Each choice is
as true as the first one: a constant stands for what it was computed of, and equal numbers have one place in the order.

Worked example: `log(2 * y) - log(2)` and `log(y)`.

    log(2) in float32                    0.6931472 is no logarithm of a number: the sides differ
    `exact_functions`                    (0, 2 y) less (0, 2) is (0, y): equal
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from shardkit.testing.exact.agreement import agree_in_float32
from shardkit.testing.exact.coverage import ALONE, ON_MESH, Coverage
from shardkit.testing.exact.evidence import UndecidedError
from shardkit.testing.exact.numbers.errors import NO_VALUE
from shardkit.testing.exact.numbers.field import Choices, Field
from shardkit.testing.exact.numbers.folded import explain_constants, explain_inverses
from shardkit.testing.exact.numbers.values import Exact


class Results(NamedTuple):
    """The results of both sides in one run.

    Attributes:
        pairs: the results that are compared, of the program on the mesh and of the reference.
        equal: for each pair bool [...], where it is equal.
        field: the field in which the results were compared.
        coverage: the comparisons that count.
    """

    pairs: list[tuple[Exact, Exact]]
    equal: list[np.ndarray]
    field: Field
    coverage: Coverage

    def are_equal(self) -> bool:
        """Whether all elements of all results are equal."""
        return all(mask.all() for mask in self.equal)


# Runs both programs in a field, and compares their results.
Run = Callable[[Field], Results]


def run_again(run: Run, subject: str, field: Field, results: Results) -> Results:
    """Results of the same field that are equal, if some choices make them so; else results that differ.

    Args:
        run: runs both programs.
        subject: the beginning of a message.
        field: the field of the first run.
        results: the results of the first run.

    Raises:
        UndecidedError: a number that is compared is zero in float64 and not in the field.
    """
    with_folded = _run_with_folded_constants(run, field, results)
    if with_folded is not None and with_folded.are_equal():
        return with_folded
    # Where no choice makes them equal, those with folded constants differ by the fewest constants.
    return _run_without_floats(run, subject, field) or with_folded or results


def _run_with_folded_constants(run: Run, field: Field, results: Results) -> Results | None:
    """Results in which constants of a side stand for the numbers from which they were computed; None without any.

    A compiled program may have the inverse of a constant, to multiply by it. That comes first, then the results of one
    or two operations.
    """
    if field.settings.order is not None:
        return None
    traced = field.notes.stored.get(ALONE, set()) | field.notes.constants.get(ALONE, set())
    inverses = explain_inverses(field.notes.stored.get(ON_MESH, set()), traced)
    if inverses.keys() <= field.choices.folded.keys():
        return _run_with_computed_constants(run, field, results)
    field_with_inverses = field.with_folded(inverses)
    with suppress(*NO_VALUE):
        with_inverses = run(field_with_inverses)
        if with_inverses.are_equal():
            return with_inverses
        # Also if these differ: the first wrong value is then none that has the inverse in it.
        return _run_with_computed_constants(run, field_with_inverses, with_inverses) or with_inverses
    return None


def _run_with_computed_constants(run: Run, field: Field, results: Results) -> Results | None:
    """Equal results, if constants of a side stand for the results of one or two operations; else None.

    That is tried only where both sides are equal but for rounding: of a difference of two such constants little would
    be true.
    """
    if not all(agree_in_float32(field, x, y) for x, y in results.pairs):
        return None
    on_mesh = field.notes.constants.get(ON_MESH, set())
    alone = field.notes.constants.get(ALONE, set())
    folded = explain_constants(on_mesh, alone) or explain_constants(alone, on_mesh)
    # Two operations give the bits of many constants, also of some that need not stand for anything.
    folded_by_one = {constant: number for constant, number in folded.items() if number.operations == 1}
    for candidates in (folded_by_one, folded):
        if not candidates:
            continue
        with suppress(*NO_VALUE):
            with_computed = run(field.with_folded(candidates))
            if with_computed.are_equal():
                return with_computed
    return None


def _run_without_floats(run: Run, subject: str, field: Field) -> Results | None:
    """Equal results, if it was a float that told the programs apart, and no number of the field; else None.

    A program that has 0.6931472 in place of log(2) may be equal to log(2) in float32 alone. So functions of constants
    are taken as in the run before, and the other way if the results differ.
    """
    for choices in _list_choices(field):
        other_field = field.like()
        other_field.choices = choices
        with suppress(*NO_VALUE):
            results = run(other_field)
            if results.are_equal():
                return results
        if other_field.notes.lost:
            raise UndecidedError(
                f"{subject}not decided: the sides differ for inputs for which float64 rounds a number to zero that is "
                "compared. Compare floats for such inputs with assert_matches_reference."
            )
    return None


def _list_choices(field: Field) -> list[Choices]:
    """The choices by which floats decide less: functions of constants in the field, one place for equal numbers.

    Worked example: a program of `log(2.0) * x` and of a comparison is run with `log(2)` in the field, then with
    `same_keys`, then with both.
    """
    choices = field.choices
    candidates = []
    if field.notes.rounded and not field.compiled:
        candidates.append(replace(choices, exact_functions=not choices.exact_functions))
    if field.settings.order is None and field.notes.compared:
        with_same_keys = [replace(candidate, same_keys=True) for candidate in (choices, *candidates)]
        candidates += with_same_keys
    return candidates
