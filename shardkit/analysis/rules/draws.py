"""The same random numbers on devices whose elements differ."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from shardkit._arguments.checks import quote
from shardkit._jax import compat
from shardkit.analysis.jaxpr.dataflow import Block, find_line, format_type
from shardkit.analysis.rules.program import TracedProgram
from shardkit.analysis.rules.rule import Finding


def draws(program: TracedProgram) -> Iterator[Finding]:
    """Random numbers that are equal on devices with different elements, as one dropout mask for all of them."""
    for block, equation in program.equations:
        # What combines two arrays element by element: a mask multiplies or selects, noise is added.
        if equation.primitive.name not in ("mul", "add", "sub", "div", "select_n", "and", "or"):
            continue
        if block.context.backward or compat.in_backward(equation):  # shares of a gradient differ where values do not
            continue
        operand = _find_differing_operand(block, equation)
        if operand is None:
            continue
        yield Finding(
            "repeated-draw",
            f"{format_type(operand.variable)}, which differs along {quote(operand.axes)}, is combined with random "
            "numbers that are equal there, because their key is.",
            find_line(equation, block.context),
            "Draw from a key for each example or token, for the same numbers on every mesh, or fold the device's index "
            f"into the key with fold_axis(key, {operand.axes[0]!r}), for numbers that depend on the size of the axis.",
        )


class _DifferingOperand(NamedTuple):
    """An operand that differs along axes on which another operand is the same random draw."""

    variable: Any
    axes: list[str]


def _find_differing_operand(block: Block, equation: Any) -> _DifferingOperand | None:
    """The first operand of a draw's shape that differs where the draw is equal.

    For example `x * mask` where x is split over "data", and mask was drawn on every device from the same key.
    """
    arrays = [operand for operand in equation.invars if math.prod(operand.aval.shape) > 1]
    for draw in arrays:
        equal_axes = block.state(draw).drawn
        for array in arrays:
            state = block.state(array)
            # Pieces that were exchanged may be whole and equal again, as what the ends of a pipeline compute together.
            axes = sorted((state.varies - state.moved) & equal_axes)
            if state.from_argument and axes and array.aval.shape == draw.aval.shape:
                return _DifferingOperand(array, axes)
    return None
