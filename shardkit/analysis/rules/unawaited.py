"""Collectives that are started, as by `jax.lax.psum_scatter_start`, and not awaited where they must be."""

from __future__ import annotations

from collections.abc import Iterator

from shardkit._arguments.checks import quote
from shardkit._jax.jaxprs import kind_of, mesh_axes
from shardkit.analysis.jaxpr.dataflow import format_type
from shardkit.analysis.rules.program import TracedProgram
from shardkit.analysis.rules.rule import Finding

_NAME = "unawaited-start"


def unawaited(program: TracedProgram) -> Iterator[Finding]:
    """Futures of which nobody asks for the array, and those that are awaited in a branch or a loop.

    The compiler leaves out a collective that nobody awaits: no number is wrong, but nothing is sent either. A future in
    a branch or in a loop does not compile: the compilers of jax 0.12 need the start and the `done` of a collective in
    one computation.
    """
    for site, ends in program.futures:
        kind = kind_of(site.equation)
        axes = mesh_axes(site.equation)
        text = f"{kind} over {quote(axes)} of {format_type(site.equation.invars[0])}"
        if not ends:
            yield Finding(
                _NAME,
                f"{text} is started and never awaited, so that the compiler leaves it out.",
                site.source,
                "Use the result of `.done()` of what it returns, or leave it out.",
            )
        constructs = set(ends) - {""}
        for name in sorted(constructs):
            yield Finding(
                _NAME,
                f"the future of {text} goes into a {name}, and does not compile there.",
                site.source,
                f"Call `.done()` of it before the {name}, or start it inside.",
            )
