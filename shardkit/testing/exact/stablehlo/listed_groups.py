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
from shardkit.testing.exact.stablehlo.instructions import WrittenComputation, write_fields


def list_groups(computation: WrittenComputation) -> None:
    """Gives each collective of a computation its groups as lists."""
    for instruction in computation.instructions:
        # A group is written in one of four fields, which few instructions of a module have.
        group_fields = []
        fields = []
        for number, field in instruction.others:
            if number in _GROUPS:
                group_fields.append(field)
            else:
                fields.append((number, field))
        groups = read_groups(message(b"".join(group_fields)))
        # Without groups all devices are one. So the fields stay, which may say this in a form that jaxlib reads.
        if not groups:
            continue
        for group in groups:
            devices = b"".join(write_fields(_DEVICE, group))
            fields.append((LISTS, write_field(LISTS, devices)))
        instruction.others = fields


_GROUPS = (MESH_AXES, IOTA, COLLECTIVE_DEVICES, LISTS)
_DEVICE = 1  # of a ReplicaGroup, the number of one of its devices
