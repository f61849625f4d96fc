"""What went wrong, from what the monitors know of their processes: plain functions of plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .hello import processes
from .recorder import Status

# The order of a loop's phases within one step; a process waits in those of _WAITING for all others.
_ORDER = {"start": 0, "data": 0, "compile": 1, "agree": 2, "step": 3, "host": 4, "evaluate": 5, "save": 6, "written": 7}
_ORDER |= {"end": 8}
_WAITING = ("agree", "step", "written")
_ENDED = 5.0  # seconds in a step that another process will not take before that is said
_SILENT = 2.0  # seconds after which a monitor that says nothing is suspected, once some process is late
# How the libraries of collectives tell that the other side is gone: what follows from another process's end.
_SECONDARY = ("gloo", "nccl", "connection", "socket", "rendezvous", "coordination", "deadline exceeded", "heartbeat")


class Deadlines(NamedTuple):
    """How long a process may be in a phase, in seconds; what takes longer ends the job.

    Attributes:
        compile: tracing, lowering and compiling a step, and waiting for the others to have done so.
        step: one step, from the dispatch by the last process (or the end of the step before) until the devices have
            finished it; also the user's own code, while others wait for it.
        save: writing a checkpoint.
        data: waiting for the next batch.
        evaluate: a validation.
        silence: without a word from a process's machine.
    """

    compile: float = 1800.0
    step: float = 300.0
    save: float = 900.0
    data: float = 300.0
    evaluate: float = 1800.0
    silence: float = 30.0

    def of(self, phase: str) -> float | None:
        """The deadline of a phase; None if it has none."""
        phase = "save" if phase == "written" else phase
        return self.compile if phase == "agree" else getattr(self, phase, None)


@dataclass
class Known:
    """What is known of one process.

    Attributes:
        status: its last status, with `since` and `device_since` as ages in seconds.
        heard: when that came, seconds of the monotonic clock of the monitor that judges.
        stopped: whether the system shows it as stopped.
        gone: whether it ended without a word.
        unseen: whether its monitor went with it, so that its status may be a quarter of a second old.
        left: whether it said that it ends.
        cause: what it failed with, in its own words.
    """

    status: Status = field(default_factory=Status)
    heard: float = 0.0
    stopped: bool = False
    gone: bool = False
    unseen: bool = False
    left: bool = False
    cause: str = ""


class Fault(NamedTuple):
    """What ended a job: a sentence, seconds to wait for a better one, and whether a process said it of itself."""

    text: str
    wait: float = 0.0
    primary: bool = False


def fault(known: Mapping[int, Known], deadlines: Deadlines, now: float) -> Fault | None:
    """The fault to report, or None: an end without a word first, then failures, then whoever is late."""
    gone = [rank for rank, each in known.items() if each.gone and not each.cause]
    failed = [rank for rank, each in known.items() if each.cause]
    primary = [rank for rank in failed if not _secondary(known[rank].cause)]
    if primary:
        rank = min(primary, key=lambda rank: _position(known[rank]))
        return Fault(f"process {rank} failed {_in(*known[rank].status[:2])}: {known[rank].cause}", 0.3, primary=True)
    if gone:  # jax itself ends every process whose coordinator is gone: process 0 comes first in the mapping
        rank = 0 if 0 in gone else gone[0]
        last = ", last seen" if known[rank].unseen else ""
        return Fault(f"process {rank} ended without a word (killed?){last} {_in(*known[rank].status[:2])}", 0.3)
    if failed:
        rank = min(failed, key=lambda rank: _position(known[rank]))
        return Fault(f"process {rank} failed {_in(*known[rank].status[:2])}: {known[rank].cause}", 2.0)
    silent = [r for r, each in known.items() if now - each.heard > deadlines.silence and not each.left]
    coming = min((_position(each) for each in known.values() if _comes(each, deadlines, now)), default=None)
    late = [rank for rank, each in known.items() if _overdue(each, coming, deadlines, now)]
    if not late and (alone := _after_the_end(known, now)):
        return Fault(alone)
    if silent and not late:
        return Fault(unanswered(silent, known, now))
    return Fault(_late(late, known, deadlines, now)) if late else None


def _after_the_end(known: Mapping[int, Known], now: float) -> str:
    """Whether a process waits in a step that another will not take, because it has ended."""
    ended = [rank for rank, each in known.items() if each.left]
    if not ended:
        return ""
    first = min(ended, key=lambda rank: known[rank].status.dispatched)
    last = known[first].status.dispatched
    for rank, each in known.items():
        phase, step = _position_words(each)
        since = each.status.device_since if phase == "step" else each.status.since
        if not each.left and phase in ("step", "agree") and step > last and now - each.heard + since > _ENDED:
            return f"process {first} has ended, after step {last}; process {rank} waits {_in(phase, step)}"
    return ""


def lateness(each: Known, deadlines: Deadlines, now: float) -> tuple[str, int, float, float] | None:
    """The phase and step in which a process is over its deadline, since how long, and the deadline; None if not."""
    if each.left:
        return None
    s, age = each.status, now - each.heard
    limit = deadlines.of(s.phase)
    if limit is not None and s.since + age > limit:
        return s.phase, s.step, s.since + age, limit
    if s.dispatched > s.done and s.device_since + age > deadlines.step:
        return "step", s.done + 1, s.device_since + age, deadlines.step
    return None


def _overdue(each: Known, coming: tuple[int, int] | None, deadlines: Deadlines, now: float) -> bool:
    """Whether a process is late, and not because it waits for one that is still in time.

    The last to come to a step may have compiled or saved for longer than the step itself may take. But the wait has
    an end: it may go round and round and never come. `coming` is the position of the last that comes in time.
    """
    found = lateness(each, deadlines, now)
    if found is None:
        return False
    phase, step, age, limit = found
    if phase not in _WAITING or age > limit + max(deadlines[:-1]):
        return True
    return coming is None or coming > (step, _ORDER[phase])


def _comes(each: Known, deadlines: Deadlines, now: float) -> bool:
    """Whether a process is heard of, in time where it is, and does not wait for the others' next step itself."""
    phase, _ = _position_words(each)
    # What has no deadline of its own has that of what the others wait in meanwhile.
    limit = deadlines.of({"start": "compile", "host": "step"}.get(phase, phase))
    since = each.status.device_since if each.status.dispatched > each.status.done else each.status.since
    if each.left or each.stopped or phase in ("agree", "written") or limit is None or now - each.heard > _SILENT:
        return False
    return now - each.heard + since <= limit


def _late(late: Sequence[int], known: Mapping[int, Known], deadlines: Deadlines, now: float) -> str:
    """Who holds up those that are late: whoever is stopped or silent, else whoever has come least far."""
    stopped = [rank for rank, each in known.items() if each.stopped and not each.left]
    if stopped:
        each = known[stopped[0]]
        return f"process {stopped[0]} is stopped (SIGSTOP?) {_where(each.status)}{_waiting(late, stopped, known, now)}"
    silent = [rank for rank, each in known.items() if now - each.heard > _SILENT and not each.left]
    if silent:
        return unanswered(silent, known, now) + _waiting(late, silent, known, now)
    least = min(_position(each) for each in known.values())
    last = [rank for rank, each in known.items() if _position(each) == least]
    if not set(last) & set(late):  # a phase without a deadline
        each = known[last[0]]
        what = "it has ended" if each.left else f"it has been {_where(each.status)} for {_age(each, now):.1f} s"
        verb, what = (
            ("holds", what)
            if len(last) == 1
            else ("hold", what.replace("it has", "they have").replace("its own", "their own"))
        )
        return f"{processes(last)} {verb} up the others: {what}{_waiting(late, last, known, now)}"
    last = [rank for rank in last if rank in late] or list(late)
    phase, step, age, limit = lateness(known[last[0]], deadlines, now) or ("step", 0, 0.0, 0.0)
    where = _in(phase, step)
    if phase == "written" and 0 in last:  # what is left when all have written is up to process 0
        last, where = [0], f"finishing the save after step {step}"
    verb = "is" if len(last) == 1 else "are all"
    text = f"{processes(last)} {verb} late {where}: {age:.1f} s, of {limit:g} s allowed"
    return text + _waiting(late, last, known, now)


def unanswered(ranks: Sequence[int], known: Mapping[int, Known], now: float) -> str:
    """The words for processes whose machines say nothing."""
    each = known[ranks[0]]
    verb = "has" if len(ranks) == 1 else "have"
    return (
        f"{processes(list(ranks))} {verb} not answered for {now - each.heard:.1f} s (machine or network down?), last "
        f"seen {_where(each.status)}"
    )


def _waiting(late: Sequence[int], culprits: Sequence[int], known: Mapping[int, Known], now: float) -> str:
    others = [rank for rank in late if rank not in culprits]
    if not others:
        return ""
    phase, step, *_ = _position_words(known[others[0]])
    return f"; {processes(others)} {'waits' if len(others) == 1 else 'wait'} {_in(phase, step)}"


def _position(each: Known) -> tuple[int, int]:
    """How far a process has come: the step and the place in it at which its devices, or else it itself, stand."""
    phase, step = _position_words(each)
    return step, _ORDER.get(phase, 4)


def _position_words(each: Known) -> tuple[str, int]:
    s = each.status
    return ("step", s.done + 1) if s.dispatched > s.done else (s.phase, s.step)


def _age(each: Known, now: float) -> float:
    return each.status.since + now - each.heard


def _where(status: Status) -> str:
    phase, step = _position_words(Known(status)) if status.phase == "host" else (status.phase, status.step)
    return _in(phase, step)


def _in(phase: str, step: int) -> str:
    words = {
        "start": "before its first step",
        "data": f"waiting for the data of step {step}",
        "compile": f"compiling step {step}",
        "agree": f"comparing the program of step {step} with the others",
        "step": f"in step {step}",
        "host": f"in its own code after step {step}",
        "evaluate": f"evaluating after step {step}",
        "save": f"saving after step {step}",
        "written": f"in the save after step {step} (own part written)",
        "end": f"at its end, after step {step}",
    }
    return words.get(phase, f"in {phase} of step {step}")


def _secondary(cause: str) -> bool:
    return any(word in cause.lower() for word in _SECONDARY)
