"""The lint's rules on bytes: what is sent or held for nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from shardkit import _compat
from shardkit._check import quoted, sized
from shardkit.analysis.jaxpr.census import KINDS
from shardkit.analysis.jaxpr.dataflow import Block, short, spec_axes, split_axes, where
from shardkit.analysis.jaxpr.rules import Finding, Use, place, uses

# Below this many devices, even tiny pieces are worth splitting where the rest of the tree is split.
_MANY = 16


def one_shard(block: Block, small: int) -> Iterator[Finding]:
    """Gathered and reduced arrays of which each device then takes a single piece."""
    for equation in block.jaxpr.eqns:
        kind, axes = KINDS.get(equation.primitive.name), split_axes(equation, block.context)
        if kind not in ("all_gather", "all_reduce") or not axes or equation.params.get("axis_index_groups"):
            continue
        n = math.prod(block.context.sizes[a] for a in axes)
        for result in equation.outvars:
            found = list(uses(block, result))
            if len(found) != 1 or found[0] is None:
                continue
            whole, use = _bytes(result), found[0]
            cut = where(use.equation, use.block.context)
            if kind == "all_gather":
                dim = equation.params["all_gather_dimension"]
                if _takes_one(use, dim, n) and whole // n * (n - 2) >= small:
                    yield Finding(
                        "gather-one-shard-used",
                        f"all_gather over {quoted(axes)} sends each device {whole - whole // n:,} bytes, and the "
                        f"slice at {cut}, its only use, takes {whole // n:,}.",
                        where(equation, block.context),
                        "Send only that piece: shift for a neighbour's, broadcast for one device's, all_to_all for "
                        "another one each.",
                    )
            elif equation.primitive.name.startswith("psum") and whole * (n - 1) // n >= small:
                dims = [d for d in range(result.aval.ndim) if _takes_own(use, d, n, axes)]
                if dims:
                    yield Finding(
                        "all-reduce-then-slice",
                        f"all_reduce over {quoted(axes)} sends {2 * whole * (n - 1) // n:,} bytes, and the slice at "
                        f"{cut}, its only use, keeps 1/{n} of dim {dims[0]} on each device.",
                        where(equation, block.context),
                        "Gather without replicated=True: its gradient is then a reduce_scatter, which sends half."
                        if _of_the_gradient(block, equation)
                        else f"Use reduce_scatter with dim={dims[0]}, which sends half.",
                    )


def _of_the_gradient(block: Block, equation: Any) -> bool:
    return (block.context.backward or _compat.in_backward(equation)) and not _compat.recomputed(equation)


def _takes_one(use: Use, dim: int, n: int) -> bool:
    """Whether a use is a slice of one of the n pieces along `dim`, at a place known at run time."""
    if use.position or use.name not in ("dynamic_slice", "gather"):
        return False
    size = use.equation.invars[0].aval.shape[dim]
    if use.name == "gather":
        indices = use.equation.invars[1].aval.shape[:-1]
        if math.prod(indices) > 1 or use.equation.params["dimension_numbers"].start_index_map != (dim,):
            return False
    return bool(use.equation.params["slice_sizes"][dim] * n == size)


def _takes_own(use: Use, dim: int, n: int, axes: tuple[str, ...]) -> bool:
    """Whether a use is a slice of 1/n of `dim` and of all else, at another place on each device of `axes`."""
    if use.name != "dynamic_slice" or use.position:
        return False
    shape, sizes = use.equation.invars[0].aval.shape, use.equation.params["slice_sizes"]
    if sizes[dim] * n != shape[dim] or any(sizes[d] != shape[d] for d in range(len(shape)) if d != dim):
        return False
    return set(axes) <= use.block.state(use.equation.invars[1 + dim]).varies


def held_whole(block: Block, large: int) -> Iterator[Finding]:
    """Large inputs of a shard_map whose spec names no axis: leaves that nobody annotated."""
    for equation in block.jaxpr.eqns:
        if equation.primitive.name != "shard_map" or block.context.mapped:
            continue
        sizes = {a: equation.params["mesh"].shape[a] for a in _compat.manual_axes(equation)}
        if math.prod(sizes.values()) == 1:
            continue
        (inner,) = [sub for _, sub in _compat.inner_jaxprs(equation)]
        names = inner.debug_info.arg_names or ()
        for number, (operand, spec) in enumerate(zip(equation.invars, equation.params["in_specs"], strict=True)):
            # Differentiation hands residuals on to a second shard_map: what is held is held by the first.
            if spec_axes(spec) or _bytes(operand) < large or _compat.in_backward(equation):
                continue
            name = names[number] if number < len(names) and names[number] else f"argument {number}"
            closed = any(operand is v for v in block.jaxpr.constvars)
            yield Finding(
                "large-replicated",
                f"{name}, {'a closed-over constant' if closed else 'an input'} of {_bytes(operand):,} bytes "
                f"({short(operand)}), is held whole by each device of {sized(sizes.items())}.",
                place(equation, block.context),
                "Name a mesh axis in its spec, for example through specs_from_rules, or raise `large` if it is meant.",
            )


def tiny(block: Block, small: int) -> Iterator[Finding]:
    """Arrays that many devices hold in pieces of a few bytes: a message costs the same whatever its size."""
    for equation in block.jaxpr.eqns:
        kind, axes = KINDS.get(equation.primitive.name), split_axes(equation, block.context)
        n = math.prod(block.context.sizes[a] for a in axes)
        if kind not in ("all_gather", "reduce_scatter") or n < _MANY:
            continue
        piece = equation.invars[0] if kind == "all_gather" else equation.outvars[0]
        split = kind == "reduce_scatter" or _is_input(block, piece)
        if split and piece.aval.ndim and _bytes(piece) < small and _bytes(piece) * n > 0:
            yield Finding(
                "tiny-shards",
                f"{kind} over {quoted(axes)} of {n} devices moves pieces of {_bytes(piece):,} bytes "
                f"({short(piece)}); {small:,} bytes are not worth a message.",
                where(equation, block.context),
                "Keep leaves of this size whole, or split them over fewer devices.",
            )


def _is_input(block: Block, variable: Any) -> bool:
    """Whether a value is an input of a shard_map, perhaps cast: state that is held in pieces."""
    if block.owner is None:
        return False
    made = {out: equation for equation in block.jaxpr.eqns for out in equation.outvars}
    while variable in made and made[variable].primitive.name in ("pvary", "convert_element_type"):
        variable = made[variable].invars[0]
    return any(variable is v for v in block.jaxpr.invars)


def _bytes(variable: Any) -> int:
    aval = variable.aval
    return int(math.prod(aval.shape) * aval.dtype.itemsize)
