"""How often two programs are run, until they are equal for all inputs, or a line is known that leaves it undecided.

The first draw has all points, and bounds the chance that unequal programs agree where they branch as in it. Further
draws have other real inputs, and so other branches; their points and primes are as few as a difference needs to show.
Where a comparison went one way only, or only one side makes it, random orders take the branch that no draw has reached.
If both sides agree there too, they do whatever the comparison says. If they do not, it may be that no input goes there,
or that some input does which was not drawn: "not decided", with the line.

Worked example: `where(x > 3, x, 0)` on both sides. In the first draw no element of x is above 3.

    draw "normal"       x = (0.4, -1.2)    all elements below 3: the comparison is open
    draw "wide"         x = (9.1, -4.0)    one is above 3, and both sides are equal: it has gone both ways
    an order            only if no draw had any above 3: some random order puts x above the constant 3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from shardkit.testing._compare import UnequalError
from shardkit.testing.exact.chosen_inputs import draw_across, draw_at, draw_together
from shardkit.testing.exact.coverage import Coverage
from shardkit.testing.exact.crossings import Crossings
from shardkit.testing.exact.decision import EQUALITY, INTEGERS, ORDER, Decision
from shardkit.testing.exact.evidence import Evidence, UndecidedError, UnprovableError
from shardkit.testing.exact.float_inputs import Propose
from shardkit.testing.exact.hidden import find_hidden, find_hidden_tie, find_tie_without_effect
from shardkit.testing.exact.numbers.errors import UnknownValueError
from shardkit.testing.exact.numbers.field import ANY, KINDS, MIXED, NARROW, ROWS, SCALED, SIMILAR, WHOLE
from shardkit.testing.exact.program_pair import POINTS, ProgramPair, Side

# After so many orders no more are tried for comparisons that went one way only.
_MOST_IN_VAIN = 8
# In so many orders each comparison of unknown numbers goes both ways for each element.
_BOTH_WAYS = 4
# A comparison that one side alone makes is turned round in up to so many draws, until one shows it.
_SHOWN = 5
# For each comparison that one side alone makes, up to so many, there are so many draws more in which elements are put
# where comparisons change.
_MOST_FOREIGN = 16
_CROSSED_OF_FOREIGN = 4
# So many inputs at least are tried in floats, also of programs that take long in the field.
_FEWEST_FLOATS = 512
# Of which so many at least become draws, if both sides differ.
_FEWEST_PROPOSED = 8
# So many elements are put where comparisons change, in draws that share all other inputs.
_TOGETHER = 4
# So many rows, or arrays, are put there in draws that share three runs.
_ROWS_TOGETHER = 6


class Effort(NamedTuple):
    """How many runs programs get that compare floats.

    Attributes:
        draws: the least number of draws of real inputs.
        most: their largest number, while a comparison has not gone both ways.
        kinds: the kinds of inputs of the draws behind the first (`Settings.kind`).
        scaled: the kinds of further draws, as long as a comparison has not gone both ways.
        identified: in how many of the draws it is found out which differences are compared.
        ties: the number of draws in which some inputs are equal.
        crossed: the number of draws in which single elements are put where a comparison changes its answer.
        floats: of how many inputs floats choose those of further draws, if results depend on comparisons.
        zeros: the number of draws of programs without comparisons in which elements are put where a divisor is zero.
        orders: the numbers of the random orders that may be tried, until all comparisons have gone both ways.
        foreign_orders: the least number of orders where only one side makes a comparison.
    """

    draws: int
    most: int
    kinds: tuple[str, ...]
    scaled: tuple[str, ...]
    identified: int
    ties: int
    crossed: int
    floats: int
    zeros: int
    orders: Sequence[int]
    foreign_orders: int


def choose_effort(seconds: float) -> Effort:
    """The effort for a kernel of which one run takes so many seconds: more runs for a quick one.

    A difference that depends on several comparisons of few elements shows in few of the draws.
    """
    seconds = max(seconds, 1e-3)
    runs = int(min(32, max(8, 0.3 / seconds)))
    draws = runs // 2
    kinds = (*KINDS[1:], "near", MIXED, SIMILAR)
    return Effort(
        draws=draws,
        most=draws + 8,
        kinds=kinds,
        scaled=SCALED,
        identified=4,
        ties=runs // 4,
        crossed=runs // 2,
        floats=int(min(16384, max(_FEWEST_FLOATS, 16 / seconds))),
        zeros=int(min(4, 0.04 / seconds)),
        orders=range(64),
        foreign_orders=runs,
    )


# The effort for a training step, which takes a second for each run. Constants are above all positive unknowns in order
# 1, and below them in order 0. In this sequence the comparisons of most steps go both ways in one order or two.
STEP = Effort(
    draws=1,
    most=1,
    kinds=(NARROW,),
    scaled=(),
    identified=1,
    ties=0,
    crossed=0,
    floats=0,
    zeros=0,
    orders=(1, 0, 7, 2, 4),
    foreign_orders=1,
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
    propose: Propose | None = None,
) -> Evidence:
    """Runs the program on the mesh and the reference in the same fields, and refuses results that differ.

    Args:
        where: the name of the function that users called, which begins messages.
        subject: the beginning of a message that says that a result differs.
        names: the names of the results.
        sides: the program on the mesh, and the reference.
        points: the number of random points of the first draw.
        effort: how many runs there are.
        values: how many of the results are values, and not gradients; all of them by default.
        with_unused: the program on the mesh with the equations that no result needs, in which a line is looked for.
        propose: gives inputs for which both sides differ in floats; asked if results may depend on comparisons.

    Returns:
        What all runs have shown.
    """
    if values is None:
        values = len(names)
    pair = ProgramPair(where, subject, names, sides, values, with_unused)
    # Real values may overflow, or be NaN, in a branch that is not taken: numpy should not warn of them.
    with np.errstate(all="ignore"):
        evidence = _run_all(pair, points, effort, propose)
        if pair.needs_laws and not pair.by_laws and evidence.decisions:
            # All runs once more: by these laws it is also told which comparisons both sides make, and which are ties.
            pair = replace(pair, coverage=Coverage(), draws=0, orders=0, by_laws=True, tied_draws={})
            evidence = _run_all(pair, points, effort, propose)
        return evidence


def _run_all(pair: ProgramPair, points: int, effort: Effort, propose: Propose | None) -> Evidence:
    """All runs of two programs, and the checks of what the runs have left open."""
    points = max(points, POINTS)
    try:
        pair.run(points, kind=KINDS[0])
    except UnknownValueError:
        # Values are beyond floats, or a function has no real value here: no draw is possible, only orders.
        pair.run(points, order=effort.orders[0])
    field = pair.field
    can_draw = field.settings.order is None
    may_have_rare_inputs = field.notes.domains and effort.crossed
    if can_draw:
        has_branches = field.notes.compared or field.notes.chances or may_have_rare_inputs
        has_undefined = pair.elements.find_excluded() or not pair.elements.are_defined
        if has_branches or has_undefined:
            _draw(pair, effort)
        _cross(pair, effort)
    pair.coverage.identifies = False
    # Floats find rare inputs at which one side alone is NaN, too.
    if can_draw and (pair.coverage.depends_on_inputs() or may_have_rare_inputs):
        _draw_where_floats_differ(pair, effort, propose)
    _order(pair, effort)
    _check_domains(pair)
    _check_coincidences(pair)
    if effort.crossed:
        _check_numbers(pair)
        _check_ties(pair)
        if can_draw:
            _check_hidden(pair, effort)
    return pair.collect_evidence()


def _draw_where_floats_differ(pair: ProgramPair, effort: Effort, propose: Propose | None) -> None:
    """Draws at inputs for which both sides differ in floats: a wrong kernel differs in the field too."""
    if propose is None or not effort.floats:
        return
    proposals = propose(pair.make_silent_field(0, KINDS[0]), effort.floats)
    pair.lacks_floats = proposals is None
    if proposals is None:
        return
    most = max(_FEWEST_PROPOSED, 2 * effort.crossed)
    for inputs in proposals[:most]:
        draw_at(pair, inputs)


def _check_domains(pair: ProgramPair) -> None:
    """Refuses programs if an element of a result was not compared in any draw, or if no draw has compared all."""
    name = pair.elements.find_excluded()
    line = pair.elements.outside or "an unknown line"
    if name:
        raise UndecidedError(
            f"{pair.where}: not decided at {line}: in every draw the {name} is outside of the domain of a function, "
            "as of the logarithm of a negative number. Write it so that both sides take it of the same sign, or "
            "compare floats with assert_matches_reference."
        )
    if not pair.draws and pair.field.notes.domains:
        raise UndecidedError(
            f"{pair.where}: not decided: real values are beyond floats in every draw, so that none shows where a "
            "logarithm or a root has a value. Scale the numbers down, or compare floats with assert_matches_reference."
        )
    if pair.draws and not pair.elements.are_defined:
        raise UndecidedError(
            f"{pair.where}: not decided at {line}: in every draw one side alone is outside of the domain of a "
            "function, as of the logarithm of a negative number, and so NaN where the other is a number. Write it so "
            "that both sides take it of the same numbers, or compare floats with assert_matches_reference."
        )


def _check_coincidences(pair: ProgramPair) -> None:
    """Refuses a comparison `==` of numbers that are other ones in the field, but have the same real values.

    Worked example: `where(a == b, p, q)` where a and b are equal by a law that the field does not know. The field takes
    q, floats take p.
    """
    if not pair.coverage.coincidences:
        return
    line, name = next(iter(pair.coverage.coincidences.items()))
    raise UndecidedError(
        f"{pair.where}: not decided at {line} ({name}): numbers that it takes for different ones are equal in "
        "float64 for all inputs that were drawn, so that they may be so by a law that no proof knows. Write both "
        "alike, or compare floats with assert_matches_reference."
    )


def _check_numbers(pair: ProgramPair) -> None:
    """Refuses a result of which an element was a number in no run, if comparisons may make the element one.

    Where no comparison decides, as behind a mask of constants, NaN on both sides is NaN for all inputs. Where one does,
    the sides may differ at an input that makes the element a number, and that no run has reached: as `x / y` and
    `y / x` of rows that are zero unless x is between two close thresholds.
    """
    decisions = pair.coverage.list_free()
    if not decisions:
        return
    decision = decisions[0]
    unseen = pair.elements.find_without_numbers()
    if unseen is not None:
        name, elements = unseen
        raise UndecidedError(
            f"{pair.where}: not decided at {decision.line} ({decision.what}): {elements.sum()} of {elements.size} "
            f"elements of the {name} were NaN or infinite for all inputs that were drawn, but need not be for others. "
            "Shrink the program to the part that gives numbers, or compare floats with assert_matches_reference."
        )


def _check_ties(pair: ProgramPair) -> None:
    """Refuses `>` on one side and `>=` on the other, if no draw made the compared numbers equal."""
    for decision in pair.coverage.list_untied():
        if np.any(decision.is_forced_by_signs):
            raise UndecidedError(
                f"{pair.where}: not decided at {decision.line} ({decision.what}): one side alone asks whether a number "
                "of one sign is zero, as x**2 > 0 does, and in no draw it was. Compare alike on both sides, or compare "
                "floats for which it is zero with assert_matches_reference."
            )
        raise UndecidedError(
            f"{pair.where}: not decided at {decision.line} ({decision.what}): one side takes equal numbers for the "
            "larger, the other for the smaller, and in no draw they were equal. Compare alike on both sides, or "
            "compare floats that are equal with assert_matches_reference."
        )


def _check_hidden(pair: ProgramPair, effort: Effort) -> None:
    """Refuses a comparison that one side alone makes, if no result of any draw depends on it."""
    decision = find_hidden(pair, effort.kinds[:_SHOWN])
    what = "only one side makes this comparison, and no result of any draw depends on it"
    if decision is None:
        decision = find_hidden_tie(pair)
        what = (
            "one side treats equal numbers as if the first were larger, the other as if it were smaller, and no result "
            "of any draw depends on it"
        )
    if decision is not None:
        raise UndecidedError(
            f"{pair.where}: not decided at {decision.line} ({decision.what}): {what}, though other numbers do. "
            "Compare alike on both sides, or return what it chooses as a result too."
        )
    decision = find_tie_without_effect(pair, effort.kinds[:_SHOWN])
    if decision is not None:
        raise UndecidedError(
            f"{pair.where}: not decided at {decision.line} ({decision.what}): one side takes equal numbers for the "
            "larger, the other for the smaller, and they were equal only for elements on which no result depends. "
            "Compare alike on both sides, or compare floats that are equal with assert_matches_reference."
        )


def _draw(pair: ProgramPair, effort: Effort) -> None:
    """More draws of real inputs, until all comparisons have gone both ways."""
    coverage = pair.coverage
    any_kind = [ANY] * effort.most
    for kind in [*effort.kinds, *any_kind]:
        if _has_enough_draws(pair, effort):
            break
        coverage.identifies = pair.draws < effort.identified
        pair.draw(kind)
    for kind in effort.scaled:
        if coverage.list_open(ORDER):
            pair.draw(kind)
    coverage.identifies = False
    # Integers that follow from floats, as the number of an expert's tokens, are extreme where all rows are alike.
    if effort.ties and coverage.list_open(INTEGERS):
        pair.draw("alike")
    kinds = ["repeated", ROWS, ROWS]
    # The roots of 2, 3 and 6 have laws that those of unknown numbers do not have.
    if not pair.field.laws.roots.squares:
        kinds.append(WHOLE)
    for kind in kinds:
        for _ in range(effort.ties):
            pair.draw(kind)
    if coverage.list_open(EQUALITY):
        pair.draw("zero")
    # At zeros the compared numbers may be NaN, which are equal to nothing: one more draw without zeros.
    if coverage.list_open(EQUALITY):
        pair.draw(ANY)


def _has_enough_draws(pair: ProgramPair, effort: Effort) -> bool:
    """Whether there are so many draws as a program needs of which comparisons have gone one way, or both."""
    if pair.draws >= effort.most + len(effort.kinds):
        return True
    open_decisions = pair.coverage.list_open(ORDER) or pair.coverage.list_open(INTEGERS)
    fewest = effort.most if open_decisions else effort.draws
    if pair.draws < fewest:
        return False
    # What joins comparisons may be true for few inputs. And each element of a result must be a number in some draw.
    if any(decision.joins for decision in open_decisions):
        return False
    return not pair.elements.find_excluded() and pair.elements.are_defined


def _cross(pair: ProgramPair, effort: Effort) -> None:
    """Draws in which comparisons change, or a divisor is zero, one more in each."""
    count = _count_crossings(pair, effort)
    crossings = Crossings()
    last_draw = pair.draws + count
    # A difference that depends on several comparisons shows where several elements are put at the same time. A round
    # may come to nothing, as where no comparison depends on the element that was chosen.
    for _ in range(count):
        missing = last_draw - pair.draws
        if missing > 0:
            draw_across(pair, crossings, min(_TOGETHER, missing))
    # Where both sides compare otherwise, a difference may need all elements of a row.
    if count and (pair.coverage.list_foreign() or pair.coverage.find_differing_ties()):
        for _ in range(effort.crossed // _TOGETHER):
            draw_together(pair, crossings, _ROWS_TOGETHER)


def _count_crossings(pair: ProgramPair, effort: Effort) -> int:
    """How many such draws there are: none for a program that neither compares, rounds nor divides."""
    if pair.coverage.decisions or pair.field.notes.rounds:
        if not effort.crossed:
            return 0
        # `x > 0.5` on one side and `x > 0.6` on the other differ only for an x between both. Such a draw is likely
        # where x is put next to one of them.
        foreign = min(len(pair.coverage.list_foreign()), _MOST_FOREIGN)
        return effort.crossed + _CROSSED_OF_FOREIGN * foreign
    if pair.field.notes.divides:
        return effort.zeros
    return 0


def _order(pair: ProgramPair, effort: Effort) -> None:
    """Random orders, where a comparison went one way or only one side makes it."""
    coverage = pair.coverage
    foreign = coverage.list_foreign()
    waiting = coverage.list_open(ORDER)
    partial = coverage.list_partial() if effort.crossed else []
    rounded = [*coverage.list_foreign_roundings(), *coverage.list_one_sided_roundings()]
    # `where(x > 0, sqrt(-x), x)` is a number only where the root does not matter. An order has no domains: there
    # sqrt(-x) is another number than sqrt(x), and log(x * y) is log(x) + log(y).
    masked = coverage.list_free() if effort.crossed and pair.elements.alone else []
    suspects = [*waiting, *foreign, *coverage.list_open(EQUALITY), *partial, *masked]
    if not suspects:
        return
    count = 0
    if foreign:
        count = effort.foreign_orders
    elif partial or masked:
        count = _BOTH_WAYS
    try:
        _run_orders(pair, effort.orders, count)
    except UnequalError as error:
        raise UndecidedError(_describe_undecided(pair.where, suspects[0], waiting, foreign)) from error
    except UnprovableError as error:
        # An order has no value for an integer that a float was rounded to, as an index, and draws alone say too little.
        unknown = [*waiting, *rounded, *foreign]
        if unknown:
            raise UndecidedError(_describe_undecided(pair.where, unknown[0], waiting, foreign)) from error
    never = coverage.list_open(EQUALITY)
    if never:
        raise UndecidedError(_describe_undecided(pair.where, never[0], never, ()))


def _run_orders(pair: ProgramPair, orders: Sequence[int], count: int) -> None:
    """So many of the orders at least, and more until all comparisons have gone both ways."""
    coverage = pair.coverage
    unused_orders = list(orders)
    while unused_orders:
        waiting = coverage.list_open(ORDER)
        # An order may choose another largest number, which then equals it. What eight orders leave open, all do.
        is_open = waiting or coverage.list_open(EQUALITY)
        if pair.orders >= count and (not is_open or pair.orders >= _MOST_IN_VAIN):
            return
        order = _choose_order(unused_orders, waiting)
        unused_orders.remove(order)
        pair.run(POINTS, order=order)


def _choose_order(orders: Sequence[int], waiting: Sequence[Decision]) -> int:
    """The next order: the first one in which constants stand where comparisons that went one way wait for them.

    Worked example: `max(count, 1)`, where the count was below 1 in all draws. Constants are below all unknown numbers
    in order 0, above them in order 1, and below them with the other signs in order 2. If the count is negative in order
    0, it is above 1 in order 2.
    """
    excess = sum(int(np.sign(decision.excess)) for decision in waiting)
    # Even orders have constants below unknown numbers, odd ones above.
    parity = 1 if excess > 0 else 0
    for order in orders:
        if excess and order % 2 == parity:
            return order
    return orders[0]


def _describe_undecided(
    where: str, decision: Decision, waiting: Sequence[Decision], foreign: Sequence[Decision]
) -> str:
    """The message that a comparison leaves it undecided: it went one way only, or only one side makes it."""
    if any(decision is other for other in waiting):
        how = f"this comparison was {decision.outcome} for all inputs that were drawn, but need not be for others"
    elif any(decision is other for other in foreign):
        how = "only one side makes this comparison, and the sides differ where it alone goes another way"
    else:
        how = "the sides differ where this comparison goes another way for some elements than it did in any draw"
    return (
        f"{where}: not decided at {decision.line} ({decision.what}): {how}. Compare alike on both sides, or compare "
        "floats for inputs of both kinds with assert_matches_reference."
    )
