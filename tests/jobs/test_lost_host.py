"""A job on three hosts, network namespaces on one switch: one is cut off, the others end, and go on without it."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time

import pytest

from shardkit.runtime.channel.place import TOKEN
from support import commands, jobs
from support.namespaces import switched

HOSTS = ("alpha", "beta", "gamma")


def rows(folder):
    log = folder / "log.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


@contextlib.contextmanager
def started(switch, hosts, folder, steps):
    """One process on each host, as an engine starts them."""
    environ = commands.environment() | {"PYTHONPATH": jobs.PATH, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    environ |= {TOKEN: secrets.token_hex(32), "JAX_COORDINATOR_ADDRESS": "alpha:29400"}
    environ |= {"JAX_NUM_PROCESSES": str(len(hosts))}
    words = [sys.executable, jobs.WORKERS / "cut.py", folder, steps]
    running = []
    try:
        for rank, host in enumerate(hosts):
            own = environ | {"JAX_PROCESS_ID": str(rank)}
            command = switch.command(host, words)
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            running.append(subprocess.Popen(command, env=own, text=True, start_new_session=True, **pipes))
        yield running
    finally:
        for process in running:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.mark.clock  # who is silent for 4 s is lost: cut.py
@pytest.mark.deep
def test_a_host_that_is_cut_off(tmp_path):
    """It alone shows that jax, monitors and checkpoints go through the loss of a host, and a smaller job resumes."""
    with switched(HOSTS, tmp_path) as switch:
        with started(switch, HOSTS, tmp_path, 10**6) as running:
            end = time.monotonic() + 120
            while len(rows(tmp_path)) < 12:
                assert time.monotonic() < end and all(process.poll() is None for process in running)
                time.sleep(0.1)
            switch.cable("gamma", "down")
            said = [process.communicate(timeout=60)[0] for process in running]  # also the one that is alone
            assert [process.returncode for process in running] == [76, 76, 76], said
        for text in said[:2]:
            assert "guard: process 2 on gamma has not answered for" in text.splitlines()[-1], text
        last = rows(tmp_path)[-1]["step"]
        with started(switch, HOSTS[:2], tmp_path, last + 5) as running:
            said = [process.communicate(timeout=120)[0] for process in running]
            assert [process.returncode for process in running] == [0, 0], said
    found = rows(tmp_path)
    assert {row["devices"] for row in found} == {2, 3} and found[-1] | {"loss": 0} == {
        "step": last + 4,
        "loss": 0,
        "devices": 2,
    }
    (tmp_path / "whole").mkdir()
    alone = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": jobs.PATH}
    words = [sys.executable, jobs.WORKERS / "cut.py", tmp_path / "whole", last + 5]
    subprocess.run(list(map(str, words)), env=commands.environment() | alone, check=True)
    wanted = {row["step"]: row["loss"] for row in rows(tmp_path / "whole")}
    assert all(row["loss"] == pytest.approx(wanted[row["step"]], rel=1e-5) for row in found)
