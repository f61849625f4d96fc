"""How the arguments lie on the devices: held whole by all, or placed by nobody."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax

from shardkit._arguments.checks import sized
from shardkit.analysis.compiled_rules.program import CompiledProgram
from shardkit.analysis.hlo.report import size
from shardkit.analysis.jaxpr.dataflow import short
from shardkit.analysis.jaxpr.step import StepLeaf
from shardkit.analysis.rules.rule import Finding
from shardkit.meshes.layout import all_axes


def copies(program: CompiledProgram) -> Iterator[Finding]:
    """Leaves of which every device holds the same large piece, though a dim could be split."""
    held = program.held or tuple(leaf.sharding for leaf in program.leaves)
    found: dict[tuple[str, tuple[tuple[str, int], ...]], list[tuple[int, StepLeaf]]] = {}
    if len(held) != len(program.leaves):
        return
    for leaf, sharding in zip(program.leaves, held, strict=True):
        if isinstance(sharding, jax.sharding.NamedSharding):
            piece, named = sharding.shard_shape(leaf.aval.shape), all_axes(sharding.spec)
            # The axes that its spec does not name and that divide a dim of a device's piece.
            others = [(axis, n) for axis, n in sharding.mesh.shape.items() if axis not in named and n > 1]
            free = tuple((axis, n) for axis, n in others if any(dim % n == 0 and dim for dim in piece))
            bytes_held = _bytes(piece, leaf.aval.dtype)
            if free and bytes_held >= program.large:
                found.setdefault((leaf.argument, free), []).append((bytes_held, leaf))
    for (argument, axes), leaves in found.items():
        total, (_, largest) = sum(held for held, _ in leaves), max(leaves, key=lambda pair: pair[0])
        n = math.prod(size for _, size in axes)
        several = f"{len(leaves)} leaves of {argument}" if len(leaves) > 1 else largest.name
        example = f", the largest {largest.name}" if len(leaves) > 1 else ""
        yield Finding(
            "replicated-leaf",
            f"{several}, {size(total)} per device{example} ({short(largest)}), {'are' if len(leaves) > 1 else 'is'} "
            f"held {n} times, over {sized(axes)}.",
            largest.source or program.step.source,
            f"Name {axes[0][0]!r} for a dim in its spec, as sk.fsdp and sk.zero1 do for parameters and moments.",
        )


def unplaced(program: CompiledProgram) -> Iterator[Finding]:
    """Leaves that are passed without a sharding to a program of several devices."""
    if program.devices == 1 or program.passed is None:
        return
    found: dict[str, list[StepLeaf]] = {}
    for leaf, placed in zip(program.passed, program.placed, strict=True):
        if not placed and _bytes(leaf.aval.shape, leaf.aval.dtype) >= program.small:
            found.setdefault(leaf.argument, []).append(leaf)
    for argument, without in found.items():
        names = ", ".join(f"{leaf.name} ({short(leaf)})" for leaf in without[:3])
        more = f" and {len(without) - 3} more" if len(without) > 3 else ""
        whose = f" of {argument}" if without[0].name != argument else ""
        yield Finding(
            "unplaced-leaf",
            f"{names}{more}{whose} {'have' if len(without) > 1 else 'has'} no sharding on a mesh of "
            f"{sized(program.mesh.items())}; the compiler chooses one.",
            without[0].source or program.step.source,
            "Place it by jax.device_put with a NamedSharding, or pass in_shardings to jax.jit.",
        )


def _bytes(shape: tuple[int, ...], dtype: Any) -> int:
    return math.prod(shape) * int(dtype.itemsize)
