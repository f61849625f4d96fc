"""What elementwise primitives make of rows of examples, and of sums over them.

Worked example: `x * 2 + b` of rows x[n, 8] and a whole b[8]. Both operations are elementwise: the result has rows of
single examples along dim 0. `sum(x) + 1` is a sum plus what does not grow with the examples: for two halves of them it
would be counted twice, so examples meet there. `sum(x) / n` is a mean: its scale is 1 where that of the sum is 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from shardkit._jax.primitives import LINEAR, NONLINEAR, SUMS
from shardkit.on_device.example_states import EACH_TURN, UNKNOWN, Pair, Rows, State, Total, Whole, is_turn, select


def of_one_example(pair: Pair, operands: Sequence[State]) -> State:
    """Whatever is computed of the one example of a loop's iteration, and of what is whole, belongs to it."""
    if not all(isinstance(state, Whole) or is_turn(state) for state in operands):
        return pair.met(f"{pair.name} pairs every example with every other")
    if all(state.scale == 1 for state in operands if isinstance(state, Whole | Rows)):
        return Rows(EACH_TURN)
    scale = scale_of(pair, operands) if pair.name in NONLINEAR else UNKNOWN
    if scale == UNKNOWN:
        return pair.met(f"{pair.name} combines examples with their number")
    return Rows(EACH_TURN, scale=scale)


def scale_of(pair: Pair, states: Sequence[State]) -> float:
    """The scale of an elementwise result."""
    name = pair.name
    scales: list[float] = [getattr(state, "scale", UNKNOWN) for state in states]
    if UNKNOWN in scales:
        return UNKNOWN
    if name in LINEAR:
        return scales[0]
    if name == "mul":
        return scales[0] * scales[1]
    if name == "div":
        return scales[0] / scales[1]
    if name == "integer_pow":
        return float(scales[0] ** pair.many.params["y"])
    if name == "square":
        return scales[0] ** 2
    if name == "select_n":
        # A choice by a number of examples is another one for more of them.
        return UNKNOWN if scales[0] != 1 else _common_scale(states[1:])
    if name in SUMS or name in ("max", "min"):
        return _common_scale(states)
    return 1.0 if all(scale == 1 for scale in scales) else UNKNOWN


def _common_scale(states: Sequence[State]) -> float:
    """The scale of operands that all have the same one; zeros have any."""
    scales = set()
    for state in states:
        if isinstance(state, Whole | Rows) and not is_zero(state):
            scales.add(state.scale)
    if not scales:
        return 1.0
    return scales.pop() if len(scales) == 1 else UNKNOWN


def is_zero(state: State) -> bool:
    """Whether a value is known to be zero."""
    return isinstance(state, Whole) and state.zero


def elementwise(pair: Pair, operands: list[State]) -> State:
    """An elementwise operation: of rows and whole values, or of sums over the examples."""
    name = pair.name
    if name == "select_n" and is_zero(operands[0]):
        return operands[1]
    if any(isinstance(state, Total) for state in operands):
        return _of_totals(pair, operands)
    scale = scale_of(pair, operands)
    if scale == UNKNOWN:
        if name == "add" and jnp.issubdtype(pair.many.outvars[0].aval.dtype, jnp.integer):  # x[i] adds n to i < 0
            return pair.met("an example is looked up by its place in the batch")
        return pair.met(f"{name} combines examples with their number")
    first, *others = select(operands, Rows)
    for other in others:
        if (other.dim, other.copies) != (first.dim, first.copies):
            return pair.met(f"{name} pairs every example with every other")
    for number, state in enumerate(operands):
        has_all_dims = len(pair.shape(number)) == len(pair.out)
        if isinstance(state, Whole) and first.dim in state.differs and has_all_dims:
            return pair.met(f"{name} combines an example with a value that depends on its place in the batch")
    return Rows(first.dim, first.copies, scale)


def _of_totals(pair: Pair, operands: list[State]) -> State:
    """An elementwise operation with sums over the examples: what is linear in them gives such a sum."""
    name = pair.name
    if any(isinstance(state, Rows) for state in operands):
        return pair.met(f"{name} combines each example with a sum over all")
    first, *others = operands
    if name == "convert_element_type" and _rounds(pair.many):
        return pair.met("a sum over the examples is rounded to an integer")
    if name in LINEAR:
        return first
    if name == "mul":
        factors = select(operands, Whole)
        totals = select(operands, Total)
        if len(totals) == 1:
            return scale_total(pair, totals[0], factors[0].scale)
    if name == "div" and isinstance(first, Total) and isinstance(others[0], Whole):
        divisor = others[0].scale
        return scale_total(pair, first, UNKNOWN if divisor == UNKNOWN else 1 / divisor)
    if name in SUMS:
        return _add_totals(pair, operands)
    if name == "select_n" and isinstance(first, Whole) and first.scale == 1:
        return _add_totals(pair, others)
    return pair.met(f"{name} is applied to a sum over the examples")


def _rounds(equation: Any) -> bool:
    """Whether a conversion rounds to integers."""
    before = equation.invars[0].aval.dtype
    after = equation.params["new_dtype"]
    return jnp.issubdtype(before, jnp.inexact) and not jnp.issubdtype(after, jnp.inexact)


def scale_total(pair: Pair, total: Total, factor: float) -> State:
    """A sum over the examples times a whole value of this scale."""
    if factor == UNKNOWN:
        return pair.met("a sum over the examples is combined with their number")
    return Total(total.scale * factor)


def _add_totals(pair: Pair, states: Sequence[State]) -> State:
    """A sum of sums, and of constants that grow as they do: beside a sum one times n, beside a mean one that stays."""
    scales = {state.scale for state in states if isinstance(state, Total)}
    if len(scales) > 1:
        return pair.met("a mean over the examples is added to a sum over them")
    scale = scales.pop()
    for state in states:
        if isinstance(state, Whole) and not state.zero and state.scale != 2 * scale:
            return pair.met("a value that does not depend on the examples is added to a sum over them")
    return Total(scale)
