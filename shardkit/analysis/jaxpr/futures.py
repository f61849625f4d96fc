"""Futures of started collectives, as of `jax.lax.psum_scatter_start`: where in a traced program they end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from shardkit._jax import compat
from shardkit._jax.interpreter import find_called_program
from shardkit._jax.jaxprs import Site, walk
from shardkit._jax.primitives import registered


class Future(NamedTuple):
    """A collective that is started.

    Attributes:
        site: where it starts.
        ends: where its future ends: "" for each `done`, and the name of each cond, scan or while that it goes into.
    """

    site: Site
    ends: tuple[str, ...]


def find_futures(jaxpr: Any) -> list[Future]:
    """The started collectives of a program."""
    futures = []
    for site in walk(jaxpr):
        if registered(site.name).starts:
            [variable] = site.equation.outvars
            ends = _list_ends(variable, site.jaxpr, site.outer)
            futures.append(Future(site, tuple(ends)))
    return futures


def _list_ends(future: Any, jaxpr: Any, caller: Site | None) -> Iterator[str]:
    """Where a future ends, a variable of a jaxpr that `caller` calls.

    Functions that are called, and their results, are followed: `jax.jit(lambda f: f.done())(future)` is a `done`.
    """
    for equation in jaxpr.eqns:
        for position, operand in enumerate(equation.invars):
            if operand is future:
                yield from _list_ends_inside(position, Site(equation, jaxpr, outer=caller))
    for position, result in enumerate(jaxpr.outvars):
        if result is not future or caller is None:
            continue
        if find_called_program(caller.equation) is None:
            yield caller.name
        else:
            yield from _list_ends(caller.equation.outvars[position], caller.jaxpr, caller.outer)


def _list_ends_inside(position: int, site: Site) -> Iterator[str]:
    """Where a future ends that is the operand at this position of a site's equation."""
    row = registered(site.name)
    if row.waits:
        yield ""
        return
    if row.same:  # as an optimization_barrier
        yield from _list_ends(site.equation.outvars[position], site.jaxpr, site.outer)
        return
    program = find_called_program(site.equation)
    if program is not None:
        jaxpr = getattr(program, "jaxpr", program)
        yield from _list_ends(jaxpr.invars[position], jaxpr, site)
    elif compat.inner_jaxprs(site.equation):
        yield site.name
