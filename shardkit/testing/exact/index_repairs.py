"""Repairs of the integers by which a device finds its part of an array: indices of devices, offsets, places.

Integers of a program are known arrays, with a dim in front for each bound mesh axis. So a repair can read from an
integer itself what it may be. Worked example: of 6 elements over two devices along "a", the integers

    [[0, 1, 2], [3, 4, 5]]      are the global places of both devices' elements in blocks: index * 3 + places
    [[0, 2, 4], [1, 3, 5]]      are those in strides: places * 2 + index, which one repair puts in place of the first

Where an integer is neither, it may still be off by one, or by the index of a device times the size of a dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from shardkit._arguments.checks import quote
from shardkit._jax.jaxprs import mesh_axes
from shardkit.testing.exact.repairs import Bench, Cost, Repair, change_result, select_sizes
from shardkit.testing.exact.rules.operands import Operand

# Indices of devices


def repair_device_index(bench: Bench) -> Iterator[Repair]:
    """Another index in place of `axis_index`: along another axis, of a neighbour, from the other end."""
    bound = mesh_axes(bench.equation)
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


# Offsets


def repair_integer(bench: Bench) -> Iterator[Repair]:
    """An integer that is off by one, by the index of a device, or by that index times the size of a dim."""
    name = bench.name
    yield change_result(Cost.INDEX, f"{name} plus 1", _offset, 1)
    yield change_result(Cost.INDEX, f"{name} minus 1", _offset, -1)
    yield from _repair_wrap(bench)
    yield from _repair_layout(bench)
    yield from _repair_numbers(bench)
    yield from _repair_chunk(bench)
    # The place of a device's first element is its index times the size of its block, which may be any size here.
    sizes = sorted({1, *select_sizes(bench.sizes, bench.result)})
    for axis, size in itertools.product(bench.axes, sizes):
        # A missing offset of the device, whose local places were taken for global ones, is the likelier mistake.
        yield _offset_by_index(Cost.INDEX, f"{name} plus", bench, axis, size)
        yield _offset_by_index(Cost.INDEX_TOO_MANY, f"{name} minus", bench, axis, -size)


def _offset(x: Operand, distance: int) -> Operand:
    return x + x.dtype.type(distance)


def _offset_by_index(cost: float, beginning: str, bench: Bench, axis: str, factor: int) -> Repair:
    """An integer plus the index of a device along an axis, times a factor."""
    x = bench.result
    words = f"{beginning} the index along {axis!r}"
    if abs(factor) > 1:
        words += f" times {abs(factor)}"
    # x has this index already, and the offset takes it away: devices then have the same integer, as the words say.
    if axis in bench.find_varying_axes(x):
        dim = list(bench.axes).index(axis)
        changed = x + factor * bench.number_devices(axis, x)
        if (changed == changed.take([0], dim)).all():
            words = f"{bench.name} that is the same along {axis!r}"
    return change_result(cost, words, _add_index, bench, axis, factor)


def _add_index(x: Operand, bench: Bench, axis: str, factor: int) -> Operand:
    # With the factor 3, on two devices: [[0, 1, 2]] becomes [[0, 1, 2], [3, 4, 5]].
    return x + bench.number_devices(axis, x) * x.dtype.type(factor)


def _repair_wrap(bench: Bench) -> Iterator[Repair]:
    """An integer modulo a size: the neighbour behind the last place of a ring is the first place."""
    x = bench.result
    sizes = {*bench.axes.values(), *bench.sizes} - {1}
    for size in sorted(select_sizes(sizes, x)):
        # Where all elements are smaller than the size, the program would stay as it is.
        if (x % size != x).any():
            yield change_result(Cost.SIZE, f"{bench.name} modulo {size}", _wrap_around, size)


def _wrap_around(x: Operand, size: int) -> Operand:
    return x % x.dtype.type(size)


# Global numbers


def _repair_layout(bench: Bench) -> Iterator[Repair]:
    """Global places of a device's elements in blocks in place of strides, or in strides in place of blocks.

    Worked example: of 6 elements over 2 devices, device 1 has the places 3, 4, 5 in blocks, and 1, 3, 5 in strides.
    """
    x = bench.result
    if len(bench.shape(x)) != 1:
        return
    [count] = bench.shape(x)
    most = np.iinfo(x.dtype).max
    if not 2 <= count <= most:
        return
    # [1, ..., count]: the places of elements on a device, as 0, 1, 2.
    places = np.arange(count, dtype=x.dtype).reshape((1,) * bench.rank + (count,))
    for axis, n in bench.axes.items():
        if not 2 <= n <= most:
            continue
        index = bench.number_devices(axis, x)
        blocks = index * count + places
        strides = places * n + index
        name = bench.name
        if _are_equal(x, blocks):
            words = f"{name} in strides along {axis!r} in place of blocks"
            yield change_result(Cost.LAYOUT, words, _take_layout, strides)
        if _are_equal(x, strides):
            words = f"{name} in blocks along {axis!r} in place of strides"
            yield change_result(Cost.LAYOUT, words, _take_layout, blocks)


def _are_equal(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether arrays are equal, also where one has a dim of size 1 because all devices along an axis have the same."""
    return bool((x == y).all())


def _repair_numbers(bench: Bench) -> Iterator[Repair]:
    """The number of a device among the devices of several axes, with the axes in another order, major to minor.

    Worked example: of node=2, local=3, device (1, 0) has the number 3, and with "local" as the major axis the number 1.
    """
    x = bench.result
    varying = bench.find_varying_axes(x)
    if bench.shape(x) or len(varying) < 2:
        return
    # ("node", "local"): [[0, 1, 2], [3, 4, 5]] and ("local", "node"): [[0, 2, 4], [1, 3, 5]].
    numbers = {}
    for names in itertools.permutations(varying):
        numbers[names] = bench.devices.number(names).astype(x.dtype)
    for names, number in numbers.items():
        if not np.array_equal(number, x):
            continue
        for new_names, new_number in numbers.items():
            if new_names != names:
                words = f"the number of a device along {quote(new_names)} in place of {quote(names)}"
                yield change_result(Cost.INDEX, words, _take_layout, new_number)


def _repair_chunk(bench: Bench) -> Iterator[Repair]:
    """The global number of a device's chunk, in blocks in place of strides, or in strides in place of blocks.

    Worked example: device i of n has k chunks. Chunk c of device i has the number i * k + c in blocks, and c * n + i in
    strides. With n = 2 and k = 3, chunk 1 is the number 1 on device 0 and 4 on device 1 in blocks, but 2 and 3 in
    strides.
    """
    x = bench.result
    varying = bench.find_varying_axes(x)
    if bench.shape(x) or len(varying) != 1:
        return
    [axis] = varying
    n = bench.axes[axis]
    if n > np.iinfo(x.dtype).max:
        return
    index = bench.number_devices(axis, x)
    # One axis varies and the array has no dims, so that x.flat[i] is the integer of device i.
    first = x.flat[0]
    # Read as blocks: device 0 has c and device 1 has k + c, so that their difference is k, the chunks of a device.
    count = x.flat[1] - first
    name = bench.name
    if count > 1 and 0 <= first < count and np.array_equal(first + count * index, x):
        words = f"{name} in strides along {axis!r} in place of blocks"
        yield change_result(Cost.INDEX, words, _take_layout, first * n + index)
    # Read as strides: device 0 has c * n. How many chunks a device has is not in these numbers, so all sizes are tried.
    if first >= 0 and first % n == 0 and np.array_equal(first + index, x):
        chunk = first // n
        for count in select_sizes(bench.sizes, x):
            if count > chunk:
                words = f"{name} in blocks of {count} along {axis!r} in place of strides"
                yield change_result(Cost.INDEX, words, _take_layout, chunk + count * index)


def _take_layout(x: Operand, layout: np.ndarray) -> Operand:
    return layout
