"""Links: seconds per message and bytes per second, of a chip or as measured, and the sizes from which a way is faster.

A message of B bytes takes latency + B / bandwidth (the alpha-beta model). Nothing is looked up behind a caller's back:
`Links` are passed to what decides by them (`impl=` of the collective matmuls, `links=` of the planner), and print where
their figures are from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from shardkit._arguments import checks
from shardkit._arguments.typed import typed
from shardkit.cost import hardware
from shardkit.cost.hardware import Chip

_HOP = 1e-6  # of a TPU's torus: the scaling book, part 3
_SWITCHED = 3.4e-6  # of NVLink: NCCL's hardware latency of a ring's step in the Simple protocol (src/graph/tuning.cc)


class Link(NamedTuple):
    """What one kind of link does.

    Attributes:
        latency: seconds per message.
        bandwidth: bytes/s that a device sends in one direction.
        source: where the figures are from, such as "chip v5e" or "measured on 2026-11-23".
    """

    latency: float
    bandwidth: float
    source: str = ""

    def __str__(self) -> str:
        source = f" ({self.source})" if self.source else ""
        return f"{self.latency * 1e6:.3g} us a message, {self.bandwidth / 1e9:.3g} GB/s{source}"


class Links(NamedTuple):
    """The links of a machine, for whatever chooses by them.

    Attributes:
        link: of every axis that `axes` does not name.
        flops: FLOP/s of a device's bfloat16 matmuls; None where they are not known.
        axes: (axis, Link) of axes with links of their own.

    Example:
        >>> slow = sk.cost.Link(latency=20e-6, bandwidth=12.5e9, source="measured on 2026-11-23")
        >>> links = sk.cost.links("h100")._replace(axes=(("host", slow),))
        >>> print(links.of("host"), "|", links.of("model"))
        20 us a message, 12.5 GB/s (measured on 2026-11-23) | 3.4 us a message, 450 GB/s (chip h100)
    """

    link: Link
    flops: float | None = None
    axes: tuple[tuple[str, Link], ...] = ()

    def of(self, axis: str | Sequence[str]) -> Link:
        """The link of an axis; of several axes the one that takes longest for a message, at each of its figures."""
        names = (axis,) if isinstance(axis, str) else axis
        link_of = dict(self.axes)
        links = [link_of.get(name, self.link) for name in names]
        if not links:
            return self.link
        if len(set(links)) == 1:
            return links[0]
        slowest = min(links, key=lambda link: link.bandwidth)
        return slowest._replace(latency=max(link.latency for link in links))


def links(chip: str | Chip) -> Links:
    """The links of a chip as published: one link of its torus, or all its NVLinks into the switch of its host.

    The latency of a message is 1 us on a torus and 3.4 us through NVLink's switch. The network beyond a slice or a host
    is left out: measure it.

    Args:
        chip: a chip or its name.

    Returns:
        Links, with the chip's peak FLOP/s.

    Raises:
        ValueError: an unknown chip.

    Example:
        >>> print(sk.cost.links("v5e").link)
        1 us a message, 45 GB/s (chip v5e)

    Source: How to Scale Your Model, part 3, and NCCL's tuning table (src/graph/tuning.cc) for the latencies.
    """
    described = hardware.chip(chip)
    latency = _HOP if described.torus else _SWITCHED
    return Links(Link(latency, described.link_bandwidth, f"chip {described.name}"), described.flops)


@typed
def ring_from(link: Link, columns: float, *, flops: float, value_bytes: float = 2, ways: int = 1) -> float:
    """The bytes of a message from which a collective matmul hides it: its matmul takes as long as the hop.

    A message of B bytes arrives after latency + B / bandwidth; the product of its rows with c columns takes
    2 B c / (value_bytes flops). Below this size, or with fewer columns, one gather and one matmul are simpler.

    Args:
        link: what the messages are sent over.
        columns: columns of the weights on one device, of all weights that are multiplied with one message.
        flops: FLOP/s of a device.
        value_bytes: bytes per value.
        ways: directions that are sent to at once, 1 or 2: with 2, each hop is hidden by two messages' matmuls.

    Returns:
        Bytes; infinite where no message is hidden.

    Raises:
        ValueError: a figure that is not positive, or a negative latency.

    Example:
        >>> v5e = sk.cost.links("v5e")
        >>> [round(sk.cost.ring_from(v5e.link, columns, flops=v5e.flops)) for columns in (4400, 8192)]
        [8865000, 51649]

    Source: Wang et al., Overlap Communication with Dependent Computation via Decomposition (ASPLOS 2023).
    """
    latency, bandwidth = _check_link("ring_from", link)
    columns, flops, value_bytes = checks.positive("ring_from", columns=columns, flops=flops, value_bytes=value_bytes)
    [ways] = checks.whole("ring_from", ways=ways)
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
    """The bytes per device from which a reduce_scatter and an all_gather are faster than a tree of whole messages.

    The pair takes 2 (n-1) messages of 1/n of the bytes, recursive doubling ceil(log2 n) of all of them.

    Args:
        link: what the messages are sent over.
        n: devices.

    Returns:
        Bytes, for `scatter_from=` of `all_reduce_tree`; infinite over two devices, which send as much in either way.

    Raises:
        ValueError: n below 1, a bandwidth that is not positive, or a negative latency.

    Example:
        >>> round(sk.cost.scatter_from(sk.cost.links("v5e").link, 8))
        396000

    Source: Thakur, Rabenseifner, Gropp (2005), section 4.5.
    """
    latency, bandwidth = _check_link("scatter_from", link)
    [n] = checks.whole("scatter_from", n=n)
    tree_messages = math.ceil(math.log2(n))  # of all bytes
    pair_messages = 2 * (n - 1)  # of 1/n of them
    # Over 8 devices the tree sends the bytes 3 times, and the pair 14/8 times, in 11 messages more.
    fewer_bytes = tree_messages - pair_messages / n
    if fewer_bytes <= 0:
        return math.inf
    return latency * bandwidth * (pair_messages - tree_messages) / fewer_bytes


@typed
def bucket_bytes(link: Link, n: int, *, share: float = 0.1) -> int:
    """The bytes per device of an all_reduce of which latency takes this share.

    For `bucket_bytes=` of `all_reduce_tree`. In 2 (n-1) messages of 1/n of the bytes these are
    n latency bandwidth (1 - share) / share. Larger buckets gain at most that share, and smaller ones can be reduced
    earlier in the backward pass.

    Args:
        link: what the messages are sent over.
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
    [n] = checks.whole("bucket_bytes", n=n)
    [share] = checks.positive("bucket_bytes", share=share)
    if share >= 1:
        raise ValueError(f"bucket_bytes: share must be above 0 and below 1; got {share}. Pass for example share=0.1.")
    size = n * latency * bandwidth * (1 - share) / share
    return max(1, math.ceil(round(size, 3)))  # 3240000.0000000005 is 3240000


def _check_link(where: str, link: Link) -> tuple[float, float]:
    [latency] = checks.at_least_zero(where, latency=link.latency)
    [bandwidth] = checks.positive(where, bandwidth=link.bandwidth)
    return latency, bandwidth
