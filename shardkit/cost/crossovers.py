"""Crossovers: from which size of a message one way to send it is faster than another.

A message of B bytes takes latency + B / bandwidth on a `Link` (the alpha-beta model). Nothing is looked up behind a
caller's back: `ring_from` is what `impl=` of the collective matmuls decides by, `scatter_from` and `bucket_bytes` are
what a caller passes to `all_reduce_tree`.
"""

from __future__ import annotations

import math

from shardkit._arguments import checks
from shardkit._arguments.typed import typed
from shardkit.cost.links import Link


@typed
def ring_from(link: Link, columns: float, *, flops: float, value_bytes: float = 2, ways: int = 1) -> float:
    """Returns the message size from which a collective matmul hides the message: its matmul takes as long as the hop.

    A message of B bytes arrives after latency + B / bandwidth; the product of its rows with c columns takes
    2 B c / (value_bytes flops). Below this size, or with fewer columns, one gather and one matmul are simpler.

    Args:
        link: the link for the messages.
        columns: columns of all weights on one device that one message is multiplied with.
        flops: FLOP/s of a device.
        value_bytes: bytes per value.
        ways: number of directions to send to at once, 1 or 2. With 2, the matmuls of two messages hide each hop.

    Returns:
        Bytes; infinite if no message is hidden.

    Raises:
        ValueError: a figure that is not positive, or a negative latency.

    Example:
        >>> from shardkit.cost.crossovers import ring_from
        >>> v5e = sk.cost.links("v5e")
        >>> [round(ring_from(v5e.link, columns, flops=v5e.flops)) for columns in (4400, 8192)]
        [8865000, 51649]

    Source: Wang et al., Overlap Communication with Dependent Computation via Decomposition (ASPLOS 2023).
    """
    latency, bandwidth = _check_link("ring_from", link)
    columns, flops, value_bytes = checks.positive("ring_from", columns=columns, flops=flops, value_bytes=value_bytes)
    [ways] = checks.integers_from_one("ring_from", ways=ways)
    # Seconds a byte: the matmul of a message is longer than its bytes on the wire, and hides the latency once the
    # message is large enough.
    compute = 2 * columns * ways / (value_bytes * flops)
    spare = compute - 1 / bandwidth
    if spare > 0:
        return latency / spare
    if spare == 0 and latency == 0:
        return 0.0
    return math.inf


@typed
def scatter_from(link: Link, n: int) -> float:
    """Returns the bytes per device from which a reduce_scatter and an all_gather beat a tree of whole messages.

    The pair takes 2 (n-1) messages of 1/n of the bytes, recursive doubling ceil(log2 n) of all of them.

    Args:
        link: the link for the messages.
        n: devices.

    Returns:
        Bytes, for `scatter_from=` of `all_reduce_tree`; infinite over two devices: both ways send the same.

    Raises:
        ValueError: n below 1, a bandwidth that is not positive, or a negative latency.

    Example:
        >>> round(sk.cost.scatter_from(sk.cost.links("v5e").link, 8))
        396000

    Source: Thakur, Rabenseifner, Gropp (2005), section 4.5.
    """
    latency, bandwidth = _check_link("scatter_from", link)
    [n] = checks.integers_from_one("scatter_from", n=n)
    tree_messages = math.ceil(math.log2(n))  # of all bytes
    pair_messages = 2 * (n - 1)  # of 1/n of them
    # Over 8 devices the tree sends the bytes 3 times, and the pair 14/8 times, in 11 messages more.
    fewer_bytes = tree_messages - pair_messages / n
    if fewer_bytes <= 0:
        return math.inf
    return latency * bandwidth * (pair_messages - tree_messages) / fewer_bytes


@typed
def bucket_bytes(link: Link, n: int, *, share: float = 0.1) -> int:
    """Returns the bucket size, in bytes per device, at which latency takes this share of an all_reduce.

    Pass it as `bucket_bytes=` to `all_reduce_tree`. With 2 (n-1) messages of 1/n of the bytes it is n latency bandwidth
    (1 - share) / share. Larger buckets gain at most this share; smaller buckets can be reduced earlier in the backward
    pass.

    Args:
        link: the link for the messages.
        n: devices.
        share: of the time, above 0 and below 1.

    Returns:
        Bytes, at least 1.

    Raises:
        ValueError: n below 1, a share outside of 0 to 1, a bandwidth that is not positive, or a negative latency.

    Example:
        >>> sk.cost.bucket_bytes(sk.cost.links("v5e").link, 8)
        3240000

    Source: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training (2020), section 3.2.
    """
    latency, bandwidth = _check_link("bucket_bytes", link)
    [n] = checks.integers_from_one("bucket_bytes", n=n)
    [share] = checks.positive("bucket_bytes", share=share)
    if share >= 1:
        raise ValueError(f"bucket_bytes: share must be above 0 and below 1; got {share}. Pass for example share=0.1.")
    size = n * latency * bandwidth * (1 - share) / share
    return max(1, math.ceil(round(size, 3)))  # 3240000.0000000005 is 3240000


def _check_link(where: str, link: Link) -> tuple[float, float]:
    [latency] = checks.at_least_zero(where, latency=link.latency)
    [bandwidth] = checks.positive(where, bandwidth=link.bandwidth)
    return latency, bandwidth
