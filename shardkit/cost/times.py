"""The time of a collective: latency per message plus bytes over bandwidth (the alpha-beta model).

`size` is the bytes of the operand on one device (for an all_gather its piece), as in `wire`; `bandwidth` is bytes/s of
one link in one direction; `latency` is seconds per message. Compute, contention and the cost of a reduction's additions
are left out. Source: Hockney (1994) for the model; each function names the source of its algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from shardkit import _check
from shardkit._typed import typed
from shardkit.cost.collectives import COLLECTIVE_KINDS, wire

ALGORITHMS = ("ring", "bidirectional", "tree")


def collective_time(
    kind: str, size: float, n: int, *, bandwidth: float, latency: float = 0.0, algorithm: str = "ring"
) -> float:
    """Seconds of a collective over n devices with equal bandwidth between all pairs.

    | algorithm | hops of all_reduce / all_gather, reduce_scatter / all_to_all | bytes one after the other |
    |---|---|---|
    | ring | 2(n-1) / n-1 / n-1 | those of `wire` |
    | bidirectional | 2 ceil((n-1)/2) / ceil((n-1)/2) / ceil((n-1)/2) | half of them in each direction |
    | tree | 2 ceil(log2 n) / ceil(log2 n) / ceil(log2 n) | those of `wire`; all_to_all: about size log2(n)/2 |

    The time is hops * latency + bytes / bandwidth. A ppermute is one message in each. An all_to_all counts pairwise
    exchanges, as on a switched network; on a torus use `torus_time`.

    Args:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "ppermute".
        size: bytes of the operand on one device.
        n: devices.
        bandwidth: bytes/s that a device sends in one direction (a bidirectional ring sends it in both at once).
        latency: seconds per message.
        algorithm: "ring", "bidirectional", or "tree": recursive halving and doubling, and Bruck's all_to_all.

    Returns:
        Seconds.

    Raises:
        ValueError: an unknown kind or algorithm, n below 1, a bandwidth that is not positive, a negative size or
            latency.

    Example:
        >>> sk.cost.collective_time("all_gather", 1e6, 8, bandwidth=1e9, latency=1e-6)
        0.007007

    Source: Thakur, Rabenseifner, Gropp (2005), sections 4.1-4.5; for a tree of any n, Träff, arXiv:2410.14234.
    """
    where = "collective_time"
    _check.one_of(where, "kind", kind, COLLECTIVE_KINDS)
    _check.one_of(where, "algorithm", algorithm, ALGORITHMS)
    [n] = _check.whole(where, n=n)
    [bandwidth] = _check.positive(where, infinite=True, bandwidth=bandwidth)
    size, latency = _check.at_least_zero(where, size=size, latency=latency)
    if n == 1:
        return 0.0
    if kind == "ppermute":
        return latency + size / bandwidth
    # wire is linear in the size, and exact in integers
    unit, hops = wire(kind, 1, n)
    sent = float(unit) * size
    if algorithm == "bidirectional":
        hops = math.ceil((n - 1) / 2) * (2 if kind == "all_reduce" else 1)
        sent /= 2
    elif algorithm == "tree":
        hops = math.ceil(math.log2(n)) * (2 if kind == "all_reduce" else 1)
        if kind == "all_to_all":
            # in round k a block moves if bit k of its distance is set
            sent = size / n * sum(distance.bit_count() for distance in range(n))
    return hops * latency + sent / bandwidth


def hierarchical_time(
    kind: str,
    size: float,
    inner: int,
    outer: int,
    *,
    inner_bandwidth: float,
    outer_bandwidth: float,
    inner_latency: float = 0.0,
    outer_latency: float = 0.0,
    algorithm: str = "ring",
) -> float:
    """Seconds of a collective over `outer` groups of `inner` devices, stage by stage.

    all_reduce: reduce_scatter inside, all_reduce of 1/inner across, all_gather inside. all_gather: across first, then
    inside: each byte crosses once. reduce_scatter: inside, then 1/inner across. all_to_all: inside, then
    across.

    Args:
        kind: "all_reduce", "all_gather", "reduce_scatter" or "all_to_all".
        size: bytes of the operand on one device.
        inner: devices per group (a host, a slice).
        outer: number of groups.
        inner_bandwidth: bytes/s that a device sends in one direction inside its group.
        outer_bandwidth: bytes/s that a device sends in one direction to other groups.
        inner_latency: seconds per message inside.
        outer_latency: seconds per message across.
        algorithm: as in `collective_time`, on both levels.

    Returns:
        Seconds.

    Raises:
        ValueError: an unknown kind or algorithm, a size below 1, a bandwidth that is not positive, a negative latency.

    Example:
        >>> f"{sk.cost.hierarchical_time('all_reduce', 1e9, 8, 4, inner_bandwidth=450e9, outer_bandwidth=50e9):.4f} s"
        '0.0076 s'

    Source: the stages of `shardkit.hierarchical`; Cho et al., BlueConnect (2019).
    """
    where = "hierarchical_time"
    _check.one_of(where, "kind", kind, COLLECTIVE_KINDS[:-1])
    inner, outer = _check.whole(where, inner=inner, outer=outer)
    inner_bandwidth, outer_bandwidth = _check.positive(
        where, infinite=True, inner_bandwidth=inner_bandwidth, outer_bandwidth=outer_bandwidth
    )
    size, inner_latency, outer_latency = _check.at_least_zero(
        where, size=size, inner_latency=inner_latency, outer_latency=outer_latency
    )

    timed = partial(collective_time, algorithm=algorithm)
    inside = partial(timed, n=inner, bandwidth=inner_bandwidth, latency=inner_latency)
    across = partial(timed, n=outer, bandwidth=outer_bandwidth, latency=outer_latency)
    if kind == "all_reduce":
        piece = size / inner
        return inside("reduce_scatter", size) + across("all_reduce", piece) + inside("all_gather", piece)
    if kind == "all_gather":
        return across(kind, size) + inside(kind, size * outer)
    if kind == "reduce_scatter":
        return inside(kind, size) + across(kind, size / inner)
    return inside(kind, size) + across(kind, size)


@partial(typed, only=bool)
def torus_time(
    kind: str, size: float, sizes: Sequence[int], *, bandwidth: float, latency: float = 0.0, wrap: bool = True
) -> float:
    """Seconds of a collective over several dimensions of a torus at once, with every link busy in both directions.

    With n devices and k links (two for each dimension that wraps round, one for each that does not or has only two
    devices), a device receives (n-1) size bytes of an all_gather and (n-1)/n size of a reduce_scatter over k
    bandwidth; an all_reduce is both. For large n on a wrapped torus that is the scaling book's
    bytes / (bidirectional bandwidth * axes). An all_to_all is bound by the longest dimension s, whose links carry
    floor(s^2/4)/s size, halved where it wraps round. The latency counts the hops to the farthest device.

    Args:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", or "ppermute" (to a neighbor).
        size: bytes of the operand on one device.
        sizes: devices along each dimension of the torus that takes part, for example (4, 4, 8).
        bandwidth: bytes/s of one link in one direction.
        latency: seconds per hop.
        wrap: whether the dimensions are rings (False for small slices, which are meshes).

    Returns:
        Seconds.

    Raises:
        ValueError: an unknown kind, no dimension or one below 1, a bandwidth that is not positive, a negative size.

    Example:
        >>> f"{sk.cost.torus_time('all_gather', 1e6, (4, 4), bandwidth=45e9):.2e} s"
        '8.33e-05 s'

    Source: How to Scale Your Model, part 3 (sharding), "Our AllGather" and "AllToAll" with its footnote on tori.
    """
    where = "torus_time"
    _check.one_of(where, "kind", kind, COLLECTIVE_KINDS)
    if not isinstance(sizes, Sequence) or not sizes:
        raise ValueError(f"{where}: sizes must name at least one dimension; got {sizes!r}. Pass for example (4, 4).")
    sizes = _check.whole(where, **{f"sizes[{i}]": s for i, s in enumerate(sizes)})
    [bandwidth] = _check.positive(where, infinite=True, bandwidth=bandwidth)
    size, latency = _check.at_least_zero(where, size=size, latency=latency)
    n = math.prod(sizes)
    long = [s for s in sizes if s > 1]
    if not long:
        return 0.0
    if kind == "ppermute":
        return latency + size / bandwidth
    # two devices have one link between them, whatever `wrap` is
    rings = [wrap and s > 2 for s in long]
    hops = sum(s // 2 if ring else s - 1 for s, ring in zip(long, rings, strict=True))
    if kind == "all_to_all":
        carried = max(s * s // 4 / s / (2 if ring else 1) for s, ring in zip(long, rings, strict=True))
        return hops * latency + carried * size / bandwidth
    links = sum(2 if ring else 1 for ring in rings)
    gathered = hops * latency + (n - 1) * size / (links * bandwidth)
    scattered = hops * latency + (n - 1) / n * size / (links * bandwidth)
    return {"all_gather": gathered, "reduce_scatter": scattered, "all_reduce": 2 * scattered}[kind]
