"""Asynchronous collectives that can wait for each other: the order of a compiled schedule.

Each device starts its collectives in the order of the schedule, but a communicator, which a group of devices shares,
may run them later. Worked example, a mesh data=2, model=2 with devices 0 to 3:

    %a = all-reduce-start(%x), replica_groups={{0,1,2,3}}
    %b = all-gather-start(%y), replica_groups={{0,1},{2,3}}
    ...both ends

Devices 0 and 1 are in a group of each. If device 0 runs %a first and device 1 runs %b first, both wait, and no error is
raised (seen with RCCL, ROCm/rccl#2191; openxla/xla#47467). Equal groups share one communicator, which keeps the order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from shardkit._arguments.checks import quote
from shardkit.analysis.compiled_rules.program import CompiledProgram
from shardkit.analysis.hlo.collectives import FoundCollective, Pairs
from shardkit.analysis.hlo.groups import Groups, axes_of
from shardkit.analysis.rules.rule import Finding

_RULE = "collectives-in-flight"
_OF_JAX = 1  # the channel that jax gives all collectives of a shard_map; a compiler numbers its own
_SHARED = 2  # devices with which two groups can wait for each other


class _Flight(NamedTuple):
    """An asynchronous collective, from the position of its start in the schedule to that of its end."""

    collective: FoundCollective
    start: int
    end: int


def in_flight(program: CompiledProgram) -> Iterator[Finding]:
    """Collectives in flight together that share devices or a channel, and starts without an end."""
    pairs = Pairs(program.module)
    for computation in program.module.computations.values():
        if computation.id in program.uses.fused:
            continue
        pairings, unended = pairs.pair(computation)
        flights: list[_Flight] = []
        for position, pairing in pairings.items():
            if pairing is None:
                continue
            collective, start = pairing
            if start is None or collective.is_synchronous_pair:
                continue
            flight = _Flight(collective, start, position)
            for earlier in flights:
                # Two stretches of a schedule overlap where each begins before the other ends.
                if earlier.start < flight.end and flight.start < earlier.end:
                    yield from _compare(program, earlier.collective, collective)
            flights.append(flight)
        for collective in unended:
            yield Finding(
                _RULE,
                f"{_describe(program, collective)} starts, and has no end in its computation.",
                collective.find_source(program.module),
                "Compile with another version of the compiler: the schedule is wrong.",
            )


def _compare(program: CompiledProgram, first: FoundCollective, second: FoundCollective) -> Iterator[Finding]:
    """What is wrong with two collectives that are in flight together."""
    place = second.find_source(program.module)
    first_place = first.find_source(program.module) or "an unknown line"
    text = f"{_describe(program, first)} at {first_place} and {_describe(program, second)} are in flight together"
    shared = _count_shared(_list_groups(program, first), _list_groups(program, second))
    channel = second.instruction.channel
    if shared >= _SHARED:
        yield Finding(
            _RULE,
            f"{text}, and a group of each has the same {shared} devices, on which they may run in another order and "
            "wait for each other.",
            place,
            "Make one depend on the result of the other, or compile one of them as synchronous.",
        )
    elif channel > _OF_JAX and channel == first.instruction.channel:
        yield Finding(
            _RULE,
            f"{text} on the same channel {channel}, so that what one sends may arrive at the other.",
            place,
            "Compile with another version of the compiler: the channels are wrong.",
        )


def _list_groups(program: CompiledProgram, collective: FoundCollective) -> Groups:
    """The groups of devices that share a communicator; of a permute, all devices that its pairs connect."""
    if collective.kind != "ppermute":
        if collective.groups:
            return collective.groups
        all_devices = tuple(range(math.prod(program.mesh.values())))
        return (all_devices,)
    # Pairs that share a device join: of (0, 1), (1, 2), (4, 5) the groups are {0, 1, 2} and {4, 5}.
    groups: list[set[int]] = []
    for pair in collective.groups:
        joined = set(pair)
        separate = []
        for group in groups:
            if group & joined:
                joined |= group
            else:
                separate.append(group)
        groups = [*separate, joined]
    return tuple(tuple(sorted(group)) for group in groups)


def _count_shared(first_groups: Groups, second_groups: Groups) -> int:
    """The most devices that two different groups share; groups of the same devices are one communicator."""
    most = 0
    for first in map(set, first_groups):
        for second in map(set, second_groups):
            if first != second:
                most = max(most, len(first & second))
    return most


def _describe(program: CompiledProgram, collective: FoundCollective) -> str:
    axes, _ = axes_of(collective.kind, collective.groups, tuple(program.mesh.items()))
    return f"{collective.kind} over {quote(axes)}"
