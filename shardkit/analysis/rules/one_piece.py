"""Gathered and reduced arrays of which each device uses one piece."""

from __future__ import annotations

import math
from collections.abc import Iterator

from shardkit._arguments.checks import quoted
from shardkit._jax import compat
from shardkit._jax.primitives import registered
from shardkit.analysis.jaxpr.census import size_of
from shardkit.analysis.jaxpr.dataflow import find_line, find_split_axes
from shardkit.analysis.rules.program import TracedProgram
from shardkit.analysis.rules.rule import Finding, Use, uses


def one_piece(program: TracedProgram) -> Iterator[Finding]:
    """Gathered and reduced arrays of which each device then uses one piece."""
    for block, equation in program.equations:
        row, axes = registered(equation.primitive.name), find_split_axes(equation, block.context)
        if row.kind not in ("all_gather", "all_reduce") or not axes or equation.params.get("axis_index_groups"):
            continue
        n = math.prod(block.context.sizes[a] for a in axes)
        for result in equation.outvars:
            found = list(uses(block, result))
            if len(found) != 1 or found[0] is None:
                continue
            whole, use = size_of(result), found[0]
            cut = find_line(use.equation, use.block.context)
            if row.kind == "all_gather" and row.dim:
                dim = equation.params[row.dim]
                if _takes_one(use, dim, n) and whole // n * (n - 2) >= program.small:
                    yield Finding(
                        "gather-one-shard-used",
                        f"all_gather over {quoted(axes)} sends each device {whole - whole // n:,} bytes, and the "
                        f"slice at {cut}, its only use, takes {whole // n:,}.",
                        find_line(equation, block.context),
                        "Send only that piece: shift for a neighbor's, broadcast for one device's, all_to_all for "
                        "a different one on each device.",
                    )
            elif row.reduces == "sum" and whole * (n - 1) // n >= program.small:
                dims = [d for d in range(result.aval.ndim) if _takes_own(use, d, n, axes)]
                if dims:
                    yield Finding(
                        "all-reduce-then-slice",
                        f"all_reduce over {quoted(axes)} sends {2 * whole * (n - 1) // n:,} bytes, and the slice at "
                        f"{cut}, its only use, keeps 1/{n} of dim {dims[0]} on each device.",
                        find_line(equation, block.context),
                        "Gather without replicated=True: its gradient is then a reduce_scatter, which sends half."
                        if (block.context.backward or compat.in_backward(equation))
                        and not compat.is_recomputed(equation)
                        else f"Use reduce_scatter with dim={dims[0]}, which sends half.",
                    )


def _takes_one(use: Use, dim: int, n: int) -> bool:
    """Whether a use slices one of the n pieces along `dim`, at an index known at run time."""
    if use.position or use.name not in ("dynamic_slice", "gather"):
        return False
    size = use.equation.invars[0].aval.shape[dim]
    if use.name == "gather":
        indices = use.equation.invars[1].aval.shape[:-1]
        if math.prod(indices) > 1 or use.equation.params["dimension_numbers"].start_index_map != (dim,):
            return False
    return bool(use.equation.params["slice_sizes"][dim] * n == size)


def _takes_own(use: Use, dim: int, n: int, axes: tuple[str, ...]) -> bool:
    """Whether a use slices 1/n of `dim`, and all other dims whole, at a different index on each device of `axes`."""
    if use.name != "dynamic_slice" or use.position:
        return False
    shape, sizes = use.equation.invars[0].aval.shape, use.equation.params["slice_sizes"]
    if sizes[dim] * n != shape[dim] or any(sizes[d] != shape[d] for d in range(len(shape)) if d != dim):
        return False
    return set(axes) <= use.block.state(use.equation.invars[1 + dim]).varies
