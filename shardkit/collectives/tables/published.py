"""Published algorithms as tables: each is an all_gather; its transpose is a reduce_scatter, the two an all_reduce."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, product

from shardkit._arguments import checks
from shardkit._arguments.typed import typed
from shardkit.collectives.tables.links import check_sizes
from shardkit.collectives.tables.messages import Send
from shardkit.collectives.tables.table import Op, SendTable

_MOST_MESSAGES = 2**22  # about a gigabyte: of 2,048 devices


@typed
def ring(op: Op, devices: int, *, bidirectional: bool = False) -> SendTable:
    """Each chunk goes from neighbor to neighbor round a ring.

    Args:
        op: "all_gather", "reduce_scatter" or "all_reduce".
        devices: number n of devices.
        bidirectional: send both ways at once, each half of the way round.

    Cost: n-1 steps, bidirectional n // 2; twice as many for an all_reduce. The bytes of `cost.wire`.

    Example:
        >>> print(sk.tables.ring("all_gather", 3))
        ring: all_gather over 3 devices of 3 chunks in 2 steps
        step 0   0>1 0  1>2 1  2>0 2
        step 1   0>1 2  1>2 0  2>0 1

    Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms (2009).
    """
    [n] = checks.integers_from_one("ring", devices=devices)
    _check_message_count("ring", n * (n - 1))
    name = "ring"
    hops = n - 1
    if bidirectional:
        name = "bidirectional ring"
        hops = n // 2
    hops_back = n - 1 - hops  # the other way round

    def gather_sends(by: int) -> Iterator[Send]:
        for step, d in product(range(hops), range(n)):
            yield Send(step, d, (d + by) % n, (d - by * step) % n, False)
        for step, d in product(range(hops_back), range(n)):
            yield Send(step, d, (d - by) % n, (d + by * step) % n, False)

    # A reduce_scatter is the transpose of a gather, and sends the other way. For sums to go up the ring too, it is the
    # transpose of a gather down the ring.
    return derive(op, n, n, name, gather_sends(1), gather_sends(-1))


@typed
def halving(op: Op, devices: int) -> SendTable:
    """Recursive doubling: devices exchange with the neighbor, then with the pair beside, and so on; sums go by halves.

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
    n = _check_power_of_two("halving", devices)
    # Of 8: device 5 sends chunk 5 to 4, then 4 and 5 to 7, then 4 to 7 to 1.
    sends = []
    for step in range(n.bit_length() - 1):
        distance = 1 << step
        for d in range(n):
            first = d // distance * distance  # of the chunks that d has, a block of its size
            for chunk in range(first, first + distance):
                sends.append(Send(step, d, d ^ distance, chunk, False))
    return derive(op, n, n, "halving", sends)


@typed
def bruck(op: Op, devices: int) -> SendTable:
    """Each device passes everything it has to the device 1, 2, 4, ... places before it.

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
    [n] = checks.integers_from_one("bruck", devices=devices)
    _check_message_count("bruck", n * (n - 1))
    # After steps of 1, 2, ..., distance / 2 a device has the chunks from its own on, as many as the distance. Of 5, the
    # last step has distance 4 and only one chunk is missing: n - distance.
    sends = []
    for step in range((n - 1).bit_length()):
        distance = 1 << step
        for d in range(n):
            for k in range(min(distance, n - distance)):
                sends.append(Send(step, d, (d - distance) % n, (d + k) % n, False))
    return derive(op, n, n, "bruck", sends)


@typed
def pat(op: Op, devices: int, *, aggregate: int | None = None) -> SendTable:
    """Bruck's steps from the farthest to the nearest, with a limit on the size of a message.

    Args:
        op: as for `ring`.
        devices: number n of devices, any.
        aggregate: most chunks of a message, a power of two A below n; None: the number with the fewest steps.

    Cost: log2(A) + P/A - 1 steps, P being n rounded up to a power of two, twice as many for an all_reduce. The bytes of
        `cost.wire`.

    Example:
        >>> [sk.tables.pat("all_gather", 16, aggregate=most).steps for most in (1, 2, 4, 8)]
        [15, 8, 5, 4]

    Source: Jeaugey, PAT: a new algorithm for all-gather and reduce-scatter operations at scale (arXiv:2506.20252).
    """
    [n] = checks.integers_from_one("pat", devices=devices)
    _check_message_count("pat", n * (n - 1))
    power = 1 << (n - 1).bit_length()
    most = max(1, power // 2)
    name = "pat"
    limit = most
    if aggregate is not None:
        [limit] = checks.integers_from_one("pat", aggregate=aggregate)
        name = f"pat of {limit}"
    if limit & (limit - 1) or limit > most:
        raise ValueError(
            f"pat: aggregate must be a power of two of at most {most}, half of {n} devices rounded up; got {limit}. "
            f"Pass {most}, or None."
        )
    sends = []
    step = 0
    steps = chain(_list_spreading_steps(power, limit), _list_tree_steps(power, limit))
    for distance, offsets in steps:
        used_offsets = [offset for offset in offsets if offset + distance < n]
        # If n is no power of two, nothing is left to send in some steps.
        if not used_offsets:
            continue
        for d, offset in product(range(n), used_offsets):
            sends.append(Send(step, d, (d - distance) % n, (d + offset) % n, False))
        step += 1
    return derive(op, n, n, name, sends)


# The steps of pat are alike on all devices: device d sends the chunks of the devices d + offset to device d - distance,
# to which they are chunks at offset + distance. Worked example: 8 devices, at most 2 chunks in a message.
#
#                      distance  offsets sent  offsets received   a device then has
#     start                                                       0
#     a spreading step        4  0             4                  0 4
#     place 2 of a tree       2  0 4           2 6                0 2 4 6
#     place 3                 1  2 6           3 7                0 2 3 4 6 7
#     place 1                 1  0 4           1 5                0 1 2 3 4 5 6 7


def _list_spreading_steps(power: int, limit: int) -> Iterator[tuple[int, range]]:
    """Distance and offsets of the steps in which messages grow to the limit: a device sends all that it has."""
    # After a step at a distance a device has the chunks at all multiples of it: the next distance is half of it. With
    # `limit` multiples below `power` messages are full.
    distance = power
    while power // distance < limit:
        distance //= 2
        yield distance, range(0, power, 2 * distance)


def _list_tree_steps(power: int, limit: int) -> Iterator[tuple[int, range]]:
    """Distance and offsets of the steps after that, with `limit` chunks in each message.

    The chunks at the multiples of `spacing` are there; each step brings those that stand one `place` after a multiple.
    """
    spacing = power // limit
    for place in _walk_binomial_tree(spacing):
        # The lowest bit of the place: place 6 = 4 + 2 comes over the distance 2, from a device where it is place 4.
        distance = place & -place
        yield distance, range(place - distance, power, spacing)


def _walk_binomial_tree(size: int) -> Iterator[int]:
    """The places 1 to size - 1 of a binomial tree, each after the one from which it gets its chunk."""
    if size <= 1:
        return
    # Of 8 places: 4, 6, 7, 5, 2, 3, 1.
    half = size // 2
    yield half
    for place in _walk_binomial_tree(half):
        yield half + place
    yield from _walk_binomial_tree(half)


@typed
def bine(op: Op, devices: int) -> SendTable:
    """The butterfly of binomial negabinary trees: partners are a third nearer than in `halving`.

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
    n = _check_power_of_two("bine", devices)
    levels = n.bit_length() - 1
    sends = []
    for step, level in enumerate(reversed(range(levels))):
        for d in range(n):
            partner = _find_bine_partner(d, level, n)
            for chunk in _list_bine_chunks(d, level, levels, n):
                sends.append(Send(step, d, partner, chunk, False))
    return derive(op, n, n, "bine", sends)


def _find_bine_partner(device: int, level: int, devices: int) -> int:
    """The device that this one exchanges with, 1, 1, 3, 5, 11, ... places away: (1 - (-2)^(level + 1)) / 3, by sign."""
    distance = (1 - (-2) ** (level + 1)) // 3
    if device % 2:
        distance = -distance
    return (device + distance) % devices


def _list_bine_chunks(device: int, level: int, levels: int, devices: int) -> list[int]:
    """The chunks that a device has before a level: its own, and the chunks that it got at all higher levels."""
    chunks = [device]
    for higher_level in range(level + 1, levels):
        for chunk in list(chunks):
            chunks.append(_find_bine_partner(chunk, higher_level, devices))
    return chunks


@typed
def torus(op: Op, sizes: Sequence[int], *, bidirectional: bool = False) -> SendTable:
    """Rings along every dim of a torus at once: each part of the array starts with another dim.

    Args:
        op: as for `ring`.
        sizes: devices along each dim; device numbers count the last dim fastest.
        bidirectional: send both ways round each dim at once, each with half of the array.

    Cost: for d dims of s devices d (s-1) steps, twice as many for an all_reduce; the bytes of `cost.wire`, over d links
        of each device, bidirectional over 2 d.

    Example:
        >>> table = sk.tables.torus("all_gather", (4, 4))
        >>> table.steps, table.traffic(16).sent, sk.tables.ring("all_gather", 16).steps
        (6, Fraction(240, 1), 15)

    Source: Barnett et al., Global combine on mesh architectures with wormhole routing (1993).
    """
    sizes = check_sizes("torus", sizes)
    dims = [dim for dim, size in enumerate(sizes) if size > 1]
    directions = [1]
    if bidirectional:
        directions = [1, -1]
    n = math.prod(sizes)
    parts = max(1, len(dims)) * len(directions)
    _check_message_count("torus", n * (n - 1) * parts)
    sends: list[Send] = []
    for part in range(parts):
        direction = directions[part % len(directions)]
        turns = part // len(directions)
        order = [*dims[turns:], *dims[:turns]]  # the dims, each first in one part
        sends += _list_torus_sends(part, parts, order, direction, sizes)
    return derive(op, n, n * parts, f"torus {' x '.join(map(str, sizes))}", sends)


def _list_torus_sends(
    part: int,
    parts: int,
    dims: Sequence[int],
    direction: int,
    sizes: Sequence[int],
) -> Iterator[Send]:
    """The messages of one part of the array: a ring along each of the dims, one dim after the other.

    On 3 x 3, part 0: in steps 0 and 1 the rings along dim 0 gather three chunks in each column. In steps 2 and 3 the
    rings along dim 1 pass on columns of three.
    """
    gathered_dims: list[int] = []
    first_step = 0
    for dim in dims:
        for step, place in product(range(sizes[dim] - 1), product(*map(range, sizes))):
            source = _find_number(place, sizes)
            target = _find_number(_move(place, dim, direction, sizes), sizes)
            # From the origin the ring has brought what is passed on.
            origin = _move(place, dim, -direction * step, sizes)
            for owner in _list_places(origin, gathered_dims, sizes):
                chunk = _find_number(owner, sizes) * parts + part
                yield Send(first_step + step, source, target, chunk, False)
        gathered_dims.append(dim)
        first_step += max(sizes) - 1  # all parts change their dim in the same step


@typed
def tree(devices: int, *, inner: int = 1, chunks: int = 2) -> SendTable:
    """An all_reduce up and down two binary trees of machines: a leaf of one tree is an inner node of the other.

    Inside a machine a chain leads to the device in the tree. Each tree has every second chunk, and chunks follow each
    other: in a step, a device sends one chunk and gets one.

    Args:
        devices: number n of devices.
        inner: devices of a machine, with consecutive numbers; 1: each device is a machine.
        chunks: pieces of the array; with more chunks you get more steps of fewer bytes.

    Cost: at most 4 ceil(log2(n / inner)) + 2 inner + 2 chunks steps, each of 1/chunks of the array.

    Example:
        >>> table = sk.tables.tree(64)
        >>> table.steps, sk.tables.ring("all_reduce", 64).steps
        (22, 126)

    Source: Sanders, Speck, Träff, Two-tree algorithms for full bandwidth broadcast, reduction and scan (2009).
    """
    n, inner, chunks = checks.integers_from_one("tree", devices=devices, inner=inner, chunks=chunks)
    if n % inner:
        raise ValueError(
            f"tree: inner must divide the devices; got {inner} for {n} devices. Pass the devices of a machine."
        )
    _check_message_count("tree", 2 * (n - 1) * chunks)
    trees = (_make_first_tree(n, inner), _make_second_tree(n, inner))
    parents = [trees[chunk % 2] for chunk in range(chunks)]
    sends = tuple(_list_tree_sends(parents, n))
    return SendTable("all_reduce", n, chunks, sends, f"tree of {inner}")


# A tree is a mapping of devices to their parents; the root has no parent. Inside it is a binary tree of machines: every
# second machine is a leaf, every second of the others is above leaves, and so on. Of six machines, 0 is the root:
#
#     0 <- 4; 4 <- 2, 5; 2 <- 1, 3
#
# The second tree has the machines in another order, so that a leaf of one tree is an inner node of the other: backward
# if their number is even, shifted by one if it is odd. So all machines send and get about equally much.


def _make_first_tree(devices: int, inner: int) -> dict[int, int]:
    machines = devices // inner
    parents = {}
    for machine in range(machines):
        # The others of the machine lead to its first device, each to the one before it.
        first_device = machine * inner
        for device in range(first_device + 1, first_device + inner):
            parents[device] = device - 1
        if machine:
            parents[first_device] = _find_parent_machine(machine, machines) * inner
    return parents


def _make_second_tree(devices: int, inner: int) -> dict[int, int]:
    machines = devices // inner
    order = [*range(1, machines), 0]
    if machines % 2 == 0:
        order = list(reversed(range(machines)))
    parents = {}
    for machine in range(machines):
        last_device = machine * inner + inner - 1
        for device in range(machine * inner, last_device):
            parents[device] = device + 1
        number = order.index(machine)
        if number:
            parent_machine = order[_find_parent_machine(number, machines)]
            parents[last_device] = parent_machine * inner + inner - 1
    return parents


def _find_parent_machine(machine: int, machines: int) -> int:
    """The parent of a machine other than 0: clear its lowest bit, and set the next bit if the result is a machine.

    Worked example, of six machines: 1 = 001 -> 010 = 2; 2 = 010 -> 100 = 4; 5 = 101 -> 110 = 6, which is no machine, so
    100 = 4.
    """
    lowest_bit = machine & -machine
    cleared = machine ^ lowest_bit
    parent = cleared | lowest_bit << 1
    if parent < machines:
        return parent
    return cleared


def _list_tree_sends(parents: Sequence[Mapping[int, int]], devices: int) -> Iterator[Send]:
    """The messages: sums go up the tree of each chunk, and come down again.

    In a step a device sends one chunk and gets one. Each step sends all messages that are ready, in the order of the
    chunks, unless their source or target is busy in this step: so chunks follow each other through the trees.
    """
    # By chunk and device, the sums of children that have not arrived.
    missing_terms = [[0] * devices for _ in parents]
    # Messages that are not sent yet: (chunk, source, target).
    up: list[tuple[int, int, int]] = []
    down: list[tuple[int, int, int]] = []
    # By chunk, the devices that have the whole sum, or will have it once all terms have arrived.
    holders: list[set[int]] = []
    for chunk, tree in enumerate(parents):
        for child, parent in tree.items():
            missing_terms[chunk][parent] += 1
            up.append((chunk, child, parent))
            down.append((chunk, parent, child))
        holders.append(set(range(devices)) - tree.keys())  # the root
    step = 0
    while up or down:
        busy_sources: set[int] = set()
        busy_targets: set[int] = set()
        sends = []
        for reduce, pending in ((True, up), (False, down)):
            for message in list(pending):
                chunk, source, target = message
                is_ready = missing_terms[chunk][source] == 0
                if not reduce:
                    is_ready = is_ready and source in holders[chunk]
                if is_ready and source not in busy_sources and target not in busy_targets:
                    busy_sources.add(source)
                    busy_targets.add(target)
                    pending.remove(message)
                    sends.append(Send(step, source, target, chunk, reduce))
        for send in sends:
            if send.reduce:
                missing_terms[send.chunk][send.target] -= 1
            else:
                holders[send.chunk].add(send.target)
        yield from sorted(sends)
        step += 1


def derive(
    op: Op,
    devices: int,
    chunks: int,
    name: str,
    gather_sends: Iterable[Send],
    scatter_sends: Iterable[Send] | None = None,
) -> SendTable:
    """The table of an op, from the messages of an all_gather.

    A reduce_scatter is the transpose of an all_gather: of `scatter_sends`, if they are passed.
    """

    def make_gather(sends: Iterable[Send]) -> SendTable:
        return SendTable("all_gather", devices, chunks, tuple(sorted(sends)), name)

    gather = make_gather(gather_sends)
    if op == "all_gather":
        return gather
    if scatter_sends is None:
        scatter = gather.transpose()
    else:
        scatter = make_gather(scatter_sends).transpose()
    if op == "reduce_scatter":
        return scatter
    return scatter.then(gather)


def _check_message_count(where: str, messages: int) -> None:
    """Refuses a table before it fills the memory."""
    if messages > _MOST_MESSAGES:
        raise ValueError(
            f"{where}: a table lists all messages of an all_gather, at most {_MOST_MESSAGES:,}; got {messages:,}. Pass "
            "fewer devices or chunks."
        )


def _check_power_of_two(where: str, devices: int) -> int:
    [n] = checks.integers_from_one(where, devices=devices)
    _check_message_count(where, n * (n - 1))
    if n & (n - 1):
        raise ValueError(
            f"{where}: devices must be a power of two; got {n}. Pass {1 << n.bit_length() - 1}, or use bruck."
        )
    return n


def _move(place: tuple[int, ...], dim: int, by: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The place that is `by` steps away along a dim, round the torus."""
    return (*place[:dim], (place[dim] + by) % sizes[dim], *place[dim + 1 :])


def _list_places(place: tuple[int, ...], dims: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All places that differ from this one along these dims alone."""
    choices: list[Iterable[int]] = [[coordinate] for coordinate in place]
    for dim in dims:
        choices[dim] = range(sizes[dim])
    return product(*choices)


def _find_number(place: Sequence[int], sizes: Sequence[int]) -> int:
    number = 0
    for coordinate, size in zip(place, sizes, strict=True):
        number = number * size + coordinate
    return number
