"""The same random numbers on devices whose elements differ."""

from __future__ import annotations

import math
from collections.abc import Iterator

from shardkit._arguments.checks import quoted
from shardkit._jax import compat
from shardkit.analysis.jaxpr.dataflow import find_line, format_type
from shardkit.analysis.rules.program import TracedProgram
from shardkit.analysis.rules.rule import Finding


def draws(program: TracedProgram) -> Iterator[Finding]:
    """Random numbers that are the same on devices whose elements differ, as one dropout mask for all."""
    for block, equation in program.equations:
        if equation.primitive.name not in ("mul", "add", "sub", "div", "select_n", "and", "or"):
            continue
        if block.context.backward or compat.in_backward(equation):  # shares of a gradient differ where values do not
            continue
        operands = [(each, block.state(each)) for each in equation.invars if math.prod(each.aval.shape) > 1]
        for draw, alike in operands:
            # Pieces that were exchanged may be whole and equal again, as what the ends of a pipeline compute together.
            differ = [(each, s) for each, s in operands if s.given and (s.varies - s.moved) & alike.drawn]
            others = [(each, s) for each, s in differ if each.aval.shape == draw.aval.shape]
            if others:
                axes = sorted((others[0][1].varies - others[0][1].moved) & alike.drawn)
                yield Finding(
                    "repeated-draw",
                    f"{format_type(others[0][0])}, which differs along {quoted(axes)}, is combined with random numbers "
                    "that are equal there, because their key is.",
                    find_line(equation, block.context),
                    f"Fold the device's index into the key with fold_axis(key, {axes[0]!r}), or derive a key for "
                    "each example with fold_keys.",
                )
                break
