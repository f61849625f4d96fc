"""The flight recorder: what a process does and did last, in memory shared with its monitor.

The record survives the process that writes it. Writing takes no system call and about two microseconds.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from typing import NamedTuple

SLOTS = 256
_STATUS = struct.Struct("<qdqqd24s")  # step, since, dispatched, done, device_since, phase
_EVENT = struct.Struct("<dq24s")  # time, step, phase
_COUNT = struct.Struct("q")  # of the events; native, and so written at once: what it counts is complete
_EVENTS_AT = _COUNT.size + 2 * _STATUS.size
SIZE = _EVENTS_AT + SLOTS * _EVENT.size


class Status(NamedTuple):
    """What a process is doing.

    Attributes:
        phase: what the host does: "start", "data", "compile", "agree", "step" (the call), "host" (the user's code after
            it), "save", "written" (of a save: its own part is, and it waits for the others'), "end".
        step: the step that the phase belongs to, from 0.
        since: when the phase began, seconds of the machine's monotonic clock.
        dispatched: the last step that was handed to the devices; -1 before the first.
        done: the last step that they finished.
        device_since: when the devices began with the step after `done`.
    """

    phase: str = "start"
    step: int = 0
    since: float = 0.0
    dispatched: int = -1
    done: int = -1
    device_since: float = 0.0


class Recorder:
    """The writing end, in the process itself; its threads may share it.

    Raises:
        OSError: there is no room for the file.
    """

    def __init__(self, path: str):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, SIZE)  # to write where a full disk has no room ends a process by SIGBUS
            self._memory = mmap.mmap(descriptor, SIZE)
        finally:
            os.close(descriptor)
        self._lock = threading.Lock()
        self._count = 0
        self.status = Status()
        self.enter("start", 0)

    def restart(self, step: int) -> None:
        """The run goes on after this step."""
        with self._lock:
            self._write(self.status._replace(step=step + 1, dispatched=step, done=step), "start", step + 1)

    def enter(self, phase: str, step: int) -> None:
        """The host begins something else."""
        with self._lock:
            self._write(self.status._replace(phase=phase, step=step, since=time.monotonic()), phase, step)

    def turn(self, phase: str, into: str) -> None:
        """A phase, if the host is in it, goes on under another name and under the same deadline."""
        with self._lock:
            if self.status.phase == phase:
                self._write(self.status._replace(phase=into), into, self.status.step)

    def dispatched(self, step: int) -> None:
        """A step was handed to the devices; the host goes on with the user's code."""
        with self._lock:
            now, s = time.monotonic(), self.status
            began = now if s.dispatched == s.done else s.device_since
            self._write(Status("host", step, now, step, s.done, began), "host", step)

    def done(self, step: int) -> None:
        """The devices finished a step."""
        with self._lock:
            if step > self.status.dispatched:  # of an earlier run in this process
                return
            self._write(self.status._replace(done=step, device_since=time.monotonic()), "done", step)

    def _write(self, status: Status, phase: str, step: int) -> None:
        self.status = status
        at = _EVENTS_AT + self._count % SLOTS * _EVENT.size
        _EVENT.pack_into(self._memory, at, time.monotonic(), step, phase.encode()[:24])
        s = status
        values = s.step, s.since, s.dispatched, s.done, s.device_since, s.phase.encode()[:24]
        _STATUS.pack_into(self._memory, _status_at(self._count), *values)
        self._count += 1
        _COUNT.pack_into(self._memory, 0, self._count)


class Reader:
    """The reading end, in the monitor."""

    def __init__(self, path: str):
        descriptor = os.open(path, os.O_RDWR)
        self._memory = mmap.mmap(descriptor, SIZE)
        os.close(descriptor)
        os.unlink(path)  # the memory lives on in the two processes

    def status(self) -> Status:
        """What the process does now; read again if it went on meanwhile."""
        while True:
            count = self._count()
            data = self._memory[_status_at(count - 1) : _status_at(count - 1) + _STATUS.size]
            if count == self._count():
                break
        step, since, dispatched, done, device_since, phase = _STATUS.unpack(data)
        return Status(phase.rstrip(b"\0").decode(errors="replace"), step, since, dispatched, done, device_since)

    def events(self) -> list[tuple[float, str, int]]:
        """The last events, oldest first: (monotonic time, phase, step)."""
        count = self._count()
        events = []
        for index in range(max(0, count - SLOTS + 1), count):  # the oldest may be half overwritten
            time_, step, phase = _EVENT.unpack_from(self._memory, _EVENTS_AT + index % SLOTS * _EVENT.size)
            events.append((time_, phase.rstrip(b"\0").decode(errors="replace"), step))
        return events

    def _count(self) -> int:
        (count,) = _COUNT.unpack_from(self._memory, 0)
        return int(count)


def _status_at(count: int) -> int:
    """Where the status after so many events is; the one before stays whole if the process is stopped in writing."""
    return _COUNT.size + count % 2 * _STATUS.size
