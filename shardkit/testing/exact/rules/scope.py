"""The argument of every rule beside an equation and its operands: the field, the dims of the mesh, the source line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardkit._jax.jaxprs import source_line
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.orders import find_equal
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.rules.operands import Known, Operand, lift_operand


@dataclass(frozen=True)
class Scope:
    """The further argument of every rule, beside an equation and its operands.

    Attributes:
        field: the arithmetic.
        rank: the number of mesh dims in front.
        around: the line of the call around the equation, which stands for an equation without a line.
        backward: whether differentiation made a program around the equation for the backward pass.
    """

    field: Field
    rank: int
    around: str = ""
    backward: bool = False

    def lift(self, *operands: Operand) -> list[Exact]:
        """Operands in the field, with dims that broadcast: scalars get dims of size 1 after the dims of the mesh."""
        # On a mesh of two devices, a scalar [2] and an array [1] + [4, 3] become [2] + [1, 1] and [1] + [4, 3].
        arrays = []
        most = 0
        for operand in operands:
            x = self.lift_one(operand)
            arrays.append(x)
            most = max(most, len(x.shape))
        return [self._pad_dims(x, most) for x in arrays]

    def lift_one(self, x: Operand) -> Exact:
        """An operand in the field, as it is."""
        return lift_operand(self.field, x)

    def _pad_dims(self, x: Exact, dims: int) -> Exact:
        """An array with `dims` dims, of which the new ones have size 1."""
        if len(x.shape) == dims:
            return x
        return x.move(lambda part: self.pad_part(part, dims))

    def pad_part(self, part: np.ndarray, dims: int) -> np.ndarray:
        """[components, *mesh, 1, ..., *shape]: a part of an array, with dims of size 1 up to `dims` in all."""
        lead = 1 + self.rank
        ones = (1,) * (1 + dims - part.ndim)
        return part.reshape(part.shape[:lead] + ones + part.shape[lead:])

    def constant(self, value: float, like: Exact) -> Exact:
        """A constant that broadcasts against an array."""
        ones = (1,) * len(like.shape)
        return self.field.lift(np.full(ones, value, np.float32))

    def decide(self, equation: Any, truth: np.ndarray, x: Exact, y: Exact, part: str = "") -> Known:
        """The outcome of a comparison of x and y, noted, and marked as one that follows from floats.

        `part` names one of several comparisons that an equation makes, as a clamp does.
        """
        field = self.field
        # There is no coverage in a search for a line, and in tests of single rules.
        if field.coverage is not None:
            field.coverage.note(field, equation, self.line(equation), truth, (x, y), part)
        truth = np.asarray(truth)
        # A search for comparisons that no result shows runs the program with another answer here (`hidden.py`).
        turned = field.choices.turned.get((id(equation), part))
        if isinstance(turned, str):  # TIES: where both numbers are equal
            truth = truth ^ find_equal(field, x, y)
        elif turned is not None and turned.shape in ((), truth.shape):  # an equation may run for other shapes
            truth = truth ^ turned
        return field.marks.add(truth, decision=True)

    def choose(self, equation: Any, chosen: np.ndarray, x: Exact, part: str = "") -> None:
        """Notes which elements of x an equation chose among others, as the largest of a row."""
        if self.field.coverage is not None and x.degree.total:
            asked = (x.poison == 0) & (x.infinite == 0)
            self.field.coverage.note_choice(self.field, equation, self.line(equation), chosen, asked, part)

    def choose_extremes(
        self, equation: Any, x: Exact, keys: np.ndarray, dims: Sequence[int], largest: bool, part: str = ""
    ) -> None:
        """Notes which elements of x have the largest, or smallest, key along some dims.

        Worked example: the keys [[0.3, 2.1, -1.0]] along dim 1. Of the largest it is noted as [[no, yes, no]].
        """
        # Of one element no other could have been chosen.
        if self.field.coverage is None or math.prod(x.shape[dim] for dim in dims) < 2:
            return
        if largest:
            extreme_keys = keys.max(tuple(dims), keepdims=True)
        else:
            extreme_keys = keys.min(tuple(dims), keepdims=True)
        self.choose(equation, keys == extreme_keys, x, part)

    def divide_by(self, equation: Any, x: Exact) -> None:
        """Notes the divisor of an equation, or the argument of its logarithm, which must not be zero."""
        if self.field.coverage is not None:
            self.field.coverage.note_divisor(self.field, equation, x)

    def note_touch(self, equation: Any, x: Exact) -> None:
        """Notes the base of an even power, of which a comparison may ask whether it is above zero."""
        if self.field.coverage is not None:
            self.field.coverage.note_touch(self.field, equation, x)

    def line(self, equation: Any) -> str:
        """The line of an equation in the user's program, as "kernel.py:12"."""
        return source_line(equation, self.around)

    def reduced_dims(self, equation: Any) -> list[int]:
        """The dims of a reduction, counted with the dims of the mesh in front."""
        return [self.rank + dim for dim in equation.params["axes"]]
