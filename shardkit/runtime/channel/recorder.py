"""The flight recorder: what a process does and did last, in memory that it shares with its monitor.

The record survives the process that writes it. A write takes no system call and about two microseconds.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from shardkit._arguments.files import create_file, open_file
from shardkit.runtime.channel.wire import plain

SLOTS = 256
_STATUS = struct.Struct("<qdqqd24sq")  # step, since, dispatched, done, device_since, phase, number of runs of batches
_BATCHES = struct.Struct("<16s160s?qqq")  # the fields of Batches
RUNS = 8  # of steps with equal batches, that are remembered
LONGEST_BATCH = 160  # characters of a batch's text
LONGEST_PROGRAM = 16  # characters of a program's hash
_ROOM = _STATUS.size + RUNS * _BATCHES.size  # for one status
_EVENT = struct.Struct("<dq24s")  # time, step, phase
_COUNT = struct.Struct("q")  # of the events; native alignment, so written at once, after the event that it counts
_EVENTS_AT = _COUNT.size + 2 * _ROOM
SIZE = _EVENTS_AT + SLOTS * _EVENT.size


class Batches(NamedTuple):
    """What consecutive calls of a watched step had in common."""

    program: str  # its hash
    batch: str  # global shapes and dtypes, for people
    everywhere: bool  # whether the program runs on all devices of the job, so that all processes must call it
    loop: int = 0  # which loop of the process, from 1: the next one counts its steps anew
    first: int = 0  # the first of these steps
    last: int = 0  # the last of them, which may not be dispatched yet


class Status(NamedTuple):
    """What a process is doing."""

    # what the host does: "start", "data", "compile", "compare" (its program with the others'), "step" (the call), "user
    # code" (after the call), "after" (user code after the last step), "evaluate", "save", "commit" (of a save: its part
    # is written, and it waits for those of the others), "end"
    phase: str = "start"
    step: int = 0  # the step that the phase belongs to, from 0
    since: float = 0.0  # when the phase began, seconds of the machine's monotonic clock
    dispatched: int = -1  # the last step dispatched to the devices; -1 before the first
    done: int = -1  # the last step that they finished
    device_since: float = 0.0  # when the devices began the step after `done`
    batches: tuple[Batches, ...] = ()  # of the last steps, oldest first

    def aged(self, now: float) -> Status:
        """With ages in place of times: the clocks of two machines are unrelated."""
        return self._replace(since=now - self.since, device_since=now - self.device_since)


def told_batches(told: Any) -> tuple[Batches, ...]:
    """The batches in a message of another process; a TypeError or ValueError on what no monitor sends."""
    if not isinstance(told, list) or len(told) > RUNS:
        raise ValueError(f"a status must have a list of at most {RUNS} runs of batches")
    found = []
    for fields in told:
        each = Batches(*fields)
        if [type(field) for field in each] != [str, str, bool, int, int, int]:
            raise TypeError("the fields of a run of batches must be of their types")
        if len(each.program) > LONGEST_PROGRAM or len(each.batch) > LONGEST_BATCH:
            raise ValueError("the texts of a run of batches must be of limited length")
        found.append(each._replace(program=plain(each.program), batch=plain(each.batch)))
    return tuple(found)


class Recorder:
    """The writing end, in the process; its threads may share it. Without room for the file it is an OSError."""

    def __init__(self, path: str):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, SIZE)  # else a write on a full disk is a SIGBUS
            self._memory = mmap.mmap(descriptor, SIZE)
        finally:
            os.close(descriptor)
        self._lock = threading.Lock()
        self._count = self._loops = 0
        self._packed: tuple[tuple[Batches, ...], bytes] = (), b""
        self.status: Status = Status()
        self.enter("start", 0)

    def restart(self, step: int) -> int:
        """The run resumes after this step; returns the number of its loop."""
        with self._lock:
            self._loops += 1
            self._write(self.status._replace(step=step + 1, dispatched=step, done=step), "start", step + 1)
            return self._loops

    def enter(self, phase: str, step: int, called: Batches | None = None) -> None:
        """The host begins a phase, in which it calls the step with this batch, if one is given."""
        with self._lock:
            batches = self.status.batches
            if called is not None:
                batches = _with(batches, called)
            self._write(Status(phase, step, time.monotonic(), *self.status[3:6], batches), phase, step)

    def turn(self, phase: str, into: str) -> None:
        """Renames the phase, if the host is in it; its deadline is unchanged."""
        with self._lock:
            if self.status.phase == phase:
                self._write(self.status._replace(phase=into), into, self.status.step)

    def dispatched(self, step: int) -> None:
        """A step was dispatched; the host continues with user code."""
        with self._lock:
            now, s = time.monotonic(), self.status
            began = now if s.dispatched == s.done else s.device_since
            s = s._replace(phase="user code", step=step, since=now, dispatched=step, device_since=began)
            self._write(s, "user code", step)

    def done(self, step: int) -> None:
        """The devices finished a step."""
        with self._lock:
            if step > self.status.dispatched:  # of an earlier run in this process
                return
            self._write(self.status._replace(done=step, device_since=time.monotonic()), "step done", step)

    def _write(self, status: Status, phase: str, step: int) -> None:
        self.status = status
        at = _EVENTS_AT + self._count % SLOTS * _EVENT.size
        _EVENT.pack_into(self._memory, at, time.monotonic(), step, phase.encode()[:24])
        s, start = status, _status_at(self._count)
        times = s.step, s.since, s.dispatched, s.done, s.device_since
        _STATUS.pack_into(self._memory, start, *times, s.phase.encode()[:24], len(s.batches))
        if s.batches is not self._packed[0]:  # one write in three changes them
            packed = (_BATCHES.pack(each.program.encode(), each.batch.encode(), *each[2:]) for each in s.batches)
            self._packed = s.batches, b"".join(packed)
        at, batches = start + _STATUS.size, self._packed[1]
        self._memory[at : at + len(batches)] = batches
        self._count += 1
        _COUNT.pack_into(self._memory, 0, self._count)


class RecordReader:
    """The reading end, in the monitor."""

    def __init__(self, path: str):
        descriptor = open_file(path, os.O_RDWR)
        self._memory = mmap.mmap(descriptor, SIZE)
        os.close(descriptor)
        os.unlink(path)  # the two processes keep the memory

    def status(self) -> Status:
        """What the process does now; read again if it changed meanwhile."""
        while True:
            count = self._count()
            data = self._memory[_status_at(count - 1) : _status_at(count - 1) + _ROOM]
            if count == self._count():
                break
        step, since, dispatched, done, device_since, phase, runs = _STATUS.unpack_from(data)
        batches = []
        for index in range(runs):
            program, batch, *rest = _BATCHES.unpack_from(data, _STATUS.size + index * _BATCHES.size)
            batches.append(Batches(_text(program), _text(batch), *rest))
        return Status(_text(phase), step, since, dispatched, done, device_since, tuple(batches))

    def events(self) -> list[tuple[float, str, int]]:
        """The last events, oldest first: (monotonic time, phase, step)."""
        count = self._count()
        events = []
        for index in range(max(0, count - SLOTS + 1), count):  # the oldest may be half overwritten
            time_, step, phase = _EVENT.unpack_from(self._memory, _EVENTS_AT + index % SLOTS * _EVENT.size)
            events.append((time_, _text(phase), step))
        return events

    def save(self, path: Path, record: dict[str, Any]) -> None:
        """Writes the flight record as JSON: `record`, the status and the last events."""
        now, clock = time.monotonic(), time.time()
        events = [
            {"time": round(clock - (now - at), 6), "phase": phase, "step": step} for at, phase, step in self.events()
        ]
        record = {**record, "status": self.status().aged(now)._asdict(), "events": events}
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(create_file(path), "w") as file:
            file.write(json.dumps(record, indent=1) + "\n")

    def _count(self) -> int:
        (count,) = _COUNT.unpack_from(self._memory, 0)
        return int(count)


def _status_at(count: int) -> int:
    """Where the status after so many events is: never over the one before, as the process may stop while it writes."""
    return _COUNT.size + count % 2 * _ROOM


def _with(batches: tuple[Batches, ...], called: Batches) -> tuple[Batches, ...]:
    """With one more call: of the last run if it is the next step of that, else of a new one."""
    last = batches[-1] if batches else None
    if last is not None and (*called[:4], called.first) == (*last[:4], last.last + 1):
        return (*batches[:-1], last._replace(last=called.last))
    return (*batches[1 - RUNS :], called)


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")


def state(process: int) -> str:
    """The system's one-letter state of a process, T for stopped; empty where it shows none."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
