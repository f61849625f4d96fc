"""Gradients of a loss's own constants, as of a perturbation that begins with zeros, summed over the batch's devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardkit._arguments.checks import quote
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
    batch_axes = _find_batch_axes(program)
    for site, origins in with_origins(program.step.jaxpr):
        axes = [axis for axis in mesh_axes(site.equation) if axis in batch_axes]
        # Where a constant, equal on all devices, meets the batch, jax casts it to a value that varies. The transpose of
        # that cast is the sum over devices: right for a weight, and wrong for a perturbation of each device's own.
        casts = []
        for origin in origins:
            if registered(origin.name).cast:
                casts.append(origin.equation.invars[0])
        if axes and casts and _is_differentiated_again(site) and _begins_as_constant(casts, states):
            yield Finding(
                "inner-gradient-of-a-constant",
                f"the gradient of a {format_type(casts[0])} that begins as a constant is summed over {quote(axes)}, "
                "and its devices have different examples: each device gets the gradient of all examples.",
                site.source,
                f"Cast the constant before differentiating: sk.vary(constant, {axes[0]!r}); or pass "
                "value_and_grad(loss_fn, local=True), if the loss does not communicate.",
            )


def _find_batch_axes(program: TracedProgram) -> set[str]:
    """The axes that split the batch: the program reduces over them outside of all differentiation."""
    axes: set[str] = set()
    for site in walk(program.step.jaxpr):
        if kind_of(site.equation) in _REDUCTIONS and not _list_transforms(site):
            axes.update(mesh_axes(site.equation))
    return axes


def _begins_as_constant(casts: list[Any], states: Mapping[object, State]) -> bool:
    """Whether none of the cast values depends on an argument, except through gradients.

    For example zeros to which a loop adds gradients: its carry begins as a constant, and only gradients change it.
    """
    for value in casts:
        is_literal = hasattr(value, "val")
        if not is_literal and states.get(value, CONSTANT).by_forward:
            return False
    return True


def _is_differentiated_again(site: Site) -> bool:
    """Whether a collective of a backward pass belongs to the forward pass of another differentiation.

    For example the gradient of a loss that itself takes a gradient, as one of adversarial perturbations does. Of a
    psum in the inner backward pass the transforms are ["jvp", "transpose", "jvp"], the outermost first.
    """
    names = _list_transforms(site)
    if "transpose" not in names:
        return False
    return "jvp" in names[: names.index("transpose")]


def _list_transforms(site: Site) -> list[str]:
    """The differentiations that an equation went through, the outermost first."""
    names = []
    if site.outer is not None:
        names += _list_transforms(site.outer)
    names += compat.transforms(site.equation)
    return names
