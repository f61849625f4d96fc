"""What a monitor knows of the processes of a job, and how long each may spend in a phase: plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from shardkit.runtime.channel.recorder import Status

# Phases in the order in which a process passes through them in one step; in WAITING_PHASES it waits for all others.
PHASE_ORDER = {
    "start": 0,
    "data": 0,
    "compile": 1,
    "compare": 2,
    "step": 3,
    "user code": 4,
    "after": 4,
    "evaluate": 5,
    "save": 6,
    "commit": 7,
    "end": 8,
}
WAITING_PHASES = ("compare", "step", "commit")
_DEADLINE_OF = {  # of other phases there is none
    "compile": "compile",
    "compare": "compile",
    "step": "step",
    "save": "save",
    "commit": "save",
    "data": "data",
    "evaluate": "evaluate",
    "after": "evaluate",
}
_SILENT = 2.0  # seconds without a message after which a process is suspected, once another one is late
# Errors of the collectives' libraries when the peer is gone: consequences of another process's end.
_CONSEQUENCES = ("gloo", "nccl", "connection", "socket", "rendezvous", "coordination", "deadline exceeded", "heartbeat")


class Deadlines(NamedTuple):
    """Seconds a process may spend in each phase; exceeding one ends the job.

    Attributes:
        compile: tracing, lowering and compiling a step, and waiting for the others to finish compiling theirs.
        step: one step, from its dispatch by the last process (or the end of the step before) until the devices have
            finished it; also user code between steps, while other processes wait for it.
        save: writing a checkpoint.
        data: waiting for the next batch.
        evaluate: a validation; also user code after the last step: once `guard.data` has no more batches in a job of
            several processes, another process has exited, or the main thread has ended and others go on.
        silence: without a message from a process's machine.
    """

    compile: float = 1800.0
    step: float = 300.0
    save: float = 900.0
    data: float = 300.0
    evaluate: float = 1800.0
    silence: float = 30.0

    def of(self, phase: str) -> float | None:
        """The deadline of a phase; None if it has none."""
        name = _DEADLINE_OF.get(phase)
        if name is None:
            return None
        return getattr(self, name)


class Health(Enum):
    """The state of one process: the first of these that applies."""

    FAILED = auto()  # it raised an error
    DIED = auto()  # without reporting an error
    CRASHED = auto()  # in native code, as jax ends processes whose coordinator is gone
    CUT_OFF = auto()  # it raised an error that follows from another process's end
    EXITED = auto()
    STOPPED = auto()
    SILENT = auto()
    RUNNING = auto()


class Overrun(NamedTuple):
    """A deadline that a process exceeds: the phase and step, its time in the phase, and the deadline."""

    phase: str
    step: int
    seconds: float
    deadline: float


@dataclass(slots=True)  # process 0 has one per process
class Member:
    """What is known of one process."""

    # its last status, with `since` and `device_since` as ages in seconds
    status: Status = field(default_factory=Status)
    arrival: float = 0.0  # when that status arrived, on the monotonic clock of the monitor that judges
    stopped: bool = False  # whether the system shows it as stopped
    gone: bool = False  # whether it died without reporting an error
    unseen: bool = False  # whether its monitor died with it, so that its status may be a quarter of a second old
    left: bool = False  # whether it said that it exits
    cause: str = ""  # the error that it failed with
    host: str = ""  # the name of its machine
    crash: str = ""  # the fatal signal that ended it in native code, such as "Aborted"
    due: float = 0.0  # until then it is no reason for `find_fault` to find one

    def set_due(self, deadlines: Deadlines) -> None:
        """Sets `due` after a change: one comparison then stands for the judgement of a process that is well."""
        if self.cause or self.gone or self.left:
            self.due = 0.0
            return
        status = self.status
        times = [self.arrival + deadlines.silence]
        limit = deadlines.of(status.phase)
        if limit is not None:
            times.append(self.arrival + limit - status.since)
        if status.dispatched > status.done:
            times.append(self.arrival + deadlines.step - status.device_since)
        self.due = min(times)

    def find_silence(self, now: float) -> float:
        """Seconds since its last status arrived."""
        return now - self.arrival

    def find_health(self, now: float) -> Health:
        """Its state; an error counts as a consequence where it is one of the libraries of the collectives."""
        if self.cause:
            cause = self.cause.lower()
            if any(word in cause for word in _CONSEQUENCES):
                return Health.CUT_OFF
            return Health.FAILED
        if self.gone:
            if self.crash:
                return Health.CRASHED
            return Health.DIED
        if self.left:
            return Health.EXITED
        if self.stopped:
            return Health.STOPPED
        if self.find_silence(now) > _SILENT:
            return Health.SILENT
        return Health.RUNNING

    def find_phase(self) -> tuple[str, int]:
        """Its phase and step: those of its devices while they run, else those of the host."""
        if self.status.dispatched > self.status.done:
            return "step", self.status.done + 1
        return self.status.phase, self.status.step

    def find_position(self) -> tuple[int, int]:
        """How far it has come: the step, and the place in it."""
        phase, step = self.find_phase()
        return step, PHASE_ORDER.get(phase, PHASE_ORDER["user code"])

    def find_overrun(self, deadlines: Deadlines, now: float) -> Overrun | None:
        """The deadline that it exceeds; None if it is in time."""
        if self.left:
            return None
        status = self.status
        silence = self.find_silence(now)
        limit = deadlines.of(status.phase)
        seconds = status.since + silence
        if limit is not None and seconds > limit:
            return Overrun(status.phase, status.step, seconds, limit)
        seconds = status.device_since + silence
        if status.dispatched > status.done and seconds > deadlines.step:
            return Overrun("step", status.done + 1, seconds, deadlines.step)
        return None


Members = Mapping[int, Member]  # by rank
