"""The field that a program runs in: its residues, constants, and what is remembered of the run.

We test polynomial identities at random points. Two different polynomials agree at a random point with a chance of at
most degree / size of the field (Schwartz and Zippel), so a sum, product or quotient that agrees at a few points is the
same for all inputs, but for that chance. A number of the program is therefore an array of components: its residue at
each of some random points, modulo each prime of a tower.

Why a tower: an exp leads from one prime p to the next one, q = 2 p + 1 (`tower.py`). The number 4 has order p modulo q:
4**p is 1. So 4**(a + b) = 4**a 4**b depends on a and b modulo p alone, and is an exponential function from the numbers
modulo p to those modulo q. Worked example, with the primes 5, 11, 23:

    modulo            5                 11                       23
    x                 3                 7                        19
    exp(x)            no component      4**3 = 9 (from x mod 5)  4**7 = 8 (from x mod 11)
    exp(exp(x))       no component      no component             4**9 = 13

So each exp uses up the lowest prime that was left, and a logarithm that is needed as a number uses up the highest. Two
numbers are compared in the components that both have (`valid`).

Residues have no order, and comparisons need one. A run decides them in one of two ways. In a "draw", real inputs are
drawn beside the residues, and every operation is done on them too, in float64. They say which of two numbers is larger,
so that each branch is taken for inputs that exist. In an "order", real values decide nothing: numbers are put
into a random total order, so that a branch is taken that no draw has reached (see `orders.py`).

NaN is a kind of its own: infinity less infinity, zero times infinity, 0 / 0, an element that a gather reads out of
bounds. It spreads as in floats, and equals no number. A value from outside of the domain of a function, as the
logarithm of a number that happens to be negative in a draw, is told apart from it: nothing is compared there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from shardkit.testing.exact.numbers.computed import Computations
from shardkit.testing.exact.numbers.constants import LEAST_INFINITE, simplest
from shardkit.testing.exact.numbers.errors import RedrawError, TooDeepError
from shardkit.testing.exact.numbers.folded import Constant, Folded
from shardkit.testing.exact.numbers.marks import Marks
from shardkit.testing.exact.numbers.residues import Residues
from shardkit.testing.exact.numbers.roots import NO_ROOT, Roots
from shardkit.testing.exact.numbers.tower import LEVELS, PRIMES
from shardkit.testing.exact.numbers.values import (
    CONSTANT,
    HUGE,
    NOT_A_NUMBER,
    OUTSIDE,
    TRULY,
    Degree,
    Element,
    Exact,
    build_facts,
)

# What the real inputs of a draw are. The first draws use one kind for all inputs; further draws choose one by input.
KINDS = ("normal", "positive", "wide", "unit", "negative", "near")
MIXED = "mixed"  # of which each element is one of the kinds
SIMILAR = "similar"  # of which rows, columns or all elements are one of the kinds, and differ by little
# All inputs are of one size: a norm of a hundred of them is then below, or above, the bound to which it is clipped.
SCALED = ("tiny", "large", "tiniest")
# Kinds that plant equal rows or elements, zeros, or crossings. A division by zero is then the draw's, not the
# program's, and gradients are not compared: the derivative of a maximum of equal numbers is a matter of convention.
CROSSED = "crossed"  # inputs are put where a comparison changes its answer
PLANTED = ("alike", "repeated", "zero", CROSSED)
# Where a divisor is zero at some point by chance, the points are drawn again, at most so many times.
SEEDS = 8
# Where the outcome of a comparison is turned round, beside bool [...] for some elements (`hidden.py`).
EVERYWHERE = np.ones((), bool)
TIES = "where both numbers are equal"
ROUNDING = {"round", "floor", "ceil", "to an integer"}
_MOST_KEPT = 64  # elements of a constant that is kept


class Settings(NamedTuple):
    """The arguments of a field; `Field` describes them."""

    points: int
    seed: int
    shallow: bool = False
    order: int | None = None
    kind: str = KINDS[0]
    scale: float = 1.0
    levels: int = LEVELS
    laws_of_roots: bool = False


class Field:
    """A field at `points` random points that `seed` draws.

    Attributes:
        residues: the primes and the points, with the arithmetic of residues.
        shallow: whether `logistic` is uninterpreted too, which then uses up no prime.
        order: which order decides comparisons; None where the real values of a draw do.
        kind: the kind of the inputs of a draw, one of KINDS, PLANTED or SCALED, or MIXED, SIMILAR, "narrow"; "" for one
            of KINDS for each. CROSSED and another kind, as "crossed wide": some elements are put where a comparison
            changes its answer (a maximum of equal numbers), and the others are of the other kind.
        scale: the factor by which normal inputs are multiplied.
        levels: how many primes of the tower are used. They are the highest ones, numbered from 0 here.
        settings: the arguments that this field was made of.
        marks: which integers follow from floats.
        computed: which float constants the programs computed, and how.
        uninterpreted: the functions that were applied without a law, by name.
        rounded: the functions of constants that were computed in floats, as log(2), in words.
        rounded_values: their values, by the side of the comparison that computed them.
        compared: how many arrays were put in order.
        deepest: the most primes that exps used up, on the way to a number that was compared.
        outside: the line where a value was first outside of the domain of a function.
        logs: whether a logarithm became a number, after which the components of the highest prime have no meaning.
        exps: whether an exp was taken.
        domains: whether a logarithm, or a root, was taken of a number that may be outside of its domain for other
            inputs.
        chances: whether random bits of keys were used, which differ from draw to draw.
        folded: constants that stand for the exact values of computations, by value and dtype.
        constants: by side, the constants that became numbers of the field, by value and dtype.
        stored: by side, the float constants of a compiled program and of its trace, with the dtypes in which they are
            stored: a bfloat16 becomes a float32 before it is a number of the field.
        compiled: whether a side is a compiled program: random bits are jax's own, and constants are of float32.
        centres: logarithms of the constants that are compared: inputs of the kind "near" are drawn around them.
        inputs: the inputs that were drawn, by name.
        elements: by the name of an input, values that its elements must have in this draw.
        coverage: notes which way comparisons went; None if nothing does.
        memory: recalls the results of a first run; None if nothing does.
        turned: the comparisons whose outcome is turned round in this run (`hidden.py`), by the id of the equation and
            the part of it; where it is so: EVERYWHERE, TIES, or bool [...].
        numbers_of_bits: the floats that became words of bits (`bitcast`): from the residues of a word to the residues,
            the facts and the real value of its float.
        degree_of_bits: bounds of the degree of all floats that became bits.
        allocations: how often memory was read to which nothing was written.
        roots: the square roots that were drawn, and their laws.
        laws_of_roots: whether multiples of roots are followed through products and quotients (`roots.py`).
        grams: Gram matrices: from rows, columns and residues of a matrix A to those of A^T A and their degree. So the
            factor R of a QR of A, which has roots, is known by R^T R = A^T A.
        halves: solutions by Cholesky. With A = L L^T, A^-1 B is computed in two halves, L^-1 B and L^-T of it, and L
            has roots where A^-1 B has none. From the residues of L and L^-1 B to those of A^-1 B and their degree.
    """

    def __init__(
        self,
        points: int,
        seed: int,
        shallow: bool = False,
        order: int | None = None,
        kind: str = KINDS[0],
        scale: float = 1.0,
        levels: int = LEVELS,
        laws_of_roots: bool = False,
    ):
        self.settings = Settings(points, seed, shallow, order, kind, scale, levels, laws_of_roots)
        self.points = points
        self.seed = seed
        self.shallow = shallow
        self.order = order
        self.kind = kind
        self.scale = scale
        self.levels = levels
        self.laws_of_roots = laws_of_roots
        self.residues = Residues(points, seed, levels)

        # What the run has seen, which certificates and further draws read.
        self.marks = Marks()
        self.computed = Computations()
        self.uninterpreted: set[str] = set()
        self.rounded: set[str] = set()
        self.rounded_values: dict[int, set[float]] = {}
        self.compared = 0
        self.deepest = 0
        self.outside = ""
        self.logs = False
        self.exps = False
        self.domains = False
        self.chances = False
        self.folded: Mapping[Constant, Folded] = {}
        self.constants: dict[int, set[Constant]] = {}
        self.stored: dict[int, set[Constant]] = {}
        self.compiled = False
        self.inputs: dict[str, Exact] = {}
        self.centres: tuple[float, ...] = ()
        self.elements: tuple[Element, ...] = ()
        self.coverage: Any = None
        self.memory: Any = None
        self.turned: Mapping[tuple[int, str], np.ndarray | str] = {}

        # Laws between numbers that their residues do not show.
        self.numbers_of_bits: dict[bytes, tuple[np.ndarray, np.ndarray, float]] = {}
        self.degree_of_bits = CONSTANT
        self.roots = Roots(self.residues.moduli)
        self.grams: dict[tuple[int, int, bytes], tuple[np.ndarray, Degree]] = {}
        self.halves: dict[tuple[bytes, bytes], tuple[np.ndarray, Degree]] = {}

        self.allocations = 0
        self._divisions = 0
        self._constants: dict[Any, tuple[np.ndarray, float]] = {}
        self._lifted: dict[Any, Exact] = {}

    @property
    def rounds(self) -> bool:
        """Whether floats were rounded to integers."""
        return bool(self.uninterpreted & ROUNDING)

    @property
    def divides(self) -> bool:
        """Whether there was a divisor, or the argument of a logarithm, that may be zero for some inputs."""
        return self._divisions > 0 or self.domains

    @property
    def planted(self) -> bool:
        """Whether the draw has made inputs equal, or zero: a NaN may then be one for these inputs alone."""
        return self.order is None and self.kind.partition(" ")[0] in PLANTED

    @property
    def undefined(self) -> int:
        """The poison of infinity less infinity, and its like."""
        if self.planted:
            return OUTSIDE
        return NOT_A_NUMBER

    @property
    def end_level(self) -> int:
        """One more than the highest prime that is compared."""
        if self.logs:
            return self.levels - 1
        return self.levels

    def valid(self, used: np.ndarray) -> np.ndarray:
        """bool [components, ...]: which components have a meaning where so many primes are used up.

        The lowest primes are used up by exps, the highest one by logarithms that became numbers. For example, of eight
        primes 0 to 7, exp(exp(x)) has used up 0 and 1; if a logarithm became a number too, 2 to 6 have a meaning.
        """
        level = self.residues.levels_of_components(used.ndim)
        return (level >= used) & (level < self.end_level)

    def is_zero(self, x: Exact) -> np.ndarray:
        """bool [...]: which elements are zero at all points."""
        # A component without a meaning is passed over. Behind more exps than there are primes none has a meaning, and
        # there is no answer.
        used = int(x.used[0].max(initial=0))
        self.deepest = max(self.deepest, used)  # so that a further run has as many primes as this question needs
        if used >= self.end_level:
            raise TooDeepError
        zero = ((x.number == 0) | ~self.valid(x.used[0])).all(0)
        if x.factor is not None:  # number + log(factor), and log(1) is zero
            zero = zero & (x.factor == 1).all(0)
        return zero & (x.infinite == 0) & (x.poison == 0)

    def invert_residues(self, x: np.ndarray, used: np.ndarray) -> np.ndarray:
        """1 / x for residues.

        A number that is zero in some components alone is not zero, but has no inverse there: the points are drawn
        again. A number that is zero in all components is zero, and gets a number that stands for 1/0, the same wherever
        it is needed: that the quotient is infinite, or no number, is noted beside it (`Exact.infinite`, `poison`).
        """
        zero = x == 0
        if not zero.any():
            return self.residues.invert(x)
        valid = self.valid(used)
        always_zero = np.where(valid, zero, True).all(0)
        if (zero & valid & ~always_zero).any():
            raise RedrawError
        inverse = self.residues.invert(np.where(zero, np.uint64(1), x))
        p = self.residues.primes_of(x)
        inverse_of_zero = self.residues.salt("1/0").reshape(p.shape) % p
        return np.where(zero, inverse_of_zero, inverse)

    def note_rounded(self, name: str, values: np.ndarray) -> None:
        """Notes that a function of constants was computed in floats, and its values, for the side that runs."""
        self.rounded.add(name)
        if self.coverage is not None:
            self.rounded_values.setdefault(self.coverage.side, set()).update(np.unique(values).tolist())

    def note_stored(self, x: np.ndarray) -> None:
        """Notes the values and the dtype of a constant, as the program of the side that runs stores it."""
        if self.coverage is not None and jnp.issubdtype(x.dtype, jnp.floating):
            stored = self.stored.setdefault(self.coverage.side, set())
            for value in np.unique(x.astype(np.float64)).tolist():
                stored.add((value, str(x.dtype)))

    def add_notes(self, other: Field, sides: Sequence[int]) -> None:
        """Adds the notes of some sides in another field of like settings, as if they had run in this one."""
        self.uninterpreted |= other.uninterpreted
        self.rounded |= other.rounded
        for side in sides:
            # A copy, because `other` is added elsewhere too.
            self.rounded_values[side] = set(other.rounded_values.get(side, ()))
        self.domains |= other.domains
        self.chances |= other.chances
        self.logs |= other.logs
        self.exps |= other.exps
        self.compared += other.compared
        self.deepest = max(self.deepest, other.deepest)
        self.outside = self.outside or other.outside
        self.computed.merge(other.computed)
        for side in sides:
            self.constants[side] = set(other.constants.get(side, ()))

    def settle(self, x: Exact) -> Exact:
        """The same array, with one number for all true infinities, and with zero for all NaN.

        So arrays that are infinite at the same places are equal there, whatever they were computed from.
        """
        if not x.special:
            return x
        # Infinity by the code of `Exact.infinite`: TRULY or -TRULY. HUGE is a number, and stays as it is.
        number = x.number
        real = x.real
        for value in (math.inf, -math.inf):
            negative = value < 0
            code = -TRULY if negative else TRULY
            here = x.infinite == code
            residues = self.residues.infinity(negative).reshape(-1, *[1] * len(x.shape))
            number = np.where(here, residues, number)
            real = np.where(here, value, real)
        no_number = x.poison > 0
        number = np.where(no_number, np.uint64(0), number)
        real = np.where(no_number, math.nan, real)

        # The facts of these special elements: their own sign, no prime used up, and no logarithm.
        special = no_number | x.is_truly_infinite
        factor = x.factor
        if factor is not None:
            factor = np.where(special, np.uint64(1), factor)
        sign = np.where(special, np.sign(x.infinite), x.sign)
        infinite = np.where(no_number, 0, x.infinite)
        used = np.where(special, 0, x.used)
        facts = build_facts(x.shape, sign, infinite, used[0], used[1], x.poison)
        roots = x.roots
        if roots is not None:
            roots = np.where(special, NO_ROOT, roots)
        return Exact(number, facts, real, factor, x.degree, roots, x.is_power)

    def like(self, **changes: Any) -> Field:
        """A field of the same settings but for `changes`, with the same chosen elements, which has noted nothing.

        Worked example: of a field of two points with the seed 5, `field.like(seed=6)` has two other points.
        """
        other = Field(*self.settings._replace(**changes))
        other.centres = self.centres
        other.elements = self.elements
        other.folded = self.folded
        return other

    def with_laws_of_roots(self) -> Field:
        """The same field, which has noted nothing, and in which multiples of roots are followed through products."""
        other = self.like(laws_of_roots=True)
        # The other field reads degrees of this one's roots, which name divisions by their numbers: it counts on from
        # them, so that a division of its own gets no number twice.
        other._divisions = self._divisions
        return other

    def with_folded(self, folded: Mapping[Constant, Folded]) -> Field:
        """The same field, which has noted nothing, and in which some constants stand for exact values."""
        other = self.like()
        other.folded = {**self.folded, **folded}
        return other

    # Constants

    def lift(self, x: Any) -> Exact:
        """A constant array of floats, integers or booleans."""
        computed = self.computed.find(x)
        if computed is not None:
            return computed
        return self.lift_rounded(x)

    def lift_rounded(self, x: Any) -> Exact:
        """A constant array as it is, also if the program computed it."""
        x = np.asarray(x)
        if x.size > _MOST_KEPT:
            return self._lift(x)
        # A mask of a step is lifted hundreds of times: small constants are kept.
        side = None if self.coverage is None else self.coverage.side
        key = (side, x.tobytes(), str(x.dtype), x.shape)
        if key not in self._lifted:
            self._lifted[key] = self._lift(x)
        return self._lifted[key]

    def _lift(self, x: np.ndarray) -> Exact:
        # Constants are mostly masks and fillings: each distinct value is lifted once, and taken to its places.
        values: Any = x.reshape(-1)
        places: Any = np.zeros(x.shape, np.int64)
        if x.size > 1:
            values, places = np.unique(x, return_inverse=True)
            places = places.reshape(x.shape)
        residues = []
        reals = []
        for value in values:
            residues_of_value, real_value = self._find_constant(value, x.dtype)
            residues.append(residues_of_value)
            reals.append(real_value)
        if not residues:  # of an empty array
            residues = [self.residues.moduli]
            reals = [0.0]
        # [components, distinct values]
        table = np.stack(residues, 1)
        number = np.take(table, places.reshape(-1), 1).reshape(len(table), *x.shape)
        real = np.take(np.array(reals), places)[None]

        wide = np.asarray(values, np.float64)
        # The sign 1 means "not negative", so it is that of zero too.
        sign = np.where(wide == 0, 1, np.nan_to_num(np.sign(wide))).astype(np.int8)
        # Integers are never a mask's infinity.
        is_huge = (np.abs(wide) >= LEAST_INFINITE) & jnp.issubdtype(x.dtype, jnp.floating)
        infinite = np.where(np.isinf(wide), TRULY, np.where(is_huge, HUGE, 0)) * sign
        poison = np.where(np.isnan(wide), NOT_A_NUMBER, 0)
        facts = build_facts(x.shape, np.take(sign, places), np.take(infinite, places), poison=np.take(poison, places))
        return Exact(number, facts, real)

    def _find_constant(self, value: Any, dtype: Any) -> tuple[np.ndarray, float]:
        """The residues of a constant, and the real number that it stands for."""
        key = (value.item(), str(dtype))
        if self.coverage is not None:
            self.constants.setdefault(self.coverage.side, set()).add(key)
        if key not in self._constants:
            self._constants[key] = self._make_constant(value, dtype)
        return self._constants[key]

    def _make_constant(self, value: Any, dtype: Any) -> tuple[np.ndarray, float]:
        moduli = self.residues.moduli
        if np.isnan(np.asarray(value, np.float64)):
            return np.zeros_like(moduli), math.nan
        if np.isinf(np.asarray(value, np.float64)):
            return self.residues.infinity(float(value) < 0), float(value)
        # n / d is n times the inverse of d, modulo each prime.
        folded = self.folded.get((value.item(), str(dtype)))
        if folded is not None:
            ratio = folded.ratio
        elif jnp.issubdtype(dtype, jnp.floating):
            ratio = simplest(float(value), dtype)
        else:
            ratio = Fraction(int(value))
        residues = []
        for p in moduli.tolist():
            residues.append(ratio.numerator * pow(ratio.denominator, -1, p) % p)
        return np.array(residues, np.uint64), float(ratio)

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
        self._divisions += 1
        return Degree(1, {**degree.inverses, self._divisions: (1, degree.total * elements)})

    @property
    def variety(self) -> int:
        """How many values a variable may have, at least, modulo the largest prime that is compared.

        Inputs are drawn from the numbers other than zero modulo that prime p: p - 1 values. The exp of a number is a
        power of 4, of which there are (p - 1) / 2 modulo p: as many as the prime below.
        """
        # The highest prime that is compared, by its number in the whole tower. This field has the highest primes of the
        # tower: its prime 0 is prime `first` there.
        first = LEVELS - self.levels
        largest = first + self.end_level - 1
        if self.exps:
            largest -= 1
        return PRIMES[largest] - 1

    def chance(self, degree: Degree) -> float:
        """A bound of the chance that two different results of this degree agree at all points.

        Their difference is a polynomial of inputs, inverses and values of functions. Multiplied by each divisor as
        often as its inverse may occur in one term, it is one of inputs and values alone. All primes are compared, so
        the largest one bounds how rarely it is zero at one point: its degree over the number of values that a variable
        may have there. Points at which a divisor is zero are drawn again, which is as rare a zero.

        Worked example: `x @ w` has degree 2. The largest prime is 2.4e9, so that two different results of that degree
        agree at one point with a chance of at most 2 / 2.4e9, and at three points with one of 5e-28.
        """
        total = degree.total
        weights = 0
        for power, weight in degree.inverses.values():
            total += power * weight
            weights += weight
        agreeing = min(1.0, total / self.variety) ** self.points
        smallest = int(self.residues.moduli[0])
        # Each prime is twice the one before, so all together are at most twice the chance of the smallest.
        redrawn = 2 * self.points * weights / smallest
        # The points are random on the condition that no divisor is zero there: dividing by the chance of that. Of SEEDS
        # tries one succeeded, so that the chance is not taken for less than 1 / SEEDS.
        return min(1.0, agreeing / max(1 - redrawn, 1 / SEEDS))
