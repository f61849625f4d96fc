"""The steps of a redistribution, inside shard_map."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh

from shardkit.collectives import all_gather, all_to_all, vary
from shardkit.collectives.permute import permuted
from shardkit.on_device.cuts import own_part
from shardkit.resharding.redistribution import Redistribution, Step, permutation
from shardkit.resharding.views import local_of


def run_steps(x: jax.Array, found: Redistribution, varying: tuple[str, ...], piece: int) -> jax.Array:
    """All steps, for pieces along a dim that no step touches where there is more than one piece's worth of elements."""
    sizes = dict(found.axes)
    held = max(found.held)
    x = x.reshape(local_of(found.shape, found.source, sizes))
    if not x.size or not found.steps:  # jax refuses to send empty arrays
        last = found.steps[-1].after if found.steps else found.source
        return vary(x.reshape(local_of(found.shape, last, sizes)), varying)
    dim = max(found.untouched, key=lambda dim: found.shape[dim], default=None)

    def steps(x: jax.Array) -> jax.Array:
        for step in found.steps:
            x = _STEPS[step.kind](x, step, sizes)
        return x

    if dim is None or held <= piece:
        return steps(x)
    length = x.shape[dim]
    count = next(n for n in range(1, length + 1) if length % n == 0 and (held <= piece * n or n == length))
    rows = length // count

    def move(i: jax.Array, out: jax.Array) -> jax.Array:
        moved = steps(lax.dynamic_slice_in_dim(x, i * rows, rows, dim))
        return lax.dynamic_update_slice_in_dim(out, moved, i * rows, dim)

    out = jnp.zeros(local_of(found.shape, found.steps[-1].after, sizes), x.dtype)
    return lax.fori_loop(0, count, move, vary(out, varying))


def _slice(x: jax.Array, step: Step, sizes: Mapping[str, int]) -> jax.Array:
    for dim, axes in enumerate(step.arriving()):
        x = own_part(x, axes, dim=dim) if axes else x
    return x


def _gather(x: jax.Array, step: Step, sizes: Mapping[str, int]) -> jax.Array:
    for dim, axes in enumerate(step.leaving()):
        x = all_gather(x, axes, dim=dim, replicated=True) if axes else x
    return x


def _permute(x: jax.Array, step: Step, sizes: Mapping[str, int]) -> jax.Array:
    return permuted(x, *permutation(step, sizes))


def _exchange(x: jax.Array, step: Step, sizes: Mapping[str, int]) -> jax.Array:
    """One all_to_all for all axes that move: a dim in front counts the devices to send to, then those that sent."""
    goes, came = step.arriving(), step.leaving()
    axes = tuple(axis for each in goes for axis in each)
    counts = tuple(sizes[axis] for axis in axes)

    # Each dim as (the devices along its arriving axes, what one of them gets).
    shape: list[int] = []
    first: list[int] = []
    last: list[int] = []
    for size, each in zip(x.shape, goes, strict=True):
        ways = [sizes[axis] for axis in each]
        first += range(len(shape), len(shape) + len(ways))
        last.append(len(shape) + len(ways))
        shape += [*ways, size // math.prod(ways)]
    x = x.reshape(shape).transpose(*first, *last)
    rest = x.shape[len(axes) :]
    x = all_to_all(x.reshape(-1, *rest), axes, split_dim=0, concat_dim=0).reshape(*counts, *rest)

    order = [i for dim, each in enumerate(came) for i in (*map(axes.index, each), len(axes) + dim)]
    sizes_after = [size * math.prod(sizes[a] for a in each) for size, each in zip(rest, came, strict=True)]
    return x.transpose(order).reshape(sizes_after)


_STEPS = {"slice": _slice, "all_to_all": _exchange, "ppermute": _permute, "all_gather": _gather}


def parts_of(axis: str, parts: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """The names of the parts of an axis; of one that is whole its own."""
    return tuple(f"{axis}.{part}" for part in range(len(parts[axis]))) if axis in parts else (axis,)


def mesh_apart(mesh: Any, parts: Mapping[str, tuple[int, ...]]) -> Any:
    """The same devices in the same order, with some axes split into parts."""
    if not parts:
        return mesh
    names = tuple(part for axis in mesh.axis_names for part in parts_of(axis, parts))
    sizes = tuple(size for axis in mesh.axis_names for size in parts.get(axis, (mesh.shape[axis],)))
    types = (AxisType.Auto,) * len(names)
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(sizes, names, axis_types=types)
    return Mesh(mesh.devices.reshape(sizes), names, axis_types=types)
