"""A job on three hosts, network namespaces on one switch: one is cut off, the others go on, it comes back."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from shardkit.runtime.channel.place import TOKEN
from support import commands, jobs
from support.namespaces import switched

HOSTS = ("alpha", "beta", "gamma")
SNAPSHOT_EVERY = 2


def rows(folder):
    log = folder / "log.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def until(condition, running, seconds, what):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"no {what} within {seconds} s"
        assert all(process.poll() is None for process in running), f"a launcher ended before {what}"
        time.sleep(0.1)
    return time.monotonic()


@pytest.mark.deep
def test_a_host_that_is_cut_off_and_comes_back(tmp_path):
    """It alone shows that jax, its monitors, its snapshots and checkpoints go through the loss of a host."""
    environ = commands.environment() | {TOKEN: "secret", "PYTHONPATH": jobs.PATH}
    script = jobs.WORKERS / "cut.py"
    options = ["-n", 1, "--devices", 1, "--hosts", 3, "--min-hosts", 2, "--meet", "alpha:29400", "--restarts", 3]
    options += ["--silence", 4, "--wait", 5, "--patience", 200, "--grace", 5]
    with switched(HOSTS, tmp_path) as switch, contextlib.ExitStack() as stack:
        running = []
        for name in HOSTS:
            said = stack.enter_context(open(tmp_path / f"{name}.log", "wb"))
            words = switch.command(name, commands.command("launch", *options, "--", script, tmp_path, 0))
            running.append(subprocess.Popen(words, env=environ, stdout=said, stderr=said, start_new_session=True))
            stack.callback(end, running[-1])
        until(lambda: len(rows(tmp_path)) >= 5, running, 120, "first steps")
        before = rows(tmp_path)[-1]["step"]
        cut = time.monotonic()
        switch.cable("gamma", "down")
        again = until(lambda: rows(tmp_path)[-1]["restarts"] == 1, running, 120, "restart on two hosts") - cut
        until(lambda: len(rows(tmp_path)) >= before + 8, running, 60, "steps on two hosts")
        assert rows(tmp_path)[-1]["devices"] == 2
        plugged = time.monotonic()
        switch.cable("gamma", "up")
        back = until(lambda: rows(tmp_path)[-1]["restarts"] == 2, running, 120, "restart on three hosts") - plugged
        codes = [process.wait(120) for process in running]
    said = {name: (tmp_path / f"{name}.log").read_text() for name in HOSTS}
    print(f"seconds until the next loss: {again:.1f} after the cut, {back:.1f} after the link was back")
    assert codes == [0, 0, 0], said
    found = rows(tmp_path)
    attempts = [[row for row in found if row["restarts"] == n] for n in range(3)]
    assert [{row["devices"] for row in rows_} for rows_ in attempts] == [{3}, {2}, {3}]
    lost = attempts[0][-1]["step"] + 1 - attempts[1][0]["step"]
    assert 0 <= lost <= 2 * SNAPSHOT_EVERY and attempts[2][0]["step"] == attempts[1][-1]["step"] + 1, said
    assert "host gamma is left out: it was not heard for 4 s" in said["alpha"]
    assert "lost the meeting at alpha:29400; it tries to come back for 200 s" in said["gamma"]
    assert "restart 2: 3 processes on 3 of 3 hosts (alpha, beta, gamma)" in said["gamma"]
    (tmp_path / "whole").mkdir()
    whole = [sys.executable, script, tmp_path / "whole", found[-1]["step"] + 1]
    alone = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    subprocess.run(list(map(str, whole)), env=commands.environment() | alone | {"PYTHONPATH": jobs.PATH}, check=True)
    wanted = {row["step"]: row["loss"] for row in rows(tmp_path / "whole")}
    assert all(row["loss"] == pytest.approx(wanted[row["step"]], rel=1e-5) for row in found)


def end(process):
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
