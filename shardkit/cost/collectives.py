"""Bytes on the wire and hops of each collective, as the bandwidth-optimal ring sends it, and their time.

Every figure is for one device. `n` is the number of devices along the axes, `size` the bytes of the operand on one
device (for an all_gather its piece). Source: Thakur, Rabenseifner, Gropp, Optimization of Collective Communication
Operations in MPICH (2005); Patarasuk and Yuan (2009) for the lower bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from shardkit._arguments import checks
from shardkit.cost.links import Link

COLLECTIVE_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ppermute")
# In these, a link carries the whole array once, so that nccl-tests' factor is 1.
_SENT_ONCE = ("broadcast", "reduce", "ppermute", "sendrecv")
_BUS = (*COLLECTIVE_KINDS[:-1], "gather", "scatter", *_SENT_ONCE)


class Traffic(NamedTuple):
    """What one device sends.

    Attributes:
        sent: bytes, an exact Fraction, which need not be whole.
        hops: messages one after the other.
    """

    sent: Fraction
    hops: int


def wire(kind: str, size: float, n: int, pairs: Sequence[tuple[int, int]] | None = None) -> Traffic:
    """Returns the traffic of a collective.

    Args:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ppermute" or "broadcast".
        size: bytes of the operand on one device.
        n: devices along the axes.
        pairs: (source, target) pairs of a ppermute. The busiest device counts, and a message to itself is free. None:
            each device sends to its neighbor.

    Returns:
        Traffic, in bytes and messages.

    Raises:
        ValueError: an unknown kind, a negative size, or n below 1.

    Example:
        >>> sk.cost.wire("all_reduce", 1024, 4)
        Traffic(sent=Fraction(1536, 1), hops=6)
        >>> sk.cost.wire("all_gather", 1024, 4).sent == 3 * 1024
        True

    Source: Thakur, Rabenseifner, Gropp (2005), sections 4.1 to 4.5; Patarasuk and Yuan (2009).
    """
    [n] = checks.integers_from_one("wire", n=n)
    [size] = checks.at_least_zero("wire", size=size)
    if pairs is not None and not _are_pairs(pairs):
        raise ValueError(
            f"wire: pairs must be a sequence of (source, target); got {pairs!r}. Pass for example [(0, 1), (1, 0)]."
        )
    checks.one_of("wire", "kind", kind, (*COLLECTIVE_KINDS, "broadcast"))
    operand = Fraction(size)  # exact, because a census is compared with it by ==
    nothing = Traffic(Fraction(0), 0)
    others_share = Fraction(n - 1, n)  # of the operand that does not stay here
    match kind:
        case "all_reduce":  # a reduce_scatter, then an all_gather of the pieces
            return Traffic(2 * others_share * operand, 2 * (n - 1))
        case "all_gather":
            return Traffic((n - 1) * operand, n - 1)
        case "reduce_scatter" | "all_to_all":
            return Traffic(others_share * operand, n - 1)
        case "broadcast":  # from one device to the next
            if n == 1:
                return nothing
            return Traffic(operand, n - 1)
    moves = n > 1
    if pairs is not None:
        moves = any(source != target for source, target in pairs)
    if not moves:
        return nothing
    return Traffic(operand, 1)


@lru_cache(maxsize=4096)  # the planner asks thousands of times
def _wire_of_unit(kind: str, n: int) -> Traffic:
    return wire(kind, 1, n)


def sent_share(kind: str, n: int) -> float:
    """The bytes that a device sends for each byte of its operand; `wire` is linear in the size, and exact in integers.

    For example 1.5 of an all_reduce over 4 devices, and 3 of an all_gather.
    """
    return float(_wire_of_unit(kind, n).sent)


def _are_pairs(pairs: object) -> bool:
    if not isinstance(pairs, Sequence):
        return False
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            return False
    return True


def bus_factor(op: str, n: int) -> float:
    """Bus bandwidth over algorithm bandwidth (size / time), as in nccl-tests; bus bandwidth is comparable for any n.

    2 (n-1)/n for all_reduce; (n-1)/n for all_gather, reduce_scatter, all_to_all, gather and scatter; 1 for broadcast,
    reduce, ppermute and sendrecv. The size is the whole array, as in nccl-tests: the result of an all_gather or gather,
    the operand of every other operation.

    Args:
        op: the operation, ignoring capitals, "-", "_" and spaces ("AllReduce", "all-to-all", "alltoall").
        n: devices.

    Returns:
        The factor, without unit.

    Raises:
        ValueError: an unknown operation, or n below 1.

    Example:
        >>> sk.cost.bus_factor("AllReduce", 8)
        1.75

    Source: nccl-tests, doc/PERFORMANCE.md; gather and scatter: src/gather.cu, src/scatter.cu.
    """
    [n] = checks.integers_from_one("bus_factor", n=n)
    name = checks.spelled("bus_factor", "op", op, _BUS)
    if name in _SENT_ONCE:
        return 1.0
    if name == "all_reduce":
        return 2 * (n - 1) / n
    return (n - 1) / n


def collective_time(kind: str, size: float, n: int, *, bandwidth: float, latency: float = 0.0) -> float:
    """Seconds of a collective in a ring of n devices: hops * latency + bytes / bandwidth, both as in `wire`.

    It leaves out contention, and the additions of a reduction. It counts an all_to_all as pairwise exchanges, as on a
    switched network.

    Args:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "ppermute".
        size: bytes of the operand on one device, for an all_gather its piece.
        n: devices.
        bandwidth: bytes/s that a device sends; `group_bandwidth` gives it for a chip, in both directions of its links.
        latency: seconds per message.

    Raises:
        ValueError: an unknown kind, n below 1, a bandwidth that is not positive, a negative size or latency.

    Example:
        >>> sk.cost.collective_time("all_gather", 1e6, 8, bandwidth=1e9, latency=1e-6)
        0.007007

    Source: Hockney (1994) for the model; Thakur, Rabenseifner, Gropp (2005), sections 4.1 to 4.5.
    """
    where = "collective_time"
    checks.one_of(where, "kind", kind, COLLECTIVE_KINDS)
    [n] = checks.integers_from_one(where, n=n)
    [bandwidth] = checks.positive(where, infinite=True, bandwidth=bandwidth)
    size, latency = checks.at_least_zero(where, size=size, latency=latency)
    unit = _wire_of_unit(kind, n)
    return Link(latency, bandwidth).seconds(float(unit.sent) * size, unit.hops)
