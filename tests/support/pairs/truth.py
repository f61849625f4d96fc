"""Whether a kernel and a reference are the same function, by their values at some hundred points, in floats.

Points are drawn from several distributions. The first `GENERIC` are of no special form; the others have zeros, ties and
the constants of the programs. A difference has one of these kinds:

    value         two numbers differ at several generic points
    nan           at all generic points one side is no number, or another infinity
    domain        at some of them, as of a logarithm where its argument is negative
    ties          two numbers differ, but only at special points
    nan at ties   one side is no number, but only at special points, as of a quotient where its divisor is zero
"""

import functools
from typing import Any

import numpy as np

from support.pairs.language import Node, evaluated

COUNT = 40
GENERIC = 5 * COUNT
CLEAR = 1e-6
TRUSTED = 1e-9
KINDS = ("value", "nan", "domain", "ties", "nan at ties")


@functools.cache
def points(inputs: int, rows: int, columns: int) -> tuple[np.ndarray, ...]:
    """[points, rows, columns] of each input, in which sums and small products are exact."""
    rng = np.random.default_rng([inputs, rows, columns])
    shape = (COUNT, rows, columns)
    found = []
    for _ in range(inputs):
        normal = rng.normal(size=(5, *shape))
        wide = normal[3] * 2.0 ** rng.integers(-6, 7, shape)
        generic = [normal[0], np.abs(normal[1]) + 0.01, rng.random(shape), wide, -np.abs(normal[4]) - 0.01]
        whole = rng.integers(-2, 4, (2 * COUNT, rows, columns))
        halves = rng.integers(-4, 8, shape) / 2
        zeros = np.where(rng.random(shape) < 0.5, 0.0, rng.integers(-1, 3, shape))
        alike = np.broadcast_to(rng.integers(-8, 12, (COUNT, 1, 1)) / 4, shape)
        special = [whole, halves, zeros, alike]
        found.append(np.concatenate([np.round(np.concatenate(generic) * 4096) / 4096, *special]))
    return tuple(found)


def difference(
    kernel: Node, reference: Node, split: tuple[bool, ...], devices: int, layout: str, shape: tuple[int, int]
) -> str | None:
    """The kind of the difference of both; None where no point shows one."""
    given = points(len(split), *shape)
    apart, numbers, unclear = _apart(kernel, reference, given, split, devices, layout, np.float64)
    found = np.flatnonzero(apart & ~unclear)
    if not len(found):
        return None
    few = np.concatenate([found[found < GENERIC][:12], found[found >= GENERIC][:12]])
    chosen = tuple(x[few] for x in given)
    again, alike, doubtful = _apart(kernel, reference, chosen, split, devices, layout, np.longdouble)
    sure = few[again & ~doubtful & (alike == numbers[few])]
    generic = sure[sure < GENERIC]
    if len(generic) >= 2:
        if numbers[generic].any():
            return "value"
        clear = np.flatnonzero(~unclear[:GENERIC])
        return "nan" if apart[clear].all() else "domain"
    special = sure[sure >= GENERIC]
    if not len(special):
        return None
    return "ties" if numbers[special].any() else "nan at ties"


def _apart(
    kernel: Node, reference: Node, given: Any, split: tuple[bool, ...], devices: int, layout: str, dtype: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """By point: whether the sides differ, whether they do where both are numbers, and whether that is unclear."""
    one = evaluated(kernel, given, split, devices, dtype)
    other = evaluated(reference, given, (False,) * len(split), 1, dtype)
    x, y = one.value.astype(dtype), other.value.astype(dtype)
    if layout == "split":
        x = x.reshape(len(x), 1, x.shape[1] * x.shape[2], *x.shape[3:])
    with np.errstate(all="ignore"):
        both = np.isfinite(x) & np.isfinite(y)
        clear = np.abs(x - y) > CLEAR * (1 + np.abs(x) + np.abs(y))
        near = (x != y) & ~clear & (np.abs(x - y) > TRUSTED * (1 + np.abs(x) + np.abs(y)))
        alike = (x == y) | (np.isnan(x) & np.isnan(y))
    differs = np.where(both, clear, ~alike)
    unclear = one.unclear | other.unclear | _any(both & near)
    return _any(differs), _any(differs & both), unclear


def _any(mask: np.ndarray) -> np.ndarray:
    return mask.reshape(len(mask), -1).any(1)
