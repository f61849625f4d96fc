"""Links between devices, and how long the messages of a table take on them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from shardkit._arguments import checks
from shardkit._arguments.typed import typed
from shardkit.collectives.tables.messages import Message

DevicePair = tuple[int, int]  # source and target of a link
Bandwidths = Mapping[DevicePair, float]  # bytes/s from one device to another


class _Route(NamedTuple):
    """The route of a message between two devices: over all shortest ways, in equal parts."""

    hops: int
    shares: Mapping[DevicePair, float]  # the share of the message's bytes on each link


class LinkTimes(NamedTuple):
    """The times of a table on links.

    Attributes:
        seconds: the time of all steps, one after the other.
        steps: the time of each step: the latency of each link on the longest way, and the bytes of the slowest link.
        busiest: in each step, the most bytes over one link.
    """

    seconds: float
    steps: tuple[float, ...]
    busiest: tuple[float, ...]


@typed
def torus_links(sizes: Sequence[int], bandwidth: float = 1.0, *, wrap: bool = True) -> dict[DevicePair, float]:
    """Lists the links of a torus, or with wrap=False of a grid, in both directions.

    Args:
        sizes: devices along each dim; device numbers count the last dim fastest.
        bandwidth: bytes/s of each link, in each direction.
        wrap: whether the last device along a dim has a link to the first.

    Example:
        >>> sorted(sk.tables.torus_links((3,), wrap=False))
        [(0, 1), (1, 0), (1, 2), (2, 1)]
    """
    sizes = check_sizes("torus_links", sizes)
    [bandwidth] = checks.positive("torus_links", bandwidth=bandwidth)
    numbers: dict[tuple[int, ...], int] = {}  # of the devices, by their coordinates
    for coordinates in product(*map(range, sizes)):
        numbers[coordinates] = len(numbers)
    links = {}
    for coordinates, number in numbers.items():
        for neighbor in _list_neighbors(coordinates, sizes, wrap):
            links[number, numbers[neighbor]] = bandwidth
    return links


def _list_neighbors(coordinates: tuple[int, ...], sizes: Sequence[int], wrap: bool) -> Iterator[tuple[int, ...]]:
    """The coordinates of the devices one place away along each dim of a torus, or of a grid."""
    for dim, size in enumerate(sizes):
        if size == 1:
            continue
        for place in (coordinates[dim] - 1, coordinates[dim] + 1):
            if wrap or 0 <= place < size:
                yield (*coordinates[:dim], place % size, *coordinates[dim + 1 :])


def check_sizes(where: str, sizes: Sequence[int]) -> tuple[int, ...]:
    """The sizes of a torus; refuses an empty sequence, and sizes below 1."""
    if not sizes:
        raise ValueError(f"{where}: sizes must have at least one dim; got {sizes!r}. Pass for example (4, 4).")
    sizes_by_name = {f"sizes[{i}]": size for i, size in enumerate(sizes)}
    return checks.integers_from_one(where, **sizes_by_name)


def time_steps(steps: Sequence[Sequence[Message]], links: Bandwidths, chunk_bytes: float, latency: float) -> LinkTimes:
    """The time of the messages of each step; see `SendTable.simulate`.

    A step ends when its busiest link has carried all bytes: the messages of a step share links, and do not wait for
    each other. Nothing of the next step is sent before.
    """
    routes: dict[DevicePair, _Route] = {}
    seconds = []
    busiest = []
    for messages in steps:
        loads: defaultdict[DevicePair, float] = defaultdict(float)
        longest = 0
        for message in messages:
            for pair in message.pairs:
                if pair not in routes:
                    routes[pair] = _find_route(links, *pair)
                route = routes[pair]
                longest = max(longest, route.hops)
                for link, share in route.shares.items():
                    loads[link] += share * message.chunks * chunk_bytes
        busiest.append(max(loads.values(), default=0.0))
        transfer = 0.0  # of the link that takes longest: all links send at once
        for link, load in loads.items():
            transfer = max(transfer, load / links[link])
        # Latency for each link of the longest way, and the time that the busiest link needs for all its bytes.
        seconds.append(latency * longest + transfer)
    return LinkTimes(sum(seconds), tuple(seconds), tuple(busiest))


def check_links(where: str, links: Bandwidths, devices: int) -> None:
    """Refuses links that do not connect these devices, or over which some device cannot reach another."""
    for link, bandwidth in links.items():
        if not _is_link(link, devices):
            raise ValueError(
                f"{where}: links must be from one of {devices} devices to another; got {link!r}. Pass a mapping of "
                "(source, target) to bytes/s, as torus_links returns."
            )
        name = f"links[{link[0]}, {link[1]}]"
        checks.positive(where, **{name: bandwidth})  # type: ignore[arg-type]
    for source in range(devices):
        reached = _count_hops(links, source)
        for target in range(devices):
            if target not in reached:
                raise ValueError(
                    f"{where}: links must lead from every device to every other; got none from device {source} to "
                    f"device {target}. Add a link."
                )


def _is_link(link: object, devices: int) -> bool:
    if not isinstance(link, tuple) or len(link) != 2:
        return False
    for device in link:
        if type(device) is not int or not 0 <= device < devices:
            return False
    source, target = link
    return bool(source != target)


def _count_hops(links: Iterable[DevicePair], start: int) -> dict[int, int]:
    """The devices that `start` reaches, and how many links away they are: a breadth-first search."""
    targets: defaultdict[int, list[int]] = defaultdict(list)
    for source, target in links:
        targets[source].append(target)
    hops = {start: 0}
    queue = deque([start])
    while queue:
        device = queue.popleft()
        for target in targets[device]:
            if target not in hops:
                hops[target] = hops[device] + 1
                queue.append(target)
    return hops


def _find_route(links: Bandwidths, source: int, target: int) -> _Route:
    """The links of a message, and its share on each: at every device it splits equally among the shortest ways.

    From corner to corner of a 2 x 2 grid, 0 to 3: half of the bytes over 0-1 and 1-3, half over 0-2 and 2-3.
    """
    # A link may go one way alone: the hops to the target are counted along the reversed links.
    reversed_links = [(end, start) for start, end in links]
    hops_to_target = _count_hops(reversed_links, target)
    shares: defaultdict[DevicePair, float] = defaultdict(float)
    amounts = {source: 1.0}  # of the message, by the device that has it
    for _ in range(hops_to_target[source]):
        arrivals: defaultdict[int, float] = defaultdict(float)
        for device, amount in amounts.items():
            nearer_devices = []
            for start, end in links:
                if start != device or end not in hops_to_target:
                    continue
                if hops_to_target[end] < hops_to_target[device]:
                    nearer_devices.append(end)
            share = amount / len(nearer_devices)
            for end in nearer_devices:
                shares[device, end] += share
                arrivals[end] += share
        amounts = dict(arrivals)
    return _Route(hops_to_target[source], dict(shares))
