"""Gathered and reduced arrays of which each device uses one piece."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

from shardkit._arguments.checks import quote
from shardkit._jax import compat
from shardkit._jax.primitives import registered
from shardkit.analysis.jaxpr.census import size_of
from shardkit.analysis.jaxpr.dataflow import Block, find_line, find_split_axes
from shardkit.analysis.rules.program import TracedProgram
from shardkit.analysis.rules.rule import Finding, Use, uses


def one_piece(program: TracedProgram) -> Iterator[Finding]:
    """Gathered and reduced arrays of which each device then uses one piece."""
    for block, equation in program.equations:
        kind = registered(equation.primitive.name).kind
        axes = find_split_axes(equation, block.context)
        if kind not in ("all_gather", "all_reduce") or not axes or equation.params.get("axis_index_groups"):
            continue
        # A tuple that is gathered or summed at once has a result for each array, with uses of its own.
        for result in equation.outvars:
            use = _find_only_use(block, result)
            if use is None:
                continue
            if kind == "all_gather":
                yield from _check_gather(program, block, equation, axes, result, use)
            else:
                yield from _check_sum(program, block, equation, axes, result, use)


def _find_only_use(block: Block, result: Any) -> Use | None:
    """The use of a value that has no other, and does not leave the block."""
    first_uses = list(itertools.islice(uses(block, result), 2))  # a second one decides
    if len(first_uses) != 1:
        return None
    return first_uses[0]


def _check_gather(
    program: TracedProgram, block: Block, equation: Any, axes: tuple[str, ...], result: Any, use: Use
) -> Iterator[Finding]:
    """Finds a gather after which each device uses one piece.

    For example 8 devices gather 800 bytes, and each uses only the 100 bytes of its neighbor: 700 bytes are sent to each
    device, and 100 would do.
    """
    n = math.prod(block.context.sizes[axis] for axis in axes)
    size = size_of(result)
    piece = size // n
    row = registered(equation.primitive.name)
    if not row.dim or not _takes_one(use, equation.params[row.dim], n):
        return
    if piece * (n - 2) < program.small:  # all but this device's own piece and the one that it uses
        return
    yield Finding(
        "gather-one-shard-used",
        f"all_gather over {quote(axes)} sends each device {size - piece:,} bytes, and the slice at "
        f"{find_line(use.equation, use.block.context)}, its only use, takes {piece:,}.",
        find_line(equation, block.context),
        "Send only that piece: nothing for a device's own, which it has before; shift for a neighbor's, broadcast for "
        "one device's, all_to_all for a different one on each device.",
    )


def _check_sum(
    program: TracedProgram, block: Block, equation: Any, axes: tuple[str, ...], result: Any, use: Use
) -> Iterator[Finding]:
    """Finds a sum after which each device keeps its own piece, as a reduce_scatter would return it."""
    if registered(equation.primitive.name).reduces != "sum":
        return
    n = math.prod(block.context.sizes[axis] for axis in axes)
    size = size_of(result)
    if size * (n - 1) // n < program.small:
        return
    for dim in range(result.aval.ndim):
        if _takes_different(use, dim, n, axes):
            yield Finding(
                "all-reduce-then-slice",
                f"all_reduce over {quote(axes)} sends {2 * size * (n - 1) // n:,} bytes, and the slice at "
                f"{find_line(use.equation, use.block.context)}, its only use, keeps 1/{n} of dim {dim} on each device.",
                find_line(equation, block.context),
                _choose_remedy(block, equation, dim),
            )
            return


def _choose_remedy(block: Block, equation: Any, dim: int) -> str:
    in_backward = block.context.backward or compat.in_backward(equation)
    if in_backward and not compat.is_recomputed(equation):
        return "Gather without replicated=True: its gradient is then a reduce_scatter, which sends half."
    return f"Use reduce_scatter with dim={dim}, which sends half and leaves each device its own piece."


def _takes_one(use: Use, dim: int, n: int) -> bool:
    """Whether a use slices one of the n pieces along `dim`, at an index known at run time."""
    if use.position or use.name not in ("dynamic_slice", "gather"):
        return False
    operand = use.equation.invars[0]
    if use.name == "gather":
        indices = use.equation.invars[1]
        # jnp.take(x, i, 0) is a gather of one slice, with indices [1]; x[[0, 3]] is one of two slices, with indices
        # [2, 1], and takes more than a piece. x[i] is a dynamic_slice.
        many_slices = math.prod(indices.aval.shape[:-1]) > 1
        if many_slices or use.equation.params["dimension_numbers"].start_index_map != (dim,):
            return False
    return bool(use.equation.params["slice_sizes"][dim] * n == operand.aval.shape[dim])


def _takes_different(use: Use, dim: int, n: int, axes: tuple[str, ...]) -> bool:
    """Whether a use slices 1/n of `dim`, and all other dims whole, at a different index on each device of `axes`."""
    if use.name != "dynamic_slice" or use.position:
        return False
    operand, *starts = use.equation.invars
    shape = list(operand.aval.shape)
    if shape[dim] % n:
        return False
    shape[dim] //= n
    if list(use.equation.params["slice_sizes"]) != shape:
        return False
    # A start as axis_index * rows varies over the axes: each device takes another piece. A start that does not is one
    # piece for all of them.
    return set(axes) <= use.block.state(starts[dim]).varies
