"""Real arithmetic in a finite field: numbers modulo a tower of primes, at several random points at once.

Two programs whose results agree at random points of a field are the same function of all inputs, but for a chance that
is their degree over the size of the field (Schwartz and Zippel). What a field does not have is added so that the laws
that programs rely on hold exactly:

- `exp` goes from one prime of the tower to the next, p to 2p + 1, by powers of an element of order p: exp(x + y) is
  exp(x) exp(y). Each `exp` on the way from an input to a result uses up one prime.
- `log` is kept beside the number, as the number whose logarithm is added: exp(log x) is x, log(xy) is log x + log y.
  Where it is multiplied by what is no small whole number, it becomes the exponent of its square, one prime lower: so
  log(exp x) is x and any multiple is linear, but the sign of what it is of is lost, and the highest prime.
- `max`, sorts and comparisons are decided in one of two ways. In a draw, real inputs are drawn beside the numbers, and
  every operation is done on them too, in float64: they say which of two numbers is larger, so that what happens is what
  happens for inputs that exist. In an order, a random total one, nothing but x < y when -y < -x, the known signs and
  the order of constants holds: so a branch is taken that no draw has reached. Of any two numbers, one of them unknown,
  each is above the other in one of the first four orders, unless their signs decide.
- Not a number is a kind of its own: infinity less infinity, zero times infinity, 0 / 0, what a gather reads out of
  bounds. It spreads as in floats, and equals no number. What comes from outside of the domain of a function in a draw,
  as the logarithm of a number that happens to be negative, is told apart: nothing is compared there.
- Constants beyond 1e9 and -1e9 stand for infinity in masks, also plus a number or times one of known sign: exp of minus
  infinity is 0. In all else they are numbers like any other, so that what is added and taken away cancels.
- Any other function is a random one, "uninterpreted": equal arguments have equal values, nothing else is known.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache, cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np

from shardkit.testing.exact.tower import LEVELS, PRIMES, logarithm, powers
from shardkit.testing.exact.values import (
    CONSTANT,
    HUGE,
    INFINITE,
    INPUT,
    NOT_A_NUMBER,
    OUTSIDE,
    TRULY,
    Degree,
    Element,
    Exact,
    facts,
    simplest,
)

# What real inputs are drawn as, draw by draw; in more draws each input is one of them.
KINDS = ("normal", "positive", "wide", "unit", "negative", "near")
MIXED = "mixed"  # of which each element is one of the kinds
_WIDTHS = {"wide": 16.0, "narrow": 0.1}
# Inputs of which rows, or elements, are equal, or are zero, or where a comparison changes: a division by zero is then
# the draw's, not the program's, and gradients are not compared, because the derivative of a maximum of equal numbers is
# a matter of convention.
CROSSED = "crossed"
PLANTED = ("alike", "repeated", "zero", CROSSED)
ROUNDING = {"round", "floor", "ceil", "to an integer"}
_MOST_PLANTED = math.log(1e4)  # of the logarithm of a constant that inputs are drawn as
_PRODUCTS = 2**15  # of 32 bits and 16, whose sum fits a word
SEEDS = 8  # of which one must have no divisor that is zero by chance
_SMALLEST = float(np.finfo(np.float64).smallest_subnormal)
_MOST_KEPT = 64  # elements of a constant that is kept
_DIGITS = 34  # bits of a real value, by which numbers are put in order
# Functions that are 0 or 1 at 0.
_ZERO_AT_ZERO = {"tanh", "sin", "tan", "sinh", "cbrt", "sqrt", "asin", "atan", "asinh", "atanh", "erf", "erf_inv"}
_ONE_AT_ZERO = {"cos", "cosh", "erfc", "exp2"}


@cache
def _real_functions() -> dict[str, Callable[..., Any]]:
    """Functions that are uninterpreted but for their real values, in float64."""
    from scipy import special  # type: ignore[import-untyped]  # a proof alone needs it, which takes a moment

    functions = {
        name: getattr(np, name) for name in ("tanh", "sin", "cos", "tan", "sinh", "cosh", "cbrt", "exp2", "log2")
    }
    for name in ("asin", "acos", "atan", "asinh", "acosh", "atanh", "atan2"):
        functions[name] = getattr(np, f"arc{name[1:]}")
    for name in ("erf", "erfc", "digamma"):
        functions[name] = getattr(special, name)
    return {
        **functions,
        "erf_inv": special.erfinv,
        "lgamma": special.gammaln,
        "logistic": special.expit,
        "sqrt": np.sqrt,
        "pow": np.power,
        "rem": np.fmod,
        "nextafter": np.nextafter,
        "div of integers": _divide_integers,
    }


def _divide_integers(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.trunc(x / y)


class RedrawError(Exception):
    """A divisor that is not always zero is zero at one of the points: they are drawn again."""


class TooDeepError(Exception):
    """More nested exps, on the way to a result, than the field has primes."""


class UnknownValueError(Exception):
    """A comparison of a number whose real value is beyond floats, or of a function that has none."""


class UnsupportedError(Exception):
    """A primitive that has no meaning in the field.

    Attributes:
        line: that of the innermost equation that knows its own.
    """

    line: str = ""


class Field:
    """The arithmetic, at `points` random points that `seed` draws.

    Attributes:
        shallow: whether `logistic` is uninterpreted too, which then uses up no prime.
        order: which order decides comparisons; None where the real values of a draw do.
        kind: what the inputs of a draw are, one of KINDS or PLANTED, or MIXED, "narrow"; "" for one of KINDS for each.
            "crossed wide" and its like say what the elements are that are not put where a comparison changes.
        scale: by what normal inputs are multiplied.
        levels: how many primes of the tower there are, the highest.
        uninterpreted: the functions that were applied without a law, by name.
        compared: how many arrays were put in order.
        deepest: the most primes that exps used up, on the way to what was compared.
        outside: the line where a value was first outside of the domain of a function.
        centres: logarithms of the constants that are compared.
        settings: the arguments it was made of.
        coverage: what notes which way comparisons went, if any does.
        inputs: what was drawn, by name.
        elements: of inputs, what they are to be.
        chances: whether random bits of keys were used, which are others in each draw.
        grams: what A^T A is, and its degree, for matrices A that are kept: by rows, columns and residues.
        halves: what A^-1 B is, and its degree, for L^-1 B where A is L L^T: by the residues of both factors.
        logs: whether a logarithm became a number, after which the components of the highest prime have no meaning.
        exps: whether one was taken.
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
    ):
        self.settings = (points, seed, shallow, order, kind, scale, levels)
        self.points, self.seed, self.shallow, self.order = points, seed, shallow, order
        self.kind, self.scale, self.levels = kind, scale, levels
        self.moduli = np.repeat(np.array(PRIMES[-levels:], np.uint64), points)
        self.uninterpreted: set[str] = set()
        self.compared, self.deepest, self._divisions, self.logs, self.exps = 0, 0, 0, False, False
        self._constants: dict[Any, tuple[np.ndarray, float]] = {}
        self._lifted: dict[Any, Exact] = {}
        self._salts: dict[str, np.ndarray] = {}
        self._of_bits: dict[bytes, tuple[np.ndarray, np.ndarray, float]] = {}
        self._of_roots: dict[bytes, np.ndarray] = {}
        self._bits_degree, self._squares_degree = CONSTANT, CONSTANT
        self.grams: dict[tuple[int, int, bytes], tuple[np.ndarray, Degree]] = {}
        self.halves: dict[tuple[bytes, bytes], tuple[np.ndarray, Degree]] = {}
        self.coverage: Any = None
        self.outside = ""
        self.centres: tuple[float, ...] = ()
        self.inputs: dict[str, Exact] = {}
        self.elements: tuple[Element, ...] = ()
        self.chances = False
        self._following: dict[int, np.ndarray] = {}
        self._decisions: set[int] = set()
        self._naturals: set[int] = set()

    def follow(self, x: np.ndarray, decision: bool = False, natural: bool = False) -> np.ndarray:
        """The same integers or booleans, known to follow from a comparison or from rounding.

        A `natural` one is not negative whatever floats are, as the place of an element is not.
        """
        self._following[id(x)] = x  # which keeps it, so that no other array has its id
        if decision:
            self._decisions.add(id(x))
        if natural:
            self._naturals.add(id(x))
        return x

    def is_natural(self, x: np.ndarray) -> bool:
        """Whether integers or booleans are not negative, whatever floats are."""
        if self.follows(x):
            return x.dtype == bool or id(x) in self._naturals
        return bool((x >= 0).all())

    def is_decision(self, x: Any) -> bool:
        """Whether booleans are what a comparison of floats gave, or several joined."""
        return id(x) in self._decisions

    def follows(self, x: Any) -> bool:
        """Whether integers or booleans follow from floats."""
        return id(x) in self._following

    @property
    def rounds(self) -> bool:
        """Whether floats were rounded to integers."""
        return bool(self.uninterpreted & ROUNDING)

    @property
    def planted(self) -> bool:
        """Whether inputs are equal, or zero, by the draw: what is no number then is so for these inputs alone."""
        return self.order is None and self.kind.partition(" ")[0] in PLANTED

    @property
    def created(self) -> int:
        """What becomes of infinity less infinity, and its like."""
        return OUTSIDE if self.planted else NOT_A_NUMBER

    def p(self, x: np.ndarray) -> np.ndarray:
        """The primes of an array's components, the last ones if it has fewer."""
        return self.moduli[-len(x) :].reshape(-1, *[1] * (x.ndim - 1))

    def valid(self, used: np.ndarray) -> np.ndarray:
        """bool [components, ...]: which components have a meaning where so many primes are used up."""
        level = np.repeat(np.arange(self.levels), self.points).reshape(-1, *[1] * used.ndim)
        return (level >= used) & (level < self.levels - self.logs)

    def salt(self, name: str) -> np.ndarray:
        """A random word for each component."""
        if name not in self._salts:
            hashes = [
                hashlib.blake2b(f"{self.seed} {name} {i}".encode(), digest_size=8) for i in range(len(self.moduli))
            ]
            self._salts[name] = np.array([int.from_bytes(word.digest(), "big") for word in hashes], np.uint64)
        return self._salts[name]

    # Values

    def drawn(self, name: str, shape: Sequence[int]) -> Exact:
        """An input: a random number for every component and element, and a random real value for every element."""
        size = math.prod(shape)
        rng = np.random.default_rng(
            [self.seed, int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "big")]
        )
        number = rng.integers(1, self.moduli[:, None], (len(self.moduli), size), np.uint64)
        number = number.reshape(len(number), *shape)
        kind = self.kind.removeprefix(CROSSED).strip()
        real = self._reals(kind or KINDS[rng.integers(len(KINDS))], rng, (1, *shape))
        x = Exact(number, facts(shape), real, degree=INPUT)
        if kind == "alike" and len(shape) and size:
            x = x.moved(lambda part: np.broadcast_to(part[:, :1], part.shape))
        elif kind == "zero":
            x = self.lifted(np.zeros(shape, np.float32))
        elif kind == "repeated" and size:
            x = self._repeated(x, rng)
        x = self._plant(name, x)
        self.inputs[name] = x
        return x

    def _reals(self, kind: str, rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
        """Real values of a kind."""
        if kind == MIXED:
            rows = np.stack([self._reals(other, rng, shape) for other in KINDS])
            return np.asarray(np.take_along_axis(rows, rng.integers(len(KINDS), size=(1, *shape)), 0)[0])
        real = rng.normal(size=shape) * self.scale
        if kind in ("positive", "negative"):
            return np.exp(real) if kind == "positive" else -np.exp(real)
        if kind in _WIDTHS:
            return np.asarray(real * _WIDTHS[kind])
        if kind == "unit":
            return rng.uniform(size=shape)
        if kind == "near":  # the constants that are compared with, so that what is between two of them is met
            centre = rng.choice(self._compared_constants(), size=shape)
            return np.asarray(centre + 0.3 * np.maximum(np.abs(centre), 1) * real)
        return np.asarray(real)

    def _repeated(self, x: Exact, rng: np.random.Generator) -> Exact:
        """Many elements are one of the first half or the one before once more, or zero, or what is compared with."""
        size, shape = x.number[0].size, x.shape
        places = np.where(rng.uniform(size=size) < 0.5, rng.integers(0, (size + 1) // 2, size), np.arange(size))
        places = np.where(rng.uniform(size=size) < 0.3, np.roll(places, 1), places)
        x = x.moved(lambda part: part.reshape(len(part), -1)[:, places].reshape(part.shape))
        planted = self.lifted(rng.choice(self._compared_constants(), size=shape).astype(np.float32))
        return self.where(rng.uniform(size=shape) < 0.4, planted, x)

    def _plant(self, name: str, x: Exact) -> Exact:
        """With the elements that are to be something."""
        elements = [element for element in self.elements if element.name == name]
        if not elements:
            return x
        number, real = x.number.reshape(len(x.number), -1).copy(), x.real.reshape(1, -1).copy()
        for element in elements:
            number[:, element.place], real[:, element.place] = element.number, element.real
        return replace(x, number=number.reshape(x.number.shape), real=real.reshape(x.real.shape))

    def _compared_constants(self) -> list[float]:
        """Zero, and the constants that were compared, with both signs."""
        constants = [0.0]
        for logarithm_of_constant in self.centres:
            if abs(logarithm_of_constant) < _MOST_PLANTED:
                constants += [math.exp(logarithm_of_constant), -math.exp(logarithm_of_constant)]
        return constants

    def lifted(self, x: Any) -> Exact:
        """A constant array of floats, integers or booleans."""
        x = np.asarray(x)
        if x.size > _MOST_KEPT:
            return self._lift(x)
        key = x.tobytes(), str(x.dtype), x.shape
        if key not in self._lifted:
            self._lifted[key] = self._lift(x)
        return self._lifted[key]

    def _lift(self, x: np.ndarray) -> Exact:
        values: Any = x.reshape(-1)
        where: Any = np.zeros(x.shape, np.int64)
        if x.size > 1:
            values, where = np.unique(x, return_inverse=True)
        where = where.reshape(x.shape)
        constants = [self._constant(value, x.dtype) for value in values]
        table = np.stack([residues for residues, _ in constants], 1) if constants else self.moduli[:, None]
        real = np.array([value for _, value in constants] or [0.0])
        number = np.take(table, where.reshape(-1), 1).reshape(len(table), *x.shape)
        wide = np.asarray(values, np.float64)
        huge = (np.abs(wide) >= INFINITE) & jnp.issubdtype(x.dtype, jnp.floating)
        sign = np.where(wide == 0, 1, np.nan_to_num(np.sign(wide))).astype(np.int8)
        infinite = np.where(np.isinf(wide), TRULY, np.where(huge, HUGE, 0)) * sign
        poison = np.where(np.isnan(wide), NOT_A_NUMBER, 0)
        rows = (np.take(row, where) for row in (sign, infinite, np.zeros_like(sign), np.zeros_like(sign), poison))
        return Exact(number, facts(x.shape, *rows), np.take(real, where)[None])

    def _constant(self, value: Any, dtype: Any) -> tuple[np.ndarray, float]:
        """The residues of a constant, and the real number that it stands for."""
        known = (value.item(), str(dtype))
        if known not in self._constants:
            if np.isnan(np.asarray(value, np.float64)):
                self._constants[known] = np.zeros_like(self.moduli), math.nan
            elif np.isinf(np.asarray(value, np.float64)):
                self._constants[known] = self._infinity(float(value) < 0), float(value)
            else:
                ratio = simplest(float(value), dtype) if jnp.issubdtype(dtype, jnp.floating) else Fraction(int(value))
                residues = [ratio.numerator * pow(ratio.denominator, -1, int(p)) % int(p) for p in self.moduli]
                self._constants[known] = np.array(residues, np.uint64), float(ratio)
        return self._constants[known]

    def _infinity(self, negative: bool) -> np.ndarray:
        number = self.salt("infinity") % self.moduli
        return self.moduli - number if negative else number

    def settled(self, x: Exact) -> Exact:
        """With one number for what is truly infinite, and for what is no number."""
        if not x.special:
            return x
        number, factor, real, infinite = x.number, x.factor, x.real, x.infinite
        for value, here in ((math.inf, infinite == TRULY), (-math.inf, infinite == -TRULY)):
            residues = self._infinity(value < 0).reshape(-1, *[1] * len(x.shape))
            number, real = np.where(here, residues, number), np.where(here, value, real)
        number, real = np.where(x.poison > 0, np.uint64(0), number), np.where(x.poison > 0, math.nan, real)
        plain = (x.poison > 0) | (np.abs(infinite) == TRULY)
        if factor is not None:
            factor = np.where(plain, np.uint64(1), factor)
        used = np.where(plain, 0, x.used)
        known = facts(x.shape, np.where(plain, np.sign(infinite), x.sign), infinite, used[0], used[1], x.poison)
        known[1] = np.where(x.poison > 0, 0, infinite)
        return Exact(number, known, real, factor, x.degree)

    def is_zero(self, x: Exact) -> np.ndarray:
        """bool [...]: which elements are zero at all points."""
        number = ((x.number == 0) | ~self.valid(x.used[0])).all(0)
        if x.factor is not None:
            number = number & (x.factor == 1).all(0)
        return number & (x.infinite == 0) & (x.poison == 0)

    def plain(self, x: Exact) -> Exact:
        """Without a logarithm: that of the factor becomes a number."""
        if x.factor is None:
            return x
        one, number = (x.factor == 1).all(0), x.number
        used = np.where(one, x.used[0], np.maximum(x.used[0], x.used[1] - 1))
        if not one.all():
            self.logs = True
            number = (number + self.p(number) - self._logarithms(self.inverted(x.factor, x.used[1]))) % self.p(number)
        known = facts(x.shape, 0, x.infinite, used, 0, x.poison)
        return self.settled(Exact(number, known, x.real, degree=x.degree.plus(INPUT)))

    def _logarithms(self, x: np.ndarray) -> np.ndarray:
        """Of numbers the logarithms, each from the component one prime higher; those of the highest mean nothing."""
        logs = self.random("log", x)
        for i, generator in enumerate(self._generator[self.points :].tolist()):
            level = LEVELS - self.levels + i // self.points
            scale = pow(generator, -1, PRIMES[level])
            row = [logarithm(level, value) * scale % PRIMES[level] for value in x[i + self.points].reshape(-1).tolist()]
            logs[i] = np.reshape(np.array(row, np.uint64), logs[i].shape)
        return logs

    def random(self, name: str, *arrays: np.ndarray) -> np.ndarray:
        """A random function of numbers, component by component."""
        word: Any = np.uint64(0)
        for number, x in enumerate(arrays):
            word = mixed(word, x, self.salt(f"{name} {number}").reshape(-1, *[1] * (x.ndim - 1)))
        return word % self.p(word)

    def opaque(self, name: str, *operands: Exact, sign: int = 0) -> Exact:
        """An uninterpreted function of each element; its real values are those of the function of that name."""
        self.uninterpreted.add(name)
        plain = [self.plain(x) for x in operands]
        number = self.random(name, *(x.number for x in plain))
        used, poison = plain[0].used[0], plain[0].poison
        for x in plain[1:]:
            used, poison = np.maximum(used, x.used[0]), np.maximum(poison, x.poison)
        if name in _ZERO_AT_ZERO or name in _ONE_AT_ZERO:
            number = np.where(self.is_zero(plain[0]), np.uint64(name in _ONE_AT_ZERO), number)
        real, function = np.full((1, *number.shape[1:]), math.nan), _real_functions().get(name)
        if function is not None:
            # A sum that cancels may be rounded to a number below zero, of which there is no root.
            real = np.asarray(function(*(np.where(self.is_zero(x), 0.0, x.real) for x in plain)))
            if self.order is None:
                defined = np.isfinite(sum(x.real for x in plain))[0]
                poison = np.maximum(poison, np.where(np.isnan(real[0]) & defined, OUTSIDE, 0))
        result = Exact(number, facts(number.shape[1:], sign, 0, used, 0, poison), real, degree=INPUT)
        if function is not None and any(x.special for x in plain):
            result = self._at_infinity(result, plain)
        return self.settled(result)

    def _at_infinity(self, x: Exact, operands: Sequence[Exact]) -> Exact:
        """A function's values where an operand is truly infinite: those that it has in floats."""
        here = np.zeros(x.shape, bool)
        for operand in operands:
            here = here | (np.abs(operand.infinite) == TRULY)
        limit = self.lifted(np.where(here, x.real[0], 0.0))
        return self.where(here & (x.poison == 0), limit, x)

    def bits(self, x: Exact) -> Exact:
        """Uninterpreted integers, from which `of_bits` comes back: what is sent as bits arrives."""
        x = self.plain(x)
        number = self.random("bits", x.number)
        columns = (part.reshape(len(part), -1).T for part in (number, x.number, x.facts, x.real))
        for word, residues, known, real in zip(*columns, strict=True):
            self._of_bits[word.tobytes()] = residues, known, real
        self._bits_degree = self._bits_degree.plus(x.degree)
        known = facts(x.shape, used=x.used[0], poison=x.poison)
        return Exact(number, known, np.full(x.real.shape, math.nan), degree=INPUT)

    def of_bits(self, x: Exact) -> Exact:
        """The numbers of these bits; of integers that are no number's bits, uninterpreted ones."""
        other = self.opaque("of bits", x)
        parts = (other.number, other.facts, other.real)
        number, known, real = (part.reshape(len(part), -1).copy() for part in parts)
        for i, word in enumerate(x.number.reshape(len(x.number), -1).T):
            if known[4, i]:  # what is no number arrives as none
                continue
            if not word.any():
                number[:, i], known[:, i], real[:, i] = 0, 0, 0
            elif word.tobytes() in self._of_bits:
                number[:, i], known[:, i], real[:, i] = self._of_bits[word.tobytes()]
        degree = self._bits_degree.plus(INPUT)
        shape = other.shape
        return Exact(number.reshape(-1, *shape), known.reshape(-1, *shape), real.reshape(-1, *shape), degree=degree)

    # Arithmetic

    def add(self, x: Exact, y: Exact) -> Exact:
        """x + y."""
        number = (x.number + y.number) % self.p(x.number)
        factor = y.factor if x.factor is None else x.factor
        if x.factor is not None and y.factor is not None:
            factor = x.factor * y.factor % self.p(x.factor)
        if factor is not None:
            factor = np.broadcast_to(factor, number.shape)
        sign = np.where(x.sign == y.sign, x.sign, 0)
        poison = np.maximum(x.poison, y.poison)
        infinite = np.clip(x.infinite + y.infinite, -HUGE, HUGE)
        if x.special or y.special:
            first, second = np.abs(x.infinite) == TRULY, np.abs(y.infinite) == TRULY
            infinite = np.where(first, x.infinite, np.where(second, y.infinite, infinite))
            apart = first & second & (x.infinite != y.infinite)
            poison = np.maximum(poison, np.where(apart, self.created, 0))
        used = np.maximum(x.used, y.used)
        real = x.real + y.real
        known = facts(number.shape[1:], sign, infinite, used[0], used[1], poison)
        return self.settled(Exact(number, known, real, factor, x.degree.plus(y.degree)))

    def negative(self, x: Exact) -> Exact:
        """-x."""
        p = self.p(x.number)
        factor = None if x.factor is None else self.inverted(x.factor, x.used[1])
        known = facts(x.shape, -x.sign, -x.infinite, x.used[0], x.used[1], poison=x.poison)
        return replace(x, number=(p - x.number) % p, facts=known, real=-x.real, factor=factor)

    def sub(self, x: Exact, y: Exact) -> Exact:
        """x - y."""
        return self.add(x, self.negative(y))

    def mul(self, x: Exact, y: Exact) -> Exact:
        """x * y; a logarithm times a small whole number or a mask stays one."""
        for one, other in ((x, y), (y, x)):
            if one.factor is not None and other.factor is None and not one.special and not other.special:
                product = self._multiple(one, other)
                if product is not None:
                    return product
        x, y = self.plain(x), self.plain(y)
        number = x.number * y.number % self.p(x.number)
        used = np.maximum(x.used[0], y.used[0])
        poison = np.maximum(x.poison, y.poison)
        infinite: Any = 0
        if x.infinite.any() or y.infinite.any():  # times a number of no known sign it is one itself, and not infinite
            first, second = self._known_sign(x), self._known_sign(y)
            infinite = np.where((x.infinite != 0) | (y.infinite != 0), first * second, 0)
        if x.special or y.special:
            first, second = np.abs(x.infinite) == TRULY, np.abs(y.infinite) == TRULY
            nothing = (first & self.is_zero(y)) | (second & self.is_zero(x))
            poison = np.maximum(poison, np.where(nothing, self.created, 0))
            turned = np.sign(self.key(x)) * np.sign(self.key(y))
            infinite = np.where(first | second, TRULY * np.nan_to_num(turned), infinite)
        real = x.real * y.real
        known = facts(number.shape[1:], x.sign * y.sign, infinite, used, 0, poison=poison)
        return self.settled(Exact(number, known, real, degree=x.degree.times(y.degree)))

    def _known_sign(self, x: Exact) -> np.ndarray:
        """1, -1, or 0 where it is not known."""
        sign = np.where(x.infinite != 0, np.sign(x.infinite), x.sign)
        return np.where((x.number == 0).all(0), 0, sign)

    def _multiple(self, x: Exact, y: Exact) -> Exact | None:
        """A logarithm times a small whole number or a mask; None for other products."""
        number = x.number * y.number % self.p(x.number)
        real = x.real * y.real
        times = self.whole(y)
        if times is not None:
            factor = self.power(x.factor, abs(times))
            factor = self.inverted(factor, x.used[1]) if times < 0 else factor
            known = facts(number.shape[1:], 0, x.infinite * np.sign(times), x.used[0], x.used[1], poison=x.poison)
            return Exact(number, known, real, np.broadcast_to(factor, number.shape), x.degree)
        ones = (y.number == 1).all(0)
        if y.degree.total or not (ones | (y.number == 0).all(0)).all():
            return None
        factor = np.where(ones, self.factor_of(x), np.uint64(1))
        known = facts(number.shape[1:], 0, x.infinite * ones, x.used[0], x.used[1], poison=x.poison)
        return Exact(number, known, real, factor, x.degree)

    def factor_of(self, x: Exact) -> np.ndarray:
        """What its logarithm is of, 1 for numbers."""
        return np.ones_like(x.number) if x.factor is None else x.factor

    def whole(self, x: Exact) -> int | None:
        """The one small whole number that every element is; None if there is none."""
        if x.factor is not None or x.degree.total or x.number.size == 0:
            return None
        first = x.number.reshape(len(x.number), -1)[:, 0]
        if not (x.number == first.reshape(-1, *[1] * (x.number.ndim - 1))).all():
            return None
        for value, residues in ((int(first[0]), first), (-int(self.moduli[0] - first[0]), self.moduli - first)):
            if abs(value) <= 64 and (residues == abs(value)).all():
                return value
        return None

    def power(self, x: Any, n: int) -> np.ndarray:
        """A power of numbers, n at least 0."""
        p, result = self.p(x), np.ones_like(x)
        for bit in bin(n)[2:]:
            result = result * result % p
            if bit == "1":
                result = result * x % p
        return result

    def to_the(self, x: Exact, n: int) -> Exact:
        """x to a whole power; an even one of a square root is one of what it is the root of."""
        x = self.plain(x)
        if n == 0:  # of what is no number too
            return self.lifted(np.ones(x.shape, np.float32))
        if n < 0:
            return self.inverse(self.to_the(x, -n))
        square = self._square_of_roots(x) if n >= 2 else None
        if square is not None:
            whole = self.to_the(square, n // 2)
            return self.mul(whole, x).signed(1) if n % 2 else whole
        sign: Any = 1 if n % 2 == 0 else x.sign
        infinite = np.where(np.abs(x.infinite) == TRULY, TRULY * np.sign(x.infinite) ** n, 0)
        real = x.real**n
        known = facts(x.shape, sign, infinite, x.used[0], 0, x.poison)
        return self.settled(Exact(self.power(x.number, n), known, real, degree=x.degree.to_the(n)))

    def root(self, x: Exact) -> Exact:
        """The square root: uninterpreted, but that its square is x."""
        x = self.plain(x)
        result = self.opaque("sqrt", x, sign=1)
        numbers = zip(_columns(result.number), _columns(x.number), result.poison.reshape(-1), strict=True)
        for word, number, poison in numbers:
            if not poison:
                self._of_roots[word.tobytes()] = number
        self._squares_degree = self._squares_degree.plus(x.degree)
        return result

    def _square_of_roots(self, x: Exact) -> Exact | None:
        """The squares of an array whose elements are all square roots; None for others."""
        if not self._of_roots:
            return None
        words = zip(_columns(x.number), x.poison.reshape(-1), strict=True)
        squares = [word if poison else self._of_roots.get(word.tobytes()) for word, poison in words]
        if not squares or any(square is None for square in squares):
            return None
        number = np.stack(squares, 1).reshape(x.number.shape)  # type: ignore[arg-type]
        infinite = np.where(np.abs(x.infinite) == TRULY, TRULY, 0)
        known = facts(x.shape, 1, infinite, x.used[0], 0, x.poison)
        return self.settled(Exact(number, known, x.real**2, degree=self._squares_degree))

    def inverse(self, x: Exact) -> Exact:
        """1 / x; that of zero is infinite, that of infinity zero."""
        x = self.plain(x)
        degree = self.inverse_degree(x.degree, x.number[0].size)
        number, zero, truly = self.inverted(x.number, x.used[0]), self.is_zero(x), np.abs(x.infinite) == TRULY
        infinite, poison = np.where(zero, TRULY, 0), x.poison
        if self.planted:
            infinite, poison = np.zeros_like(infinite), np.where(zero, OUTSIDE, poison)
        real = 1 / x.real
        number = np.where(truly, np.uint64(0), number)
        known = facts(x.shape, x.sign, infinite, np.where(truly, 0, x.used[0]), 0, poison)
        return self.settled(Exact(number, known, real, degree=degree))

    def inverse_degree(self, degree: Degree, elements: int) -> Degree:
        """That of the inverses of so many elements of a degree."""
        if not degree.total:
            return CONSTANT
        self._divisions += 1
        return Degree(1, {**degree.inverses, self._divisions: (1, degree.total * elements)})

    def inverted(self, x: np.ndarray, used: np.ndarray) -> np.ndarray:
        """The inverses of numbers: of all of them at the price of one, by the products of a tree."""
        p = self.p(x)
        zero, valid = x == 0, self.valid(used)
        if zero.any():
            always = np.where(valid, zero, True).all(0)
            if (zero & valid & ~always).any():
                raise RedrawError
            inverse = self._inverted(np.where(zero, np.uint64(1), x))
            return np.where(zero, self.salt("1/0").reshape(p.shape) % p, inverse)
        return self._inverted(x)

    def _inverted(self, x: np.ndarray) -> np.ndarray:
        p = self.moduli[:, None]
        flat = x.reshape(len(x), -1)
        size = 1 << max(flat.shape[1] - 1, 0).bit_length()
        tree = [np.concatenate([flat, np.ones((len(x), size - flat.shape[1]), np.uint64)], 1)]
        while tree[-1].shape[1] > 1:
            tree.append(tree[-1][:, ::2] * tree[-1][:, 1::2] % p)
        roots = [pow(int(value), -1, int(q)) for value, q in zip(tree[-1][:, 0], self.moduli, strict=True)]
        inverse: Any = np.array(roots, np.uint64)[:, None]
        for products in reversed(tree[:-1]):
            pairs = np.empty_like(products)
            pairs[:, ::2], pairs[:, 1::2] = inverse * products[:, 1::2] % p, inverse * products[:, ::2] % p
            inverse = pairs
        return inverse[:, : flat.shape[1]].reshape(x.shape)

    def total(self, x: Exact, dims: Sequence[int], keep: bool = False) -> Exact:
        """The sum over dims of the array."""
        behind, over = tuple(dim + 1 for dim in dims), tuple(dims)
        number = x.number.sum(behind, np.uint64, keepdims=keep)
        positive, negative = ((x.facts[:1] == sign).all(behind, keepdims=keep)[0] for sign in (1, -1))
        most = x.facts.max(behind, keepdims=keep, initial=0)
        factor = x.factor
        if factor is not None:
            for dim in sorted(behind, reverse=True):
                factor = self._product(factor, dim, keep)
        highest = x.infinite.max(over, keepdims=keep, initial=0)
        lowest = x.infinite.min(over, keepdims=keep, initial=0)
        infinite = np.clip(highest, 0, HUGE) + np.clip(lowest, -HUGE, 0)
        poison = most[4]
        if x.special:
            up, down = highest == TRULY, lowest == -TRULY
            infinite = np.where(up, TRULY, np.where(down, -TRULY, infinite))
            poison = np.maximum(poison, np.where(up & down, self.created, 0))
        sign = np.where(positive, 1, np.where(negative, -1, 0))
        real = x.real.sum(behind, keepdims=keep)
        known = facts(number.shape[1:], sign, infinite, most[2], most[3], poison)
        return self.settled(Exact(number % self.p(number), known, real, factor, x.degree))

    def _product(self, x: np.ndarray, dim: int, keep: bool) -> np.ndarray:
        result = np.ones((*x.shape[:dim], 1, *x.shape[dim + 1 :]), np.uint64)
        for i in range(x.shape[dim]):
            result = result * np.take(x, [i], dim) % self.p(x)
        return result if keep else np.squeeze(result, dim)

    def matmul(self, x: Exact, y: Exact) -> Exact:
        """[..., m, k] @ [..., k, n]: the second operand in halves of 16 bits, so that sums of products fit a word."""
        x, y = self.plain(x), self.plain(y)
        a, b = x.number, y.number
        p, half = self.p(a), np.uint64(16)
        number: Any = np.uint64(0)
        for at in range(0, max(a.shape[-1], 1), _PRODUCTS):
            left, right = a[..., at : at + _PRODUCTS], b[..., at : at + _PRODUCTS, :]
            high, low = np.matmul(left, right >> half) % p, np.matmul(left, right & np.uint64(0xFFFF))
            number = (number + (high << half) + low) % p
        same = [bool(np.all(x.sign == s) and np.all(y.sign == t)) for s, t in ((1, 1), (1, -1), (-1, 1), (-1, -1))]
        sign = 1 if same[0] or same[3] else -1 if same[1] or same[2] else 0
        used = np.maximum(x.used[0].max(-1, keepdims=True, initial=0), y.used[0].max(-2, keepdims=True, initial=0))
        real = np.matmul(x.real, y.real)
        known = facts(number.shape[1:], sign, 0, used)
        if x.special or y.special:
            known[1], known[4] = self._special_sums(x, y)
        return self.settled(Exact(number, known, real, degree=x.degree.times(y.degree)))

    def _special_sums(self, x: Exact, y: Exact) -> tuple[np.ndarray, np.ndarray]:
        """Which sums of products are infinite, and which no number: by how many of their terms are."""

        def terms(a: np.ndarray, b: np.ndarray) -> np.ndarray:
            return np.matmul(a.astype(np.float64), b.astype(np.float64)) > 0

        def signs(z: Exact) -> list[np.ndarray]:
            sign, truly = np.sign(self.key(z)), np.abs(z.infinite) == TRULY
            return [truly & (sign > 0), truly & (sign < 0), sign > 0, sign < 0]

        (up, down, above, below), (other_up, other_down, other_above, other_below) = signs(x), signs(y)
        plus = terms(up, other_above) | terms(down, other_below) | terms(above, other_up) | terms(below, other_down)
        minus = terms(up, other_below) | terms(down, other_above) | terms(above, other_down) | terms(below, other_up)
        nothing = terms(up | down, self.is_zero(y)) | terms(self.is_zero(x), other_up | other_down) | (plus & minus)
        poison = np.where(nothing, self.created, 0)
        for code in (NOT_A_NUMBER, OUTSIDE):
            everywhere = [np.ones(z.shape, bool) for z in (x, y)]
            spread = terms(x.poison == code, everywhere[1]) | terms(everywhere[0], y.poison == code)
            poison = np.maximum(poison, np.where(spread, code, 0))
        return np.where(plus, TRULY, 0) + np.where(minus, -TRULY, 0), poison

    # Functions

    def exp(self, x: Exact) -> Exact:
        """exp, one prime higher."""
        self.exps = True
        p = self.p(x.number)
        exponents = x.number[: -self.points] * self._generator.reshape(p.shape)[self.points :] % p[: -self.points]
        result, byte = np.ones((len(x.number), *x.shape), np.uint64), np.uint64(0xFF)
        first = LEVELS - self.levels + 1
        level = np.repeat(np.arange(first, LEVELS), self.points).reshape(-1, *[1] * len(x.shape))
        for number in range(4):
            digit = ((exponents >> np.uint64(8 * number)) & byte).astype(np.int64)
            power = powers()[level, number, digit]
            result[self.points :] = result[self.points :] * power % p[self.points :]
        used = x.used[0] + 1
        degree = INPUT if x.degree.total else CONSTANT
        if x.factor is not None:
            result = result * x.factor % p
            used, degree = np.maximum(used, x.used[1]), degree.times(x.degree)
        result = np.where(x.low, np.uint64(0), result)
        used = np.where(x.low, 0, np.minimum(used, LEVELS))
        real = np.where(x.low, 0.0, np.exp(x.real))
        infinite = np.where(x.infinite == TRULY, TRULY, 0)
        return self.settled(Exact(result, facts(x.shape, 1, infinite, used, 0, x.poison), real, degree=degree))

    @cached_property
    def _generator(self) -> np.ndarray:
        """By component: a random power, for the component below, of the base of exp."""
        below = np.concatenate([self.moduli[: self.points], self.moduli[: -self.points]])
        return 1 + self.salt("exp") % (below - np.uint64(1))

    def log(self, x: Exact) -> Exact:
        """log, kept as what it is of; that of zero is minus infinity."""
        x = self.plain(x)
        zero = self.is_zero(x)
        below = ~zero & ((x.sign < 0) & (x.infinite == 0) | (x.infinite < 0))
        poison = np.maximum(x.poison, np.where(below, NOT_A_NUMBER, 0))
        infinite = np.where(x.infinite == TRULY, TRULY, np.where(zero, -TRULY, 0))
        if self.order is None:
            poison = np.maximum(poison, np.where(~zero & (x.real[0] < 0) & (poison == 0), OUTSIDE, 0))
        real = np.log(x.real)
        factor = np.where(zero, np.uint64(1), x.number)
        known = facts(x.shape, 0, infinite, 0, x.used[0], poison)
        return self.settled(Exact(np.zeros_like(x.number), known, real, factor, x.degree))

    # Order

    def key(self, x: Exact) -> np.ndarray:
        """float64 [...]: the place of each element in the order, equal where the numbers are; NaN for no number."""
        self.compared += 1
        x = self.plain(x)
        self.deepest = max(self.deepest, int(x.used[0].max(initial=0)))
        if x.used[0].max(initial=0) >= self.levels - 1:
            raise TooDeepError
        key = self._real_key(x) if self.order is None else self._random_key(x, self.order)
        key = np.where(self.is_zero(x), 0.0, key)
        key = np.where(x.infinite == TRULY, math.inf, np.where(x.infinite == -TRULY, -math.inf, key))
        return np.where(x.poison > 0, math.nan, key)

    def _real_key(self, x: Exact) -> np.ndarray:
        """The real values, but for their last digits: what is equal in real numbers may be rounded another way."""
        real = x.real[0]
        if (~np.isfinite(real) & ~self.is_zero(x) & (x.poison == 0) & (np.abs(x.infinite) != TRULY)).any():
            raise UnknownValueError
        # What is too small for a float, as a product of exps, still has its sign.
        lost = (real == 0) & (x.sign != 0)
        return np.where(lost, x.sign * _SMALLEST, self._rounded(real))

    def _rounded(self, real: np.ndarray) -> np.ndarray:
        mantissa, exponent = np.frexp(real)
        return np.asarray(np.ldexp(np.rint(mantissa * 2.0**_DIGITS), exponent - _DIGITS))

    def _random_key(self, x: Exact, order: int) -> np.ndarray:
        """A random total order.

        Unknown sizes are between 1 and 2. Constants are below them in even orders and above them in odd ones; from the
        fourth on they are among them, and spread about one of those that were compared, so that what is between two
        constants is seen.
        """
        top = x.number[-2 * self.points : -self.points]  # the highest prime that every number has
        p = np.uint64(PRIMES[-2])
        # The same magnitude for x and -x: the representative whose first component is in the lower half.
        upper = top[0] > p // np.uint64(2)
        canonical = np.where(upper, p - top, top) % p
        magnitude = np.zeros(x.shape, np.uint64)
        for component, salt in zip(canonical, self.salt(f"order {order // 4}"), strict=False):
            magnitude = mixed(magnitude, component, salt)
        below = upper ^ (order % 4 >= 2) ^ (magnitude % np.uint64(2) == 1)
        negative = np.where(x.sign == 0, below, x.sign < 0)
        size = 1 + (magnitude >> np.uint64(12)).astype(np.float64) * 2.0**-52
        if order % 2:
            size = 3 - size
        # Constants, as counts and their shares are, stand in their own order: elsewhere the same are computed without
        # an unknown, and compared as what they are.
        ratio = np.where((top == top[0]).all(0) & np.isfinite(x.real[0]), self._rounded(x.real[0]), math.nan)
        share = np.abs(ratio) / (1 + np.abs(ratio))
        place = share + 2 * (order % 2)
        if order >= 4:
            rng = np.random.default_rng([self.seed, order])
            steepness = math.exp(rng.normal() + 1)
            middle = rng.choice(self.centres or (0.0,)) + rng.normal() / steepness
            spread = 1 / (1 + np.exp(np.clip(steepness * (middle - np.log(np.abs(ratio))), -700, 700)))
            place = 1.01 + 0.97 * spread + 0.01 * share  # the share tells apart what is spread to one place
        size = np.where(np.isnan(ratio), size, place)
        negative = np.where(np.isnan(ratio), negative, ratio < 0)
        huge = np.abs(x.infinite) == HUGE
        return np.where(huge, 4.0 * np.sign(x.infinite), np.where(negative, -size, size))

    def where(self, mask: np.ndarray, x: Exact, y: Exact) -> Exact:
        """x where the mask [...] holds, else y."""
        number = np.where(mask, x.number, y.number)
        factor = None
        if x.factor is not None or y.factor is not None:
            factor = np.where(mask, self.factor_of(x), self.factor_of(y))
        degree = x.degree if mask.all() else y.degree if not mask.any() else x.degree.plus(y.degree)
        return Exact(number, np.where(mask, x.facts, y.facts), np.where(mask, x.real, y.real), factor, degree)

    def chance(self, degree: Degree) -> float:
        """A bound of the chance that two different results of this degree agree at all points.

        Their difference is a polynomial of inputs, inverses and values of functions. Multiplied by each divisor as
        often as its inverse may occur in one term, it is one of inputs and values alone. All primes are compared, so
        the largest one bounds how rarely it is zero at one point: its degree over the number of values that a variable
        may have there. Points at which a divisor is zero are drawn again, which is as rare a zero.
        """
        weights = sum(weight for _, weight in degree.inverses.values())
        total = degree.total + sum(most * weight for most, weight in degree.inverses.values())
        agreeing = min(1.0, total / self.variety) ** self.points
        redrawn = 2 * self.points * weights / int(self.moduli[0])  # all primes together: each is twice the last
        return min(1.0, agreeing / max(1 - redrawn, 1 / SEEDS))

    @property
    def variety(self) -> int:
        """How many values a variable may have, at least, modulo the largest prime that is compared.

        An input is no zero there. An exp is a power of an element of the order of the prime below.
        """
        largest = LEVELS - 1 - self.logs
        return PRIMES[largest - self.exps] - 1

    def same(self, x: Exact, y: Exact) -> np.ndarray:
        """bool [...]: where arrays are equal in the components of both; logarithms as their exps, or all as numbers.

        What is no number equals what is none; nothing is said where one is outside of a function's domain.
        """
        if not self.logs and (x.factor is not None or y.factor is not None):
            special = x.special or y.special
            x, y = (self._powers_of(z) if special else self.exp(z) for z in (x, y))
        x, y = self.plain(x), self.plain(y)
        valid = self.valid(np.maximum(x.used[0], y.used[0]))
        equal = ((x.number == y.number) | ~valid).all(0)
        if x.special or y.special:
            truly = (np.abs(x.infinite) == TRULY) | (np.abs(y.infinite) == TRULY)
            equal = np.where(truly, x.infinite == y.infinite, equal)
            equal = np.where((x.poison > 0) | (y.poison > 0), x.poison == y.poison, equal)
            equal = equal | (x.poison == OUTSIDE) | (y.poison == OUTSIDE)
        return np.asarray(equal)

    def _powers_of(self, x: Exact) -> Exact:
        """exp, which is infinite where x is."""
        result = self.exp(x)
        truly = np.abs(x.infinite) == TRULY
        return self.settled(replace(result, facts=np.where(truly, x.facts, result.facts)))


def _columns(x: np.ndarray) -> np.ndarray:
    """The components of each element, element by element."""
    return np.ascontiguousarray(x.reshape(len(x), -1).T)


def mixed(*words: Any) -> Any:
    """A sum of 64-bit words, every bit of it spread (the finalizer of splitmix64 behind its increment)."""
    x = sum(words[1:], words[0]) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
