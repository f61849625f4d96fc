"""Reductions over devices that hold the same value."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from shardkit._arguments.checks import name_axes, quote
from shardkit._jax import compat
from shardkit._jax.jaxprs import PLAN, TOTALS
from shardkit._jax.primitives import registered
from shardkit.analysis.jaxpr.dataflow import Block, find_line, find_split_axes, format_type
from shardkit.analysis.rules.program import TracedProgram
from shardkit.analysis.rules.rule import Finding


def reductions(program: TracedProgram) -> Iterator[Finding]:
    """Sums, maxima and minima over devices that hold the same value. A sum of a constant is a count."""
    for block, equation in program.equations:
        operation = registered(equation.primitive.name).reduces
        if not operation:
            continue
        # Transposing adds such sums rightly: a value used as n copies has n times the gradient.
        if block.context.backward or compat.in_backward(equation) or equation.params.get("axis_index_groups"):
            continue
        if block.is_within(equation, PLAN):  # shares of a gradient that no example changes are equal, and divided
            continue
        # The totals and weights of a step's means, where all are equal along an axis, as of sequences that are pooled
        # over their tokens: each is counted once for each device, and so are the gradients, which cancels in the mean.
        if block.is_within(equation, TOTALS):
            continue
        for operand in equation.invars:
            finding = _check_operand(block, equation, operand, operation)
            if finding is not None:
                yield finding
                break


def _check_operand(block: Block, equation: Any, operand: Any, operation: str) -> Finding | None:
    """The finding for an operand that is equal along an axis over which it is reduced, and no constant.

    For example psum(w, "data") where every device has the same w: the result is 4 w on 4 devices.
    """
    axes = find_split_axes(equation, block.context)
    state = block.state(operand)
    equal_axes = [axis for axis in axes if axis not in state.varies]
    if not equal_axes:
        return None
    n = math.prod(block.context.sizes[axis] for axis in equal_axes)
    effect = "changes nothing"
    if operation == "sum":
        effect = f"multiplies it by {n}, and a mean changes nothing"
    if state.reduced & set(equal_axes):
        reason = "was reduced or gathered over it before"
        remedy = (
            "Leave it out; to average gradients, cast the parameters with sk.vary before differentiating; to change "
            "only the type, gather with replicated=True."
        )
    # A tangent, which looks like its argument, is summed rightly.
    elif state.from_argument and not compat.in_jvp(equation):
        reason = "comes from replicated arguments"
        remedy = "Leave it out, or split the argument over the axis."
    else:
        return None
    return Finding(
        "repeated-reduction",
        f"all_reduce over {quote(axes)} of a {format_type(operand)} that is equal along {name_axes(equal_axes)} "
        f"already, because it {reason}; a {operation} {effect}.",
        find_line(equation, block.context),
        remedy,
    )
