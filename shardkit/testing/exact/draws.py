"""How often two programs are run until they are equal for all inputs, or what is not decided is known by its line.

The first draw has all points, and bounds the chance that unequal programs agree where they branch as in it. Further
draws have other real inputs, and so other branches; their points and primes are as few as a difference needs to show.
Where a comparison went one way only, or only one side makes it, random orders take the branch that no draw has reached:
if both sides agree there too, they do whatever the comparison says. If they do not, it may be that no input goes there,
or that none of the draws did, which is no proof: "not decided", with the line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from shardkit.testing._compare import UnequalError
from shardkit.testing.exact.coverage import EQUALITY, INTEGERS, ORDER, Coverage, Decision
from shardkit.testing.exact.crossings import Crossings
from shardkit.testing.exact.hidden import find_hidden, find_hidden_tie
from shardkit.testing.exact.numbers.errors import UnknownValueError
from shardkit.testing.exact.numbers.field import KINDS, MIXED, SCALED, SIMILAR
from shardkit.testing.exact.program_pair import POINTS, Evidence, ProgramPair, Side, UndecidedError, UnprovableError

_MOST_IN_VAIN = 8
_BOTH_WAYS = 4  # orders, in which each comparison of unknown numbers goes both ways for each element
_SHOWN = 5  # draws, of which one must show a comparison that one side alone makes
_CROSSED_OF_FOREIGN = 4  # draws more for each comparison that one side alone makes, of so many
_MOST_FOREIGN = 16
_TOGETHER = 4  # elements that are put where comparisons change


class Effort(NamedTuple):
    """How much is run where programs compare floats.

    Attributes:
        draws: of real inputs, at least.
        most: of real inputs, where a comparison has not gone both ways.
        kinds: of the draws behind the first.
        scaled: the kinds of more draws, as long as a comparison has not gone both ways.
        identified: of the draws, in how many it is found out which differences are compared.
        ties: of inputs of which some are equal.
        crossed: of inputs of which single elements are put where a comparison changes.
        zeros: the same of programs without comparisons: elements are put where a divisor is zero.
        orders: the numbers of random ones, in turn, until all comparisons have gone both ways.
        foreign: how many of these at least, where only one side makes a comparison.
    """

    draws: int
    most: int
    kinds: tuple[str, ...]
    scaled: tuple[str, ...]
    identified: int
    ties: int
    crossed: int
    zeros: int
    orders: Sequence[int]
    foreign: int


def of_kernels(seconds: float) -> Effort:
    """More where a run takes few seconds: what hangs on several comparisons of few elements is seen in few draws."""
    runs = int(min(32, max(8, 0.3 / max(seconds, 1e-3))))
    draws = runs // 2
    kinds = (*KINDS[1:], "near", MIXED, SIMILAR)
    return Effort(
        draws,
        draws + 8,
        kinds,
        SCALED,
        4,
        ties=runs // 4,
        crossed=runs // 2,
        zeros=int(min(4, 0.04 / max(seconds, 1e-3))),
        orders=range(64),
        foreign=runs,
    )


# A step takes a second for each of these. Constants are above all positive numbers in order 1, below in order 2, and
# among them from order 4 on; this sequence has most steps go both ways in the fewest orders.
STEP = Effort(
    draws=1,
    most=1,
    kinds=("narrow",),
    scaled=(),
    identified=1,
    ties=0,
    crossed=0,
    zeros=0,
    orders=(1, 7, 2, 4),
    foreign=1,
)


def equal(
    where: str,
    subject: str,
    names: Sequence[str],
    sides: tuple[Side, Side],
    points: int,
    effort: Effort,
    values: int | None = None,
    with_unused: Side | None = None,
) -> Evidence:
    """Runs the program on the mesh and the one alone in the same fields, and refuses results that differ.

    Errors begin with `where`, those of a difference with `subject`. The first `values` of the results are no gradients;
    by default none is. `with_unused` is the program on the mesh with what no result needs, in which a line is looked
    for.
    """
    pair = ProgramPair(where, subject, names, sides, len(names) if values is None else values, with_unused)
    # Real values may overflow, or be no numbers, in a branch that is not taken: what that means is decided afterwards.
    with np.errstate(all="ignore"):
        evidence = _run_all(pair, points, effort)
        if pair.needs_laws and not pair.by_laws and evidence.decisions:
            # Which comparisons both sides make, and where they are of equal numbers, is then told by these laws too.
            pair = replace(pair, coverage=Coverage(), draws=0, orders=0, by_laws=True)
            evidence = _run_all(pair, points, effort)
        return evidence


def _run_all(pair: ProgramPair, points: int, effort: Effort) -> Evidence:
    try:
        pair.run(max(points, POINTS), kind=KINDS[0])
    except UnknownValueError:  # values beyond floats, or a function that has none here: orders alone
        pair.run(max(points, POINTS), order=effort.orders[0])
    field = pair.field
    branches = field.compared or field.chances or (field.domains and effort.crossed)
    if field.order is None and (branches or pair.excluded() or not pair.defined):
        _draw(pair, effort)
    if field.order is None:
        _cross(pair, effort)
    pair.coverage.identifies = False
    _order(pair, effort)
    _check_domains(pair)
    _check_coincidences(pair)
    if effort.crossed:
        _check_numbers(pair)
        _check_ties(pair)
        _check_hidden(pair, effort)
    return pair.evidence()


def _check_domains(pair: ProgramPair) -> None:
    """Refuses programs of which a result was not compared in any draw, or that no draw shows to be equal as a whole."""
    name, line = pair.excluded(), pair.outside or "an unknown line"
    if name:
        raise UndecidedError(
            f"{pair.where}: not decided at {line}: in every draw the {name} is outside of the domain of a function, "
            "as of the logarithm of a negative number. Write it so that both sides take it of the same sign, or "
            "compare floats with assert_matches_reference."
        )
    if not pair.draws and pair.field.domains:
        raise UndecidedError(
            f"{pair.where}: not decided: real values are beyond floats in every draw, so that none shows where a "
            "logarithm or a root has a value. Scale the numbers down, or compare floats with assert_matches_reference."
        )
    if pair.draws and not pair.defined:
        raise UndecidedError(
            f"{pair.where}: not decided at {line}: in every draw one side alone is outside of the domain of a "
            "function, as of the logarithm of a negative number, and so NaN where the other is a number. Write it so "
            "that both sides take it of the same numbers, or compare floats with assert_matches_reference."
        )


def _check_coincidences(pair: ProgramPair) -> None:
    """Refuses a question whether numbers are equal that are so by a law that a proof does not know."""
    for line, name in pair.coverage.coincidences.items():
        raise UndecidedError(
            f"{pair.where}: not decided at {line} ({name}): numbers that it takes for different ones are equal in "
            "float64 for all inputs that were drawn, so that they may be so by a law that no proof knows. Write both "
            "alike, or compare floats with assert_matches_reference."
        )


def _check_numbers(pair: ProgramPair) -> None:
    """Refuses a result of which an element was NaN in every run, if comparisons may make it a number."""
    # Where no comparison decides, as behind a mask of constants, NaN on both sides is so for all inputs. Else both
    # sides may differ where it is a number, which no run has reached: as `x / y` and `y / x` of a row that is zero
    # unless x is between two close thresholds.
    decisions = pair.coverage.free()
    for name, numbers in pair.numbers.items():
        if decisions and not numbers.all():
            decision, count = decisions[0], int((~numbers).sum())
            raise UndecidedError(
                f"{pair.where}: not decided at {decision.line} ({decision.what}): {count} of {numbers.size} elements "
                f"of the {name} are NaN on both sides for all inputs that were drawn, but need not be for others. "
                "Shrink the program to the part that gives numbers, or compare floats with assert_matches_reference."
            )


def _check_ties(pair: ProgramPair) -> None:
    """Refuses a comparison in which the sides treat equal numbers otherwise, if no draw made the numbers equal."""
    for decision in pair.coverage.untied():
        raise UndecidedError(
            f"{pair.where}: not decided at {decision.line} ({decision.what}): one side takes equal numbers for the "
            "larger, the other for the smaller, and in no draw they were equal. Compare alike on both sides, or "
            "compare floats that are equal with assert_matches_reference."
        )


def _check_hidden(pair: ProgramPair, effort: Effort) -> None:
    """Refuses a comparison that one side alone makes, if no result of any draw depends on it."""
    if pair.field.order is not None:
        return
    decision = find_hidden(pair, effort.kinds[:_SHOWN])
    what = "only one side makes this comparison, and no result of any draw depends on it"
    if decision is None:
        decision = find_hidden_tie(pair)
        what = (
            "one side takes equal numbers for the larger, the other for the smaller, and no result of any draw depends "
            "on it"
        )
    if decision is not None:
        raise UndecidedError(
            f"{pair.where}: not decided at {decision.line} ({decision.what}): {what}, though other numbers do. "
            "Compare alike on both sides, or return what it chooses as a result too."
        )


def _draw(pair: ProgramPair, effort: Effort) -> None:
    """More draws of real inputs, until all comparisons have gone both ways."""
    coverage = pair.coverage
    for kind in [*effort.kinds, *[""] * effort.most]:
        waiting = coverage.open(ORDER) or coverage.open(INTEGERS)
        enough = pair.draws >= (effort.most if waiting else effort.draws)
        missing = pair.excluded() or not pair.defined or any(decision.joined for decision in waiting)
        if (enough and not missing) or pair.draws >= effort.most + len(effort.kinds):
            break
        coverage.identifies = pair.draws < effort.identified
        pair.draw(kind)
    for kind in effort.scaled:
        if coverage.open(ORDER):
            pair.draw(kind)
    coverage.identifies = False
    # Integers that follow from floats, as how many tokens an expert has, are extreme where all rows are alike.
    if effort.ties and coverage.open(INTEGERS):
        pair.draw("alike")
    for _ in range(effort.ties):
        pair.draw("repeated")
    if coverage.open(EQUALITY):
        pair.draw("zero")
    if coverage.open(EQUALITY):  # zeros may make that no number
        pair.draw("")


def _cross(pair: ProgramPair, effort: Effort) -> None:
    """Draws in which comparisons change, or a divisor is zero, one more in each."""
    count = _count_crossings(pair, effort)
    crossings = Crossings()
    last = pair.draws + count
    # What hangs on several comparisons is seen in few draws, so some of them share their inputs.
    for _ in range(count):
        if pair.draws < last:
            pair.cross(crossings, min(_TOGETHER, last - pair.draws))


def _count_crossings(pair: ProgramPair, effort: Effort) -> int:
    if pair.coverage.decisions or pair.field.rounds:
        # `x > 0.5` on one side and `x > 0.6` on the other differ for the x between both alone: draws find it where x is
        # put next to one of them.
        foreign = min(len(pair.coverage.foreign()), _MOST_FOREIGN)
        return effort.crossed + _CROSSED_OF_FOREIGN * foreign if effort.crossed else 0
    return effort.zeros if pair.field.divides else 0


def _order(pair: ProgramPair, effort: Effort) -> None:
    """Random orders, where a comparison went one way or only one side makes it."""
    coverage = pair.coverage
    foreign = coverage.foreign()
    waiting = coverage.open(ORDER)
    partial = coverage.partial() if effort.crossed else []
    rounded = [*coverage.foreign_roundings(), *coverage.one_sided_roundings()]
    suspects = [*waiting, *foreign, *coverage.open(EQUALITY), *partial]
    if not suspects:
        return
    count = _BOTH_WAYS if partial else 0
    if foreign:
        count = effort.foreign
    try:
        for order in effort.orders:
            # An order may choose another largest number, which then equals it. What eight orders leave open, all do.
            still = coverage.open(ORDER) or coverage.open(EQUALITY)
            if pair.orders >= count and (not still or pair.orders >= _MOST_IN_VAIN):
                break
            pair.run(POINTS, order=order)
    except UnequalError as error:
        raise UndecidedError(_undecided(pair.where, suspects[0], waiting, foreign)) from error
    except UnprovableError as error:
        # As of an integer that says which element: there is none in an order, and draws alone say too little of it.
        unknown = [*waiting, *rounded]
        if unknown:
            raise UndecidedError(_undecided(pair.where, unknown[0], waiting, foreign)) from error
    never = coverage.open(EQUALITY)
    if never:
        raise UndecidedError(_undecided(pair.where, never[0], never, ()))


def _undecided(where: str, decision: Decision, waiting: Sequence[Decision], foreign: Sequence[Decision]) -> str:
    how = "the sides differ where this comparison goes another way for some elements than it did in any draw"
    if any(decision is other for other in foreign):
        how = "only one side makes this comparison, and the sides differ where it alone goes another way"
    if any(decision is other for other in waiting):
        how = f"this comparison was {decision.outcome} for all inputs that were drawn, but need not be for others"
    return (
        f"{where}: not decided at {decision.line} ({decision.what}): {how}. Compare alike on both sides, or compare "
        "floats for inputs of both kinds with assert_matches_reference."
    )
