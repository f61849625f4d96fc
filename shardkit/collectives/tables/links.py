"""Links between devices, and how long the messages of a table take on them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from shardkit._arguments import checks
from shardkit._arguments.typed import typed
from shardkit.collectives.tables.messages import Message

Link = tuple[int, int]
Links = Mapping[Link, float]  # bytes/s from one device to another


class LinkTimes(NamedTuple):
    """A table on links.

    Attributes:
        seconds: of all steps, one after the other.
        steps: of each; the latency of each link on the longest way, and the bytes of the busiest link.
        busiest: in each step the most bytes over one link.
    """

    seconds: float
    steps: tuple[float, ...]
    busiest: tuple[float, ...]


@typed
def torus_links(sizes: Sequence[int], bandwidth: float = 1.0, *, wrap: bool = True) -> dict[Link, float]:
    """The links of a torus, or with wrap=False of a grid, in both directions.

    Args:
        sizes: devices along each dim; device numbers count the last dim fastest.
        bandwidth: bytes/s of each link, in each direction.
        wrap: whether the last device along a dim is linked with the first.

    Example:
        >>> sorted(sk.tables.torus_links((3,), wrap=False))
        [(0, 1), (1, 0), (1, 2), (2, 1)]
    """
    sides = sides_of("torus_links", sizes)
    [speed] = checks.positive("torus_links", bandwidth=bandwidth)
    numbers = {place: number for number, place in enumerate(product(*map(range, sides)))}
    links = {}
    for place, number in numbers.items():
        for dim, size in enumerate(sides):
            for by in (-1, 1):
                at = place[dim] + by
                if size > 1 and (wrap or 0 <= at < size):
                    links[number, numbers[(*place[:dim], at % size, *place[dim + 1 :])]] = speed
    return links


def sides_of(where: str, sizes: Sequence[int]) -> tuple[int, ...]:
    """The sizes of a torus; refuses none."""
    if not sizes:
        raise ValueError(f"{where}: sizes must have at least one dim; got {sizes!r}. Pass for example (4, 4).")
    return checks.whole(where, **{f"sizes[{i}]": size for i, size in enumerate(sizes)})


def timed(table: Sequence[Sequence[Message]], links: Links, each: float, latency: float) -> LinkTimes:
    """The time of the messages of each step, with so many bytes a chunk; see `SendTable.simulate`."""
    ways: dict[Link, tuple[int, dict[Link, float]]] = {}
    steps, busiest = [], []
    for messages in table:
        loads: defaultdict[Link, float] = defaultdict(float)
        longest = 0
        for message in messages:
            for pair in message.pairs:
                if pair not in ways:
                    ways[pair] = _way(links, *pair)
                hops, shares = ways[pair]
                longest = max(longest, hops)
                for link, share in shares.items():
                    loads[link] += share * message.each * each
        busiest.append(max(loads.values(), default=0.0))
        steps.append(latency * longest + max((load / links[link] for link, load in loads.items()), default=0.0))
    return LinkTimes(sum(steps), tuple(steps), tuple(busiest))


def checked(where: str, links: Links, devices: int | None = None) -> int:
    """How many devices are linked; refuses links that are none, or over which some device cannot reach another."""
    for link, speed in links.items():
        pair = isinstance(link, tuple) and len(link) == 2 and all(type(end) is int for end in link)
        if not pair or min(link) < 0 or link[0] == link[1] or (devices is not None and max(link) >= devices):
            among = "the devices" if devices is None else f"{devices} devices"
            raise ValueError(
                f"{where}: links must be from one of {among} to another; got {link!r}. Pass a mapping of "
                "(source, target) to bytes/s, as torus_links returns."
            )
        name = f"links[{link[0]}, {link[1]}]"
        checks.positive(where, **{name: speed})  # type: ignore[arg-type]
    devices = 1 + max(map(max, links), default=0) if devices is None else devices
    for start in range(devices):
        there = distances(links, start)
        for end in range(devices):
            if end not in there:
                raise ValueError(
                    f"{where}: links must lead from every device to every other; got none from device {start} to "
                    f"device {end}. Add a link."
                )
    return devices


def distances(links: Iterable[Link], start: int) -> dict[int, int]:
    """Links between a device and those that it reaches."""
    after: defaultdict[int, list[int]] = defaultdict(list)
    for source, target in links:
        after[source].append(target)
    found, front = {start: 0}, [start]
    while front:
        front = list({target for at in front for target in after[at] if target not in found})
        found |= dict.fromkeys(front, max(found.values()) + 1)
    return found


def _way(links: Links, source: int, target: int) -> tuple[int, dict[Link, float]]:
    """The links of a message and its share of each: at every device it parts equally among the shortest ways."""
    left = distances([(b, a) for a, b in links], target)  # links until the target
    shares: defaultdict[Link, float] = defaultdict(float)
    here = {source: 1.0}
    for _ in range(left[source]):
        following: defaultdict[int, float] = defaultdict(float)
        for at, amount in here.items():
            nearer = [b for a, b in links if a == at and left.get(b, left[at]) < left[at]]
            for b in nearer:
                shares[at, b] += amount / len(nearer)
                following[b] += amount / len(nearer)
        here = dict(following)
    return left[source], dict(shares)
