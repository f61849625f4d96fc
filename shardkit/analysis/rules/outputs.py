"""Results of a shard_map that its out_specs declare replicated and that differ."""

from __future__ import annotations

from collections.abc import Iterator

from shardkit._arguments.checks import quoted
from shardkit.analysis.jaxpr.dataflow import Block, find_line
from shardkit.analysis.rules.program import TracedProgram
from shardkit.analysis.rules.rule import Finding, find_first_line
from shardkit.meshes.layout import all_axes


def outputs(program: TracedProgram) -> Iterator[Finding]:
    """Results that out_specs declare replicated and that differ between devices.

    Under check_vma jax misses that a predicate varies. Without it, differences are reported along axes over which no
    pieces were exchanged: exchanged pieces may form the same whole on every device.
    """
    for block in program.blocks:
        if block.owner is not None:
            yield from _by_type(block) if block.owner.params["check_vma"] else _unchecked(block)


def _by_type(block: Block) -> Iterator[Finding]:
    for number, (out, spec) in enumerate(zip(block.jaxpr.outvars, block.owner.params["out_specs"], strict=True)):
        wrong = [(a, line) for a, line in sorted(block.state(out).hidden) if a not in all_axes(spec)]
        for line in dict.fromkeys(line for _, line in wrong):
            axes = [a for a, other in wrong if other == line]
            yield Finding(
                "unequal-output",
                f"a predicate that differs along {quoted(axes)} decides output {number} of the shard_map, which "
                f"out_specs {spec} declare replicated there: devices hold different values.",
                line,
                f"Cast the operands with vary over {quoted(axes)}, so that the type shows it, and reduce the result.",
            )


def _unchecked(block: Block) -> Iterator[Finding]:
    made = {out: equation for equation in block.jaxpr.eqns for out in equation.outvars}
    for number, (out, spec) in enumerate(zip(block.jaxpr.outvars, block.owner.params["out_specs"], strict=True)):
        state = block.state(out)
        axes = sorted(state.varies - state.moved - all_axes(spec))
        if axes and not block.context.mapped:
            yield Finding(
                "unequal-output",
                f"output {number} of the shard_map differs along {quoted(axes)}, and nothing reduces it; out_specs "
                f"{spec} declare it replicated there, which check_vma=False does not check.",
                find_line(made[out], block.context) if out in made else find_first_line(block.owner, block.context),
                f"Reduce it over {quoted(axes)}, or name the axis in out_specs; check_vma=True finds this by type.",
            )
