"""Collectives that are started, as by `jax.lax.psum_scatter_start`, and not awaited where they must be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardkit._arguments.checks import quote
from shardkit._jax import compat
from shardkit._jax.interpreter import find_called_program
from shardkit._jax.jaxprs import Site, kind_of, mesh_axes, walk
from shardkit._jax.primitives import registered
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
    for site in walk(program.step.jaxpr):
        if not registered(site.name).starts:
            continue
        text = (
            f"{kind_of(site.equation)} over {quote(mesh_axes(site.equation))} of {format_type(site.equation.invars[0])}"
        )
        ends = list_ends(site)
        if not ends:
            yield Finding(
                _NAME,
                f"{text} is started and never awaited, so that the compiler leaves it out.",
                site.source,
                "Use the result of `.done()` of what it returns, or leave it out.",
            )
        for name in sorted(set(ends) - {""}):
            yield Finding(
                _NAME,
                f"the future of {text} goes into a {name}, and does not compile there.",
                site.source,
                f"Call `.done()` of it before the {name}, or start it inside.",
            )


def list_ends(site: Site) -> list[str]:
    """Where the future of a started collective ends: "" for each `done`, and the name of each cond, scan or while."""
    [future] = site.equation.outvars
    return list(_list_ends(future, site.jaxpr, site.outer))


def _list_ends(future: Any, jaxpr: Any, caller: Site | None) -> Iterator[str]:
    """Where a future ends, a variable of a jaxpr that `caller` calls: "" for a `done`, else "cond" or "scan".

    Functions that are called, and their results, are followed: `jax.jit(lambda f: f.done())(future)` is a `done`.
    """
    for equation in jaxpr.eqns:
        for number, atom in enumerate(equation.invars):
            if atom is future:
                yield from _list_ends_inside(number, Site(equation, jaxpr, outer=caller))
    for number, atom in enumerate(jaxpr.outvars):
        if atom is not future or caller is None:
            continue
        if find_called_program(caller.equation) is None:
            yield caller.name
        else:
            yield from _list_ends(caller.equation.outvars[number], caller.jaxpr, caller.outer)


def _list_ends_inside(number: int, site: Site) -> Iterator[str]:
    """Where a future ends that is the operand of this number of a site's equation."""
    row = registered(site.name)
    if row.waits:
        yield ""
        return
    if row.same:  # as an optimization_barrier
        yield from _list_ends(site.equation.outvars[number], site.jaxpr, site.outer)
        return
    program = find_called_program(site.equation)
    if program is not None:
        jaxpr = getattr(program, "jaxpr", program)
        yield from _list_ends(jaxpr.invars[number], jaxpr, site)
    elif compat.inner_jaxprs(site.equation):
        yield site.name
