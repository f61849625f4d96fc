"""The time of a collective: latency per message plus bytes over bandwidth (the alpha-beta model)."""

from __future__ import annotations

from shardkit._arguments import checks
from shardkit.cost.collectives import COLLECTIVE_KINDS, wire


def collective_time(kind: str, size: float, n: int, *, bandwidth: float, latency: float = 0.0) -> float:
    """Seconds of a collective in a ring of n devices: hops * latency + bytes / bandwidth, both as in `wire`.

    Contention and the cost of a reduction's additions are left out. An all_to_all counts pairwise exchanges, as on a
    switched network.

    Args:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "ppermute".
        size: bytes of the operand on one device, for an all_gather its piece.
        n: devices.
        bandwidth: bytes/s that a device sends; `group_bandwidth` has that of a chip in both directions of its links.
        latency: seconds per message.

    Returns:
        Seconds.

    Raises:
        ValueError: an unknown kind, n below 1, a bandwidth that is not positive, a negative size or latency.

    Example:
        >>> sk.cost.collective_time("all_gather", 1e6, 8, bandwidth=1e9, latency=1e-6)
        0.007007

    Source: Hockney (1994) for the model; Thakur, Rabenseifner, Gropp (2005), sections 4.1 to 4.5.
    """
    where = "collective_time"
    checks.one_of(where, "kind", kind, COLLECTIVE_KINDS)
    [n] = checks.whole(where, n=n)
    [bandwidth] = checks.positive(where, infinite=True, bandwidth=bandwidth)
    size, latency = checks.at_least_zero(where, size=size, latency=latency)
    # wire is linear in the size, and exact in integers
    unit, hops = wire(kind, 1, n)
    return hops * latency + float(unit) * size / bandwidth
