"""A serialized module, opened so that its instructions can be changed and written again.

Only the fields that rewriting needs are read; all others are written as they were. Field numbers are those of xla's
`hlo.proto` and `xla_data.proto`. For example `open_module(data).write()` is a module with the same instructions,
without the order in which they run: an order that leaves out a new instruction would be invalid.

Worked example: `%y = f32[8] add(%x, %x)` is WrittenInstruction(number 2, name "y", opcode "add", operands [1, 1], the
ShapeProto of f32[8], others), where `others` has the line of the source and whatever else is of no concern here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardkit.analysis.hlo.protobuf import integer, integers, message, split_fields, text, write_field

# The fields of a module: computations, and the order in which instructions run.
_COMPUTATION = 3
_SCHEDULE = 7
# Those of a computation.
_INSTRUCTION = 2
_ROOT = 6
# Those of an instruction.
_NAME = 1
_OPCODE = 2
_SHAPE = 3
METADATA = 7
LITERAL = 8
TUPLE_INDEX = 13
TARGET = 28
CONFIG = 43  # of a call, the settings of its library
API_VERSION = 77
_NUMBER = 35
_OPERANDS = 36
_WAITS_FOR = 37  # instructions that run before it, though it reads none of them
_READ_OF_INSTRUCTION = (_NAME, _OPCODE, _SHAPE, _NUMBER, _OPERANDS, _WAITS_FOR)
# Those of a shape.
TYPE = 2
_PARTS = 4
_TUPLE = 13  # the type of one


@dataclass
class WrittenInstruction:
    """An instruction.

    Attributes:
        number: the number by which others read it.
        name: as the compiler prints it.
        opcode: as "add".
        operands: the numbers of the instructions that it reads.
        shape: a serialized ShapeProto.
        others: all other fields, by their numbers.
    """

    number: int
    name: str
    opcode: str
    operands: list[int]
    shape: bytes
    others: list[tuple[int, bytes]]

    @classmethod
    def of(cls, data: bytes) -> WrittenInstruction:
        """Reads a serialized HloInstructionProto."""
        fields = message(data)
        return cls(
            number=integer(fields, _NUMBER),
            name=text(fields[_NAME]),
            opcode=text(fields[_OPCODE]),
            operands=list(integers(fields, _OPERANDS)),
            shape=fields[_SHAPE][0],
            others=_list_others(data, _READ_OF_INSTRUCTION),
        )

    def write(self) -> bytes:
        """A serialized HloInstructionProto."""
        fields = [
            write_field(_NAME, self.name.encode()),
            write_field(_OPCODE, self.opcode.encode()),
            write_field(_SHAPE, self.shape),
            write_field(_NUMBER, self.number),
            *write_fields(_OPERANDS, self.operands),
        ]
        return b"".join(fields) + join_fields(self.others)

    @property
    def metadata(self) -> list[tuple[int, bytes]]:
        """The field with the line of the source, for instructions that are written in its place."""
        return [row for row in self.others if row[0] == METADATA]


@dataclass
class WrittenComputation:
    """A computation.

    Attributes:
        instructions: in an order in which each comes after its operands.
        root: the number of the one that it returns.
        others: all other fields, by their numbers.
    """

    instructions: list[WrittenInstruction]
    root: int
    others: list[tuple[int, bytes]]

    @classmethod
    def of(cls, data: bytes) -> WrittenComputation:
        """Reads a serialized HloComputationProto."""
        fields = message(data)
        return cls(
            instructions=list(map(WrittenInstruction.of, fields[_INSTRUCTION])),
            root=integer(fields, _ROOT),
            others=_list_others(data, (_INSTRUCTION, _ROOT)),
        )

    def write(self) -> bytes:
        """A serialized HloComputationProto."""
        instructions = [instruction.write() for instruction in self.instructions]
        fields = write_fields(_INSTRUCTION, instructions)
        return join_fields(self.others) + b"".join(fields) + write_field(_ROOT, self.root)

    def next_number(self) -> int:
        """A number that no instruction has."""
        return max(self.by_number()) + 1

    def by_number(self) -> dict[int, WrittenInstruction]:
        """Its instructions by their numbers."""
        return {instruction.number: instruction for instruction in self.instructions}


@dataclass
class OpenModule:
    """A module: its computations, and all other fields by their numbers."""

    computations: list[WrittenComputation]
    others: list[tuple[int, bytes]]

    def write(self) -> bytes:
        """A serialized HloModuleProto, without the order in which its instructions run."""
        computations = [computation.write() for computation in self.computations]
        fields = write_fields(_COMPUTATION, computations)
        return join_fields(self.others) + b"".join(fields)


def open_module(serialized: bytes) -> OpenModule:
    """Reads a serialized HloModuleProto."""
    computations = map(WrittenComputation.of, message(serialized)[_COMPUTATION])
    others = _list_others(serialized, (_COMPUTATION, _SCHEDULE))
    return OpenModule(list(computations), others)


def _list_others(data: bytes, numbers: Sequence[int]) -> list[tuple[int, bytes]]:
    """The fields of a message but for those of these numbers: the number of each field, and all of its bytes."""
    others = []
    for number, field in split_fields(data):
        if number not in numbers:
            others.append((number, field))
    return others


def join_fields(numbered: Sequence[tuple[int, bytes]]) -> bytes:
    """A message of fields that are written, of which each comes with its number."""
    return b"".join(field for _, field in numbered)


def edit_fields(
    numbered: Sequence[tuple[int, bytes]], number: int, edit: Callable[[bytes], bytes]
) -> list[tuple[int, bytes]]:
    """Fields, of which each one of some number holds another message: what `edit` makes of the old one."""
    edited = []
    for field_number, field in numbered:
        if field_number == number:
            [value] = message(field)[number]
            field = write_field(number, edit(value))
        edited.append((field_number, field))
    return edited


def write_fields(number: int, values: Sequence[int | bytes]) -> list[bytes]:
    """A repeated field: one field of this number for each value."""
    return [write_field(number, value) for value in values]


def list_parts(shape: bytes) -> list[bytes]:
    """The shapes in a tuple; of an array, its shape alone."""
    fields = message(shape)
    if integer(fields, TYPE) == _TUPLE:
        return list(fields.get(_PARTS, ()))
    return [shape]


def make_tuple(shapes: Sequence[bytes]) -> bytes:
    """The shape of a tuple."""
    parts = write_fields(_PARTS, shapes)
    return write_field(TYPE, _TUPLE) + b"".join(parts)
