"""Collectives in branches and loops that devices take differently."""

from __future__ import annotations

from collections.abc import Iterator

from shardkit._arguments.checks import quote
from shardkit._jax.jaxprs import kind_of
from shardkit.analysis.jaxpr.dataflow import find_line, find_split_axes
from shardkit.analysis.rules.program import TracedProgram
from shardkit.analysis.rules.rule import Finding


def divergence(program: TracedProgram) -> Iterator[Finding]:
    """Collectives inside branches and loops that devices take differently."""
    for block, equation in program.equations:
        kind = kind_of(equation)
        axes = find_split_axes(equation, block.context)
        if kind is None or not axes:
            continue
        # Of a branch that only devices 0 and 1 of data=2, model=2 take, because its predicate differs along "data", a
        # psum over "model" is right: all its devices come. One over "data" waits for devices 2 and 3.
        for branching in block.context.divergences:
            shared = sorted(branching.axes & set(axes))
            text = f"{kind} over {quote(axes)} is in a {branching.construct}, at {branching.source}, differs along"
            if shared:
                yield Finding(
                    "divergent-collective",
                    f"{text} {quote(shared)}, so that only some of its devices call it: a deadlock.",
                    find_line(equation, block.context),
                    "Call it on every device and select the result with jnp.where, or make the predicate equal first, "
                    f"with all_reduce over {quote(shared)}.",
                )
                break
            # A ppermute waits for all devices of the mesh, whatever its axis.
            if kind == "ppermute":
                yield Finding(
                    "ppermute-in-divergent-branch",
                    f"{text} {quote(sorted(branching.axes))}; a ppermute needs every device of the mesh, so that it "
                    "deadlocks or returns wrong values.",
                    find_line(equation, block.context),
                    "Call it on every device and select the result with jnp.where.",
                )
                break
