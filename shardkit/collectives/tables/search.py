"""Search: the fastest table for given links; exactly where the problem is small, else by a rule with many tries."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from random import Random
from typing import Any, NamedTuple

import numpy as np

from shardkit._arguments import checks
from shardkit._arguments.typed import typed
from shardkit.collectives.tables.links import Link, Links, checked, distances
from shardkit.collectives.tables.messages import Send
from shardkit.collectives.tables.published import derived
from shardkit.collectives.tables.table import Op, SendTable

_SMALL = 1200  # binary variables of a problem that is solved exactly
_NODES = 500  # nodes of its branch and bound: a count, since a limit in seconds would depend on the machine
_TRIES = 48


@typed
def search(links: Links, op: Op, size: float, *, latency: float = 1e-6, parts: int = 1) -> SendTable:
    """The fastest table that is found for some links, each of which carries messages between neighbors.

    An all_gather is found step by step as a mixed-integer program: which link carries which chunk in which step, where
    a step lasts as long as its busiest link. With more than some ten devices a rule takes its place: every link carries
    the chunk that the fewest devices have. The reduce_scatter is that of the links turned round; an all_reduce is one
    and then the other.

    Args:
        links: bytes/s from one device to another, `{(source, target): bytes/s}`; see `torus_links`.
        op: "all_gather", "reduce_scatter" or "all_reduce".
        size: bytes of the operand on one device, for an all_gather of its piece.
        latency: seconds of a step beside its bytes.
        parts: chunks of each device; more can share links more evenly.

    Returns:
        A SendTable whose messages are between linked devices only. `SendTable.simulate(links, size)` is its time,
        `least_seconds` what none goes below.

    Raises:
        ValueError: links that are not connected, another op, or a size, latency or number of parts that is none.

    Cost: seconds for eight devices.

    Example:
        >>> links = sk.tables.torus_links((6,), bandwidth=1e9)
        >>> found = sk.tables.search(links, "all_gather", 1e6)
        >>> found.steps, round(found.simulate(links, 1e6).seconds, 6), sk.tables.least_seconds(links, "all_gather", 1e6)
        (3, 0.003003, 0.002503)

    Source: Cai et al., Synthesizing optimal collective algorithms (PPoPP 2021); Won et al., TACOS (arXiv:2304.05301).
    """
    devices = checked("search", links)
    size, latency = checks.at_least_zero("search", size=size, latency=latency)
    [parts] = checks.whole("search", parts=parts)
    piece = float(size) if op == "all_gather" else float(size) / devices
    turned = {(target, source): speed for (source, target), speed in links.items()}
    there, back = (Problem(devices, parts, of, piece / parts, latency) for of in (dict(links), turned))
    gather = [] if op == "reduce_scatter" else _fastest(there)
    scatter = [] if op == "all_gather" else _fastest(back)
    return derived(op, devices, devices * parts, "found", gather, scatter)


@typed
def least_seconds(links: Links, op: Op, size: float, *, latency: float = 1e-6) -> float:
    """What no table of this op goes below on these links: the way of the farthest pair, and what must be sent.

    A device gets at least all that it lacks. In an all_reduce it gets and gives at least as much as the array, and all
    devices together send 2 (n-1) times that.

    Args:
        links, op, size, latency: as for `search`.

    Raises:
        ValueError: as `search`.
    """
    devices = checked("least_seconds", links)
    size, latency = checks.at_least_zero("least_seconds", size=size, latency=latency)
    piece = size if op == "all_gather" else size / devices
    turned = {(target, source): speed for (source, target), speed in links.items()}
    if op != "all_reduce":
        return Problem(devices, 1, dict(links) if op == "all_gather" else turned, piece, latency).least
    both = [Problem(devices, 1, of, size / max(1, devices - 1), latency) for of in (dict(links), turned)]
    together = 2 * (devices - 1) * size / sum(links.values()) if links else 0.0
    return both[0].steps * latency + max(together, *(problem.bandwidth for problem in both))


class Problem(NamedTuple):
    """An all_gather to be found."""

    devices: int
    parts: int  # chunks of each device
    links: dict[Link, float]
    chunk: float  # bytes of one
    latency: float

    @property
    def chunks(self) -> int:
        """Chunks of the whole array."""
        return self.devices * self.parts

    @property
    def steps(self) -> int:
        """The fewest steps: links between the farthest pair."""
        return max(max(distances(self.links, d).values()) for d in range(self.devices))

    @property
    def bandwidth(self) -> float:
        """Seconds in which every device can get all chunks, at least."""
        entering = defaultdict[int, float](float)
        for (_, target), speed in self.links.items():
            entering[target] += speed
        own = (self.devices - 1) * self.parts * self.chunk
        return max((own / speed for speed in entering.values()), default=0.0)

    @property
    def least(self) -> float:
        """Seconds, at least."""
        return self.steps * self.latency + self.bandwidth

    def seconds(self, sends: list[Send]) -> float:
        """Seconds of messages between neighbors."""
        count = Counter((send.step, (send.source, send.target)) for send in sends)
        longest: dict[int, float] = {}
        for (step, link), chunks in count.items():
            longest[step] = max(longest.get(step, 0.0), chunks * self.chunk / self.links[link])
        return len(longest) * self.latency + sum(longest.values())


def _fastest(problem: Problem) -> list[Send]:
    """The messages of the fastest all_gather that is found."""
    if problem.devices == 1:
        return []
    best = min(_by_rule(problem), key=problem.seconds)
    for steps in range(problem.steps, 1 + (problem.devices - 1) * problem.parts):
        soonest = steps * problem.latency + problem.bandwidth
        if soonest >= problem.seconds(best) * (1 - 1e-9) or len(_variables(problem, steps)) > _SMALL:
            break
        found = _exact(problem, steps)
        if found is not None and problem.seconds(found) < problem.seconds(best):
            best = found
    return best


def _by_rule(problem: Problem) -> Iterator[list[Send]]:
    """All_gathers in which every link carries what the fewest devices have, up to so many chunks in a step."""
    slowest, random = min(problem.links.values()), Random(0)
    most = 1
    while most < 2 * problem.chunks:
        room = {link: max(1, int(most * speed / slowest)) for link, speed in problem.links.items()}
        for _ in range(_TRIES):
            yield _filled(problem, room, random)
        most *= 2


def _filled(problem: Problem, room: dict[Link, int], random: Random) -> list[Send]:
    """One all_gather by that rule; which link comes first, and which of two equally rare chunks, is drawn."""
    has = [set(range(d * problem.parts, (d + 1) * problem.parts)) for d in range(problem.devices)]
    holders = [1] * problem.chunks
    preferred = random.sample(range(problem.chunks), problem.chunks)
    sends: list[Send] = []
    step = 0
    while any(len(own) < problem.chunks for own in has):
        lacking = [set(range(problem.chunks)) - own for own in has]
        sent = dict.fromkeys(random.sample(list(problem.links), len(problem.links)), 0)
        going = True
        while going:  # one chunk for each link, then another one
            going = False
            for (source, target), count in sent.items():
                useful = has[source] & lacking[target] if count < room[source, target] else ()
                if useful:
                    chunk = min(useful, key=lambda chunk: (holders[chunk], preferred[chunk]))
                    lacking[target].remove(chunk)
                    sends.append(Send(step, source, target, chunk, False))
                    sent[source, target] += 1
                    going = True
        for send in sends:
            if send.step == step:
                has[send.target].add(send.chunk)
                holders[send.chunk] += 1
        step += 1
    return sends


def _variables(problem: Problem, steps: int) -> list[Send]:
    """Every message that may be of use: no chunk comes home, or leaves a device before it can be there."""
    far = [distances(problem.links, d) for d in range(problem.devices)]
    return [
        Send(step, source, target, chunk, False)
        for source, target in problem.links
        for chunk in range(problem.chunks)
        for step in range(far[chunk // problem.parts][source], steps)
        if chunk // problem.parts != target
    ]


def _exact(problem: Problem, steps: int) -> list[Send] | None:
    """The fastest all_gather in so many steps, by a mixed-integer program; None where its solver stops before.

    One variable says whether a message is sent, one for each step how long it lasts: in chunks where all links are
    alike, so that it is whole.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]
    from scipy.sparse import coo_array  # type: ignore[import-untyped]

    sends = _variables(problem, steps)
    column = {send: number for number, send in enumerate(sends)}
    alike = len(set(problem.links.values())) == 1
    entries: list[tuple[int, int, float]] = []  # row, column, value
    lower: list[float] = []
    upper: list[float] = []

    def row(values: list[tuple[int, float]], least: float, most: float) -> None:
        entries.extend((len(lower), at, value) for at, value in values)
        lower.append(least)
        upper.append(most)

    arriving: dict[tuple[int, int], list[Send]] = {}
    on: dict[tuple[int, Link], list[Send]] = {}
    for send in sends:
        arriving.setdefault((send.target, send.chunk), []).append(send)
        on.setdefault((send.step, (send.source, send.target)), []).append(send)
    for there in arriving.values():  # each chunk arrives once at each device
        row([(column[send], 1.0) for send in there], 1, 1)
    for send in sends:  # and before it is sent on
        if send.chunk // problem.parts != send.source:
            before = [s for s in arriving[send.source, send.chunk] if s.step < send.step]
            row([(column[send], 1.0), *((column[s], -1.0) for s in before)], -math.inf, 0)
    for (step, link), carried in on.items():
        each = 1.0 if alike else problem.chunk / problem.links[link]
        row([(len(sends) + step, -1.0), *((column[send], each) for send in carried)], -math.inf, 0)
    rows, columns, values = zip(*entries, strict=True)
    matrix = coo_array((values, (rows, columns)), shape=(len(lower), len(sends) + steps)).tocsr()
    solved: Any = milp(
        np.concatenate([np.zeros(len(sends)), np.ones(steps)]),
        integrality=np.concatenate([np.ones(len(sends)), np.full(steps, int(alike))]),
        bounds=Bounds(0, np.concatenate([np.ones(len(sends)), np.full(steps, np.inf)])),
        constraints=LinearConstraint(matrix, lower, upper),
        options={"node_limit": _NODES, "mip_rel_gap": 0},
    )
    if solved.x is None:
        return None
    return [send for send, chosen in zip(sends, solved.x[: len(sends)], strict=True) if chosen > 0.5]
