"""Checkpoints of several processes: saved by some, restored by others, and saved together on a notice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkit.runtime.checkpoint.checkpoints import Checkpoints, latest_step
from shardkit.runtime.cluster.preemption import PREEMPTED
from support.checkpoint_child import digests
from support.checkpoint_rows import KEY, batch, make, params
from support.checkpoint_runs import start, wait_until
from support.jobs import free_port


class Job:
    """Processes of one run; `reports` are theirs, in order."""

    def __init__(self, tmp_path: Path, name: str, row: str, processes: int, devices: int, **options: Any):
        self.output = tmp_path / name
        self.output.mkdir()
        self.paths = [self.output / f"{index}.json" for index in range(processes)]
        port = free_port()
        self.children = [
            start(
                self.output,
                row=row,
                devices=devices,
                processes=processes,
                index=index,
                port=port,
                report=str(path),
                **options,
            )
            for index, path in enumerate(self.paths)
        ]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: Any) -> None:
        for child in self.children:
            child.kill()
            child.wait()

    @property
    def reports(self) -> list[Any]:
        return [json.loads(path.read_text()) for path in self.paths]

    def codes(self, seconds: float = 300) -> list[int]:
        try:
            return [child.wait(seconds) for child in self.children]
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {seconds} s:\n{(self.output / 'output').read_text()}")


def ran(tmp_path: Path, name: str, *shape: Any, **options: Any) -> Any:
    """What process 0 of a run saw."""
    with Job(tmp_path, name, *shape, **options) as job:
        assert not any(job.codes()), (job.output / "output").read_text()
        reports = job.reports
    assert all(report["ended"] == reports[0]["ended"] for report in reports)
    return reports[0]


ONE_PROCESS = {"tp": "tp", "pipeline": "unequal stages, fsdp padded", "one device": "one device"}


def told_to_end(tmp_path: Path, told: int, steps: int, processes: int = 3) -> tuple[list[Any], float]:
    """What so many processes saw until one of them, after that many steps, was told to end; the seconds to the end."""
    directory = tmp_path / "directory"
    options = {"directory": str(directory), "steps": 10**6, "every": 7, "pause": 0.02}
    row = {2: "zero1", 3: "three"}[processes]
    with Job(tmp_path, "job", row, processes, 1, **options) as job:
        wait_until(lambda: (latest_step(directory) or 0) >= steps, job.children[told], job.output)
        os.kill(job.children[told].pid, signal.SIGTERM)
        codes = job.codes()
        ended = time.time()
        assert codes == [PREEMPTED] * processes, (job.output / "output").read_text()
        reports = job.reports
    assert {report["step"] for report in reports} == {latest_step(directory)}
    with Checkpoints(directory) as checkpoints:
        _, run = checkpoints.restore(make("one device").init.abstract(params()))
    assert run.step == run.position == latest_step(directory)
    return reports, ended - max(report["at"] for report in reports)


# proves F61, F62, F63, S124: one process saves, two go on, one of them is told to end, and one process goes on
def test_any_number_of_processes_goes_on(tmp_path):
    init, step = make("one device")
    state = init(params(), KEY)
    for position in range(2):
        state, _ = step(state, batch(position))
    with Checkpoints(tmp_path / "directory") as checkpoints:
        checkpoints.save(state, position=2)
    saved = digests(state)
    _, metrics = step(state, batch(2))
    for each in told_to_end(tmp_path, told=1, steps=7, processes=2)[0]:
        assert (each["resumed"], each["began"]) == (2, saved)
        np.testing.assert_allclose(each["losses"][0], metrics["loss"], rtol=1e-5)


@pytest.mark.clock  # all end within 5 s
@pytest.mark.deep
@pytest.mark.parametrize("told", [0, 1, 2])
def test_a_notice_to_one_of_three_saves_the_same_step_on_all(told, tmp_path):
    _, seconds = told_to_end(tmp_path, told, steps=7)
    assert seconds < 5


@pytest.mark.deep
def test_two_processes_save_and_others_go_on(tmp_path):
    directory = tmp_path / "directory"
    saved = ran(tmp_path, "first", "fsdp", 2, 2, directory=str(directory), steps=2, every=2)
    assert {*os.listdir(directory)} == {"2", ".lock"}
    found = ran(tmp_path, "dp", "dp", 4, 1, directory=str(directory), steps=3, every=9)
    assert (found["resumed"], found["began"]) == (2, saved["ended"])
    losses = {"dp": found["losses"][0]}
    for name, row in ONE_PROCESS.items():
        init, step = make(row)
        with Checkpoints(directory) as checkpoints:
            state, run = checkpoints.restore(init.abstract(params()), step=2)
        assert run.position == 2
        assert digests(state) == saved["ended"], name
        losses[name] = float(step(state, batch(2))[1]["loss"])
    np.testing.assert_allclose([*losses.values()], losses["one device"], rtol=1e-5)


@pytest.mark.deep
@pytest.mark.parametrize("damaged", ["stop", "older"])
def test_damage_that_one_process_finds_is_agreed_on(damaged, tmp_path):
    """The other one went on with the newest step, and waited for ever."""
    directory = tmp_path / "directory"
    ran(tmp_path, "first", "fsdp", 2, 2, directory=str(directory), steps=4, every=2)
    again: dict[str, Any] = {
        "directory": str(directory),
        "steps": 5,
        "every": 9,
        "damaged": damaged,
        "unreadable": [1, 4],
    }
    with Job(tmp_path, "again", "fsdp", 2, 2, **again) as job:
        codes = job.codes()
        printed = (job.output / "output").read_text()
        if damaged == "stop":
            assert all(codes), printed
            assert "step 4" in printed and "pass step=2" in printed
        else:
            assert not any(codes) and [each["resumed"] for each in job.reports] == [2, 2], printed
