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
from shardkit.analysis.hlo.groups import COLLECTIVE_DEVICES, IOTA, LISTS, MESH_AXES, Groups, groups_in, read_lists
from shardkit.analysis.hlo.protobuf import Message, integer, integers, message, signed, text

# Fields of an instruction (HloInstructionProto) that hold messages.
_METADATA = 7
_LITERAL = 8
_WINDOW = 15
_CONVOLUTION = 16
_DOT = 30
_BACKEND_CONFIG = 43
_SOURCE_TARGET_PAIRS = 52
# Fields of a literal (LiteralProto) with values of 32 and 64 bits, signed and unsigned.
_INTEGER_LITERALS = (4, 5, 6, 7)
# Fields of ConvolutionDimensionNumbers: numbers of dims, and lists of spatial dims.
_CONVOLUTION_FIELDS = range(3, 13)
_SPATIAL_DIMS = (6, 11, 12)

# Bits of xla's PrimitiveType; a tuple (13), an opaque value and a token have none.
# For example 11 is f32, 16 is bf16, 21 is s4.
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
            # In whole bytes: three elements of 4 bits have two.
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
    """One instruction. Fields that it does not have keep their defaults.

    Attributes:
        id: its number in the module.
        name: as the compiler prints it, without "%".
        opcode: as "dot" or "all-gather-start".
        shape: of its result.
        operands: ids of instructions of the same computation.
        calls: ids of the computations that it runs; of a while loop the body, then the condition.
        op_name: jax's name of the operation that it comes from, "jit(step)/shard_map/all_gather".
        frame: the stack frame in which jax traced it; 0: none.
        tuple_index: of a get-tuple-element.
        parameter: of a parameter, its number.
        target: of a custom call, the function that is called.
        direction: of a comparison: "LT", "LE", "GT", "GE", "EQ" or "NE".
        literal: of a constant, its value if it is a whole number.
        config: settings of the backend, as {"known_trip_count": {"n": "12"}}.
        groups: of a collective, the groups of devices; none: all devices together.
        channel: of a collective, the number that its copies share; 0: none.
        pairs: of a permute, (source, target).
        contracting: of a dot, the dims of the left operand that are summed.
        window: of a convolution, the fields of WindowDimension by number, for each spatial dim.
        convolution: of a convolution, the fields of ConvolutionDimensionNumbers by number.
    """

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
    channel: int = 0
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
        # Fields: 1 is the name, 3 computations, 6 the id of the one that runs first, 7 the schedule, 17 stack frames.
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
    number = integer(fields, 5)
    # A dict keeps its order, which from here on is that of execution.
    if number in schedule:
        instructions = {instruction_id: instructions[instruction_id] for instruction_id in schedule[number]}
    return Computation(number, text(fields[1]), integer(fields, 6), instructions)


def _read_instruction(data: bytes) -> Instruction:
    """An instruction; what it does not have keeps its default.

    For example an instruction that is printed as

        %dot.3 = f32[8,16] dot(%p.1, %p.2), lhs_contracting_dims={1}, metadata={op_name="jit(f)/dot_general"}

    has the name "dot.3", opcode "dot", shape (11, (8, 16)), in which 11 is F32, the operands' ids (1, 2), contracting
    (1,) and that op_name.
    """
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
        pairs=_read_pairs(fields),
        groups=read_groups(fields),
        channel=integer(fields, 26),
    )
    if _METADATA in fields:
        metadata = message(fields[_METADATA][0])
        instruction.op_name = text(metadata.get(2))
        instruction.frame = integer(metadata, 15)
    # Scalars alone, such as the bounds of loops. A constant array may be large.
    if _LITERAL in fields and not instruction.shape.dims:
        instruction.literal = _read_scalar(message(fields[_LITERAL][0]))
    if _BACKEND_CONFIG in fields:
        instruction.config = _read_config(fields[_BACKEND_CONFIG][0])
    if _DOT in fields:
        instruction.contracting = integers(message(fields[_DOT][0]), 1)
    if _WINDOW in fields:
        instruction.window = _read_window(message(fields[_WINDOW][0]))
    if _CONVOLUTION in fields:
        instruction.convolution = _read_convolution(message(fields[_CONVOLUTION][0]))
    return instruction


def _read_pairs(instruction: Message) -> tuple[tuple[int, int], ...]:
    """The pairs of source and target of a permute."""
    pairs = []
    for data in instruction.get(_SOURCE_TARGET_PAIRS, ()):
        pair = message(data)
        pairs.append((integer(pair, 1), integer(pair, 2)))
    return tuple(pairs)


def read_groups(instruction: Message) -> Groups:
    """The groups of devices of a collective, in whichever form the compiler wrote them; see `groups_in`."""
    for form in (MESH_AXES, IOTA, COLLECTIVE_DEVICES):
        if form in instruction:
            return groups_in(form, bytes(instruction[form][0]))
    return read_lists(instruction.get(LISTS, ()))


def _read_config(data: bytes) -> dict[str, Any]:
    """The settings that a compiler's backend attaches to an instruction, if they are JSON."""
    config: dict[str, Any] = {}
    if data.startswith(b"{"):
        with suppress(json.JSONDecodeError):  # a library's custom call may hold MLIR here, which begins alike
            config = json.loads(data)
    return config


def _read_window(window: Message) -> tuple[dict[int, int], ...]:
    """The fields of WindowDimension by their numbers, for each spatial dim."""
    dims = []
    for data in window.get(1, ()):
        dims.append({number: values[0] for number, values in message(data).items()})
    return tuple(dims)


def _read_convolution(convolution: Message) -> dict[int, Any]:
    """The fields of ConvolutionDimensionNumbers by their numbers."""
    fields: dict[int, Any] = {}
    for number in _CONVOLUTION_FIELDS:
        if number in _SPATIAL_DIMS:
            fields[number] = integers(convolution, number)
        else:
            fields[number] = integer(convolution, number)
    return fields


def _read_frames(index: Message, line: Callable[[Sequence[Frame]], str]) -> dict[int, str]:
    """For each stack frame the line that names it.

    The index has tables of file names, function names, lines, and frames. A frame is the number of a line and the
    number of its caller's frame; numbers are from 1, and 0 is none. For example

        files      1: "model.py", 2: "train.py"
        functions  1: "loss", 2: "main"
        lines      1: (file 1, function 1, line 12), 2: (file 2, function 2, line 80)
        frames     1: (line 2, caller 0), 2: (line 1, caller 1)

    in which frame 2 is the stack model.py:12 (loss), called from train.py:80 (main).
    """
    files = [name.decode() for name in index.get(1, ())]
    functions = [name.decode() for name in index.get(2, ())]
    places = []
    for place in map(message, index.get(3, ())):
        file = files[integer(place, 1) - 1]
        function = functions[integer(place, 2) - 1]
        places.append(Frame(file, integer(place, 3), function))
    # Stacks are a hundred deep and share their outer frames: read each frame once.
    frames = []
    callers = []
    for frame in map(message, index.get(4, ())):
        frames.append(places[integer(frame, 1) - 1])
        callers.append(integer(frame, 2))

    lines = {}
    for number in range(1, len(frames) + 1):
        stack = []
        frame_number = number
        while frame_number > 0:
            stack.append(frames[frame_number - 1])
            frame_number = callers[frame_number - 1]
        lines[number] = line(stack)
    return lines


@lru_cache(4096)  # a program has few shapes
def _read_shape(data: bytes) -> Shape:
    fields = message(data)
    space = 0
    if 5 in fields:
        layout = message(fields[5][0])
        space = integer(layout, 8)
    parts = tuple(map(_read_shape, fields.get(4, ())))
    return Shape(type=integer(fields, 2), dims=integers(fields, 3), parts=parts, space=space)


def _read_scalar(literal: Message) -> int | None:
    """The value of an integer scalar, None for any other."""
    for number in _INTEGER_LITERALS:
        if number not in literal:
            continue
        values = integers(literal, number)
        if not values:
            return None
        return signed(values[0])
    return None
