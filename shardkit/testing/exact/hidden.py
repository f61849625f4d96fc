"""Comparisons whose outcome no result of any draw shows: if the sides differ in them, the draws say nothing about it.

Worked example: one side computes `min(where(x > 0.5, a, b), c)`, the other `min(where(x > 0.6, a, b), c)`, and c is
smaller than a and b in all draws. Both sides agree, whichever way their comparisons go. They do not agree for an x of
0.55 and a large c. So a comparison that only one side makes is turned round, for all elements at once:

    the results change                     the draws would have shown a wrong branch
    no number changes                      both branches are equal there: the comparison decides nothing
    the change ends at a choice, `min`     the choice is turned round too. If the results then depend on the comparison,
                                           the choice hid it: "not decided"

Nothing hides the maximum that softmax subtracts: whatever is subtracted, the quotient is the same. A choice that
cannot be turned round, as the largest of a row, counts as one that hides if nothing else ends the change.

Where one side compares `x > y` and the other `x >= y`, each is turned round for equal numbers alone, in the draws that
have some. A rounding, and which element is the largest of a row, are not turned round; nor are single elements of a
comparison, of which others may be seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import numpy as np

from shardkit.testing.exact.decision import Decision, Key
from shardkit.testing.exact.forms import sign_value
from shardkit.testing.exact.numbers.errors import NO_VALUE, CollectiveError, UnsupportedError
from shardkit.testing.exact.numbers.field import EVERYWHERE, TIES, Field
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.pieces import DiffersError
from shardkit.testing.exact.program_pair import ProgramPair, Side
from shardkit.testing.exact.record import Event, Record
from shardkit.testing.exact.rules.operands import Operand
from shardkit.testing.exact.rules.primitive_rules import ORDERED

# A draw that has no meaning, or none with comparisons turned round.
_MEANINGLESS = (DiffersError, CollectiveError, *NO_VALUE, UnsupportedError)
# What takes one of two numbers, or says which is larger: for other inputs it takes the other one.
_CHOICES = {*ORDERED, "select_n", "round", "floor", "ceil", "lt_to", "le_to"}
_MOST_TURNED = 6  # choices that may hide a comparison in a draw
# By an equation's id and the part of it that compares, where it is turned round: EVERYWHERE, TIES or bool [...].
Turned = Mapping[tuple[int, str], np.ndarray | str]


def find_hidden(pair: ProgramPair, kinds: Sequence[str]) -> Decision | None:
    """A comparison that only one side makes, and that no result shows in draws of these kinds; None if there is none.

    Cost: a run of a side for each draw, and one for each such comparison and draw until a result shows it: mostly the
    first draw does. Where none does, two more for each choice that may hide it.
    """
    draws_by_side: dict[int, list[_Draw]] = {}
    for key in pair.coverage.list_foreign_keys():
        if key.place.side not in draws_by_side:
            draws_by_side[key.place.side] = _list_draws(pair, key.place.side, kinds)
        if _is_hidden(key, draws_by_side[key.place.side], EVERYWHERE):
            return pair.coverage.decisions[key]
    return None


def find_hidden_tie(pair: ProgramPair) -> Decision | None:
    """A comparison in which the sides treat equal numbers otherwise, and no result of any draw that has them shows it.

    Numbers of one sign are left out. Worked example: `relu(x) + relu(y) > 0` is false only where the choices of both
    relus hide it from all results, and no input turns these round while the sum is zero.

    Cost: as `find_hidden`.
    """
    for key in pair.coverage.find_differing_ties():
        if np.any(pair.coverage.decisions[key].is_forced_by_signs):
            continue
        draws = [_Draw(pair, key.place.side, field) for field in pair.make_tied_fields(key)]
        if _is_hidden(key, draws, TIES):
            return pair.coverage.decisions[key]
    return None


def find_tie_without_effect(pair: ProgramPair, kinds: Sequence[str]) -> Decision | None:
    """A comparison in which the sides treat equal numbers otherwise, and that met them only where they change nothing.

    Worked example: one side computes `where(x > 1, a, 0) * mask`, the other `where(x >= 1, a, 0) * mask`, with a mask
    (1, 0, 0). A draw in which only x[1] is 1 says nothing. In other draws the comparison is turned round for element 1,
    which was met, and no result changes; for the others, which were not, and one does.

    Cost: for each such comparison two runs a draw, until a result changes.
    """
    for key, differs in pair.coverage.find_differing_ties().items():
        decision = pair.coverage.decisions[key]
        if np.any(decision.is_forced_by_signs):
            continue
        was_met = differs & decision.was_tied
        was_missed = differs & ~was_met
        if not was_met.any() or not was_missed.any():
            continue
        draws = _list_draws(pair, key.place.side, kinds)
        if not _changes_a_result(key, draws, was_met) and _changes_a_result(key, draws, was_missed):
            return decision
    return None


def _list_draws(pair: ProgramPair, side: int, kinds: Sequence[str]) -> list[_Draw]:
    """A draw of each kind."""
    draws = []
    for seed, kind in enumerate(kinds):
        draws.append(_Draw(pair, side, pair.make_silent_field(seed, kind)))
    return draws


def _turn(key: Key, where: np.ndarray | str) -> Turned:
    """One comparison that is turned round."""
    return {(key.place.equation, key.place.part): where}


def _changes_a_result(key: Key, draws: Iterable[_Draw], where: np.ndarray) -> bool:
    """Whether a result of some draw depends on these elements of a comparison."""
    for draw in draws:
        with suppress(*_MEANINGLESS):
            if draw.run(_turn(key, where)).results != draw.plain.results:
                return True
    return False


def _is_hidden(key: Key, draws: Iterable[_Draw], where: np.ndarray | str) -> bool:
    """Whether choices hide the outcome of a comparison in all draws in which numbers depend on it.

    Worked example: `max(where(x > 0, y / x, 0), z)` beside one with `x >= 0`. At x = 0 a positive y makes one side
    infinite, which is not compared, and of a negative y the maximum is z. So no draw tells that 0 may be larger than z.
    """
    turned = _turn(key, where)
    hides = False
    tells = False
    is_excluded = False
    for draw in draws:
        try:
            plain = draw.plain
            changed = draw.run(turned)
        except _MEANINGLESS:
            continue
        if changed.results == plain.results:
            tells = True
            hides = hides or draw.hides(turned, changed)
        elif where is TIES and not (plain.are_numbers and changed.are_numbers):
            # With equal numbers a divisor may be zero, and whether one side alone is infinite then is not compared.
            is_excluded = True
        else:
            return False
    return hides or (is_excluded and not tells)


def _is_mask(x: Operand) -> bool:
    return not isinstance(x, Exact) and x.dtype == bool


class _Draw:
    """A side in one draw, as it is and with comparisons turned round. Only the run as it is is kept: a run is large."""

    def __init__(self, pair: ProgramPair, side: int, field: Field):
        self._side: Side = pair.sides[side]
        self._field = field
        # The parts of each equation that compare.
        self._parts: dict[int, set[str]] = {}
        for key in pair.coverage.decisions:
            if key.place.side == side:
                self._parts.setdefault(key.place.equation, set()).add(key.place.part)

    @cached_property
    def plain(self) -> _Run:
        """The side as it is."""
        return self.run({})

    def run(self, turned: Turned) -> _Run:
        """The side with comparisons turned round."""
        field = self._field.like()
        field.choices.turned = turned
        return _Run(self._side, field)

    def hides(self, turned: Turned, changed: _Run) -> bool:
        """Whether a choice hides a comparison from the results, which are those of `changed` too.

        A choice behind another one may hide it as well. Worked example: `min(min(w, c), d)`, where w depends on the
        comparison.

            turned round                                 the change ends at
            the comparison                               the first minimum
            beside it the first minimum                  the second minimum
            beside both the second minimum               nothing: the result changes, so that the choices hid it
        """
        ends = self.plain.find_ends(changed)
        names = {event.call.primitive for event in ends}
        if not names & _CHOICES:
            return False
        waiting, is_complete = self._find_turnable(self.plain.record, ends)
        tried = 0
        while waiting:
            choice = waiting.pop(0)
            tried += 1
            if tried > _MOST_TURNED:
                is_complete = False
                break
            try:
                before = self.run(choice)
                after = self.run({**turned, **choice})
            except _MEANINGLESS:  # that tells nothing, as if it could not be turned
                is_complete = False
                continue
            if after.results != before.results:
                return True
            further_choices, _ = self._find_turnable(before.record, before.find_ends(after))
            for further_choice in further_choices:
                if not further_choice.keys() <= choice.keys():
                    waiting.append({**choice, **further_choice})
        # Where all that ends the change are choices, one that was not turned counts as one that hides.
        return names <= _CHOICES and not is_complete

    def _find_turnable(self, record: Record, ends: Iterable[Event]) -> tuple[list[Turned], bool]:
        """The comparisons by which choices choose: their own, or those that their masks follow from.

        Returns:
            The comparisons, and whether all choices among the ends are turned with them.
        """
        turnable: dict[int, Turned] = {}
        is_complete = True
        for event in ends:
            if event.call.primitive not in _CHOICES:
                continue
            equations = [id(event.call.equation)]
            masks = [x for x in event.operands if _is_mask(x)]
            for number in sorted(record.find_causes(masks, up_to=tuple(ORDERED))):
                equations.append(id(record.events[number].call.equation))
            comparisons = [equation for equation in equations if equation in self._parts]
            for equation in comparisons:
                turnable[equation] = {(equation, part): EVERYWHERE for part in self._parts[equation]}
            if not comparisons:
                is_complete = False
        return list(turnable.values()), is_complete


class _Run:
    """A run of a side.

    Attributes:
        record: its values.
        results: signatures of the results.
        are_numbers: whether no element of a result is NaN or infinite.
    """

    def __init__(self, side: Side, field: Field):
        self.record = Record()
        self._field = field
        self._signatures: dict[int, Any] = {}
        results = side(field, self.record)
        self.results = self._sign_all(results)
        self.are_numbers = not any(isinstance(x, Exact) and x.special for x in results)

    def find_ends(self, other: _Run) -> list[Event]:
        """The events that read other numbers in another run, and give the same results.

        Worked example: a comparison is turned round in `y = where(x > 1, x, 2 * x); min(y, 0) + (y - y)`. The results
        of `where` are other ones, and those of `min` and `sub` are the same: these two.
        """
        ends = []
        for key, event in self._events.items():
            twin = other._events.get(key)
            if twin is None:  # of a branch that is not taken
                continue
            if self._sign_all(event.results) != other._sign_all(twin.results):
                continue
            if self._sign_numbers(event) != other._sign_numbers(twin):
                ends.append(event)
        return ends

    @cached_property
    def _events(self) -> dict[Any, Event]:
        """The events by their equation, and how often it ran before."""
        rounds: Counter[Any] = Counter()
        events = {}
        for event in self.record.events:
            key = (*event.call.key, len(event.call.axes))
            events[*key, rounds[key]] = event
            rounds[key] += 1
        return events

    def _sign_numbers(self, event: Event) -> list[Any]:
        """Signatures of the operands that are no masks: of two masks it matters only what they choose."""
        return self._sign_all([x for x in event.operands if not _is_mask(x)])

    def _sign_all(self, values: Sequence[Operand]) -> list[Any]:
        """Signatures of values. The record keeps all values, so that no two of them have one id."""
        signatures = []
        for x in values:
            if id(x) not in self._signatures:
                self._signatures[id(x)] = sign_value(self._field, x)
            signatures.append(self._signatures[id(x)])
        return signatures
