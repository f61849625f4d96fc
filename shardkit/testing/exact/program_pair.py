"""Two programs that are run in the same fields, and what all their runs have shown.

A run draws a field: integers, or real values, for the inputs. Both programs are evaluated in it, and each result of one
is compared with that of the other. What a run has shown, as which elements were numbers on both sides, is kept for the
certificate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from dataclasses import field as attribute
from typing import Any, NamedTuple

import numpy as np

from shardkit._jax.jaxprs import source_line
from shardkit.testing._compare import UnequalError
from shardkit.testing.exact.coverage import ALONE, ON_MESH, Coverage, Decision
from shardkit.testing.exact.crossings import Crossings, Differences
from shardkit.testing.exact.difference import describe_difference, describe_remedy
from shardkit.testing.exact.interpreter import DiffersError, HangsError, Seen
from shardkit.testing.exact.numbers.errors import RedrawError, TooDeepError, UnknownValueError, UnsupportedError
from shardkit.testing.exact.numbers.field import SEEDS, Field
from shardkit.testing.exact.numbers.folded import Constant, Folded, explain_constants
from shardkit.testing.exact.numbers.orders import find_equal
from shardkit.testing.exact.numbers.square_roots import remember_roots
from shardkit.testing.exact.numbers.tower import LEVELS
from shardkit.testing.exact.numbers.values import CONSTANT, NOT_A_NUMBER, OUTSIDE, Degree, Element, Exact
from shardkit.testing.exact.rules.linear_algebra import FACTORS
from shardkit.testing.exact.rules.operands import Operand, lift_operand
from shardkit.testing.exact.search import Runs

_SCALES = (1.0, 0.3, 0.1, 0.03)
POINTS = 2  # of the first draw at least, and of orders: two tell a constant from an unknown
# By how much real values may differ that are equal, but for rounding; and where factors of matrices magnify it.
_ROUNDS, _ROUNDS_OF_FACTORS = 1e-13, 1e-9
_ROUNDS_OF_FLOATS = 1e-6  # where functions of constants were computed in float32
_FEWEST = 1  # of further draws
_MOST_TIED = 4  # draws in which a comparison was of equal numbers that are remembered
Side = Callable[[Field, Seen | None], list[Operand]]


class UnprovableError(ValueError):
    """Two programs cannot be proved equal for all inputs."""


class UndecidedError(UnprovableError):
    """Two programs are neither proved equal nor shown to differ."""


class Evidence(NamedTuple):
    """What two equal programs were seen to do.

    Attributes:
        field: of the first run.
        degree: bounds of the degree of the results, in all draws.
        draws: the number of draws of real inputs.
        orders: the number of random orders.
        decisions: all comparisons that could go both ways.
        foreign: those of them that only one side makes.
        outside: the line where a value was outside of the domain of a function in a draw; "" if none was.
        no_number: by result, in how many of its elements both sides are no number, and how many it has.
        alone: by result, in how many of its elements one side alone is outside of the domain of a function, at most,
            and how many it has.
        alone_at_zeros: the same of inputs that were chosen, as zeros of a divisor.
        folded: constants that stand for what they were computed of.
    """

    field: Field
    degree: Degree
    draws: int
    orders: int
    decisions: list[Decision]
    foreign: list[Decision]
    outside: str
    no_number: dict[str, tuple[int, int]]
    alone: dict[str, tuple[int, int]]
    alone_at_zeros: dict[str, tuple[int, int]]
    folded: Mapping[Constant, Folded]


class _Results(NamedTuple):
    """What both sides of one run gave.

    Attributes:
        pairs: the results of both.
        equal: of each pair, where it is equal.
        compared: the field in which they were compared.
        coverage: the comparisons that count.
    """

    pairs: list[tuple[Exact, Exact]]
    equal: list[np.ndarray]
    compared: Field
    coverage: Coverage


@dataclass
class ProgramPair:
    """Two programs, and what all their runs have shown.

    Attributes:
        values: how many of the results are no gradients.
        with_unused: the program on the mesh with what no result needs.
        draws: how many of real inputs there were.
        orders: how many random ones.
        degree: bounds of that of the results, in all draws.
        levels: how many primes a further run needs.
        included: by result, which elements were compared.
        outside: the line where a value was first outside of the domain of a function.
        defined: whether in some draw no element was outside of a domain on one side alone.
        numbers: by result, which elements were numbers on both sides.
        no_number: by result, how many elements were no numbers on both sides, and how many there are.
        alone: by result, how many elements were outside of a domain on one side alone, at most, and how many there are.
        alone_at_zeros: the same of inputs that were chosen, as zeros of a divisor.
        by_laws: whether what draws compare is told apart by the laws of roots, as in programs that are equal by them.
        needs_laws: whether both sides were equal by the laws of roots alone in some run.
        tied_draws: by the key of a comparison, the settings, centres and elements of the fields in which it was of
            equal numbers.
        folded: constants that stand for what they were computed of, because both sides are equal then.
    """

    where: str
    subject: str
    names: Sequence[str]
    sides: tuple[Side, Side]
    values: int
    with_unused: Side | None = None
    coverage: Coverage = attribute(default_factory=Coverage)
    field: Field = attribute(init=False)  # of the first run
    draws: int = 0
    orders: int = 0
    degree: Degree = CONSTANT
    seed: int = 0
    levels: int = LEVELS
    shallow: bool = False
    included: dict[str, np.ndarray] = attribute(default_factory=dict)
    numbers: dict[str, np.ndarray] = attribute(default_factory=dict)
    no_number: dict[str, tuple[int, int]] = attribute(default_factory=dict)
    alone: dict[str, tuple[int, int]] = attribute(default_factory=dict)
    alone_at_zeros: dict[str, tuple[int, int]] = attribute(default_factory=dict)
    outside: str = ""
    defined: bool = False
    by_laws: bool = False
    needs_laws: bool = False
    tied_draws: dict[Any, list[Any]] = attribute(default_factory=dict)
    folded: Mapping[Constant, Folded] = attribute(default_factory=dict)

    def draw(self, kind: str) -> None:
        """One more draw, which counts unless its values are beyond floats."""
        with suppress(UnknownValueError):
            self.run(POINTS if self.coverage.identifies else _FEWEST, kind=kind)

    def cross(self, crossings: Crossings, count: int) -> None:
        """So many draws of the same inputs, of which in each one element more is put where a comparison changes."""
        kind, elements = crossings.kind(), list[Element]()
        seed, self.seed = self.seed, self.seed + 1
        levels = self.levels
        try:
            for number in range(count + 1):
                before = Differences()
                field = self._field(_FEWEST, seed, kind=kind, elements=elements)
                self._note_differences(field, before)
                if number:
                    self._count(field)
                    self.levels = levels  # the elements have a residue for each prime of these draws
                    crossings.note_end(self.coverage.tried)
                if number < count:
                    element = self._crossing(field, crossings, elements, before)
                    if element is None:
                        return
                    elements.append(element)
        except (RedrawError, UnknownValueError, TooDeepError):
            return
        except UndecidedError:
            raise
        except UnprovableError:  # as of a loop that inputs like these do not end
            return
        finally:
            self.coverage.differences = None

    def _note_differences(self, field: Field, differences: Differences) -> None:
        """Compares both programs, and keeps what they compare."""
        self.coverage.differences = differences
        self._compare_all(field)

    def _crossing(
        self, field: Field, crossings: Crossings, elements: Sequence[Element], before: Differences
    ) -> Element | None:
        """An element to be put where a comparison changes, by a run in which it is moved."""
        moved = crossings.moved(field, elements)
        if moved is None:
            return None
        after = Differences()
        field = self._field(_FEWEST, field.seed, kind=field.kind, elements=[*elements, moved])
        field.coverage = Coverage(differences=after, identifies=False)
        for number, side in enumerate(self.sides):
            field.coverage.side = (ON_MESH, ALONE)[number]
            side(field, None)
        # Those that are most likely to tell both sides apart, by their keys but for the number of dims.
        preferred = {key[:3] for key in (*self.coverage.foreign_keys(), *self.coverage.find_untied())}
        return crossings.solve(field, moved, before, after, preferred)

    def _field(
        self,
        points: int,
        seed: int,
        order: int | None = None,
        kind: str = "",
        scale: float = 1.0,
        elements: Sequence[Element] = (),
    ) -> Field:
        """A field that notes comparisons."""
        field = Field(points, seed, self.shallow, order, kind, scale, self.levels)
        field.coverage, field.centres = self.coverage, tuple(sorted(self.coverage.constants))
        field.elements = tuple(elements)
        field.folded = self.folded
        return field

    def make_field(self, seed: int, kind: str) -> Field:
        """The field of a draw that notes nothing."""
        field = self._field(_FEWEST, seed, kind=kind)
        field.coverage = None
        return field

    def make_tied_fields(self, key: Any) -> list[Field]:
        """Some of the draws in which a comparison was of equal numbers, as fields that note nothing."""
        fields = []
        for settings, centres, elements in self.tied_draws.get(key, []):
            field = Field(*settings)
            field.centres = centres
            field.elements = elements
            field.folded = self.folded
            fields.append(field)
        return fields

    def _note_ties(self, field: Field, coverage: Coverage) -> None:
        """Notes a draw for the comparisons that it made of equal numbers."""
        if not field.planted:
            return
        for key, decision in coverage.decisions.items():
            draws = self.tied_draws.setdefault(key, [])
            if np.any(decision.tied) and len(draws) < _MOST_TIED:
                draws.append((field.settings, field.centres, field.elements))

    def evidence(self) -> Evidence:
        """What all runs have shown."""
        decisions, foreign = self.coverage.free(), self.coverage.foreign()
        return Evidence(
            self.field,
            self.degree,
            self.draws,
            self.orders,
            decisions,
            foreign,
            self.outside,
            self.no_number,
            self.alone,
            self.alone_at_zeros,
            self.folded,
        )

    def run(self, points: int, order: int | None = None, kind: str = "") -> None:
        """Both programs in one field, drawn until no divisor is zero by chance, and values are within floats."""
        scale, redrawn = 0, 0
        while redrawn < SEEDS:
            field = self._field(points, self.seed, order, kind, _SCALES[scale])
            self.seed += order is None
            try:
                self._compare_all(field)
            except RedrawError:
                redrawn += 1
            except UnknownValueError:
                scale += 1
                if scale == len(_SCALES):
                    raise
            except TooDeepError:
                self._deeper()
            else:
                self._count(field)
                return
        raise UnprovableError(
            f"{self.where}: a divisor must not be zero for most inputs; at {SEEDS} draws one was. Remove a division "
            "by a value that is always zero."
        )

    def _count(self, field: Field) -> None:
        if not self.draws + self.orders:
            self.field = field
        self.draws += field.order is None
        self.orders += field.order is not None
        self.levels = min(self.levels, field.deepest + 3)
        self.outside = self.outside or field.outside

    def _deeper(self) -> None:
        """More primes; where there are none, `logistic` is left uninterpreted."""
        if self.levels < LEVELS:
            self.levels = LEVELS
        elif self.shallow:
            raise UnprovableError(
                f"{self.where}: exps may be nested at most {LEVELS - 1} deep, from an input to a result; these "
                "programs nest more. Pass a model of fewer layers: a layer more proves nothing else."
            ) from None
        else:
            self.shallow = True

    def excluded(self) -> str:
        """The name of a result of which an element was never compared; "" if there is none."""
        return next((name for name, done in self.included.items() if not done.all()), "")

    def _compare_all(self, field: Field) -> None:
        """Refuses results of the program on the mesh that are not those of the one alone."""
        # What counts is noted where it is compared: the laws of roots change residues, and so which differences are
        # compared with zero, and which of them both sides compare.
        results = self._run_and_compare(field)
        if not _are_all(results.equal):
            folded = self._run_with_folded_constants(field, results)
            if folded is not None:
                results = folded
        pairs, equal, compared, coverage = results
        alike = True
        for index, ((x, y), mask) in enumerate(zip(pairs, equal, strict=True)):
            alike &= self._compare(compared, index, self.names[index], x, y, mask)
        if any(_are_outside(x, y).any() for x, y in pairs):  # perhaps it is this that hangs on a tie
            coverage.forget_ties()
        self._note_ties(field, coverage)
        self.coverage.merge(coverage)
        if compared is not field:
            field.add_notes(compared, (ON_MESH, ALONE))
        self.defined |= alike and field.order is None and not field.planted

    def _run_and_compare(self, field: Field) -> _Results:
        """Both programs in a field; where they differ once more, with the laws of roots."""
        field.coverage = self._make_coverage(self.coverage.differences)
        pairs = self._pair_results(field, *self._run_both(field))
        equal = [find_equal(field, x, y) for x, y in pairs]
        compared = field
        coverage = field.coverage
        has_roots = field.roots.squares or field.roots.of_powers
        by_laws = self.by_laws and field.order is None
        if has_roots and (by_laws or not _are_all(equal)):
            with_laws = self._make_with_laws_of_roots(field)
            # What has no number with these laws is as it was without them.
            with suppress(RedrawError, TooDeepError, UnknownValueError):
                pairs_by_laws = self._pair_results(with_laws, *self._run_both(with_laws))
                equal_by_laws = [find_equal(with_laws, x, y) for x, y in pairs_by_laws]
                if not _are_all(equal) and _are_all(equal_by_laws):
                    pairs = pairs_by_laws
                    equal = equal_by_laws
                    compared = with_laws
                    self.needs_laws = True
                    self.by_laws |= not self.draws + self.orders
                if compared is with_laws or by_laws:
                    coverage = with_laws.coverage
        return _Results(pairs, equal, compared, coverage)

    def _run_with_folded_constants(self, field: Field, results: _Results) -> _Results | None:
        """The same where constants of a side stand for what they were computed of; None if that is not why it differs.

        Only where both sides are equal but for rounding: of a difference of two such constants little would be true.
        """
        if field.order is not None:
            return None
        if not all(_are_close(field, x, y, _ROUNDS_OF_FLOATS) for x, y in results.pairs):
            return None
        on_mesh, alone = [field.constants.get(side, set()) for side in (ON_MESH, ALONE)]
        folded = explain_constants(on_mesh, alone) or explain_constants(alone, on_mesh)
        if not folded:
            return None
        other = field.with_folded(folded)
        with suppress(RedrawError, TooDeepError, UnknownValueError):
            again = self._run_and_compare(other)
            if _are_all(again.equal):
                self.folded = other.folded
                return again
        return None

    def _make_coverage(self, differences: Differences | None = None) -> Coverage:
        """What notes the comparisons of one run."""
        return Coverage(identifies=self.coverage.identifies, differences=differences)

    def _make_with_laws_of_roots(self, field: Field) -> Field:
        """The same field, in which multiples of roots are followed through products and quotients."""
        other = field.with_laws_of_roots()
        other.coverage = self._make_coverage()
        with suppress(RedrawError):
            remember_roots(other, field.roots, field.roots.degree_of_squares)
        return other

    def _pair_results(
        self, field: Field, got: Sequence[Operand], wanted: Sequence[Operand]
    ) -> list[tuple[Exact, Exact]]:
        """The results that are compared, of both sides."""
        pairs = []
        for index, (x, y) in enumerate(zip(got, wanted, strict=True)):
            if index < self.values or not field.planted:
                pairs.append((lift_operand(field, x), lift_operand(field, y)))
        return pairs

    def _run_both(self, field: Field) -> tuple[list[Operand], list[Operand]]:
        """The results of the program on the mesh, and of the one alone."""
        on_mesh, alone = self.sides
        try:
            if field.coverage is not None:
                field.coverage.side = ALONE
            wanted = alone(field, None)
            if field.coverage is not None:
                field.coverage.side = ON_MESH
            got = on_mesh(field, None)
        except UnsupportedError as error:
            raise UnprovableError(
                f"{self.where}: each operation on a float must have a meaning in a finite field; {error} "
                f"{f'at {error.line} ' if error.line else ''}has none. Prove the part before it, or compare floats "
                "with assert_matches_reference."
            ) from error
        except HangsError as error:
            raise UnequalError(f"{self.subject}{error}") from error
        except DiffersError as error:
            line = self._locate(field, 0, None)
            raise UnequalError(f"{self.subject}{error} differs between devices{line}.") from error
        return got, wanted

    def _compare(self, field: Field, index: int, name: str, a: Exact, b: Exact, equal: np.ndarray) -> bool:
        """Refuses a result that differs; whether both sides are outside of domains at the same elements."""
        logs = field.logs or a.factor is not None or b.factor is not None  # whose exps are compared
        most = max(a.used.max(initial=0), b.used.max(initial=0))
        field.deepest = max(field.deepest, int(most))
        if most + logs >= field.levels:
            raise TooDeepError
        if not equal.all():
            agree, hint = _agree(field, a, b), _missing_law(field)
            text = self._describe(field, index, a, b)
            if agree:
                precision = "float32" if _rounds_apart(field) or field.compiled else "float64"
                raise UndecidedError(
                    f"{self.subject}not decided: the {name} is the reference's in {precision} for the inputs that were "
                    f"drawn, but by no law that a proof knows{text}{hint}"
                )
            raise UnequalError(f"{self.subject}the {name} is not the reference's for all inputs{_among(field)}{text}.")
        are_numbers = (a.poison == 0) & (b.poison == 0)
        self.numbers[name] = are_numbers | self.numbers.get(name, False)
        if field.order is None and not field.planted:  # else it is compared for inputs that are equal alone
            self.degree = self.degree.plus(a.degree, b.degree)
            done = ~_are_outside(a, b)
            self.included[name] = done | self.included.get(name, False)
            both = int(((a.poison > 0) & (b.poison > 0) & done).sum())
            if both:
                self.no_number[name] = both, a.poison.size
        alone = ((a.poison == OUTSIDE) & (b.poison == 0)) | ((b.poison == OUTSIDE) & (a.poison == 0))
        if alone.any() and not field.planted:
            most, _ = self.alone.get(name, (0, 0))
            self.alone[name] = max(most, int(alone.sum())), alone.size
        elif alone.any():
            most, _ = self.alone_at_zeros.get(name, (0, 0))
            self.alone_at_zeros[name] = max(most, int(alone.sum())), alone.size
        return not alone.any()

    def _describe(self, field: Field, index: int, got: Exact, wanted: Exact) -> str:
        """How and where a result differs, as the end of a sentence."""
        number = _find_no_number(got, wanted)
        if not number:
            return self._locate(field, index, wanted)
        remedy = self._locate(field, index, wanted, only_remedy=True)
        if remedy:
            return f"{number}. {remedy}"
        first = _find_first_no_number(self._runs(field), got, wanted)
        return f"{number}, first by {first}" if first else number

    def _locate(self, field: Field, index: int, wanted: Exact | None, only_remedy: bool = False) -> str:
        """How and where a result differs; "" in an order behind draws, whose differences say what is not decided."""
        if field.order is not None and self.draws:
            return ""
        describe = describe_remedy if only_remedy else describe_difference
        runs = self._runs(field)
        if self.with_unused is not None:
            with suppress(UnsupportedError, RedrawError, TooDeepError, UnknownValueError, HangsError):
                return describe(runs._replace(on_mesh=self.with_unused), index, wanted)
        return describe(runs, index, wanted)

    def _runs(self, field: Field) -> Runs:
        """Both programs, to be run once more without noting comparisons."""
        field.coverage = None
        return Runs(field, *self.sides, self.values)


def _are_outside(x: Exact, y: Exact) -> np.ndarray:
    """bool [...]: where a side is outside of the domain of a function, so that nothing is compared."""
    return (x.poison == OUTSIDE) | (y.poison == OUTSIDE)


def _are_all(masks: Sequence[np.ndarray]) -> bool:
    return all(mask.all() for mask in masks)


def _among(field: Field) -> str:
    """For which inputs a difference was seen, if they are chosen."""
    if field.elements:
        return ", for some that a comparison tells apart"
    return ", where some inputs are equal" if field.planted else ""


def _find_no_number(x: Exact, y: Exact) -> str:
    """In how many elements a result is no number where the other side has one; "" if that is not how they differ."""
    ours = (x.poison == NOT_A_NUMBER) & (y.poison == 0)
    theirs = (y.poison == NOT_A_NUMBER) & (x.poison == 0)
    wrong = ours | theirs
    if not wrong.any():
        return ""
    which, other = ("it", "the reference") if ours.any() else ("the reference", "it")
    return f": in {int(wrong.sum())} of {wrong.size} elements {which} is NaN, where {other} is a number"


def _find_first_no_number(runs: Runs, x: Exact, y: Exact) -> str:
    """The first equation that gives no number of numbers, on the side that has none; "" if there is none."""
    makers: list[str] = []

    def note(equation: Any, operands: Sequence[Operand], results: Sequence[Operand], axes: object, around: str) -> None:
        if any(_has_no_number(z) for z in operands):
            return
        if any(_has_no_number(z) for z in results):
            makers.append(f"{equation.primitive.name} at {source_line(equation, around)}")

    on_mesh = bool(((x.poison == NOT_A_NUMBER) & (y.poison == 0)).any())
    side = runs.on_mesh if on_mesh else runs.alone
    side(runs.field, note)
    return makers[0] if makers else ""


def _agree(field: Field, x: Exact, y: Exact) -> bool:
    """Whether results that are other numbers have the same real values, but for rounding."""
    rounds = _ROUNDS
    if _rounds_apart(field) or field.compiled:
        rounds = _ROUNDS_OF_FLOATS
    elif field.uninterpreted & FACTORS:
        rounds = _ROUNDS_OF_FACTORS
    return _are_close(field, x, y, rounds)


def _are_close(field: Field, x: Exact, y: Exact, rounds: float) -> bool:
    """Whether real values differ by no more than such a share of the largest one."""
    here = (x.poison != OUTSIDE) & (y.poison != OUTSIDE)
    a, b = x.real[0][here], y.real[0][here]
    if field.order is not None or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return False
    return bool((np.abs(a - b) <= rounds * np.maximum(np.abs(b), np.abs(b).max(initial=0.0))).all())


def _rounds_apart(field: Field) -> bool:
    """Whether the sides computed other functions of constants in float32: log(2) + log(3) is not log(6) there."""
    return field.rounded_values.get(ON_MESH) != field.rounded_values.get(ALONE)


def _has_no_number(x: Operand) -> bool:
    if isinstance(x, Exact):
        return bool((x.poison == NOT_A_NUMBER).any())
    return x.dtype.kind == "f" and bool(np.isnan(x).any())


def _missing_law(field: Field) -> str:
    """Ends the message: what to do where a law is missing, by the functions of which few are known."""
    names = sorted({*field.uninterpreted, *field.rounded, *(["log"] if field.logs else [])}) or ["constants"]
    listed = " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    return (
        f". An identity of {listed} is missing: write that part alike on both sides, or compare floats with "
        "assert_matches_reference."
    )
