"""Writes the groups of devices of all collectives of a serialized module as lists, before jaxlib reads it.

Groups that are axes of a mesh lose the order of the mesh's devices on the way to StableHLO (seen with jaxlib 0.10.2),
and those of an all_to_all become text that jaxlib does not read (seen with jaxlib 0.12).

Worked example: an all-reduce has the groups "x" of a mesh x=2, y=2, whose devices are 0, 2, 1, 3. The mesh is
[[0, 2], [1, 3]], "x" runs down its columns, and so the groups become {0, 1}, {2, 3}.
"""

from __future__ import annotations

from shardkit.analysis.hlo.groups import COLLECTIVE_DEVICES, IOTA, LISTS, MESH_AXES
from shardkit.analysis.hlo.proto import read_groups
from shardkit.analysis.hlo.protobuf import message, write_field
from shardkit.testing.exact.stablehlo.instructions import WrittenComputation


def list_groups(computation: WrittenComputation) -> None:
    """Gives each collective of a computation its groups as lists."""
    for instruction in computation.instructions:
        # Few instructions of a module are collectives: the fields of others are not read.
        if not any(number in _GROUPS for number, _ in instruction.others):
            continue
        fields = b"".join(field for _, field in instruction.others)
        groups = read_groups(message(fields))
        if not groups:
            continue
        # Of the fields that may say the groups, one is left.
        others = [(number, field) for number, field in instruction.others if number not in _GROUPS]
        for group in groups:
            devices = b"".join(write_field(_DEVICE, device) for device in group)
            others.append((LISTS, write_field(LISTS, devices)))
        instruction.others = others


_GROUPS = (MESH_AXES, IOTA, COLLECTIVE_DEVICES, LISTS)
_DEVICE = 1  # of a ReplicaGroup, the number of one of its devices
