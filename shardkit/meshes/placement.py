"""The order of devices in a mesh that loads the links of a network least."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations, permutations, product
from typing import Any, NamedTuple

import numpy as np
from jax.experimental import mesh_utils

from shardkit._arguments.checks import sized
from shardkit.meshes.layout import table
from shardkit.meshes.links import Load, Moves, Network, Places, arranged, busiest, network_of, seconds_of


class Placed(NamedTuple):
    """A load, and the seconds that its busiest link is busy.

    Attributes:
        load: what is sent.
        seconds: in this order of the devices.
        usual: in jax's order.
        bound: in the order that is best for this load alone.
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
        rows: the loads that it is for.
    """

    network: Network
    axes: Mapping[str, int]
    places: Places
    rows: tuple[Placed, ...]

    @property
    def seconds(self) -> float:
        """Seconds of the busiest links, one collective after the other."""
        return sum(row.seconds for row in self.rows)

    @property
    def usual(self) -> float:
        """The same in jax's order."""
        return sum(row.usual for row in self.rows)

    @property
    def bound(self) -> float:
        """Seconds that no order goes below that splits the network's dimensions: each collective in its own best."""
        return sum(row.bound for row in self.rows)

    def grid(self, devices: Sequence[Any]) -> np.ndarray:
        """Devices in the shape of the mesh, which are those of the network; a ValueError for others."""
        found = network_of(devices)
        if found is None or found[0] != self.network:
            kind = f"{len(devices)} of kind {devices[0].device_kind!r}" if found is None else str(found[0])
            raise ValueError(
                f"placement: the devices must be those of {self.network}; got {kind}. Make another with aot.place."
            )
        if sorted(self.places) != sorted(found[1]) or math.prod(self.axes.values()) != len(devices):
            raise ValueError(
                f"placement: every device of {self.network} must have one place in the mesh; got "
                f"{len(set(self.places))} of them in {sized(self.axes.items())}. Make another with aot.place."
            )
        return arranged(devices, self.places, tuple(self.axes.values()), found[1])

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("kind", "axes", "sent/device", "jax's order", "this order", "at least")]
        for row in self.rows:
            times = _milliseconds(row.usual, row.seconds, row.bound)
            rows.append((row.load.kind, ",".join(row.load.axes), f"{row.load.sent / 2**20:,.1f} MiB", *times))
        rows.append(("in all", "", "", *_milliseconds(self.usual, self.seconds, self.bound)))
        return f"mesh {sized(self.axes.items())} on {self.network}, ms of the busiest link\n{table(rows)}"


def _milliseconds(*seconds: float) -> list[str]:
    return [f"{1e3 * each:,.3f}" for each in seconds]


def alike(axes: Mapping[str, int]) -> list[Load]:
    """What is sent where nothing is known of a step: over each axis an array of one size is gathered."""
    return [Load("all_gather", (axis,), (size - 1) / size) for axis, size in axes.items() if size > 1]


def place(devices: Sequence[Any], axes: Mapping[str, int], loads: Sequence[Load]) -> DeviceOrder | None:
    """The order whose busiest links are busy for the shortest time, of all that split the network's dimensions.

    jax's own stays where no other is better. Inside an axis devices stand as is best for a ring along it; so a
    ppermute over two axes may have a better order.

    Args:
        devices: jax's devices, or what has their coordinates; all of a network.
        axes: names and sizes of the mesh axes.
        loads: what is sent over them.

    Returns:
        DeviceOrder; None for devices without known links, such as CPUs.

    Raises:
        ValueError: the devices fill no box.

    Cost: up to 2 s for 512 devices and three axes; sets of prime factors of the network's dimensions are tried, but for
    those that cannot be better.
    """
    found = network_of(devices)
    if found is None:
        return None
    network, usual = found[0], _by_jax(devices, axes, found[1])
    used = [each for each in loads if each.sent and math.prod(axes[axis] for axis in each.axes) > 1]
    search = _Search(network, axes, used)
    places = search.best()
    rows = []
    for each, least in zip(used, search.alone, strict=True):
        now, before = (seconds_of(network, axes, order, each) for order in (places, usual))
        rows.append(Placed(each, now, before, min(least, before)))
    if sum(row.usual for row in rows) <= (1 + 1e-9) * sum(row.seconds for row in rows):
        places, rows = usual, [row._replace(seconds=row.usual) for row in rows]
    return DeviceOrder(network, dict(axes), places, tuple(rows))


def _by_jax(devices: Sequence[Any], axes: Mapping[str, int], places: Places) -> Places:
    """The places in the order of jax's own rule, which knows one slice; else they stay as they are."""
    if len({getattr(device, "slice_index", None) for device in devices}) > 1:
        return places
    of_id = {device.id: place for device, place in zip(devices, places, strict=True)}
    try:
        grid = mesh_utils.create_device_mesh(tuple(axes.values()), devices, allow_split_physical_axes=True)
    except Exception:  # it fails, in several ways, to split a dimension with a factor of 5 or 7
        return places
    return tuple(of_id[device.id] for device in grid.flat)


class _Slot(NamedTuple):
    """A factor of a dimension: `radix` steps of `stride` devices each."""

    dim: int
    stride: int
    radix: int


_Slots = tuple[_Slot, ...]
_FEW = 3  # digits of an axis whose orders are all tried


class _Search:
    """Branch and bound: one axis after the other gets prime factors of the network's dimensions."""

    def __init__(self, network: Network, axes: Mapping[str, int], loads: Sequence[Load]):
        self.network, self.loads, self.slots = network, loads, _slots(network)
        self.axes = {axis: size for axis, size in axes.items() if size > 1}
        self.names = list(axes)
        # those that send most first: what they cannot have bounds the rest
        self.order = sorted(self.axes, key=lambda axis: -sum(each.sent for each in loads if axis in each.axes))
        self.alone = [self._alone(each) for each in loads]
        self.least, self.chosen = math.inf, dict[str, _Slots]()

    def best(self) -> Places:
        """The order of the devices: each axis along a way of short steps through its factors."""
        for slots in self.slots:
            self._assign({}, slots, 0.0)
        return _places(self.network, tuple(self.chosen.get(axis, ()) for axis in self.names))

    def _assign(self, chosen: dict[str, _Slots], free: _Slots, so_far: float) -> None:
        """Gives the next axis each set of free factors, as long as that can beat the best."""
        open_axes = self.axes.keys() - chosen.keys()
        pairs = zip(self.loads, self.alone, strict=True)
        rest = sum(least for each, least in pairs if open_axes & set(each.axes))
        if so_far + rest >= self.least * (1 - 1e-9):
            return
        if not open_axes:
            self.least, self.chosen = so_far, chosen
            return
        axis = self.order[len(chosen)]
        for those in _sets(free, self.axes[axis]):
            now = {**chosen, axis: those}
            left = tuple(slot for slot in free if slot not in those)
            self._assign(now, left, so_far + sum(self._ended(axis, now)))

    def _ended(self, axis: str, chosen: Mapping[str, _Slots]) -> Iterator[float]:
        """Seconds of the loads whose last axis this is."""
        for each in self.loads:
            used = self.axes.keys() & set(each.axes)
            if axis in used and used <= chosen.keys():
                yield self._seconds(each, tuple(chosen[name] for name in each.axes if name in chosen))

    def _alone(self, load: Load) -> float:
        """The least seconds that the load can have."""
        size = math.prod(self.axes.get(axis, 1) for axis in load.axes)
        least = math.inf
        for slots in self.slots:
            least = min(least, *(self._seconds(load, (those,)) for those in _sets(slots, size)))
        return least

    def _seconds(self, load: Load, slots: tuple[_Slots, ...]) -> float:
        if load.kind != "ppermute":  # the order inside a group does not matter
            slots = (tuple(sorted(slot for each in slots for slot in each)),)
        return load.sent * _unit(self.network, load.kind, slots, load.moves)


def _slots(network: Network) -> list[_Slots]:
    """The prime factors of all dimensions, in every order that differs."""
    of_dims = []
    for at, dim in enumerate(network.dims):
        orders = _orders(tuple(_primes(dim.size)))
        of_dims.append([_strides(at, order) for order in orders])
    return [sum(parts, ()) for parts in product(*of_dims)]


def _orders(factors: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The orders of factors that differ."""
    if not factors:
        return [()]
    found = []
    for first in sorted(set(factors)):
        at = factors.index(first)
        found += [(first, *rest) for rest in _orders(factors[:at] + factors[at + 1 :])]
    return found


def _strides(dim: int, radices: Sequence[int]) -> _Slots:
    return tuple(_Slot(dim, math.prod(radices[i + 1 :]), radix) for i, radix in enumerate(radices))


def _primes(n: int) -> list[int]:
    factor = next((p for p in range(2, math.isqrt(n) + 1) if n % p == 0), n)
    return [] if n == 1 else [factor, *_primes(n // factor)]


def _sets(free: _Slots, size: int) -> Iterator[_Slots]:
    """The sets of factors whose product is the size."""
    for those in combinations(free, len(_primes(size))):
        if math.prod(slot.radix for slot in those) == size:
            yield those


@lru_cache(maxsize=100_000)
def _unit(network: Network, kind: str, slots: tuple[_Slots, ...], moves: Moves) -> float:
    """Seconds of the busiest link for one byte sent by each device, over axes that have these factors."""
    every = sum(slots, ())
    if kind == "ppermute":
        return busiest(network, kind, _groups(network, np.array(_places(network, slots)), every), moves)
    return busiest(network, kind, _groups(network, _snake(every) @ _steps(network, every), every), alike=True)


def _groups(network: Network, members: np.ndarray, slots: _Slots) -> np.ndarray:
    """All groups of devices that differ in these factors alone: coordinates, [groups, members, dims]."""
    every = np.array(list(np.ndindex(network.shape)))
    first = np.ones(len(every), bool)
    for slot in slots:
        first &= every[:, slot.dim] // slot.stride % slot.radix == 0
    return every[first][:, None] + members[None]


def _places(network: Network, slots: Sequence[_Slots]) -> Places:
    """The coordinates of a mesh's places, in row-major order, whose axes have these factors."""
    total = np.zeros((1, len(network.dims)), int)
    for each in slots:
        total = (total[:, None] + _way(network, each)[None]).reshape(-1, len(network.dims))
    return tuple(map(tuple, total.tolist()))


@lru_cache(maxsize=100_000)
def _way(network: Network, slots: _Slots) -> np.ndarray:
    """Steps along an axis that has these factors, in the order that is best for a ring."""
    digits: list[_Slot] = []
    for slot in sorted(slots, key=lambda each: (each.dim, -each.stride)):
        if digits and digits[-1].dim == slot.dim and digits[-1].stride == slot.stride * slot.radix:
            digits[-1] = slot._replace(radix=slot.radix * digits[-1].radix)  # neighbors: one longer digit
        else:
            digits.append(slot)
    orders = permutations(digits) if len(digits) <= _FEW else [digits]
    ways = [_snake(order) @ _steps(network, order) for order in orders]
    if len(ways) == 1:
        return ways[0]
    return min(ways, key=lambda way: busiest(network, "ppermute", _groups(network, way, slots)))


def _steps(network: Network, digits: Sequence[_Slot]) -> np.ndarray:
    """What one of each digit adds to coordinates, [digits, dims]."""
    steps = np.zeros((len(digits), len(network.dims)), int)
    for row, digit in zip(steps, digits, strict=True):
        row[digit.dim] = digit.stride
    return steps


def _snake(digits: Sequence[_Slot]) -> np.ndarray:
    """Every number of these digits, each one step from the next: a reflected Gray code, [numbers, digits]."""
    if not digits:
        return np.zeros((1, 0), int)
    inner = _snake(digits[1:])
    parts = []
    for value in range(digits[0].radix):
        part = inner if value % 2 == 0 else inner[::-1]
        parts.append(np.insert(part, 0, value, axis=1))
    return np.concatenate(parts)
