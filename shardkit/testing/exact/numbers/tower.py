"""A tower of primes, each twice the last and 1 more: powers of an element of order p modulo 2p + 1, and logarithms.

Why twice and 1 more: if p and q = 2p + 1 are primes, the squares modulo q form a group of p elements, and 4 = 2**2
generates it. So 4**x modulo q depends on x modulo p alone, and every x modulo p gives another power. That is an
exponential function from the numbers modulo p to those modulo q.

Worked example: p = 5, q = 11. The powers 4**0, ..., 4**4 modulo 11 are 1, 4, 5, 9, 3, and 4**5 is 1 again.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

# p, 2p + 1, ... of a chain of eight primes (Cunningham's of the first kind); the product of two fits 64 bits.
PRIMES = tuple((19_099_919 + 1) * 2**level - 1 for level in range(8))
LEVELS = len(PRIMES)
_SMALL_STEPS = 2**19  # how many small powers of 4 a search for a logarithm keeps
_TOGETHER = 16  # how many logarithms are searched for at a time, so that their candidates fit a cache
_MOST_RECALLED = 2**17  # of which one level keeps the exponents
# A filter: most numbers that are not among the small powers differ from all of them in these bits.
_LOW_BITS = np.uint64(2**22 - 1)


@cache
def power_table() -> np.ndarray:
    """uint64 [levels, 4, 256]: powers of 4, from which a power is the product of four entries.

    The entry for a level, the number k of a byte, and a digit is 4**(digit * 256**k) modulo the prime of the level. The
    exponent is taken modulo the prime of the level below. Worked example: 4**515 is 4**(2 * 256) * 4**3.
    """
    table = np.ones((LEVELS, 4, 256), np.uint64)
    for level, p in enumerate(PRIMES):
        for byte in range(4):
            base = pow(4, 256**byte, p)
            for digit in range(1, 256):
                table[level, byte, digit] = int(table[level, byte, digit - 1]) * base % p
    return table


class _Steps(NamedTuple):
    """The small and the large steps of a search for logarithms of a level.

    Attributes:
        small_powers: 4**0, 4**1, ..., s of them.
        large_powers: 4**0, 4**-s, 4**-2s, ...
        has_bits: bool [2**22], which low bits any of the small powers has.
        exponents: int32 [2**22], by the low bits of a small power its exponent.
        lost_powers: in ascending order, the small powers that share their low bits with one that `exponents` has.
        lost_exponents: their exponents.
    """

    small_powers: np.ndarray
    large_powers: np.ndarray
    has_bits: np.ndarray
    exponents: np.ndarray
    lost_powers: np.ndarray
    lost_exponents: np.ndarray


@cache
def _make_steps(level: int) -> _Steps:
    """The steps of a level, which all its logarithms share."""
    p, q = PRIMES[level : level + 2]
    small_powers = _list_powers(4, _SMALL_STEPS, q)
    large_powers = _list_powers(pow(4, -_SMALL_STEPS, q), p // _SMALL_STEPS + 1, q)
    low_bits = small_powers & _LOW_BITS
    has_bits = np.zeros(int(_LOW_BITS) + 1, bool)
    has_bits[low_bits] = True
    # Of powers with the same low bits the last one stays: one in sixteen is lost.
    numbers = np.arange(_SMALL_STEPS, dtype=np.int32)
    exponents = np.zeros(int(_LOW_BITS) + 1, np.int32)
    exponents[low_bits] = numbers
    lost = np.flatnonzero(exponents[low_bits] != numbers)
    lost = lost[np.argsort(small_powers[lost])]
    return _Steps(small_powers, large_powers, has_bits, exponents, small_powers[lost], lost)


def _list_powers(base: int, count: int, q: int) -> np.ndarray:
    """base**0, base**1, ... modulo q: the list so far, times the next power, is as long a piece again."""
    powers = np.ones(1, np.uint64)
    while len(powers) < count:
        next_power = np.uint64(pow(base, len(powers), q))
        powers = np.concatenate([powers, powers * next_power % np.uint64(q)])
    return powers[:count]


def find_logarithms(level: int, values: np.ndarray) -> np.ndarray:
    """Half of the exponents of 4 that give the squares of numbers modulo the next prime, by baby and giant steps.

    Only squares are powers of 4, and one of x and -x is a square: so the logarithm is that of x or of -x. The sign is
    lost, which a certificate says.

    Worked example: modulo 11 (level of 5), the number 9 is 4**3. Its square is 4 = 4**1, and half of 1 modulo 5 is 3.
    """
    p = PRIMES[level]
    distinct, places = np.unique(values, return_inverse=True)
    exponents = _recall_exponents(level, distinct)
    half = np.uint64((p + 1) // 2)
    logarithms = exponents * half % np.uint64(p)
    return logarithms[places].reshape(values.shape)


_recalled: dict[int, dict[int, int]] = {}  # by level and number


def _recall_exponents(level: int, values: np.ndarray) -> np.ndarray:
    """The exponents of distinct numbers, of which only new ones are searched for.

    Both programs take the logarithms of the same numbers, and so does a draw of which one element is another.
    """
    recalled = _recalled.setdefault(level, {})
    new = []
    for value in values.tolist():
        if value not in recalled:
            new.append(value)
    if len(recalled) + len(new) > _MOST_RECALLED:
        recalled.clear()
        new = values.tolist()
    for start in range(0, len(new), _TOGETHER):
        together = new[start : start + _TOGETHER]
        exponents = _find_exponents(level, np.array(together, np.uint64))
        recalled.update(zip(together, exponents.tolist(), strict=True))
    return np.array([recalled[value] for value in values.tolist()], np.uint64)


def _find_exponents(level: int, values: np.ndarray) -> np.ndarray:
    """uint64 [values]: the exponents of 4, modulo the prime of the level, that give the squares of some numbers.

    Worked example, modulo 11 with two small steps: the small powers are 4**0 = 1 and 4**1 = 4, the large ones are
    4**0 = 1, 4**-2 = 9 and 4**-4 = 4. The square of 4 is 5. Its products with the large powers are 5, 1 and 9: the
    second is the small power 4**0, so that 5 is 4**(1 * 2 + 0).
    """
    p, q = PRIMES[level : level + 2]
    steps = _make_steps(level)
    # The square is 4**(i s + j), where s is the number of small powers. So for one i the product with 4**(-i s) is the
    # small power 4**j: of the candidates [values, large steps] one in each row, or two whose exponents differ by p.
    squares = values * values % np.uint64(q)
    candidates = squares[:, None] * steps.large_powers % np.uint64(q)
    rows, large_steps = np.nonzero(steps.has_bits[candidates & _LOW_BITS])
    likely = candidates[rows, large_steps]
    small_steps = steps.exponents[likely & _LOW_BITS]
    hits = np.flatnonzero(steps.small_powers[small_steps] == likely)
    exponents = np.zeros(len(values), np.uint64)
    exponents[rows[hits]] = (large_steps[hits] * _SMALL_STEPS + small_steps[hits]) % p
    has_exponent = np.zeros(len(values), bool)
    has_exponent[rows[hits]] = True
    if not has_exponent.all():
        # The small power is one of the few that share their low bits with another.
        places = np.searchsorted(steps.lost_powers, likely)
        places = np.minimum(places, len(steps.lost_powers) - 1)
        hits = np.flatnonzero(steps.lost_powers[places] == likely)
        small_steps = steps.lost_exponents[places]
        exponents[rows[hits]] = (large_steps[hits] * _SMALL_STEPS + small_steps[hits]) % p
        has_exponent[rows[hits]] = True
    assert has_exponent.all(), "every number but 0 has a square that is a power of 4"
    return exponents


def invert_by_power(x: np.ndarray, p: np.ndarray | np.uint64) -> np.ndarray:
    """x**(p - 2), which is 1 / x modulo a prime, or modulo one for each component; 0 for 0 (Fermat)."""
    return raise_residues(x, np.asarray(p - np.uint64(2)), p)


def raise_residues(x: np.ndarray, exponent: np.ndarray, p: np.ndarray | np.uint64) -> np.ndarray:
    """x**exponent modulo a prime, by repeated squares; both may be one for each component."""
    result = np.ones_like(x)
    while exponent.any():
        odd = exponent & np.uint64(1) == 1
        result = np.where(odd, result * x % p, result)
        x = x * x % p
        exponent = exponent >> np.uint64(1)
    return result
