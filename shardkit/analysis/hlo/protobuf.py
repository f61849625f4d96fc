"""Messages in protobuf's wire format, read without a schema: field numbers to lists of values."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

Message = dict[int, list[Any]]


def message(data: bytes) -> Message:
    """The fields of a message: whole numbers as int, everything with a length as bytes."""
    out: Message = {}
    at, end = 0, len(data)
    while at < end:
        key = data[at]  # numbers below 128, as most are, are one byte
        key, at = _varint(data, at) if key > 127 else (key, at + 1)
        kind = key & 7
        value: Any
        if kind in (0, 2):
            value = data[at]
            value, at = _varint(data, at) if value > 127 else (value, at + 1)
            if kind == 2:
                at += value
                value = data[at - value : at]
        else:
            length = {1: 8, 5: 4}[kind]
            value, at = data[at : at + length], at + length
        out.setdefault(key >> 3, []).append(value)
    return out


def text(values: list[Any] | None) -> str:
    """A string, "" where it is not written."""
    return values[0].decode() if values else ""


def integer(fields: Message, number: int) -> int:
    """A whole number, 0 where it is not written."""
    values = fields.get(number)
    return values[0] if values else 0


def integers(fields: Message, number: int) -> tuple[int, ...]:
    """A repeated whole number, packed or not."""
    return tuple(chain.from_iterable((v,) if isinstance(v, int) else _varints(v) for v in fields.get(number, ())))


def _varints(data: bytes) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = _varint(data, at)
        yield value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
