"""Arithmetic modulo the primes of the tower, at several random points at once. Nothing else is known of the numbers.

The leading dim of an array of residues has a component for each prime and each point, prime by prime. With the primes 5
and 11 and two points, the input x of one element is drawn as four numbers: [3, 0] modulo 5 and [7, 2] modulo 11 are
[[3], [0], [7], [2]]. At the points all inputs have other values; a program runs at all of them in one go.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any

import numpy as np

from shardkit.testing.exact.numbers.hashing import mix
from shardkit.testing.exact.numbers.tower import LEVELS, PRIMES, find_logarithms, power_table

_HALF = np.uint64(16)
_LOW_BITS = np.uint64(2**16 - 1)
_BYTE = np.uint64(2**8 - 1)
_MOST_IN_SUM = 32  # products of 32 bits and 16, of which a float64 has the sum
_MOST_OF_HALVES = 2**20  # products of 16 bits and 16, of which a float64 has the sum of two sums
_MOST_IN_PIECES = 256  # terms that are added in pieces of so few


class Residues:
    """The primes, the points, and the arithmetic.

    Attributes:
        points: the number of random points.
        seed: draws the random functions.
        levels: how many primes of the tower there are, the highest.
        log_depth: of how many of the highest primes logarithms may take the meaning.
        moduli: uint64 [components], the prime of each component.
    """

    def __init__(self, points: int, seed: int, levels: int, log_depth: int):
        self.points = points
        self.seed = seed
        self.levels = levels
        self.log_depth = log_depth
        # With the primes 5 and 11 and two points: [5, 5, 11, 11].
        self.moduli = np.repeat(np.array(PRIMES[-levels:], np.uint64), points)
        # With two primes and two points: [0, 0, 1, 1].
        self._levels = np.repeat(np.arange(levels), points)
        self._salts: dict[str, np.ndarray] = {}

    @property
    def top(self) -> slice:
        """The components of the highest prime in which every number has a meaning that can be ordered.

        That is the highest but one: those of the highest have none once a logarithm became a number. Where logarithms
        of logarithms do, it is the highest but two.
        """
        return slice(-(self.log_depth + 1) * self.points, -self.log_depth * self.points)

    @property
    def top_prime(self) -> np.uint64:
        """The prime of the components `top`."""
        return np.uint64(PRIMES[-1 - self.log_depth])

    def primes_of(self, x: np.ndarray) -> np.ndarray:
        """uint64 [components, 1, ...]: the primes of an array's components, the last ones if it has fewer."""
        ones = (1,) * (x.ndim - 1)
        return self.moduli[-len(x) :].reshape(-1, *ones)

    def levels_of_components(self, dims: int) -> np.ndarray:
        """int [components, 1, ...]: the number of each component's prime, for an array of so many dims."""
        return self._levels.reshape(-1, *[1] * dims)

    # Random functions

    def salt(self, name: str) -> np.ndarray:
        """uint64 [components]: a random word for each component, the same whenever the name is."""
        if name not in self._salts:
            words = []
            for component in range(len(self.moduli)):
                text = f"{self.seed} {name} {component}"
                digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
                words.append(int.from_bytes(digest, "big"))
            self._salts[name] = np.array(words, np.uint64)
        return self._salts[name]

    def hash(self, name: str, *arrays: np.ndarray) -> np.ndarray:
        """A random function of some numbers, element by element and component by component."""
        # Each operand has a salt of its own, so that f(x, y) is not f(y, x).
        word: Any = np.uint64(0)
        for number, x in enumerate(arrays):
            salt = self.salt(f"{name} {number}")
            word = mix(word, x, salt.reshape(-1, *[1] * (x.ndim - 1)))
        return word % self.primes_of(word)

    def infinity(self, negative: bool) -> np.ndarray:
        """uint64 [components]: the one number that stands for infinity; that of minus infinity is its negative."""
        number = self.salt("infinity") % self.moduli
        if negative:
            return self.moduli - number
        return number

    # Powers and inverses

    def power(self, x: np.ndarray, n: int) -> np.ndarray:
        """x**n for n of at least 0, by repeated squares."""
        p = self.primes_of(x)
        result = np.ones_like(x)
        # 13 is 1101 in binary: x, x**3, x**6, x**13.
        for bit in bin(n)[2:]:
            result = result * result % p
            if bit == "1":
                result = result * x % p
        return result

    def invert(self, x: np.ndarray) -> np.ndarray:
        """1 / x, where no number is zero: all inverses at the price of one, by a tree of products.

        Worked example: for [a, b, c, d] the tree is [a, b, c, d], [ab, cd], [abcd]. One inverse is computed,
        1 / abcd. On the way back 1 / ab is cd / abcd, and 1 / a is b / ab.
        """
        p = self.moduli[:, None]
        # [components, elements], padded with ones to a power of two.
        flat = x.reshape(len(x), -1)
        size = 1 << max(flat.shape[1] - 1, 0).bit_length()
        padding = np.ones((len(x), size - flat.shape[1]), np.uint64)
        tree = [np.concatenate([flat, padding], 1)]
        while tree[-1].shape[1] > 1:
            products = tree[-1]
            tree.append(products[:, ::2] * products[:, 1::2] % p)

        # One inverse for each component, that of the product of all its numbers, by Python's integers.
        inverses = []
        for product, prime in zip(tree[-1][:, 0].tolist(), self.moduli.tolist(), strict=True):
            inverses.append(pow(product, -1, prime))
        inverse: Any = np.array(inverses, np.uint64)[:, None]
        # On the way back a pair's inverse times one of its members is the inverse of the other.
        for products in reversed(tree[:-1]):
            pairs = np.empty_like(products)
            pairs[:, ::2] = inverse * products[:, 1::2] % p
            pairs[:, 1::2] = inverse * products[:, ::2] % p
            inverse = pairs
        return inverse[:, : flat.shape[1]].reshape(x.shape)

    # Matrices

    def matmul(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """[components, ..., m, k] @ [components, ..., k, n].

        In float64, which multiplies matrices much faster than integers, and has all integers up to 2**53. A product of
        two residues has 64 bits, so y is taken in halves of 16 bits, y = high * 2**16 + low: 32 products of 32 bits
        and 16 are below 2**53. Of more terms there are several sums, or x is taken in halves, too.
        """
        terms = x.shape[-1]
        if terms > _MOST_IN_PIECES:
            return self._multiply_halves(x, y)
        p = self.primes_of(x)
        total: Any = np.uint64(0)
        for start in range(0, max(terms, 1), _MOST_IN_SUM):
            left = x[..., start : start + _MOST_IN_SUM].astype(np.float64)
            right = y[..., start : start + _MOST_IN_SUM, :]
            high = np.matmul(left, (right >> _HALF).astype(np.float64)).astype(np.uint64) % p
            low = np.matmul(left, (right & _LOW_BITS).astype(np.float64)).astype(np.uint64)
            total = (total + (high << _HALF) + low) % p
        return total

    def _multiply_halves(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """The product of matrices with many terms, by the halves of both: 2**20 products of 16 bits and 16 are exact.

        (a * 2**16 + b) (c * 2**16 + d) is a c * 2**32 + (a d + b c) * 2**16 + b d. As a sum of decimal halves,
        12 * 34 is 1 * 3 * 100 + (1 * 4 + 2 * 3) * 10 + 2 * 4 = 408.
        """
        p = self.primes_of(x)
        total: Any = np.uint64(0)
        for start in range(0, x.shape[-1], _MOST_OF_HALVES):
            left = x[..., start : start + _MOST_OF_HALVES]
            right = y[..., start : start + _MOST_OF_HALVES, :]
            a = (left >> _HALF).astype(np.float64)
            b = (left & _LOW_BITS).astype(np.float64)
            c = (right >> _HALF).astype(np.float64)
            d = (right & _LOW_BITS).astype(np.float64)
            high = np.matmul(a, c).astype(np.uint64) % p
            middle = (np.matmul(a, d) + np.matmul(b, c)).astype(np.uint64)
            low = np.matmul(b, d).astype(np.uint64)
            high = ((high << _HALF) + middle) % p
            total = (total + (high << _HALF) + low) % p
        return total

    # Exps and logarithms

    @cached_property
    def _generators(self) -> np.ndarray:
        """uint64 [components]: exp(x) is 4**(g x), with a random g for each component.

        With g = 1 for all, exp(1) would be 4, and a proof would hold for this one base alone. g is a number modulo the
        prime of the component below, in which x is known.
        """
        # The lowest prime has none below it, and no exp: there anything will do.
        below = np.concatenate([self.moduli[: self.points], self.moduli[: -self.points]])
        return 1 + self.salt("exp") % (below - np.uint64(1))

    def exp(self, x: np.ndarray) -> np.ndarray:
        """exp, one prime higher: the components of the lowest prime have no meaning, and are 1.

        Worked example, with the primes 5 and 11, one point and g = 1: x = (3, 7) has the exponent 3 for the component
        of 11, and exp(x) is (1, 4**3 modulo 11) = (1, 9). No component reads the 7, the exponent for a next prime.
        """
        points = self.points
        p = self.primes_of(x)
        generators = self._generators.reshape(p.shape)[points:]
        # [components but those of the highest prime, ...]: the residues of a prime are the exponents for the next one.
        exponents = x[:-points] * generators % p[:-points]
        # The level in the whole tower of each component but those of the lowest prime.
        lowest = LEVELS - self.levels
        levels = lowest + self.levels_of_components(x.ndim - 1)[points:]
        # 4**e from the four bytes of e, a product of four entries of the table.
        powers: Any = np.uint64(1)
        for byte in range(4):
            digits = (exponents >> np.uint64(8 * byte)) & _BYTE
            entries = power_table()[levels, byte, digits.astype(np.int64)]
            powers = powers * entries % p[points:]
        result = np.ones(x.shape, np.uint64)
        result[points:] = powers
        return result

    def log(self, x: np.ndarray, used: np.ndarray) -> np.ndarray:
        """log, one prime lower: the components of the highest prime have no meaning, and are random.

        So are those below, where x itself has no meaning: a logarithm there would be computed for nothing.

        Worked example, the way back of that of `exp`: x = (1, 9) modulo 5 and 11 is an exp, which has used up the
        prime 5. 9 is 4**3 modulo 11, so that log(x) is (3, random).

        Args:
            x: [components, ...].
            used: [...], how many of the lowest primes each element has used up.
        """
        # Random at first; what has a meaning is filled below. Both are [components, elements].
        logs = self.hash("log", x).reshape(len(x), -1)
        arguments = x.reshape(len(x), -1)
        used = used.reshape(-1)
        generators = self._generators[self.points :].tolist()
        for component, generator in enumerate(generators):
            # The component of the next prime, at the same point: there x says what the logarithm is here.
            component_above = component + self.points
            # The prime's number among those of this run, and its level in the whole tower.
            number_of_prime = component // self.points
            level = LEVELS - self.levels + number_of_prime
            prime = PRIMES[level]
            # exp(y) = 4**(g y) modulo the next prime, so y is the exponent over g.
            inverse_of_generator = np.uint64(pow(generator, -1, prime))
            # Modulo the next prime x has a meaning if exps have used up no prime but this one and those below it.
            has_meaning = used <= number_of_prime + 1
            exponents = find_logarithms(level, arguments[component_above, has_meaning])
            logs[component, has_meaning] = exponents * inverse_of_generator % np.uint64(prime)
        return logs.reshape(x.shape)
