"""Elementwise functions that numpy computes with jax's bits, and much faster: jax dispatches each to a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def _shift_logically(x: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Integers shifted to the right as bits, filled with zeros; numpy fills a negative one with ones.

    Worked example: -8 in int8 has the bits 11111000. Shifted by one they are 01111100, which is 124; numpy's are
    11111100, which is -4.
    """
    unsigned = np.dtype(f"u{x.dtype.itemsize}")
    bits = x.view(unsigned)
    places = places.astype(unsigned)
    # A shift by all bits, or by more, leaves none.
    width = 8 * x.dtype.itemsize
    shifted = bits >> np.minimum(places, unsigned.type(width - 1))
    shifted = np.where(places < width, shifted, unsigned.type(0))
    return np.asarray(shifted).view(x.dtype)


def _find_remainder(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x less the multiple of y next to it, towards zero. That of an integer over zero is the integer, as XLA has it."""
    if not np.issubdtype(y.dtype, np.integer):
        return np.asarray(np.fmod(x, y))
    is_zero = y == 0
    divisor = np.where(is_zero, 1, y)
    return np.where(is_zero, x, np.fmod(x, divisor))


# What numpy computes of two arrays as jax does.
ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "shift_left": np.left_shift,
    "shift_right_logical": _shift_logically,
    "square": np.square,
    "sqrt": np.sqrt,
    "rem": _find_remainder,
}
