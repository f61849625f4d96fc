"""What happens when a kernel runs: events of the cores of all devices and of their engines for copies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardkit.remote_copies.memory import Access, Buffer, BufferView, DevicePlace

ENGINES = ("load", "sent", "arrive")  # the roles of events of an engine; all others are of a core


class UnknownOrdersError(ValueError):
    """A kernel whose events depend on data or on the order, or that does what the model does not have."""


class Semaphore(NamedTuple):
    """A counter: an element of a buffer of semaphores of one device."""

    device: int
    buffer: Buffer
    element: tuple[int, ...]

    def __str__(self) -> str:
        place = "".join(f"[{i}]" for i in self.element)
        return f"{self.buffer.name}{place} of device {self.device}"


class Wait(NamedTuple):
    """What an event waits for: that a semaphore counts so much, which it takes from it unless `takes` is False."""

    semaphore: Semaphore
    amount: int
    takes: bool = True


class Copy(NamedTuple):
    """A copy of a DMA engine, from memory of the device that starts it to memory of a device."""

    source: DevicePlace
    read: BufferView
    target: DevicePlace
    written: BufferView


@dataclass(eq=False)
class KernelEvent:
    """A step of a core or of an engine, which happens at once, after the event `after` and what it waits for.

    Attributes:
        device: whose core or engine it is.
        call: the number of the kernel's call.
        text: what it does, for messages.
        line: of the kernel, which does it.
        after: the number of the event before it: that of the core in its program, or the start of a copy.
        accesses: the memory that it touches.
        wait: the semaphore that holds it up.
        signals: the semaphores to which it adds, and how much.
        role: "core", "enter", "leave", "start", "wait", "load", "sent" or "arrive".
        copy: of "arrive": what is copied.
        effect: of a core: what it does to values, for `run_values`.
        equation: of the kernel, for the line of what is computed of it; None where memory is entered or left.
    """

    device: int
    call: int
    text: str
    line: str
    after: int
    accesses: list[Access] = field(default_factory=list)
    wait: Wait | None = None
    signals: list[tuple[Semaphore, int]] = field(default_factory=list)
    role: str = "core"
    copy: Copy | None = None
    effect: Any = None
    equation: Any = None

    def __str__(self) -> str:
        line = f" at {self.line}" if self.line else ""
        device = f"device {self.device}"
        if self.role in ENGINES:
            device += "'s"
        return f"{device} {self.text}{line}"
