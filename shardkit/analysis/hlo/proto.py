"""A compiled program as data: reads a serialised HloModuleProto, with no compiler and no protobuf package.

Only the fields that the reader of collectives needs are decoded; the numbers in `_FIELDS` are those of xla's
`hlo.proto` and `xla_data.proto`. The text form of a module is never looked at: it changes between versions and
parsing it back can abort the process.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain, pairwise
from typing import Any, NamedTuple

# Bits of xla's PrimitiveType; a tuple (13), an opaque value and a token hold no bytes of their own.
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
    """An array's or a tuple's shape; `type` is xla's PrimitiveType."""

    type: int
    dims: tuple[int, ...]
    parts: tuple[Shape, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of all arrays in it, without the padding of a layout."""
        own = (math.prod(self.dims) * _BITS[self.type] + 7) // 8 if self.type in _BITS else 0
        return own + sum(part.bytes for part in self.parts)

    @property
    def size(self) -> int:
        """Elements of an array."""
        return math.prod(self.dims)


_KERNELS = re.compile(r"shardkit/(collectives/|_compat\.py|_typed\.py)")
_NO_SHAPE = Shape(0, ())


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
    channel: int = 0
    target: str = ""
    direction: str = ""
    thread: str = ""
    literal: int | None = None
    config: dict[str, Any] = field(default_factory=dict)
    groups: tuple[tuple[int, ...], ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()
    contracting: tuple[int, ...] = ()
    window: tuple[dict[int, int], ...] = ()
    convolution: dict[int, Any] = field(default_factory=dict)
    feature_groups: int = 1


@dataclass
class Computation:
    """The instructions of one computation by id, in the order in which they run where there is a schedule."""

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


def read(proto: bytes) -> Module:
    """Decodes a serialised HloModuleProto, as `HloModule.as_serialized_hlo_module_proto()` gives it.

    Raises:
        ValueError: the bytes are no such message.
    """
    try:
        top = _message(proto)
        schedule = _schedule(top.get(7, [b""])[0])
        computations = [_computation(b, schedule) for b in top[3]]
        frames = _frames(_message(top.get(17, [b""])[0]))
        return Module(_text(top[1]), _int(top, 6), {c.id: c for c in computations}, frames)
    except (KeyError, IndexError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"hlo.read: these {len(proto):,} bytes are no HloModuleProto. Pass what "
            "HloModule.as_serialized_hlo_module_proto() returned."
        ) from error


def _computation(data: bytes, schedule: dict[int, tuple[int, ...]]) -> Computation:
    fields = _message(data)
    instructions = {i.id: i for i in map(_instruction, fields[2])}
    number = _int(fields, 5)  # a number that is 0 is not written
    order = schedule.get(number, tuple(instructions))
    return Computation(number, _text(fields[1]), _int(fields, 6), {i: instructions[i] for i in order})


def _instruction(data: bytes) -> Instruction:
    f = _message(data)
    out = Instruction(
        id=_int(f, 35),
        name=_text(f[1]),
        opcode=_text(f[2]),
        shape=_shape(f[3][0]),
        operands=_ints(f, 36),
        calls=_ints(f, 38),
        tuple_index=_int(f, 13),
        parameter=_int(f, 9),
        channel=_int(f, 26),
        target=_text(f.get(28)),
        direction=_text(f.get(63)),
        thread=_text(f.get(79)),
        pairs=tuple((_int(p, 1), _int(p, 2)) for p in map(_message, f.get(52, ()))),
        feature_groups=_int(f, 50) or 1,
    )
    if 7 in f:
        metadata = _message(f[7][0])
        out.op_name, out.frame = _text(metadata.get(2)), _int(metadata, 15)
    if 8 in f and not out.shape.dims:
        out.literal = _scalar(_message(f[8][0]))
    if 43 in f and f[43][0][:1] == b"{":
        with suppress(json.JSONDecodeError):  # a library's custom call may hold MLIR there
            out.config = json.loads(f[43][0])
    named = [(n, bytes(f[n][0])) for n in (93, 92, 87) if n in f]
    out.groups = _groups(*named[0]) if named else tuple(_ints(_message(g), 1) for g in f.get(49, ()))
    if 30 in f:
        out.contracting = _ints(_message(f[30][0]), 1)
    if 15 in f:
        out.window = tuple({k: v[0] for k, v in _message(d).items()} for d in _message(f[15][0]).get(1, ()))
    if 16 in f:
        numbers = _message(f[16][0])
        out.convolution = {k: _ints(numbers, k) if k in (6, 11, 12) else _int(numbers, k) for k in range(3, 13)}
    return out


@lru_cache(maxsize=256)  # a program of thousands of devices lists the same few groups at every collective
def _groups(form: int, data: bytes) -> tuple[tuple[int, ...], ...]:
    """The groups of devices of a collective, from the number of the field that lists them."""
    f = _message(data)
    if form == 87 and 2 in f:
        form, f = 92, _message(f[2][0])
    if form == 92:
        return _iota(_int(f, 1), _int(f, 2), _ints(f, 3), _ints(f, 4))
    if form == 93:
        mesh = _message(f[1][0])
        groups = _mesh_groups([_int(_message(axis), 2) for axis in mesh.get(1, ())], f.get(2, ()))
        devices = _ints(mesh, 2)
        if 3 in mesh:
            order = _message(mesh[3][0])
            dims = _ints(order, 1)
            devices = _iota(1, math.prod(dims), dims, _ints(order, 2))[0]
        return tuple(tuple(devices[d] for d in group) for group in groups) if devices else groups
    return tuple(_ints(_message(group), 1) for group in f.get(1, ()))


def _iota(count: int, size: int, dims: tuple[int, ...], order: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """0..n-1 as an array of shape `dims`, its dims put in `order`, read row by row in `count` groups of `size`."""
    strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    flat = [0]
    for dim in order or range(len(dims)):
        flat = [base + step * strides[dim] for base in flat for step in range(dims[dim])]
    return tuple(tuple(flat[g * size : (g + 1) * size]) for g in range(count))


def _mesh_groups(sizes: list[int], axes: Sequence[bytes]) -> tuple[tuple[int, ...], ...]:
    """The groups over axes of a mesh, or over parts of axes: the digits between `pre_size` and `pre_size * size`."""
    taken = set()
    for axis in map(_message, axes):
        number = _int(axis, 1)
        part = _message(axis[2][0]) if 2 in axis else {}
        before = _int(part, 1) or 1
        taken.add((number, before, before * (_int(part, 2) or sizes[number])))
    digits: list[tuple[int, bool]] = []  # every axis as digits, major first, and whether the groups run over each
    for number, size in enumerate(sizes):
        cuts = sorted({1, size, *(cut for n, *ends in taken if n == number for cut in ends)})
        for low, high in pairwise(cuts):
            digits.append((high // low, any(n == number and a <= low and high <= b for n, a, b in taken)))
    order = tuple(sorted(range(len(digits)), key=lambda i: digits[i][1]))
    size = math.prod(s for s, inside in digits if inside)
    return _iota(math.prod(sizes) // size, size, tuple(s for s, _ in digits), order)


def _schedule(data: bytes) -> dict[int, tuple[int, ...]]:
    entries = [_message(entry) for entry in _message(data).get(1, ())]
    return {_int(e, 1): _ints(_message(e[2][0]), 1) for e in entries if 2 in e}


def _frames(index: dict[int, list[Any]]) -> dict[int, str]:
    """For each stack frame the innermost line outside shardkit's kernels, whose caller is meant."""
    files, functions = ([b.decode() for b in index.get(n, ())] for n in (1, 2))
    places = [_message(b) for b in index.get(3, ())]
    frames = [_message(b) for b in index.get(4, ())]
    out: dict[int, str] = {}
    for number, frame in enumerate(frames, 1):
        path, caller = "", frame
        place: dict[int, list[Any]] = {}
        while not place or (_KERNELS.search(path) and _int(caller, 2)):
            caller = frames[_int(caller, 2) - 1] if place else caller
            place = places[_int(caller, 1) - 1]
            path = files[_int(place, 1) - 1]
        out[number] = f"{path.rsplit('/', 1)[-1]}:{_int(place, 3)} ({functions[_int(place, 2) - 1]})"
    return out


def _shape(data: bytes) -> Shape:
    f = _message(data)
    return Shape(_int(f, 2), _ints(f, 3), tuple(map(_shape, f.get(4, ()))))


def _scalar(literal: dict[int, list[Any]]) -> int | None:
    """The value of a whole-number scalar, None for any other."""
    for number in (4, 5, 6, 7):
        if number in literal:
            values = _ints(literal, number)
            return _signed(values[0]) if values else None
    return None


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _text(values: list[Any] | None) -> str:
    return values[0].decode() if values else ""


def _int(fields: dict[int, list[Any]], number: int) -> int:
    values = fields.get(number)
    return values[0] if values else 0


def _ints(fields: dict[int, list[Any]], number: int) -> tuple[int, ...]:
    """A repeated whole number, packed or not."""
    return tuple(chain.from_iterable((v,) if isinstance(v, int) else _varints(v) for v in fields.get(number, ())))


def _varints(data: bytes) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = _varint(data, at)
        yield value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = data[at]
    at += 1
    if value < 128:
        return value, at
    value &= 127
    shift = 7
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def _message(data: bytes) -> dict[int, list[Any]]:
    """The fields of a message: whole numbers as int, everything with a length as bytes."""
    out: dict[int, list[Any]] = {}
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        value: Any
        if kind == 0:
            value, at = _varint(data, at)
        else:
            if kind == 2:
                length, at = _varint(data, at)
            else:
                length = {1: 8, 5: 4}[kind]
            value = data[at : at + length]
            at += length
        out.setdefault(key >> 3, []).append(value)
    return out
