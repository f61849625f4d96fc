"""Which elements of the results were compared in all runs, and which were no number.

Worked example: the result `log(x)` of x [3] in two draws. An element that is negative in a draw is outside of the
domain of the logarithm, and is not compared there.

    x                   log(x)                      compared so far
    (2, 3, -1)          number, number, outside     elements 0 and 1
    (1, -2, 4)          number, outside, number     all elements
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shardkit.testing.exact.numbers.values import OUTSIDE, Exact


@dataclass
class ComparedElements:
    """What the runs so far have compared, for each result by its name.

    Attributes:
        included: bool [...], which elements were compared in some draw.
        numbers: bool [...], which elements were finite numbers on both sides in some run.
        poisoned: bool [...], which elements were no numbers on some side in some run.
        no_number: how many elements were no numbers on both sides, and how many elements there are.
        alone: how many elements were outside of a domain on one side alone, at most, and how many there are.
        alone_at_zeros: the same of draws whose inputs were chosen, as zeros of a divisor.
        outside: the line where a value was first outside of the domain of a function; "" if none was.
        are_defined: whether in some draw no element of any result was outside of a domain on one side alone.
    """

    included: dict[str, np.ndarray] = field(default_factory=dict)
    numbers: dict[str, np.ndarray] = field(default_factory=dict)
    poisoned: dict[str, np.ndarray] = field(default_factory=dict)
    no_number: dict[str, tuple[int, int]] = field(default_factory=dict)
    alone: dict[str, tuple[int, int]] = field(default_factory=dict)
    alone_at_zeros: dict[str, tuple[int, int]] = field(default_factory=dict)
    outside: str = ""
    are_defined: bool = False

    def find_excluded(self) -> str:
        """The name of a result of which an element was never compared; "" if there is none."""
        for name, included in self.included.items():
            if not included.all():
                return name
        return ""

    def note_numbers(self, name: str, a: Exact, b: Exact) -> None:
        """Notes which elements of a result are finite numbers on both sides, and which are none on some side."""
        are_poisoned = (a.poison > 0) | (b.poison > 0)
        are_finite = ~are_poisoned & ~a.is_truly_infinite & ~b.is_truly_infinite
        self.numbers[name] = are_finite | self.numbers.get(name, False)
        self.poisoned[name] = are_poisoned | self.poisoned.get(name, False)

    def find_without_numbers(self) -> tuple[str, np.ndarray] | None:
        """The name of a result with elements that were NaN in some run and a number in none, and which; else None.

        An element that is infinite in all runs is none of these: mostly it is so behind a mask of constants. One that
        is NaN in one run and infinite in all others has shown nothing, as the sum of `log(log(x))` where no run has all
        x above 1.
        """
        for name, were_numbers in self.numbers.items():
            were_only_poisoned = self.poisoned[name] & ~were_numbers
            if were_only_poisoned.any():
                return name, were_only_poisoned
        return None

    def note_compared(self, name: str, a: Exact, b: Exact) -> None:
        """Notes which elements of a result were compared, in a draw of inputs that were not chosen."""
        is_compared = ~are_outside(a, b)
        self.included[name] = is_compared | self.included.get(name, False)
        # NaN on both sides counts as equal; a certificate says how often it was all that a proof saw.
        no_number = (a.poison > 0) & (b.poison > 0) & is_compared
        if no_number.any():
            self.no_number[name] = int(no_number.sum()), no_number.size

    def note_alone(self, name: str, a: Exact, b: Exact, planted: bool) -> bool:
        """Notes elements that are outside of a domain on one side, and numbers on the other: whether there are none.

        `planted` says whether the inputs of the draw were chosen, as zeros of a divisor.
        """
        is_a_alone = (a.poison == OUTSIDE) & (b.poison == 0)
        is_b_alone = (b.poison == OUTSIDE) & (a.poison == 0)
        is_alone = is_a_alone | is_b_alone
        if not is_alone.any():
            return True
        counts = self.alone_at_zeros if planted else self.alone
        most, _ = counts.get(name, (0, 0))
        counts[name] = max(most, int(is_alone.sum())), is_alone.size
        return False


def are_outside(a: Exact, b: Exact) -> np.ndarray:
    """bool [...]: where a side is outside of the domain of a function, so that nothing is compared."""
    return (a.poison == OUTSIDE) | (b.poison == OUTSIDE)


def are_any_outside(pairs: Sequence[tuple[Exact, Exact]]) -> bool:
    """Whether some element of some result is not compared."""
    return any(are_outside(a, b).any() for a, b in pairs)
