"""Networks of linked devices, and the load that collectives put on their links.

The devices of a network fill a box. Along some dimensions neighbors are linked, as in a torus; along others a switch
connects all, that of a host or of a data center. A collective is carried out dimension by dimension, over slow ones
while its data are few:

- all_gather, and a reduce_scatter in the other direction: between hosts or slices, then along the torus, whose
  dimensions take turns at being first, each with its part of the data (the bucket algorithm), last inside a host or a
  chip. Along a torus halves go round a ring in both directions where the group stands evenly round it, else all goes to
  both ends of a line. An all_reduce is one of each.
- all_to_all and ppermute: each message on the shortest way, dimension by dimension, in halves where two are equal.

Groups that lie between each other share links, and so do the devices of a chip. The busiest link decides how long a
collective takes. Latency, and what a compiler does instead, are left out.

Source: Barnett et al., Global combine on mesh architectures with wormhole routing (1993), for the bucket algorithm.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardkit import cost
from shardkit._arguments.checks import sized

_BETWEEN, _TORUS, _INSIDE = range(3)  # the order in which a gather takes dimensions
_CORE_LINK = 600e9  # bytes/s, one direction, between the two devices of a tpu7x chip, six times a link: its page
_GATHERS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")


class Dim(NamedTuple):
    """One dimension of a network.

    Attributes:
        name: "slice", "host", "x", "y", "z", "core" or "gpu".
        size: devices along it.
        level: 0 between hosts or slices, 1 for a torus, 2 inside a chip or host.
        wrap: whether the last is linked with the first, of a torus.
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
        dims: its dimensions, those between hosts or slices first.
        shared: whether devices that differ in the last dimension alone share the links of all others.
    """

    chip: str
    dims: tuple[Dim, ...]
    shared: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Devices along each dimension."""
        return tuple(dim.size for dim in self.dims)

    def __str__(self) -> str:
        return f"{self.chip} " + " x ".join(f"{dim.name}={dim.size}" for dim in self.dims)


Places = tuple[tuple[int, ...], ...]  # coordinates of devices


def network_of(devices: Sequence[Any]) -> tuple[Network, Places] | None:
    """The network of some devices, and the coordinates of each in it; None for a kind without known links.

    Raises:
        ValueError: the devices fill no box.
    """
    chip = cost.chip_of(devices[0].device_kind)
    if chip is None:
        return None
    slices = [getattr(device, "slice_index", None) or 0 for device in devices]
    if chip.torus:
        names = ["slice", *"xyz"[: chip.torus], "core"]
        inside = [(*device.coords[: chip.torus], device.core_on_chip) for device in devices]
        found = [(number, *coordinates) for number, coordinates in zip(slices, inside, strict=True)]
    else:
        names = ["host", "gpu"]
        hosts = [(number, device.process_index) for number, device in zip(slices, devices, strict=True)]
        numbers = {host: at for at, host in enumerate(sorted(set(hosts)))}
        found, seen = [], Counter[tuple[int, int]]()
        for host in hosts:
            found.append((numbers[host], seen[host]))
            seen[host] += 1
    at = np.array(found)
    at -= at.min(axis=0)
    shape = at.max(axis=0) + 1
    if len(set(map(tuple, at.tolist()))) != len(devices) or math.prod(shape) != len(devices):
        raise ValueError(
            f"make_mesh: placement needs devices that fill a box; got {len(devices)} in one of "
            f"{sized(zip(names, shape.tolist(), strict=True))}. Pass all devices of a slice, or leave placement out."
        )
    kept = [i for i, size in enumerate(shape) if size > 1] or [0]
    # A torus of three dims closes where it is made of cubes of 4, one of two in a dim of a whole pod's 16.
    cubes = not (shape[1 : 1 + chip.torus] % 4).any()
    dims = tuple(_dim(chip, names[i], int(shape[i]), cubes if chip.torus == 3 else shape[i] == 16) for i in kept)
    return Network(chip.name, dims, dims[-1].name == "core"), tuple(map(tuple, at[:, kept].tolist()))


def _dim(chip: cost.Chip, name: str, size: int, wrap: bool) -> Dim:
    if name in ("slice", "host"):
        return Dim(name, size, _BETWEEN, False, chip.network_bandwidth)
    if name in ("core", "gpu"):
        return Dim(name, size, _INSIDE, False, _CORE_LINK if name == "core" else chip.link_bandwidth)
    return Dim(name, size, _TORUS, bool(wrap), chip.link_bandwidth)


Moves = int | tuple[tuple[int, int], ...]  # of a ppermute: by how many places, or from which to which


def arranged(devices: Sequence[Any], places: Places, shape: Sequence[int], own: Places) -> np.ndarray:
    """The devices that stand at these places, in a shape; `own` are the coordinates of each."""
    of_place = dict(zip(own, devices, strict=True))
    grid = np.empty(len(places), dtype=object)
    grid[:] = [of_place[place] for place in places]
    return grid.reshape(tuple(shape))


class Load(NamedTuple):
    """Collectives of one kind over the same axes.

    Attributes:
        kind: the collective.
        axes: mesh axes.
        sent: bytes that a device sends in all, as `cost.wire` has them.
        moves: of a ppermute, by how many places every message goes round, or the pairs (source, target).
    """

    kind: str
    axes: tuple[str, ...]
    sent: float
    moves: Moves = 1


def seconds_of(network: Network, axes: Mapping[str, int], places: Places, of: Load) -> float:
    """Seconds of the busiest link for a load, where the devices of a mesh stand at these places."""
    grid = np.array(places).reshape(*axes.values(), len(network.dims))
    names = list(axes)
    inner = [names.index(axis) for axis in of.axes]
    outer = [i for i in range(len(names)) if i not in inner]
    members = math.prod(axes[axis] for axis in of.axes)
    groups = grid.transpose(*outer, *inner, len(names)).reshape(-1, members, len(network.dims))
    return of.sent * busiest(network, of.kind, groups, of.moves)


def busiest(network: Network, kind: str, groups: np.ndarray, moves: Moves = 1, *, alike: bool = False) -> float:
    """Seconds of the busiest link where each member of each group sends one byte.

    Args:
        network: the network.
        kind: the collective.
        groups: coordinates, [groups, members, dims].
        moves: as for `Load`.
        alike: whether all lines of the network in a dimension have the same groups, so that one of each is enough.
    """
    loads = [np.zeros((2, *network.shape)) for _ in network.dims]
    ways, everyone = groups.shape[1], np.ones(groups.shape[:2], bool)
    if kind == "ppermute":
        pairs = [(i, (i + moves) % ways) for i in range(ways)] if isinstance(moves, int) else moves
        sources, targets = (groups[:, list(ends)] for ends in zip(*pairs, strict=True))
        _message(network, loads, sources, targets, 1.0)
    elif (counts := _box(groups)) is None:  # no box: a ring in both directions, in the order of the mesh, or all pairs
        for by in (-1, 1) if kind in _GATHERS else range(1, ways):
            _message(network, loads, groups, np.roll(groups, by, axis=1), 0.5 if kind in _GATHERS else 1 / (ways - 1))
    elif kind in _GATHERS:
        for dim, sent in enumerate(_bucket(network, counts)):
            if sent:
                on = _first(network, groups, dim) if alike else everyone
                _ring(network, loads[dim], groups, dim, counts[dim], sent / (ways - 1), on)
    else:
        for dim, count in enumerate(counts):
            on = _first(network, groups, dim) if alike else everyone
            _exchange(network, loads[dim], groups, dim, count, ways / count / (ways - 1), on)
    busy = 0.0
    for it, load in zip(network.dims, loads, strict=True):
        if network.shared and it is not network.dims[-1]:
            load = load.sum(axis=-1)
        busy = max(busy, float(load.max()) / it.bandwidth)
    return busy


def _box(groups: np.ndarray) -> list[int] | None:
    """Places along each dimension, of groups that are boxes with as many, though not next to each other; else None."""
    counts = []
    for dim in range(groups.shape[2]):
        own = np.sort(groups[:, :, dim], axis=1)
        found = 1 + np.count_nonzero(np.diff(own, axis=1), axis=1)
        if found.min() != found.max():
            return None
        counts.append(int(found[0]))
    return counts if math.prod(counts) == groups.shape[1] else None


def _first(network: Network, groups: np.ndarray, dim: int) -> np.ndarray:
    """The members on the first line along a dimension, with those who share its links, [groups, members]."""
    last = len(network.dims) - 1
    others = [i for i in range(last + 1) if i != dim and not (network.shared and i == last)]
    return (groups[:, :, others] == 0).all(axis=2)


def _bucket(network: Network, counts: Sequence[int]) -> list[float]:
    """What each member of a box sends along each dimension to gather one piece of each, in pieces."""
    sent, held = [0.0] * len(counts), 1
    for level in (_BETWEEN, _TORUS, _INSIDE):
        used = [i for i, dim in enumerate(network.dims) if dim.level == level and counts[i] > 1]
        for first in range(len(used)):
            part = held
            for dim in used[first:] + used[:first]:
                sent[dim] += (counts[dim] - 1) * part / len(used)
                part *= counts[dim]
        held *= math.prod(counts[i] for i in used)
    return sent


def _line(groups: np.ndarray, dim: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The places of each group along a dimension, [groups, places], and which of these each member has."""
    own = np.sort(groups[:, :, dim], axis=1)[:, :: groups.shape[1] // count]
    return own, (own[:, None, :] < groups[:, :, dim, None]).sum(axis=2)


def _ring(
    network: Network, load: np.ndarray, groups: np.ndarray, dim: int, count: int, sent: float, on: np.ndarray
) -> None:
    """Each member that is `on` sends that along a dimension, round a ring in both directions, or along a line."""
    size, wrap = network.dims[dim].size, network.dims[dim].wrap
    if network.dims[dim].level != _TORUS:
        np.add.at(load[0], tuple(groups[on].T), sent)
        return
    own, at = _line(groups, dim, count)
    gaps = (np.roll(own, -1, axis=1) - own) % size
    round_ = (gaps == gaps[:, :1]).all(axis=1) & wrap
    # A line leaves out the longest gap. Every piece leaves its source to both ends: the nearer to one, the more pass.
    open_at = np.argmax(gaps, axis=1) if wrap else np.full(len(gaps), count - 1)
    behind = (np.arange(count) - open_at[:, None] - 1) % count + 1  # members from one end to each gap
    for by, pieces in ((1, behind % count), (-1, (count - behind) % count)):
        amounts = np.where(round_[:, None], sent / 2, sent * pieces / (count - 1))
        amounts = np.roll(amounts, 1, axis=1) if by < 0 else amounts  # of the gap before
        target = np.take_along_axis(np.roll(own, -by, axis=1), at, axis=1)
        _along(network, load, groups[on], dim, target[on], np.take_along_axis(amounts, at, axis=1)[on])


def _exchange(
    network: Network, load: np.ndarray, groups: np.ndarray, dim: int, count: int, message: float, on: np.ndarray
) -> None:
    """Each member that is `on` sends a message along a dimension to each other place of its group."""
    own, _ = _line(groups, dim, count)
    for number in range(count):
        target = np.broadcast_to(own[:, number, None], groups.shape[:2])[on]
        _along(network, load, groups[on], dim, target, np.full(target.shape, message))


def _message(
    network: Network, loads: Sequence[np.ndarray], sources: np.ndarray, targets: np.ndarray, size: float
) -> None:
    """Each source sends that to its target, dimension by dimension."""
    at, targets = (each.reshape(-1, len(network.dims)) for each in (sources.copy(), targets))
    for dim in range(len(network.dims)):
        _along(network, loads[dim], at, dim, targets[:, dim], np.full(len(at), size))
        at[:, dim] = targets[:, dim]


def _along(
    network: Network, load: np.ndarray, sources: np.ndarray, dim: int, target: np.ndarray, amount: np.ndarray
) -> None:
    """Adds to the links between sources, [messages, dims], and their targets in one dimension, on the shortest way."""
    it, steps = network.dims[dim], target - sources[:, dim]
    if it.level != _TORUS:
        np.add.at(load[0], tuple(sources.T), amount * (steps != 0))
        return
    if it.wrap:
        steps = (steps + it.size // 2) % it.size - it.size // 2
    half = np.where(it.wrap & (2 * np.abs(steps) == it.size), 0.5, 1.0)  # two ways are as short
    for direction, sign in enumerate((1, -1)):
        ways = np.where(half < 1, np.abs(steps), np.maximum(sign * steps, 0))
        for step in range(int(ways.max(initial=0))):
            on = ways > step
            link = sources[on]
            link[:, dim] = (link[:, dim] + sign * step) % it.size
            np.add.at(load[direction], tuple(link.T), (amount * half)[on])
