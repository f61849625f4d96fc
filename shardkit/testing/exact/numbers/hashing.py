"""Random functions: a hash of 64-bit words."""

from __future__ import annotations

from typing import Any

import numpy as np


def mix(*words: Any) -> Any:
    """Hashes the sum of 64-bit words, so that every bit of the result depends on every bit of the sum.

    It is the finalizer of splitmix64, after the increment of that generator: without the increment, 0 would be hashed
    to 0.
    """
    # Words of uint64 wrap around: the sum is modulo 2**64.
    x = sum(words[1:], words[0]) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
