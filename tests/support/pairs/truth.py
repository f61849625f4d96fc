"""Whether a kernel and a reference are the same function, by their values at some hundred points, in floats.

Points are drawn from several distributions. The first `GENERIC` are of no special form; the others have zeros, ties and
the constants of the programs. A difference has one of these kinds:

    value         two numbers differ at several generic points
    nan           at all generic points one side is no number, or another infinity
    domain        at some of them, as of a logarithm where its argument is negative
    ties          two numbers differ, but only at special points
    nan at ties   only at special points, at which a value on the way is no number, as 0 / 0, or a divisor is zero, or
                  the argument of a logarithm
"""

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from support.pairs.evaluation import evaluated
from support.pairs.language import Node

COUNT = 40
GENERIC = 5 * COUNT
FINE = 2.0**20
CLEAR = 1e-6  # by such a share two values differ
TRUSTED = 1e-9  # by such a share they do not
ROUNDING = 1e-10  # of the largest number that was added: what sums may lose
KINDS = ("value", "nan", "domain", "ties", "nan at ties")


@functools.cache
def points(inputs: int, rows: int, columns: int) -> tuple[np.ndarray, ...]:
    """[points, rows, columns] of each input, in which sums and small products are exact."""
    rng = np.random.default_rng([inputs, rows, columns])
    shape = (COUNT, rows, columns)
    found = []
    for _ in range(inputs):
        normal = rng.normal(size=(5, *shape))
        wide = normal[3] * 2.0 ** rng.integers(-3, 7, shape)
        generic = [normal[0], np.abs(normal[1]) + 0.01, rng.random(shape), wide, -np.abs(normal[4]) - 0.01]
        whole = rng.integers(-2, 4, (2 * COUNT, rows, columns))
        halves = rng.integers(-4, 8, shape) / 2
        zeros = np.where(rng.random(shape) < 0.5, 0.0, rng.integers(-1, 3, shape))
        alike = np.broadcast_to(rng.integers(-8, 12, (COUNT, 1, 1)) / 4, shape)
        special = [whole, halves, zeros, alike]
        generic = np.round(np.concatenate(generic) * FINE) / FINE
        found.append(np.concatenate([np.where(generic == 0, 1 / FINE, generic), *special]))
    return tuple(found)


class _Sides:
    """Both sides at some points.

    Attributes:
        values: those of the kernel and of the reference.
        differ: [points]: whether they do.
        numbers: [points]: whether they do where both are numbers.
        unclear: [points]: whether rounding would say so.
        undefined: [points]: whether a value on the way of a side is NaN, or a divisor or a logarithm's argument zero.
    """

    def __init__(self, case: "Case", given: Sequence[np.ndarray], dtype: Any, infinite: bool = True):
        one = evaluated(case.kernel, given, case.split, case.devices, dtype, infinite=infinite)
        other = evaluated(case.reference, given, (False,) * len(case.split), 1, dtype, infinite=infinite)
        x, y = one.value.astype(dtype), other.value.astype(dtype)
        if case.layout == "split":
            x = x.reshape(len(x), 1, x.shape[1] * x.shape[2], *x.shape[3:])
        with np.errstate(all="ignore"):
            both = np.isfinite(x) & np.isfinite(y)
            alike = (x == y) | (np.isnan(x) & np.isnan(y))
            summed = np.maximum(one.summed, other.summed).reshape(-1, *[1] * (x.ndim - 1))
            far = _apart(x, y, CLEAR) & ~(np.abs(x - y) < ROUNDING * summed)
            near = both & _apart(x, y, TRUSTED) & ~far
        self.values = x, y
        self.differ, self.numbers = _any(np.where(both, far, ~alike)), _any(both & far)
        self.unclear = one.unclear | other.unclear | _any(near)
        self.undefined = one.undefined | other.undefined

    def as_in(self, longer: "_Sides", few: np.ndarray) -> np.ndarray:
        """At which of few points the values are those in a longer dtype: else they are only rounding."""
        same = np.ones(len(few), bool)
        for short, long in zip(self.values, longer.values, strict=True):
            x = short[few].astype(long.dtype)
            with np.errstate(all="ignore"):
                same &= ~_any(np.isfinite(x) & np.isfinite(long) & _apart(x, long, TRUSTED))
            same &= ~_any((np.isnan(x) != np.isnan(long)) | (np.isinf(x) != np.isinf(long)))
        return same


class Case(Protocol):
    """What `verdicts.Pair` says of a pair."""

    kernel: Node
    reference: Node
    devices: int
    shape: tuple[int, int]
    split: tuple[bool, ...]
    layout: str


def difference(case: Case) -> str | None:
    """The kind of the difference of both sides; None where no point shows one."""
    given = points(len(case.split), *case.shape)
    sides = _Sides(case, given, np.float64)
    found = np.flatnonzero(sides.differ & ~sides.unclear)
    if not len(found):
        return None
    # -1e30 / -1e30 is 1, and would be NaN if both stood for infinity: then no float shows the difference.
    found = found[_Sides(case, [x[found] for x in given], np.float64, infinite=False).differ]
    if not len(found):
        return None
    few = np.concatenate([found[found < GENERIC][:12], found[found >= GENERIC][:12]])
    longer = _Sides(case, [x[few] for x in given], np.longdouble)
    sure = few[longer.differ & ~longer.unclear & sides.as_in(longer, few)]
    generic = sure[sure < GENERIC]
    if len(generic) >= 2:
        if sides.numbers[generic].any():
            return "value"
        clear = np.flatnonzero(~sides.unclear[:GENERIC])
        return "nan" if sides.differ[clear].all() and _differ_at_any_size(case) else "domain"
    special = sure[sure >= GENERIC]
    if not len(special):
        return None
    differ_as_numbers = sides.numbers[special] & ~sides.undefined[special]
    return "ties" if differ_as_numbers.any() else "nan at ties"


def _differ_at_any_size(case: Case) -> bool:
    """Whether both sides differ too where all numbers are small, or large, or of one sign."""
    given = []
    for x in points(len(case.split), *case.shape):
        sizes = 2.0 ** (np.arange(COUNT) % 16 - 6).reshape(COUNT, 1, 1)
        given.append(np.concatenate([x[:COUNT] * sizes, np.abs(x[:COUNT]) * sizes, -np.abs(x[:COUNT]) * sizes]))
    sides = _Sides(case, given, np.float64)
    return bool(sides.differ[~sides.unclear].all())


def _apart(x: np.ndarray, y: np.ndarray, share: float) -> np.ndarray:
    return np.asarray(np.abs(x - y) > share * (1 + np.abs(x) + np.abs(y)))


def _any(mask: np.ndarray) -> np.ndarray:
    return mask.reshape(len(mask), -1).any(1)
