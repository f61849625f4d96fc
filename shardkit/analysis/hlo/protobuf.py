"""Messages in protobuf's wire format, read without a schema: field numbers to lists of values."""

from __future__ import annotations

from typing import Any

Message = dict[int, list[Any]]

# How the value of a field is written, in the last three bits of its key.
_VARINT = 0  # a whole number
_EIGHT_BYTES = 1
_LENGTH = 2  # a length, then as many bytes: a text, a message or packed numbers
_FOUR_BYTES = 5
_FIXED_LENGTHS = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}


def message(data: bytes) -> Message:
    """The fields of a message: whole numbers as int, everything with a length as bytes.

    For example the bytes 0a 03 64 6f 74 18 ac 02:

        0a         key: field 1, with a length (1 << 3 | 2)
        03         3 bytes follow
        64 6f 74   "dot"
        18         key: field 3, a whole number (3 << 3 | 0)
        ac 02      300, seven bits a byte, the lowest first: 0x2c + (2 << 7)

    They are {1: [b"dot"], 3: [300]}.
    """
    fields: Message = {}
    position = 0
    while position < len(data):
        key, position = _read_varint(data, position)
        kind = key & 7
        value: Any
        if kind == _VARINT:
            value, position = _read_varint(data, position)
        else:
            if kind == _LENGTH:
                length, position = _read_varint(data, position)
            else:
                length = _FIXED_LENGTHS[kind]
            end = position + length
            value = data[position:end]
            position = end
        fields.setdefault(key >> 3, []).append(value)
    return fields


def text(values: list[Any] | None) -> str:
    """A string, "" where it is not written."""
    if not values:
        return ""
    string: str = values[0].decode()
    return string


def integer(fields: Message, number: int) -> int:
    """A whole number, 0 where it is not written."""
    values = fields.get(number)
    if not values:
        return 0
    value: int = values[0]
    return value


def signed(value: int) -> int:
    """A whole number of 64 bits that may be negative: -1 is written as 2**64 - 1."""
    if value >= 1 << 63:
        return value - (1 << 64)
    return value


def integers(fields: Message, number: int) -> tuple[int, ...]:
    """A repeated whole number; writers may pack many of them into one value with a length."""
    numbers: list[int] = []
    for value in fields.get(number, ()):
        if isinstance(value, int):
            numbers.append(value)
        else:
            numbers += _read_packed(value)
    return tuple(numbers)


def _read_packed(data: bytes) -> list[int]:
    numbers = []
    position = 0
    while position < len(data):
        number, position = _read_varint(data, position)
        numbers.append(number)
    return numbers


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """The whole number that begins at a position, and the position behind it."""
    byte = data[position]
    position += 1
    if byte < 128:  # as most numbers are: one byte
        return byte, position
    value = byte & 127
    shift = 7
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7


def split_fields(data: bytes) -> list[tuple[int, bytes]]:
    """The fields of a message in their order: the number of each, and all of its bytes with its key."""
    fields = []
    position = 0
    while position < len(data):
        start = position
        key, position = _read_varint(data, position)
        kind = key & 7
        if kind == _VARINT:
            _, position = _read_varint(data, position)
        elif kind == _LENGTH:
            length, position = _read_varint(data, position)
            position += length
        else:
            position += _FIXED_LENGTHS[kind]
        fields.append((key >> 3, data[start:position]))
    return fields


def write_field(number: int, value: int | bytes) -> bytes:
    """A field: a whole number, or a text, message or packed numbers. The reverse of `message`."""
    if isinstance(value, int):
        return _write_varint(number << 3 | _VARINT) + _write_varint(value)
    return _write_varint(number << 3 | _LENGTH) + _write_varint(len(value)) + value


def _write_varint(value: int) -> bytes:
    data = bytearray()
    while value >= 128:
        # Seven bits a byte, the lowest first. The eighth bit says that another byte follows.
        data.append(value & 127 | 128)
        value >>= 7
    data.append(value)
    return bytes(data)
