"""Tensor parallelism of a model that one device could hold."""

from __future__ import annotations

from collections.abc import Iterator
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
        inputs = list(zip(equation.invars, equation.params["in_specs"], strict=True))
        results = set()
        for variable, spec in zip(equation.outvars, equation.params["out_specs"], strict=True):
            results.add(_form(variable, spec))
        state_bytes = sum(size_of(x) for x in program.step.jaxpr.invars)
        for axis, size in equation.params["mesh"].shape.items():
            split = [(variable, spec) for variable, spec in inputs if axis in all_axes(spec)]
            are_returned = all(_form(variable, spec) in results for variable, spec in split)
            needed = state_bytes + sum(size_of(variable) for variable, _ in split)
            if size == 1 or not split or not are_returned or needed > program.capacity:
                continue
            if ("all_reduce", axis) in collectives and ("ppermute", axis) not in collectives:
                yield Finding(
                    "tensor-parallel-that-fits",
                    f"{len(split)} arrays are split over {axis!r} of {size} devices, which sum activations, but all "
                    f"that the program holds, with gradients {needed:,} bytes, fits into memory={program.capacity:,}.",
                    find_first_line(collectives["all_reduce", axis], block.context),
                    "Use the axis for dp or fsdp, which send gradients or weights in place of activations, or lower "
                    "`memory` by what the activations need.",
                )


def _form(x: Any, spec: Any) -> tuple[Any, ...]:
    return x.aval.shape, x.aval.dtype, tuple(spec)


def _find_forward_collectives(jaxpr: Any) -> dict[tuple[str, str], Any]:
    """The first collective of a forward pass of each kind over each axis."""
    collectives: dict[tuple[str, str], Any] = {}
    for site in walk(jaxpr):
        kind = kind_of(site.equation)
        if kind is not None and not compat.in_backward(site.equation):
            for axis in mesh_axes(site.equation):
                collectives.setdefault((kind, axis), site.equation)
    return collectives
