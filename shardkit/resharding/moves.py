"""How one array gets from one layout to another: the move of each leaf, as data and as a program.

The program runs the steps of a redistribution inside shard_map.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardkit.collectives import all_gather, all_to_all, vary
from shardkit.collectives.permute import permute
from shardkit.meshes.layout import canonical, check_spec, local_shape, local_shape_of, spec_axes, table
from shardkit.on_device.cuts import own_part
from shardkit.plans.storage import Held, in_rows, is_padded, padded_shape, stored_array
from shardkit.resharding.redistribution import (
    Axes,
    DimAxes,
    MoveStep,
    Redistribution,
    local_of,
    permutation,
    redistribution,
)


class Leg(NamedTuple):
    """One part of a move: collectives between two layouts that cut the dims at the same places."""

    shape: tuple[int, ...]  # the global shape as the steps see it, padding included
    source: PartitionSpec  # the spec before
    target: PartitionSpec  # the spec after
    found: Redistribution  # the steps, as a `Redistribution`; its sizes are in elements
    cut: tuple[int, ...]  # the shape that is stored afterwards: padding that is not needed any more is cut off


class Move(NamedTuple):
    """How one leaf gets from one layout to another. Bytes are per device."""

    path: str  # the leaf
    dtype: Any  # its dtype
    # what is done, in order: one leg, or two where source and target cut a dim at different places
    legs: tuple[Leg, ...]
    least: int  # bytes that some device must receive: the part of its new shard that it does not hold

    @property
    def source(self) -> PartitionSpec:
        """Its spec before."""
        return self.legs[0].source

    @property
    def target(self) -> PartitionSpec:
        """Its spec after."""
        return self.legs[-1].target

    @property
    def stays(self) -> bool:
        """Whether nothing is done."""
        return self.source == self.target and all(leg.shape == leg.cut and not leg.found.steps for leg in self.legs)

    @property
    def sent(self) -> int:
        """Bytes that each device sends."""
        return sum(leg.found.sent for leg in self.legs) * self.dtype.itemsize

    @property
    def peak(self) -> int:
        """Bytes of the two largest consecutive shards."""
        return max(leg.found.peak for leg in self.legs) * self.dtype.itemsize

    @property
    def told(self) -> str:
        """The steps in words."""
        return "; ".join(step.told(leg.found.dims) for leg in self.legs for step in leg.found.steps) or "none"


class Moves(NamedTuple):
    """The steps of `reshard`, leaf by leaf; `print` them."""

    leaves: tuple[Move, ...]

    @property
    def sent(self) -> int:
        """Bytes that each device sends."""
        return sum(each.sent for each in self.leaves)

    @property
    def least(self) -> int:
        """Bytes that some device must receive, summed over the leaves."""
        return sum(each.least for each in self.leaves)

    def __str__(self) -> str:
        rows = [("leaf", "from", "to", "steps", "sent/device", "must receive", "two shards")]
        for each in self.leaves:
            sizes = (f"{each.sent:,}", f"{each.least:,}", f"{each.peak:,}")
            rows.append((each.path, str(each.source), str(each.target), each.told, *sizes))
        return f"{table(rows)}\n{self.sent:,} bytes sent by each device; some device must receive {self.least:,}"


def move_of(where: str, path: str, x: Any, before: tuple[Held, bool], after: tuple[Held, bool], mesh: Any) -> Move:
    """The steps of one leaf; the padding of either layout counts."""
    if before[0].rows != after[0].rows:
        raise ValueError(
            f"{where} is stored in the order of the stages of a pipeline, which source and target do not share. Pass "
            "unpadded(...) of it to the init of the other plan."
        )
    original = in_rows(tuple(x.shape), before[0].rows)
    shapes = []
    for held, by_plan in (before, after):
        check_spec(where, held.spec, mesh, len(original))
        if not by_plan and not is_padded(x):
            local_shape_of(where, original, held.spec, mesh)
        shapes.append(padded_shape(original, held.spec, mesh))
    stored = tuple(jnp.shape(stored_array(x)))
    if stored != shapes[0]:
        raise ValueError(
            f"{where} must be stored as source says, with the shape {shapes[0]}; got {stored}. Pass the plan that made "
            "it as source."
        )
    first, last = canonical(before[0].spec), canonical(after[0].spec)
    legs = _legs(original, (first, shapes[0]), (last, shapes[1]), mesh)
    dtype = jnp.result_type(stored_array(x))
    if len(legs) == 1:
        return Move(path, dtype, legs, legs[0].found.least * dtype.itemsize)
    return Move(path, dtype, legs, _least(original, (first, shapes[0]), (last, shapes[1]), mesh) * dtype.itemsize)


Stored = tuple[PartitionSpec, tuple[int, ...]]  # a spec, and the shape that is stored, padding included


def _legs(original: tuple[int, ...], before: Stored, after: Stored, mesh: Any) -> tuple[Leg, ...]:
    """The legs that send least.

    Padding changes where a dim is cut into shards: 8 columns over 6 devices are 2 each, over 2 devices 4 each, and the
    third device's do not begin where a shard of the other layout does. A redistribution moves whole shards, so such a
    dim is first made whole, by a gather or by moving its axes to another dim.
    """
    source, target = (_split(spec, len(original)) for spec, _ in (before, after))
    apart = []
    for dim, (a, b) in enumerate(zip(before[1], after[1], strict=True)):
        if a != b and _ways(source[dim], mesh) > 1 and _ways(target[dim], mesh) > 1:
            apart.append(dim)
    if not apart:
        return (_leg(before, after, mesh),)
    whole = tuple(original[dim] if dim in apart else size for dim, size in enumerate(before[1]))
    best: tuple[Leg, ...] = ()
    others = [None, *(dim for dim in range(len(original)) if dim not in apart)]
    for places in itertools.product(others, repeat=len(apart)):
        split = [() if dim in apart else axes for dim, axes in enumerate(source)]
        for dim, place in zip(apart, places, strict=True):
            if place is not None:
                split[place] = (*split[place], *source[dim])
        if any(size % _ways(axes, mesh) for size, axes in zip(whole, split, strict=True)):
            continue
        between = canonical(PartitionSpec(*split)), whole
        legs = _leg(before, between, mesh), _leg(between, after, mesh)
        if not best or sum(leg.found.sent for leg in legs) < sum(leg.found.sent for leg in best):
            best = legs
    return best


def _leg(before: Stored, after: Stored, mesh: Any) -> Leg:
    shape = tuple(max(sizes) for sizes in zip(before[1], after[1], strict=True))
    source, target = (_split(spec, len(shape)) for spec, _ in (before, after))
    found = redistribution(shape, source, target, tuple(mesh.shape.items()))
    return Leg(shape, before[0], after[0], found, after[1])


def _least(original: tuple[int, ...], before: Stored, after: Stored, mesh: Any) -> int:
    """The most elements that a device must receive, where the two layouts cut a dim at different places."""
    most = 0
    for place in itertools.product(*map(range, mesh.shape.values())):
        at = dict(zip(mesh.shape, place, strict=True))
        held, kept = 1, 1
        for dim, size in enumerate(original):
            (a, b), (c, d) = (_range(dim, stored, size, at, mesh) for stored in (before, after))
            held *= d - c
            kept *= max(0, min(b, d) - max(a, c))
        most = max(most, held - kept)
    return most


def _range(dim: int, stored: Stored, size: int, at: Mapping[str, int], mesh: Any) -> tuple[int, int]:
    """The part of a dim, without padding, that the device at a place of the mesh holds."""
    axes = _split(stored[0], dim + 1)[dim]
    index = 0
    for axis in axes:
        index = index * mesh.shape[axis] + at[axis]
    length = stored[1][dim] // _ways(axes, mesh)
    return min(size, index * length), min(size, (index + 1) * length)


def _ways(axes: Axes, mesh: Any) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _split(spec: PartitionSpec, ndim: int) -> DimAxes:
    axes = spec_axes(spec)
    return (*axes, *[()] * (ndim - len(axes)))


@lru_cache(maxsize=1024)
def program(mesh: Any, leg: Leg, piece: int) -> Any:
    """The jitted program of one leg, in pieces of so many elements; leaves that are alike share it."""
    parts = dict(leg.found.parts)

    def spec(spec: PartitionSpec) -> PartitionSpec:  # an axis of size 1 would have to be gathered to be left
        dims = [[axis for axis in axes if mesh.shape[axis] > 1] for axes in spec_axes(spec)]
        return PartitionSpec(*(tuple(part for axis in axes for part in parts_of(axis, parts)) for axes in dims))

    # Padding comes and goes on the device: a dim whose padding changes is whole before this leg or after it, and so
    # the zeros are at the end of what one device holds. Where both layouts split it, they would be in the middle.
    def device(x: jax.Array) -> jax.Array:
        whole = local_shape(leg.shape, leg.source, mesh)
        x = jnp.pad(x, [(0, size - held) for size, held in zip(whole, x.shape, strict=True)])
        varying = tuple(axis for axes in spec_axes(spec(leg.target)) for axis in axes)
        x = run_steps(x, leg.found, varying, piece)
        x = x.reshape(local_shape(leg.shape, leg.target, mesh))
        return x[tuple(slice(size) for size in local_shape(leg.cut, leg.target, mesh))]

    on_mesh = jax.shard_map(device, mesh=mesh_apart(mesh, parts), in_specs=spec(leg.source), out_specs=spec(leg.target))
    return jax.jit(on_mesh, out_shardings=NamedSharding(mesh, leg.target))


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


def _slice(x: jax.Array, step: MoveStep, sizes: Mapping[str, int]) -> jax.Array:
    for dim, axes in enumerate(step.arriving()):
        x = own_part(x, axes, dim=dim) if axes else x
    return x


def _gather(x: jax.Array, step: MoveStep, sizes: Mapping[str, int]) -> jax.Array:
    for dim, axes in enumerate(step.leaving()):
        x = all_gather(x, axes, dim=dim, replicated=True) if axes else x
    return x


def _permute(x: jax.Array, step: MoveStep, sizes: Mapping[str, int]) -> jax.Array:
    return permute(x, *permutation(step, sizes))


def _exchange(x: jax.Array, step: MoveStep, sizes: Mapping[str, int]) -> jax.Array:
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
