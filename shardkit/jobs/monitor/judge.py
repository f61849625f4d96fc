"""Decides which fault to report from the states of all processes: plain functions of plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from shardkit.runtime.channel.place import name_processes
from shardkit.runtime.channel.recorder import Status

# Phases in the order in which a process passes through them in one step; in those of _WAITING it waits for all others.
_ORDER = {"start": 0, "data": 0, "compile": 1, "compare": 2, "step": 3, "user code": 4, "evaluate": 5, "save": 6}
_ORDER |= {"after": 4, "commit": 7, "end": 8}
_WAITING = ("compare", "step", "commit")
_EXITED = 5.0  # seconds that a process may wait for one that has exited
_HOSTS = 4  # in a sentence
_GROUPS = 4  # of processes with equal batches, in a sentence
_STACKS = 16  # processes that print their stacks
_APART = 1.0  # seconds until all have told what they called: who is alone is said then
_SILENT = 2.0  # seconds without a message after which a process is suspected, once another one is late
# Errors of the collectives' libraries when the peer is gone: consequences of another process's end.
_CONSEQUENCES = ("gloo", "nccl", "connection", "socket", "rendezvous", "coordination", "deadline exceeded", "heartbeat")


class Deadlines(NamedTuple):
    """Seconds that a process may spend in each phase; exceeding one ends the job.

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
        counts_as = {"commit": "save", "after": "evaluate", "compare": "compile"}
        return getattr(self, counts_as.get(phase, phase), None)


@dataclass(slots=True)  # process 0 has one per process
class Known:
    """What is known of one process."""

    # its last status, with `since` and `device_since` as ages in seconds
    status: Status = field(default_factory=Status)
    heard: float = 0.0  # when that status arrived, on the monotonic clock of the monitor that judges
    stopped: bool = False  # whether the system shows it as stopped
    gone: bool = False  # whether it died without reporting an error
    unseen: bool = False  # whether its monitor died with it, so that its status may be a quarter of a second old
    left: bool = False  # whether it said that it exits
    cause: str = ""  # the error that it failed with
    host: str = ""  # the name of its machine
    crash: str = ""  # the fatal signal that ended it in native code, such as "Aborted"
    due: float = 0.0  # until then it is no reason for `fault` to find one

    def expect(self, deadlines: Deadlines) -> None:
        """Sets `due` after a change: one comparison then stands for the judgement of a process that is well."""
        s = self.status
        if self.cause or self.gone or self.left:
            self.due = 0.0
            return
        seen = self.heard + deadlines.silence
        if (limit := deadlines.of(s.phase)) is not None:
            seen = min(seen, self.heard + limit - s.since)
        if s.dispatched > s.done:
            seen = min(seen, self.heard + deadlines.step - s.device_since)
        self.due = seen


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


# The states that end the job, by precedence, with the seconds to wait for one that takes precedence.
_FATAL = {Health.FAILED: 0.3, Health.DIED: 0.3, Health.CRASHED: 1.0, Health.CUT_OFF: 2.0}


class Fault(NamedTuple):
    """What ends a job: the sentence to report, the seconds to wait for a better one, and whether it is a root cause.

    `lost`: a process died or does not answer, so that the program itself may be right. `hung`: some that exceed a
    deadline or hold up the others, whose stacks say where.
    """

    text: str
    wait: float = 0.0
    primary: bool = False
    lost: bool = False
    hung: Sequence[int] = ()


def fault(known: Mapping[int, Known], deadlines: Deadlines, now: float) -> Fault | None:
    """The fault to report, or None: failures and deaths first, then missed deadlines, then a wait for nobody."""
    ranks: dict[Health, list[int]] = {state: [] for state in Health}
    for rank, each in known.items():
        ranks[_state(each, now)].append(rank)
    for state, wait in _FATAL.items():
        if ranks[state]:
            failed = state is Health.FAILED
            return Fault(_end(state, ranks[state], known), wait, primary=failed, lost=not failed)
    coming = min((_position(each) for each in known.values() if _comes(each, deadlines, now)), default=None)
    late = [rank for rank, each in known.items() if _overdue(each, coming, deadlines, now)]
    if late:
        text, culprits = _delay(late, ranks, known, deadlines, now)
        if ranks[Health.STOPPED]:  # whose own deadline may pass a moment before those of the processes that wait for it
            waits = {rank for rank, each in known.items() if _at(each.status)[0] in _WAITING}
            late = sorted(waits.union(late))
        lost = bool(ranks[Health.SILENT]) and not ranks[Health.STOPPED]
        waiting = _waiting([rank for rank in late if rank not in culprits], known)
        return Fault(text + waiting, lost=lost, hung=sorted(culprits)[:_STACKS])
    if found := _after_the_exit(ranks[Health.EXITED], known, deadlines, now):
        return found
    silent = [rank for rank, each in known.items() if now - each.heard > deadlines.silence and not each.left]
    return Fault(unanswered(silent, known, now), lost=True) if silent else None


def called_apart(known: Mapping[int, Known]) -> Fault | None:
    """The fault that a process calls the same step with another batch, in another program, than process 0 does.

    Only where all processes must run one program: it is on all devices of the job, or one of them waits for the others
    to compare theirs, which have gone on. A process that is steps ahead is compared where the other one is. What is
    compared is the program: jax drops an array that it does not use, whose shape may differ.
    """
    model = known[0].status
    found = (_apart(model, each.status) for each in known.values() if each.status.batches != model.batches)
    step = min(filter(None, found), default=None)
    return Fault(_shapes_at(step, known), _APART, primary=True) if step else None


def _apart(one: Status, other: Status) -> tuple[int, int] | None:
    """The first loop and step that these two called with different batches; None if there is none."""
    for a in one.batches:
        for b in other.batches:
            step = max(a.first, b.first)
            if a.loop != b.loop or step > min(a.last, b.last) or a.program == b.program or a.batch == b.batch:
                continue
            waits = ("compare", step) in (one[:2], other[:2])
            if waits or (a.everywhere and b.everywhere):
                return a.loop, step
    return None


def _shapes_at(at: tuple[int, int], known: Mapping[int, Known]) -> str:
    """The sentence about a loop's step that was called with different batches: those of the fewest processes first."""
    loop, step = at
    groups: dict[str, list[int]] = {}
    for rank, each in known.items():
        for called in each.status.batches:
            if called.loop == loop and called.first <= step <= called.last:
                groups.setdefault(called.batch, []).append(rank)
    few = sorted(groups.items(), key=lambda group: (len(group[1]), -group[1][0]))  # in a tie process 0's last
    said = ", ".join(f"{batch} ({_named(ranks, known)})" for batch, ranks in few[:_GROUPS])
    more = f" and {len(few) - _GROUPS} more" if len(few) > _GROUPS else ""
    return (
        f"stopped in step {step}: all processes must call it with the same global shapes and dtypes of the batch; they "
        f"called it with {said}{more}. Pad or drop a short batch, on all processes alike"
    )


def _state(each: Known, now: float) -> Health:
    if each.cause:
        follows = any(word in each.cause.lower() for word in _CONSEQUENCES)
        return Health.CUT_OFF if follows else Health.FAILED
    if each.gone:
        return Health.CRASHED if each.crash else Health.DIED
    if each.left:
        return Health.EXITED
    if each.stopped:
        return Health.STOPPED
    return Health.SILENT if now - each.heard > _SILENT else Health.RUNNING


def _end(state: Health, ranks: Sequence[int], known: Mapping[int, Known]) -> str:
    each = known[ranks[0]]  # process 0 if it died: with its coordinator jax ends every other process
    where = f"{', last seen' if each.unseen else ''} {_in(*each.status[:2])}"
    if state is Health.CRASHED and len(ranks) == len(known) > 1:
        return (
            f"all processes died of a fatal signal ({each.crash}){where}: jax ends them where process 0 fails, which "
            "serves it, or a program from outside of the job joins at that port, which knows no token; read their "
            "output"
        )
    if state in (Health.DIED, Health.CRASHED):
        silent = "without reporting an error (SIGKILL or out of memory?)"
        how = f"of a fatal signal ({each.crash})" if each.crash else silent
        text = f"{_named(ranks[:1], known)} died {how}{where}"
        if ranks[0] == 0 and each.crash == "Aborted" and len(known) > 1:
            outside = "where a program from outside of the job joins at its port: see mtls_cert_file"
            text += f"; jax ends it so, too, {outside}"
        return text
    first = min(ranks, key=lambda rank: _position(known[rank]))
    return f"{_named([first], known)} failed {_in(*known[first].status[:2])}: {known[first].cause}"


def _after_the_exit(
    exited: Sequence[int], known: Mapping[int, Known], deadlines: Deadlines, now: float
) -> Fault | None:
    """A process that waits in a step which another one, having exited, will not take, or that does not exit itself."""
    if not exited:
        return None
    first = min(exited, key=lambda rank: known[rank].status.dispatched)
    last = known[first].status.dispatched
    for rank, each in known.items():
        phase, step = _at(each.status)
        age = now - each.heard + (each.status.device_since if phase == "step" else each.status.since)
        if not each.left and phase in ("step", "compare") and step > last and age > _EXITED:
            return Fault(f"{_named([first], known)} exited after step {last}" + _waiting([rank], known))
        if not each.left and phase in ("start", "user code") and age > deadlines.evaluate:
            text = (
                f"{_named([rank], known)} timed out {_in(phase, step)}: {age:.1f} s, deadline {deadlines.evaluate:g} s"
            )
            return Fault(f"{text}; process {first} has exited", hung=[rank])
    return None


def _exceeded(each: Known, deadlines: Deadlines, now: float) -> tuple[str, int, float, float] | None:
    """The phase and step whose deadline a process exceeds, with its time in it and the deadline; else None."""
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
    """Whether a process exceeds a deadline, other than by waiting for a process that is in time.

    The last process to reach a step may compile or save for longer than the step may take. That excuse is limited, as
    the process may loop without ever reaching the step. `coming` is the position of the last process that is in time.
    """
    found = _exceeded(each, deadlines, now)
    if found is None:
        return False
    phase, step, age, limit = found
    if phase not in _WAITING or age > limit + max(deadlines[:-1]):
        return True
    return coming is None or coming > (step, _ORDER[phase])


def _comes(each: Known, deadlines: Deadlines, now: float) -> bool:
    """Whether a process runs, is in time, and does not itself wait for the others."""
    phase, _ = _at(each.status)
    # A phase without a deadline has that of the phase in which the others wait meanwhile.
    limit = deadlines.of({"start": "compile", "user code": "step", "after": "step"}.get(phase, phase))
    if _state(each, now) is not Health.RUNNING or phase in ("compare", "commit") or limit is None:
        return False
    since = each.status.device_since if each.status.dispatched > each.status.done else each.status.since
    return now - each.heard + since <= limit


def _delay(
    late: Sequence[int], ranks: Mapping[Health, list[int]], known: Mapping[int, Known], deadlines: Deadlines, now: float
) -> tuple[str, Set[int]]:
    """Who delays the late processes, as a sentence and by rank: a stopped or silent one, else the furthest behind."""
    if stopped := ranks[Health.STOPPED]:
        return f"{_named(stopped[:1], known)} is stopped (SIGSTOP?) {_where(known[stopped[0]].status)}", {*stopped}
    if silent := ranks[Health.SILENT]:
        return unanswered(silent, known, now), {*silent}
    least = min(_position(each) for each in known.values())
    last = [rank for rank, each in known.items() if _position(each) == least]
    overdue = set(late)
    if overdue.isdisjoint(last):  # its phase has no deadline
        each, one = known[last[0]], len(last) == 1
        age = each.status.since + now - each.heard
        what = "exited" if each.left else f"been {_where(each.status)} for {age:.1f} s"
        subject, verb = ("it has", "holds") if one else ("they have", "hold")
        return f"{_named(last, known)} {verb} up the others: {subject} {what}", {*last}
    last = [rank for rank in last if rank in overdue]
    phase, step, age, limit = _exceeded(known[last[0]], deadlines, now) or ("step", 0, 0.0, 0.0)
    if phase == "commit" and 0 in last:  # when all parts are written, process 0 finishes the save
        last, phase = [0], "finish"
    return f"{_named(last, known)} timed out {_in(phase, step)}: {age:.1f} s, deadline {limit:g} s", {*last}


def unanswered(ranks: Sequence[int], known: Mapping[int, Known], now: float) -> str:
    """The sentence for processes whose machines send no messages."""
    each, have = known[ranks[0]], "has" if len(ranks) == 1 else "have"
    age, where = now - each.heard, _where(each.status)
    return f"{_named(ranks, known)} {have} not answered for {age:.1f} s (machine or network down?), last seen {where}"


def _named(ranks: Sequence[int], known: Mapping[int, Known]) -> str:
    """The processes, and in a job on several hosts the first of theirs: `processes 1, 3 on node1, node2`."""
    hosts = [known[rank].host for rank in ranks if known[rank].host]
    if not hosts or len({each.host for each in known.values()} - {""}) == 1:
        return name_processes(ranks)
    return f"{name_processes(ranks)} on {', '.join([*dict.fromkeys(hosts)][:_HOSTS])}"


def _waiting(ranks: Sequence[int], known: Mapping[int, Known]) -> str:
    if not ranks:
        return ""
    return f"; {name_processes(ranks)} {'waits' if len(ranks) == 1 else 'wait'} {_in(*_at(known[ranks[0]].status))}"


def _position(each: Known) -> tuple[int, int]:
    """How far a process has come: the step, and the place in it."""
    phase, step = _at(each.status)
    return step, _ORDER.get(phase, 4)


def _at(s: Status) -> tuple[str, int]:
    """The phase and step of a process: those of its devices while they run, else those of the host."""
    return ("step", s.done + 1) if s.dispatched > s.done else (s.phase, s.step)


def _where(status: Status) -> str:
    return _in(*_at(status)) if status.phase == "user code" else _in(status.phase, status.step)


def _in(phase: str, step: int) -> str:
    words = {
        "start": "in startup, before its first step",
        "data": f"waiting for the data of step {step}",
        "compile": f"compiling step {step}",
        "compare": f"comparing the program of step {step} with the others",
        "step": f"in step {step}",
        "user code": f"in user code after step {step}",
        "after": f"in user code after the last step, step {step}",
        "evaluate": f"evaluating after step {step}",
        "save": f"saving after step {step}",
        "commit": f"in the save after step {step} (own part written)",
        "finish": f"finishing the save after step {step}",
        "end": f"exiting after step {step}",
    }
    return words.get(phase, f"in {phase} of step {step}")
