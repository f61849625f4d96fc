"""Bytes on the wire and hops of each collective, as the bandwidth-optimal ring sends it.

Every figure is for one device. `n` is the number of devices along the axes, `size` the bytes of the operand on one
device (for an all_gather its piece). Source: Thakur, Rabenseifner, Gropp, Optimization of Collective Communication
Operations in MPICH (2005); Patarasuk and Yuan (2009) for the lower bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from shardkit import _check

COLLECTIVE_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ppermute")
_SENT_ONCE = ("broadcast", "reduce", "ppermute", "sendrecv")
_BUS = (*COLLECTIVE_KINDS[:-1], "gather", "scatter", *_SENT_ONCE)


class Traffic(NamedTuple):
    """What one device sends.

    Attributes:
        sent: bytes, an exact Fraction (they need not be whole where a size does not divide).
        hops: messages one after the other.
    """

    sent: Fraction
    hops: int


def wire(kind: str, size: float, n: int, pairs: Sequence[tuple[int, int]] | None = None) -> Traffic:
    """The traffic of a collective.

    Args:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ppermute" or "broadcast".
        size: bytes of the operand on one device.
        n: devices along the axes.
        pairs: for a ppermute, who sends to whom; only the busiest device counts, and sending to oneself is free. None:
            each to its neighbour.

    Returns:
        Traffic, in bytes and messages.

    Raises:
        ValueError: another kind, a negative size, or n is no whole number of at least 1.

    Example:
        >>> sk.cost.wire("all_reduce", 1024, 4)
        Traffic(sent=Fraction(1536, 1), hops=6)
        >>> sk.cost.wire("all_gather", 1024, 4).sent == 3 * 1024
        True

    Source: Thakur, Rabenseifner, Gropp (2005), sections 4.1 to 4.5; Patarasuk and Yuan (2009).
    """
    [n] = _check.whole("wire", n=n)
    [size] = _check.at_least_zero("wire", size=size)
    if pairs is not None and not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in _listed(pairs)):
        raise ValueError(
            f"wire: pairs must be a sequence of (source, target); got {pairs!r}. Pass for example [(0, 1), (1, 0)]."
        )
    _check.known("wire", "kind", kind, (*COLLECTIVE_KINDS, "broadcast"))
    operand, share = Fraction(size), Fraction(n - 1, n)
    if kind == "ppermute":
        moves = n > 1 if pairs is None else any(source != target for source, target in pairs)
        return Traffic(operand * moves, int(moves))
    return {
        "all_reduce": Traffic(2 * share * operand, 2 * (n - 1)),
        "all_gather": Traffic((n - 1) * operand, n - 1),
        "reduce_scatter": Traffic(share * operand, n - 1),
        "all_to_all": Traffic(share * operand, n - 1),
        "broadcast": Traffic(operand * (n > 1), n - 1),  # from one device to the next
    }[kind]


def _listed(pairs: object) -> Sequence[object]:
    return pairs if isinstance(pairs, Sequence) else [pairs]


def bus_factor(op: str, n: int) -> float:
    """What nccl-tests multiplies algorithm bandwidth (size / time) by to get bus bandwidth, whatever n is.

    2 (n-1)/n for all_reduce; (n-1)/n for all_gather, reduce_scatter, all_to_all, gather and scatter; 1 for broadcast,
    reduce, ppermute and sendrecv. The size that goes with it is nccl-tests': the whole array, that is the result of an
    all_gather or gather and the operand of every other operation.

    Args:
        op: the operation; capitals, "-", "_" and spaces do not matter ("AllReduce", "all-to-all", "alltoall").
        n: devices.

    Returns:
        The factor, without unit.

    Raises:
        ValueError: an unknown operation, or n is no whole number of at least 1.

    Example:
        >>> sk.cost.bus_factor("AllReduce", 8)
        1.75

    Source: nccl-tests, doc/PERFORMANCE.md; gather and scatter: src/gather.cu, src/scatter.cu.
    """
    [n] = _check.whole("bus_factor", n=n)
    name = _check.spelled("bus_factor", "op", op, _BUS)
    if name in _SENT_ONCE:
        return 1.0
    return (2 if name == "all_reduce" else 1) * (n - 1) / n
