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
        own = (math.prod(self.dims) * _BITS[self.type] + 7) // 8 if self.type in _BITS else 0
        return own + sum(part.bytes for part in self.parts)

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
    return str(next((frame for frame in frames if not is_kernel(frame.file)), frames[-1]))


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
        return {i.parameter: i for i in self.instructions.values() if i.opcode == "parameter"}


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
        top = message(proto)
        orders = [message(entry) for entry in message(top.get(7, [b""])[0]).get(1, ())]
        schedule = {integer(each, 1): integers(message(each[2][0]), 1) for each in orders if 2 in each}
        computations = [_computation(b, schedule) for b in top[3]]
        frames = _frames(message(top.get(17, [b""])[0]), line)
        return Module(text(top[1]), integer(top, 6), {c.id: c for c in computations}, frames)
    except (KeyError, IndexError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"hlo.read: proto must be a serialized HloModuleProto; got {len(proto):,} bytes that are not one. "
            "Pass the result of HloModule.as_serialized_hlo_module_proto()."
        ) from error


def _computation(data: bytes, schedule: dict[int, tuple[int, ...]]) -> Computation:
    fields = message(data)
    instructions = {i.id: i for i in map(_instruction, fields[2])}
    number = integer(fields, 5)  # a number that is 0 is not written
    order = schedule.get(number, tuple(instructions))
    return Computation(number, text(fields[1]), integer(fields, 6), {i: instructions[i] for i in order})


def _instruction(data: bytes) -> Instruction:
    f = message(data)
    out = Instruction(
        id=integer(f, 35),
        name=text(f[1]),
        opcode=text(f[2]),
        shape=_shape(f[3][0]),
        operands=integers(f, 36),
        calls=integers(f, 38),
        tuple_index=integer(f, 13),
        parameter=integer(f, 9),
        target=text(f.get(28)),
        direction=text(f.get(63)),
        pairs=tuple((integer(p, 1), integer(p, 2)) for p in map(message, f.get(52, ()))),
    )
    if 7 in f:
        metadata = message(f[7][0])
        out.op_name, out.frame = text(metadata.get(2)), integer(metadata, 15)
    if 8 in f and not out.shape.dims:
        out.literal = _scalar(message(f[8][0]))
    if 43 in f and f[43][0][:1] == b"{":
        with suppress(json.JSONDecodeError):  # a library's custom call may hold MLIR there
            out.config = json.loads(f[43][0])
    named = [(n, bytes(f[n][0])) for n in (93, 92, 87) if n in f]
    out.groups = groups_in(*named[0]) if named else tuple(integers(message(g), 1) for g in f.get(49, ()))
    if 30 in f:
        out.contracting = integers(message(f[30][0]), 1)
    if 15 in f:
        out.window = tuple({k: v[0] for k, v in message(d).items()} for d in message(f[15][0]).get(1, ()))
    if 16 in f:
        numbers = message(f[16][0])
        out.convolution = {k: integers(numbers, k) if k in (6, 11, 12) else integer(numbers, k) for k in range(3, 13)}
    return out


def _frames(index: Message, line: Callable[[Sequence[Frame]], str]) -> dict[int, str]:
    """For each stack frame the line that names it."""
    files, functions = ([b.decode() for b in index.get(n, ())] for n in (1, 2))
    places = [
        Frame(files[integer(place, 1) - 1], integer(place, 3), functions[integer(place, 2) - 1])
        for place in map(message, index.get(3, ()))
    ]
    frames = [message(b) for b in index.get(4, ())]
    # Numbers are from 1, and 0 is none. Stacks are a hundred deep and share their outer frames: read each frame once.
    own = [places[integer(frame, 1) - 1] for frame in frames]
    outer = [integer(frame, 2) - 1 for frame in frames]

    def stack(at: int) -> list[Frame]:
        out = []
        while at >= 0:
            out.append(own[at])
            at = outer[at]
        return out

    return {at + 1: line(stack(at)) for at in range(len(frames))}


@lru_cache(4096)  # a program has few shapes
def _shape(data: bytes) -> Shape:
    f = message(data)
    layout = message(f[5][0]) if 5 in f else {}
    return Shape(integer(f, 2), integers(f, 3), tuple(map(_shape, f.get(4, ()))), integer(layout, 8))


def _scalar(literal: Message) -> int | None:
    """The value of an integer scalar, None for any other."""
    for number in (4, 5, 6, 7):
        if number in literal:
            values = integers(literal, number)
            negative = bool(values) and values[0] >= 1 << 63
            return values[0] - (1 << 64) * negative if values else None
    return None
