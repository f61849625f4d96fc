"""The rational numbers that floats of a program stand for.

1/3 is written as 0.33333334 in float32. If a proof took it as this number, x / 3 would not be x * (1 / 3), and a mean
over three devices would not be a mean over one. So a constant is the simplest rational that rounds to it.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np

# A constant that is at least as large stands for infinity in a mask.
LEAST_INFINITE = 1e9
LARGEST_DENOMINATOR = 2**14
_MOST_DIGITS = 3


def simplest(value: float, dtype: Any) -> Fraction:
    """The simplest rational that rounds to a constant, so that 1/3 is a third; else the constant itself.

    Simple is a rational with a small denominator, or a decimal number of few digits, as an epsilon is written.
    """
    # 0.33333334 is 11184811 / 33554432. Of the fractions with a denominator up to 1, 2, 4, ... the first that rounds
    # to it in the dtype is 1/3.
    exact = Fraction(value)
    for bits in range(LARGEST_DENOMINATOR.bit_length()):
        fraction = exact.limit_denominator(1 << bits)
        if _round_alike(float(fraction), value, dtype):
            return fraction
    # 1e-5 in float32 has no small denominator, but three digits say it.
    digits = f"{value:.{_MOST_DIGITS - 1}e}"
    if _round_alike(float(digits), value, dtype):
        return Fraction(digits)
    return exact


def _round_alike(x: float, y: float, dtype: Any) -> bool:
    return bool(np.asarray(x).astype(dtype) == np.asarray(y).astype(dtype))


def widen(x: np.ndarray) -> np.ndarray:
    """Constants of less than 32 bits as the float32 that they stand for, because rounding is not modelled."""
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize >= 4:
        return x
    # Mostly there are few values: 1/3 in bfloat16, 0.3340, becomes the float32 that stands for 1/3.
    distinct, places = np.unique(x.astype(np.float32), return_inverse=True)
    wide = []
    for value in distinct.tolist():
        if np.isfinite(value):
            value = float(simplest(value, x.dtype))
        wide.append(value)
    return np.array(wide, np.float32)[places].reshape(x.shape)
