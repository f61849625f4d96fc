"""How one array gets from one layout to another: the move of each leaf, as data and as a program.

The program runs the steps of a redistribution inside shard_map.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardkit.collectives import all_gather, all_to_all, vary
from shardkit.collectives.permute import permute
from shardkit.meshes.layout import canonical, check_spec, local_shape, local_shape_of, spec_axes, table
from shardkit.on_device.cuts import take_part
from shardkit.plans.storage import Storage, is_padded, pad_to, padded_shape, stored_array, stored_shape
from shardkit.resharding.redistribution import MoveStep, Redistribution, find_permutation, find_redistribution
from shardkit.resharding.views import (
    Axes,
    DimAxes,
    Parts,
    Sizes,
    count_parts,
    divide_shape,
    divides,
    find_joint_index,
    name_parts,
)


class Leg(NamedTuple):
    """One part of a move: collectives between two layouts that cut the dims at the same places."""

    shape: tuple[int, ...]  # the global shape as the steps see it, padding included
    source: PartitionSpec  # the spec before
    target: PartitionSpec  # the spec after
    route: Redistribution  # the steps; its sizes are in elements
    stored: tuple[int, ...]  # the shape that is stored afterwards, without padding that the target does not need


class Move(NamedTuple):
    """How one leaf gets from one layout to another. Bytes are per device."""

    path: str  # the leaf
    dtype: Any  # its dtype
    # the legs in order: one, or two if source and target cut a dim at different places
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
        if self.source != self.target:
            return False
        for leg in self.legs:
            if leg.route.steps or leg.shape != leg.stored:
                return False
        return True

    @property
    def sent(self) -> int:
        """Bytes that each device sends."""
        return _count_sent(self.legs) * self.dtype.itemsize

    @property
    def peak(self) -> int:
        """Bytes of the two largest consecutive shards."""
        return max(leg.route.peak for leg in self.legs) * self.dtype.itemsize

    @property
    def words(self) -> str:
        """The steps in words."""
        steps = []
        for leg in self.legs:
            for step in leg.route.steps:
                steps.append(step.describe(leg.route.dims))
        return "; ".join(steps) or "none"


class Moves(NamedTuple):
    """The steps of `reshard`, leaf by leaf; `print` them."""

    leaves: tuple[Move, ...]

    @property
    def sent(self) -> int:
        """Bytes that each device sends."""
        return sum(move.sent for move in self.leaves)

    @property
    def least(self) -> int:
        """Bytes that some device must receive, summed over the leaves."""
        return sum(move.least for move in self.leaves)

    def __str__(self) -> str:
        rows = [("leaf", "from", "to", "steps", "sent/device", "must receive", "two shards")]
        for move in self.leaves:
            sizes = (f"{move.sent:,}", f"{move.least:,}", f"{move.peak:,}")
            rows.append((move.path, str(move.source), str(move.target), move.words, *sizes))
        return f"{table(rows)}\n{self.sent:,} bytes sent by each device; some device must receive {self.least:,}"


class LeafStorage(NamedTuple):
    """How a leaf is stored, and whether a plan stores it, which may pad it."""

    storage: Storage
    by_plan: bool


def make_move(
    where: str,
    path: str,
    x: Any,
    before: LeafStorage,
    after: LeafStorage,
    mesh: Any,
) -> Move:
    """The steps of one leaf; the padding of either layout counts."""
    if before.storage.rows != after.storage.rows:
        raise ValueError(
            f"{where} is stored in the order of the stages of a pipeline, which source and target do not share. Pass "
            "unpadded(...) of it to the init of the other plan."
        )
    original = stored_shape(tuple(x.shape), before.storage.rows)
    source = _check_form(where, x, original, before, mesh)
    target = _check_form(where, x, original, after, mesh)
    array = stored_array(x)
    if jnp.shape(array) != source.shape:
        raise ValueError(
            f"{where} must be stored as source says, with the shape {source.shape}; got {jnp.shape(array)}. Pass the "
            "plan that made it as source."
        )
    dtype = jnp.result_type(array)
    legs = _find_legs(original, source, target, mesh)
    if len(legs) == 1:
        least = legs[0].route.least
    else:
        least = _count_least_received(original, source, target, mesh)
    return Move(path, dtype, legs, least * dtype.itemsize)


class _Form(NamedTuple):
    """A canonical spec, and the shape that is stored, padding included."""

    spec: PartitionSpec
    shape: tuple[int, ...]

    @property
    def layout(self) -> DimAxes:
        """For each dim the axes that split it."""
        axes = spec_axes(self.spec)
        return (*axes, *[()] * (len(self.shape) - len(axes)))


def _check_form(
    where: str,
    x: Any,
    original: tuple[int, ...],
    leaf: LeafStorage,
    mesh: Any,
) -> _Form:
    """The form of a leaf; refuses a spec that the mesh or the shape does not allow."""
    spec = leaf.storage.spec
    check_spec(where, spec, mesh, len(original))
    if not leaf.by_plan and not is_padded(x):
        local_shape_of(where, original, spec, mesh)
    return _Form(canonical(spec), padded_shape(original, spec, mesh))


def _find_legs(original: tuple[int, ...], before: _Form, after: _Form, mesh: Any) -> tuple[Leg, ...]:
    """The legs that send least.

    Padding changes where a dim is cut into shards. Worked example: 9 columns over 6 devices are padded to 12, 2 on
    each, and over 2 devices to 10, 5 on each. The shard of columns 4 and 5 begins in one shard of the other layout and
    ends in the next. A redistribution moves whole shards, so such a dim is first made whole, by a gather or by moving
    its axes to another dim.
    """
    dims_to_join = []
    for dim in range(len(original)):
        parts_before = count_parts(before.layout[dim], mesh.shape)
        parts_after = count_parts(after.layout[dim], mesh.shape)
        both_split = parts_before > 1 and parts_after > 1
        if both_split and before.shape[dim] != after.shape[dim]:
            dims_to_join.append(dim)
    if not dims_to_join:
        return (_make_leg(before, after, mesh),)
    routes = []
    for between in _find_forms_between(original, before, dims_to_join, mesh):
        legs = (_make_leg(before, between, mesh), _make_leg(between, after, mesh))
        routes.append(legs)
    return min(routes, key=_count_sent)


def _find_forms_between(
    original: tuple[int, ...], before: _Form, dims_to_join: Sequence[int], mesh: Any
) -> Iterator[_Form]:
    """Forms in which these dims are whole: the axes of each are gathered, or split another dim instead.

    Worked example: 6x4 from P("data") of 4 devices to P("model") of 5, padded to 8 rows in one and to 10 in the other.
    Dim 0 must be joined. Its axis "data" may be gathered, P(), or split dim 1 instead, P(None, "data"): 6x1 on each
    device.
    """
    shape = list(before.shape)
    remaining_layout = list(before.layout)
    destinations: list[int | None] = [None]  # gathered
    for dim, size in enumerate(original):
        if dim in dims_to_join:
            shape[dim] = size
            remaining_layout[dim] = ()
        else:
            destinations.append(dim)
    for choice in itertools.product(destinations, repeat=len(dims_to_join)):
        layout = list(remaining_layout)
        for dim, destination in zip(dims_to_join, choice, strict=True):
            if destination is not None:
                layout[destination] += before.layout[dim]
        if divides(shape, layout, mesh.shape):
            yield _Form(canonical(PartitionSpec(*layout)), tuple(shape))


def _count_sent(legs: Sequence[Leg]) -> int:
    """The elements that a device sends."""
    return sum(leg.route.sent for leg in legs)


def _make_leg(before: _Form, after: _Form, mesh: Any) -> Leg:
    # With the padding of both: each dim is padded alike in both forms, or split in one of them alone.
    shape = tuple(map(max, before.shape, after.shape))
    axes = tuple(mesh.shape.items())
    route = find_redistribution(shape, before.layout, after.layout, axes)
    return Leg(shape, before.spec, after.spec, route, after.shape)


def _count_least_received(original: tuple[int, ...], before: _Form, after: _Form, mesh: Any) -> int:
    """The most elements that a device must receive, if the two layouts cut a dim at different places.

    Of 8 columns, over 6 devices and then over 2: the second device of the 2 gets columns 4 to 8 and, as the second of
    the 6, has columns 2 to 4. It must receive all 4.
    """
    most = 0
    for coordinates in itertools.product(*map(range, mesh.shape.values())):
        device = dict(zip(mesh.shape, coordinates, strict=True))
        new_elements = 1
        overlap = 1
        for dim, size in enumerate(original):
            old_start, old_stop = _find_range(dim, before, size, device, mesh)
            new_start, new_stop = _find_range(dim, after, size, device, mesh)
            new_elements *= new_stop - new_start
            overlap *= max(0, min(old_stop, new_stop) - max(old_start, new_start))
        most = max(most, new_elements - overlap)
    return most


def _find_range(
    dim: int,
    form: _Form,
    size: int,
    device: Mapping[str, int],
    mesh: Any,
) -> tuple[int, int]:
    """The part of a dim, without padding, that a device holds."""
    axes = form.layout[dim]
    index = find_joint_index(axes, device, mesh.shape)
    length = form.shape[dim] // count_parts(axes, mesh.shape)
    start = index * length
    return min(size, start), min(size, start + length)


@lru_cache(maxsize=1024)
def make_program(mesh: Any, leg: Leg, piece: int) -> Any:
    """The jitted program of one leg, in pieces of at most `piece` elements; leaves with equal legs share it."""
    parts = dict(leg.route.parts)
    source = _refine_spec(leg.source, mesh, parts)
    target = _refine_spec(leg.target, mesh, parts)
    varying_axes = tuple(itertools.chain(*spec_axes(target)))

    # Padding is added and cut on the device. A dim whose padding changes is whole before this leg or after it, so that
    # the zeros are at the end of one device's array. If both layouts split the dim, zeros would be in the middle.
    def run_leg(x: jax.Array) -> jax.Array:
        x = pad_to(x, local_shape(leg.shape, leg.source, mesh))
        x = run_steps(x, leg.route, varying_axes, piece)
        x = x.reshape(local_shape(leg.shape, leg.target, mesh))
        unpadded = local_shape(leg.stored, leg.target, mesh)
        return x[tuple(map(slice, unpadded))]

    finer_mesh = refine_mesh(mesh, parts)
    on_mesh = jax.shard_map(run_leg, mesh=finer_mesh, in_specs=source, out_specs=target)
    return jax.jit(on_mesh, out_shardings=NamedSharding(mesh, leg.target))


def _refine_spec(spec: PartitionSpec, mesh: Any, parts: Parts) -> PartitionSpec:
    """The spec over the parts of axes, without axes of size 1, over which an array would have to be gathered."""
    entries = []
    for axes in spec_axes(spec):
        entry: Axes = ()
        for axis in axes:
            if mesh.shape[axis] > 1:
                entry += name_parts(axis, parts)
        entries.append(entry)
    return PartitionSpec(*entries)


def run_steps(x: jax.Array, route: Redistribution, varying_axes: tuple[str, ...], piece: int) -> jax.Array:
    """Runs all steps. A large array is moved in pieces along a dim that no step touches, so that less is in memory."""
    sizes = dict(route.axes)
    x = x.reshape(divide_shape(route.shape, route.source, sizes))
    if not route.steps:
        return vary(x, varying_axes)
    shape = divide_shape(route.shape, route.steps[-1].after, sizes)
    if not x.size:  # jax refuses to send empty arrays
        return vary(x.reshape(shape), varying_axes)

    def run_all(x: jax.Array) -> jax.Array:
        for step in route.steps:
            x = _KINDS[step.kind](x, step, sizes)
        return x

    dim = max(route.untouched_dims, key=lambda dim: route.shape[dim], default=None)
    largest = max(route.shard_sizes)
    if dim is None or largest <= piece:
        return run_all(x)
    count = _count_pieces(x.shape[dim], largest, piece)
    rows = x.shape[dim] // count

    def move_piece(number: jax.Array, out: jax.Array) -> jax.Array:
        result = run_all(lax.dynamic_slice_in_dim(x, number * rows, rows, dim))
        return lax.dynamic_update_slice_in_dim(out, result, number * rows, dim)

    empty = vary(jnp.zeros(shape, x.dtype), varying_axes)
    return lax.fori_loop(0, count, move_piece, empty)


def _count_pieces(length: int, elements: int, piece: int) -> int:
    """The fewest equal pieces of a dim with no more than `piece` elements each; at most one piece for each row."""
    for count in range(1, length + 1):
        if length % count == 0 and elements <= piece * count:
            return count
    return length


def _slice(x: jax.Array, step: MoveStep, sizes: Sizes) -> jax.Array:
    # Nothing is sent: a device has the part that it keeps.
    for dim, axes in enumerate(step.find_added_axes()):
        if axes:
            x = take_part(x, axes, dim=dim)
    return x


def _gather(x: jax.Array, step: MoveStep, sizes: Sizes) -> jax.Array:
    # Replicated, because the result leaves shard_map whole along these axes, or is sliced along others. With a result
    # that is typed as varying, every device would have the right array, and shard_map would refuse it.
    for dim, axes in enumerate(step.find_removed_axes()):
        if axes:
            x = all_gather(x, axes, dim=dim, replicated=True)
    return x


def _permute(x: jax.Array, step: MoveStep, sizes: Sizes) -> jax.Array:
    # Shards change their devices in one step: a gather and a slice would send each shard to all devices.
    axes, pairs = find_permutation(step, sizes)
    return permute(x, axes, pairs)


def _exchange(x: jax.Array, step: MoveStep, sizes: Sizes) -> jax.Array:
    """One all_to_all for all axes that move: a dim in front counts the receiving devices, and after it the senders.

    Worked example: from P("a", "b") with a=2 and b=3 to P("b", "a"), both at once, of a local [12, 12]. Dim 0 gets "b"
    and loses "a", dim 1 gets "a" and loses "b".

    | | shape |
    |---|---|
    | each dim cut by the axes that it gets | [b 3, 4, a 2, 6] |
    | those axes in front | [b 3, a 2, 4, 6] |
    | as one: a piece [4, 6] for each of 6 devices | [6, 4, 6] |
    | all_to_all: a piece from each of 6 devices | [6, 4, 6] |
    | apart again | [b 3, a 2, 4, 6] |
    | each axis in front of the dim that lost it | [a 2, 4, b 3, 6] |
    | as two dims | [8, 18] |
    """
    added_axes = step.find_added_axes()
    removed_axes = step.find_removed_axes()
    moving_axes = tuple(itertools.chain(*added_axes))

    # Each dim as (the devices along its added axes, what one of them gets), with the devices of all dims in front.
    shape: list[int] = []
    device_dims: list[int] = []
    piece_dims: list[int] = []
    for size, axes in zip(x.shape, added_axes, strict=True):
        for axis in axes:
            device_dims.append(len(shape))
            shape.append(sizes[axis])
        piece_dims.append(len(shape))
        shape.append(size // count_parts(axes, sizes))
    x = x.reshape(shape).transpose(*device_dims, *piece_dims)
    devices = x.shape[: len(moving_axes)]
    piece = x.shape[len(moving_axes) :]

    # One collective, not one for each axis: a piece goes straight to its device. Axis by axis, it would be sent once
    # for each axis that moves.
    x = x.reshape(-1, *piece)
    x = all_to_all(x, moving_axes, split_dim=0, concat_dim=0)
    x = x.reshape(*devices, *piece)

    # The senders along the axes that a dim lost go in front of the dim.
    order: list[int] = []
    new_shape = []
    for dim, axes in enumerate(removed_axes):
        for axis in axes:
            order.append(moving_axes.index(axis))
        order.append(len(moving_axes) + dim)
        new_shape.append(piece[dim] * count_parts(axes, sizes))
    return x.transpose(order).reshape(new_shape)


_KINDS = {"slice": _slice, "all_to_all": _exchange, "ppermute": _permute, "all_gather": _gather}


def refine_mesh(mesh: Any, parts: Parts) -> Any:
    """The same devices in the same order, with some axes split into parts."""
    if not parts:
        return mesh
    names: list[str] = []
    sizes: list[int] = []
    for axis in mesh.axis_names:
        names += name_parts(axis, parts)
        sizes += parts.get(axis, (mesh.shape[axis],))
    types = (AxisType.Auto,) * len(names)
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(tuple(sizes), tuple(names), axis_types=types)
    return Mesh(mesh.devices.reshape(sizes), tuple(names), axis_types=types)
