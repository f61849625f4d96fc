"""A tower of primes, each twice the last and 1 more: powers of an element of order p modulo 2p + 1, and logarithms."""

from __future__ import annotations

from functools import cache, lru_cache

import numpy as np

# p, 2p + 1, ... of a chain of eight primes (Cunningham's of the first kind); the product of two fits 64 bits.
PRIMES = tuple((19_099_919 + 1) * 2**level - 1 for level in range(8))
LEVELS = len(PRIMES)
_SMALL_STEPS, _BITS = 2**19, np.uint64(2**22 - 1)


@cache
def powers() -> np.ndarray:
    """By level, number of a byte and value of it: 4, which has order p modulo 2p + 1, to that power."""
    table = np.ones((LEVELS, 4, 256), np.uint64)
    for level, p in enumerate(PRIMES):
        for number in range(4):
            base = pow(4, 256**number, p)
            for digit in range(1, 256):
                table[level, number, digit] = int(table[level, number, digit - 1]) * base % p
    return table


@cache
def _steps(level: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of small powers of 4 modulo a level's next prime the lowest bits, sorted with exponents; large ones, inverted."""
    p, q = PRIMES[level : level + 2]
    large = pow(4, -_SMALL_STEPS, q)
    rows = []
    for base, count in ((4, _SMALL_STEPS), (large, p // _SMALL_STEPS + 1)):
        row = np.ones(1, np.uint64)
        while len(row) < count:
            row = np.concatenate([row, row * np.uint64(pow(base, len(row), q)) % np.uint64(q)])
        rows.append(row[:count])
    order = np.argsort(rows[0])
    bits = np.zeros(int(_BITS) + 1, bool)
    bits[rows[0] & _BITS] = True
    return bits, rows[0][order], order, rows[1]


@lru_cache(2**16)
def logarithm(level: int, value: int) -> int:
    """Half of the exponent of 4 that gives the square of a number modulo the next prime, by baby and giant steps."""
    p, q = PRIMES[level : level + 2]
    bits, small, exponents, large = _steps(level)
    wanted = np.uint64(value * value % q) * large % np.uint64(q)
    near = np.flatnonzero(bits[wanted & _BITS])
    at = np.minimum(np.searchsorted(small, wanted[near]), len(small) - 1)
    found = int(np.flatnonzero(small[at] == wanted[near])[0])
    return (int(near[found]) * _SMALL_STEPS + int(exponents[at[found]])) * (p + 1) // 2 % p


def inverses(x: np.ndarray, p: np.ndarray | np.uint64) -> np.ndarray:
    """x to the power p - 2, which is its inverse modulo a prime, or modulo one for each component; 0 of 0."""
    result, exponent = np.ones_like(x), np.asarray(p - np.uint64(2))
    while exponent.any():
        result = np.where(exponent & np.uint64(1) == 1, result * x % p, result)
        x, exponent = x * x % p, exponent >> np.uint64(1)
    return result
