"""Links: what the links of a machine do, of a chip as published or as measured, and what a collective costs on them.

This is the one model of links: a device that sends some bytes in some messages takes `Link.seconds` for them. All that
predicts or bounds a time asks for it: `cost.collective_time`, the planner, the seconds of a compiled program in
`aot.compile`, and the fits of `shardkit bench comm`. They differ in where the link is from: measured over a mesh axis
(`Links.of`), or published, for a group of chips (`link_of_group`). `meshes/network.py` alone looks closer: it places
each message on the single links of a torus, to compare orders of devices. Both agree where a group has its links to
itself, on all but an all_to_all, of which a group's bandwidth leaves out that messages to distant devices pass many
links.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardkit.cost import hardware
from shardkit.cost.hardware import Chip, group_bandwidth

_TORUS_HOP = 1e-6  # seconds; of a TPU's torus: the scaling book, part 3
# Seconds; of NVLink: NCCL's hardware latency of a ring's step in the Simple protocol (src/graph/tuning.cc).
_SWITCH_HOP = 3.4e-6


class Link(NamedTuple):
    """One kind of link.

    Attributes:
        latency: seconds per message.
        bandwidth: bytes/s a device sends in one direction.
        source: the source of the figures, such as "chip v5e" or "measured on 2026-11-23".
    """

    latency: float
    bandwidth: float
    source: str = ""

    def seconds(self, sent: float, messages: float = 0) -> float:
        """Returns the seconds in which a device sends this many bytes, in this many messages one after the other.

        Example:
            >>> sk.cost.Link(latency=1e-6, bandwidth=1e9).seconds(7e6, messages=7)
            0.007007
        """
        return messages * self.latency + sent / self.bandwidth

    def __str__(self) -> str:
        text = f"{self.latency * 1e6:.3g} us a message, {self.bandwidth / 1e9:.3g} GB/s"
        if self.source:
            text += f" ({self.source})"
        return text


class Links(NamedTuple):
    """The links of a machine: pass them to functions that choose by speed.

    Attributes:
        link: the link of every axis that `axes` does not name.
        flops: FLOP/s of a device's bfloat16 matmuls; None if unknown.
        axes: pairs (axis, Link), for axes with other links.

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
        """Returns the link of an axis; of several axes the largest latency and the smallest bandwidth."""
        names = axis
        if isinstance(axis, str):
            names = (axis,)
        link_of = dict(self.axes)
        links = [link_of.get(name, self.link) for name in names]
        if not links:
            return self.link
        if len(set(links)) == 1:
            return links[0]
        # A collective over several axes goes over all their links, and is as slow as the worst of them.
        slowest = min(links, key=lambda link: link.bandwidth)
        return slowest._replace(latency=max(link.latency for link in links))


def links(chip: str | Chip) -> Links:
    """Returns the published links of a chip: one link of its torus, or all its NVLinks into the switch of its host.

    The latency of a message is 1 us on a torus and 3.4 us through NVLink's switch. It does not know the network beyond
    a slice or a host: measure it.

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
    latency = _SWITCH_HOP
    if described.torus:
        latency = _TORUS_HOP
    return Links(Link(latency, described.link_bandwidth, f"chip {described.name}"), described.flops)


class Group(NamedTuple):
    """Where the members of a collective stand on a machine.

    Attributes:
        dims: dimensions of the torus along which they extend, at least 1; without a torus it does not count.
        members_on_a_host: the fewest members on a host, each with a network adapter of its own; None: one host has all.
    """

    dims: int = 1
    members_on_a_host: int | None = None


def link_of_group(chip: Chip, kind: str, group: Group) -> Link:
    """The link that each member of a group has in a collective, by the chip's published figures.

    On a torus a collective sends in both directions of every dimension along which the group extends, and a permute in
    one direction of one link. GPUs send over NVLink inside a host. Between hosts each GPU has a network adapter of its
    own, and a ring can cross by the adapters of all members on a host; a permute crosses by one.

    Latency is left out, so that times are lower bounds, as are those of a compiled program, which the planner's are
    compared with.

    Worked example: 16 H100 on two hosts gather over all of them. A ring crosses by eight adapters, 8 x 50 GB/s, and
    each device sends at 400 GB/s; over two of them, one on each host, at 50 GB/s; over the eight of a host at 450 GB/s.
    """
    is_permute = kind == "ppermute"
    bandwidth = chip.link_bandwidth
    if chip.torus and not is_permute:
        bandwidth = group_bandwidth(chip, group.dims)
    elif not chip.torus and group.members_on_a_host is not None:
        adapters = group.members_on_a_host
        if is_permute:
            adapters = 1
        # However many adapters there are, the ring goes over NVLink inside each host.
        bandwidth = min(chip.link_bandwidth, chip.network_bandwidth * adapters)
    return Link(0.0, bandwidth, f"chip {chip.name}")
