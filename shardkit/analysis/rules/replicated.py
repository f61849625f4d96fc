"""Large arrays that every device holds whole."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from shardkit._arguments.checks import format_sizes
from shardkit._jax import compat
from shardkit.analysis.jaxpr.census import size_of
from shardkit.analysis.jaxpr.dataflow import format_type
from shardkit.analysis.rules.program import TracedProgram
from shardkit.analysis.rules.rule import Finding, find_first_line
from shardkit.meshes.layout import all_axes


def replicated(program: TracedProgram) -> Iterator[Finding]:
    """Large inputs of a shard_map whose spec names no axis."""
    for block, equation in program.equations:
        if equation.primitive.name != "shard_map" or block.context.mapped:
            continue
        mesh_shape = equation.params["mesh"].shape
        sizes = {axis: mesh_shape[axis] for axis in compat.manual_axes(equation)}
        if math.prod(sizes.values()) == 1:
            continue
        for number, (operand, spec) in enumerate(zip(equation.invars, equation.params["in_specs"], strict=True)):
            # Differentiation passes residuals to a second shard_map; the first one holds them.
            if all_axes(spec) or size_of(operand) < program.large or compat.in_backward(equation):
                continue
            origin = "an input"
            if any(operand is constant for constant in block.jaxpr.constvars):
                origin = "a closed-over constant"
            yield Finding(
                "large-replicated",
                f"{_name_argument(equation, number)}, {origin} of {size_of(operand):,} bytes "
                f"({format_type(operand)}), is replicated over {format_sizes(sizes.items())}.",
                find_first_line(equation, block.context),
                "Name a mesh axis in its spec, as specs_from_rules does, or raise `large` if that is intended.",
            )


def _name_argument(equation: Any, number: int) -> str:
    """The name of an argument of a shard_map's function, where jax knows it: "params['w']"."""
    [(_, inner)] = compat.inner_jaxprs(equation)
    names = inner.debug_info.arg_names or ()
    if number < len(names) and names[number]:
        return str(names[number])
    return f"argument {number}"
