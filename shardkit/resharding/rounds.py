"""Which device sends what to which, from one mesh to another that shares no device with it; no jax.

Both layouts cut an array at some places. Cut at all of them, it is a grid of equal units: each is in one shard of the
source and in one of the target. A unit is sent once. Copies of a shard share its units among them, on both sides. Then
the sends are put in rounds, in which a device sends one unit at most and receives one at most: a round is a ppermute.

Worked example: an 8x4 array from P("fsdp", "tp") of fsdp=2, tp=2 to P(None, "tp") of replica=2, tp=2.

| | |
|---|---|
| cut | rows at 4, columns at 2: a grid of 2x2 units, 4x2 each |
| senders | devices 0 to 3 of the source, a unit each: (0, 0), (0, 1), (1, 0), (1, 1) |
| receivers | columns 0-1 are on devices 0 and 2 of the target, which get (0, 0) and (1, 0); the others on 1 and 3 |
| rounds | one: 0 to 0, 1 to 1, 2 to 2, 3 to 3 |

In the target devices 0 and 2 then send each other what they have, by an all_gather over "replica". If each copy came
from the source, twice the bytes would cross.

Source: the number of rounds is the least there is, by Koenig's theorem on the edges of bipartite graphs (1916).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from shardkit.resharding.views import DimAxes, Shape, count_parts, find_joint_index


class Side(NamedTuple):
    """A mesh, and how an array is laid out on it."""

    axes: tuple[tuple[str, int], ...]  # of the mesh, major to minor, with their sizes
    layout: DimAxes  # for each dim the axes that split it

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis."""
        return dict(self.axes)

    @property
    def parts(self) -> Shape:
        """Into how many parts each dim is split."""
        sizes = self.sizes
        return tuple(count_parts(axes, sizes) for axes in self.layout)

    @property
    def split_axes(self) -> tuple[str, ...]:
        """The axes that split a dim, in the mesh's order; those of one device are left out."""
        names = set(itertools.chain(*self.layout))
        return tuple(name for name, size in self.axes if size > 1 and name in names)

    @property
    def copy_axes(self) -> tuple[str, ...]:
        """The axes over which the array is copied, in the mesh's order."""
        names = set(itertools.chain(*self.layout))
        return tuple(name for name, size in self.axes if size > 1 and name not in names)

    @property
    def copies(self) -> int:
        """How many devices hold each shard."""
        return count_parts(self.copy_axes, self.sizes)

    def devices(self) -> Iterator[dict[str, int]]:
        """The coordinates of each device, in the order of their numbers."""
        sizes = self.sizes
        for coordinates in itertools.product(*map(range, sizes.values())):
            yield dict(zip(sizes, coordinates, strict=True))

    def find_shard(self, device: Mapping[str, int]) -> Shape:
        """Which shard a device holds: its number along each dim."""
        sizes = self.sizes
        return tuple(find_joint_index(axes, device, sizes) for axes in self.layout)

    def list_holders(self) -> dict[Shape, list[int]]:
        """The devices with each shard, by their numbers."""
        holders: dict[Shape, list[int]] = {}
        for number, device in enumerate(self.devices()):
            holders.setdefault(self.find_shard(device), []).append(number)
        return holders


class UnitSend(NamedTuple):
    """A unit that is sent."""

    sender: int  # the number of a device in the source mesh
    receiver: int  # the number of a device in the target mesh
    unit: Shape  # its place in the grid


Pairs = tuple[tuple[int, int], ...]
Round = tuple[UnitSend, ...]  # in the order of the senders


class Rounds(NamedTuple):
    """How an array crosses from one mesh to the other."""

    grid: Shape  # into how many units each dim is cut
    unit: Shape  # the shape of one
    rounds: tuple[Round, ...]  # those with the same senders and receivers beside each other

    def count_messages(self) -> int:
        """The units that are sent, of all devices."""
        return sum(map(len, self.rounds))


def list_pairs(one_round: Round) -> Pairs:
    """Who sends to whom."""
    return tuple((message.sender, message.receiver) for message in one_round)


@lru_cache(maxsize=1024)
def find_rounds(shape: Shape, source: Side, target: Side) -> Rounds:
    """The rounds in which an array gets from the source to the target; both layouts divide it."""
    grid = cut_at_both(source, target)
    if 0 in shape:
        return Rounds(grid, divide_sizes(shape, grid), ())
    grid = _cut_for_copies(shape, grid, source, target)
    messages = _assign_units(grid, source, target)
    rounds = _arrange_rounds(messages)
    # Rounds with the same pairs side by side, so that one ppermute sends the units of several.
    rounds.sort(key=list_pairs)
    return Rounds(grid, divide_sizes(shape, grid), tuple(rounds))


def cut_at_both(source: Side, target: Side) -> Shape:
    """The grid of units with a cut wherever either layout has one."""
    return tuple(map(math.lcm, source.parts, target.parts))


def divide_sizes(sizes: Shape, counts: Shape) -> Shape:
    """The shape of a unit, of an array that is cut into a grid of so many units along each dim."""
    return tuple(size // count for size, count in zip(sizes, counts, strict=True))


def _cut_for_copies(shape: Shape, grid: Shape, source: Side, target: Side) -> Shape:
    """A finer grid, in which the copies of a shard can share its units evenly, as far as the sizes of the dims allow.

    Worked example: 12 rows from P("x") of x=2, to P() of a mesh of 6. The grid has 2 units. Six receivers share them,
    so each is cut in 3. Of 14 rows the units are of 7, which 3 does not divide: two of six devices receive.
    """
    factor = 1
    for side in (source, target):
        units = math.prod(grid) // math.prod(side.parts)
        factor = math.lcm(factor, side.copies // math.gcd(units, side.copies))
    counts = list(grid)
    for prime in _find_prime_factors(factor):
        for dim, size in enumerate(shape):
            if size // counts[dim] % prime == 0:
                counts[dim] *= prime
                break
    return tuple(counts)


def _find_prime_factors(number: int) -> list[int]:
    """In rising order: 12 is 2 * 2 * 3."""
    factors = []
    candidate = 2
    while number > 1:
        while number % candidate == 0:
            factors.append(candidate)
            number //= candidate
        candidate += 1
    return factors


def _assign_units(grid: Shape, source: Side, target: Side) -> list[UnitSend]:
    """For each unit one of the devices that hold it and one that needs it: copies of a shard take turns."""
    senders = source.list_holders()
    receivers = target.list_holders()
    turns: Counter[tuple[str, Shape]] = Counter()
    messages = []
    for unit in itertools.product(*map(range, grid)):
        devices = []
        for name, side, holders in (("source", source, senders), ("target", target, receivers)):
            shard = find_part(unit, grid, side.parts)
            turn = turns[name, shard]
            turns[name, shard] += 1
            devices.append(holders[shard][turn % side.copies])
        sender, receiver = devices
        messages.append(UnitSend(sender, receiver, unit))
    return messages


def find_part(unit: Shape, grid: Shape, parts: Shape) -> Shape:
    """The part of an array that a unit is in: of a grid of 6 in 2 parts, units 0 to 2 are in part 0."""
    return tuple(index * part // count for index, count, part in zip(unit, grid, parts, strict=True))


def _arrange_rounds(messages: Sequence[UnitSend]) -> list[Round]:
    """Rounds in which a device sends and receives once at most; as many as the busiest device has units."""
    rounds = _Rounds(messages)
    for number in range(len(messages)):
        rounds.add(number)
    return rounds.list_rounds()


class _Rounds:
    """The edges of a bipartite graph, colored one after another: a color is a round."""

    def __init__(self, messages: Sequence[UnitSend]):
        self.messages = messages
        sends = Counter(message.sender for message in messages)
        receipts = Counter(message.receiver for message in messages)
        self.count = max([*sends.values(), *receipts.values()], default=0)
        self.sent: dict[tuple[int, int], int] = {}  # by the sender and the round, which message
        self.received: dict[tuple[int, int], int] = {}  # by the receiver and the round

    def add(self, number: int) -> None:
        """Puts a message in a round, if necessary after two rounds have traded some of their messages.

        If the sender is free in round a alone and the receiver in round b alone, then the receiver has a message in
        round a, whose sender may have another one in round b, and so on. Along this path all messages change between a
        and b. It never comes to our sender, which it could only reach in round a, so that both are free in a then.
        """
        sender, receiver, _ = self.messages[number]
        for index in range(self.count):
            if (sender, index) not in self.sent and (receiver, index) not in self.received:
                self._put(number, index)
                return
        free_of_sender = self._find_free(self.sent, sender)
        free_of_receiver = self._find_free(self.received, receiver)
        self._trade(receiver, free_of_sender, free_of_receiver)
        self._put(number, free_of_sender)

    def list_rounds(self) -> list[Round]:
        """The messages of each round, in the order of their senders."""
        rounds: dict[int, list[UnitSend]] = defaultdict(list)
        for (_, index), number in sorted(self.sent.items()):
            rounds[index].append(self.messages[number])
        return [tuple(rounds[index]) for index in sorted(rounds)]

    def _put(self, number: int, index: int) -> None:
        sender, receiver, _ = self.messages[number]
        self.sent[sender, index] = number
        self.received[receiver, index] = number

    def _find_free(self, busy: Mapping[tuple[int, int], int], device: int) -> int:
        """The first round in which a device has no message: with a message left to place, there is one."""
        return next(index for index in range(self.count) if (device, index) not in busy)

    def _trade(self, receiver: int, first: int, second: int) -> None:
        """Swaps two rounds along the path of messages that begins at a receiver with its message of the first."""
        path = self._find_path(receiver, first, second)
        for number, index in path:
            sender, receiver, _ = self.messages[number]
            del self.sent[sender, index]
            del self.received[receiver, index]
        for number, index in path:
            self._put(number, first + second - index)

    def _find_path(self, receiver: int, first: int, second: int) -> list[tuple[int, int]]:
        """Messages, with their rounds, of which each shares a device with the next."""
        path: list[tuple[int, int]] = []
        while True:
            number = self.received.get((receiver, first))
            if number is None:
                return path
            path.append((number, first))
            sender = self.messages[number].sender
            number = self.sent.get((sender, second))
            if number is None:
                return path
            path.append((number, second))
            receiver = self.messages[number].receiver


def cut_unit(unit: Shape, most: int) -> Shape:
    """Into how many equal pieces to cut each dim of a unit, so that a piece has at most `most` elements, or has one.

    Worked example: 6x10 with at most 12 elements needs 5 pieces. Dim 0 divides into 6, dim 1 into 5: it is cut. With at
    most 5 elements it needs 12, and no dim divides into so many: dim 1 is cut into 10 and then dim 0 into 2.
    """
    counts = [1] * len(unit)
    sizes = list(unit)
    while math.prod(sizes) > max(1, most):
        needed = -(-math.prod(sizes) // most)
        choices = {dim: _find_divisor(size, needed) for dim, size in enumerate(sizes)}
        enough = {dim: count for dim, count in choices.items() if count >= needed}
        if enough:
            dim = min(enough, key=lambda dim: enough[dim])
        else:  # the longest dim row by row, and then another one
            dim = max(choices, key=lambda dim: sizes[dim])
        counts[dim] *= choices[dim]
        sizes[dim] //= choices[dim]
    return tuple(counts)


def _find_divisor(number: int, least: int) -> int:
    """Its smallest divisor that is at least this; itself if there is none."""
    for divisor in range(least, number):
        if number % divisor == 0:
            return divisor
    return number
