"""How the arguments lie on the devices: held whole by all, or placed by nobody."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax

from shardkit._arguments.checks import format_sizes
from shardkit.analysis.compiled_rules.program import CompiledProgram
from shardkit.analysis.hlo.report import format_bytes
from shardkit.analysis.jaxpr.dataflow import format_type
from shardkit.analysis.jaxpr.step import StepLeaf
from shardkit.analysis.rules.rule import Finding
from shardkit.meshes.layout import all_axes

Axes = tuple[tuple[str, int], ...]  # names and sizes


# Worked example: a mesh data=8, model=4, and three leaves of `state`.
#
#     w   f32[4096,4096]  P(None, "model")      a shard [4096,1024] of 16 MiB; "data" divides its rows, and does not
#     mu  f32[4096,4096]  P(None, "model")      split it: the two are one finding, held 8 times, over data=8
#     nu  f32[4096,4096]  P("data", "model")    no axis is left
def copies(program: CompiledProgram) -> Iterator[Finding]:
    """Leaves of which every device holds the same large piece, though a dim could be split."""
    # The layouts of the compiled program, where they are known: the compiler may have chosen some.
    shardings = program.held
    if not shardings:
        shardings = tuple(leaf.sharding for leaf in program.leaves)
    if len(shardings) != len(program.leaves):
        return
    groups: dict[tuple[str, Axes], list[tuple[int, StepLeaf]]] = {}
    for leaf, sharding in zip(program.leaves, shardings, strict=True):
        if not isinstance(sharding, jax.sharding.NamedSharding):
            continue
        shard_shape = sharding.shard_shape(leaf.aval.shape)
        shard_bytes = _count_bytes(shard_shape, leaf.aval.dtype)
        axes = _find_usable_axes(sharding, shard_shape)
        if axes and shard_bytes >= program.large:
            groups.setdefault((leaf.argument, axes), []).append((shard_bytes, leaf))
    for (argument, axes), members in groups.items():
        yield _describe_copies(program, argument, axes, members)


def _find_usable_axes(sharding: jax.sharding.NamedSharding, shard_shape: tuple[int, ...]) -> Axes:
    """The axes that a spec does not name and that would divide a dim of the shard."""
    named = all_axes(sharding.spec)
    axes = []
    for axis, n in sharding.mesh.shape.items():
        # Each axis by itself, because the remedy names one: a shard [12] on data=4, model=6 could be split over either.
        divisible = [size for size in shard_shape if size and size % n == 0]
        if n > 1 and axis not in named and divisible:
            axes.append((axis, n))
    return tuple(axes)


def _describe_copies(
    program: CompiledProgram, argument: str, axes: Axes, members: list[tuple[int, StepLeaf]]
) -> Finding:
    """The finding for leaves of one argument that could be split over the same axes."""
    total = sum(shard_bytes for shard_bytes, _ in members)
    _, largest = max(members, key=lambda member: member[0])
    n = math.prod(size for _, size in axes)
    size = format_bytes(total)
    if len(members) == 1:
        sentence = f"{largest.name}, {size} per device ({format_type(largest)}), is held {n} times"
    else:
        sentence = (
            f"{len(members)} leaves of {argument}, {size} per device, the largest {largest.name} "
            f"({format_type(largest)}), are held {n} times"
        )
    first_axis, _ = axes[0]
    return Finding(
        "replicated-leaf",
        f"{sentence}, over {format_sizes(axes)}.",
        largest.source or program.step.source,
        f"Name {first_axis!r} for a dim in its spec, as sk.fsdp and sk.zero1 do for parameters and moments.",
    )


def unplaced(program: CompiledProgram) -> Iterator[Finding]:
    """Leaves that are passed without a sharding to a program of several devices."""
    if program.devices == 1 or program.passed is None:
        return
    groups: dict[str, list[StepLeaf]] = {}
    for leaf, has_sharding in zip(program.passed, program.placed, strict=True):
        if not has_sharding and _count_bytes(leaf.aval.shape, leaf.aval.dtype) >= program.small:
            groups.setdefault(leaf.argument, []).append(leaf)
    for argument, leaves in groups.items():
        verb = "has"
        if len(leaves) > 1:
            verb = "have"
        mesh = format_sizes(program.mesh.items())
        yield Finding(
            "unplaced-leaf",
            f"{_list_leaves(argument, leaves)} {verb} no sharding on a mesh of {mesh}; the compiler chooses one.",
            leaves[0].source or program.step.source,
            "Place it by jax.device_put with a NamedSharding, or pass in_shardings to jax.jit.",
        )


def _list_leaves(argument: str, leaves: list[StepLeaf]) -> str:
    """As "params['w'] (float32[8,4]), params['b'] (float32[4]) of params"; of more than three leaves the first."""
    descriptions = [f"{leaf.name} ({format_type(leaf)})" for leaf in leaves[:3]]
    text = ", ".join(descriptions)
    if len(leaves) > 3:
        text += f" and {len(leaves) - 3} more"
    if leaves[0].name != argument:
        text += f" of {argument}"
    return text


def _count_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    return math.prod(shape) * int(dtype.itemsize)
