"""Writes the groups of devices of all collectives of a serialized module as lists, before jaxlib reads it.

Groups that are axes of a mesh lose the order of the mesh's devices on the way to StableHLO (seen with jaxlib 0.10.2),
and those of an all_to_all become text that jaxlib does not read (seen with jaxlib 0.12).

Worked example: an all-reduce has the groups "x" of a mesh x=2, y=2, whose devices are 0, 2, 1, 3. The mesh is
[[0, 2], [1, 3]], "x" runs down its columns, and so the groups become {0, 1}, {2, 3}.
"""

from __future__ import annotations

from shardkit.analysis.hlo.groups import COLLECTIVE_DEVICES, IOTA, LISTS, MESH_AXES
from shardkit.analysis.hlo.proto import read_groups
from shardkit.analysis.hlo.protobuf import message, split_fields, write_field

# The fields of a module that are computations, and of a computation that are instructions.
_COMPUTATION = 3
_INSTRUCTION = 2


def list_groups(serialized: bytes) -> bytes:
    """A serialized HloModuleProto with the same collectives."""
    written = []
    for number, data in split_fields(serialized):
        if number == _COMPUTATION:
            [computation] = message(data)[_COMPUTATION]
            data = write_field(_COMPUTATION, _rewrite_computation(computation))
        written.append(data)
    return b"".join(written)


def _rewrite_computation(computation: bytes) -> bytes:
    written = []
    for number, data in split_fields(computation):
        if number == _INSTRUCTION:
            [instruction] = message(data)[_INSTRUCTION]
            data = write_field(_INSTRUCTION, _rewrite_instruction(instruction))
        written.append(data)
    return b"".join(written)


def _rewrite_instruction(instruction: bytes) -> bytes:
    groups = read_groups(message(instruction))
    if not groups:
        return instruction
    written = []
    for number, data in split_fields(instruction):
        if number not in (MESH_AXES, IOTA, COLLECTIVE_DEVICES, LISTS):
            written.append(data)
    for group in groups:
        written.append(write_field(LISTS, b"".join(write_field(1, device) for device in group)))
    return b"".join(written)
