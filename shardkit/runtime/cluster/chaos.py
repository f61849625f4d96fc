"""Faults drawn from a seed, planted in a job that starts again by itself, and what follows from each."""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from shardkit._check import at_least, at_least_zero, one_of
from shardkit._typed import typed
from shardkit.runtime.cluster.living import Living, living
from shardkit.runtime.monitor.hello import TOKEN

Kind = Literal["kill", "stop", "terminate", "monitor", "damage"]
KINDS: tuple[Kind, ...] = get_args(Kind)
RUN = "{run}"  # in the words of a command: the folder of this run
_UNLIMITED = 10**6  # restarts in an hour
_START = 600.0  # seconds until the first loss
_LOOK = 0.05  # seconds between two looks


class Fault(NamedTuple):
    """A fault to plant.

    Attributes:
        kind: "kill" (SIGKILL), "stop" (SIGSTOP), "terminate" (SIGTERM, as a preemption), "monitor" (SIGKILL to the
            monitor that `guard` started) or "damage" (the newest of several checkpoints is cut in half, then SIGKILL).
        process: the index of the process.
        after: seconds from the first loss of the run, or of a restart, to the fault.
    """

    kind: Kind
    process: int
    after: float


class Outcome(NamedTuple):
    """What followed a fault.

    Attributes:
        fault: the fault.
        step: the last step whose loss was written before it.
        saved: the newest checkpoint before it that is not damaged; None without one.
        detected: seconds from the fault to the decision to start again; None if there was none.
        recovered: seconds from the fault to the first loss after it; None if there was none.
        resumed: the step of that loss.
        wrong: what is not as it should be, as a sentence; empty if all is well.
    """

    fault: Fault
    step: int
    saved: int | None
    detected: float | None = None
    recovered: float | None = None
    resumed: int | None = None
    wrong: str = ""


def draw(seed: int, faults: int, processes: int, kinds: Sequence[Kind] = KINDS, latest: float = 3.0) -> list[Fault]:
    """Faults of a seed: every kind as often as any other, in a drawn order, at drawn processes and times."""
    drawn = random.Random(seed)
    order = [kinds[index % len(kinds)] for index in range(faults)]
    drawn.shuffle(order)
    return [Fault(kind, drawn.randrange(processes), drawn.uniform(0, latest)) for kind in order]


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
    devices: int | None = None,
    checkpoints: str | None = None,
    tolerance: float = 0.0,
    patience: float = 120.0,
    told: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Runs a job once undisturbed and once under faults, and compares the losses of every step.

    The job under faults runs as `launch(restarts=...)`. A fault is planted, the restart awaited, then a loss; each loss
    that is written must equal that of the undisturbed run, and no saved step may be lost.

    Args:
        command: the words of the command, as of `launch`; "{run}" in them is the folder of the run. It must resume from
            its newest checkpoint, and write its losses as JSON lines with "step" and "loss".
        processes: the number of processes.
        losses: the file of its losses, such as "{run}/log.jsonl".
        folder: where to run; it must be empty or missing.
        faults: how many.
        seed: which.
        kinds: of what kinds.
        latest: the most seconds from the first loss of the run, or of a restart, to the next fault.
        devices: simulated devices per process.
        checkpoints: the directory of its checkpoints, a folder for each step; needed for "damage".
        tolerance: the largest relative difference of a loss.
        patience: seconds that a detection, and a recovery, may take.
        told: called with each outcome.

    Returns:
        An outcome for each fault that was planted: fewer than `faults` where the job ended before.

    Raises:
        ValueError: a number below its smallest, a folder that is not empty, "damage" without `checkpoints`, or a job
            that fails without faults.
    """
    at_least("chaos", 1, processes=processes, faults=faults, devices=devices)
    at_least_zero("chaos", tolerance=tolerance, patience=patience, latest=latest)
    for kind in kinds:
        one_of("chaos", "kinds", kind, KINDS)
    if "damage" in kinds and checkpoints is None:
        raise ValueError(
            "chaos: damage needs the directory of the checkpoints; got none. Pass checkpoints (--checkpoints)."
        )
    place = Path(folder)
    if place.exists() and any(place.iterdir()):
        raise ValueError(f"chaos: folder must be empty; got {str(place)!r}. Pass another, or delete what is in it.")
    undisturbed = _Run(command, place / "undisturbed", processes, devices, losses)
    with undisturbed.started(restarts=0) as job:
        if job.wait():
            raise ValueError(
                f"chaos: the command must succeed without faults; it ended with {job.returncode}. Read "
                f"{undisturbed.log}."
            )
    reference = undisturbed.read()
    if not reference:
        raise ValueError(f"chaos: losses must be JSON lines with step and loss; {undisturbed.losses} has none.")
    run = _Run(command, place / "faults", processes, devices, losses)
    saved = None if checkpoints is None else Path(checkpoints.replace(RUN, str(run.folder)))
    outcomes = []
    with run.started(restarts=_UNLIMITED) as job:
        for fault in draw(seed, faults, processes, kinds, latest):
            outcome = _planted(fault, run, job, saved, reference, tolerance, patience)
            if outcome is None:
                break
            outcomes.append(outcome)
            told(outcome)
            if outcome.wrong:
                return outcomes
        job.wait()
        if outcomes:
            wrong = _at_the_end(run, job, reference, tolerance) or _lost(outcomes, saved)
            outcomes[-1] = outcomes[-1]._replace(wrong=wrong)
    return outcomes


class _Run:
    """A run of the job, in a folder of its own."""

    def __init__(self, command: Sequence[str], folder: Path, processes: int, devices: int | None, losses: str):
        self.folder, self.log = folder, folder / "output"
        self.words = [word.replace(RUN, str(folder)) for word in command]
        self.losses = Path(losses.replace(RUN, str(folder)))
        self.options = ["-n", str(processes)] + ([] if devices is None else ["--devices", str(devices)])
        self.token = secrets.token_hex(32)

    @contextmanager
    def started(self, *, restarts: int) -> Iterator[subprocess.Popen[bytes]]:
        """The launcher, which is ended at exit, with all that it started."""
        self.folder.mkdir(parents=True)
        options = [*self.options, *(["--restarts", str(restarts)] if restarts else [])]
        words = [sys.executable, "-m", "shardkit", "launch", *options, "--", *self.words]
        with open(self.log, "wb") as log:
            environ = {**os.environ, TOKEN: self.token}
            job = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ)
        try:
            yield job
        finally:
            job.kill()
            job.wait()

    def read(self) -> dict[int, float]:
        """The losses that are in the file now, by step; a line that is being written is left out."""
        found = {}
        for line in self.losses.read_text().split("\n")[:-1] if self.losses.exists() else ():
            row = json.loads(line)
            if isinstance(row, dict) and {"step", "loss"} <= row.keys():
                found[int(row["step"])] = float(row["loss"])
        return found

    def restarts(self) -> int:
        """How often the launcher has decided to start again."""
        return self.log.read_bytes().count(b"\nshardkit launch: restart ")

    def last_line(self) -> str:
        return self.log.read_text(errors="replace").strip().rpartition("\n")[2]

    def living(self) -> list[Living]:
        return living(TOKEN, self.token)


def _planted(
    fault: Fault,
    run: _Run,
    job: subprocess.Popen[bytes],
    saved: Path | None,
    reference: Mapping[int, float],
    tolerance: float,
    patience: float,
) -> Outcome | None:
    """Plants a fault and waits for what follows; None if the job ended before."""
    before = run.read()
    if not _until(lambda: run.read() != before or job.poll() is not None, _START):
        return Outcome(fault, max(before, default=-1), None, wrong="no loss was written before the fault")
    if _until(lambda: job.poll() is not None, fault.after):
        return None
    known, restarts = run.read(), run.restarts()
    outcome = Outcome(fault, max(known, default=-1), _plant(fault, run, job, saved))
    begun = time.monotonic()
    if not _until(lambda: run.restarts() > restarts or job.poll() is not None, patience):
        return outcome._replace(wrong=f"not detected within {patience:g} s")
    if job.poll() is not None:
        return (
            None
            if job.returncode == 0
            else outcome._replace(wrong=f"the job ended with {job.returncode}: {run.last_line()}")
        )
    outcome = outcome._replace(detected=time.monotonic() - begun)
    known = run.read()  # also what was written between the fault and its detection
    if not _until(lambda: run.read() != known or job.poll() is not None, patience):
        return outcome._replace(wrong=f"no loss within {patience:g} s after the restart")
    if (after := run.read()) == known:
        return outcome._replace(wrong=f"the job ended with {job.returncode}: {run.last_line()}")
    new = [step for step in after if step not in known] or list(after)
    outcome = outcome._replace(recovered=time.monotonic() - begun, resumed=min(new))
    return outcome._replace(wrong=_differs(after, reference, tolerance))


def _plant(fault: Fault, run: _Run, job: subprocess.Popen[bytes], saved: Path | None) -> int | None:
    """Does it; returns the newest checkpoint that is intact after it."""
    there = saved.iterdir() if saved is not None and saved.is_dir() else ()
    steps = sorted(int(path.name) for path in there if path.name.isdigit())
    if fault.kind == "damage" and saved is not None and len(steps) > 1:
        for path in (saved / str(steps.pop())).rglob("*"):
            if path.is_file():
                os.truncate(path, path.stat().st_size // 2)
    here = run.living()
    main = next((each.id for each in here if each.parent == job.pid and each.rank == fault.process), None)
    if main is not None:  # else it has just ended
        of_main = [each.id for each in here if each.parent == main]
        which = of_main[0] if fault.kind == "monitor" and of_main else main
        os.kill(which, {"stop": signal.SIGSTOP, "terminate": signal.SIGTERM}.get(fault.kind, signal.SIGKILL))
    return steps[-1] if steps else None


def _differs(found: Mapping[int, float], reference: Mapping[int, float], tolerance: float) -> str:
    """The first step whose loss is not that of the undisturbed run, as a sentence; else empty."""
    for step, loss in sorted(found.items()):
        wanted = reference.get(step)
        if wanted is None or not abs(loss - wanted) <= tolerance * abs(wanted):
            return f"the loss of step {step} is {loss!r} and not {wanted!r}"
    return ""


def _at_the_end(run: _Run, job: subprocess.Popen[bytes], reference: Mapping[int, float], tolerance: float) -> str:
    if job.returncode:
        return f"the job ended with {job.returncode}: {run.last_line()}"
    if left := run.living():
        return f"process {left[0].id} is left over"
    last = max(reference)
    found = run.read()
    return _differs(found, reference, tolerance) or ("" if last in found else f"step {last} has no loss")


def _lost(outcomes: Sequence[Outcome], saved: Path | None) -> str:
    """Which intact checkpoint did not count after a fault, as a sentence: resuming from an older one sets it aside."""
    for outcome in outcomes:
        if saved is not None and (saved / f"{outcome.saved}.aside").exists():
            return f"the intact checkpoint of step {outcome.saved} was set aside"
    return ""


def _until(true: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not (found := true()) and time.monotonic() < end:
        time.sleep(_LOOK)
    return found
