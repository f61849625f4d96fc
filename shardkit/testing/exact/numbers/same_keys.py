"""Places in the order of a draw that equal numbers share.

A draw has a real value beside each number, and float64 rounds it: log(exp(x)) of x = 1e-20 is 0, and of x = 1000 it is
infinite. So one program may ask `log(exp(x)) > 0`, the other `x > 0`, and get other answers, although both compare the
same number with zero. Such a difference says something of float64 and nothing of the programs.

Where two programs differ in a draw, it is therefore run once more (`Choices.same_keys`): the first value of a number
that is met is its value wherever it is met again. Equal numbers then have one place, and still every number has a place
in this order. A program that is wrong differs in it too.

Worked example: the reference has x > 0 for x = 1e-20. Its residues lead to 1e-20 from here on. The kernel has
log(exp(x)), of the same residues, and reads 1e-20 in place of 0.
"""

from __future__ import annotations

import numpy as np

from shardkit.testing.exact.numbers.field import Field


def recall_keys(field: Field, number: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The keys of numbers: of those that were met before, the keys that they had then.

    Args:
        field: the field of a draw.
        number: uint64 [components, ...], the residues.
        keys: float64 [...], the places by float64, which broadcast against the residues.

    Returns:
        float64 [...]. They are `keys` unless the field has `Choices.same_keys`.
    """
    if not field.choices.same_keys:
        return keys
    # [points, ...]
    residues = number[field.residues.top]
    p = field.residues.top_prime
    # x and -x are found by the same residues, and have opposite keys.
    is_upper = residues[0] > p // np.uint64(2)
    lower_residues = np.where(is_upper, (p - residues) % p, residues)
    signs = np.where(is_upper, -1.0, 1.0)
    # [..., points]: the residues of an element side by side.
    words = np.ascontiguousarray(np.moveaxis(lower_residues, 0, -1))
    first_keys = field.laws.keys
    recalled = np.array(np.broadcast_to(keys, residues.shape[1:]), np.float64)
    for place in np.ndindex(recalled.shape):
        if not words[place].any():  # zero
            continue
        key = float(recalled[place] * signs[place])
        first_key = first_keys.setdefault(words[place].tobytes(), key)
        recalled[place] = signs[place] * first_key
    return recalled
