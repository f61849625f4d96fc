"""A training job that restarts by itself, under faults planted from outside: it ends with the losses of one without."""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from support import commands, faults

PROGRAM = Path(__file__).parents[2] / "examples" / "restarting.py"
PATIENCE = 300.0


class Run:
    """The example under the launcher, in a folder of its own."""

    def __init__(self, folder, steps, restarts=0):
        self.log, self.saved, self.said = folder / "log.jsonl", folder / "saved", folder / "said"
        folder.mkdir()
        words = ["-n", 4, "--devices", 1, "--restarts", restarts, "--", PROGRAM, folder, "--steps", steps]
        with open(self.said, "wb") as said:
            self.launcher = subprocess.Popen(
                commands.command("launch", *words, "--deadline", 5),
                env=commands.environment(),
                stdout=said,
                stderr=said,
                start_new_session=True,
            )

    def losses(self):
        """What was logged, in order: (step, loss)."""
        text = self.log.read_text() if self.log.exists() else ""
        rows = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [(row["step"], row["loss"]) for row in rows]

    def until(self, condition, what):
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, f"no {what}: {self.said.read_text()[-3000:]}"
            assert self.launcher.poll() is None, f"it ended before {what}: {self.said.read_text()[-3000:]}"
            time.sleep(0.05)

    def end(self):
        with contextlib.suppress(OSError):
            os.killpg(self.launcher.pid, signal.SIGKILL)
        self.launcher.wait()


# What the launcher and the guard say of each, with {r} for the process.
SAID = {
    "kill": r"guard: process {r} died without reporting an error",
    "stop": r"guard: process {r} is stopped \(SIGSTOP\?\)",
    "terminate": "all processes were preempted, and exited with code 75",
    "monitor": r"guard: (the monitor of )?process {r} died",
    "damage": r"guard: process {r} died without reporting an error",
    "disk": r"guard: process {r} failed .*File too large",
    "link": "guard: process",
}


# proves F61, F63, F66, F70: each kind of fault once, and each loss of the job has the bits of the undisturbed run
@pytest.mark.deep
@pytest.mark.parametrize("rank", [0, 1])
def test_a_job_recovers_from_every_kind_of_fault(tmp_path, rank):
    """It alone finds a job that comes back and is not the same, a saved step that is lost, a process that is left."""
    kinds = [kind for kind in faults.KINDS if kind != "disk" or rank == 0]  # process 0 writes the log and every save
    steps = 100 * (len(kinds) + 1)
    run = Run(tmp_path / "disturbed", steps, restarts=len(kinds))
    try:
        for count, kind in enumerate(kinds):
            run.until(lambda at=100 * (count + 1): run.losses()[-1:] >= [(at, 0.0)], f"step before {kind}")
            saved, rows, said = faults.steps(run.saved)[-1], len(run.losses()), run.said.stat().st_size
            faults.plant(kind, run.launcher.pid, rank, run.saved)
            run.until(lambda rows=rows: began_again(run.losses(), rows), f"recovery from {kind}")
            first = began_again(run.losses(), rows)
            assert first > saved - 5 * (kind == "damage"), (kind, first, saved)
            text = run.said.read_bytes()[said:].decode()
            assert re.search(SAID[kind].format(r=rank), text), (kind, text)
            assert f"restart {count + 1} with 4 processes" in text
        assert run.launcher.wait(PATIENCE) == 0, run.said.read_text()[-3000:]
    finally:
        run.end()
    whole = Run(tmp_path / "whole", steps)
    try:
        assert whole.launcher.wait(PATIENCE) == 0, whole.said.read_text()[-3000:]
    finally:
        whole.end()
    wanted = dict(whole.losses())
    assert set(wanted) == set(range(1, steps + 1)) == {step for step, _ in run.losses()}
    assert all(wanted[step] == loss for step, loss in run.losses())


def began_again(losses, rows):
    """The first step that was logged after so many rows and does not follow the one before; None if all do."""
    steps = [step for step, _ in losses]
    return next(
        (after for before, after in zip(steps[rows - 1 :], steps[rows:], strict=False) if after != before + 1), None
    )
