"""Real arithmetic in a finite field: numbers modulo a tower of primes, at several random points at once.

Two programs whose results agree at random points of a field are the same function of all inputs, but for a chance that
is their degree over the size of the field (Schwartz and Zippel). What a field does not have is added so that the laws
that programs rely on hold exactly:

- `exp` goes from one prime of the tower to the next, p to 2p + 1, by powers of an element of order p: exp(x + y) is
  exp(x) exp(y). Each `exp` on the way from an input to a result uses up one prime.
- `log` is kept beside the number, as the number whose logarithm is added: exp(log x) is x, log(xy) is log x + log y.
  Where it is multiplied by what is no small whole number, it becomes the exponent of its square, one prime lower: so
  log(exp x) is x and any multiple is linear, but the sign of what it is of is lost, and the highest prime.
- `max`, sorts and comparisons follow a random total order in which x < y when -y < -x, what is known to be positive is
  above zero, and constants are in their own order. They are decided for all points at once, so that every mask is an
  array of booleans. Of any two numbers, one of them unknown, each is above the other in one of a field's four orders at
  least, unless their signs decide.
- Constants beyond 1e9 and -1e9 are infinite, also plus a number or times one of known sign: exp of minus infinity is 0,
  `max` the other. In all else they are numbers like any other, so that what is added and taken away cancels.
- Any other function is a random one, "uninterpreted": equal arguments have equal values, nothing else is known.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from shardkit.testing.exact.tower import LEVELS, PRIMES, logarithm, powers, rationals

ORDERS = (0, 1, 2, 3)
INFINITE = 1e9
_LARGEST_DENOMINATOR, _MOST_DIGITS = 2**14, 3
_LOWEST = np.iinfo(np.int64).min
_PRODUCTS = 2**15  # of 32 bits and 16, whose sum fits a word


class RedrawError(Exception):
    """A divisor that is not always zero is zero at one of the points: they are drawn again."""


class TooDeepError(Exception):
    """More nested exps, on the way to a result, than the tower has primes."""


class Degree(NamedTuple):
    """Of values as polynomials of inputs, inverses and values of functions: bounds for every element.

    Attributes:
        total: the degree.
        inverses: the degree in the inverses of one division, and the sum of the degrees of what is divided by, for
            each division by its number.
    """

    total: int = 0
    inverses: Mapping[int, tuple[int, int]] = MappingProxyType({})

    def plus(self, *others: Degree) -> Degree:
        """That of a sum, or of an array with elements of all."""
        inverses = dict(self.inverses)
        for number, (most, weight) in (item for each in others for item in each.inverses.items()):
            inverses[number] = max(most, inverses.get(number, (0, 0))[0]), weight
        return Degree(max(self.total, *(each.total for each in others)), inverses)

    def times(self, other: Degree) -> Degree:
        """That of a product."""
        inverses = dict(self.inverses)
        for number, (most, weight) in other.inverses.items():
            inverses[number] = most + inverses.get(number, (0, 0))[0], weight
        return Degree(self.total + other.total, inverses)

    def to_the(self, n: int) -> Degree:
        """That of a power."""
        return Degree(self.total * n, {number: (n * most, weight) for number, (most, weight) in self.inverses.items()})


CONSTANT, INPUT = Degree(), Degree(1)


@dataclass(frozen=True, eq=False)
class Exact:
    """An array of numbers of the field, `number + log(factor)`.

    The leading dim of `number` and `factor` has their components, prime by prime and point by point. That of `facts`
    has what is known of each element, in rows: its sign, 1 where it is not negative and -1 where it is not positive;
    whether it is minus infinity (-1) or plus (1); and how many of the lowest primes exps have used up on its way, in
    the number and in the factor. The components of those have no meaning.

    Attributes:
        number: uint64 [components, ...].
        facts: int8 [4, ...].
        factor: uint64 [components, ...]; None for 1.
        degree: bounds of its degree.
    """

    number: np.ndarray
    facts: np.ndarray
    factor: np.ndarray | None = None
    degree: Degree = CONSTANT

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the array, without the components."""
        return self.number.shape[1:]

    @property
    def sign(self) -> np.ndarray:
        """int8 [...]."""
        return self.facts[0]

    @property
    def infinite(self) -> np.ndarray:
        """int8 [...]."""
        return self.facts[1]

    @property
    def low(self) -> np.ndarray:
        """bool [...], whether it is minus infinity."""
        return self.facts[1] < 0

    @property
    def used(self) -> np.ndarray:
        """int8 [2, ...], the used primes of number and factor."""
        return self.facts[2:]

    def moved(self, move: Callable[[np.ndarray], np.ndarray]) -> Exact:
        """With its elements at other places: `move` acts on each part, behind its leading dim."""
        factor = None if self.factor is None else move(self.factor)
        return replace(self, number=move(self.number), facts=move(self.facts), factor=factor)

    def row(self, dim: int, i: int) -> Exact:
        """The elements at a place of a dim, without it."""
        return self.moved(lambda part: np.take(part, i, dim + 1))

    def signed(self, sign: int) -> Exact:
        """The same, known to have a sign."""
        return replace(self, facts=facts(self.shape, sign, self.infinite, *self.used))


def facts(shape: Sequence[int], sign: Any = 0, infinite: Any = 0, used: Any = 0, factor_used: Any = 0) -> np.ndarray:
    """The facts of an array of this shape."""
    rows = np.empty((4, *shape), np.int8)
    for number, value in enumerate((sign, infinite, used, factor_used)):
        rows[number] = value
    return rows


def simplest(value: float, dtype: Any) -> Fraction:
    """The simplest rational that rounds to a constant, so that 1/3 is a third; else the constant itself.

    One with a small denominator, or one of few decimal digits, as an epsilon is written.
    """
    exact = Fraction(value)
    for bits in range(_LARGEST_DENOMINATOR.bit_length()):
        near = exact.limit_denominator(1 << bits)
        if np.asarray(float(near)).astype(dtype) == np.asarray(value).astype(dtype):
            return near
    digits = f"{value:.{_MOST_DIGITS - 1}e}"
    return Fraction(digits) if np.asarray(float(digits)).astype(dtype) == np.asarray(value).astype(dtype) else exact


def widened(x: np.ndarray) -> np.ndarray:
    """Constants of less than 32 bits as what they stand for, because rounding is not modelled."""
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize >= 4:
        return x
    values, where = np.unique(x.astype(np.float32), return_inverse=True)
    simple = [float(simplest(float(value), x.dtype)) if np.isfinite(value) else float(value) for value in values]
    return np.array(simple, np.float32)[where].reshape(x.shape)


class Field:
    """The arithmetic, at `points` random points that `seed` draws.

    Attributes:
        shallow: whether `logistic` is uninterpreted too, which then uses up no prime.
        order: which of its orders, 0 to 3: sizes the other way round, unknown signs the other way round.
        uninterpreted: the functions that were applied without a law, by name.
        compared: how many arrays were put in order.
        logs: whether a logarithm became a number, after which the components of the highest prime have no meaning.
    """

    def __init__(self, points: int, seed: int, shallow: bool = False, order: int = 0):
        self.points, self.seed, self.shallow, self.order = points, seed, shallow, order
        self.moduli = np.repeat(np.array(PRIMES, np.uint64), points)
        self.uninterpreted: set[str] = set()
        self.compared, self._divisions, self.logs = 0, 0, False
        self._constants: dict[Any, np.ndarray] = {}
        self._salts: dict[str, np.ndarray] = {}
        self._of_bits: dict[bytes, tuple[np.ndarray, np.ndarray]] = {}
        self._bits_degree = CONSTANT

    def p(self, x: np.ndarray) -> np.ndarray:
        """The primes of an array's components, the last ones if it has fewer."""
        return self.moduli[-len(x) :].reshape(-1, *[1] * (x.ndim - 1))

    def valid(self, used: np.ndarray) -> np.ndarray:
        """bool [components, ...]: which components have a meaning where so many primes are used up."""
        level = np.repeat(np.arange(LEVELS), self.points).reshape(-1, *[1] * used.ndim)
        return (level >= used) & (level < LEVELS - self.logs)

    def salt(self, name: str) -> np.ndarray:
        """A random word for each component."""
        if name not in self._salts:
            hashes = [
                hashlib.blake2b(f"{self.seed} {name} {i}".encode(), digest_size=8) for i in range(len(self.moduli))
            ]
            self._salts[name] = np.array([int.from_bytes(each.digest(), "big") for each in hashes], np.uint64)
        return self._salts[name]

    # Values

    def drawn(self, name: str, shape: Sequence[int]) -> Exact:
        """An input: a random number for every component and element."""
        size = math.prod(shape)
        rng = np.random.default_rng(
            [self.seed, int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "big")]
        )
        number = rng.integers(1, self.moduli[:, None], (len(self.moduli), size), np.uint64)
        return Exact(number.reshape(len(number), *shape), facts(shape), degree=INPUT)

    def lifted(self, x: Any) -> Exact:
        """A constant array of floats, integers or booleans."""
        x = np.asarray(x)
        one = x.reshape(-1), np.zeros(x.shape, np.int64)
        values, where = np.unique(x, return_inverse=True) if x.size > 1 else one
        table = np.stack([self._constant(each, x.dtype) for each in values], 1) if values.size else self.moduli[:, None]
        number = np.take(table, where.reshape(-1), 1).reshape(len(table), *x.shape)
        wide = np.asarray(values, np.float64)
        infinite = np.where(wide <= -INFINITE, -1, (wide >= INFINITE) & jnp.issubdtype(x.dtype, jnp.floating))
        sign = np.where(wide == 0, 1, np.nan_to_num(np.sign(wide))).astype(np.int8)
        return Exact(
            number, facts(x.shape, np.take(sign, where.reshape(x.shape)), np.take(infinite, where.reshape(x.shape)))
        )

    def _constant(self, value: Any, dtype: Any) -> np.ndarray:
        known = (value.item(), str(dtype))
        if known not in self._constants:
            if not np.isfinite(np.asarray(value, np.float64)):
                number = self.salt(f"constant {abs(value)}") % self.moduli
                self._constants[known] = self.moduli - number if float(value) < 0 else number
            else:
                ratio = simplest(float(value), dtype) if jnp.issubdtype(dtype, jnp.floating) else Fraction(int(value))
                residues = [ratio.numerator * pow(ratio.denominator, -1, int(p)) % int(p) for p in self.moduli]
                self._constants[known] = np.array(residues, np.uint64)
        return self._constants[known]

    def plain(self, x: Exact) -> Exact:
        """Without a logarithm: that of the factor becomes a number."""
        if x.factor is None:
            return x
        one, number = (x.factor == 1).all(0), x.number
        used = np.where(one, x.used[0], np.maximum(x.used[0], x.used[1] - 1))
        if not one.all():
            self.logs = True
            number = (number + self.p(number) - self._logarithms(self.inverted(x.factor, x.used[1]))) % self.p(number)
        return Exact(number, facts(x.shape, 0, x.infinite, used), degree=x.degree.plus(INPUT))

    def _logarithms(self, x: np.ndarray) -> np.ndarray:
        """Of numbers the logarithms, each from the component one prime higher; those of the highest mean nothing."""
        logs = self.random("log", x)
        for i, generator in enumerate(self._generator[self.points :].tolist()):
            level = i // self.points
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
        """An uninterpreted function of each element."""
        self.uninterpreted.add(name)
        plain = [self.plain(x) for x in operands]
        number = self.random(name, *(x.number for x in plain))
        used = plain[0].used[0]
        for x in plain[1:]:
            used = np.maximum(used, x.used[0])
        return Exact(number, facts(number.shape[1:], sign, 0, used), degree=INPUT)

    def bits(self, x: Exact) -> Exact:
        """Uninterpreted integers, from which `of_bits` comes back: what is sent as bits arrives."""
        x = self.plain(x)
        number = self.random("bits", x.number)
        columns = (part.reshape(len(part), -1).T for part in (number, x.number, x.facts))
        for word, own, known in zip(*columns, strict=True):
            self._of_bits[word.tobytes()] = own, known
        self._bits_degree = self._bits_degree.plus(x.degree)
        return Exact(number, facts(x.shape, used=x.used[0]), degree=INPUT)

    def of_bits(self, x: Exact) -> Exact:
        """The numbers of these bits; of integers that are no number's bits, uninterpreted ones."""
        other = self.opaque("of bits", x)
        number, known = (part.reshape(len(part), -1).copy() for part in (other.number, other.facts))
        for i, word in enumerate(x.number.reshape(len(x.number), -1).T):
            if not word.any():
                number[:, i], known[:, i] = 0, 0
            elif word.tobytes() in self._of_bits:
                number[:, i], known[:, i] = self._of_bits[word.tobytes()]
        degree = self._bits_degree.plus(INPUT)
        return Exact(number.reshape(other.number.shape), known.reshape(other.facts.shape), degree=degree)

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
        infinite = np.clip(x.infinite + y.infinite, -1, 1)
        known = facts(number.shape[1:], sign, infinite, *np.maximum(x.used, y.used))
        return Exact(number, known, factor, x.degree.plus(y.degree))

    def negative(self, x: Exact) -> Exact:
        """-x."""
        p = self.p(x.number)
        factor = None if x.factor is None else self.inverted(x.factor, x.used[1])
        return replace(x, number=(p - x.number) % p, facts=facts(x.shape, -x.sign, -x.infinite, *x.used), factor=factor)

    def sub(self, x: Exact, y: Exact) -> Exact:
        """x - y."""
        return self.add(x, self.negative(y))

    def mul(self, x: Exact, y: Exact) -> Exact:
        """x * y; a logarithm times a small whole number or a mask stays one."""
        for one, other in ((x, y), (y, x)):
            times = self.whole(other) if one.factor is not None else None
            if times is not None:
                factor = self.power(one.factor, abs(times))
                factor = self.inverted(factor, one.used[1]) if times < 0 else factor
                number = one.number * other.number % self.p(one.number)
                known = facts(number.shape[1:], 0, one.infinite * np.sign(times), *one.used)
                return Exact(number, known, np.broadcast_to(factor, number.shape), one.degree)
            if one.factor is not None and other.factor is None and not other.degree.total:
                ones = (other.number == 1).all(0)
                if (ones | (other.number == 0).all(0)).all():  # a mask
                    factor, number = np.where(ones, one.factor, np.uint64(1)), one.number * other.number
                    return Exact(number, facts(number.shape[1:], 0, one.infinite * ones, *one.used), factor, one.degree)
        x, y = self.plain(x), self.plain(y)
        number = x.number * y.number % self.p(x.number)
        used = np.maximum(x.used[0], y.used[0])
        infinite: Any = 0
        if x.infinite.any() or y.infinite.any():  # times a number of no known sign it is one itself, and not infinite
            signs = [np.where((z.number == 0).all(0), 0, np.where(z.infinite, z.infinite, z.sign)) for z in (x, y)]
            infinite = np.where((x.infinite != 0) | (y.infinite != 0), signs[0] * signs[1], 0)
        known = facts(number.shape[1:], x.sign * y.sign, infinite, used)
        return Exact(number, known, degree=x.degree.times(y.degree))

    def whole(self, x: Exact) -> int | None:
        """The one small whole number that every element is; None if there is none."""
        if x.factor is not None or x.degree.total or x.number.size == 0:
            return None
        first = x.number.reshape(len(x.number), -1)[:, 0]
        if not (x.number == first.reshape(-1, *[1] * (x.number.ndim - 1))).all():
            return None
        for value, given in ((int(first[0]), first), (-int(self.moduli[0] - first[0]), self.moduli - first)):
            if abs(value) <= 64 and (given == abs(value)).all():
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

    def inverse(self, x: Exact) -> Exact:
        """1 / x; that of a zero is one uninterpreted number."""
        x = self.plain(x)
        degree = CONSTANT
        if x.degree.total:
            self._divisions += 1
            weight = x.degree.total * x.number[0].size
            degree = Degree(1, {**x.degree.inverses, self._divisions: (1, weight)})
        return Exact(self.inverted(x.number, x.used[0]), facts(x.shape, x.sign, 0, x.used[0]), degree=degree)

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
        inverse = np.array(roots, np.uint64)[:, None]
        for products in reversed(tree[:-1]):
            pairs = np.empty_like(products)
            pairs[:, ::2], pairs[:, 1::2] = inverse * products[:, 1::2] % p, inverse * products[:, ::2] % p
            inverse = pairs
        return inverse[:, : flat.shape[1]].reshape(x.shape)

    def total(self, x: Exact, dims: Sequence[int], keep: bool = False) -> Exact:
        """The sum over dims of the array."""
        behind = tuple(dim + 1 for dim in dims)
        number = x.number.sum(behind, np.uint64, keepdims=keep)
        positive, negative = ((x.facts[:1] == sign).all(behind, keepdims=keep)[0] for sign in (1, -1))
        most = x.facts.max(behind, keepdims=keep, initial=0)
        factor = x.factor
        if factor is not None:
            for dim in sorted(behind, reverse=True):
                factor = self._product(factor, dim, keep)
        over = tuple(dims)
        infinite = x.infinite.max(over, keepdims=keep, initial=0) + x.infinite.min(over, keepdims=keep, initial=0)
        known = facts(number.shape[1:], np.where(positive, 1, np.where(negative, -1, 0)), infinite, *most[2:])
        return Exact(number % self.p(number), known, factor, x.degree)

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
        return Exact(number, facts(number.shape[1:], sign, 0, used), degree=x.degree.times(y.degree))

    # Functions

    def exp(self, x: Exact) -> Exact:
        """exp, one prime higher."""
        p = self.p(x.number)
        exponents = x.number[: -self.points] * self._generator.reshape(p.shape)[self.points :] % p[: -self.points]
        result, byte = np.ones((len(x.number), *x.shape), np.uint64), np.uint64(0xFF)
        level = np.repeat(np.arange(1, LEVELS), self.points).reshape(-1, *[1] * len(x.shape))
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
        return Exact(result, facts(x.shape, 1, 0, used), degree=degree)

    @cached_property
    def _generator(self) -> np.ndarray:
        """By component: a random power, for the component below, of the base of exp."""
        below = np.concatenate([self.moduli[: self.points], self.moduli[: -self.points]])
        return 1 + self.salt("exp") % (below - np.uint64(1))

    def log(self, x: Exact) -> Exact:
        """log, kept as what it is of."""
        x = self.plain(x)
        return Exact(np.zeros_like(x.number), facts(x.shape, factor_used=x.used[0]), x.number, x.degree)

    # Order

    def key(self, x: Exact) -> np.ndarray:
        """int64 [...]: the place of each element in the total order, equal where the numbers are."""
        self.compared += 1
        x = self.plain(x)
        if x.used[0].max(initial=0) >= LEVELS - 1:
            raise TooDeepError
        top = x.number[-2 * self.points : -self.points]  # the highest prime that every number has
        p = np.uint64(PRIMES[-2])
        # The same magnitude for x and -x: the representative whose first component is in the lower half.
        upper = top[0] > p // np.uint64(2)
        negative = np.where(x.sign == 0, upper ^ (self.order >= 2), x.sign < 0)
        canonical = np.where(upper, p - top, top) % p
        magnitude = np.zeros(x.shape, np.uint64)
        for component, salt in zip(canonical, self.salt("order"), strict=False):
            magnitude = mixed(magnitude, component, salt)
        size = (magnitude >> np.uint64(1)).astype(np.int64) | 1
        size = size if self.order % 2 == 0 else np.iinfo(np.int64).max - size | 1
        # Constants, as counts and their shares are, stand together, in their own order: elsewhere the same are computed
        # without an unknown, and compared as what they are.
        ratio = self._constants_of(top)
        place = (1 << 61) + (np.abs(ratio).view(np.int64) >> 3) | 1
        size = np.where(np.isnan(ratio), size, place)
        negative = np.where(np.isnan(ratio), negative, ratio < 0)
        key = np.where((top == 0).all(0), 0, np.where(negative, -size, size))
        return np.where(x.infinite == 0, key, np.where(x.low, _LOWEST, np.iinfo(np.int64).max))

    def _constants_of(self, top: np.ndarray) -> np.ndarray:
        """float64: what elements are that are equal at all points; NaN for others."""
        found = np.full(top.shape[1:], np.nan)
        same = (top == top[0]).all(0)
        if self.points > 1 and same.any():
            values, where = np.unique(top[0][same], return_inverse=True)
            found[same] = rationals(values, PRIMES[-2])[where.reshape(-1)]
        return found

    def where(self, mask: np.ndarray, x: Exact, y: Exact) -> Exact:
        """x where the mask [...] holds, else y."""
        number = np.where(mask, x.number, y.number)
        factor = None
        if x.factor is not None or y.factor is not None:
            factor = np.where(mask, *(np.ones_like(z.number) if z.factor is None else z.factor for z in (x, y)))
        degree = x.degree if mask.all() else y.degree if not mask.any() else x.degree.plus(y.degree)
        return Exact(number, np.where(mask, x.facts, y.facts), factor, degree)

    def chance(self, degree: Degree) -> float:
        """A bound of the chance that two different results of this degree agree at all points.

        Their difference is a polynomial of inputs, inverses and values of functions. Multiplied by each divisor as
        often as its inverse may occur in one term, it is one of inputs and values alone, which at one point is zero
        with a chance of at most its degree over the smallest prime.
        """
        total = degree.total + sum(most * weight for most, weight in degree.inverses.values())
        return min(1.0, total / PRIMES[0]) ** self.points

    def same(self, x: Exact, y: Exact) -> np.ndarray:
        """bool [...]: where arrays are equal in the components of both; logarithms as their exps, or all as numbers."""
        if not self.logs and (x.factor is not None or y.factor is not None):
            x, y = self.exp(x), self.exp(y)
        x, y = self.plain(x), self.plain(y)
        valid = self.valid(np.maximum(x.used[0], y.used[0]))
        equal = ((x.number == y.number) | ~valid).all(0)
        return np.asarray(np.where(x.low | y.low, x.low == y.low, equal))


def mixed(*words: Any) -> Any:
    """A sum of 64-bit words, every bit of it spread (the finalizer of splitmix64)."""
    with np.errstate(over="ignore"):  # of 0-d arrays
        x = sum(words[1:], words[0])
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
