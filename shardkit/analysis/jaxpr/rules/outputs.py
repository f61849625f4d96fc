"""Results of a shard_map that its out_specs declare replicated and that differ."""

from __future__ import annotations

from collections.abc import Iterator

from shardkit._check import quoted
from shardkit.analysis.jaxpr.dataflow import Block, where
from shardkit.analysis.jaxpr.rules.rule import Finding, Program, place
from shardkit.layout import all_axes


def outputs(block: Block, program: Program) -> Iterator[Finding]:
    """What leaves a shard_map as equal on all devices, and is not.

    Where types are checked jax does not see that a predicate varies. Where they are not, whatever differs is reported
    along axes over which no pieces were exchanged: those that were may have been put together to the same whole.
    """
    if block.owner is None:
        return
    if not block.owner.params["check_vma"]:
        yield from _unchecked(block)
        return
    for number, (out, spec) in enumerate(zip(block.jaxpr.outvars, block.owner.params["out_specs"], strict=True)):
        wrong = [(a, line) for a, line in sorted(block.state(out).hidden) if a not in all_axes(spec)]
        for line in dict.fromkeys(line for _, line in wrong):
            axes = [a for a, other in wrong if other == line]
            yield Finding(
                "unequal-output",
                f"a predicate that differs along {quoted(axes)} decides output {number} of the shard_map, which "
                f"out_specs {spec} takes for equal there, so that each device holds another value.",
                line,
                f"Cast the operands with vary over {quoted(axes)}, so that the type tells, and reduce the result.",
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
                f"{spec} takes it for equal there, and check_vma=False lets that pass.",
                where(made[out], block.context) if out in made else place(block.owner, block.context),
                f"Reduce it over {quoted(axes)}, or name the axis in out_specs; check_vma=True finds this by type.",
            )
