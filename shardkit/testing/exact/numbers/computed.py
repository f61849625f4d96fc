"""Float constants that a program computes, with the exact values of what it computed.

A known float is computed in float32, as a device does it, because it may decide a branch or be an index. In the field
the rounded float would be a wrong number: one program computes `0.9 * 1 + 0.0125`, which is 0.91249996 in float32, and
another has the constant 0.9125. So where a float that was computed of constants, by sums, products and quotients, meets
an unknown, it is computed in the field too. There it is 73/80, and so is 0.9125, because 73/80 is the simplest rational
that rounds to it.

Two numbers that round alike stay different: 1 + 1e-8 is 1 in float32, and is not 1 here.

Worked example: `scale = 0.9 * 1 + 0.0125`, `y = scale * x`. Both operations of the first line are noted, and computed
in float32. At the product with x the field asks for `scale`, which waits for 0.9 * 1, and then is 9/10 + 1/80 = 73/80.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardkit.testing.exact.numbers.constants import LEAST_INFINITE
from shardkit.testing.exact.numbers.values import Exact

_LARGEST_WHOLE = 2**24  # up to which float32 has all whole numbers


@dataclass
class ComputedConstant:
    """How a constant was computed.

    Attributes:
        result: in float32; kept, so that no other array has its id.
        operands: the constants that it was computed of.
        compute: computes it in the field.
        exact: the result of `compute`; None as long as nothing asked for it.
    """

    result: np.ndarray
    operands: Sequence[Any]
    compute: Callable[[], Exact]
    exact: Exact | None = None


class Computations:
    """The float constants that a run has computed, by their identity."""

    def __init__(self) -> None:
        self._by_id: dict[int, ComputedConstant] = {}

    def __contains__(self, x: Any) -> bool:
        return id(x) in self._by_id

    def note(self, result: np.ndarray, operands: Sequence[Any], compute: Callable[[], Exact]) -> None:
        """Notes how a constant was computed; it is computed in the field when it is asked for."""
        self._by_id.setdefault(id(result), ComputedConstant(result, operands, compute))

    def find(self, x: Any) -> Exact | None:
        """The exact value of a constant; None for one that the program did not compute."""
        constant = self._by_id.get(id(x))
        if constant is None:
            return None
        # A loop may have computed it of thousands that came before it, too many for a recursion: a constant waits until
        # its operands have been computed.
        waiting = [constant]
        while waiting:
            last = waiting[-1]
            missing = self._list_missing_operands(last)
            if missing:
                waiting += missing
                continue
            if last.exact is None:
                last.exact = last.compute()
            waiting.pop()
        return constant.exact

    def _list_missing_operands(self, constant: ComputedConstant) -> list[ComputedConstant]:
        """The operands that the program computed too, and that have no exact value yet."""
        missing = []
        for operand in constant.operands:
            computed = self._by_id.get(id(operand))
            if computed is not None and computed.exact is None:
                missing.append(computed)
        return missing

    def merge(self, other: Computations) -> None:
        """Adds the constants that another run has computed in a field of like settings."""
        for key, computation in other._by_id.items():
            self._by_id.setdefault(key, computation)


def are_numbers(arrays: Sequence[np.ndarray]) -> bool:
    """Whether constants are finite, and none stands for infinity."""
    for x in arrays:
        if x.dtype.kind == "f" and not (np.abs(x) < LEAST_INFINITE).all():
            return False
    return True


def are_whole(arrays: Sequence[np.ndarray]) -> bool:
    """Whether constants are whole numbers that float32 has, as masks and counts are: their sums are not rounded."""
    for x in arrays:
        if x.dtype.kind != "f":
            continue
        is_whole = (x == np.rint(x)) & (np.abs(x) <= _LARGEST_WHOLE)
        if not is_whole.all():
            return False
    return True
