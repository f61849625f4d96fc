"""What all devices do in a kernel: their events, and between these the operations on data of each device."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from shardkit.remote_copies.events import KernelEvent
from shardkit.remote_copies.memory import Buffer, BufferView
from shardkit.remote_copies.values import Data


class DataOperation(NamedTuple):
    """An equation on data, which touches no memory that others see."""

    equation: Any
    operands: tuple[Any, ...]
    results: tuple[Data, ...]


class DataRow(NamedTuple):
    """A row of an array that a scan goes over."""

    array: Any
    number: int
    result: Data


class DataStack(NamedTuple):
    """The array of what the rounds of a scan give."""

    rows: tuple[Any, ...]
    result: Data


class Get(NamedTuple):
    """A read of memory."""

    view: BufferView
    result: Data


class Put(NamedTuple):
    """A write to memory, `adds` what is there."""

    view: BufferView
    value: Any
    adds: bool


class Enter(NamedTuple):
    """Arguments of a call, which its memory holds at its start, and the memory that holds nothing yet."""

    arguments: tuple[tuple[Buffer, int], ...]
    others: tuple[Buffer, ...]


class Leave(NamedTuple):
    """The memory that holds the results of a call at its end."""

    results: tuple[Buffer, ...]


class KernelProgram:
    """The events of all devices, and the items of each: its own events, by number, and its operations between them."""

    def __init__(self, axes: Mapping[str, int]):
        self.axes = dict(axes)
        self.devices = int(np.prod(list(axes.values()), dtype=int))
        self.events: list[KernelEvent] = []
        self.items: list[list[Any]] = [[] for _ in range(self.devices)]
        self.last = [-1] * self.devices  # the newest event of each core
        self.numbers = itertools.count()

    def add(self, event: KernelEvent) -> int:
        """Adds an event of an engine."""
        self.events.append(event)
        return len(self.events) - 1

    def add_to_core(self, event: KernelEvent) -> int:
        """Adds the next event of a device's core."""
        number = self.add(event)
        self.last[event.device] = number
        self.items[event.device].append(number)
        return number

    def coordinates(self, device: int) -> dict[str, int]:
        """Where a device is in the mesh."""
        places = np.unravel_index(device, tuple(self.axes.values()))
        return dict(zip(self.axes, (int(place) for place in places), strict=True))

    def device_at(self, coordinates: Mapping[str, int], line: str) -> int:
        """The device at coordinates."""
        number = 0
        for axis, size in self.axes.items():
            if not 0 <= coordinates[axis] < size:
                raise IndexError(f"{line} names the device {coordinates[axis]} of {size} along {axis!r}")
            number = number * size + coordinates[axis]
        return number
