"""Networks of linked devices, and the load that collectives put on their links.

The devices of a network fill a box. Along some dimensions neighbors are linked, as in a torus; along others the switch
of a host or a data center connects all devices. A collective runs dimension by dimension, over slow dimensions while it
has few data:

- An all_gather runs between hosts or slices first, then along the torus, and last inside a host or a chip; a
  reduce_scatter runs the other way, and an all_reduce is one of each. The dimensions of the torus take turns at being
  first, each with its part of the data (the bucket algorithm). If the group stands evenly round a ring, one half of the
  data goes each way round; else all data go to both ends of a line.
- In all_to_all and ppermute each message takes the shortest way, dimension by dimension; if two ways are equally short,
  one half takes each.

Groups that lie between each other share links, and so do the devices of a chip. The busiest link decides how long a
collective takes. Latency is left out, and a compiler may choose another algorithm.

Worked example: 8 devices of a v5e, x=2 and y=4, each gather one byte from every other. One half of every byte goes
along x first: a device sends its half to 1 other device, 1/2 byte. Then it has two halves, and sends them along y to 3
others: 3 bytes. The other half goes along y first, to 3 others: 3/2 bytes. Then a device has four halves, and sends
them along x to 1 other: 2 bytes. So a device sends 2.5 bytes along x and 4.5 along y: 7 in all, the least that is
possible.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardkit import cost
from shardkit._arguments.checks import format_sizes
from shardkit.cost.hardware import chip_of

_BETWEEN, _TORUS, _INSIDE = range(3)  # the order in which a gather takes dimensions
_CORE_LINK = 600e9  # bytes/s, one direction, between the two devices of a tpu7x chip, six times a link: its page
_GATHERS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")


class Dim(NamedTuple):
    """One dimension of a network.

    Attributes:
        name: "slice", "host", "x", "y", "z", "core" or "gpu".
        size: devices along it.
        level: 0 between hosts or slices, 1 for a torus, 2 inside a chip or host.
        wrap: whether the last device along it is linked with the first, in a torus.
        bandwidth: bytes/s, one direction, of a link or into the switch.
    """

    name: str
    size: int
    level: int
    wrap: bool
    bandwidth: float


class Network(NamedTuple):
    """A box of devices and their links.

    Attributes:
        chip: the name of the chip.
        dims: its dimensions, first the dimension between hosts or slices.
        shared: whether devices that differ only in the last dimension, the cores of a chip, share all other links.
    """

    chip: str
    dims: tuple[Dim, ...]
    shared: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Devices along each dimension."""
        return tuple(dim.size for dim in self.dims)

    def __str__(self) -> str:
        sizes = [f"{dim.name}={dim.size}" for dim in self.dims]
        return f"{self.chip} {' x '.join(sizes)}"


Coordinates = tuple[tuple[int, ...], ...]  # of devices on a network


def find_network(devices: Sequence[Any]) -> tuple[Network, Coordinates] | None:
    """The network of some devices, and the coordinates of each in it; None for a kind without known links.

    Raises:
        ValueError: the devices fill no box.
    """
    chip = chip_of(devices[0].device_kind)
    if chip is None:
        return None
    if chip.torus:
        names = ["slice", *"xyz"[: chip.torus], "core"]
        positions = _locate_on_torus(devices, chip.torus)
    else:
        names = ["host", "gpu"]
        positions = _locate_in_hosts(devices)
    # Part of a pod need not begin at its corner.
    positions -= positions.min(axis=0)
    shape = positions.max(axis=0) + 1
    distinct = len(set(map(tuple, positions.tolist())))
    if distinct != len(devices) or math.prod(shape) != len(devices):
        raise ValueError(
            f"make_mesh: placement needs devices that fill a box; got {len(devices)} in one of "
            f"{format_sizes(zip(names, shape.tolist(), strict=True))}. Pass all devices of a slice, or leave "
            "placement out."
        )
    # A torus of three dims wraps around if it is made of cubes of 4; a torus of two dims only along a whole pod's 16.
    made_of_cubes = not (shape[1 : 1 + chip.torus] % 4).any()
    # A single device keeps one dimension, of size 1.
    used = np.flatnonzero(shape > 1).tolist() or [0]
    dims = []
    for number in used:
        wrap = made_of_cubes if chip.torus == 3 else shape[number] == 16
        dims.append(_make_dim(chip, names[number], int(shape[number]), wrap))
    # The two cores of a chip leave it by the same links.
    network = Network(chip.name, tuple(dims), shared=dims[-1].name == "core")
    return network, tuple(map(tuple, positions[:, used].tolist()))


def _find_slice(device: Any) -> int:
    """The number of a device's slice; 0 for devices without slices."""
    return getattr(device, "slice_index", None) or 0


def _locate_on_torus(devices: Sequence[Any], ndim: int) -> np.ndarray:
    """The slice, the place on the torus and the core of each device, [devices, dims]."""
    positions = []
    for device in devices:
        positions.append((_find_slice(device), *device.coords[:ndim], device.core_on_chip))
    return np.array(positions)


def _locate_in_hosts(devices: Sequence[Any]) -> np.ndarray:
    """The host of each device, and its number there in the order of the devices, [devices, 2]."""
    # A host is one process of one slice.
    hosts = [(_find_slice(device), device.process_index) for device in devices]
    host_numbers = {}
    for number, host in enumerate(sorted(set(hosts))):
        host_numbers[host] = number
    counts = Counter[tuple[int, int]]()
    positions = []
    for host in hosts:
        positions.append((host_numbers[host], counts[host]))
        counts[host] += 1
    return np.array(positions)


def _make_dim(chip: cost.Chip, name: str, size: int, wrap: bool) -> Dim:
    if name in ("slice", "host"):
        return Dim(name, size, _BETWEEN, False, chip.network_bandwidth)
    if name in ("core", "gpu"):
        bandwidth = _CORE_LINK if name == "core" else chip.link_bandwidth
        return Dim(name, size, _INSIDE, False, bandwidth)
    return Dim(name, size, _TORUS, bool(wrap), chip.link_bandwidth)


Moves = int | tuple[tuple[int, int], ...]  # of a ppermute: by how many places, or from which to which


def arrange_devices(
    devices: Sequence[Any], order: Coordinates, shape: Sequence[int], coordinates: Coordinates
) -> np.ndarray:
    """The devices in the order of the coordinates `order`, in a shape; `coordinates` has those of each device."""
    by_coordinates = dict(zip(coordinates, devices, strict=True))
    grid = np.empty(len(order), dtype=object)
    for place, position in enumerate(order):
        grid[place] = by_coordinates[position]
    return grid.reshape(tuple(shape))


class Load(NamedTuple):
    """Collectives of one kind over the same axes.

    Attributes:
        kind: the collective.
        axes: mesh axes.
        sent: bytes that a device sends in all, as `cost.wire` has them.
        moves: for a ppermute, by how many places every message goes round, or the pairs (source, target).
    """

    kind: str
    axes: tuple[str, ...]
    sent: float
    moves: Moves = 1


def count_members(axes: Mapping[str, int], load: Load) -> int:
    """How many devices a group of a load has."""
    return math.prod(axes[axis] for axis in load.axes)


def time_load(network: Network, axes: Mapping[str, int], order: Coordinates, load: Load) -> float:
    """Seconds of the busiest link for a load; `order` has the coordinates of a mesh's devices, in row-major order."""
    grid = np.array(order).reshape(*axes.values(), len(network.dims))
    names = list(axes)
    inner = [names.index(axis) for axis in load.axes]
    outer = [number for number in range(len(names)) if number not in inner]
    members = count_members(axes, load)
    # From [*mesh, dims] to [groups, members, dims]: the axes of the load number the members of a group, all others the
    # groups.
    groups = grid.transpose(*outer, *inner, len(names)).reshape(-1, members, len(network.dims))
    return load.sent * time_busiest_link(network, load.kind, groups, load.moves)


def time_busiest_link(
    network: Network, kind: str, groups: np.ndarray, moves: Moves = 1, *, alike: bool = False
) -> float:
    """Seconds of the busiest link if each member of each group sends one byte.

    Args:
        network: the network.
        kind: the collective.
        groups: coordinates, [groups, members, dims].
        moves: as for `Load`.
        alike: whether all lines of the network in a dimension have the same groups, so that one of each is enough.
    """
    loads = _LinkLoads(network)
    if kind == "ppermute":
        loads.add_permute(groups, moves)
        return loads.find_busiest()
    counts = _count_positions(groups)
    if counts is None:
        loads.add_unaligned(kind, groups)
    elif kind in _GATHERS:
        loads.add_gather(groups, counts, alike)
    else:
        loads.add_all_to_all(groups, counts, alike)
    return loads.find_busiest()


def _count_positions(groups: np.ndarray) -> list[int] | None:
    """If the groups are boxes of one size, how many positions a group has along each dimension; else None.

    The positions need not be next to each other: the devices (0, 0), (0, 2), (1, 0), (1, 2) have [2, 2].
    """
    _, members, dims = groups.shape
    counts = []
    for dim in range(dims):
        positions = np.sort(groups[:, :, dim], axis=1)
        distinct = 1 + np.count_nonzero(np.diff(positions, axis=1), axis=1)
        if distinct.min() != distinct.max():
            return None
        counts.append(int(distinct[0]))
    if math.prod(counts) != members:
        return None
    return counts


class _LinkLoads:
    """The bytes on each link of a network; each method adds those of a collective.

    Attributes:
        by_dim: for each dimension the bytes over each link along it: [direction, *coordinates of the device that it
            leaves].
    """

    def __init__(self, network: Network):
        self.network = network
        self.by_dim = [np.zeros((2, *network.shape)) for _ in network.dims]

    def find_busiest(self) -> float:
        """Seconds of the busiest link."""
        seconds = 0.0
        for dim, load in zip(self.network.dims, self.by_dim, strict=True):
            if self.network.shared and dim is not self.network.dims[-1]:
                load = load.sum(axis=-1)  # the devices of a chip share its links
            seconds = max(seconds, float(load.max()) / dim.bandwidth)
        return seconds

    def add_permute(self, groups: np.ndarray, moves: Moves) -> None:
        """Adds a ppermute, of which each message is one byte.

        Worked example: in groups of 4 members `moves=1` stands for the pairs (0, 1), (1, 2), (2, 3), (3, 0).
        """
        members = groups.shape[1]  # of [groups, members, dims]
        if isinstance(moves, int):
            moves = tuple((number, (number + moves) % members) for number in range(members))
        sources = [source for source, _ in moves]
        targets = [target for _, target in moves]
        self._send(groups[:, sources], groups[:, targets], 1.0)

    def add_unaligned(self, kind: str, groups: np.ndarray) -> None:
        """Adds groups that are no boxes: gathers by a ring in both directions, others by messages of all pairs."""
        members = groups.shape[1]
        # A member sends one byte in all: half of it each way round, or an equal part to each of the others.
        if kind in _GATHERS:
            shifts = [-1, 1]
            message = 0.5
        else:
            shifts = list(range(1, members))
            message = 1 / (members - 1)
        for shift in shifts:
            self._send(groups, np.roll(groups, shift, axis=1), message)

    def add_gather(self, groups: np.ndarray, counts: Sequence[int], alike: bool) -> None:
        """Adds a gather, or what sends as much, in boxes with `counts` positions along each dimension."""
        # Each member sends one byte in all, and `_divide_bucket` counts pieces: n - 1 pieces are that byte.
        received_pieces = groups.shape[1] - 1
        # Dimension by dimension, each as a ring or line of its own: the bucket algorithm overlaps them, and the busiest
        # decides.
        for dim, sent in enumerate(_divide_bucket(self.network, counts)):
            if sent:
                senders = self._choose_senders(groups, dim, alike)
                self._add_ring(dim, groups, counts[dim], sent / received_pieces, senders)

    def add_all_to_all(self, groups: np.ndarray, counts: Sequence[int], alike: bool) -> None:
        """Adds an all_to_all in boxes with `counts` positions along each dimension."""
        members = groups.shape[1]
        for dim, count in enumerate(counts):
            # To each other position along this dimension go the messages for all its members, members / count of them;
            # each of the n - 1 messages of a device is an equal part of its byte.
            message = members / count / (members - 1)
            senders = self._choose_senders(groups, dim, alike)
            self._add_exchange(dim, groups, count, message, senders)

    def _choose_senders(self, groups: np.ndarray, dim: int, alike: bool) -> np.ndarray:
        """Which members to count, [groups, members]: all, or the members on the first line along a dimension.

        Devices that share the links of the first line are counted too.
        """
        if not alike:
            return np.ones(groups.shape[:2], bool)
        last = len(self.network.dims) - 1
        across_dims = []
        for number in range(len(self.network.dims)):
            shares_links = self.network.shared and number == last
            if number != dim and not shares_links:
                across_dims.append(number)
        return (groups[:, :, across_dims] == 0).all(axis=2)

    def _add_ring(self, dim: int, groups: np.ndarray, count: int, sent: float, senders: np.ndarray) -> None:
        """Adds what senders send along a dimension, `sent` each: round a ring in both directions, or along a line.

        Worked example: along a ring of 4, a device sends one half each way. Along a line of 4, every device passes the
        data of the devices behind it on, with its own. To the right, the first device sends 1 of 3 shares, the second 2
        and the third 3; to the left, the second sends 3, the third 2 and the fourth 1.
        """
        size = self.network.dims[dim].size
        wrap = self.network.dims[dim].wrap
        # A switch has no neighbors: the only link of a device is the one into the switch, counted as direction 0.
        if self.network.dims[dim].level != _TORUS:
            np.add.at(self.by_dim[dim][0], tuple(groups[senders].T), sent)
            return
        positions, numbers = _find_line(groups, dim, count)
        # [groups, positions]: from each position to the next of its group, round the ring.
        gaps = (np.roll(positions, -1, axis=1) - positions) % size
        is_ring = (gaps == gaps[:, :1]).all(axis=1) & wrap
        # A line leaves out the longest gap of the ring. Every piece goes from its source to both ends.
        opening = np.full(len(gaps), count - 1)
        if wrap:
            opening = np.argmax(gaps, axis=1)
        behind = (np.arange(count) - opening[:, None] - 1) % count + 1  # members from one end to each gap
        for shift, pieces in ((1, behind % count), (-1, (count - behind) % count)):
            amounts = np.where(is_ring[:, None], sent / 2, sent * pieces / (count - 1))
            if shift < 0:
                amounts = np.roll(amounts, 1, axis=1)  # of the gap before
            target = np.take_along_axis(np.roll(positions, -shift, axis=1), numbers, axis=1)
            amount = np.take_along_axis(amounts, numbers, axis=1)
            self._send_along(dim, groups[senders], target[senders], amount[senders])

    def _add_exchange(self, dim: int, groups: np.ndarray, count: int, message: float, senders: np.ndarray) -> None:
        """Adds a message of each sender, along a dimension, to each other position of its group."""
        positions, _ = _find_line(groups, dim, count)
        for number in range(count):
            target = np.broadcast_to(positions[:, number, None], groups.shape[:2])[senders]
            self._send_along(dim, groups[senders], target, np.full(target.shape, message))

    def _send(self, sources: np.ndarray, targets: np.ndarray, size: float) -> None:
        """Adds a message of this size from each source to its target, dimension by dimension."""
        dims = len(self.network.dims)
        position = sources.copy().reshape(-1, dims)
        targets = targets.reshape(-1, dims)
        for dim in range(dims):
            self._send_along(dim, position, targets[:, dim], np.full(len(position), size))
            # In the next dimension it starts from where this one has brought it.
            position[:, dim] = targets[:, dim]

    def _send_along(self, dim: int, sources: np.ndarray, target: np.ndarray, amount: np.ndarray) -> None:
        """Adds to the links between sources, [messages, dims], and their targets in one dimension, the shortest way."""
        line = self.network.dims[dim]
        load = self.by_dim[dim]
        steps = target - sources[:, dim]
        if line.level != _TORUS:
            np.add.at(load[0], tuple(sources.T), amount * (steps != 0))
            return
        if line.wrap:
            # The shorter way round: on a ring of 4, three steps to the right become one to the left.
            steps = (steps + line.size // 2) % line.size - line.size // 2
        half_way = line.wrap & (2 * np.abs(steps) == line.size)  # both directions are equally short: half goes each way
        amount = amount * np.where(half_way, 0.5, 1.0)
        for direction, sign in enumerate((1, -1)):
            distances = np.where(half_way, np.abs(steps), np.maximum(sign * steps, 0))
            # Link by link: a message over three devices loads each of the three links on its way.
            for step in range(int(distances.max(initial=0))):
                passing = distances > step
                link = sources[passing]
                link[:, dim] = (link[:, dim] + sign * step) % line.size
                np.add.at(load[direction], tuple(link.T), amount[passing])


def _find_line(groups: np.ndarray, dim: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The positions of each group along a dimension, [groups, positions], and the number of each member's position."""
    # In a box each position stands members / count times among the sorted ones: with that stride each is taken once.
    stride = groups.shape[1] // count
    positions = np.sort(groups[:, :, dim], axis=1)[:, ::stride]
    # So many positions stand before that of a member: [groups, members].
    numbers = (positions[:, None, :] < groups[:, :, dim, None]).sum(axis=2)
    return positions, numbers


def _divide_bucket(network: Network, counts: Sequence[int]) -> list[float]:
    """How many pieces each member of a box sends along each dimension, to gather one piece of each member.

    Worked example, on a torus of 4x4: a device sends half of its piece along x first, to 3 others: 1.5 pieces. Then it
    has 4 halves, and sends them along y to 3 others: 6 pieces. The other half goes along y first. So a device sends 7.5
    pieces along each dimension, 15 in all.
    """
    sent = [0.0] * len(counts)
    gathered_pieces = 1  # that a member has from the levels before
    for level in (_BETWEEN, _TORUS, _INSIDE):
        dims = []
        for number, dim_of_network in enumerate(network.dims):
            if dim_of_network.level == level and counts[number] > 1:
                dims.append(number)
        for first in range(len(dims)):
            pieces = gathered_pieces
            for dim in dims[first:] + dims[:first]:
                sent[dim] += (counts[dim] - 1) * pieces / len(dims)
                pieces *= counts[dim]
        gathered_pieces *= math.prod(counts[dim] for dim in dims)
    return sent
