"""Programs whose types jax does not check: check_vma=False and jax.pmap."""

from __future__ import annotations

from collections.abc import Iterator

from shardkit._arguments.checks import quote
from shardkit._jax import compat
from shardkit.analysis.rules.program import TracedProgram
from shardkit.analysis.rules.rule import Finding, find_first_line


def unchecked(program: TracedProgram) -> Iterator[Finding]:
    """shard_map without check_vma, and pmap."""
    for block, equation in program.equations:
        if block.context.mapped:
            continue
        if compat.is_made_by_pmap(equation):
            yield Finding(
                "pmap",
                "jax.pmap supports one axis, needs a leading dim for it and checks no types.",
                find_first_line(equation, block.context),
                "Write jax.shard_map over a mesh from make_mesh.",
            )
        if equation.primitive.name == "shard_map" and not equation.params["check_vma"]:
            yield Finding(
                "check-vma-off",
                f"shard_map over {quote(compat.manual_axes(equation))} has check_vma off: a wrong out_specs and a "
                "missing reduction pass unnoticed, and gradients inside it are not summed.",
                find_first_line(equation, block.context),
                "Leave check_vma=True, and cast with vary where a type must match.",
            )
