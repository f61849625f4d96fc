"""What a kernel can touch: buffers and semaphores of devices, and the parts of them that an access covers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

# How an access touches memory. Counts are signals and waits of semaphores, which no other count disturbs.
READ, WRITE, COUNT = "reads", "writes", "counts"


@dataclass(frozen=True)
class Buffer:
    """Memory that every device has once, as a kernel's argument or scratch.

    Attributes:
        key: tells it from all others: the call, the place of its allocation and how often that ran.
        name: for messages.
        shape: of the array.
        dtype: of its elements; None of semaphores.
    """

    key: Hashable
    name: str
    shape: tuple[int, ...]
    dtype: Any


class DevicePlace(NamedTuple):
    """A buffer of one device."""

    device: int
    buffer: Buffer


class Access(NamedTuple):
    """How an event touches a part of a buffer; a range for each dim says which."""

    place: DevicePlace
    ranges: tuple[range, ...]
    kind: str


@dataclass(frozen=True)
class BufferView:
    """A part of a buffer, as references in a kernel are: a range for each dim, and the dims that an integer dropped."""

    buffer: Buffer
    ranges: tuple[range, ...]
    dropped: frozenset[int] = frozenset()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the reference."""
        return tuple(len(r) for dim, r in enumerate(self.ranges) if dim not in self.dropped)

    @property
    def bytes(self) -> int:
        """The number of bytes of a copy of it."""
        return int(np.prod(self.shape, dtype=int)) * np.dtype(self.buffer.dtype).itemsize

    def take(self, indices: Sequence[int | range]) -> BufferView:
        """The part of it at an integer or a range for each of its dims.

        For example, rows 2 to 5 of a buffer [8, 4] and then row 1 of them is row 3 of the buffer: its first dim has the
        range(3, 4) and is dropped.
        """
        ranges = list(self.ranges)
        dropped = set(self.dropped)
        kept = [dim for dim in range(len(ranges)) if dim not in self.dropped]
        for dim, index in zip(kept, indices, strict=True):
            size = len(ranges[dim])
            if isinstance(index, range):
                if len(index) > 0 and not 0 <= index[0] <= index[-1] < size:
                    raise IndexError(f"elements {index[0]} to {index[-1]} of {size} of {self.buffer.name}")
                ranges[dim] = ranges[dim][index.start : index.stop : index.step]
                continue
            if not 0 <= index < size:
                raise IndexError(f"element {index} of {size} of {self.buffer.name}")
            ranges[dim] = ranges[dim][index : index + 1]
            dropped.add(dim)
        return BufferView(self.buffer, tuple(ranges), frozenset(dropped))

    def access(self, device: int, kind: str) -> Access:
        """The access of a device's memory through it."""
        return Access(DevicePlace(device, self.buffer), self.ranges, kind)


def whole(buffer: Buffer) -> BufferView:
    """The reference to all of a buffer."""
    return BufferView(buffer, tuple(range(size) for size in buffer.shape))


def conflict(first: Access, second: Access) -> bool:
    """Whether the result of two accesses of one place may depend on their order."""
    if first.kind == second.kind and first.kind != WRITE:
        return False
    for one, other in zip(first.ranges, second.ranges, strict=True):
        if not _overlap(one, other):
            return False
    return True


def _overlap(one: range, other: range) -> bool:
    if not one or not other or one[-1] < other[0] or other[-1] < one[0]:
        return False
    if one.step == 1 and other.step == 1:
        return True
    return not set(one).isdisjoint(other)
