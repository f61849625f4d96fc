"""Gradients of a loss's own constants, as of a perturbation that begins with zeros, summed over the batch's devices."""

from __future__ import annotations

from collections.abc import Iterator

from shardkit._arguments.checks import quoted
from shardkit._jax import compat
from shardkit._jax.jaxprs import Site, kind_of, mesh_axes, walk
from shardkit._jax.primitives import registered
from shardkit.analysis.jaxpr.dataflow import CONSTANT, State, format_type
from shardkit.analysis.jaxpr.explain import with_origins
from shardkit.analysis.rules.program import TracedProgram
from shardkit.analysis.rules.rule import Finding

_REDUCTIONS = ("all_reduce", "reduce_scatter")


def inner_gradients(program: TracedProgram) -> Iterator[Finding]:
    """Inside of what is differentiated again, and over axes over which the program reduces after differentiating.

    A gradient of shared weights that are constants is summed rightly where nothing differentiates it, and along axes of
    tensor parallelism, whose devices have the same examples.
    """
    states: dict[object, State] = {}
    for block in program.blocks:
        states.update(block.states)
    sites = [site for site in walk(program.step.jaxpr) if kind_of(site.equation) in _REDUCTIONS]
    batch = {axis for site in sites if not _transforms(site) for axis in mesh_axes(site.equation)}
    for site, origins in with_origins(program.step.jaxpr):
        axes = [axis for axis in mesh_axes(site.equation) if axis in batch]
        casts = [each.equation.invars[0] for each in origins if registered(each.name).cast]
        made = [states.get(v, CONSTANT) for v in casts if not hasattr(v, "val")]  # a literal is a constant
        # A loop carries what it begins with and the gradients that it adds, neither of which an argument makes.
        if axes and casts and _inner(site) and not any(state.passed for state in made):
            yield Finding(
                "inner-gradient-of-a-constant",
                f"the gradient of a {format_type(casts[0])} that begins as a constant is summed over {quoted(axes)}, "
                "whose devices have other examples: each gets the gradient of all.",
                site.source,
                f"Cast the constant before differentiating: sk.vary(constant, {axes[0]!r}); or pass "
                "value_and_grad(loss_fn, local=True), if the loss does not communicate.",
            )


def _inner(site: Site) -> bool:
    """Whether a collective of a backward pass belongs to the forward pass of another differentiation."""
    names = _transforms(site)
    return "transpose" in names and "jvp" in names[: names.index("transpose")]


def _transforms(site: Site) -> list[str]:
    """The differentiations that an equation went through, the outermost first."""
    own = compat.transforms(site.equation)
    return [*(_transforms(site.outer) if site.outer else []), *own]
