"""Bytes on the wire and hops of each collective, as the bandwidth-optimal ring sends it.

Every figure is for one device. `n` is the number of devices along the axes, `size` the bytes of the operand on one
device (for an all_gather its piece). Source: Thakur, Rabenseifner, Gropp, Optimization of Collective Communication
Operations in MPICH (2005); Patarasuk and Yuan (2009) for the lower bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ppermute")


class Traffic(NamedTuple):
    """What one device sends.

    Attributes:
        sent: bytes, an exact Fraction (they need not be whole where a size does not divide).
        hops: messages one after the other.
    """

    sent: Fraction
    hops: int


def wire(kind: str, size: int, n: int, pairs: Sequence[tuple[int, int]] | None = None) -> Traffic:
    """The traffic of a collective.

    Args:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "ppermute".
        size: bytes of the operand on one device.
        n: devices along the axes.
        pairs: for a ppermute, who sends to whom; only the busiest device counts, and sending to oneself is free.

    Raises:
        ValueError: another kind.
    """
    share = Fraction(n - 1, n)
    if kind == "all_reduce":
        return Traffic(2 * share * size, 2 * (n - 1))
    if kind == "all_gather":
        return Traffic(Fraction((n - 1) * size), n - 1)
    if kind == "reduce_scatter":
        return Traffic(share * size, n - 1)
    if kind == "all_to_all":
        return Traffic(share * size, n - 1)
    if kind == "ppermute":
        moves = any(source != target for source, target in pairs or ())
        return Traffic(Fraction(size if moves else 0), int(moves))
    raise ValueError(
        "wire: kind must be 'all_reduce', 'all_gather', 'reduce_scatter', 'all_to_all' or 'ppermute'; "
        f"got {kind!r}. Choose one of them."
    )
