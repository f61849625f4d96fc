"""Tensor parallelism of a model that one device could hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardkit._jax import compat
from shardkit._jax.jaxprs import kind_of, mesh_axes
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
        (inner,) = [sub for _, sub in compat.inner_jaxprs(equation)]
        sent: dict[tuple[str | None, str], Any] = {}
        for each in _forward(inner):
            sent |= {(kind_of(each), axis): sent.get((kind_of(each), axis), each) for axis in mesh_axes(each)}
        inputs = list(zip(equation.invars, equation.params["in_specs"], strict=True))
        results = {_form(*pair) for pair in zip(equation.outvars, equation.params["out_specs"], strict=True)}
        held = sum(size_of(x) for x in program.step.jaxpr.invars)
        for axis, size in equation.params["mesh"].shape.items():
            split = [pair for pair in inputs if axis in all_axes(pair[1])]
            returned = all(_form(*pair) in results for pair in split)
            needed = held + sum(size_of(x) for x, _ in split)
            if size == 1 or not split or not returned or needed > program.capacity:
                continue
            if ("all_reduce", axis) in sent and ("ppermute", axis) not in sent:
                yield Finding(
                    "tensor-parallel-that-fits",
                    f"{len(split)} arrays are split over {axis!r} of {size} devices, which sum activations, but all "
                    f"that the program holds, with gradients {needed:,} bytes, fits into memory={program.capacity:,}.",
                    find_first_line(sent["all_reduce", axis], block.context),
                    "Use the axis for dp or fsdp, which send gradients or weights in place of activations, or lower "
                    "`memory` by what the activations need.",
                )


def _form(x: Any, spec: Any) -> tuple[Any, ...]:
    return x.aval.shape, x.aval.dtype, tuple(spec)


def _forward(jaxpr: Any) -> Iterator[Any]:
    """The collectives of a forward pass."""
    for equation in jaxpr.eqns:
        if kind_of(equation) and not compat.in_backward(equation):
            yield equation
        for _, sub in compat.inner_jaxprs(equation):
            yield from _forward(sub)
