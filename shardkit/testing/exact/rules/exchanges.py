"""Collectives between the devices of a mesh: they move elements along the dims in front, or reduce these dims.

Every value has one dim in front for each mesh axis, of size 1 where all devices along the axis have the same. Worked
example, one psum. On a mesh of data=2, model=3, x has the shape [2, 1] + [5]: it differs along "data" alone.

    psum over "data"     sums dim 0: [1, 1] + [5]
    psum over "model"    all three devices add the same: x times 3, [2, 1] + [5]
    psum over both       one after the other: [1, 1] + [5]

Sums in the field are exact, so that the order in which devices are added does not matter. An all_gather takes the dim
of the mesh axis to the dim that is gathered; a reduce_scatter sums, and takes a piece of that dim to the mesh axis; a
ppermute reorders the rows of the mesh axis; an all_to_all exchanges it with the dim that is split. A ragged_all_to_all
copies rows from one device's array to another's, to places that are known integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from shardkit._jax.compat import in_backward
from shardkit._jax.jaxprs import mesh_axes
from shardkit._jax.primitives import registered
from shardkit._jax.ragged import (
    Exchange,
    describe_exchange,
    find_fault_on_mesh,
    list_slices,
    refuse_gradient,
    split_mesh,
)
from shardkit.testing.exact.numbers.arithmetic import multiply, sum_dims
from shardkit.testing.exact.numbers.assembly import join_parts, where
from shardkit.testing.exact.numbers.errors import CollectiveError, UnsupportedError
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.logarithms import to_number
from shardkit.testing.exact.numbers.orders import find_keys
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.rules.operands import Known, Operand, move_operand, require_known
from shardkit.testing.exact.rules.scope import Scope


def apply_collective(
    scope: Scope, sizes: Mapping[str, int], equation: Any, operands: Sequence[Operand]
) -> list[Operand]:
    """The results of a collective on all devices of a mesh with axes of these sizes.

    A collective may have several operands, as one psum of a whole tree of gradients: each is exchanged by itself.
    """
    name = equation.primitive.name
    params = equation.params
    if name == "ragged_all_to_all":
        return [_exchange_slices(scope, sizes, equation, operands)]
    if params.get("axis_index_groups") is not None:
        raise UnsupportedError(f"{name} with axis_index_groups")
    # jax names an axis of jax.vmap by an integer.
    if any(isinstance(axis, int) for axis in params.get("axes", ())):
        raise UnsupportedError(f"{name} over an axis of the mesh and one of jax.vmap together")
    devices = Devices(scope.field, sizes)
    axes = mesh_axes(equation)
    row = registered(name)
    if row.kind == "all_reduce":
        if row.reduces in ("maximum", "minimum"):
            devices.note_extremes(equation, operands, axes, largest=row.reduces == "maximum")
        by = row.reduces or "sum"
        return [devices.reduce(x, axes, by) for x in operands]
    if row.kind == "all_gather":
        dim = params["all_gather_dimension"]
        return [devices.gather(x, axes, dim, params["tiled"]) for x in operands]
    if row.kind == "reduce_scatter":
        dim = params["scatter_dimension"]
        return [devices.scatter(x, axes, dim, params["tiled"]) for x in operands]
    if row.kind == "ppermute":
        return [devices.permute(x, axes, params["perm"]) for x in operands]
    if row.kind == "all_to_all" and "split_axis" in params:
        split_dim = params["split_axis"]
        concat_dim = params["concat_axis"]
        return [devices.exchange(x, axes, split_dim, concat_dim, params["tiled"]) for x in operands]
    raise UnsupportedError(name)


class Devices:
    """The devices of a mesh.

    Movements are functions `move(part, lead)`, for a known array and for each part of an `Exact`: the dims of the array
    begin at `lead`, and those of the mesh at `first`, which is 0, or 1 behind the components of a part.

    Attributes:
        field: the arithmetic.
        axes: the mesh axes with their sizes, in the order of the dims in front.
    """

    def __init__(self, field: Field, axes: Mapping[str, int]):
        self.field = field
        self.axes = axes
        self._names = list(axes)
        self._sizes = list(axes.values())
        self._scope = Scope(field, len(axes))

    def _find_dims(self, axes: Sequence[str]) -> list[int]:
        """The dims in front of some axes."""
        return [self._names.index(axis) for axis in axes]

    def number(self, axes: Sequence[str]) -> Known:
        """An axis_index: the number of each device along some axes, the major one first."""
        ones = [1] * len(self.axes)
        result = np.zeros(ones, np.int32)
        # Of data=2, model=3: index("data") is [[0], [1]], and of both it is [[0, 1, 2], [3, 4, 5]].
        for dim in self._find_dims(axes):
            size = self._sizes[dim]
            shape = ones.copy()
            shape[dim] = size
            index = np.arange(size, dtype=np.int32).reshape(shape)
            result = result * size + index
        return result

    def choose(self, mask: np.ndarray, x: Operand, y: Operand) -> Operand:
        """x on the devices where the mask holds, and in the elements of a batch, else y."""
        # The mask has the dims of the mesh, and those of a batch if the loop is one of `jax.vmap`.
        missing = len(x.shape) - mask.ndim
        mask = mask.reshape(mask.shape + (1,) * missing)
        if isinstance(x, Exact) or isinstance(y, Exact):
            x, y = self._scope.lift(x, y)
            return where(mask, x, y)
        return np.where(mask, x, y)

    # Reductions

    def reduce(self, x: Operand, axes: Sequence[str], by: str) -> Operand:
        """The sum, maximum or minimum over some axes, the same on all devices along them."""
        for dim in self._find_dims(axes):
            if by == "sum":
                x = self._sum(x, dim)
            else:
                x = self._take_extreme(x, dim, largest=by == "maximum")
        return x

    def _sum(self, x: Operand, dim: int) -> Operand:
        """The sum along one axis, whose dim then has size 1."""
        n = self._sizes[dim]
        differs = x.shape[dim] > 1
        # Where the devices do not differ, all n add the same number: a psum of a replicated value counts it n times.
        if not isinstance(x, Exact):
            if differs:
                return x.sum(dim, x.dtype, keepdims=True)
            return np.asarray(x * n, x.dtype)
        if differs:
            return sum_dims(self.field, x, [dim], keep=True)
        if n == 1:
            return x
        ones = (1,) * len(x.shape)
        return multiply(self.field, x, self.field.lift(np.full(ones, n)))

    def note_extremes(self, equation: Any, operands: Sequence[Operand], axes: Sequence[str], largest: bool) -> None:
        """Notes which devices had the largest, or smallest, numbers."""
        if self.field.coverage is None:
            return
        dims = self._find_dims(axes)
        for x in operands:
            if isinstance(x, Exact):
                keys = find_keys(self.field, x)
                self._scope.choose_extremes(equation, x, keys, dims, largest)

    def _take_extreme(self, x: Operand, dim: int, largest: bool) -> Operand:
        """The largest, or smallest, number along one axis, whose dim then has size 1."""
        if not isinstance(x, Exact):
            if largest:
                return x.max(dim, keepdims=True)
            return x.min(dim, keepdims=True)
        keys = find_keys(self.field, x)
        # [..., 1, ...]: the number of the device that has the extreme, for each element.
        if largest:
            devices = keys.argmax(dim, keepdims=True)
        else:
            devices = keys.argmin(dim, keepdims=True)

        def take(part: np.ndarray) -> np.ndarray:
            devices_of_part = np.broadcast_to(devices, (len(part), *devices.shape))
            return np.take_along_axis(part, devices_of_part, dim + 1)

        return to_number(self.field, x).move(take)

    # Movements

    def gather(self, x: Operand, axes: Sequence[str], to: int, tiled: bool) -> Operand:
        """all_gather: the mesh dims become part of dim `to`, or a new dim there.

        Worked example, tiled over 4 devices, of [4] + [2, 3] along dim 1:

            the mesh dim goes before dim 1      [2, 4, 3]
            both become one                     [2, 12]
            all devices have the same           [1] + [2, 12]
        """
        dims = self._find_dims(axes)

        def move(part: np.ndarray, lead: int) -> np.ndarray:
            first = lead - len(self.axes)
            if not tiled:
                part = np.expand_dims(part, lead + to)
            for dim in reversed(dims):  # the minor axis first
                mesh_dim = first + dim
                part = self._spread(part, first, dim)
                # Without the mesh dim in front, dim `to` is one further left: the devices go directly before it.
                part = np.moveaxis(part, mesh_dim, lead + to - 1)
                part = _merge_dims(part, lead + to - 1)
                part = np.expand_dims(part, mesh_dim)
            return part

        return move_operand(x, len(self.axes), move)

    def scatter(self, x: Operand, axes: Sequence[str], to: int, tiled: bool) -> Operand:
        """reduce_scatter: the sum, of which each device has a piece of dim `to`.

        Worked example, tiled over 4 devices: the sum [1] + [8, 3] is split to [1] + [4, 2, 3], and its pieces become
        the mesh dim, [4] + [2, 3].
        """
        # The sum first, then each device's piece of it: sums are exact in any order, so no ring is needed.
        x = self.reduce(x, axes, "sum")
        dims = self._find_dims(axes)

        def move(part: np.ndarray, lead: int) -> np.ndarray:
            first = lead - len(self.axes)
            for dim in dims:  # the major axis first
                mesh_dim = first + dim
                part = _split_dim(part, lead + to, self._sizes[dim])
                part = np.moveaxis(part, lead + to, mesh_dim)
                # The pieces stand where the mesh dim was, which is behind them now, with size 1.
                part = np.squeeze(part, mesh_dim + 1)
            if tiled:
                return part
            return np.squeeze(part, lead + to)

        return move_operand(x, len(self.axes), move)

    def permute(self, x: Operand, axes: Sequence[str], pairs: Any) -> Operand:
        """ppermute: each device gets the row of the one that sends to it, or zeros."""
        dims = sorted(self._find_dims(axes))  # pairs number the devices in the mesh's order
        devices = math.prod(self._sizes[dim] for dim in dims)
        # Of [(0, 1), (1, 2)] on three devices: device 1 reads row 0, device 2 row 1, and device 0, to which nobody
        # sends, a row of zeros after those of the devices, row 3. The senders are [3, 0, 1].
        nobody = devices
        senders = np.full(devices, nobody)
        for sender, receiver in pairs:
            senders[receiver] = sender

        def move(part: np.ndarray, lead: int) -> np.ndarray:
            first = lead - len(self.axes)
            part, restore = self._merge_devices(part, first, dims)
            zeros = np.zeros_like(part[:1])
            part = np.concatenate([part, zeros])
            return restore(part[senders])

        result = move_operand(x, len(self.axes), move)
        if isinstance(result, Exact) and result.factor is not None:
            # Its zeros are in rows that nobody sent. A number that is no logarithm has the factor 1.
            is_zero = (result.factor == 0).all(0)
            factor = np.where(is_zero, np.uint64(1), result.factor)
            return replace(result, factor=factor)
        return result

    def exchange(self, x: Operand, axes: Sequence[str], split: int, to: int, tiled: bool) -> Operand:
        """all_to_all: dim `split` is cut into a piece for each device; arriving pieces are joined along dim `to`.

        Worked example, tiled over 4 devices: [4] + [8, 3] with split 0 and to 1 is cut to [4] + [4, 2, 3]. The dims
        of sender and piece are swapped, so that dim 0 is the receiver; the pieces of all senders are joined along dim 1
        of the result, [4] + [2, 12].
        """
        dims = self._find_dims(axes)

        # The shapes beside the lines are those of the worked example.
        def move(part: np.ndarray, lead: int) -> np.ndarray:
            first = lead - len(self.axes)
            part, restore = self._merge_devices(part, first, dims)  # [sender 4, 8, 3]
            # The dims of the devices are one now, so the dims of the array begin further left.
            start = 1 + lead - len(dims)
            part = _split_dim(part, start + split, part.shape[0])  # [sender 4, receiver 4, 2, 3]
            part = np.swapaxes(part, 0, start + split)  # [receiver 4, sender 4, 2, 3]
            if not tiled:  # a piece has size 1, and the senders are a dim of the result
                part = np.squeeze(part, start + split + 1)
                part = np.moveaxis(part, start + split, start + to)
                return restore(part)
            part = np.moveaxis(part, start + split, start + to)  # [receiver 4, 2, sender 4, 3]
            return restore(_merge_dims(part, start + to))  # [receiver 4, 2, 12]

        return move_operand(x, len(self.axes), move)

    def _spread(self, part: np.ndarray, first: int, dim: int) -> np.ndarray:
        """A part with a row for each device along an axis, also if all devices have the same row."""
        shape = list(part.shape)
        shape[first + dim] = self._sizes[dim]
        return np.broadcast_to(part, shape)

    def _merge_devices(
        self, part: np.ndarray, first: int, dims: Sequence[int]
    ) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
        """The devices along some axes as dim 0, and the function that puts them back to their dims.

        Worked example: a part [8 components, 2 (a), 3 (b), 4] along b becomes [3, 8, 2, 4], and along both [6, 8, 4].
        """
        for dim in dims:
            part = self._spread(part, first, dim)
        mesh_dims = [first + dim for dim in dims]
        count = len(dims)
        part = np.moveaxis(part, mesh_dims, range(count))
        sizes = part.shape[:count]

        def restore(result: np.ndarray) -> np.ndarray:
            result = result.reshape(*sizes, *result.shape[1:])
            return np.moveaxis(result, range(count), mesh_dims)

        merged = part.reshape(math.prod(sizes), *part.shape[count:])
        return merged, restore


# Ragged exchanges


def _exchange_slices(scope: Scope, sizes: Mapping[str, int], equation: Any, operands: Sequence[Operand]) -> Operand:
    """A ragged_all_to_all: the output, with the slices of other devices' operands in it.

    Worked example: two devices with the operands [a, b] and [c, d] each send their last row to row 0 of the other. The
    outputs are [0, 0, 0], and the results [d, 0, 0] and [b, 0, 0].
    """
    operand, output, *offsets = operands
    name = equation.primitive.name
    known = [require_known(x, f"{name} with offsets or sizes") for x in offsets]
    axes = mesh_axes(equation)
    line = f"{name} at {scope.line(equation)}"
    devices = math.prod(sizes[axis] for axis in axes)
    avals = [variable.aval for variable in equation.invars]
    groups = equation.params["axis_index_groups"]
    is_gradient = scope.backward or in_backward(equation)
    try:
        if is_gradient:
            refuse_gradient(avals, axes, devices, groups)
        exchange = describe_exchange(avals, axes, devices, groups, is_gradient)
    except ValueError as error:
        raise CollectiveError(f"{line} {error}") from error
    mesh_shape = tuple(sizes.values())
    rows = [np.broadcast_to(x, (*mesh_shape, x.shape[-1])) for x in known]
    slices = np.stack(rows, -2)  # [*sizes, 4, slices]
    fault = find_fault_on_mesh(exchange, slices, sizes)
    if fault:
        raise CollectiveError(f"{line} {fault}")
    # Where floats decide the sizes, as a router does, the rows have room for these inputs. A draw in which all rows are
    # alike, and so go to one device, asks it of others.
    field = scope.field
    if field.coverage is not None and field.marks.any_follows_floats(known):
        has_room = np.ones((1,) * scope.rank, bool)
        field.coverage.note_integers(field, equation, scope.line(equation), has_room, (), " with room for its rows")
    # The sizes of the mesh dims in front: along an axis over which nothing is sent and nothing differs, one device.
    lead = list(np.broadcast_shapes(*[x.shape[: scope.rank] for x in operands]))
    for axis in axes:
        lead[list(sizes).index(axis)] = sizes[axis]

    def write(parts: list[np.ndarray]) -> np.ndarray:
        return _write_slices(parts, exchange, slices, sizes, tuple(lead))

    if not isinstance(operand, Exact) and not isinstance(output, Exact):
        [result] = write([operand[None], output[None]])
        return result
    sources = [scope.lift_one(operand), scope.lift_one(output)]
    return join_parts(sources, write, is_power=all(x.is_power for x in sources))


def _write_slices(
    parts: Sequence[np.ndarray],
    exchange: Exchange,
    slices: np.ndarray,
    sizes: Mapping[str, int],
    lead: tuple[int, ...],
) -> np.ndarray:
    """A part [components, *lead, room, ...] of the outputs, with the slices of the operands' part written into it."""
    rank = len(lead)
    names = list(sizes)
    operand, output = parts
    operands = np.broadcast_to(operand, (len(operand), *lead, *operand.shape[1 + rank :]))
    result = np.broadcast_to(output, (len(output), *lead, *output.shape[1 + rank :])).copy()
    sizes_of_axes = [sizes[axis] for axis in exchange.axes]

    def index(place: Mapping[str, int], number: int, first: int, size: int) -> tuple[Any, ...]:
        """Rows of a device: of 5 rows from row 2 of device 3 over "b" where "a" is 1, (:, 1, 3, 2:7)."""
        coordinates = dict(place)
        for axis, coordinate in zip(exchange.axes, np.unravel_index(number, sizes_of_axes), strict=True):
            coordinates[axis] = int(coordinate)
        return (slice(None), *[coordinates[name] for name in names], slice(first, first + size))

    for place, slices_of_place in split_mesh(exchange, slices, sizes):
        # Along an axis over which nothing is sent and nothing differs, the first device stands for all.
        if any(number >= lead[names.index(name)] for name, number in place.items()):
            continue
        for x in list_slices(exchange, slices_of_place):
            result[index(place, x.receiver, x.target, x.size)] = operands[index(place, x.sender, x.start, x.size)]
    return result


def _split_dim(part: np.ndarray, dim: int, n: int) -> np.ndarray:
    """A dim as n pieces: [..., n, size / n, ...]."""
    shape = part.shape
    return part.reshape(*shape[:dim], n, shape[dim] // n, *shape[dim + 1 :])


def _merge_dims(part: np.ndarray, dim: int) -> np.ndarray:
    """A dim and the next one as one."""
    shape = part.shape
    return part.reshape(*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])
