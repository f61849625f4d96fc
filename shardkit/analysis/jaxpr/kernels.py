"""What a Pallas kernel sends by remote copies, read from its program for each device."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction

from shardkit._jax.jaxprs import Site
from shardkit.analysis.jaxpr.foreign import Claim
from shardkit.remote_copies.equations import communicates
from shardkit.remote_copies.events import UnknownOrdersError
from shardkit.remote_copies.program import KernelProgram
from shardkit.remote_copies.rules import add_call


def count_copies(site: Site) -> list[Claim] | None:
    """What the remote copies of a kernel send, for each set of axes along which they go.

    Worked example: a bidirectional ring on x=4, y=2, of which each device sends 3 pieces of 64 bytes along "x". The
    copies of all 8 devices add up to 1,536 bytes, 192 a device: a ppermute over ("x",).

    Returns:
        The bytes that a device sends in one call, on average; None for other equations, for a kernel that sends
        nothing, and for one whose copies depend on data.
    """
    if site.name != "pallas_call" or not site.sizes:
        return None
    if not communicates(site.equation):
        return None
    program = KernelProgram(site.sizes)
    try:
        add_call(program, site.equation, 0)
    except (UnknownOrdersError, IndexError):
        return None
    bytes_by_axes: dict[tuple[str, ...], int] = defaultdict(int)
    for event in program.events:
        if event.copy is None or event.copy.source.device == event.copy.target.device:
            continue
        source = program.coordinates(event.copy.source.device)
        target = program.coordinates(event.copy.target.device)
        axes = tuple(axis for axis in source if source[axis] != target[axis])
        bytes_by_axes[axes] += event.copy.read.bytes
    return [Claim("ppermute", axes, Fraction(sent, program.devices)) for axes, sent in bytes_by_axes.items()]
