"""Two programs that are run in the same fields, and what all their runs have shown.

A run has a field, with drawn numbers for the inputs: a "draw" has real values too, which decide comparisons, and an
"order" puts numbers into a random order. Both programs are evaluated in the field, and each result of one is compared
with that of the other. What a run has shown, as which elements were numbers on both sides, is kept for the certificate.

Worked example: `psum(x * x, "data")` and `(x * x).sum()`, of two floats.

    run(points=3)          a draw of seed 0: both sides are the same numbers modulo each prime; degree 2
    draw("wide")           one more draw, of wide inputs, where comparisons may go another way
    collect_evidence()     2 draws, 0 orders, no decisions: all that a certificate says
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from dataclasses import field as attribute

import numpy as np

from shardkit.testing._compare import UnequalError
from shardkit.testing.exact.agreement import agree, describe_missing_law, rounds_in_float32
from shardkit.testing.exact.compared_elements import ComparedElements, are_any_outside
from shardkit.testing.exact.coverage import ALONE, ON_MESH, Coverage
from shardkit.testing.exact.decision import Key
from shardkit.testing.exact.difference import describe_difference, describe_remedy
from shardkit.testing.exact.evidence import Evidence, UndecidedError, UnprovableError
from shardkit.testing.exact.interpreter import Seen
from shardkit.testing.exact.no_number import describe_no_number, find_first_no_number
from shardkit.testing.exact.numbers.errors import (
    NO_VALUE,
    CollectiveError,
    NestedLogarithmsError,
    RedrawError,
    TooDeepError,
    UnknownValueError,
    UnsupportedError,
)
from shardkit.testing.exact.numbers.field import ANY, SEEDS, Field, Settings
from shardkit.testing.exact.numbers.folded import Constant, Folded
from shardkit.testing.exact.numbers.orders import find_equal
from shardkit.testing.exact.numbers.square_roots import remember_roots
from shardkit.testing.exact.numbers.tower import LEVELS
from shardkit.testing.exact.numbers.values import CONSTANT, Degree, Element, Exact
from shardkit.testing.exact.pieces import DiffersError
from shardkit.testing.exact.rules.operands import Operand, lift_operand
from shardkit.testing.exact.search import Runs
from shardkit.testing.exact.second_runs import Results, run_again

# By what normal inputs are multiplied, in turn, until all values are within floats.
_SCALES = (1.0, 0.3, 0.1, 0.03)
# The points of the first draw at least, and of orders: two tell a constant from an unknown.
POINTS = 2
# The points of further draws.
FEWEST_POINTS = 1
# Each logarithm of a logarithm takes a prime: so many leave enough of them for exps.
_MOST_NESTED = LEVELS // 2
# So many draws are remembered in which a comparison was of equal numbers.
_MOST_TIED = 4
# One of the programs: takes a field and what watches the run, and returns its results.
Side = Callable[[Field, Seen | None], list[Operand]]


@dataclass
class ProgramPair:
    """Two programs, and what all their runs have shown.

    Attributes:
        where: the name of the function that users called, which begins messages.
        subject: the beginning of a message that says that a result differs.
        names: the names of the results.
        sides: the program on the mesh, and the reference.
        values: how many of the results are values; the others are gradients.
        with_unused: the program on the mesh with the equations that no result needs.
        coverage: the comparisons of both programs in all runs.
        field: the field of the first run.
        draws: the number of draws of real inputs.
        orders: the number of random orders.
        degree: bounds of the degree of the results, in all draws.
        seed: the seed of the next draw.
        levels: how many primes a further run needs.
        log_depth: how deep logarithms that become numbers are nested.
        shallow: whether `logistic` is uninterpreted, because the tower has too few primes for its exps.
        elements: which elements of the results were compared.
        by_laws: whether the comparisons of draws are told apart by the laws of roots, as in programs that are equal by
            these laws.
        needs_laws: whether both sides were equal by the laws of roots alone in some run.
        tied_draws: for each comparison, by its key, the fields of draws in which it compared equal numbers.
        folded: constants that stand for the numbers from which they were computed, because both sides are equal then.
        lacks_floats: whether floats were to propose inputs, and jax cannot run the programs for many of them.
        exact_functions: whether functions of constants are computed in the field, because both sides are equal then.
    """

    where: str
    subject: str
    names: Sequence[str]
    sides: tuple[Side, Side]
    values: int
    with_unused: Side | None = None
    coverage: Coverage = attribute(default_factory=Coverage)
    field: Field = attribute(init=False)
    draws: int = 0
    orders: int = 0
    degree: Degree = CONSTANT
    seed: int = 0
    levels: int = LEVELS
    log_depth: int = 1
    shallow: bool = False
    elements: ComparedElements = attribute(default_factory=ComparedElements)
    by_laws: bool = False
    needs_laws: bool = False
    tied_draws: dict[Key, list[Field]] = attribute(default_factory=dict)
    folded: Mapping[Constant, Folded] = attribute(default_factory=dict)
    lacks_floats: bool = False
    exact_functions: bool = False

    def collect_evidence(self) -> Evidence:
        """What all runs have shown."""
        return Evidence(
            field=self.field,
            degree=self.degree,
            draws=self.draws,
            orders=self.orders,
            decisions=self.coverage.list_free(),
            foreign=self.coverage.list_foreign(),
            outside=self.elements.outside,
            no_number=self.elements.no_number,
            alone=self.elements.alone,
            alone_at_zeros=self.elements.alone_at_zeros,
            folded=self.folded,
            lacks_floats=self.lacks_floats,
            sorted_lines=self.coverage.list_sorted_lines(),
        )

    # Runs

    def run(self, points: int, order: int | None = None, kind: str = ANY) -> None:
        """Compares both programs in one field.

        The field is drawn again until no divisor is zero by chance, and values are within floats.

        Args:
            points: the number of random points.
            order: the number of a random order; None for a draw.
            kind: the kind of the inputs of a draw (`Settings.kind`).
        """
        scale = 0
        redrawn = 0
        while redrawn < SEEDS:
            field = self.make_field(points, self.seed, order, kind, scale=_SCALES[scale])
            if order is None:
                self.seed += 1
            try:
                self.compare(field)
            except RedrawError:
                redrawn += 1
            except UnknownValueError:
                scale += 1
                if scale == len(_SCALES):
                    raise
            except TooDeepError:
                self._use_more_primes()
            except NestedLogarithmsError:
                self._nest_logarithms()
            else:
                self.count_run(field)
                return
        raise UnprovableError(
            f"{self.where}: a divisor must not be zero for most inputs; at {SEEDS} draws one was. Remove a division "
            "by a value that is always zero."
        )

    def draw(self, kind: str) -> None:
        """One more draw, which counts unless its values are beyond floats."""
        points = POINTS if self.coverage.identifies else FEWEST_POINTS
        with suppress(UnknownValueError):
            self.run(points, kind=kind)

    def count_run(self, field: Field) -> None:
        """Counts a run whose results were equal."""
        if self.draws + self.orders == 0:
            self.field = field
        if field.settings.order is None:
            self.draws += 1
        else:
            self.orders += 1
        # One more than the question that needs most; logarithms may take the highest ones.
        self.levels = min(self.levels, field.notes.deepest + 2 + self.log_depth)
        self.elements.outside = self.elements.outside or field.notes.outside

    def _use_more_primes(self) -> None:
        """More primes for the next runs; where there are none, `logistic` is left uninterpreted."""
        if self.levels < LEVELS:
            self.levels = LEVELS
        elif self.shallow:
            raise UnprovableError(
                f"{self.where}: exps may be nested at most {LEVELS - 1} deep, from an input to a result; these "
                "programs nest more. Pass a model of fewer layers: a layer more proves nothing else."
            ) from None
        else:
            self.shallow = True

    def _nest_logarithms(self) -> None:
        """One prime more that logarithms may take, for the next runs."""
        if self.log_depth == _MOST_NESTED:
            raise UnprovableError(
                f"{self.where}: logarithms that are multiplied by numbers may be nested at most {_MOST_NESTED} deep, "
                "from an input to a result; these programs nest more. Prove a part of them."
            ) from None
        self.log_depth += 1
        self.levels = LEVELS

    # Fields

    def make_field(
        self,
        points: int,
        seed: int,
        order: int | None = None,
        kind: str = ANY,
        crossed: bool = False,
        scale: float = 1.0,
        elements: Sequence[Element] = (),
    ) -> Field:
        """A field that notes comparisons, and takes for equal numbers what made both sides equal before."""
        settings = Settings(
            points=points,
            seed=seed,
            shallow=self.shallow,
            order=order,
            kind=kind,
            crossed=crossed,
            scale=scale,
            levels=self.levels,
            log_depth=self.log_depth,
        )
        field = Field(settings)
        field.coverage = self.coverage
        field.choices.centres = tuple(sorted(self.coverage.constants))
        field.choices.elements = tuple(elements)
        field.choices.folded = self.folded
        field.choices.exact_functions = self.exact_functions
        return field

    def make_silent_field(self, seed: int, kind: str) -> Field:
        """The field of a draw that notes no comparisons."""
        field = self.make_field(FEWEST_POINTS, seed, kind=kind)
        field.coverage = None
        return field

    def make_tied_fields(self, key: Key) -> list[Field]:
        """Some of the draws in which a comparison was of equal numbers, as fields that have noted nothing."""
        fields = []
        for tied_field in self.tied_draws.get(key, []):
            field = tied_field.like()
            field.choices.folded = self.folded
            fields.append(field)
        return fields

    # Comparing results

    def compare(self, field: Field) -> None:
        """Refuses results of the program on the mesh that are not those of the reference."""
        results = self._run_and_compare(field)
        if not results.are_equal():
            results = run_again(self._run_and_compare, self.subject, field, results)
        if results.are_equal():
            # What made them equal is chosen for further runs too.
            self.folded = results.field.choices.folded
            self.exact_functions = results.field.choices.exact_functions
        are_defined = True
        for index, ((x, y), equal) in enumerate(zip(results.pairs, results.equal, strict=True)):
            is_defined = self._check_result(results.field, index, x, y, equal)
            are_defined = are_defined and is_defined
        # Comparisons are noted in the field in which results are compared: the laws of roots change residues, and so
        # which differences are compared with zero, and which of them both sides compare.
        coverage = results.coverage
        # An element that is not compared may be the one whose value depends on a tie.
        if are_any_outside(results.pairs):
            coverage.forget_ties()
        self._note_ties(field, coverage)
        self.coverage.merge(coverage)
        if results.field is not field:
            field.add_notes(results.field, (ON_MESH, ALONE))
        if are_defined and field.settings.order is None and not field.planted:
            self.elements.are_defined = True

    def _note_ties(self, field: Field, coverage: Coverage) -> None:
        """Notes a draw for the comparisons that it made of equal numbers."""
        if not field.planted:
            return
        tied_field = field.like()
        for key, decision in coverage.decisions.items():
            draws = self.tied_draws.setdefault(key, [])
            if np.any(decision.was_tied) and len(draws) < _MOST_TIED:
                draws.append(tied_field)

    def _run_and_compare(self, field: Field) -> Results:
        """The results of both programs in a field; if they differ, in the same field with the laws of roots."""
        field.coverage = Coverage(
            identifies=self.coverage.identifies,
            differences=self.coverage.differences,
            asks_for_touches=self.coverage.asks_for_touches,
        )
        results = self._compare_pairs(field)
        has_roots = field.laws.roots.squares or field.laws.roots.of_powers
        by_laws = self.by_laws and field.settings.order is None
        if not has_roots or (results.are_equal() and not by_laws):
            return results
        with_laws = self._make_field_with_laws_of_roots(field)
        # Programs whose numbers have no value with these laws are compared without them.
        with suppress(*NO_VALUE):
            results_by_laws = self._compare_pairs(with_laws)
            if not results.are_equal() and results_by_laws.are_equal():
                self.needs_laws = True
                # The first run decides by which laws comparisons are told apart.
                if self.draws + self.orders == 0:
                    self.by_laws = True
                return results_by_laws
            if by_laws:
                return results._replace(coverage=with_laws.coverage)
        return results

    def _make_field_with_laws_of_roots(self, field: Field) -> Field:
        """The same field, in which multiples of roots are followed through products and quotients."""
        with_laws = field.with_laws_of_roots()
        with_laws.coverage = Coverage(identifies=self.coverage.identifies)
        with suppress(RedrawError):
            remember_roots(with_laws, field.laws.roots, field.laws.roots.degree_of_squares)
        return with_laws

    def _compare_pairs(self, field: Field) -> Results:
        """Runs both programs in a field, and compares their results there."""
        on_mesh, alone = self._run_both(field)
        pairs = []
        for index, (x, y) in enumerate(zip(on_mesh, alone, strict=True)):
            # Of inputs that are equal the gradient is a matter of convention.
            if index < self.values or not field.planted:
                pairs.append((lift_operand(field, x), lift_operand(field, y)))
        equal = [find_equal(field, x, y) for x, y in pairs]
        return Results(pairs, equal, field, field.coverage)

    def _run_both(self, field: Field) -> tuple[list[Operand], list[Operand]]:
        """The results of the program on the mesh, and of the reference."""
        run_on_mesh, run_alone = self.sides
        try:
            field.coverage.side = ALONE
            alone = run_alone(field, None)
            field.coverage.side = ON_MESH
            on_mesh = run_on_mesh(field, None)
        except UnsupportedError as error:
            place = f"at {error.line} " if error.line else ""
            raise UnprovableError(
                f"{self.where}: each operation on a float must have a meaning in a finite field; {error} {place}has "
                "none. Prove the part before it, or compare floats with assert_matches_reference."
            ) from error
        except CollectiveError as error:
            raise UnequalError(f"{self.subject}{error}") from error
        except DiffersError as error:
            line = self._locate(field, 0, None)
            raise UnequalError(f"{self.subject}{error} differs between devices{line}.") from error
        return on_mesh, alone

    def _check_result(self, field: Field, index: int, a: Exact, b: Exact, equal: np.ndarray) -> bool:
        """Refuses a result that differs.

        Args:
            field: the field in which the results were compared.
            index: the number of the result.
            a: the result of the program on the mesh.
            b: the result of the reference.
            equal: bool [...], where both are equal.

        Returns:
            Whether no element is outside of the domain of a function on one side alone.
        """
        self._check_depth(field, a, b)
        if not equal.all():
            self._refuse(field, index, a, b)
        name = self.names[index]
        self.elements.note_numbers(name, a, b)
        # Of an order, or of planted inputs, a result says something of these inputs alone.
        if field.settings.order is None and not field.planted:
            self.degree = self.degree.plus(a.degree, b.degree)
            self.elements.note_compared(name, a, b)
        return self.elements.note_alone(name, a, b, field.planted)

    def _check_depth(self, field: Field, a: Exact, b: Exact) -> None:
        """Refuses results for which no prime is left that exps and logarithms have not used up."""
        used_by_a = a.both_used.max(initial=0)
        used_by_b = b.both_used.max(initial=0)
        used = int(max(used_by_a, used_by_b))
        field.notes.deepest = max(field.notes.deepest, used)
        # Logarithms that became numbers take the highest primes. A factor of a logarithm is compared by its exp.
        if field.notes.logs or a.factor is not None or b.factor is not None:
            used += field.settings.log_depth
        if used >= field.settings.levels:
            raise TooDeepError

    def _refuse(self, field: Field, index: int, a: Exact, b: Exact) -> None:
        """Raises the error of a result that differs: not decided if both sides have the same real values."""
        are_alike = agree(field, a, b)
        hint = describe_missing_law(field)
        precision = "float32" if rounds_in_float32(field) else "float64"
        name = self.names[index]
        description = self._describe(field, index, a, b)
        if are_alike:
            raise UndecidedError(
                f"{self.subject}not decided: the {name} is the reference's in {precision} for the inputs that were "
                f"drawn, but by no law that a proof knows{description}{hint}"
            )
        raise UnequalError(
            f"{self.subject}the {name} is not the reference's for all inputs{_describe_inputs(field)}{description}."
        )

    # Where results differ

    def _describe(self, field: Field, index: int, result: Exact, expected: Exact) -> str:
        """How and where a result differs, as the end of a sentence."""
        words = describe_no_number(result, expected)
        if not words:
            return self._locate(field, index, expected)
        remedy = self._locate(field, index, expected, only_remedy=True)
        if remedy:
            return f"{words}. {remedy}"
        line = find_first_no_number(self._make_runs(field), result, expected)
        if line:
            return f"{words}, first by {line}"
        return words

    def _locate(self, field: Field, index: int, expected: Exact | None, only_remedy: bool = False) -> str:
        """How and where a result differs; "" in an order behind draws, whose differences say what is not decided."""
        if field.settings.order is not None and self.draws:
            return ""
        describe = describe_remedy if only_remedy else describe_difference
        runs = self._make_runs(field)
        # First with the equations that no result needs: the mistake may be that one of their values is not read.
        if self.with_unused is not None:
            with suppress(*NO_VALUE, UnsupportedError, CollectiveError):
                return describe(runs._replace(on_mesh=self.with_unused), index, expected)
        try:
            return describe(runs, index, expected)
        except CollectiveError as error:
            # A repair is tried with other numbers too. There a collective is wrong by itself, which says more.
            raise UnequalError(f"{self.subject}{error}") from error

    def _make_runs(self, field: Field) -> Runs:
        """Both programs, to be run once more without noting comparisons."""
        field.coverage = None
        on_mesh, alone = self.sides
        return Runs(field, on_mesh, alone, self.values)


def _describe_inputs(field: Field) -> str:
    """For which inputs a difference was seen, if they are chosen."""
    if field.choices.elements:
        return ", for some that a comparison tells apart"
    if field.planted:
        return ", where some inputs are equal"
    return ""
