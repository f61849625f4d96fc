"""The order of devices in a mesh that loads the links of a network least.

Each axis of the mesh gets some of the prime factors of the network's dimensions. Worked example: a torus of x=4, y=4
and a mesh of data=2, model=8. "model" may have both factors of x and one of y, a block of 4x2, or both factors of y and
one of x. "data" gets the remaining factor. The search tries such sets of factors, and keeps the set whose busiest links
are busy for the shortest time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, combinations, permutations, product
from typing import Any, NamedTuple, NoReturn

import numpy as np
from jax.experimental import mesh_utils

from shardkit._arguments.checks import format_sizes
from shardkit.meshes.layout import table
from shardkit.meshes.network import (
    Coordinates,
    Load,
    Moves,
    Network,
    arrange_devices,
    count_members,
    find_network,
    time_busiest_link,
    time_load,
)


class LoadTimes(NamedTuple):
    """A load, and the seconds that its busiest link is busy.

    Attributes:
        load: the collectives.
        seconds: the time in this order of the devices.
        usual: the time in jax's order.
        bound: the time in the order that is best for this load alone.
    """

    load: Load
    seconds: float
    usual: float
    bound: float


class DeviceOrder(NamedTuple):
    """An order of devices for a mesh, for `make_mesh(placement=...)` and `aot.compile(placement=...)`; print it.

    Attributes:
        network: the network.
        axes: names and sizes of the mesh axes.
        places: coordinates on the network of the device at each place of the mesh, in row-major order.
        rows: the loads for which the order was searched, with their times.
    """

    network: Network
    axes: Mapping[str, int]
    places: Coordinates
    rows: tuple[LoadTimes, ...]

    @property
    def seconds(self) -> float:
        """Seconds of the busiest links, one collective after the other."""
        return sum(row.seconds for row in self.rows)

    @property
    def usual(self) -> float:
        """Seconds of the busiest links in jax's order."""
        return sum(row.usual for row in self.rows)

    @property
    def bound(self) -> float:
        """A lower bound on the seconds of any such order: each collective in the order that is best for it alone."""
        return sum(row.bound for row in self.rows)

    def grid(self, devices: Sequence[Any]) -> np.ndarray:
        """The devices in the shape of the mesh; a ValueError if they are not the devices of the network."""
        located = find_network(devices)
        if located is None:
            self._refuse_devices(f"{len(devices)} of kind {devices[0].device_kind!r}")
        network, coordinates = located
        if network != self.network:
            self._refuse_devices(str(network))
        if sorted(self.places) != sorted(coordinates) or math.prod(self.axes.values()) != len(devices):
            raise ValueError(
                f"placement: every device of {self.network} must have one place in the mesh; got "
                f"{len(set(self.places))} of them in {format_sizes(self.axes.items())}. Make another with aot.place."
            )
        return arrange_devices(devices, self.places, tuple(self.axes.values()), coordinates)

    def _refuse_devices(self, devices: str) -> NoReturn:
        raise ValueError(
            f"placement: the devices must be those of {self.network}; got {devices}. Make another with aot.place."
        )

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("kind", "axes", "sent/device", "jax's order", "this order", "at least")]
        for row in self.rows:
            sent = f"{row.load.sent / 2**20:,.1f} MiB"
            times = map(_format_milliseconds, (row.usual, row.seconds, row.bound))
            rows.append((row.load.kind, ",".join(row.load.axes), sent, *times))
        totals = map(_format_milliseconds, (self.usual, self.seconds, self.bound))
        rows.append(("in all", "", "", *totals))
        return f"mesh {format_sizes(self.axes.items())} on {self.network}, ms of the busiest link\n{table(rows)}"


def _format_milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.3f}"


def assume_equal_gathers(axes: Mapping[str, int]) -> list[Load]:
    """The loads of an unknown step: over each axis, an array of the same size is gathered."""
    loads = []
    for axis, size in axes.items():
        if size > 1:
            loads.append(Load("all_gather", (axis,), (size - 1) / size))
    return loads


def order_devices(devices: Sequence[Any], axes: Mapping[str, int], loads: Sequence[Load]) -> DeviceOrder | None:
    """The order whose busiest links are busy for the shortest time, of all that split the network's dimensions.

    If none is better than jax's order, it is jax's order. Inside an axis the devices stand in the best order for a ring
    along this axis; a ppermute over two axes might have a better one.

    Args:
        devices: jax's devices, or objects with their coordinates: all devices of a network.
        axes: names and sizes of the mesh axes.
        loads: the collectives over them.

    Returns:
        DeviceOrder; None for devices without known links, such as CPUs.

    Raises:
        ValueError: the devices fill no box.

    Cost: up to 2 s for 512 devices and three axes. The search tries all sets of prime factors of the network's
    dimensions, except sets that cannot be better than the best so far.
    """
    located = find_network(devices)
    if located is None:
        return None
    network, coordinates = located
    jax_order = _order_by_jax(devices, axes, coordinates)
    used = []
    for load in loads:
        # What sends nothing has no say in the order.
        if load.sent and count_members(axes, load) > 1:
            used.append(load)
    search = _Search(network, axes, used)
    best = search.find_best()
    rows = []
    for load, least in zip(used, search.alone, strict=True):
        seconds = time_load(network, axes, best, load)
        usual = time_load(network, axes, jax_order, load)
        # jax's order need not give an axis whole factors, so it may be faster than all orders that the search tries.
        rows.append(LoadTimes(load, seconds, usual, min(least, usual)))
    order = DeviceOrder(network, dict(axes), best, tuple(rows))
    # On a tie jax's order stays: a program then has the same mesh with "auto" and without.
    if order.usual <= (1 + 1e-9) * order.seconds:
        usual_rows = [row._replace(seconds=row.usual) for row in rows]
        return order._replace(places=jax_order, rows=tuple(usual_rows))
    return order


def _order_by_jax(devices: Sequence[Any], axes: Mapping[str, int], coordinates: Coordinates) -> Coordinates:
    """The coordinates in the order of jax's own rule. The rule is for one slice; for several, the order stays."""
    slices = {getattr(device, "slice_index", None) for device in devices}
    if len(slices) > 1:
        return coordinates
    position_of = {}  # by the device's id
    for device, position in zip(devices, coordinates, strict=True):
        position_of[device.id] = position
    try:
        grid = mesh_utils.create_device_mesh(tuple(axes.values()), devices, allow_split_physical_axes=True)
    except Exception:  # it fails, in several ways, to split a dimension with a factor of 5 or 7
        return coordinates
    return tuple(position_of[device.id] for device in grid.flat)


class _Factor(NamedTuple):
    """A factor of a dimension: `radix` steps of `stride` devices each."""

    dim: int
    stride: int
    radix: int


_Factors = tuple[_Factor, ...]
_FEW = 3  # digits of an axis whose orders are all tried


class _Search:
    """Branch and bound: one axis after the other gets prime factors of the network's dimensions."""

    def __init__(self, network: Network, axes: Mapping[str, int], loads: Sequence[Load]):
        self.network = network
        self.loads = loads
        self.factorizations = _factorize(network)
        self.sizes = axes
        self.axes = {axis: size for axis, size in axes.items() if size > 1}  # an axis of size 1 gets no factors
        # The axes that send most come first: with a bad set of factors for them, the search ends early.
        sent_of = dict.fromkeys(axes, 0.0)
        for load in loads:
            for axis in load.axes:
                sent_of[axis] += load.sent
        self.order = sorted(self.axes, key=lambda axis: -sent_of[axis])
        self.alone = [self._time_alone(load) for load in loads]
        self.least = math.inf
        self.chosen: dict[str, _Factors] = {}

    def find_best(self) -> Coordinates:
        """The order of the devices: each axis walks through its factors in short steps."""
        for factors in self.factorizations:
            self._assign({}, factors, 0.0)
        factors_of_axes = []
        for axis in self.sizes:
            factors_of_axes.append(self.chosen.get(axis, ()))
        return _locate(self.network, factors_of_axes)

    def _assign(self, chosen: dict[str, _Factors], free: _Factors, seconds: float) -> None:
        """Tries each set of free factors for the next axis, unless no such order can beat the best so far.

        `seconds` is the time of the loads whose axes all have their factors.
        """
        open_axes = self.axes.keys() - chosen.keys()
        # A load over an axis without factors takes at least its least time, `alone`.
        bound = 0.0
        for load, alone in zip(self.loads, self.alone, strict=True):
            if open_axes & set(load.axes):
                bound += alone
        # Many sets of factors are mirror images with the same time: those that only tie are not followed to their end.
        if seconds + bound >= self.least * (1 - 1e-9):
            return
        if not open_axes:
            self.least = seconds
            self.chosen = chosen
            return
        axis = self.order[len(chosen)]
        for factors in _choose_factors(free, self.axes[axis]):
            more = {**chosen, axis: factors}
            remaining = tuple(factor for factor in free if factor not in factors)
            more_seconds = sum(self._time_completed(axis, more))
            self._assign(more, remaining, seconds + more_seconds)

    def _time_completed(self, axis: str, chosen: Mapping[str, _Factors]) -> Iterator[float]:
        """Seconds of the loads whose axes all have factors now that this axis has."""
        for load in self.loads:
            used = self.axes.keys() & set(load.axes)
            # Each load counts once: when the last of its axes gets factors.
            if axis in used and used <= chosen.keys():
                factors = tuple(chosen[name] for name in load.axes if name in chosen)
                yield self._time(load, factors)

    def _time_alone(self, load: Load) -> float:
        """The least seconds that the load can have."""
        size = count_members(self.sizes, load)
        least = math.inf
        for free in self.factorizations:
            for factors in _choose_factors(free, size):
                # As over one axis: if several axes have these factors together, the load is at best as fast.
                least = min(least, self._time(load, (factors,)))
        return least

    def _time(self, load: Load, factors: tuple[_Factors, ...]) -> float:
        if load.kind != "ppermute":  # the order inside a group does not matter
            # Sorted, so that two axes have one entry in the cache, whichever of them got which factors.
            factors = (tuple(sorted(chain(*factors))),)
        return load.sent * _time_byte(self.network, load.kind, factors, load.moves)


def _factorize(network: Network) -> list[_Factors]:
    """The prime factors of all dimensions, in every order that differs.

    A dimension of 12 is (2, 2, 3), (2, 3, 2) or (3, 2, 2). In the first order, the first factor 2 has stride 6 (devices
    0 and 6), the second 2 has stride 3 (devices 0 and 3), and 3 has stride 1 (devices 0, 1 and 2).
    """
    factorizations: list[_Factors] = [()]
    for dim, line in enumerate(network.dims):
        orders = _order_distinctly(tuple(_find_primes(line.size)))
        longer = []
        for factors, order in product(factorizations, orders):
            longer.append(factors + _add_strides(dim, order))
        factorizations = longer
    return factorizations


def _order_distinctly(radices: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The distinct orders of radices: (2, 2, 3) has three."""
    if not radices:
        return [()]
    orders = []
    for first in sorted(set(radices)):
        number = radices.index(first)
        remaining = radices[:number] + radices[number + 1 :]
        for order in _order_distinctly(remaining):
            orders.append((first, *order))
    return orders


def _add_strides(dim: int, radices: Sequence[int]) -> _Factors:
    factors = []
    for number, radix in enumerate(radices):
        factors.append(_Factor(dim, math.prod(radices[number + 1 :]), radix))
    return tuple(factors)


def _find_primes(n: int) -> list[int]:
    """The prime factors of a number, from the smallest on."""
    primes = []
    divisor = 2
    while n > 1:
        if divisor * divisor > n:
            divisor = n
        if n % divisor == 0:
            primes.append(divisor)
            n //= divisor
        else:
            divisor += 1
    return primes


def _choose_factors(free: _Factors, size: int) -> Iterator[_Factors]:
    """The sets of factors whose product is the size."""
    # All factors are prime, so a set with this product has as many of them as the size has prime factors.
    for factors in combinations(free, len(_find_primes(size))):
        if math.prod(factor.radix for factor in factors) == size:
            yield factors


# The search meets the same factors again and again: with other axes, other loads, and in other branches.
@lru_cache(maxsize=100_000)
def _time_byte(network: Network, kind: str, factors: tuple[_Factors, ...], moves: Moves) -> float:
    """Seconds of the busiest link if each device sends one byte over axes with these factors."""
    group_factors = sum(factors, ())
    if kind == "ppermute":
        members = np.array(_locate(network, factors))
        groups = _list_groups(network, members, group_factors)
        return time_busiest_link(network, kind, groups, moves)
    members = _reflect_digits(group_factors) @ _list_steps(network, group_factors)
    groups = _list_groups(network, members, group_factors)
    # Groups of whole factors are shifted copies of one another, so all lines along a dimension carry the same.
    return time_busiest_link(network, kind, groups, alike=True)


def _list_groups(network: Network, members: np.ndarray, factors: _Factors) -> np.ndarray:
    """All groups of devices that differ in these factors alone: coordinates, [groups, members, dims]."""
    devices = np.array(list(np.ndindex(network.shape)))
    first = np.ones(len(devices), bool)
    for factor in factors:
        first &= devices[:, factor.dim] // factor.stride % factor.radix == 0
    # The first device of each group has the digit 0 in all factors; the members are counted from it.
    return devices[first][:, None] + members[None]


def _locate(network: Network, factors: Sequence[_Factors]) -> Coordinates:
    """The coordinates of the devices of a mesh, in row-major order, whose axes have these factors."""
    ndim = len(network.dims)
    coordinates = np.zeros((1, ndim), int)
    for axis_factors in factors:
        steps = _walk_axis(network, axis_factors)
        # [places so far, steps of this axis, dims]: the new axis is the minor one.
        coordinates = (coordinates[:, None] + steps[None]).reshape(-1, ndim)
    return tuple(map(tuple, coordinates.tolist()))


@lru_cache(maxsize=100_000)
def _walk_axis(network: Network, factors: _Factors) -> np.ndarray:
    """Steps along an axis that has these factors, in the order that is best for a ring: [size, dims]."""
    digits: list[_Factor] = []
    for factor in sorted(factors, key=lambda factor: (factor.dim, -factor.stride)):
        # Of a dimension of 4, the factors of strides 2 and 1 are one digit of radix 4: the walk 0 1 2 3 has neighbors
        # only, and as two digits it would be 0 1 3 2.
        if digits and _is_next_digit(digits[-1], factor):
            digits[-1] = factor._replace(radix=factor.radix * digits[-1].radix)  # one longer digit
        else:
            digits.append(factor)
    # At most six orders; of four digits it would be 24, each to be timed.
    orders = [tuple(digits)]
    if len(digits) <= _FEW:
        orders = list(permutations(digits))
    walks = [_reflect_digits(order) @ _list_steps(network, order) for order in orders]
    if len(walks) == 1:
        return walks[0]

    def time_ring(walk: np.ndarray) -> float:
        return time_busiest_link(network, "ppermute", _list_groups(network, walk, factors))

    return min(walks, key=time_ring)


def _is_next_digit(digit: _Factor, factor: _Factor) -> bool:
    """Whether a factor counts the devices within one step of a digit."""
    return digit.dim == factor.dim and digit.stride == factor.stride * factor.radix


def _list_steps(network: Network, digits: Sequence[_Factor]) -> np.ndarray:
    """The step in coordinates when a digit grows by one, [digits, dims]."""
    steps = np.zeros((len(digits), len(network.dims)), int)
    for row, digit in zip(steps, digits, strict=True):
        row[digit.dim] = digit.stride
    return steps


def _reflect_digits(digits: Sequence[_Factor]) -> np.ndarray:
    """Every number of these digits, each one step from the next: a reflected Gray code, [numbers, digits].

    Of two digits of radix 2 and 3: 00 01 02 12 11 10.
    """
    if not digits:
        return np.zeros((1, 0), int)
    minor = _reflect_digits(digits[1:])
    parts = []
    for value in range(digits[0].radix):
        # Every second part backward: its first number is one step from the last one of the part before.
        part = minor if value % 2 == 0 else minor[::-1]
        parts.append(np.insert(part, 0, value, axis=1))
    return np.concatenate(parts)
