"""Which way all comparisons went: what a proof has seen of the branches of two programs, and what it has not.

`decision.py` says what is known of one comparison. Here are those of both programs: `Coverage` notes them in each run,
and answers what the runs have left open.

Worked example: the kernel computes `where(x > 1, a, b)`, the reference `where(x > 1.01, a, b)`, with x = 2 in one draw
and x = 0.5 in the next.

    list_open(ORDER)    none: in both programs the comparison went both ways
    list_foreign()      both: x - 1 is compared on one side alone, and so is x - 1.01

A comparison that only one side makes is the dangerous one: where both programs compare x with 1, they branch alike, and
a draw sees both branches of both; where one compares x with 1 and the other with 1.01, they differ for few inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from dataclasses import field as attribute
from typing import Any

import numpy as np

from shardkit.testing.exact.crossings import DIVISOR, JUMP, TOUCH, Differences
from shardkit.testing.exact.decision import (
    EQUALITY,
    INTEGERS,
    ORDER,
    Decision,
    DecisionPlace,
    Key,
    Ties,
    count_excess,
    find_constants,
    find_known_signs,
    find_ties,
    hash_difference,
    list_logs,
    list_logs_of_constants,
    subtract_at_points,
)
from shardkit.testing.exact.numbers.field import COINCIDING, NARROW, Field
from shardkit.testing.exact.numbers.hashing import mix
from shardkit.testing.exact.numbers.logarithms import to_number
from shardkit.testing.exact.numbers.orders import find_equal
from shardkit.testing.exact.numbers.square_roots import find_squares
from shardkit.testing.exact.numbers.values import Exact

ON_MESH, ALONE = 0, 1
# What asks whether numbers are equal: which one is the largest, as `x == max(x)`, or which is zero, as a cast to bool.
_EQUALITIES = ("eq", "ne", "convert_element_type", "select_and_scatter_add", "select_and_gather_add")
# What returns the places of numbers among others.
_PLACES = ("argmax", "argmin", "sort", "top_k", "approx_top_k")
_ROUNDING = 1e-12  # of the numbers that are compared
_OF_SIZE_ONE = ("normal", "positive", "unit", "negative", NARROW)  # kinds of inputs


@dataclass
class Coverage:
    """All comparisons of two programs.

    Attributes:
        decisions: the comparisons.
        constants: the logarithms of constants that are compared, but for their signs.
        side: the side of the program that runs.
        identifies: whether the differences of numbers are told apart, which takes longer than all else here.
        differences: the differences of compared numbers in the run, where they are asked for.
        tried: by place, the elements that some input was to make equal.
        choices: which elements were chosen, as the largest of a row.
        roundings: what is rounded to integers, as `hashes`.
        coincidences: by line, what asked whether numbers are equal that are so in float64 alone.
        touches: the places of even powers, which touch zero and do not cross it.
        asks_for_touches: whether what is zero there is among the differences of the run.
    """

    decisions: dict[Key, Decision] = attribute(default_factory=dict)
    constants: set[float] = attribute(default_factory=set)
    side: int = ALONE
    identifies: bool = True
    differences: Differences | None = None
    tried: dict[DecisionPlace, set[int]] = attribute(default_factory=dict)
    choices: dict[Key, Decision] = attribute(default_factory=dict)
    roundings: dict[Key, Decision] = attribute(default_factory=dict)
    coincidences: dict[str, str] = attribute(default_factory=dict)
    touches: set[DecisionPlace] = attribute(default_factory=set)
    asks_for_touches: bool = False

    # Notes of a run

    def note(
        self, field: Field, equation: Any, line: str, truth: np.ndarray, operands: tuple[Exact, Exact], part: str = ""
    ) -> None:
        """Notes the outcomes of a comparison of floats."""
        x, y = operands
        if self.differences is not None:
            self.differences.note(DecisionPlace(self.side, id(equation), part), field, x, y)
        name = equation.primitive.name
        kind = EQUALITY if name in _EQUALITIES else ORDER
        # A comparison with NaN or infinity goes the same way whatever the other number is, and shows nothing of it.
        are_finite = (x.poison == 0) & (y.poison == 0) & (x.infinite == 0) & (y.infinite == 0)
        are_finite, truth = np.broadcast_arrays(are_finite, truth)
        known_signs = find_known_signs(field, x, y) & are_finite
        decision = Decision(line, name + part, kind, truth & are_finite, ~truth & are_finite, ~are_finite | known_signs)
        is_draw = field.settings.order is None
        if is_draw:
            decision.difference = np.broadcast_to(x.real[0] - y.real[0], are_finite.shape)
            decision.rounding = _ROUNDING * np.nan_to_num(np.abs(x.real[0]) + np.abs(y.real[0]))
            decision.excess = count_excess(x, y)
        # At two points a constant is the same number, and an unknown is not. An order is asked too: it reaches branches
        # that no draw did, where what was a constant may be an unknown.
        if field.settings.points > 1 and (self.identifies or not is_draw):
            difference = subtract_at_points(field, x, y)
            is_constant = find_constants(field, x, y, difference)
            decision.tells_constants = True
            decision.is_forced = decision.is_forced | is_constant
            if self.identifies:
                is_strict = (x.never_zero != 0) | (y.never_zero != 0)  # exp(x) > 0, but not x**2 > 0
                decision.is_forced_by_signs = known_signs & ~is_constant & ~is_strict
                argument = _find_argument_of_root(field, x, y)
                if argument is not None:
                    difference = subtract_at_points(field, argument, y)
                self._identify(field, decision, name, x, y, difference)
        if field.planted:
            decision.was_tied = are_finite & find_equal(field, x, y)
            # `where(s > 0.25, z, 0)` for the share s = z / (z + w) shows no tie of z = 0 and w = 0.
            if field.settings.kind not in COINCIDING:
                decision.was_freely_tied = decision.was_tied
            # `max(x, 0)` of an x that was made 0 takes x, and shows nothing of an x above 0.
            if kind == ORDER:
                decision.was_true = decision.was_true & ~decision.was_tied
                decision.was_false = decision.was_false & ~decision.was_tied
        self._add(field, self.decisions, equation, part, decision)

    def _identify(
        self, field: Field, decision: Decision, name: str, x: Exact, y: Exact, difference: np.ndarray
    ) -> None:
        """Notes which difference a comparison compares with zero, what it does there, and its constants."""
        is_free = ~decision.is_forced
        hashes = np.broadcast_to(hash_difference(field, difference), is_free.shape)
        decision.hashes = frozenset(hashes[is_free].tolist())
        if name in _EQUALITIES:
            # Whether a square is zero: where it may be, it goes another way there than in this draw.
            may_be_zero = np.broadcast_to(decision.is_forced_by_signs, hashes.shape)
            decision.ties = (Ties(hashes, -may_be_zero.astype(np.int8)),) if may_be_zero.any() else ()
        else:
            decision.ties = find_ties(name, hashes, x, y, is_free | decision.is_forced_by_signs)
        self.constants |= list_logs_of_constants(field, x)
        self.constants |= list_logs_of_constants(field, y)

    def note_jump(self, field: Field, equation: Any, x: Exact, jump: Exact, part: str = JUMP) -> None:
        """Notes a number that is rounded, and where it jumps to the next integer: inputs are put there."""
        if self.differences is not None and x.degree.total:
            self.differences.note(DecisionPlace(self.side, id(equation), part), field, x, jump)

    def note_divisor(self, field: Field, equation: Any, x: Exact) -> None:
        """Notes a divisor, or the argument of a logarithm: inputs are put where it is zero."""
        if self.differences is not None and x.degree.total:
            zero = field.lift(np.zeros((1,) * len(x.shape), np.float32))
            self.differences.note(DecisionPlace(self.side, id(equation), DIVISOR), field, x, zero)

    def note_touch(self, field: Field, equation: Any, x: Exact) -> None:
        """Notes the x of x**2, which is above zero but where x is zero.

        Worked example: `(x - 0.5)**2 > 0` is true in every draw, and no crossing shows: a square touches zero and does
        not cross it. Its root x - 0.5 is linear in x, and an x of 0.5 is found as for any comparison.
        """
        if not x.degree.total or x.never_zero.all():  # exp(x)**2 is nowhere zero
            return
        place = DecisionPlace(self.side, id(equation), TOUCH)
        self.touches.add(place)
        if self.differences is not None and self.asks_for_touches:
            zero = field.lift(np.zeros((1,) * len(x.shape), np.float32))
            self.differences.note(place, field, x, zero)

    def note_coincidence(self, field: Field, equation: Any, line: str, truth: np.ndarray) -> None:
        """Where real values are equal, and residues are not.

        Worked example: `tanh(-x) == -tanh(x)` holds for all inputs, by a law that the field does not know. There a
        program takes the branch that no input takes. Of large numbers it may be their rounding: tanh(20) is 1.
        """
        if field.settings.order is None and field.settings.kind in _OF_SIZE_ONE and truth.any():
            self.coincidences[line] = equation.primitive.name

    def note_integers(
        self,
        field: Field,
        equation: Any,
        line: str,
        truth: np.ndarray,
        operands: Sequence[np.ndarray],
        part: str = "",
    ) -> None:
        """Notes the outcomes of a comparison of integers that follow from floats."""
        for x in operands:
            if self.identifies and not field.marks.follows_floats(x):
                self.constants |= list_logs(np.abs(x[x != 0].astype(np.float64)))
        is_forced = np.zeros(truth.shape, bool)
        decision = Decision(line, equation.primitive.name + part, INTEGERS, truth, ~truth, is_forced)
        self._add(field, self.decisions, equation, part, decision)

    def note_joined(self, field: Field, equation: Any, line: str, truth: np.ndarray, part: str = "") -> None:
        """Notes the outcomes of several comparisons of floats that are joined, as by `and`."""
        is_forced = np.zeros(truth.shape, bool)
        decision = Decision(line, equation.primitive.name + part, ORDER, truth, ~truth, is_forced, joins=True)
        self._add(field, self.decisions, equation, part, decision)

    def note_domain(self, field: Field, equation: Any, line: str, is_inside: np.ndarray) -> None:
        """Notes where a value is inside the domain of a function, which a program asks for.

        It may be so for all inputs: only where it was not in some draw, it has to be in another one.
        """
        decision = Decision(line, equation.primitive.name, ORDER, is_inside, ~is_inside, is_inside)
        decision.tells_constants = True
        self._add(field, self.decisions, equation, " of a domain", decision)

    def note_choice(
        self, field: Field, equation: Any, line: str, chosen: np.ndarray, eligible: np.ndarray, part: str = ""
    ) -> None:
        """Which elements were chosen among others, of those that may be.

        Worked example: the maximum of x + 10000 and y is x + 10000 in every draw. Where y is larger, no draw has been.
        """
        chosen, eligible = np.broadcast_arrays(chosen, eligible)
        name = equation.primitive.name
        choice = Decision(line, name + part, ORDER, chosen & eligible, ~chosen & eligible, ~eligible)
        self._add(field, self.choices, equation, part, choice)

    def note_rounding(self, field: Field, equation: Any, line: str, x: Exact, integers: np.ndarray) -> None:
        """What is rounded, to which integers: a draw tells two numbers apart only if an integer is between them.

        An integer that is even in one draw and odd in another is not the same for all inputs.
        """
        if not x.degree.total:
            return
        are_finite = (x.poison == 0) & (x.infinite == 0)
        is_even = integers % 2 == 0
        name = equation.primitive.name
        rounding = Decision(line, name, ORDER, is_even & are_finite, ~is_even & are_finite, ~are_finite)
        if self.identifies and field.settings.points > 1:
            rounding.tells_constants = True
            rounding.hashes = self._hash_rounded(field, name, x)
        self._add(field, self.roundings, equation, "", rounding)

    def _hash_rounded(self, field: Field, name: str, x: Exact) -> frozenset[int]:
        """Which numbers are rounded."""
        residues = x.number[field.residues.top]
        if name == "ceil":  # -floor(-x)
            p = field.residues.top_prime
            residues = (p - residues) % p
        return frozenset(mix(mix(residues[0]), residues[1]).ravel().tolist())

    def _add(self, field: Field, decisions: dict[Key, Decision], equation: Any, part: str, decision: Decision) -> None:
        """Adds the outcomes of an equation to those of its earlier rounds in a loop."""
        # Where all inputs are zero, a wrong branch mostly gives the right zero: only equality is seen there.
        if field.settings.kind == "zero" and decision.kind != EQUALITY:
            return
        key = Key(DecisionPlace(self.side, id(equation), part), decision.was_true.ndim)
        if key in decisions:
            decisions[key].add(decision)
        else:
            decisions[key] = decision

    def merge(self, other: Coverage) -> None:
        """Adds what another run of a side noted."""
        _merge_decisions(self.decisions, other.decisions)
        _merge_decisions(self.choices, other.choices)
        _merge_decisions(self.roundings, other.roundings)
        self.constants |= other.constants
        self.coincidences |= other.coincidences
        self.touches |= other.touches

    # What is open after all runs

    def depends_on_inputs(self) -> bool:
        """Whether anything was compared, chosen or rounded that may be otherwise for other inputs."""
        return bool(self.list_free() or self.choices or self.roundings)

    def list_free(self) -> list[Decision]:
        """Comparisons that could go both ways."""
        return [decision for decision in self.decisions.values() if not decision.is_forced.all()]

    def list_open(self, kind: str) -> list[Decision]:
        """Comparisons of a kind that could have gone both ways and have not.

        One for equality is none of them where the same numbers are put in order, as where the derivative of a maximum
        asks for ties: inputs that are equal are drawn for their own sake.
        """
        hashes_in_order: set[int] = set()
        if kind == EQUALITY:
            for decision in self.decisions.values():
                if decision.kind == ORDER:
                    hashes_in_order |= decision.hashes
        open_decisions = []
        for decision in self.decisions.values():
            if decision.kind != kind or not decision.is_open:
                continue
            if not decision.hashes or decision.hashes - hashes_in_order:
                open_decisions.append(decision)
        return open_decisions

    def list_partial(self) -> list[Decision]:
        """Comparisons, choices and roundings that went one way only for some elements.

        Worked example: `x > 1` was (True, False) in one draw and (True, True) in the next. It went both ways, but for
        element 0 it was never false.
        """
        decisions = []
        for decision in (*self.decisions.values(), *self.choices.values(), *self.roundings.values()):
            if decision.kind != ORDER or decision.joins:
                continue
            went_both_ways = decision.was_true & decision.was_false
            if not (decision.is_forced | went_both_ways).all():
                decisions.append(decision)
        return decisions

    def list_sorted_lines(self) -> list[str]:
        """The lines at which the place of a number among others is a result: of the largest, or in their order."""
        return sorted({choice.line for choice in self.choices.values() if choice.what.startswith(_PLACES)})

    def list_one_sided_roundings(self) -> list[Decision]:
        """Numbers that are rounded to even integers in all draws, or to odd ones in all."""
        return [rounding for rounding in self.roundings.values() if rounding.is_open]

    # What one side alone compares

    def list_foreign(self) -> list[Decision]:
        """Comparisons that only one side makes, and numbers that only one side rounds."""
        decisions = [self.decisions[key] for key in self.list_foreign_keys()]
        return [*decisions, *self.list_foreign_roundings()]

    def list_foreign_keys(self) -> list[Key]:
        """The comparisons that only one side makes."""
        return _list_foreign(self.decisions)

    def list_foreign_roundings(self) -> list[Decision]:
        """Numbers that only one side rounds."""
        return [self.roundings[key] for key in self.list_foreign_rounding_keys()]

    def list_foreign_rounding_keys(self) -> list[Key]:
        """The roundings of numbers that only one side rounds."""
        return _list_foreign(self.roundings)

    # What the sides do with equal numbers

    def forget_ties(self) -> None:
        """As if no numbers had been equal: of inputs for which not all results are compared."""
        for decision in self.decisions.values():
            decision.was_tied = False
            decision.was_freely_tied = False

    def list_untied(self) -> list[Decision]:
        """Comparisons that both sides make, that differ for equal numbers, and that no draw made of equal numbers.

        Worked example: one side asks `x / y > 1`, the other `x / y >= 1`. Both compare the same difference. Where it is
        zero, one side takes what it takes for negative ones, the other what it takes for positive ones. A draw in which
        it is zero for one element stands for others of the same line: but for those that some input was to make equal,
        and did not. Of `x` and `tanh(x) + x**2` beside each other, the former alone is linear. Draws of zeros and of
        whole numbers do not count: there other numbers are zero too, which may be why nothing is seen.
        """
        decisions = []
        for key, differs in self.find_differing_ties().items():
            decision = self.decisions[key]
            is_met = np.broadcast_to(decision.was_freely_tied, differs.shape) & differs
            was_tried = np.zeros(differs.size, bool)
            indices = [index for index in self.tried.get(key.place, ()) if index < differs.size]
            was_tried[indices] = True
            # A square touches zero where its root crosses it: inputs that were put for the square itself say nothing.
            was_tried = was_tried.reshape(differs.shape) & ~np.asarray(decision.is_forced_by_signs)
            in_vain = differs & was_tried & ~is_met
            if not is_met.any() or in_vain.any():
                decisions.append(decision)
        return decisions

    def find_untied(self) -> list[Key]:
        """The comparisons that differ for equal numbers, of which some have not been met."""
        keys = []
        for key, differs in self.find_differing_ties().items():
            was_tied = self.decisions[key].was_freely_tied
            if (differs & np.logical_not(was_tied)).any():
                keys.append(key)
        return keys

    def find_differing_ties(self) -> dict[Key, np.ndarray]:
        """By comparison, bool [...]: for which elements the other side does otherwise if the numbers are equal.

        Worked example: x was drawn as 2. `x > 1` on the mesh would go the other way if x were 1, and `x >= 1` alone
        would go the same way. So the difference x - 1 is among those of both sides, and among those that go the other
        way it is on the mesh only.
        """
        same_on_mesh, other_on_mesh = self._list_hashes_of_ties(ON_MESH)
        same_alone, other_alone = self._list_hashes_of_ties(ALONE)
        on_both_sides = np.intersect1d(np.union1d(same_on_mesh, other_on_mesh), np.union1d(same_alone, other_alone))
        on_one_side = np.union1d(np.setxor1d(same_on_mesh, same_alone), np.setxor1d(other_on_mesh, other_alone))
        differing_hashes = np.intersect1d(on_both_sides, on_one_side)
        # Whether a mean of squares is above zero, one side alone may ask: to the other it is so for all other inputs.
        hashes_of_one_side = np.setxor1d(other_on_mesh, other_alone)
        differing: dict[Key, np.ndarray] = {}
        if not differing_hashes.size and not hashes_of_one_side.size:
            return differing
        for key, decision in self.decisions.items():
            differs = np.zeros(decision.was_true.shape, bool)
            for ties in decision.ties:
                is_free = ~decision.is_forced & np.isin(ties.hashes, differing_hashes)
                is_forced_but_at_zero = decision.is_forced_by_signs & np.isin(ties.hashes, hashes_of_one_side)
                differs = differs | ((ties.ways != 0) & (is_free | is_forced_but_at_zero))
            if differs.any():
                differing[key] = differs
        return differing

    def has_open_touches(self) -> bool:
        """Whether one side alone compares with zero what has a known sign, and some of it was zero in no draw."""
        if not self.touches:
            return False
        return any(np.any(self.decisions[key].is_forced_by_signs) for key in self.find_untied())

    def _list_hashes_of_ties(self, side: int) -> tuple[np.ndarray, np.ndarray]:
        """The differences that go the same way as in a draw if they are zero, and those that go the other way."""
        same = [np.zeros(0, np.uint64)]
        other = [np.zeros(0, np.uint64)]
        for key, decision in self.decisions.items():
            if key.place.side != side:
                continue
            for hashes, ways in decision.ties:
                same.append(hashes[ways > 0])
                other.append(hashes[ways < 0])
        return np.concatenate(same), np.concatenate(other)


def _find_argument_of_root(field: Field, x: Exact, y: Exact) -> Exact | None:
    """The n of `sqrt(n) > 0`, which asks what `n > 0` asks; None of other comparisons.

    Not of `sqrt(n) > 3`: if the other side has a product of two roots, which is no root here, they would not be alike.
    """
    if not field.laws.roots.squares or not field.is_zero(y).all():
        return None
    return find_squares(field, to_number(field, x))


def _merge_decisions(decisions: dict[Key, Decision], others: dict[Key, Decision]) -> None:
    """Adds the outcomes of another run. It is not changed: a run of one side is added to several runs of the other."""
    for key, decision in others.items():
        if key in decisions:
            decisions[key].add(decision)
        else:
            decisions[key] = replace(decision)


def _list_foreign(decisions: dict[Key, Decision]) -> list[Key]:
    """The comparisons that the other side has not, or is not known to have."""
    hashes: list[set[int]] = [set(), set()]
    has_unidentified = [False, False]
    for key, decision in decisions.items():
        hashes[key.place.side] |= decision.hashes
        if decision.is_unidentified:
            has_unidentified[key.place.side] = True
    foreign = []
    for key, decision in decisions.items():
        other_side = 1 - key.place.side
        is_alone = decision.is_unidentified and not has_unidentified[other_side]
        if is_alone or decision.hashes - hashes[other_side]:
            foreign.append(key)
    return foreign
