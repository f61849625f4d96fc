"""Decides which fault to report from the states of all processes: plain functions of plain values.

The order of precedence is that of `find_fault`: an end is told before a delay, since the others are late because of it,
and a delay before a wait for nobody. Worked example, of three processes with 10 s for a step and for data: process 1
waits for the data of step 6 since 10.1 s, processes 0 and 2 are in step 6 since 10.1 s. All are late. But the position
of process 1, (6, data), is before that of the others, (6, step), so that it is named, and the others wait.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

from shardkit.jobs.monitor.members import PHASE_ORDER, WAITING_PHASES, Deadlines, Health, Member, Members
from shardkit.jobs.monitor.wording import (
    describe_batches,
    describe_end,
    describe_holding_up,
    describe_phase,
    describe_place,
    describe_silence,
    describe_waiting,
    name_members,
)
from shardkit.runtime.channel.recorder import Status

_EXITED = 5.0  # seconds that a process may wait for one that has exited
_STACKS = 16  # processes that print their stacks
_APART = 1.0  # seconds until all have told what they called: who is alone is said then
# The states that end the job, by precedence, with the seconds to wait for one that takes precedence.
_FATAL = {Health.FAILED: 0.3, Health.DIED: 0.3, Health.CRASHED: 1.0, Health.CUT_OFF: 2.0}
# A phase without a deadline has, where others wait, that of the phase in which they wait meanwhile.
_DEADLINE_WHILE_OTHERS_WAIT = {"start": "compile", "user code": "step", "after": "step"}


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


def find_fault(members: Members, deadlines: Deadlines, now: float) -> Fault | None:
    """The fault to report, or None: failures and deaths first, then missed deadlines, then a wait for nobody."""
    ranks: dict[Health, list[int]] = {health: [] for health in Health}
    for rank, member in members.items():
        ranks[member.find_health(now)].append(rank)
    for health, wait in _FATAL.items():
        if ranks[health]:
            text = describe_end(health, ranks[health], members)
            is_failure = health is Health.FAILED
            return Fault(text, wait, primary=is_failure, lost=not is_failure)
    late = _find_late(members, deadlines, now)
    if late:
        return _find_delay(late, ranks, members, deadlines, now)
    fault = _find_wait_for_exited(ranks[Health.EXITED], members, deadlines, now)
    if fault is not None:
        return fault
    silent = []
    for rank, member in members.items():
        if member.find_silence(now) > deadlines.silence and not member.left:
            silent.append(rank)
    if silent:
        return Fault(describe_silence(silent, members, now), lost=True)
    return None


def find_different_batches(members: Members) -> Fault | None:
    """The fault that a process calls the same step with another batch, in another program, than process 0 does.

    Only where all processes must run one program: it is on all devices of the job, or one of them waits for the others
    to compare theirs, which have gone on. A process that is steps ahead is compared where the other one is. What is
    compared is the program: jax drops an array that it does not use, whose shape may differ.

    Worked example: process 0 called steps 0 to 9 with a batch of float32[12,4]; process 1 called 0 to 4 with that, and
    step 5 with float32[6,4]. They differ in step 5, though process 0 is at step 9 by then.
    """
    model = members[0].status
    steps = []
    for member in members.values():
        if member.status.batches != model.batches:
            difference = _find_different_step(model, member.status)
            if difference is not None:
                steps.append(difference)
    if not steps:
        return None
    loop, step = min(steps)
    return Fault(describe_batches(loop, step, members), _APART, primary=True)


def _find_different_step(model: Status, other: Status) -> tuple[int, int] | None:
    """The first loop and step that these two called with different batches; None if there is none."""
    for run in model.batches:
        for other_run in other.batches:
            step = max(run.first, other_run.first)
            overlap = step <= min(run.last, other_run.last)
            if run.loop != other_run.loop or not overlap:
                continue
            if run.program == other_run.program or run.batch == other_run.batch:
                continue
            is_compared = ("compare", step) in ((model.phase, model.step), (other.phase, other.step))
            if is_compared or (run.everywhere and other_run.everywhere):
                return run.loop, step
    return None


def _find_late(members: Members, deadlines: Deadlines, now: float) -> list[int]:
    """The processes that exceed a deadline, other than by waiting for a process that is in time.

    The last process to reach a step may compile or save for longer than the step may take. That excuse is limited, as
    the process may loop without ever reaching the step.
    """
    # Worked example: process 1 compiles step 5, in time. Process 0 has waited in step 5 for longer than a step may
    # take, and is excused, because process 1 is behind it. In step 4 it would be late: there it waits for nobody.
    positions = []
    for member in members.values():
        if _may_still_come(member, deadlines, now):
            positions.append(member.find_position())
    last_to_come = min(positions, default=None)
    longest_excuse = max(deadlines[:-1])  # of the phases; the last is of silence
    late = []
    for rank, member in members.items():
        overrun = member.find_overrun(deadlines, now)
        if overrun is None:
            continue
        position = (overrun.step, PHASE_ORDER[overrun.phase])
        somebody_is_behind = last_to_come is not None and last_to_come <= position
        waits = overrun.phase in WAITING_PHASES
        has_excuse_left = overrun.seconds <= overrun.deadline + longest_excuse
        if not (somebody_is_behind and waits and has_excuse_left):
            late.append(rank)
    return late


def _may_still_come(member: Member, deadlines: Deadlines, now: float) -> bool:
    """Whether a process runs, is in time, and does not itself wait for the others."""
    phase, _ = member.find_phase()
    if member.find_health(now) is not Health.RUNNING:
        return False
    if phase in ("compare", "commit"):  # it waits itself
        return False
    limit = deadlines.of(_DEADLINE_WHILE_OTHERS_WAIT.get(phase, phase))
    if limit is None:
        return False
    status = member.status
    since = status.since
    if status.dispatched > status.done:
        since = status.device_since
    return member.find_silence(now) + since <= limit


def _find_delay(
    late: Sequence[int], ranks: dict[Health, list[int]], members: Members, deadlines: Deadlines, now: float
) -> Fault:
    """Who delays the late processes, and who waits: a stopped or silent process is named, else the furthest behind."""
    stopped = ranks[Health.STOPPED]
    silent = ranks[Health.SILENT]
    culprits: Set[int]
    if stopped:
        where = describe_place(stopped[0], members)
        text = f"{name_members(stopped[:1], members)} is stopped (SIGSTOP?) {where}"
        culprits = set(stopped)
        late = _add_waiting(late, members)
    elif silent:
        text = describe_silence(silent, members, now)
        culprits = set(silent)
    else:
        text, culprits = _find_furthest_behind(late, members, deadlines, now)
    waiting = [rank for rank in late if rank not in culprits]
    text += describe_waiting(waiting, members)
    is_lost = bool(silent) and not stopped
    return Fault(text, lost=is_lost, hung=sorted(culprits)[:_STACKS])


def _add_waiting(late: Sequence[int], members: Members) -> list[int]:
    """With those that wait: the deadline of a stopped process may pass a moment before theirs."""
    ranks = set(late)
    for rank, member in members.items():
        phase, _ = member.find_phase()
        if phase in WAITING_PHASES:
            ranks.add(rank)
    return sorted(ranks)


def _find_furthest_behind(
    late: Sequence[int], members: Members, deadlines: Deadlines, now: float
) -> tuple[str, Set[int]]:
    """The sentence about the processes that are furthest behind, and which they are."""
    positions = {rank: member.find_position() for rank, member in members.items()}
    least = min(positions.values())
    last = [rank for rank, position in positions.items() if position == least]
    all_late = set(late)
    last_and_late = [rank for rank in last if rank in all_late]
    if not last_and_late:  # their phase has no deadline
        return describe_holding_up(last, members, now), set(last)
    overrun = members[last_and_late[0]].find_overrun(deadlines, now)
    assert overrun is not None  # as it is late
    phase = overrun.phase
    if phase == "commit" and 0 in last_and_late:  # when all parts are written, process 0 finishes the save
        last_and_late = [0]
        phase = "finish"
    names = name_members(last_and_late, members)
    where = describe_phase(phase, overrun.step)
    text = f"{names} timed out {where}: {overrun.seconds:.1f} s, deadline {overrun.deadline:g} s"
    return text, set(last_and_late)


def _find_wait_for_exited(exited: Sequence[int], members: Members, deadlines: Deadlines, now: float) -> Fault | None:
    """A process that waits in a step which another one, having exited, will not take, or that does not exit itself."""
    if not exited:
        return None
    first = min(exited, key=lambda rank: members[rank].status.dispatched)
    last_step = members[first].status.dispatched
    for rank, member in members.items():
        if member.left:
            continue
        phase, step = member.find_phase()
        since = member.status.since
        if phase == "step":
            since = member.status.device_since
        seconds = member.find_silence(now) + since
        if phase in ("step", "compare") and step > last_step and seconds > _EXITED:
            text = f"{name_members([first], members)} exited after step {last_step}"
            return Fault(text + describe_waiting([rank], members))
        if phase in ("start", "user code") and seconds > deadlines.evaluate:
            where = describe_phase(phase, step)
            names = name_members([rank], members)
            text = f"{names} timed out {where}: {seconds:.1f} s, deadline {deadlines.evaluate:g} s"
            return Fault(f"{text}; process {first} has exited", hung=[rank])
    return None
