"""The rules of elementwise primitives.

Worked examples, of rows x[n, 8] and a whole b[8]:

- `x * 2 + b` is rows along dim 0, as x is.
- `sum(x)` is a Total of scale 1. `sum(x) / n` is a mean, a Total of scale 1 / 2: for 2n examples it is half the sum of
  the means of both halves.
- `sum(x) + 1` is no sum over the examples: both halves would count the 1. Examples meet there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from shardkit._jax.primitives import LINEAR, NONLINEAR, SUMS
from shardkit.on_device.example_states import (
    EACH_TURN,
    UNKNOWN,
    Met,
    Pair,
    Rows,
    State,
    Total,
    Whole,
    is_turn,
    select,
)


def combine_one_example(pair: Pair, operands: Sequence[State]) -> State:
    """The state of a value that is computed from the one example of a loop's iteration, and from whole values."""
    scales = set()
    for state in operands:
        if not isinstance(state, Whole) and not is_turn(state):
            return pair.met(f"{pair.name} pairs every example with every other")
        scales.add(_get_scale(state))
    if scales <= {1}:
        return Rows(EACH_TURN)
    scale = UNKNOWN
    if pair.name in NONLINEAR:
        scale = find_scale(pair, operands)
    if scale == UNKNOWN:
        return pair.met(f"{pair.name} combines examples with the number of examples")
    return Rows(EACH_TURN, scale=scale)


def _get_scale(state: State) -> float:
    """The scale of a value; not known of a Met."""
    return UNKNOWN if isinstance(state, Met) else state.scale


def find_scale(pair: Pair, states: Sequence[State]) -> float:
    """The scale of an elementwise result."""
    name = pair.name
    scales = [_get_scale(state) for state in states]
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
        # A condition that depends on the number of examples may choose otherwise for more examples.
        if scales[0] != 1:
            return UNKNOWN
        return _find_common_scale(states[1:])
    if name in SUMS or name in ("max", "min"):
        return _find_common_scale(states)
    # Of any other function it is known only that the same operands give the same result.
    if set(scales) <= {1}:
        return 1.0
    return UNKNOWN


def _find_common_scale(states: Sequence[State]) -> float:
    """The scale of operands that all have the same one; zeros have any."""
    scales = set()
    for state in states:
        if isinstance(state, Whole | Rows) and not is_zero(state):
            scales.add(state.scale)
    if not scales:
        return 1.0
    if len(scales) > 1:
        return UNKNOWN
    return scales.pop()


def is_zero(state: State) -> bool:
    """Whether a value is known to be zero."""
    return isinstance(state, Whole) and state.zero


def combine_elements(pair: Pair, operands: list[State]) -> State:
    """An elementwise operation: of rows and whole values, or of sums over the examples."""
    name = pair.name
    # A condition that is known to be False chooses the first case.
    if name == "select_n" and is_zero(operands[0]):
        return operands[1]
    if select(operands, Total):
        return _of_totals(pair, operands)
    scale = find_scale(pair, operands)
    if scale == UNKNOWN:
        is_integer = jnp.issubdtype(pair.many.outvars[0].aval.dtype, jnp.integer)
        if name == "add" and is_integer:  # x[i] adds n to i < 0
            return pair.met("an example is looked up by its place in the batch")
        return pair.met(f"{name} combines examples with the number of examples")
    first, *later = select(operands, Rows)
    for rows in later:
        if (rows.dim, rows.copies) != (first.dim, first.copies):
            return pair.met(f"{name} pairs every example with every other")
    for number, state in enumerate(operands):
        has_all_dims = len(pair.shape(number)) == len(pair.out)
        if isinstance(state, Whole) and first.dim in state.differs and has_all_dims:
            return pair.met(f"{name} combines an example with a value that depends on its place in the batch")
    return Rows(first.dim, first.copies, scale)


def _of_totals(pair: Pair, operands: list[State]) -> State:
    """An elementwise operation with sums over the examples: a linear one gives a sum over the examples again."""
    name = pair.name
    if select(operands, Rows):
        return pair.met(f"{name} combines each example with a sum over all")
    first, *later = operands
    if name == "convert_element_type" and _rounds(pair.many):
        return pair.met("a sum over the examples is rounded to an integer")
    if name in LINEAR:
        return first
    if name == "mul":
        factors = select(operands, Whole)
        totals = select(operands, Total)
        if len(totals) == 1:
            return scale_total(pair, totals[0], factors[0].scale)
    if name == "div" and isinstance(first, Total) and isinstance(later[0], Whole):
        factor = UNKNOWN
        if later[0].scale != UNKNOWN:
            factor = 1 / later[0].scale
        return scale_total(pair, first, factor)
    if name in SUMS:
        return _add_totals(pair, operands)
    # A condition that is the same for all examples chooses one of several totals, which must grow alike.
    if name == "select_n" and isinstance(first, Whole) and first.scale == 1:
        return _add_totals(pair, later)
    return pair.met(f"{name} is applied to a sum over the examples")


def _rounds(equation: Any) -> bool:
    """Whether a conversion rounds to integers."""
    before = equation.invars[0].aval.dtype
    after = equation.params["new_dtype"]
    return jnp.issubdtype(before, jnp.inexact) and not jnp.issubdtype(after, jnp.inexact)


def scale_total(pair: Pair, total: Total, factor: float) -> State:
    """A sum over the examples times a whole value of this scale."""
    if factor == UNKNOWN:
        return pair.met("a sum over the examples is combined with the number of examples")
    return Total(total.scale * factor)


def _add_totals(pair: Pair, states: Sequence[State]) -> State:
    """A sum of totals and of constants that grow as the totals do.

    Beside a sum over n examples, a constant must be multiplied by n; beside a mean, it must not depend on n.
    """
    scales = {total.scale for total in select(states, Total)}
    if len(scales) > 1:
        return pair.met("a mean over the examples is added to a sum over them")
    scale = scales.pop()
    for state in states:
        # Twice as many examples make a Total 2 * scale times as large, and the constant must grow alike: `sum(x) + n`
        # may stand, `sum(x) + 1` may not.
        if isinstance(state, Whole) and not state.zero and state.scale != 2 * scale:
            return pair.met("a value that does not depend on the examples is added to a sum over them")
    return Total(scale)
