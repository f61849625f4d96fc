"""Repairs of collectives, and of the numbers by which a device finds its part of an array.

These are the mistakes of programs with collectives: a missing sum, a sum over another axis, a neighbour on the wrong
side, a mask that is missing before a sum, the index of a device along another axis, an offset that is one off.

A value has a dim in front for each bound mesh axis. Worked example, of `psum(x, "a")` on a=2, b=3:

    x                                           [2, 3] + [4]
    the psum                                    [1, 3] + [4]
    repair_collective: psum over "b"            [2, 1] + [4], of x
    repair_sum: the sum over "b" of the psum    [1, 1] + [4], of the psum
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from shardkit._arguments.checks import quote
from shardkit._jax.jaxprs import kind_of, mesh_axes
from shardkit._jax.primitives import registered
from shardkit.testing.exact.numbers.assembly import where
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.repairs import (
    Bench,
    Cost,
    EquationChange,
    FunctionChange,
    Repair,
    Values,
    change_operands,
    change_result,
    is_integer,
    keep_operands,
    list_subsets,
    replace_item,
)
from shardkit.testing.exact.rules.operands import Operand

# Each distance is tried by one more run of the program, and a neighbour is the likelier mistake than a device far off.
_MOST_DISTANCES = 8
# A sum over devices may be missing behind these equations. Behind one that only passes elements on it is missing behind
# the equation that made the elements, too, and is tried there.
_SUMMED = {
    *("add", "sub", "mul", "div", "neg", "integer_pow", "square", "reduce_sum", "dot_general", "cumsum", "scatter-add"),
    *("select_n", "gather", "dynamic_slice", "psum", "psum_invariant", "shard_map"),
    *("conv_general_dilated", "reduce_window_sum"),
}
_REDUCTIONS = ("sum", "maximum", "minimum")
_EXTREMES = {"reduce_max": "maximum", "max": "maximum", "reduce_min": "minimum", "min": "minimum"}


def repair_collective(bench: Bench) -> Iterator[Repair]:
    """No collective, one over other axes, one between other devices, or another reduction."""
    call = bench.call
    row = registered(call.primitive)
    bound = mesh_axes(call.equation)
    if row.kind is None:
        return
    [x] = call.operands
    [y] = call.results
    # A collective that changes the shape cannot be left out, because the equations behind it would not fit.
    if bench.shape(x) == bench.shape(y):
        yield change_operands(Cost.COLLECTIVE, f"without {call.name}", keep_operands)
    if row.kind == "all_reduce":
        yield from _repair_reduction(bench, bound, row.reduces or "sum")
    if row.kind == "all_gather":
        yield from _repair_order_of_axes(bench, bound)
    if row.kind in ("all_gather", "all_to_all", "ppermute", "reduce_scatter"):
        yield from _repair_axes(bench, bound)
    if row.kind == "ppermute":
        yield from _repair_permutation(bench, bound)


def _repair_reduction(bench: Bench, bound: tuple[str, ...], operator: str) -> Iterator[Repair]:
    """A reduction over other axes, or by another operator."""
    name = bench.call.name
    for names in list_subsets(bench.axes):
        if set(names) != set(bound):
            words = f"{name} over {quote(names)} in place of {quote(bound)}"
            yield change_operands(Cost.COLLECTIVE, words, _reduce_operand, bench, names, operator)
    for other in _REDUCTIONS:
        if other != operator:
            words = f"the {other} over {quote(bound)} in place of {name}"
            yield change_operands(Cost.SUM, words, _reduce_operand, bench, bound, other)


def _repair_order_of_axes(bench: Bench, bound: tuple[str, ...]) -> Iterator[Repair]:
    """An all_gather over the same axes in another order, major to minor."""
    for names in itertools.permutations(bound):
        if names != bound:
            words = f"{bench.call.name} over {quote(names)} in place of {quote(bound)}"
            yield change_operands(Cost.COLLECTIVE, words, _gather_operand, bench, names)


def _repair_axes(bench: Bench, bound: tuple[str, ...]) -> Iterator[Repair]:
    """A collective over other axes that have as many devices, so that its result has the same shape.

    Worked example: on a mesh of row=2, col=2, `all_gather(x, "row")` where the columns should be gathered.
    """
    call = bench.call
    [key] = [key for key in registered(call.primitive).axes if key in call.equation.params]
    devices = math.prod(bench.axes[name] for name in bound)
    for names in list_subsets(bench.axes):
        count = math.prod(bench.axes[name] for name in names)
        if count == devices and set(names) != set(bound):
            words = f"{call.name} over {quote(names)} in place of {quote(bound)}"
            yield change_operands(Cost.COLLECTIVE, words, _rerun_over, bench, key, names)


def _rerun_over(operands: Sequence[Operand], bench: Bench, key: str, names: tuple[str, ...]) -> Sequence[Operand]:
    return bench.rerun(operands, **{key: names})


def _repair_permutation(bench: Bench, bound: tuple[str, ...]) -> Iterator[Repair]:
    """A ppermute between other pairs of devices: backwards, further on, without the pair that closes the ring."""
    n = math.prod(bench.axes[name] for name in bound)
    backwards = [(end, start) for start, end in bench.call.equation.params["perm"]]
    words = "ppermute the other way round"
    yield change_operands(Cost.COLLECTIVE, words, _permute_operand, bench, backwards, bound)
    for distance in range(1, min(n, _MOST_DISTANCES)):
        words = f"ppermute from each device to that {distance} further on"
        pairs = [(i, (i + distance) % n) for i in range(n)]
        yield change_operands(Cost.COLLECTIVE, words, _permute_operand, bench, pairs, bound)
        # Of a line of devices nobody sends to the first one, which gets zeros.
        pairs = [(i, i + distance) for i in range(n - distance)]
        words += ", without a wrap"
        yield change_operands(Cost.COLLECTIVE, words, _permute_operand, bench, pairs, bound)
        pairs = [(i + distance, i) for i in range(n - distance)]
        words = f"ppermute from each device to that {distance} back, without a wrap"
        yield change_operands(Cost.COLLECTIVE, words, _permute_operand, bench, pairs, bound)


@dataclass(frozen=True)
class Travel(EquationChange):
    """Reads an operand that goes to the next device in every round of a loop, as a block of keys does in a ring.

    Worked example: tokens and their documents in a ring of three devices. The keys travel, and the numbers of their
    documents stay; in round 0 that is right, in round 1 the numbers should come from one device further back, in
    round 2 from two. No repair of one round makes the result right.

    Attributes:
        bench: the tools for the equation that reads the operand.
        number: the number of the operand.
        names: the axes along which the operand travels.
        pairs: (sender, receiver), as for ppermute.
        steps: how often the operand has travelled before the equation reads it.
    """

    bench: Bench
    number: int
    names: Sequence[str]
    pairs: Any
    steps: int

    def __call__(self, operands: Sequence[Operand], results: Sequence[Operand], values: Values) -> Sequence[Operand]:
        """The results of the equation, which reads the operand after it has travelled."""
        x = operands[self.number]
        for _ in range(self.steps):
            x = self.bench.permute(x, self.pairs, self.names)
        return self.bench.rerun(replace_item(operands, self.number, x))

    def in_round(self, round_number: int) -> Travel:
        """The change so many rounds later, when the operand has travelled as many times more."""
        return replace(self, steps=self.steps + round_number)


def _reduce_operand(operands: Sequence[Operand], bench: Bench, names: Sequence[str], operator: str) -> list[Operand]:
    return [bench.reduce(operands[0], names, operator)]


def _gather_operand(operands: Sequence[Operand], bench: Bench, names: Sequence[str]) -> list[Operand]:
    params = bench.call.equation.params
    return [bench.devices.gather(operands[0], names, params["all_gather_dimension"], params["tiled"])]


def _permute_operand(operands: Sequence[Operand], bench: Bench, pairs: Any, names: Sequence[str]) -> list[Operand]:
    return [bench.permute(operands[0], pairs, names)]


def repair_broadcast(bench: Bench) -> Iterator[Repair]:
    """An all_gather over devices, in place of copies of one device's value.

    Worked example: two devices have levels [3] and a scale each. A device gathers the levels, [2, 3], and needs the two
    scales, [2]. `jnp.broadcast_to(scale, (2,))` has twice the scale of this device, and should be an all_gather.
    """
    equation = bench.call.equation
    [x] = bench.call.operands
    kept = equation.params["broadcast_dimensions"]
    shape = bench.shape(bench.result)
    added = [dim for dim in range(len(shape)) if dim not in kept]
    if len(added) != 1 or bench.shape(x) != tuple(shape[dim] for dim in kept):
        return
    [dim] = added
    for axis in bench.varying_axes(x):
        if bench.axes[axis] == shape[dim]:
            words = f"all_gather over {quote((axis,))} in place of copies"
            yield change_operands(Cost.SUM, words, _gather_copies, bench, axis, dim)


def _gather_copies(operands: Sequence[Operand], bench: Bench, axis: str, dim: int) -> list[Operand]:
    return [bench.devices.gather(operands[0], (axis,), dim, False)]


@dataclass(frozen=True)
class Gathering(EquationChange):
    """Reads the rows of all devices of an operand, in place of the rows of this device. So the result has more rows.

    Worked example: `(x @ y.T).sum()`, of all pairs of two samples, on two devices with x [3, 5] and y [4, 5].

        as it is        x @ y.T is [3, 4]: the pairs of this device's x with this device's y
        repaired        x @ all_gather(y).T is [3, 8]: the pairs of this device's x with every y
        the sum         [] in both programs

    Attributes:
        bench: the tools for the equation that reads the operand.
        number: the number of the operand.
        names: the axes along which the operand is gathered.
        dim: the dim of the operand that grows.
    """

    bench: Bench
    number: int
    names: Sequence[str]
    dim: int
    has_more_rows = True

    def __call__(self, operands: Sequence[Operand], results: Sequence[Operand], values: Values) -> Sequence[Operand]:
        """The results of the equation, which reads the rows of all devices."""
        x = self.bench.devices.gather(operands[self.number], self.names, self.dim, True)
        return self.bench.rerun(replace_item(operands, self.number, x))


def repair_rows(bench: Bench) -> Iterator[Repair]:
    """A matrix product with the rows of all devices: an all_gather is missing in front of the product."""
    if bench.call.primitive != "dot_general":
        return
    contracted, batched = bench.call.equation.params["dimension_numbers"]
    for number, x in enumerate(bench.call.operands):
        # Only a dim that stays in the result has more rows after a gather. A contracted dim would no longer fit the
        # other operand.
        joined = {*contracted[number], *batched[number]}
        rows = [dim for dim in range(len(bench.shape(x))) if dim not in joined]
        for names in list_subsets(bench.varying_axes(x)):
            words = f"an operand of {bench.call.name} that is gathered over {quote(names)}"
            for dim in rows:
                yield Repair(Cost.OPERAND, words, Gathering(bench, number, names, dim))


def repair_sum(bench: Bench) -> Iterator[Repair]:
    """Behind the equation a sum, mean or extreme over axes along which the result varies, or a ppermute."""
    name = bench.call.name
    varying = bench.varying_axes(bench.result)
    for names in list_subsets(varying):
        yield from _repair_missing_reduction(bench, names)
    if name not in _SUMMED:
        return
    for axis in varying:
        n = bench.axes[axis]
        # Both neighbours, which are one device where n is 2.
        for step in sorted({1, n - 1}):
            pairs = [(i, (i + step) % n) for i in range(n)]
            words = f"{name} of the device {n - step} further on along {axis!r}"
            yield change_result(Cost.RARE, words, bench.permute, pairs, [axis], exchange="shift")


def _repair_missing_reduction(bench: Bench, names: Sequence[str]) -> Iterator[Repair]:
    """The sum and the mean over some axes, or the extreme behind an equation that takes one."""
    name = bench.call.name
    ending = f"of {name} over {quote(names)}"
    operator = _EXTREMES.get(name)
    if operator is not None:
        yield change_result(Cost.SUM, f"the {operator} {ending}", bench.reduce, names, operator, exchange="sum")
        return
    if name not in _SUMMED:
        return
    yield change_result(Cost.SUM, f"the sum {ending}", bench.reduce, names, exchange="sum")
    if not is_integer(bench.result):
        devices = math.prod(bench.axes[axis] for axis in names)
        yield change_result(Cost.SUM, f"the mean {ending}", _average, bench, names, devices, exchange="sum")


def _average(x: Operand, bench: Bench, names: Sequence[str], devices: int) -> Operand:
    return bench.scale(bench.reduce(x, names), Fraction(1, devices))


def repair_mask(bench: Bench, readable: Sequence[Any]) -> Iterator[Repair]:
    """A mask of the program, applied to the operand of a sum over devices, or to the result of another equation.

    Worked example: of 7 rows over two devices the last row of device 1 is padding. `psum((x * x).sum())` adds the
    padding too; x * x should be zero where `row < 7` is false.
    """
    call = bench.call
    # Before a sum over devices the operand is masked. The sum is the same on all devices, and a mask that differs
    # between devices says nothing of it.
    reduces = kind_of(call.equation) in ("all_reduce", "reduce_scatter")
    target = call.operands[0] if reduces else bench.result
    if not isinstance(target, Exact):
        return
    for variable in readable:
        shape = getattr(variable.aval, "shape", None)
        if getattr(variable.aval, "dtype", None) != np.dtype("bool") or shape is None:
            continue
        # A mask [t] may belong to a value [t, d].
        if not shape or shape != bench.shape(target)[: len(shape)]:
            continue
        words = f"{call.name} of what is zero where a mask is false"
        if reduces:
            yield Repair(Cost.SUM, words, _mask_operand(bench, variable))
        else:
            yield Repair(Cost.FACTOR, words, _mask_result(bench, variable), behind=True)


def _mask_operand(bench: Bench, variable: Any) -> EquationChange:
    @FunctionChange
    def change(operands: Sequence[Operand], results: Sequence[Operand], values: Values) -> Sequence[Operand]:
        return bench.rerun([_mask(bench, operands[0], values[variable])])

    return change


def _mask_result(bench: Bench, variable: Any) -> EquationChange:
    @FunctionChange
    def change(operands: Sequence[Operand], results: Sequence[Operand], values: Values) -> Sequence[Operand]:
        return [_mask(bench, results[0], values[variable])]

    return change


def _mask(bench: Bench, x: Operand, mask: Operand) -> Operand:
    """x with zeros where a mask is false, which has the first dims of x."""
    # Worked example, on two devices: beside x [2] + [4, 3] a mask [2] + [4] becomes [2] + [4, 1].
    missing = len(bench.shape(x)) - (mask.ndim - bench.rank)
    mask = mask.reshape(mask.shape + (1,) * missing)
    zero = bench.field.lift(np.zeros((1,) * len(x.shape), np.float32))
    return where(mask, x, zero)


def repair_device_index(bench: Bench) -> Iterator[Repair]:
    """Another index in place of `axis_index`: along another axis, of a neighbour, from the other end."""
    bound = mesh_axes(bench.call.equation)
    for name, n in bench.axes.items():
        if (name,) != bound:
            yield change_result(Cost.INDEX, f"the index along {name!r}", _index_along, bench, name)
            continue
        for distance in sorted({1, n - 1}):
            words = f"the index along {name!r} of the device {distance} further on"
            yield change_result(Cost.OPERAND, words, _shift_index, n, distance)
        yield change_result(Cost.OPERAND, f"the index along {name!r} from the other end", _reverse_index, n)


def _index_along(x: Operand, bench: Bench, name: str) -> Operand:
    return bench.devices.number((name,))


def _shift_index(x: Operand, n: int, distance: int) -> Operand:
    return (x + distance) % n


def _reverse_index(x: Operand, n: int) -> Operand:
    return n - 1 - x


def repair_integer(bench: Bench) -> Iterator[Repair]:
    """An integer that is off by one, by the index of a device, or by that index times the size of a dim."""
    name = bench.call.name
    x = bench.result
    yield change_result(Cost.INDEX, f"{name} plus 1", _offset, 1)
    yield change_result(Cost.INDEX, f"{name} minus 1", _offset, -1)
    yield from _repair_wrap(bench)
    yield from _repair_layout(bench)
    yield from _repair_numbers(bench)
    yield from _repair_chunk(bench)
    # The place of a device's first element is its index times the size of its block, which may be any size here.
    sizes = sorted({1, *bench.sizes_of(x)})
    for axis, size, sign in itertools.product(bench.axes, sizes, (1, -1)):
        operator = "plus" if sign > 0 else "minus"
        words = f"{name} {operator} the index along {axis!r}"
        if size > 1:
            words += f" times {size}"
        dim = list(bench.axes).index(axis)
        changed = x + sign * size * bench.device_index(axis, x)
        # x has this index already, and the offset takes it away: devices then have the same integer, as the words say.
        if x.shape[dim] > 1 and (changed == changed.take([0], dim)).all():
            words = f"{name} that is the same along {axis!r}"
        # A missing offset of the device, whose local places were taken for global ones, is the likelier mistake.
        cost = Cost.INDEX if sign > 0 else Cost.INDEX_TOO_MANY
        yield change_result(cost, words, _offset_by_device, bench, axis, size * sign)


def _repair_wrap(bench: Bench) -> Iterator[Repair]:
    """An integer modulo a size: the neighbour behind the last place of a ring is the first place."""
    x = bench.result
    for size in sorted({*bench.axes.values(), *bench.sizes_of(x)} - {1}):
        # Where all elements are smaller than the size, the program would stay as it is.
        if (x % size != x).any():
            yield change_result(Cost.SIZE, f"{bench.call.name} modulo {size}", _wrap_around, size)


def _wrap_around(x: Operand, size: int) -> Operand:
    return x % x.dtype.type(size)


def _repair_layout(bench: Bench) -> Iterator[Repair]:
    """Global places of a device's elements in blocks in place of strides, or in strides in place of blocks.

    Worked example: of 6 elements over 2 devices, device 1 has the places 3, 4, 5 in blocks, and 1, 3, 5 in strides.
    """
    x = bench.result
    if len(bench.shape(x)) != 1 or bench.shape(x)[0] < 2:
        return
    count = bench.shape(x)[0]
    if count > np.iinfo(x.dtype).max:
        return
    for axis, n in bench.axes.items():
        if n < 2:
            continue
        index = bench.device_index(axis, x)
        places = np.arange(count, dtype=x.dtype).reshape((1,) * bench.rank + (count,))
        layouts = {"blocks": index * count + places, "strides": places * n + index}
        for layout, other in (("blocks", "strides"), ("strides", "blocks")):
            # x may be the same on all devices along some axes, and has a dim of size 1 for each of these.
            a, b = np.broadcast_arrays(x, layouts[layout])
            if (a == b).all():
                words = f"{bench.call.name} in {other} along {axis!r} in place of {layout}"
                yield change_result(Cost.LAYOUT, words, _take_layout, layouts[other])


def _repair_numbers(bench: Bench) -> Iterator[Repair]:
    """The number of a device among the devices of several axes, with the axes in another order, major to minor.

    Worked example: of node=2, local=3, device (1, 0) has the number 3, and with "local" as the major axis the number 1.
    """
    x = bench.result
    if bench.shape(x):
        return
    orders = list(itertools.permutations(bench.varying_axes(x)))
    numbers = {names: bench.devices.number(names).astype(x.dtype) for names in orders if len(names) > 1}
    for names, number in numbers.items():
        if not np.array_equal(number, x):
            continue
        for others, other in numbers.items():
            if others != names:
                words = f"the number of a device along {quote(others)} in place of {quote(names)}"
                yield change_result(Cost.INDEX, words, _take_layout, other)


def _repair_chunk(bench: Bench) -> Iterator[Repair]:
    """The global number of a device's chunk, in blocks in place of strides, or in strides in place of blocks.

    Worked example: device i of n has k chunks. Chunk c of device i has the number i * k + c in blocks, and c * n + i in
    strides. With n = 2 and k = 3, chunk 1 is the number 1 on device 0 and 4 on device 1 in blocks, but 2 and 3 in
    strides.
    """
    x = bench.result
    varying = bench.varying_axes(x)
    if bench.shape(x) or len(varying) != 1:
        return
    [axis] = varying
    n = bench.axes[axis]
    index = bench.device_index(axis, x)
    # One axis varies and the array has no dims, so that x.flat[i] is the integer of device i.
    first = x.flat[0]
    # Read as blocks: device 0 has c and device 1 has k + c, so that their difference is k, the chunks of a device.
    count = x.flat[1] - first
    name = bench.call.name
    if count > 1 and 0 <= first < count and np.array_equal(first + count * index, x):
        words = f"{name} in strides along {axis!r} in place of blocks"
        yield change_result(Cost.INDEX, words, _take_layout, first * n + index)
    # Read as strides: device 0 has c * n. How many chunks a device has is not in these numbers, so all sizes are tried.
    if first >= 0 and first % n == 0 and np.array_equal(first + index, x):
        chunk = first // n
        for count in bench.sizes_of(x):
            if count > chunk:
                words = f"{name} in blocks of {count} along {axis!r} in place of strides"
                yield change_result(Cost.INDEX, words, _take_layout, chunk + count * index)


def _take_layout(x: Operand, layout: np.ndarray) -> Operand:
    return layout


def _offset(x: Operand, distance: int) -> Operand:
    return x + x.dtype.type(distance)


def _offset_by_device(x: Operand, bench: Bench, axis: str, size: int) -> Operand:
    return x + bench.device_index(axis, x) * x.dtype.type(size)
