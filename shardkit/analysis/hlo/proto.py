"""A compiled program as data: reads a serialized HloModuleProto without a compiler or the protobuf package.

Only the fields that the readers need are decoded; field numbers are those of xla's `hlo.proto` and `xla_data.proto`.
The text form of a module is never used: it changes between versions, and parsing it can abort the process.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from shardkit._jax.jaxprs import file_name, is_kernel
from shardkit.analysis.hlo.groups import Groups, groups_in
from shardkit.analysis.hlo.protobuf import Message, integer, integers, message, text

# Bits of xla's PrimitiveType; a tuple (13), an opaque value and a token have none.
_BITS = {
    **dict.fromkeys((1, 2, 6, 19, 20, 23, 24, 25, 28, 29, 33), 8),
    **dict.fromkeys((3, 7, 10, 16), 16),
    **dict.fromkeys((4, 8, 11), 32),
    **dict.fromkeys((5, 9, 12, 15), 64),
    **dict.fromkeys((21, 22, 32), 4),
    **dict.fromkeys((26, 27), 2),
    **dict.fromkeys((30, 31), 1),
    18: 128,
}


class Shape(NamedTuple):
    """An array's or a tuple's shape; `type` is xla's PrimitiveType, `space` the memory: 0 is the device's large one."""

    type: int
    dims: tuple[int, ...]
    parts: tuple[Shape, ...] = ()
    space: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of all arrays in it, without the padding of a layout."""
        size = sum(part.bytes for part in self.parts)
        if self.type in _BITS:
            size += (self.size * _BITS[self.type] + 7) // 8
        return size

    @property
    def size(self) -> int:
        """Elements of an array."""
        return math.prod(self.dims)


_NO_SHAPE = Shape(0, ())


class Frame(NamedTuple):
    """A line of a stack that led to an instruction."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{file_name(self.file)}:{self.line} ({self.function})"


def outside_kernels(frames: Sequence[Frame]) -> str:
    """The innermost line outside shardkit's kernels, else the outermost."""
    for frame in frames:
        if not is_kernel(frame.file):
            return str(frame)
    return str(frames[-1])


@dataclass
class Instruction:
    """One instruction; `operands` and `calls` are ids of instructions and computations."""

    id: int = 0
    name: str = ""
    opcode: str = ""
    shape: Shape = _NO_SHAPE
    operands: tuple[int, ...] = ()
    calls: tuple[int, ...] = ()
    op_name: str = ""
    frame: int = 0
    tuple_index: int = 0
    parameter: int = 0
    target: str = ""
    direction: str = ""
    literal: int | None = None
    config: dict[str, Any] = field(default_factory=dict)
    groups: Groups = ()
    pairs: tuple[tuple[int, int], ...] = ()
    contracting: tuple[int, ...] = ()
    window: tuple[dict[int, int], ...] = ()
    convolution: dict[int, Any] = field(default_factory=dict)


@dataclass
class Computation:
    """The instructions of one computation by id, in execution order where there is a schedule."""

    id: int
    name: str
    root: int
    instructions: dict[int, Instruction]

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """The parameter instructions by their number."""
        parameters = {}
        for instruction in self.instructions.values():
            if instruction.opcode == "parameter":
                parameters[instruction.parameter] = instruction
        return parameters


@dataclass
class Module:
    """A compiled program."""

    name: str
    entry: int
    computations: dict[int, Computation]
    frames: dict[int, str]

    def source(self, instruction: Instruction) -> str:
        """The user's line that led to an instruction, "file.py:12 (function)", or "" where none is recorded."""
        return self.frames.get(instruction.frame, "")


def read(proto: bytes, line: Callable[[Sequence[Frame]], str] = outside_kernels) -> Module:
    """Decodes a serialized HloModuleProto, the result of `HloModule.as_serialized_hlo_module_proto()`.

    `line` chooses, of the lines that led to an instruction, innermost first, the one that names it.

    Raises:
        ValueError: the bytes are not such a message.
    """
    try:
        fields = message(proto)
        schedule = _read_schedule(message(fields.get(7, [b""])[0]))
        computations = {}
        for data in fields[3]:
            computation = _read_computation(data, schedule)
            computations[computation.id] = computation
        frames = _read_frames(message(fields.get(17, [b""])[0]), line)
        return Module(text(fields[1]), integer(fields, 6), computations, frames)
    except (KeyError, IndexError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"hlo.read: proto must be a serialized HloModuleProto; got {len(proto):,} bytes that are not one. "
            "Pass the result of HloModule.as_serialized_hlo_module_proto()."
        ) from error


def _read_schedule(schedule: Message) -> dict[int, tuple[int, ...]]:
    """The order of execution of each scheduled computation, as ids of instructions."""
    orders = {}
    for entry in schedule.get(1, ()):
        fields = message(entry)
        if 2 in fields:
            orders[integer(fields, 1)] = integers(message(fields[2][0]), 1)
    return orders


def _read_computation(data: bytes, schedule: dict[int, tuple[int, ...]]) -> Computation:
    fields = message(data)
    instructions = {}
    for instruction in map(_read_instruction, fields[2]):
        instructions[instruction.id] = instruction
    number = integer(fields, 5)  # a number that is 0 is not written
    order = schedule.get(number, tuple(instructions))
    return Computation(number, text(fields[1]), integer(fields, 6), {i: instructions[i] for i in order})


def _read_instruction(data: bytes) -> Instruction:
    fields = message(data)
    instruction = Instruction(
        id=integer(fields, 35),
        name=text(fields[1]),
        opcode=text(fields[2]),
        shape=_read_shape(fields[3][0]),
        operands=integers(fields, 36),
        calls=integers(fields, 38),
        tuple_index=integer(fields, 13),
        parameter=integer(fields, 9),
        target=text(fields.get(28)),
        direction=text(fields.get(63)),
        pairs=tuple((integer(pair, 1), integer(pair, 2)) for pair in map(message, fields.get(52, ()))),
        groups=_read_groups(fields),
    )
    if 7 in fields:
        metadata = message(fields[7][0])
        instruction.op_name = text(metadata.get(2))
        instruction.frame = integer(metadata, 15)
    if 8 in fields and not instruction.shape.dims:
        instruction.literal = _read_scalar(message(fields[8][0]))
    if 43 in fields and fields[43][0][:1] == b"{":
        with suppress(json.JSONDecodeError):  # a library's custom call may hold MLIR there
            instruction.config = json.loads(fields[43][0])
    if 30 in fields:
        instruction.contracting = integers(message(fields[30][0]), 1)
    if 15 in fields:
        window = []
        for dim in message(fields[15][0]).get(1, ()):
            window.append({number: values[0] for number, values in message(dim).items()})
        instruction.window = tuple(window)
    if 16 in fields:
        numbers = message(fields[16][0])
        for number in range(3, 13):
            read = integers if number in (6, 11, 12) else integer  # these are lists of spatial dims
            instruction.convolution[number] = read(numbers, number)
    return instruction


def _read_groups(instruction: Message) -> Groups:
    """The groups of devices of a collective, in whichever form the compiler wrote them; see `groups_in`."""
    for form in (93, 92, 87):
        if form in instruction:
            return groups_in(form, bytes(instruction[form][0]))
    return tuple(integers(message(group), 1) for group in instruction.get(49, ()))


def _read_frames(index: Message, line: Callable[[Sequence[Frame]], str]) -> dict[int, str]:
    """For each stack frame the line that names it."""
    files = [name.decode() for name in index.get(1, ())]
    functions = [name.decode() for name in index.get(2, ())]
    places = []
    for place in map(message, index.get(3, ())):
        file = files[integer(place, 1) - 1]
        function = functions[integer(place, 2) - 1]
        places.append(Frame(file, integer(place, 3), function))
    # Numbers are from 1, and 0 is none. Stacks are a hundred deep and share their outer frames: read each frame once.
    frames = []
    callers = []
    for data in map(message, index.get(4, ())):
        frames.append(places[integer(data, 1) - 1])
        callers.append(integer(data, 2) - 1)

    def stack_of(position: int) -> list[Frame]:
        stack = []
        while position >= 0:
            stack.append(frames[position])
            position = callers[position]
        return stack

    return {position + 1: line(stack_of(position)) for position in range(len(frames))}


@lru_cache(4096)  # a program has few shapes
def _read_shape(data: bytes) -> Shape:
    fields = message(data)
    layout = message(fields[5][0]) if 5 in fields else {}
    parts = tuple(map(_read_shape, fields.get(4, ())))
    return Shape(integer(fields, 2), integers(fields, 3), parts, integer(layout, 8))


def _read_scalar(literal: Message) -> int | None:
    """The value of an integer scalar, None for any other."""
    for number in (4, 5, 6, 7):
        if number not in literal:
            continue
        values = integers(literal, number)
        if not values:
            return None
        return values[0] - (1 << 64) if values[0] >= 1 << 63 else values[0]
    return None
