"""The field that a program runs in: its residues, its constants, and the chance that a comparison is wrong.

It also has what the run notes (`notes.py`), and what is known of numbers beside their residues (`number_laws.py`).

We test polynomial identities at random points. Two different polynomials agree at a random point with a chance of at
most degree / size of the field (Schwartz and Zippel), so a sum, product or quotient that agrees at a few points is the
same for all inputs, but for that chance. A number of the program is therefore an array of components: its residue at
each of some random points, modulo each prime of a tower.

Why a tower: an exp leads from one prime p to the next one, q = 2 p + 1 (`tower.py`). The number 4 has order p modulo q:
4**p is 1. So 4**(a + b) = 4**a 4**b depends on a and b modulo p alone, and is an exponential function from the numbers
modulo p to those modulo q. The residues of x modulo p and modulo q are drawn independently of each other, so that
exp(x) is to the other numbers modulo q as random as one more input: a polynomial of both is tested as any other. That
exps of different arguments, as of x and of x * x, have independent values is an assumption, which a certificate states.
Worked example, with the primes 5, 11, 23:

    modulo            5                 11                       23
    x                 3                 7                        19
    exp(x)            no component      4**3 = 9 (from x mod 5)  4**7 = 8 (from x mod 11)
    exp(exp(x))       no component      no component             4**9 = 13

So each exp uses up the lowest prime that was left. A logarithm leads back, from q to p: it is kept as its argument, the
`factor` of an array, and where it is needed as a number, it has no value modulo the highest prime, above which there is
no other. Two numbers are compared in the components that both have (`valid`).

Residues have no order, and comparisons need one. A run decides them in one of two ways. In a "draw", real inputs are
drawn beside the residues, and every operation is done on them too, in float64. The residue of an input has nothing to
do with its real value: residues say whether two numbers are equal, real values which of two is larger, so that each
branch is taken for inputs that exist. In an "order", real values decide nothing: numbers are put into a random total
order, so that a branch is taken that no draw has reached (see `orders.py`).

NaN is a kind of its own: infinity less infinity, zero times infinity, 0 / 0, an element that a gather reads out of
bounds. It spreads as in floats, and equals no number. A value from outside of the domain of a function, as the
logarithm of a number that happens to be negative in a draw, is told apart from it: nothing is compared there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shardkit.testing.exact.numbers.computed import Computations
from shardkit.testing.exact.numbers.errors import RedrawError, TooDeepError
from shardkit.testing.exact.numbers.folded import Constant, Folded
from shardkit.testing.exact.numbers.lifting import MOST_KEPT, Lifted, lift_array
from shardkit.testing.exact.numbers.marks import Marks
from shardkit.testing.exact.numbers.notes import Notes
from shardkit.testing.exact.numbers.number_laws import NumberLaws
from shardkit.testing.exact.numbers.residues import Residues
from shardkit.testing.exact.numbers.roots import NO_ROOT
from shardkit.testing.exact.numbers.tower import LEVELS, PRIMES
from shardkit.testing.exact.numbers.values import (
    CONSTANT,
    NOT_A_NUMBER,
    OUTSIDE,
    TRULY,
    Degree,
    Element,
    Exact,
    build_facts,
)

# What the real inputs of a draw are. The first draws use one kind for all inputs; further draws choose one by input.
ANY = "any"
KINDS = ("normal", "positive", "wide", "unit", "negative", "near")
MIXED = "mixed"  # of which each element is one of the kinds
SIMILAR = "similar"  # of which rows, columns or all elements are one of the kinds, and differ by little
# All inputs are of one size: a norm of a hundred of them is then below, or above, the bound to which it is clipped.
SCALED = ("tiny", "large", "tiniest")
NARROW = "narrow"  # about zero
# Kinds that plant equal rows or elements, or zeros. A division by zero is then the draw's, not the program's, and
# gradients are not compared: the derivative of a maximum of equal numbers is a matter of convention.
ROWS = "rows"  # rows, columns and blocks are zero, of one number, or all the same, as padding and duplicates are
WHOLE = "whole"  # small whole numbers, or halves of them: computed numbers are then equal too
PLANTED = ("alike", "repeated", "zero", ROWS, WHOLE)
# Those of which more numbers are equal, or zero, than were to be.
COINCIDING = ("zero", ROWS, WHOLE)
_ALL_KINDS = {ANY, *KINDS, MIXED, SIMILAR, NARROW, *SCALED, *PLANTED}
# Where a divisor is zero at some point by chance, the points are drawn again, at most so many times.
SEEDS = 8
# Where the outcome of a comparison is turned round, beside bool [...] for some elements (`hidden.py`).
EVERYWHERE = np.ones((), bool)
TIES = "where both numbers are equal"


class Settings(NamedTuple):
    """What a field is made of.

    Attributes:
        points: how many random points there are.
        seed: which points, and which inputs, are drawn.
        shallow: whether `logistic` is uninterpreted too, which then uses up no prime.
        order: which order decides comparisons; None where the real values of a draw do.
        kind: the kind of the inputs of a draw: one of KINDS, PLANTED or SCALED; MIXED, SIMILAR or NARROW; ANY for one
            of KINDS for each input.
        crossed: whether the elements of `Choices.elements` are put where a comparison changes its answer, as for a
            maximum of equal numbers: the draw then counts as one of chosen inputs (`planted`).
        scale: the factor by which normal inputs are multiplied.
        levels: how many primes of the tower are used. They are the highest ones, numbered from 0 here.
        laws_of_roots: whether multiples of roots are followed through products and quotients (`roots.py`).
        log_depth: how deep logarithms that become numbers may be nested. So many of the highest primes are passed over
            once one has.
    """

    points: int
    seed: int
    shallow: bool = False
    order: int | None = None
    kind: str = KINDS[0]
    crossed: bool = False
    scale: float = 1.0
    levels: int = LEVELS
    laws_of_roots: bool = False
    log_depth: int = 1


@dataclass
class Choices:
    """What a search has chosen for a run, from what it learned in runs before.

    Attributes:
        centres: logarithms of the constants that are compared: inputs of the kind "near" are drawn around them.
        elements: by the name of an input, values that its elements must have in this draw.
        folded: constants that stand for the exact values of computations, by value and dtype.
        turned: the comparisons whose outcome is turned round in this run (`hidden.py`), by the id of the equation and
            the part of it; where it is so: EVERYWHERE, TIES, or bool [...].
        exact_functions: whether exps, logarithms and roots of constants are computed in the field, and not in floats.
        same_keys: whether equal numbers have the same place in the order, however float64 rounds each of them.
    """

    centres: tuple[float, ...] = ()
    elements: tuple[Element, ...] = ()
    folded: Mapping[Constant, Folded] = dataclasses.field(default_factory=dict)
    turned: Mapping[tuple[int, str], np.ndarray | str] = dataclasses.field(default_factory=dict)
    exact_functions: bool = False
    same_keys: bool = False


class Field:
    """A field at random points. Each run, of both programs one after the other, has a field of its own.

    `values.py` says of what an array consists: residues, and beside them infinity, `poison`, and the `factor` of a
    logarithm.

    Attributes:
        settings: what this field was made of.
        choices: what a search has chosen for the run.
        compiled: whether a side is a compiled program: random bits are jax's own, and constants are of float32. What
            proves compiled programs sets it.
        coverage: notes which way comparisons went; None if nothing does. `ProgramPair` sets it.
        memory: recalls the results of a first run; None if nothing does. A search for the line sets it.
        residues: the primes and the points, with the arithmetic of residues.
        marks: which integers follow from floats.
        computed: which float constants the programs computed, and how.
        laws: what is known of numbers beside their residues.
        notes: what the run has noted.
    """

    def __init__(self, settings: Settings):
        assert settings.kind in _ALL_KINDS, settings.kind
        self.settings = settings
        self.choices = Choices()
        self.compiled = False
        self.coverage: Any = None
        self.memory: Any = None

        self.residues = Residues(settings.points, settings.seed, settings.levels, settings.log_depth)
        self.marks = Marks()
        self.computed = Computations()
        self.laws = NumberLaws(self.residues.moduli)
        self.notes = Notes()

        self._lifted: dict[Any, Lifted] = {}

    @property
    def side(self) -> int | None:
        """Which of the two programs runs, if its comparisons of numbers are noted."""
        if self.coverage is None:
            return None
        side: int = self.coverage.side
        return side

    @property
    def planted(self) -> bool:
        """Whether the draw has made inputs equal, or zero: a NaN may then be one for these inputs alone."""
        if self.settings.order is not None:
            return False
        return self.settings.crossed or self.settings.kind in PLANTED

    @property
    def undefined(self) -> int:
        """The poison of infinity less infinity, and its like."""
        if self.planted:
            return OUTSIDE
        return NOT_A_NUMBER

    @property
    def end_level(self) -> int:
        """One more than the highest prime that is compared: fewer after the first logarithm that became a number."""
        if self.notes.logs:
            return self.settings.levels - self.settings.log_depth
        return self.settings.levels

    def valid(self, used: np.ndarray) -> np.ndarray:
        """bool [components, ...]: which components have a meaning where so many primes are used up.

        The lowest primes are used up by exps, the highest one by logarithms that became numbers. For example, of eight
        primes 0 to 7, exp(exp(x)) has used up 0 and 1; if a logarithm became a number too, 2 to 6 have a meaning.
        """
        level = self.residues.levels_of_components(used.ndim)
        return (level >= used) & (level < self.end_level)

    def is_zero(self, x: Exact) -> np.ndarray:
        """bool [...]: which elements are zero at all points; notes how many primes the answer needs."""
        # A component without a meaning is passed over. Behind more exps than there are primes none has a meaning, and
        # there is no answer.
        used = int(x.used.max(initial=0))
        # Noted, so that a further run has as many primes as this question needs.
        self.notes.deepest = max(self.notes.deepest, used)
        if used >= self.end_level:
            raise TooDeepError
        if used or self.notes.logs:
            is_zero = ((x.number == 0) | ~self.valid(x.used)).all(0)
        else:  # all components have a meaning
            is_zero = (x.number == 0).all(0)
        if x.factor is not None:  # number + log(factor), and log(1) is zero
            is_zero = is_zero & (x.factor == 1).all(0)
        return is_zero & (x.infinite == 0) & (x.poison == 0)

    def invert_residues(self, x: np.ndarray, used: np.ndarray) -> np.ndarray:
        """1 / x for residues.

        A number that is zero in some components alone is not zero, but has no inverse there: the points are drawn
        again. A number that is zero in all components is zero, and gets a number that stands for 1/0, the same wherever
        it is needed: that the quotient is infinite, or no number, is noted beside it (`Exact.infinite`, `poison`).

        Worked example, of two elements modulo 5 and 11: [[2, 0], [3, 0]] has the inverses [[3, s], [4, t]], where s and
        t stand for 1/0. [[2, 0], [3, 1]] asks for other points: the second element is 0 modulo 5, and not modulo 11.
        """
        has_zero = x == 0
        if not has_zero.any():
            return self.residues.invert(x)
        valid = self.valid(used)
        is_zero = np.where(valid, has_zero, True).all(0)
        if (has_zero & valid & ~is_zero).any():
            raise RedrawError
        inverse = self.residues.invert(np.where(has_zero, np.uint64(1), x))
        p = self.residues.primes_of(x)
        inverse_of_zero = self.residues.salt("1/0").reshape(p.shape) % p
        return np.where(has_zero, inverse_of_zero, inverse)

    def add_notes(self, other: Field, sides: Sequence[int]) -> None:
        """Adds what some sides noted and computed in another field of like settings, as if they had run in this one."""
        self.notes.merge(other.notes, sides)
        self.computed.merge(other.computed)

    def settle(self, x: Exact) -> Exact:
        """The same array, with one number for all true infinities, and with zero for all NaN.

        So arrays that are infinite at the same places are equal there, whatever they were computed from.
        """
        if not x.special:
            return x
        ones = (1,) * len(x.shape)
        # HUGE is a number, and stays as it is.
        number = x.number
        real = x.real
        for sign in (1, -1):
            is_infinite = x.infinite == sign * TRULY
            residues = self.residues.infinity(sign < 0).reshape(-1, *ones)
            number = np.where(is_infinite, residues, number)
            real = np.where(is_infinite, sign * math.inf, real)
        is_no_number = x.poison > 0
        number = np.where(is_no_number, np.uint64(0), number)
        real = np.where(is_no_number, math.nan, real)

        # The facts of these special elements: their own sign, no prime used up, and no logarithm.
        is_special = is_no_number | x.is_truly_infinite
        signs = np.where(is_special, np.sign(x.infinite), x.sign)
        infinite = np.where(is_no_number, 0, x.infinite)
        used = np.where(is_special, 0, x.used)
        factor_used = np.where(is_special, 0, x.factor_used)
        never_zero = np.where(is_special, 0, x.never_zero)
        facts = build_facts(x.shape, signs, infinite, used, factor_used, x.poison, never_zero)
        factor = x.factor
        if factor is not None:
            factor = np.where(is_special, np.uint64(1), factor)
        roots = x.roots
        if roots is not None:
            roots = np.where(is_special, NO_ROOT, roots)
        return dataclasses.replace(x, number=number, facts=facts, real=real, factor=factor, roots=roots)

    def like(self, **changes: Any) -> Field:
        """A field of the same settings but for `changes`, and of the same choices, which turns nothing round.

        It has noted nothing, and has no coverage and no memory; what runs compiled programs says so again.

        Worked example: of a field of two points with the seed 5, `field.like(seed=6)` has two other points.
        """
        other = Field(self.settings._replace(**changes))
        other.choices = dataclasses.replace(self.choices, turned={})
        return other

    def with_laws_of_roots(self) -> Field:
        """A field like this one, in which multiples of roots are followed through products."""
        other = self.like(laws_of_roots=True)
        # The other field reads degrees of this one's roots, which name divisions by their numbers: it counts on from
        # them, so that a division of its own gets no number twice.
        other.notes.divisions = self.notes.divisions
        return other

    def with_folded(self, folded: Mapping[Constant, Folded]) -> Field:
        """A field like this one, in which some constants stand for exact values."""
        other = self.like()
        other.choices.folded = {**self.choices.folded, **folded}
        return other

    # Constants

    def lift(self, x: Any) -> Exact:
        """A constant array of floats, integers or booleans."""
        computed = self.computed.find(x)
        if computed is not None:
            return computed
        return self.lift_as_stored(x)

    def lift_as_stored(self, x: Any) -> Exact:
        """A constant array as its floats are, also if the program computed them."""
        x = np.asarray(x)
        folded = self.choices.folded
        if x.size > MOST_KEPT:
            lifted = lift_array(x, self.residues, folded)
        else:
            # A mask of a step is lifted hundreds of times: small constants are kept.
            key = (x.tobytes(), x.dtype, x.shape)
            if key not in self._lifted:
                self._lifted[key] = lift_array(x, self.residues, folded)
            lifted = self._lifted[key]
        self.notes.add_constants(lifted.constants, self.side)
        return lifted.exact

    # Degrees

    def degree_of_inverses(self, degree: Degree, elements: int) -> Degree:
        """The degree of the inverses of so many elements of a degree: they count as a division of their own.

        Worked example: 1 / x of eight inputs, as the third division of a program, has Degree(1, {3: (1, 8)}). Each
        element is of degree 1 in the inverses of division 3, and the product of all eight divisors, by which both sides
        are multiplied to be polynomials, is of degree 8.
        """
        if not degree.total:
            return CONSTANT
        # All elements of one array count as one division: a term of a result has at most one of their inverses for each
        # time that it was multiplied by it, and the weight is the degree of the product of all divisors.
        self.notes.divisions += 1
        weight = degree.total * elements
        inverses = {**degree.inverses, self.notes.divisions: (1, weight)}
        return Degree(1, inverses, degree.log_depth)

    @property
    def variety(self) -> int:
        """How many values a variable may have, at least, modulo the largest prime that is compared.

        Inputs are drawn from the numbers other than zero modulo that prime p: p - 1 values. The exp of a number is a
        power of 4, of which there are (p - 1) / 2 modulo p: as many as the prime below.
        """
        # This field has the highest primes of the tower: its lowest one has the number `lowest` there.
        lowest = LEVELS - self.settings.levels
        largest = lowest + self.end_level - 1
        if self.notes.exps:
            largest -= 1  # as many values as the prime below, see above
        return PRIMES[largest] - 1

    def chance(self, degree: Degree) -> float:
        """A bound of the chance that two different results of this degree agree at all points.

        It assumes that functions of different arguments have independent values, and that a difference is no multiple
        of the largest prime. `docs/howto/prove_for_all_inputs.md` derives each line.

        Worked example: `x @ w` has degree 2. The largest prime is 2.4e9, so that two different results of that degree
        agree at one point with a chance of at most 2 / 2.4e9, and at three points with one of 5e-28.
        """
        # The difference of two results is a polynomial of inputs, inverses and values of functions. Multiplied by each
        # divisor as often as its inverse may occur in one term, it is one of inputs and values alone.
        total = degree.total
        weights = 0
        for power, weight in degree.inverses.values():
            total += power * weight
            weights += weight
        # At one point it is zero with a chance of its degree over the number of values of a variable (Schwartz and
        # Zippel). All primes are compared: the largest one bounds it best.
        points = self.settings.points
        agreeing = min(1.0, total / self.variety) ** points
        # Points at which a divisor is zero modulo some prime are drawn again. Each prime is twice the one before, so
        # that all together are at most twice as likely as the smallest to have one.
        redrawn = 2 * points * weights / int(self.residues.moduli[0])
        # Each further draw of points is one more chance to agree: 1 / (1 - redrawn) draws are expected, and more than
        # SEEDS are never made.
        draws = float(SEEDS)
        if redrawn < 1:
            draws = min(SEEDS, 1 / (1 - redrawn))
        return min(1.0, agreeing * draws)
