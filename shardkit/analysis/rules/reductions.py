"""Reductions over devices that hold the same value."""

from __future__ import annotations

import math
from collections.abc import Iterator

from shardkit._arguments.checks import named, quoted
from shardkit._jax import compat
from shardkit._jax.jaxprs import PLAN
from shardkit._jax.primitives import registered
from shardkit.analysis.jaxpr.dataflow import find_line, find_split_axes, format_type
from shardkit.analysis.rules.program import TracedProgram
from shardkit.analysis.rules.rule import Finding


def reductions(program: TracedProgram) -> Iterator[Finding]:
    """Sums, maxima and minima over devices that hold the same value. A sum of a constant is a count."""
    for block, equation in program.equations:
        what = registered(equation.primitive.name).reduces
        if not what:
            continue
        # Transposing adds such sums rightly: a value used as n copies has n times the gradient.
        if block.context.backward or compat.in_backward(equation) or equation.params.get("axis_index_groups"):
            continue
        if compat.in_scope(equation, PLAN):  # shares of a gradient that no example changes are equal, and divided
            continue
        axes = find_split_axes(equation, block.context)
        for operand in equation.invars:
            state = block.state(operand)
            equal = [a for a in axes if a not in state.varies]
            reduced = bool(state.reduced & set(equal))
            # A tangent, which looks like its argument, is summed rightly too.
            if not equal or not (reduced or (state.given and not compat.in_jvp(equation))):
                continue
            n = math.prod(block.context.sizes[a] for a in equal)
            why = "was reduced or gathered over it before" if reduced else "comes from replicated arguments"
            does = "changes nothing" if what != "sum" else f"multiplies it by {n}, and a mean changes nothing"
            yield Finding(
                "repeated-reduction",
                f"all_reduce over {quoted(axes)} of a {format_type(operand)} that is equal along {named(equal)} "
                f"already, because it {why}; a {what} {does}.",
                find_line(equation, block.context),
                "Leave it out; where it averages gradients, cast the parameters with sk.vary before differentiating; "
                "where only the type must become equal, gather with replicated=True."
                if reduced
                else "Leave it out, or split the argument over the axis.",
            )
            break
