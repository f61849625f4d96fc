"""Pieces of a state: how its arrays are cut, which host keeps and sends which piece, and which must move to whom.

Pure functions of shapes and places, without devices. A piece is what one device has of one array; devices with the same
part of an array have the same piece.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp  # for the dtypes that NumPy lacks
import numpy as np

from shardkit._check import counted
from shardkit.partitioning.storage import Rows, Sizes

Region = tuple[tuple[int, int], ...]  # first and end in each dim


class Grid(NamedTuple):
    """How a stored array is cut into pieces, and where its elements are in the original array.

    Attributes:
        shape: the stored shape.
        dtype: the stored dtype, by name.
        parts: into how many parts each dim is cut; pieces count along the last dim first.
        sizes, rows: of a Padded leaf; what is stored beyond `sizes`, and rows of -1, are not in the original array.
    """

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[int, ...]
    sizes: Sizes = ()
    rows: Rows = ()

    @classmethod
    def of_json(cls, shape: Any, dtype: str, parts: Any, sizes: Any, rows: Any) -> Grid:
        """A grid that was written as a JSON list."""
        return cls(tuple(shape), dtype, tuple(parts), tuple((dim, size) for dim, size in sizes), tuple(rows))

    @property
    def total(self) -> int:
        """Number of pieces."""
        return math.prod(self.parts)

    @property
    def piece(self) -> tuple[int, ...]:
        """The shape of each piece."""
        return tuple(size // parts for size, parts in zip(self.shape, self.parts, strict=True))

    @property
    def nbytes(self) -> int:
        """The bytes of each piece."""
        return math.prod(self.piece) * jnp.dtype(self.dtype).itemsize

    def number(self, index: tuple[slice, ...]) -> int:
        """The piece at an index of `devices_indices_map`."""
        starts = [each.indices(size)[0] for each, size in zip(index, self.shape, strict=True)]
        number = 0
        for start, size, parts in zip(starts, self.piece, self.parts, strict=True):
            number = number * parts + (start // size if size else 0)
        return number

    def blocks(self, number: int) -> Iterator[tuple[Region, Region]]:
        """The parts of a piece that are in the original array: where there, and where in the piece."""
        place, sizes = self._place(number), dict(self.sizes)
        starts = [part * size for part, size in zip(place, self.piece, strict=True)]
        stops = [
            min(start + size, sizes.get(dim, self.shape[dim]))
            for dim, (start, size) in enumerate(zip(starts, self.piece, strict=True))
        ]
        if any(stop <= start for start, stop in zip(starts, stops, strict=True)):
            return  # padding alone, or nothing
        here = tuple(zip(starts, stops, strict=True))
        inside = tuple((0, stop - start) for start, stop in here)
        if not self.rows:
            yield here, inside
            return
        for first, row, length in _runs(self.rows[starts[0] : stops[0]]):
            yield ((row, row + length), *here[1:]), ((first, first + length), *inside[1:])

    def touching(self, region: Region) -> Iterator[int]:
        """The pieces that have elements of a region of the original array."""
        if any(stop <= start for start, stop in region):
            return
        spans: list[Iterable[int]] = [
            range(start // size, -(-stop // size)) for (start, stop), size in zip(region, self.piece, strict=True)
        ]
        if self.rows:
            (start, stop), size = region[0], self.piece[0]
            spans[0] = sorted({stored // size for stored, row in enumerate(self.rows) if start <= row < stop})
        for place in itertools.product(*spans):
            number = 0
            for part, parts in zip(place, self.parts, strict=True):
                number = number * parts + part
            yield number

    def _place(self, number: int) -> list[int]:
        place = []
        for parts in reversed(self.parts):
            number, part = divmod(number, parts)
            place.append(part)
        return place[::-1]


def _runs(rows: Rows) -> Iterator[tuple[int, int, int]]:
    """Runs of consecutive rows: where each begins, its first row, and its length; rows of -1 are left out."""
    first = 0
    while first < len(rows):
        end = first + 1
        while end < len(rows) and rows[end] == rows[first] + end - first:
            end += 1
        if rows[first] >= 0:
            yield first, rows[first], end - first
        first = first + 1 if rows[first] < 0 else end


def overlap(a: Region, b: Region) -> Region | None:
    """What two regions have in common; None if that is nothing."""
    both = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return None if any(stop <= start for start, stop in both) else both


def filled(region: Region, dtype: Any, grid: Grid, pieces: dict[int, np.ndarray]) -> np.ndarray:
    """A region of the original array, from the pieces that touch it."""
    out = np.empty([stop - start for start, stop in region], dtype)
    for number in grid.touching(region):
        for there, inside in grid.blocks(number):
            both = overlap(region, there)
            if both is not None:
                target = tuple(slice(a - r[0], b - r[0]) for (a, b), r in zip(both, region, strict=True))
                source = tuple(
                    slice(i[0] + a - t[0], i[0] + b - t[0]) for (a, b), t, i in zip(both, there, inside, strict=True)
                )
                out[target] = pieces[number][source]
    return out


class Kept(NamedTuple):
    """A piece that the process of a device keeps.

    Attributes:
        leaf: index of the array.
        piece: number of the piece.
        device: the device that has it.
        received: whether it is the piece that this device received.
    """

    leaf: int
    piece: int
    device: int
    received: bool


class Sharing(NamedTuple):
    """Who keeps and sends what.

    Attributes:
        sent: the arrays of which every device sends its piece.
        targets: for each device the one that it sends to.
        kept: all pieces that are kept, on all hosts.
    """

    sent: tuple[int, ...]
    targets: tuple[int, ...]
    kept: tuple[Kept, ...]


def sharing(held: Sequence[Sequence[int]], nbytes: Sequence[int], hosts: Sequence[int]) -> Sharing:
    """Who keeps and sends which pieces, so that no host is the only one to have any.

    A host keeps one copy of each of its pieces. An array of which some piece is on one host alone is sent to the
    devices of another host, and that keeps those pieces.

    Args:
        held: for each array, the piece of each device.
        nbytes: for each array, the bytes of a piece.
        hosts: the host of each device.

    Raises:
        ValueError: something must be sent, and one host has more than half of the devices.
    """
    load, kept, sent = [0] * len(hosts), list[Kept](), list[int]()
    alone = list[set[int]]()
    for leaf, pieces in enumerate(held):
        having: dict[tuple[int, int], list[int]] = {}
        for device, piece in enumerate(pieces):
            having.setdefault((piece, hosts[device]), []).append(device)
        for (piece, _), devices in having.items():
            device = min(devices, key=lambda each: load[each])
            load[device] += nbytes[leaf]
            kept.append(Kept(leaf, piece, device, received=False))
        copies = Counter(piece for piece, _ in having)
        alone.append({piece for piece, count in copies.items() if count == 1} if len(set(hosts)) > 1 else set())
        if alone[-1]:
            sent.append(leaf)
    targets = shifted(hosts) if sent else ()
    for leaf in sent:
        done = set[int]()
        for source, target in enumerate(targets):
            piece = held[leaf][source]
            if piece in alone[leaf] and piece not in done:
                done.add(piece)
                kept.append(Kept(leaf, piece, target, received=True))
    return Sharing(tuple(sent), targets, tuple(kept))


def shifted(hosts: Sequence[int]) -> tuple[int, ...]:
    """For each device a target on another host: a shift by one host, over the devices in the order of hosts.

    Raises:
        ValueError: one host has more than half of the devices.
    """
    order = sorted(range(len(hosts)), key=lambda device: hosts[device])
    most = max(Counter(hosts).values())
    if 2 * most > len(hosts):
        raise ValueError(
            f"Snapshots: no host may have more than half of the devices, so that another one can keep its copies; got "
            f"{counted(most, 'device')} of {len(hosts)} on one host. Start as many processes on each host."
        )
    targets = [0] * len(hosts)
    for place, device in enumerate(order):
        targets[device] = order[(place + most) % len(order)]
    return tuple(targets)


def moves(have: np.ndarray, hosts: Sequence[int], needs: np.ndarray) -> list[tuple[int, int]]:
    """The pieces that some process needs and its host lacks, each with the process that sends it.

    Args:
        have: bool [hosts, pieces]: which host has which piece.
        hosts: the host of each process.
        needs: bool [processes, pieces]: which process needs which piece.
    """
    missing = np.flatnonzero((needs & ~have[list(hosts)]).any(axis=0))
    found = []
    for piece in missing.tolist():
        senders = [process for process, host in enumerate(hosts) if have[host, piece]]
        found.append((piece, senders[piece % len(senders)]))
    return found
