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
from shardkit.runtime.channel.wire import escape

SLOTS = 256
_STATUS = struct.Struct("<qdqqd24sq")  # step, since, dispatched, done, device_since, phase, number of runs of batches
_BATCHES = struct.Struct("<16s160s?qqq")  # the fields of Batches
RUNS = 8  # of steps with equal batches, that are remembered
LONGEST_BATCH = 160  # characters of a batch's text
LONGEST_PROGRAM = 16  # characters of a program's hash
_STATUS_ROOM = _STATUS.size + RUNS * _BATCHES.size  # for one status
_EVENT = struct.Struct("<dq24s")  # time, step, phase
_COUNT = struct.Struct("q")  # of the events; native alignment, so written at once, after the event that it counts
_EVENTS_START = _COUNT.size + 2 * _STATUS_ROOM
SIZE = _EVENTS_START + SLOTS * _EVENT.size


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

    def with_ages(self, now: float) -> Status:
        """With ages in place of times: the clocks of two machines are unrelated."""
        return self._replace(since=now - self.since, device_since=now - self.device_since)


def parse_batches(value: Any) -> tuple[Batches, ...]:
    """The batches in a message of another process; a TypeError or ValueError on what no monitor sends."""
    if not isinstance(value, list) or len(value) > RUNS:
        raise ValueError(f"a status must have a list of at most {RUNS} runs of batches")
    runs = []
    for fields in value:
        batches = Batches(*fields)
        types = [type(field) for field in batches]
        if types != [str, str, bool, int, int, int]:
            raise TypeError("the fields of a run of batches must be of their types")
        if len(batches.program) > LONGEST_PROGRAM or len(batches.batch) > LONGEST_BATCH:
            raise ValueError("the texts of a run of batches must be of limited length")
        program = escape(batches.program)
        batch = escape(batches.batch)
        runs.append(batches._replace(program=program, batch=batch))
    return tuple(runs)


# The file of a record. There is room for two statuses, which are written in turn: a process that is stopped or killed
# in the middle of a write has damaged the one that does not count yet. After event number 6, for example, the count is
# 7, and the status of that event is in room 0.
#
#     count | status, room 0 | status, room 1 | event 0 | event 1 | ... | event 255
#
# Event 256 is written over event 0.


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
        self._count = 0
        self._loops = 0
        self._packed_batches: tuple[Batches, ...] = ()
        self._packed = b""  # these batches as bytes
        self.status: Status = Status()
        self.enter("start", 0)

    def begin_loop(self, step: int) -> int:
        """The run resumes after this step; returns the number of its loop."""
        with self._lock:
            self._loops += 1
            status = self.status._replace(step=step + 1, dispatched=step, done=step)
            self._write(status, "start", step + 1)
            return self._loops

    def enter(self, phase: str, step: int, call: Batches | None = None) -> None:
        """The host begins a phase, in which it calls the step with this batch, if one is given."""
        with self._lock:
            batches = self.status.batches
            if call is not None:
                batches = _append_call(batches, call)
            status = self.status._replace(phase=phase, step=step, since=time.monotonic(), batches=batches)
            self._write(status, phase, step)

    def rename_phase(self, old: str, new: str) -> None:
        """Renames the phase, if the host is in it; its deadline is unchanged."""
        with self._lock:
            if self.status.phase == old:
                self._write(self.status._replace(phase=new), new, self.status.step)

    def note_dispatch(self, step: int) -> None:
        """A step was dispatched; the host continues with user code."""
        with self._lock:
            now = time.monotonic()
            status = self.status._replace(phase="user code", step=step, since=now, dispatched=step)
            if self.status.dispatched == self.status.done:  # else the devices still compute an earlier step
                status = status._replace(device_since=now)
            self._write(status, "user code", step)

    def note_done(self, step: int) -> None:
        """The devices finished a step."""
        with self._lock:
            if step > self.status.dispatched:  # of an earlier run in this process
                return
            status = self.status._replace(done=step, device_since=time.monotonic())
            self._write(status, "step done", step)

    def _write(self, status: Status, phase: str, step: int) -> None:
        """Writes an event and the status after it, and then counts them."""
        self.status = status
        start = _locate_event(self._count)
        _EVENT.pack_into(self._memory, start, time.monotonic(), step, phase.encode()[:24])
        start = _locate_status(self._count)
        times = status.step, status.since, status.dispatched, status.done, status.device_since
        _STATUS.pack_into(self._memory, start, *times, status.phase.encode()[:24], len(status.batches))
        start += _STATUS.size
        packed = self._pack(status.batches)
        self._memory[start : start + len(packed)] = packed
        self._count += 1
        _COUNT.pack_into(self._memory, 0, self._count)

    def _pack(self, batches: tuple[Batches, ...]) -> bytes:
        """The batches as bytes; packed once for all writes that do not change them, which are two of three."""
        if batches is not self._packed_batches:
            packed = b""
            for run in batches:
                packed += _BATCHES.pack(run.program.encode(), run.batch.encode(), *run[2:])
            self._packed_batches = batches
            self._packed = packed
        return self._packed


class RecordReader:
    """The reading end, in the monitor."""

    def __init__(self, path: str):
        descriptor = open_file(path, os.O_RDWR)
        self._memory = mmap.mmap(descriptor, SIZE)
        os.close(descriptor)
        os.unlink(path)  # the two processes keep the memory

    def read_status(self) -> Status:
        """What the process does now; read again if it changed meanwhile."""
        while True:
            count = self._read_count()
            start = _locate_status(count - 1)
            data = self._memory[start : start + _STATUS_ROOM]
            if count == self._read_count():
                break
        step, since, dispatched, done, device_since, phase, runs = _STATUS.unpack_from(data)
        batches = []
        for index in range(runs):
            program, batch, *numbers = _BATCHES.unpack_from(data, _STATUS.size + index * _BATCHES.size)
            batches.append(Batches(_decode(program), _decode(batch), *numbers))
        return Status(_decode(phase), step, since, dispatched, done, device_since, tuple(batches))

    def read_events(self) -> list[tuple[float, str, int]]:
        """The last events, oldest first: (monotonic time, phase, step)."""
        count = self._read_count()
        oldest = max(0, count - SLOTS + 1)  # the one before may be half overwritten
        events = []
        for number in range(oldest, count):
            when, step, phase = _EVENT.unpack_from(self._memory, _locate_event(number))
            events.append((when, _decode(phase), step))
        return events

    def save(self, path: Path, record: dict[str, Any]) -> None:
        """Writes the flight record as JSON: `record`, the status and the last events."""
        now = time.monotonic()
        wall_clock = time.time()
        events = []
        for when, phase, step in self.read_events():
            age = now - when
            events.append({"time": round(wall_clock - age, 6), "phase": phase, "step": step})
        record = {**record, "status": self.read_status().with_ages(now)._asdict(), "events": events}
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(create_file(path), "w") as file:
            file.write(json.dumps(record, indent=1) + "\n")

    def _read_count(self) -> int:
        (count,) = _COUNT.unpack_from(self._memory, 0)
        return int(count)


def _locate_status(number: int) -> int:
    """Where the status after this event is: never over the one before it."""
    return _COUNT.size + number % 2 * _STATUS_ROOM


def _locate_event(number: int) -> int:
    return _EVENTS_START + number % SLOTS * _EVENT.size


def _append_call(batches: tuple[Batches, ...], call: Batches) -> tuple[Batches, ...]:
    """With one more call: of the last run if it is the next step of that, else of a new one.

    Worked example, of the first and last steps: after a run (0, 4) a call of step 5 with the same batch makes it
    (0, 5), and with another batch there are two runs, (0, 4) and (5, 5).
    """
    if batches:
        last = batches[-1]
        is_same = (call.program, call.batch, call.everywhere, call.loop) == last[:4]
        if is_same and call.first == last.last + 1:
            return (*batches[:-1], last._replace(last=call.last))
    kept = batches[1 - RUNS :]
    return (*kept, call)


def _decode(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")


def read_process_state(process: int) -> str:
    """The system's one-letter state of a process, T for stopped; empty where it shows none."""
    try:
        # The name, in brackets, may have spaces and brackets in it: `123 (python) T 1 ...`.
        text = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2]
        return text.split()[0]
    except (OSError, IndexError):
        return ""
