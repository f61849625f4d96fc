"""Results of a shard_map that its out_specs declare replicated and that differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardkit._arguments.checks import quote
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
        if block.owner is None:
            continue
        if block.owner.params["check_vma"]:
            yield from _find_hidden_differences(block)
        else:
            yield from _find_unreduced(block)


def _find_hidden_differences(block: Block) -> Iterator[Finding]:
    """Results that differ although their type says that they are equal, because a predicate chose them.

    For example under `cond(axis_index("data") == 0, f, g)` devices take other branches. If both return values of a
    type that is invariant over "data", so does the cond, and out_specs P() is accepted.
    """
    for number, (out, spec) in enumerate(zip(block.jaxpr.outvars, block.owner.params["out_specs"], strict=True)):
        # One predicate may differ along several axes, as `axis_index("data") + axis_index("model") == 0`: one finding.
        axes_of_line: dict[str, list[str]] = {}
        for axis, line in sorted(block.state(out).hidden):
            if axis not in all_axes(spec):
                axes_of_line.setdefault(line, []).append(axis)
        for line, axes in axes_of_line.items():
            yield Finding(
                "unequal-output",
                f"a predicate that differs along {quote(axes)} decides output {number} of the shard_map, which "
                f"out_specs {spec} declare replicated there: devices hold different values.",
                line,
                f"Cast the operands with vary over {quote(axes)}, so that the type shows it, and reduce the result.",
            )


def _find_unreduced(block: Block) -> Iterator[Finding]:
    """Results that differ along an axis that out_specs do not name, where no type would show it."""
    # Who calls jax.pmap has written no out_specs, and cannot turn check_vma on.
    if block.context.mapped:
        return
    for number, (out, spec) in enumerate(zip(block.jaxpr.outvars, block.owner.params["out_specs"], strict=True)):
        state = block.state(out)
        axes = sorted(state.varies - state.moved - all_axes(spec))
        if axes:
            yield Finding(
                "unequal-output",
                f"output {number} of the shard_map differs along {quote(axes)}, and nothing reduces it; out_specs "
                f"{spec} declare it replicated there, which check_vma=False does not check.",
                _find_line_of_output(block, out),
                f"Reduce it over {quote(axes)}, or name the axis in out_specs; check_vma=True finds this by type.",
            )


def _find_line_of_output(block: Block, out: Any) -> str:
    """The line that computes a result. If an argument is returned unchanged, it is the line of the shard_map."""
    for equation in block.jaxpr.eqns:
        if out in equation.outvars:
            return find_line(equation, block.context)
    return find_first_line(block.owner, block.context)
