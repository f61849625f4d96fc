"""Collectives on whose result no result of the program depends."""

from __future__ import annotations

from collections.abc import Iterator

from shardkit._arguments.checks import format_count, quote
from shardkit._jax import compat
from shardkit._jax.jaxprs import Site, kind_of, mesh_axes, user_line, walk
from shardkit.analysis.jaxpr.census import size_of
from shardkit.analysis.jaxpr.dataflow import format_type
from shardkit.analysis.jaxpr.liveness import Liveness
from shardkit.analysis.rules.program import TracedProgram
from shardkit.analysis.rules.rule import Finding

_NAME = "unread-message"


def unread(program: TracedProgram) -> Iterator[Finding]:
    """Collectives whose result is thrown away, and messages that reach no result of the program.

    The compiler leaves most of them out, so that the bytes are no loss. They show what the program does not do: the sum
    that somebody believes to have taken, as `all_reduce(gradients)` without an assignment.
    """
    liveness = Liveness(program.step.jaxpr)
    # A collective that is started and never awaited has a rule of its own.
    never_awaited = [future.site for future in program.futures if not future.ends]
    lines: set[tuple[str, str]] = set()  # a kernel may send many messages, and all of them for one line
    for site in walk(program.step.jaxpr):
        kind = kind_of(site.equation)
        if kind is None or liveness.reads(site.equation) or site in never_awaited:
            continue
        # The backward pass of a leaf that nobody trains, and what jax.checkpoint would compute once more for it.
        if site.backward or site.recomputed:
            continue
        # Of the plan or the schedule, not of a user's line: a plan gathers a leaf that the loss does not read, and in
        # the last tick of a pipeline a message has no receiver. jit leaves both out.
        if not _is_of_user(site):
            continue
        axes = [axis for axis in mesh_axes(site.equation) if site.sizes.get(axis, 1) > 1]
        if not axes or (kind, site.source) in lines:
            continue
        subject = f"{kind} over {quote(axes)} of {format_type(site.equation.invars[0])}"
        finding = _check_site(program, liveness, site, subject)
        if finding is not None:
            lines.add((kind, site.source))
            yield finding


def _check_site(program: TracedProgram, liveness: Liveness, site: Site, subject: str) -> Finding | None:
    """The finding for a collective that no result depends on, if it was meant to be read."""
    operand = site.equation.invars[0]
    # jax.grad computes a loss and drops it, with the sum that ends it; of one under jax.checkpoint, which computes it
    # once more, it drops all. So there a result must have no use at all.
    is_differentiated = _is_differentiated(site)
    if liveness.uses(operand) and (_is_unassigned(site) or not is_differentiated):
        return Finding(
            _NAME,
            f"no result of the program depends on {subject}, and the program goes on with the operand.",
            site.source,
            "Assign the result, since a collective leaves its operand as it was; or leave the collective out.",
        )
    # A few bytes are no loss: statistics that one caller of a function reads and another one drops.
    size = sum(size_of(variable) for variable in site.equation.invars)
    if is_differentiated or size < program.small:
        return None
    times = ""
    if site.times is not None and site.times != 1:
        times = f", {format_count(site.times, 'time')}"
    return Finding(
        _NAME,
        f"no result of the program depends on {subject} ({size:,} bytes{times}).",
        site.source,
        "Return what it is for, or leave it out.",
    )


def _is_differentiated(site: Site) -> bool:
    """Whether a collective, or what it is in, went through differentiation."""
    if compat.in_jvp(site.equation):
        return True
    return site.outer is not None and _is_differentiated(site.outer)


def _is_unassigned(site: Site) -> bool:
    """Whether nothing takes the results of a collective: no other equation beside it, and no caller."""
    atoms = list(site.jaxpr.outvars)
    for equation in site.jaxpr.eqns:
        atoms += equation.invars
    for result in site.equation.outvars:
        if any(result is atom for atom in atoms):
            return False
    return True


def _is_of_user(site: Site) -> bool:
    """Whether a user's line led to a collective inside of its shard_map; the step around it may be called by any."""
    if user_line(site.equation):
        return True
    return site.outer is not None and site.outer.name != "shard_map" and _is_of_user(site.outer)
