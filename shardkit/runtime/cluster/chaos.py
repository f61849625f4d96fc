"""Faults drawn from a seed, planted in a job that starts again by itself, and what follows from each."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from shardkit._check import at_least, at_least_zero, one_of
from shardkit._typed import typed
from shardkit.runtime.cluster.disturbed import RUN, Run
from shardkit.runtime.cluster.faults import KINDS, MAY_GO_ON, NAMED, Fault, Kind, Site, draw, plant, take_back
from shardkit.runtime.cluster.sockets import check_cut
from shardkit.runtime.cluster.wall_clock import make_clock
from shardkit.runtime.monitor.planted import CHAOS

UNDISTURBED, DISTURBED = "undisturbed", "faults"  # the folders of the two runs
_UNLIMITED = 10**6  # restarts in an hour
_START = 600.0  # seconds until the first loss
_LOOK = 0.05  # seconds between two looks
_CALM = 3.0  # seconds in which a job that goes on after a fault must write losses, and not start again

_T = TypeVar("_T")


class Outcome(NamedTuple):
    """What followed a fault.

    Attributes:
        fault: the fault.
        step: the last step whose loss was written before it.
        saved: the newest checkpoint before it that is not damaged; None without one.
        detected: seconds from the fault to the decision to start again; None if there was none.
        recovered: seconds from the fault to the first loss after it; None if there was none.
        resumed: the step of that loss.
        cause: what the guard said first.
        wrong: what is not as it should be, as a sentence; empty if all is well.
    """

    fault: Fault
    step: int
    saved: int | None
    detected: float | None = None
    recovered: float | None = None
    resumed: int | None = None
    cause: str = ""
    wrong: str = ""


@typed
def chaos(
    command: Sequence[str],
    *,
    processes: int,
    losses: str,
    folder: str | Path,
    faults: int = 10,
    seed: int = 0,
    kinds: Sequence[Kind] = KINDS,
    latest: float = 3.0,
    every: int | None = None,
    devices: int | None = None,
    checkpoints: str | None = None,
    tolerance: float = 0.0,
    patience: float = 120.0,
    told: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Runs a job once undisturbed and once under faults, and compares the losses of every step.

    The job under faults runs as `launch(restarts=...)`. A fault is planted, the restart awaited, then a loss; each loss
    that is written must equal that of the undisturbed run, and no saved step may be lost. Only between a flipped bit
    and its detection losses may differ.

    Args:
        command: the words of the command, as of `launch`; "{run}" in them is the folder of the run. It must resume from
            its newest checkpoint, and write its losses as JSON lines with "step" and "loss".
        processes: the number of processes.
        losses: the file of its losses, such as "{run}/log.jsonl".
        folder: where to run; it must be empty or missing.
        faults: how many.
        seed: which.
        kinds: of what kinds. "exception", "slow" and "flip" need a program that calls `guard.watch`.
        latest: the most seconds from the first loss of the run, or of a restart, to the next fault.
        every: plant only after steps that are a multiple of this, each once; by default a restart and its first loss
            are enough. `latest` counts from the loss of that step.
        devices: simulated devices per process.
        checkpoints: the directory of its checkpoints, a folder for each step; needed for "damage".
        tolerance: the largest relative difference of a loss.
        patience: seconds that a detection, and a recovery, may take.
        told: called with each outcome.

    Returns:
        An outcome for each fault that was planted: fewer than `faults` where the job ended before.

    Raises:
        ValueError: a number below its smallest, a folder that is not empty or that others can write, "damage" without
            `checkpoints`, these outside of "{run}", "clock" without a C compiler, "link" where the system forbids it,
            or a job that fails without faults.
    """
    at_least("chaos", 1, processes=processes, faults=faults, devices=devices, every=every)
    at_least_zero("chaos", tolerance=tolerance, patience=patience, latest=latest)
    _check_kinds(kinds, checkpoints)
    place = Path(folder)
    _check_folder(place)
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    within, clock = place / "within", place / "clock"
    environ = {CHAOS: str(within), **(make_clock(clock) if "clock" in kinds else {})}
    undisturbed = Run(command, place / UNDISTURBED, processes, devices, losses)
    with undisturbed.started(restarts=0, environ={}) as job:
        if job.wait():
            raise ValueError(
                f"chaos: the command must succeed without faults; it ended with {job.returncode}. Read "
                f"{undisturbed.log}."
            )
    if not undisturbed.new():
        raise ValueError(f"chaos: losses must be JSON lines with step and loss; {undisturbed.losses} has none.")
    run = Run(command, place / DISTURBED, processes, devices, losses)
    saved = None if checkpoints is None else Path(checkpoints.replace(RUN, str(run.folder)))
    with run.started(restarts=_UNLIMITED, environ=environ) as job:
        site = Site(job.pid, run.token, saved, within, clock)
        watched = _Watched(run, job, site, undisturbed.latest, tolerance, patience, every)
        for fault in draw(seed, faults, processes, kinds, latest):
            if not watched.follow(fault):
                break
            told(watched.outcomes[-1])
            if watched.outcomes[-1].recovered is None:
                return watched.outcomes
        job.wait()
        watched.end()
    return watched.outcomes


def _check_folder(place: Path) -> None:
    if not place.exists():
        return
    if any(place.iterdir()):
        raise ValueError(f"chaos: folder must be empty; got {str(place)!r}. Pass another, or delete what is in it.")
    found = place.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(
            "chaos: only this user may write into the folder, from which the job loads a library; "
            f"{str(place)!r} has mode {stat.S_IMODE(found.st_mode):o} and owner {found.st_uid}. Pass another, or one "
            "that is missing."
        )


def _check_kinds(kinds: Sequence[Kind], checkpoints: str | None) -> None:
    for kind in kinds:
        one_of("chaos", "kinds", kind, KINDS)
    if "damage" in kinds and checkpoints is None:
        raise ValueError(
            "chaos: damage needs the directory of the checkpoints; got none. Pass checkpoints (--checkpoints)."
        )
    if checkpoints is not None and RUN not in checkpoints:
        raise ValueError(
            f"chaos: checkpoints must be in the folder of a run, as damage cuts them; got {checkpoints!r}. Write "
            f"{RUN}/saved, there and in the command."
        )
    if "link" in kinds:
        check_cut()


class _Watched:
    """A job under faults, and the outcome of each of them so far."""

    def __init__(
        self,
        run: Run,
        job: subprocess.Popen[bytes],
        site: Site,
        reference: Mapping[int, float],
        tolerance: float,
        patience: float,
        every: int | None,
    ):
        self.run, self.job, self.site = run, job, site
        self.reference, self.tolerance, self.patience = reference, tolerance, patience
        self.outcomes: list[Outcome] = []
        self.differs = ""  # the first loss since the last fault that is not that of the undisturbed run
        self.flipped = False  # then a loss may differ
        self.every = self.next = every or 0  # steps from a fault to the next, and the step of the next

    def follow(self, fault: Fault) -> bool:
        """Plants a fault and waits for what follows; False if the job has ended by itself before."""
        run = self.run
        if not self._until(self._new, _START) and not self._ended():
            self.outcomes.append(Outcome(fault, max(run.latest, default=-1), None, wrong="no loss before the fault"))
            return True
        while self.every and max(run.latest, default=-1) < self.next and self._until(self._new):
            pass
        self.next = (max(run.latest, default=-1) // self.every + 1) * self.every if self.every else 0
        self._until(lambda: False, fault.after)
        self._new()
        if self._ended():
            return False
        wrong, restarts = self.differs, run.restarts
        if run.listen() > restarts:
            wrong = wrong or "the job started again without a fault"
        run.said.clear()
        self.differs, self.flipped = "", fault.kind == "flip"
        outcome = Outcome(fault, max(run.latest, default=-1), plant(fault, self.site), wrong=wrong)
        found = self._followed(outcome, time.monotonic())
        if found is not None:
            wrong = found.wrong or self.differs or self._misnamed(fault)
            self.outcomes.append(found._replace(cause=run.said[0] if run.said else "", wrong=wrong))
        return found is not None

    def _followed(self, outcome: Outcome, begun: float) -> Outcome | None:
        """Waits for the restart after a fault, and for a loss; None if the job has ended by itself."""
        run, fault, may_go_on = self.run, outcome.fault, outcome.fault.kind in MAY_GO_ON
        before = run.restarts
        if not self._until(lambda: run.listen() > before, _CALM if may_go_on else self.patience):
            if not self._ended() and may_go_on and (new := self._new()):
                take_back(fault, self.site)
                return outcome._replace(recovered=time.monotonic() - begun, resumed=min(new))
            if not self._ended() and not (may_go_on and self._until(lambda: run.listen() > before)):
                looked = not (self.site.within / str(fault.process)).exists()
                why = "" if looked else ", and it did not look for it: call guard.watch"
                return outcome._replace(wrong=f"not detected within {self.patience:g} s{why}")
            if self._ended():
                return self._end_of(outcome)
        outcome = outcome._replace(detected=time.monotonic() - begun)
        self._new()  # what was written between the fault and its detection
        self.flipped = False
        new = self._until(self._new)
        if not new:
            late = f"no loss within {self.patience:g} s after the restart"
            return self._end_of(outcome) if self._ended() else outcome._replace(wrong=late)
        outcome = outcome._replace(recovered=time.monotonic() - begun, resumed=min(new))
        if outcome.saved is not None and min(new) < outcome.saved:
            lost = f"step {outcome.saved} was saved, and the job went on with step {min(new)}"
            return outcome._replace(wrong=outcome.wrong or lost)
        return outcome

    def _misnamed(self, fault: Fault) -> str:
        """That the guard named other processes, as a sentence; empty if it is right, or there is no guard."""
        names = rf"\bprocess(es)? (\d+, )*{fault.process}\b"
        if fault.kind not in NAMED or not self.run.said or any(re.search(names, each) for each in self.run.said):
            return ""
        return f"the guard did not name process {fault.process}: {self.run.said[0]}"

    def _end_of(self, outcome: Outcome) -> Outcome | None:
        code = self.job.returncode
        return outcome._replace(wrong=f"the job ended with {code}: {self.run.last_line()}") if code else None

    def end(self) -> None:
        """Checks, after the end of the job, what the last fault and all of them have left."""
        if self.outcomes:
            last = self.outcomes[-1]
            self.outcomes[-1] = last._replace(wrong=last.wrong or self._left())

    def _left(self) -> str:
        if self.job.returncode:
            return f"the job ended with {self.job.returncode}: {self.run.last_line()}"
        if left := self.site.living():
            return f"process {left[0].id} is left over"
        self._new()
        last = max(self.reference)
        return _differs(self.run.latest, self.reference, self.tolerance) or (
            "" if last in self.run.latest else f"step {last} has no loss"
        )

    def _new(self) -> dict[int, float]:
        """The losses that were written since the last call; notes one that is wrong."""
        new = self.run.new()
        if not self.flipped:
            self.differs = self.differs or _differs(new, self.reference, self.tolerance)
        return new

    def _ended(self) -> bool:
        return self.job.poll() is not None

    def _until(self, found: Callable[[], _T], seconds: float | None = None) -> _T:
        """What a function returns, once that is true, the job has ended, or these seconds have passed."""
        end = time.monotonic() + (self.patience if seconds is None else seconds)
        while True:
            over = self._ended() or time.monotonic() >= end
            if (result := found()) or over:
                return result
            time.sleep(_LOOK)


def _differs(found: Mapping[int, float], reference: Mapping[int, float], tolerance: float) -> str:
    """The first step whose loss is not that of the undisturbed run, as a sentence; else empty."""
    for step, loss in sorted(found.items()):
        wanted = reference.get(step)
        if wanted is None or not abs(loss - wanted) <= tolerance * abs(wanted):
            return f"the loss of step {step} is {loss!r} and not {wanted!r}"
    return ""
