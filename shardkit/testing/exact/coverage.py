"""Which way each comparison went: what a proof has seen of the branches of two programs, and what it has not.

Worked example: `where(x > 1, a, b)` on three elements. In one draw x is (2.0, 0.3, 0.5), in the next (1.5, 3.0, -1.0):
the comparison held for elements 0 and 1 and failed for 1 and 2. The line went both ways, and one element of three did.

A comparison that only one side makes is the dangerous one: where both programs compare x with 1, they branch alike, and
a draw sees both branches of both; where one compares x with 1 and the other with 1.01, they differ for few inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from dataclasses import field as attribute
from typing import Any

import numpy as np

from shardkit.testing.exact.crossings import DIVISOR, JUMP, Differences
from shardkit.testing.exact.numbers.arithmetic import subtract
from shardkit.testing.exact.numbers.field import COINCIDING, NARROW, Field
from shardkit.testing.exact.numbers.hashing import mix
from shardkit.testing.exact.numbers.logarithms import to_number
from shardkit.testing.exact.numbers.orders import find_equal
from shardkit.testing.exact.numbers.tower import invert_by_power
from shardkit.testing.exact.numbers.values import Exact

ON_MESH, ALONE = 0, 1
# What a decision is about: two numbers, which is larger; whether they are equal; integers that follow from others.
ORDER, EQUALITY, INTEGERS = "order", "equality", "integers"
# What asks whether numbers are equal: which one is the largest, as `x == max(x)`, or which is zero, as a cast to bool.
_EQUALITIES = ("eq", "ne", "convert_element_type", "select_and_scatter_add", "select_and_gather_add")
# What returns the places of numbers among others.
_PLACES = ("argmax", "argmin", "sort", "top_k", "approx_top_k")
_MOST_CONSTANTS = 16  # of one comparison
_ROUNDING = 1e-12  # of the numbers that are compared
_OF_SIZE_ONE = ("normal", "positive", "unit", "negative", NARROW)  # kinds of inputs
# With which numbers equal ones are taken together: 1 for those where the first operand is the larger one. The sign of a
# number asks twice, as `x > 0` and `x < 0` do.
_TIES = {"ge": (1,), "lt": (1,), "gt": (-1,), "le": (-1,), "lt_to": (1,), "le_to": (-1,), "sign": (1, -1)}


@dataclass
class Decision:
    """One comparison of one program, in all draws.

    Attributes:
        line: where it stands.
        what: the primitive, and which part of it.
        kind: ORDER, EQUALITY or INTEGERS.
        held: bool [...], where it was true in some draw.
        failed: where it was false.
        decided: where its operands leave no choice, as for a square and zero.
        signed: where only their signs leave none: a square may still equal zero.
        words: which differences of numbers it compares with zero, but for a constant factor.
        ties: of these words, on which side of zero equal numbers are counted, by draw: two arrays [...], of words and
            of 1, -1 or 0 for none.
        tied: where its operands were equal in some draw, and all results were compared.
        tied_freely: likewise, in a draw whose other numbers are neither zeros nor small whole numbers.
        identified: whether this run, of two points, has told `decided`.
        difference: float64 [...], the real difference of the operands in the first draw that has one; None in an order.
        rounding: float64 [...], by how much it may be rounded.
        excess: how many of the numbers that it compares with a constant were beyond it in all draws, as seen from zero,
            less how many were on this side of it.
    """

    line: str
    what: str
    kind: str
    held: np.ndarray
    failed: np.ndarray
    decided: np.ndarray
    signed: np.ndarray | bool = False
    words: frozenset[int] = frozenset()
    ties: tuple[tuple[np.ndarray, np.ndarray], ...] = ()
    tied: np.ndarray | bool = False
    tied_freely: np.ndarray | bool = False
    identified: bool = False
    difference: np.ndarray | None = None
    rounding: np.ndarray | float = 0.0
    excess: int = 0

    @property
    def is_open(self) -> bool:
        """Whether it could go both ways, and did not for any element."""
        free = ~self.decided
        if not free.any():
            return False
        # A number equals the largest of several where it is it: as the same number, which is decided.
        counted = np.ones_like(free) if self.kind == EQUALITY else free
        return not ((self.held & counted).any() and (self.failed & counted).any())

    @property
    def unidentified(self) -> bool:
        """Whether it could go both ways, and no draw told which difference it compares with zero."""
        if self.kind == INTEGERS or self.joined:  # these have no words
            return False
        return not self.words and bool((~self.decided).any())

    @property
    def joined(self) -> bool:
        """Whether it joins others, as `x > 0.8 and x < 1.2` does."""
        return self.what in ("and", "or") or self.what.endswith(" between")

    @property
    def outcome(self) -> str:
        """The outcome in all draws."""
        return "true" if self.held.any() else "false"

    def add(self, other: Decision) -> None:
        """Adds the outcomes of another draw."""
        self.held, self.failed = self.held | other.held, self.failed | other.failed
        # A minimum may be the constant 0 in the draws that tell constants from unknowns, and an unknown in a later one.
        # So where the operands left no choice because their difference was a constant, it must stay that constant.
        is_decided = other.decided
        if self.difference is not None and other.difference is not None:
            # Of x and x - 1 the difference is 1, but for the rounding of x.
            is_constant = np.abs(other.difference - self.difference) <= self.rounding + other.rounding
            # Outside of a domain there was no difference. `isnan(x)` is `x != x`, which is zero.
            is_new = np.isnan(self.difference)
            is_decided = is_decided | is_constant | (is_new & (other.difference == 0))
            self.difference = np.where(is_new, other.difference, self.difference)
            self.rounding = np.where(is_new, other.rounding, self.rounding)
        if other.identified or other.difference is not None:
            self.decided = self.decided & is_decided
        self.words = self.words | other.words
        self.ties = self.ties + other.ties
        self.signed = self.signed | other.signed
        self.tied = self.tied | other.tied
        self.tied_freely = self.tied_freely | other.tied_freely
        self.excess += other.excess


@dataclass
class Coverage:
    """All comparisons of two programs.

    Attributes:
        decisions: by side, equation, part of it and number of dims.
        constants: the logarithms of constants that are compared, but for their signs.
        side: the side of the program that runs.
        identifies: whether the differences of numbers are told apart, which takes longer than all else here.
        differences: the differences of compared numbers in the run, where they are asked for.
        tried: by side, equation and part, the elements that some input was to make equal.
        choices: by side, equation, part and number of dims, which elements were chosen, as the largest of a row.
        roundings: by side, equation and number of dims, what is rounded to integers, as `words`.
        coincidences: by line, what asked whether numbers are equal that are so in float64 alone.
    """

    decisions: dict[Any, Decision] = attribute(default_factory=dict)
    constants: set[float] = attribute(default_factory=set)
    side: int = ALONE
    identifies: bool = True
    differences: Differences | None = None
    tried: dict[Any, set[int]] = attribute(default_factory=dict)
    choices: dict[Any, Decision] = attribute(default_factory=dict)
    roundings: dict[Any, Decision] = attribute(default_factory=dict)
    coincidences: dict[str, str] = attribute(default_factory=dict)

    def note(
        self, field: Field, equation: Any, line: str, truth: np.ndarray, operands: tuple[Exact, Exact], part: str = ""
    ) -> None:
        """Notes the outcomes of a comparison of floats."""
        x, y = operands
        if self.differences is not None:
            self.differences.note((self.side, id(equation), part), field, x, y)
        kind = EQUALITY if equation.primitive.name in _EQUALITIES else ORDER
        # A comparison with NaN or infinity goes the same way whatever the other number is, and shows nothing of it.
        asked = (x.poison == 0) & (y.poison == 0) & (x.infinite == 0) & (y.infinite == 0)
        asked, truth = np.broadcast_arrays(asked, truth)
        decision = Decision(line, equation.primitive.name + part, kind, truth & asked, ~truth & asked, ~asked)
        known_signs = _find_known_signs(field, x, y) & asked
        decision.decided = decision.decided | known_signs
        is_draw = field.settings.order is None
        if is_draw:
            decision.difference = np.broadcast_to(x.real[0] - y.real[0], asked.shape)
            decision.rounding = _ROUNDING * np.nan_to_num(np.abs(x.real[0]) + np.abs(y.real[0]))
            decision.excess = _count_excess(x, y)
        # At two points a constant is the same number, and an unknown is not. An order is asked too: it reaches branches
        # that no draw did, where what was a constant may be an unknown.
        if field.settings.points > 1 and (self.identifies or not is_draw):
            difference = _subtract_at_points(field, x, y)
            decision.identified = True
            is_constant = _find_constants(field, x, y, difference)
            decision.decided = decision.decided | is_constant
            if self.identifies:
                decision.signed = known_signs & ~is_constant
                words = np.broadcast_to(_hash_difference(field, difference), asked.shape)
                decision.words = frozenset(words[~decision.decided].tolist())
                may_tie = ~decision.decided | decision.signed
                decision.ties = _find_ties(equation.primitive.name, words, x, y, may_tie)
                self.constants |= _list_logs_of_constants(field, x) | _list_logs_of_constants(field, y)
        if field.planted:
            decision.tied = asked & find_equal(field, x, y)
            # `where(s > 0.25, z, 0)` for the share s = z / (z + w) shows no tie of z = 0 and w = 0.
            if field.settings.kind not in COINCIDING:
                decision.tied_freely = decision.tied
            # `max(x, 0)` of an x that was made 0 takes x, and shows nothing of an x above 0.
            if kind == ORDER:
                decision.held = decision.held & ~decision.tied
                decision.failed = decision.failed & ~decision.tied
        if field.settings.kind == "zero" and kind == ORDER:  # a wrong branch is not seen where all inputs are zero
            return
        self._add(equation, part, decision)

    def note_jump(self, field: Field, equation: Any, x: Exact, jump: Exact) -> None:
        """Notes a number that is rounded, and where it jumps to the next integer: inputs are put there."""
        if self.differences is not None and x.degree.total:
            self.differences.note((self.side, id(equation), JUMP), field, x, jump)

    def note_coincidence(self, field: Field, equation: Any, line: str, truth: np.ndarray) -> None:
        """Where real values are equal, and residues are not.

        Worked example: `tanh(-x) == -tanh(x)` holds for all inputs, by a law that the field does not know. There a
        program takes the branch that no input takes. Of large numbers it may be their rounding: tanh(20) is 1.
        """
        if field.settings.order is None and field.settings.kind in _OF_SIZE_ONE and truth.any():
            self.coincidences[line] = equation.primitive.name

    def note_divisor(self, field: Field, equation: Any, x: Exact) -> None:
        """Notes a divisor, or the argument of a logarithm: inputs are put where it is zero."""
        if self.differences is not None and x.degree.total:
            zero = field.lift(np.zeros((1,) * len(x.shape), np.float32))
            self.differences.note((self.side, id(equation), DIVISOR), field, x, zero)

    def note_integers(
        self, field: Field, equation: Any, line: str, truth: np.ndarray, operands: Sequence[np.ndarray]
    ) -> None:
        """Notes the outcomes of a comparison of integers that follow from floats."""
        for x in operands:
            if self.identifies and not field.marks.follows_floats(x):
                self.constants |= _take_distinct_logarithms(np.abs(x[x != 0].astype(np.float64)))
        if field.settings.kind != "zero":
            never = np.zeros(truth.shape, bool)
            self._add(equation, "", Decision(line, equation.primitive.name, INTEGERS, truth, ~truth, never))

    def note_joined(self, field: Field, equation: Any, line: str, truth: np.ndarray, part: str = "") -> None:
        """Notes the outcomes of several comparisons of floats that are joined, as by `and`."""
        if field.settings.kind != "zero":
            never = np.zeros(truth.shape, bool)
            self._add(equation, part, Decision(line, equation.primitive.name + part, ORDER, truth, ~truth, never))

    def note_domain(self, field: Field, equation: Any, line: str, is_inside: np.ndarray) -> None:
        """Notes where a value is inside the domain of a function, which a program asks for.

        It may be so for all inputs: only where it was not in some draw, it has to be in another one.
        """
        if field.settings.kind != "zero":
            decision = Decision(line, equation.primitive.name, ORDER, is_inside, ~is_inside, is_inside, identified=True)
            self._add(equation, " of a domain", decision)

    def note_choice(
        self, field: Field, equation: Any, line: str, chosen: np.ndarray, asked: np.ndarray, part: str = ""
    ) -> None:
        """Which elements were chosen among others, of those that may be.

        Worked example: the maximum of x + 10000 and y is x + 10000 in every draw. Where y is larger, no draw has been.
        """
        if field.settings.kind == "zero":
            return
        chosen, asked = np.broadcast_arrays(chosen, asked)
        name = equation.primitive.name
        choice = Decision(line, name + part, ORDER, chosen & asked, ~chosen & asked, ~asked)
        _add_to(self.choices, (self.side, id(equation), part, chosen.ndim), choice)

    def note_rounding(self, field: Field, equation: Any, line: str, x: Exact, integers: np.ndarray) -> None:
        """What is rounded, to which integers: a draw tells two numbers apart only if an integer is between them.

        An integer that is even in one draw and odd in another is not the same for all inputs.
        """
        if not x.degree.total or field.settings.kind == "zero":
            return
        asked = (x.poison == 0) & (x.infinite == 0)
        is_even = integers % 2 == 0
        name = equation.primitive.name
        rounding = Decision(line, name, ORDER, is_even & asked, ~is_even & asked, ~asked)
        if self.identifies and field.settings.points > 1:
            rounding.identified = True
            rounding.words = self._hash_rounded(field, name, x)
        _add_to(self.roundings, (self.side, id(equation), x.number.ndim), rounding)

    def _hash_rounded(self, field: Field, name: str, x: Exact) -> frozenset[int]:
        """Which numbers are rounded."""
        top = x.number[field.residues.top]
        if name == "ceil":  # -floor(-x)
            p = field.residues.top_prime
            top = (p - top) % p
        return frozenset(mix(mix(top[0]), top[1]).ravel().tolist())

    def _add(self, equation: Any, part: str, decision: Decision) -> None:
        _add_to(self.decisions, (self.side, id(equation), part, decision.held.ndim), decision)

    def merge(self, other: Coverage) -> None:
        """What another run of a side noted."""
        for key, decision in other.decisions.items():
            _add_to(self.decisions, key, decision)
        for key, choice in other.choices.items():
            _add_to(self.choices, key, choice)
        for key, rounding in other.roundings.items():
            _add_to(self.roundings, key, rounding)
        self.constants |= other.constants
        self.coincidences |= other.coincidences

    def list_free(self) -> list[Decision]:
        """Those that could go both ways."""
        return [decision for decision in self.decisions.values() if not decision.decided.all()]

    def list_sorted_lines(self) -> list[str]:
        """The lines at which the place of a number among others is a result: of the largest, or in their order."""
        return sorted({choice.line for choice in self.choices.values() if choice.what.startswith(_PLACES)})

    def depends_on_inputs(self) -> bool:
        """Whether anything was compared, chosen or rounded that may be otherwise for other inputs."""
        return bool(self.list_free() or self.choices or self.roundings)

    def list_partial(self) -> list[Decision]:
        """Those that went one way only for some elements."""
        decisions = []
        for decision in (*self.decisions.values(), *self.choices.values(), *self.roundings.values()):
            both = decision.held & decision.failed
            if decision.kind == ORDER and not decision.joined and (~decision.decided & ~both).any():
                decisions.append(decision)
        return decisions

    def list_foreign(self) -> list[Decision]:
        """Comparisons that only one side makes, and numbers that only one side rounds."""
        decisions = [self.decisions[key] for key in self.list_foreign_keys()]
        return [*decisions, *self.list_foreign_roundings()]

    def list_foreign_roundings(self) -> list[Decision]:
        """Numbers that only one side rounds."""
        return [self.roundings[key] for key in _list_foreign(self.roundings)]

    def list_one_sided_roundings(self) -> list[Decision]:
        """Numbers that are rounded to the same integers in all draws."""
        return [rounding for rounding in self.roundings.values() if rounding.is_open]

    def list_foreign_keys(self) -> list[tuple[Any, ...]]:
        """Those of such comparisons among all decisions."""
        return _list_foreign(self.decisions)

    def forget_ties(self) -> None:
        """As if no numbers had been equal: of inputs for which not all results are compared."""
        for decision in self.decisions.values():
            decision.tied = False
            decision.tied_freely = False

    def list_untied(self) -> list[Decision]:
        """Comparisons that both sides make, that differ for equal numbers, and that no draw made of equal numbers.

        Worked example: one side asks `x / y > 1`, the other `x / y >= 1`. Both compare the same difference. Where it is
        zero, one side takes what it takes for negative ones, the other what it takes for positive ones. A draw in which
        it is zero for one element stands for others of the same line: but for those that some input was to make equal,
        and did not. Of `x` and `tanh(x) + x**2` beside each other, the former alone is linear. Draws of zeros and of
        whole numbers do not count: there other numbers are zero too, which may be why nothing is seen.
        """
        decisions = []
        for key, places in self.find_differing_ties().items():
            decision = self.decisions[key]
            is_met = np.broadcast_to(decision.tied_freely, places.shape) & places
            tried = np.zeros(places.size, bool)
            indices = [index for index in self.tried.get(key[:3], ()) if index < places.size]
            tried[indices] = True
            in_vain = places & tried.reshape(places.shape) & ~is_met
            if not is_met.any() or in_vain.any():
                decisions.append(decision)
        return decisions

    def find_untied(self) -> list[tuple[Any, ...]]:
        """The keys of the comparisons that differ for equal numbers, of which some have not been met."""
        keys = []
        for key, places in self.find_differing_ties().items():
            if (places & np.logical_not(self.decisions[key].tied_freely)).any():
                keys.append(key)
        return keys

    def find_differing_ties(self) -> dict[tuple[Any, ...], np.ndarray]:
        """By the key of a comparison, bool [...]: where the other side counts equal numbers with other ones."""
        # By sign and side, the words of which that side counts zero so.
        counted: dict[tuple[int, int], list[np.ndarray]] = {(sign, side): [] for sign in (1, -1) for side in (0, 1)}
        for (side, *_), decision in self.decisions.items():
            for words, signs in decision.ties:
                counted[1, side].append(words[signs > 0])
                counted[-1, side].append(words[signs < 0])
        none = np.zeros(0, np.uint64)
        positive, other_positive, negative, other_negative = [np.concatenate([none, *x]) for x in counted.values()]
        # The differences that both sides compare with zero. Of these, `differing` has the ones that one side alone
        # counts as positive, or as negative, where they are zero.
        both_sides = np.intersect1d(np.union1d(positive, negative), np.union1d(other_positive, other_negative))
        one_sided = np.union1d(np.setxor1d(positive, other_positive), np.setxor1d(negative, other_negative))
        differing = np.intersect1d(both_sides, one_sided)
        places_by_key: dict[tuple[Any, ...], np.ndarray] = {}
        if not differing.size:
            return places_by_key
        for key, decision in self.decisions.items():
            places = np.zeros(decision.held.shape, bool)
            for words, signs in decision.ties:
                places = places | ((signs != 0) & np.isin(words, differing))
            places = places & (~decision.decided | decision.signed)
            if places.any():
                places_by_key[key] = places
        return places_by_key

    def list_open(self, kind: str) -> list[Decision]:
        """Comparisons of a kind that could have gone both ways and have not.

        One for equality is none of them where the same numbers are put in order, as where the derivative of a maximum
        asks for ties: inputs that are equal are drawn for their own sake.
        """
        ordered: set[int] = set()
        if kind == EQUALITY:
            for decision in self.decisions.values():
                if decision.kind == ORDER:
                    ordered |= decision.words
        decisions = [decision for decision in self.decisions.values() if decision.kind == kind and decision.is_open]
        return [decision for decision in decisions if not decision.words or decision.words - ordered]


def _add_to(decisions: dict[Any, Decision], key: Any, decision: Decision) -> None:
    if key in decisions:
        decisions[key].add(decision)
    else:
        decisions[key] = replace(decision)


def _list_foreign(decisions: dict[Any, Decision]) -> list[tuple[Any, ...]]:
    """The keys, which begin with a side, of what the other side has not, or is not known to have."""
    words: list[set[int]] = [set(), set()]
    for (side, *_), decision in decisions.items():
        words[side] |= decision.words
    unidentified = {key[0] for key, decision in decisions.items() if decision.unidentified}
    keys = []
    for key, decision in decisions.items():
        is_unidentified = decision.unidentified and 1 - key[0] not in unidentified
        if decision.words - words[1 - key[0]] or is_unidentified:
            keys.append(key)
    return keys


def _find_ties(
    name: str, words: np.ndarray, x: Exact, y: Exact, free: np.ndarray
) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """The words, and for free elements the sign of the difference with which a comparison counts zero."""
    if name not in _TIES:  # as of a maximum, which is the same whichever of equal numbers is taken
        return ()
    signs = np.nan_to_num(np.sign(np.broadcast_to(x.real[0] - y.real[0], free.shape)))
    # Both sides have the same real inputs, so `x < y` and `y > x`, of opposite differences, count zero alike.
    signs = np.where(free, signs, 0).astype(np.int8)
    if not signs.any():
        return ()
    return tuple((words, sign * signs) for sign in _TIES[name])


def _list_logs_of_constants(field: Field, x: Exact) -> set[float]:
    if field.notes.rounds and x.degree.total:  # integers that inputs were rounded to are no constants
        return set()
    top = to_number(field, x).number[field.residues.top]
    constant = (top == top[0]).all(0) & (x.real[0] != 0) & np.isfinite(x.real[0])
    return _take_distinct_logarithms(np.abs(x.real[0][constant]))


def _take_distinct_logarithms(values: np.ndarray) -> set[float]:
    distinct = np.unique(values)
    return set(np.log(distinct).tolist()) if len(distinct) <= _MOST_CONSTANTS else set()


def _count_excess(x: Exact, y: Exact) -> int:
    """How many unknown numbers are beyond the constants beside them, less how many are on this side of them.

    Worked example: 3 is beyond 1, as seen from zero, and 0.5 and -3 are not.
    """
    if bool(x.degree.total) == bool(y.degree.total):
        return 0
    unknown, constant = (x.real[0], y.real[0]) if x.degree.total else (y.real[0], x.real[0])
    excess = np.sign(unknown - constant) * np.sign(constant)
    return int(np.nan_to_num(excess).sum())


def _follows_roundings(field: Field, x: Exact, y: Exact) -> bool:
    """Whether two numbers may follow from integers to which floats were rounded, which are so in this draw alone."""
    return field.notes.rounds and bool(x.degree.total or y.degree.total)


def _find_known_signs(field: Field, x: Exact, y: Exact) -> np.ndarray:
    """Where two numbers have opposite signs for all inputs, or one is zero and the sign of the other is known."""
    has_opposite_signs = (x.sign != 0) & (x.sign == -y.sign)
    if _follows_roundings(field, x, y):
        return np.zeros_like(has_opposite_signs)
    if not x.sign.any() and not y.sign.any():
        return np.asarray(has_opposite_signs)
    is_y_zero = field.is_zero(y) & (x.sign != 0)
    is_x_zero = field.is_zero(x) & (y.sign != 0)
    return np.asarray(has_opposite_signs | is_y_zero | is_x_zero)


def _subtract_at_points(field: Field, x: Exact, y: Exact) -> np.ndarray:
    """uint64 [points, ...]: the residues of a difference modulo the highest prime that every number has."""
    return to_number(field, subtract(field, x, y)).number[field.residues.top]


def _find_constants(field: Field, x: Exact, y: Exact, difference: np.ndarray) -> np.ndarray:
    """Where a difference is a constant: it is the same at two points."""
    if _follows_roundings(field, x, y):
        return np.zeros(difference.shape[1:], bool)
    return np.asarray(difference[0] == difference[1])


def _hash_difference(field: Field, difference: np.ndarray) -> np.ndarray:
    """Which difference is compared with zero, but for a constant factor."""
    # c d(a) / (c d(b)) is d(a) / d(b) for every constant c, at points a and b.
    p = field.residues.top_prime
    return mix(difference[0] * invert_by_power(difference[1], p) % p)
