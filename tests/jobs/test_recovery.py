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
            options = {"stdout": said, "stderr": said, "start_new_session": True}
            self.launcher = subprocess.Popen(
                commands.command("launch", *words, "--deadline", 5), env=commands.environment(), **options
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
    "link": "guard: process|killed by SIGABRT",  # jax may end all of them first
}


# proves F61, F63, F66, F70: each kind of fault once, and each loss of the job has the bits of the undisturbed run
@pytest.mark.clock  # each phase has 5 s
@pytest.mark.deep
@pytest.mark.parametrize("rank", [0, 1])
def test_a_job_recovers_from_every_kind_of_fault(tmp_path, rank):
    """It alone finds a job that comes back and is not the same, or a saved step that is lost."""
    kinds = [kind for kind in faults.KINDS if kind != "disk" or rank == 0]  # process 0 writes the log
    run, rows = Run(tmp_path / "disturbed", 10**6, restarts=len(kinds)), 0
    try:
        for restart, kind in enumerate(kinds, 1):
            run.until(lambda: len(run.losses()) > rows + 20, f"steps before {kind}")
            before, said = faults.steps(run.saved), run.said.stat().st_size
            faults.plant(kind, run.launcher.pid, rank, run.saved)
            run.until(lambda: f"restart {restart} with 4 processes" in run.said.read_text(), f"restart after {kind}")
            rows, text = len(run.losses()), run.said.read_bytes()[said:].decode()
            assert re.search(SAID[kind].format(r=rank), text), (kind, text)
            run.until(lambda: len(run.losses()) > rows, f"steps after {kind}")
            assert run.losses()[rows][0] > before[-2 if kind == "damage" else -1], (kind, before, text)
    finally:
        run.end()
    last = max(step for step, _ in run.losses())
    whole = Run(tmp_path / "whole", last)
    try:
        assert whole.launcher.wait(PATIENCE) == 0, whole.said.read_text()[-3000:]
    finally:
        whole.end()
    wanted = dict(whole.losses())
    assert {step for step, _ in run.losses()} == set(wanted)
    assert all(wanted[step] == loss for step, loss in run.losses())
