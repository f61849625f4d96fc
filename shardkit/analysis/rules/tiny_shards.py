"""Arrays split into pieces too small to be worth a message."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from shardkit._arguments.checks import quote
from shardkit._jax.jaxprs import kind_of
from shardkit.analysis.jaxpr.census import size_of
from shardkit.analysis.jaxpr.dataflow import Block, find_line, find_split_axes, format_type
from shardkit.analysis.rules.program import TracedProgram
from shardkit.analysis.rules.rule import Finding, passes_on

# Over fewer devices, tiny pieces are split because the rest of the tree is.
_MANY = 16


def tiny_shards(program: TracedProgram) -> Iterator[Finding]:
    """Arrays that many devices hold in pieces of a few bytes: a message costs its latency whatever its size."""
    for block, equation in program.equations:
        kind = kind_of(equation)
        axes = find_split_axes(equation, block.context)
        n = math.prod(block.context.sizes[axis] for axis in axes)
        if n < _MANY:
            continue
        if kind == "all_gather":
            piece = equation.invars[0]
            if not _is_input(block, piece):  # an activation may be small, and must be gathered all the same
                continue
        elif kind == "reduce_scatter":
            piece = equation.outvars[0]
        else:
            continue
        if piece.aval.ndim and 0 < size_of(piece) < program.small:
            yield Finding(
                "tiny-shards",
                f"{kind} over {quote(axes)} of {n} devices sends pieces of {size_of(piece):,} bytes "
                f"({format_type(piece)}); {program.small:,} bytes are not worth a message.",
                find_line(equation, block.context),
                "Replicate leaves of this size, or split them over fewer devices.",
            )


def _is_input(block: Block, variable: Any) -> bool:
    """Whether a value is an input of a shard_map, perhaps cast: sharded state."""
    if block.owner is None:
        return False
    makers = {}  # by result, its equation
    for equation in block.jaxpr.eqns:
        for out in equation.outvars:
            makers[out] = equation
    while variable in makers and passes_on(makers[variable]):
        equation = makers[variable]
        number = equation.outvars.index(variable)  # a barrier has several operands
        variable = equation.invars[number]
    return any(variable is argument for argument in block.jaxpr.invars)
