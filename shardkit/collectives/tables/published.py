"""Published algorithms as tables. Each is an all_gather; its transpose is the reduce_scatter, both an all_reduce."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product

from shardkit._arguments import checks
from shardkit._arguments.typed import typed
from shardkit.collectives.tables.links import sides_of
from shardkit.collectives.tables.messages import Send
from shardkit.collectives.tables.table import Op, SendTable

_MOST_MESSAGES = 2**22  # about a gigabyte: of 2,048 devices


@typed
def ring(op: Op, devices: int, *, bidirectional: bool = False) -> SendTable:
    """Each chunk goes from neighbor to neighbor round a ring.

    Args:
        op: "all_gather", "reduce_scatter" or "all_reduce".
        devices: number n of devices.
        bidirectional: both ways at once, each half of the way round.

    Cost: n-1 steps, bidirectional n // 2; twice as many for an all_reduce. The bytes of `cost.wire`.

    Example:
        >>> print(sk.tables.ring("all_gather", 3))
        ring: all_gather over 3 devices of 3 chunks in 2 steps
        step 0   0>1 0  1>2 1  2>0 2
        step 1   0>1 2  1>2 0  2>0 1

    Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms (2009).
    """
    [n] = checks.whole("ring", devices=devices)
    _check_size("ring", n * (n - 1))
    up = (n - 1) // 2 + (n - 1) % 2 if bidirectional else n - 1

    def gather(by: int) -> Iterator[Send]:
        for step, d in product(range(up), range(n)):
            yield Send(step, d, (d + by) % n, (d - by * step) % n, False)
        for step, d in product(range(n - 1 - up), range(n)):
            yield Send(step, d, (d - by) % n, (d + by * step) % n, False)

    # A sum goes round in the direction of its gather: the derivative of a reduce_scatter goes back.
    return derived(op, n, n, "bidirectional ring" if bidirectional else "ring", gather(1), gather(-1))


@typed
def halving(op: Op, devices: int) -> SendTable:
    """Recursive doubling of what is gathered: with the neighbor, with the pair beside, and so on; a sum is halved so.

    Args:
        op: as for `ring`.
        devices: a power of two.

    Cost: log2(n) steps, twice as many for an all_reduce. The bytes of `cost.wire`.

    Example:
        >>> table = sk.tables.halving("all_reduce", 8)
        >>> table.steps, table.traffic(1024).sent
        (6, Fraction(1792, 1))

    Source: Thakur, Rabenseifner, Gropp (2005), sections 4.1 and 4.4.
    """
    n = _power_of_two("halving", devices)
    sends = []
    for step in range(n.bit_length() - 1):
        hop = 1 << step
        for d in range(n):
            first = d // hop * hop
            sends += [Send(step, d, d ^ hop, chunk, False) for chunk in range(first, first + hop)]
    return derived(op, n, n, "halving", sends)


@typed
def bruck(op: Op, devices: int) -> SendTable:
    """Each device passes all that it has to one 1, 2, 4, ... places before it.

    Args:
        op: as for `ring`.
        devices: number n of devices, any.

    Cost: ceil(log2(n)) steps, twice as many for an all_reduce. The bytes of `cost.wire`.

    Example:
        >>> print(sk.tables.bruck("reduce_scatter", 3))
        bruck: reduce_scatter over 3 devices of 3 chunks in 2 steps
        step 0   0>2 +2  1>0 +0  2>1 +1
        step 1   0>1 +1  1>2 +2  2>0 +0

    Source: Bruck et al., Efficient algorithms for all-to-all communications (1997), section 4.
    """
    [n] = checks.whole("bruck", devices=devices)
    _check_size("bruck", n * (n - 1))
    sends = []
    for step in range((n - 1).bit_length()):
        hop = 1 << step
        for d in range(n):
            sends += [Send(step, d, (d - hop) % n, (d + k) % n, False) for k in range(min(hop, n - hop))]
    return derived(op, n, n, "bruck", sends)


@typed
def pat(op: Op, devices: int, *, aggregate: int | None = None) -> SendTable:
    """Bruck's steps from the farthest to the nearest, with a limit on what one message holds.

    Args:
        op: as for `ring`.
        devices: number n of devices, any.
        aggregate: most chunks of a message, a power of two A below n; None: as many as make the fewest steps.

    Cost: log2(A) + P/A - 1 steps, P being n rounded up to a power of two, twice as many for an all_reduce. The bytes of
        `cost.wire`.

    Example:
        >>> [sk.tables.pat("all_gather", 16, aggregate=most).steps for most in (1, 2, 4, 8)]
        [15, 8, 5, 4]

    Source: Jeaugey, PAT: a new algorithm for all-gather and reduce-scatter operations at scale (arXiv:2506.20252).
    """
    [n] = checks.whole("pat", devices=devices)
    _check_size("pat", n * (n - 1))
    power = 1 << (n - 1).bit_length()
    most = max(1, power // 2)
    many = most if aggregate is None else checks.whole("pat", aggregate=aggregate)[0]
    if many & (many - 1) or many > most:
        raise ValueError(
            f"pat: aggregate must be a power of two of at most {most}, half of {n} devices rounded up; got {many}. "
            f"Pass {most}, or None."
        )
    rest = power // many  # groups of so many devices are gathered one message after the other
    hops = [(hop, range(0, power, 2 * hop)) for hop in _powers(power, above=rest)]
    for place in _depth_first(rest):
        hop = place & -place
        hops.append((hop, range(place - hop, power, rest)))
    sends = []
    used = [(hop, [at for at in offsets if at + hop < n]) for hop, offsets in hops]
    for step, (hop, offsets) in enumerate(each for each in used if each[1]):
        sends += [Send(step, d, (d - hop) % n, (d + at) % n, False) for d, at in product(range(n), offsets)]
    return derived(op, n, n, f"pat of {many}" if aggregate else "pat", sends)


def _powers(power: int, above: int) -> Iterator[int]:
    """power / 2, power / 4, ..., above."""
    while power > above:
        power //= 2
        yield power


def _depth_first(size: int) -> Iterator[int]:
    """The places 1 to size - 1 of a binomial tree, each after the one from which it gets its chunk."""
    if size > 1:
        half = size // 2
        yield half
        for place in _depth_first(half):
            yield half + place
        yield from _depth_first(half)


@typed
def bine(op: Op, devices: int) -> SendTable:
    """The butterfly of binomial negabinary trees, whose partners are a third nearer than those of `halving`.

    Step by step a gather exchanges with a device ..., 5, 3, 1, 1 places away, up or down by turns.

    Args:
        op: as for `ring`.
        devices: a power of two.

    Cost: log2(n) steps, twice as many for an all_reduce. The bytes of `cost.wire`.

    Example:
        >>> far = [abs(s.source - s.target) % 32 for s in sk.tables.bine("all_gather", 32).sends if s.source == 0]
        >>> list(dict.fromkeys(far))
        [11, 27, 3, 31, 1]

    Source: De Sensi et al., Bine trees (arXiv:2508.17311).
    """
    n = _power_of_two("bine", devices)
    steps = n.bit_length() - 1
    sends = []
    for step, level in enumerate(reversed(range(steps))):
        for d in range(n):
            partner = _partner(d, level, n)
            sends += [Send(step, d, partner, chunk, False) for chunk in _below(partner, level, steps, n)]
    return derived(op, n, n, "bine", sends)


def _partner(device: int, level: int, devices: int) -> int:
    """With whom a device exchanges: 1, 1, 3, 5, 11, ... places away."""
    away = (1 - (-2) ** (level + 1)) // 3
    return (device + (away if device % 2 == 0 else -away)) % devices


def _below(device: int, level: int, steps: int, devices: int) -> list[int]:
    """The chunks that a device gets from its partner of a level: those that the partner has by then."""
    found = [_partner(device, level, devices)]
    for later in range(level + 1, steps):
        found += [_partner(chunk, later, devices) for chunk in found]
    return found


@typed
def torus(op: Op, sizes: Sequence[int], *, bidirectional: bool = False) -> SendTable:
    """Rings along every dim of a torus at once: each dim is the first for one part of the array.

    Args:
        op: as for `ring`.
        sizes: devices along each dim; device numbers count the last dim fastest.
        bidirectional: both ways round each dim at once, each for half of the array.

    Cost: for d dims of s devices d (s-1) steps, twice as many for an all_reduce; the bytes of `cost.wire`, over d links
        of each device, bidirectional over 2 d.

    Example:
        >>> table = sk.tables.torus("all_gather", (4, 4))
        >>> table.steps, table.traffic(16).sent, sk.tables.ring("all_gather", 16).steps
        (6, Fraction(240, 1), 15)

    Source: Barnett et al., Global combine on mesh architectures with wormhole routing (1993).
    """
    sides = sides_of("torus", sizes)
    dims = [dim for dim, size in enumerate(sides) if size > 1]
    n, parts = math.prod(sides), max(1, len(dims)) * (2 if bidirectional else 1)
    _check_size("torus", n * (n - 1) * parts)
    sends = []
    for part in range(parts):
        done: list[int] = []
        begin, by = 0, -1 if bidirectional and part % 2 else 1
        for turn in range(len(dims)):
            dim = dims[(part // (2 if bidirectional else 1) + turn) % len(dims)]
            for step, place in product(range(sides[dim] - 1), product(*map(range, sides))):
                target = _moved(place, dim, by, sides)
                for origin in _reached(_moved(place, dim, -by * step, sides), done, sides):
                    chunk = _number(origin, sides) * parts + part
                    sends.append(Send(begin + step, _number(place, sides), _number(target, sides), chunk, False))
            done.append(dim)
            begin += max(sides) - 1
    return derived(op, n, n * parts, f"torus {' x '.join(map(str, sides))}", sends)


@typed
def tree(devices: int, *, inner: int = 1, chunks: int = 2) -> SendTable:
    """An all_reduce up and down two binary trees of machines, in which a leaf of one is within the other.

    Inside a machine a chain leads to the device that is in the tree. Each tree has every second chunk, and chunks
    follow each other: a device sends one in a step and gets one.

    Args:
        devices: number n of devices.
        inner: devices of a machine, neighbors in number; 1: each for itself.
        chunks: pieces of the array; more take more steps of fewer bytes.

    Cost: at most 4 ceil(log2(n / inner)) + 2 inner + 2 chunks steps, each of 1/chunks of the array.

    Example:
        >>> table = sk.tables.tree(64)
        >>> table.steps, sk.tables.ring("all_reduce", 64).steps
        (22, 126)

    Source: Sanders, Speck, Träff, Two-tree algorithms for full bandwidth broadcast, reduction and scan (2009).
    """
    n, inside, pieces = checks.whole("tree", devices=devices, inner=inner, chunks=chunks)
    if n % inside:
        raise ValueError(
            f"tree: inner must divide the devices; got {inside} for {n} devices. Pass the devices of a machine."
        )
    _check_size("tree", 2 * (n - 1) * pieces)
    parents = [_parents(n, inside, bool(chunk % 2)) for chunk in range(pieces)]
    return SendTable("all_reduce", n, pieces, tuple(_up_and_down(parents, n)), f"tree of {inside}")


def _parents(devices: int, inner: int, second: bool) -> dict[int, int]:
    """The parent of each device but the root, in the first tree or the second."""
    machines = devices // inner
    parents = {}
    for machine in range(machines):
        number = (machines - 1 - machine if machines % 2 == 0 else (machine - 1) % machines) if second else machine
        lead = inner - 1 if second else 0
        toward = 1 if second else -1
        for place in range(inner):
            if place != lead:
                parents[machine * inner + place] = machine * inner + place + toward
        if number:
            bit = number & -number
            above = number ^ bit | bit << 1
            above = above if above < machines else number ^ bit
            of = (machines - 1 - above if machines % 2 == 0 else (above + 1) % machines) if second else above
            parents[machine * inner + lead] = of * inner + lead
    return parents


def _up_and_down(parents: Sequence[Mapping[int, int]], devices: int) -> Iterator[Send]:
    """Sums that go up the tree of each chunk and come down again; a device sends one chunk in a step, and gets one."""
    waits = [[0] * devices for _ in parents]  # sums that a device still waits for, by chunk
    for chunk, tree in enumerate(parents):
        for parent in tree.values():
            waits[chunk][parent] += 1
    up = [(chunk, child, parent) for chunk, tree in enumerate(parents) for child, parent in tree.items()]
    down = [(chunk, parent, child) for chunk, child, parent in up]
    whole = [set(range(devices)) - tree.keys() for tree in parents]  # that have the sum: at first the root
    step = 0
    while up or down:
        sources, targets = set[int](), set[int]()
        sent = []
        for reduce, pending in ((True, up), (False, down)):
            for chunk, source, target in list(pending):
                ready = not waits[chunk][source] and (reduce or source in whole[chunk])
                if ready and source not in sources and target not in targets:
                    sources.add(source)
                    targets.add(target)
                    pending.remove((chunk, source, target))
                    sent.append(Send(step, source, target, chunk, reduce))
        for send in sent:
            if send.reduce:
                waits[send.chunk][send.target] -= 1
            else:
                whole[send.chunk].add(send.target)
        yield from sorted(sent)
        step += 1


def derived(
    op: Op, devices: int, chunks: int, name: str, gather: Iterable[Send], down: Iterable[Send] | None = None
) -> SendTable:
    """The table of an op, from the messages of an all_gather; `down` are those that a reduce_scatter transposes."""
    gathers = SendTable("all_gather", devices, chunks, tuple(sorted(gather)), name)
    if op == "all_gather":
        return gathers
    back = gathers if down is None else SendTable("all_gather", devices, chunks, tuple(sorted(down)), name)
    return back.transpose() if op == "reduce_scatter" else back.transpose().then(gathers)


def _check_size(where: str, messages: int) -> None:
    """Refuses a table before it fills the memory."""
    if messages > _MOST_MESSAGES:
        raise ValueError(
            f"{where}: a table lists all messages of an all_gather, at most {_MOST_MESSAGES:,}; got {messages:,}. Pass "
            "fewer devices or chunks."
        )


def _power_of_two(where: str, devices: int) -> int:
    [n] = checks.whole(where, devices=devices)
    _check_size(where, n * (n - 1))
    if n & (n - 1):
        raise ValueError(
            f"{where}: devices must be a power of two; got {n}. Pass {1 << n.bit_length() - 1}, or use bruck."
        )
    return n


def _moved(place: tuple[int, ...], dim: int, by: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The place that many steps along a dim, round the torus."""
    return (*place[:dim], (place[dim] + by) % sizes[dim], *place[dim + 1 :])


def _reached(place: tuple[int, ...], dims: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All places that differ from this one along these dims alone."""
    choices = [range(size) if dim in dims else (place[dim],) for dim, size in enumerate(sizes)]
    return product(*choices)


def _number(place: Sequence[int], sizes: Sequence[int]) -> int:
    number = 0
    for at, size in zip(place, sizes, strict=True):
        number = number * size + at
    return number
