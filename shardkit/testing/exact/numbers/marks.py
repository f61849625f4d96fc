"""Which integers and booleans follow from floats.

A program that computes in the field has integers and booleans too, which are plain arrays. Those that were compared or
rounded from floats are known for the inputs of one draw alone: in another draw another branch may be taken. A proof
asks at each comparison of integers whether it depends on floats.

Worked example: in `jnp.sum(x > 0) < 3` the comparison of x gives booleans that are marked as a decision. Their sum is
marked because its operand is, and as natural: whatever x is, a count is not negative. So `< 3` could go both ways, and
is noted; `< 0` could not, and is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class Marks:
    """The arrays that follow from floats, by their identity: two equal arrays need not both follow."""

    def __init__(self) -> None:
        # By id, with the array itself, so that its id stays its own as long as the field lives.
        self._arrays: dict[int, np.ndarray] = {}
        self._decisions: set[int] = set()
        self._naturals: set[int] = set()

    def add(self, x: np.ndarray, decision: bool = False, natural: bool = False) -> np.ndarray:
        """The same integers or booleans, marked.

        A `decision` is the outcome of comparisons. A `natural` array is not negative whatever floats are, as the place
        of an element is not.
        """
        self._arrays[id(x)] = x  # which keeps it, so that no other array has its id
        if decision:
            self._decisions.add(id(x))
        if natural:
            self._naturals.add(id(x))
        return x

    def follows_floats(self, x: Any) -> bool:
        """Whether integers or booleans follow from floats."""
        return id(x) in self._arrays

    def any_follows_floats(self, operands: Sequence[Any]) -> bool:
        """Whether one of some arrays does."""
        # A loop, because this is asked at every equation.
        if self._arrays:
            for x in operands:
                if id(x) in self._arrays:
                    return True
        return False

    def is_decision(self, x: Any) -> bool:
        """Whether booleans are the outcome of a comparison of floats, or of several joined."""
        return id(x) in self._decisions

    def is_natural(self, x: np.ndarray) -> bool:
        """Whether integers or booleans are not negative, whatever floats are."""
        # An integer that follows from floats may be another one for other inputs: its value here proves nothing.
        if self.follows_floats(x):
            return x.dtype == bool or id(x) in self._naturals
        return bool((x >= 0).all())
