"""Writes the groups of devices of all collectives of a serialized module as lists, before jaxlib reads it.

Groups that are axes of a mesh lose the order of the mesh's devices on the way to StableHLO (seen with jaxlib 0.10.2),
and those of an all_to_all become text that jaxlib does not read (seen with jaxlib 0.12).

Worked example: an all-reduce has the groups "x" of a mesh x=2, y=2, whose devices are 0, 2, 1, 3. The mesh is
[[0, 2], [1, 3]], "x" runs down its columns, and so the groups become {0, 1}, {2, 3}.
"""

from __future__ import annotations

from collections.abc import Callable

from shardkit.analysis.hlo.groups import COLLECTIVE_DEVICES, IOTA, LISTS, MESH_AXES
from shardkit.analysis.hlo.proto import read_groups
from shardkit.analysis.hlo.protobuf import message, split_fields, write_field

# The fields of a module that are computations, and of a computation that are instructions.
_COMPUTATION = 3
_INSTRUCTION = 2


def list_groups(serialized: bytes) -> bytes:
    """A serialized HloModuleProto with the same collectives."""
    return _rewrite_messages(serialized, _COMPUTATION, _rewrite_computation)


def _rewrite_computation(computation: bytes) -> bytes:
    return _rewrite_messages(computation, _INSTRUCTION, _rewrite_instruction)


def _rewrite_messages(outer: bytes, field: int, rewrite: Callable[[bytes], bytes]) -> bytes:
    """A message in which the messages of one field are others."""
    written = []
    for number, data in split_fields(outer):
        if number == field:
            [inner] = message(data)[field]
            data = write_field(field, rewrite(inner))
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
