"""Tensor parallelism of a model that one device could hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from shardkit._jax import compat
from shardkit._jax.jaxprs import kind_of, mesh_axes, walk
from shardkit.analysis.jaxpr.census import size_of
from shardkit.analysis.rules.program import TracedProgram
from shardkit.analysis.rules.rule import Finding, find_first_line
from shardkit.meshes.layout import all_axes


def fitting(program: TracedProgram) -> Iterator[Finding]:
    """Axes over which weights are split and activations summed, where all that the program holds fits on a device.

    An axis that also splits what is not returned, as a batch is, belongs to data parallelism; one with ppermutes to a
    pipeline or a ring.
    """
    if program.capacity is None:
        return
    for block, equation in program.equations:
        if equation.primitive.name != "shard_map" or block.context.mapped or compat.in_backward(equation):
            continue
        collectives = _find_forward_collectives(equation.params["jaxpr"])
        for axis, size in equation.params["mesh"].shape.items():
            # Tensor parallelism sums activations in the forward pass; a pipeline or a ring passes them on.
            sums_activations = ("all_reduce", axis) in collectives and ("ppermute", axis) not in collectives
            if size == 1 or not sums_activations:
                continue
            weights = _find_weights(equation, axis)
            # The state, and the gradients of the pieces that are split.
            needed = _add_bytes(program.step.jaxpr.invars) + _add_bytes(weights)
            if weights and needed <= program.capacity:
                yield Finding(
                    "tensor-parallel-that-fits",
                    f"{len(weights)} arrays are split over {axis!r} of {size} devices, which sum activations, but all "
                    f"that the program holds, with gradients {needed:,} bytes, fits into memory={program.capacity:,}.",
                    find_first_line(collectives["all_reduce", axis], block.context),
                    "Use the axis for dp or fsdp, which send gradients or weights in place of activations, or lower "
                    "`memory` by the bytes of the activations.",
                )


def _find_weights(equation: Any, axis: str) -> list[Any]:
    """The inputs of a shard_map that are split over an axis, if it returns all of them; else none.

    A step returns its new weights, in the layout of the old ones, and not its batch. So an axis that splits the batch
    too has an input that is not returned: its sums belong to data parallelism.
    """
    returned = set()
    for variable, spec in zip(equation.outvars, equation.params["out_specs"], strict=True):
        returned.add(_layout_of(variable, spec))
    weights = []
    for variable, spec in zip(equation.invars, equation.params["in_specs"], strict=True):
        if axis not in all_axes(spec):
            continue
        if _layout_of(variable, spec) not in returned:
            return []
        weights.append(variable)
    return weights


def _add_bytes(variables: Iterable[Any]) -> int:
    return sum(size_of(variable) for variable in variables)


def _layout_of(variable: Any, spec: Any) -> tuple[Any, ...]:
    return variable.aval.shape, variable.aval.dtype, tuple(spec)


def _find_forward_collectives(jaxpr: Any) -> dict[tuple[str, str], Any]:
    """The first collective of a forward pass of each kind over each axis."""
    collectives: dict[tuple[str, str], Any] = {}
    for site in walk(jaxpr):
        kind = kind_of(site.equation)
        if kind is not None and not compat.in_backward(site.equation):
            for axis in mesh_axes(site.equation):
                collectives.setdefault((kind, axis), site.equation)
    return collectives
