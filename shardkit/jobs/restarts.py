"""Whether a job that failed starts again, and when: plain functions of plain values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

RESTARTS = "SHARDKIT_RESTARTS"  # how many there were: in the environment of the processes of a job that may restart
_HOUR = 3600.0
_LONG = 600.0  # seconds after which an attempt made progress, where nobody says which step it reached
_LONGEST_WAIT = 60.0
_SAME_STEP = 3  # failures in a row in one step after which it is not tried again
_WRONG_USAGE = 2  # the exit code of command lines that are wrong: they will be wrong again


class Attempt(NamedTuple):
    """How one start of a job ended.

    Attributes:
        code: the exit code of the job.
        step: the step at which `guard` found the fault, from 0; None if it named none.
        in_step: whether that was inside of the step, which then is at fault, or its batch.
        began: when it began, in seconds of the monotonic clock.
        ended: when it ended.
        signalled: whether the launcher was told to end it.
    """

    code: int
    step: int | None
    in_step: bool
    began: float
    ended: float
    signalled: bool


def after(past: Sequence[Attempt], restarts: int) -> float | str:
    """What follows a failed attempt: the seconds to wait before the next one, or why there is none.

    The job starts again at once if it got further than the time before. The wait doubles from one second with each
    attempt in a row that did not, to a minute.

    Args:
        past: the attempts so far, oldest first; the last one failed.
        restarts: the most restarts in an hour.
    """
    last = past[-1]
    if last.signalled or not restarts:
        return ""
    if last.code == _WRONG_USAGE:
        return f"not restarted: exit code {_WRONG_USAGE} says that the command is wrong"
    recent = sum(attempt.began > last.ended - _HOUR for attempt in past[1:])
    if recent >= restarts:
        return f"not restarted: {restarts} restarts in an hour are the limit. Mend the cause, or raise --restarts"
    same = [attempt.step for attempt in past[-_SAME_STEP:] if attempt.in_step]
    if len(same) == _SAME_STEP and set(same) == {last.step}:
        return (
            f"not restarted: step {last.step} failed {_SAME_STEP} times in a row. Look at its batch, number "
            f"{last.step} from 0"
        )
    if len(past) > 1 and _further(last, past[-2]):
        return 0.0
    return min(2.0 ** (_without_progress(past) - 1), _LONGEST_WAIT)


def _without_progress(past: Sequence[Attempt]) -> int:
    """How many of the last attempts got no further than the one before them, and that one."""
    count, rest = 1, list(past)
    while len(rest) > 1 and not _further(rest[-1], rest[-2]):
        rest.pop()
        count += 1
    return count


def _further(attempt: Attempt, before: Attempt) -> bool:
    if attempt.step is None:
        return attempt.ended - attempt.began > _LONG
    return attempt.step > (-1 if before.step is None else before.step)
