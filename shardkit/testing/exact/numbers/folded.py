"""Constants that a compiler, or Python, computed in floats before a proof sees them.

XLA makes `x * (0.9 * 0.9)` of `(x * 0.9) * 0.9`, and writes 0.80999994, which is 0.9 * 0.9 in float32 and no simple
rational. So a constant of one side that is neither simple nor a constant of the other side may stand for the result of
one or two operations on constants of the other side, each rounded to its dtype. The search is for equal bits. A
constant that is one unit in the last place off, as 0.9999999 for 1, stands for no other, unless an operation on other
constants gives its very bits.

Several computations may give the same bits: 0.014142135 is 0.01 * 1.4142135, and 0.01 / 0.70710677. Then it is the one
of the most constants that the side with the folded constant has lost, as 1.4142135, which XLA multiplied.

XLA makes a product of a division by a constant, too. Of a bfloat16 its inverse is a bfloat16 again: `x / 0.8984375` is
`x * 1.109375`, though the inverse is 1.1130435. Both constants are simple rationals, and the program in which one
stands for the other's inverse is another function by 0.3%. So only a constant that is stored as bfloat16 may be an
inverse, of one that the other side stores so.

Whatever the search finds, a certificate names it: with this number, which rounds to the constant, both sides are equal.
"""

from __future__ import annotations

from collections.abc import Set
from fractions import Fraction
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from shardkit.testing.exact.numbers.constants import LARGEST_DENOMINATOR, simplest

_MOST_CONSTANTS = 40  # of which others are computed
_MOST_FOLDED = 64
_MOST_ROUNDINGS = 8  # units in the last place between a constant and what it stands for: 1e-6 of a float32
_SHORT = str(np.dtype(jnp.bfloat16))
_OPERATIONS = {"*": np.multiply, "/": np.divide, "+": np.add, "-": np.subtract}
Constant = tuple[float, str]  # the value and its dtype


class Folded(NamedTuple):
    """What a constant stands for.

    Attributes:
        ratio: the exact value.
        words: how it is computed, as "0.9 * 0.9".
        operations: of how many operations.
    """

    ratio: Fraction
    words: str
    operations: int = 1


def explain_constants(constants: Set[Constant], others: Set[Constant]) -> dict[Constant, Folded]:
    """The computations for which constants of a side stand that are no simple rationals, where they are found.

    Worked example: one side has {2.0, 0.80999994}, the other {2.0, 0.9}. 2.0 is on both, and 0.80999994 is no simple
    rational, but 0.9 * 0.9 in float32: it stands for Folded(81/100, "0.9 * 0.9").

    Args:
        constants: those of the side that may have folded some.
        others: those of the other side.
    """
    odd_values: dict[str, list[float]] = {}  # by dtype
    count = 0
    for value, dtype in sorted(constants - others):
        if np.isfinite(value) and _is_odd(value, dtype):
            odd_values.setdefault(dtype, []).append(value)
            count += 1
    if count > _MOST_FOLDED:
        return {}
    folded = {}
    for dtype in sorted(odd_values):
        table = _make_table(constants, others, dtype)
        if table is None:
            continue
        for value in odd_values[dtype]:
            explanation = table.find(value)
            if explanation is not None:
                folded[value, dtype] = explanation
    return folded


def explain_inverses(constants: Set[Constant], others: Set[Constant]) -> dict[Constant, Folded]:
    """The constants in bfloat16 of a compiled program that are inverses of the traced one's, rounded.

    Worked example: the compiled program has 1.109375, and the traced one 0.8984375. 1 / 0.8984375 is 1.1130435, and the
    nearest bfloat16 is 1.109375: it stands for 128/115.

    Args:
        constants: those of the compiled program, with the dtypes in which it stores them.
        others: those of the traced one.

    Returns:
        What the constants stand for, by value and by the dtype in which a proof has them, float32.
    """
    values_of_others = {value for value, _ in others}
    folded = {}
    for value, dtype in sorted(constants):
        # A float32 of this value is another constant, and a constant of both sides stands for itself.
        is_short_alone = dtype == _SHORT and (value, "float32") not in constants
        if not is_short_alone or value in values_of_others:
            continue
        # Of two divisors with this inverse it is the one that the compiled program has lost.
        divisors = _list_divisors(value, others)
        if len(divisors) != 1:
            divisors = _list_divisors(value, others - constants)
        if len(divisors) == 1:
            [divisor] = divisors
            folded[value, "float32"] = Folded(1 / Fraction(divisor), f"1 / {_show(divisor)} in {_SHORT}")
    return folded


def _list_divisors(value: float, constants: Set[Constant]) -> list[float]:
    """The constants in bfloat16 whose inverse a value is."""
    divisors = []
    for divisor, dtype in constants:
        is_divisor = dtype == _SHORT and np.isfinite(divisor) and divisor != 0
        # XLA computes the inverse in float32, and rounds it then.
        if is_divisor and (np.float32(1) / np.float32(divisor)).astype(jnp.bfloat16) == value:
            divisors.append(divisor)
    return divisors


def _make_table(constants: Set[Constant], others: Set[Constant], dtype: str) -> _Table | None:
    """What operations on the other side's constants of a dtype give; None if there are too many of these."""
    # With 1 among them an inverse is an operation on two constants too.
    leaves = {1.0}
    for value, dtype_of_value in others:
        if dtype_of_value == dtype and np.isfinite(value) and value != 0:
            leaves.add(abs(value))
    # Most constants of a program with many are whole numbers, as positions of tokens, which nothing folds.
    if len(leaves) > _MOST_CONSTANTS:
        leaves = {value for value in leaves if value == 1 or not value.is_integer()}
    if len(leaves) > _MOST_CONSTANTS:
        return None
    lost = set()
    for value, dtype_of_value in others - constants:
        if dtype_of_value == dtype:
            lost.add(abs(value))
    return _Table(sorted(leaves), dtype, lost)


def _is_odd(value: float, dtype: str) -> bool:
    """Whether a float stands for itself, because no simple rational rounds to it."""
    exact = Fraction(value)
    if np.dtype(dtype).kind != "f" or exact.denominator <= LARGEST_DENOMINATOR:
        return False
    return simplest(value, np.dtype(dtype)) == exact


class _Table:
    """What one operation gives of any two constants, and one more of that and a third, in floats.

    XLA rounds each operation to the dtype. Python computes in float64, of what is not rounded yet, and rounds once.

    Worked example: of the leaves 0.9 and 1 there are the operations 0.9 * 0.9, 0.9 / 0.9, ..., 1 - 1, sixteen in all.
    In float32 they give 0.80999994, 1, ..., 0. So 0.80999994 is found as 0.9 * 0.9, and 0.7289999 by a second
    operation, as (0.9 * 0.9) * 0.9.

    Attributes:
        leaves: the constants, without their signs.
        dtype: their dtype.
        lost: those that the side with the folded constants does not have.
        once: all operations on two leaves, as (0.9, "*", 0.9).
        ratios: for each leaf the rational that it stands for.
        losses: for each operation how many of its two leaves are lost.
        values: what each operation gives, rounded as XLA does it, and as Python does it.
    """

    def __init__(self, leaves: list[float], dtype: str, lost: set[float]):
        self.dtype = np.dtype(dtype)
        self.leaves = leaves
        self.lost = lost
        self.once: list[tuple[float, str, float]] = []
        for a in leaves:
            for b in leaves:
                for name in _OPERATIONS:
                    self.once.append((a, name, b))
        self.ratios = {leaf: simplest(leaf, self.dtype) for leaf in leaves}
        self.losses = np.array([(a in lost) + (b in lost) for a, _, b in self.once])
        self.values = [self._compute_all(self.dtype), self._compute_all(np.dtype(np.float64))]

    def _compute_all(self, dtype: Any) -> np.ndarray:
        """What all operations of `once` give in a dtype."""
        rounded = {leaf: self._round(leaf, dtype) for leaf in self.leaves}
        values = []
        for a, name, b in self.once:
            operation = _OPERATIONS[name]
            values.append(operation(rounded[a], rounded[b]))
        return np.array(values, dtype)

    def _round(self, leaf: float, dtype: Any) -> Any:
        """A constant for a computation: in its own dtype as it is, in float64 as the rational that it stands for."""
        if dtype == self.dtype:
            return dtype.type(leaf)
        return dtype.type(float(self.ratios[leaf]))

    def find(self, value: float) -> Folded | None:
        """What a constant was computed of; with one operation if that gives it."""
        size = self.dtype.type(abs(value))
        is_negative = value < 0
        for values in self.values:
            for place in self._find_equal(values, size):
                folded = self._compute_once(int(place))
                if self._is_near(folded.ratio, size):
                    return _with_sign(folded, is_negative)
        for values in self.values:
            twice = self._find_twice(values, size)
            if twice is not None:
                return _with_sign(twice, is_negative)
        return None

    def _find_twice(self, once: np.ndarray, size: Any) -> Folded | None:
        """What two operations give that size: those of the most lost constants."""
        best = None
        most = -1
        for leaf in self.leaves:
            for name in _OPERATIONS:
                candidate = self._find_with(once, name, leaf, size, most)
                if candidate is not None:
                    most, best = candidate
        return best

    def _find_with(self, once: np.ndarray, name: str, leaf: float, size: Any, most: int) -> tuple[int, Folded] | None:
        """What gives that size with a leaf as the second operation's constant, and how many lost constants it has.

        None if nothing does that has more than `most` of them.
        """
        with np.errstate(all="ignore"):
            twice = _OPERATIONS[name](once, self._round(leaf, once.dtype))
        # From the most lost constants down: the first one that is near is the best.
        for place in self._find_equal(twice, size):
            losses = int(self.losses[place]) + (leaf in self.lost)
            if losses <= most:
                return None
            first = self._compute_once(int(place))
            ratio = _apply(name, first.ratio, self.ratios[leaf])
            if self._is_near(ratio, size):
                words = f"({first.words}) {name} {_show(leaf)}"
                return losses, Folded(ratio, words, operations=2)
        return None

    def _is_near(self, ratio: Fraction, size: Any) -> bool:
        """Whether a constant is an exact value but for roundings: (0.1 + 0.2) - 0.3 is 5.6e-17 in floats, and is 0."""
        distance = abs(abs(float(ratio)) - float(size))
        return distance <= _MOST_ROUNDINGS * float(np.spacing(size))

    def _find_equal(self, values: np.ndarray, size: Any) -> np.ndarray:
        """The places of a size, those with the most lost constants first."""
        places = np.flatnonzero(np.abs(values).astype(self.dtype) == size)
        return places[np.argsort(-self.losses[places], kind="stable")]

    def _compute_once(self, place: int) -> Folded:
        """An operation of `once`, in exact numbers."""
        a, name, b = self.once[place]
        ratio = _apply(name, self.ratios[a], self.ratios[b])
        return Folded(ratio, f"{_show(a)} {name} {_show(b)}")


def _apply(name: str, x: Fraction, y: Fraction) -> Fraction:
    if name == "*":
        return x * y
    if name == "/":
        return x / y
    if name == "+":
        return x + y
    return x - y


def _with_sign(folded: Folded, is_negative: bool) -> Folded:
    """The same with the sign that a constant has."""
    if (folded.ratio < 0) == is_negative:
        return folded
    return Folded(-folded.ratio, f"-({folded.words})", folded.operations)


def _show(value: Any) -> str:
    return f"{value:.7g}"
