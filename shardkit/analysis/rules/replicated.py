"""Large arrays that every device holds whole."""

from __future__ import annotations

import math
from collections.abc import Iterator

from shardkit._arguments.checks import sized
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
        sizes = {a: equation.params["mesh"].shape[a] for a in compat.manual_axes(equation)}
        if math.prod(sizes.values()) == 1:
            continue
        (inner,) = [sub for _, sub in compat.inner_jaxprs(equation)]
        names = inner.debug_info.arg_names or ()
        for number, (operand, spec) in enumerate(zip(equation.invars, equation.params["in_specs"], strict=True)):
            # Differentiation passes residuals to a second shard_map; the first one holds them.
            if all_axes(spec) or size_of(operand) < program.large or compat.in_backward(equation):
                continue
            name = names[number] if number < len(names) and names[number] else f"argument {number}"
            closed = any(operand is v for v in block.jaxpr.constvars)
            yield Finding(
                "large-replicated",
                f"{name}, {'a closed-over constant' if closed else 'an input'} of {size_of(operand):,} bytes "
                f"({format_type(operand)}), is replicated over {sized(sizes.items())}.",
                find_first_line(equation, block.context),
                "Name a mesh axis in its spec, as specs_from_rules does, or raise `large` if that is intended.",
            )
