"""Restarts: how many follow, and when; real processes that fail, and resume."""

import os
import re
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shardkit.cli import main
from shardkit.jobs import launch as module
from shardkit.jobs.launch import launch
from shardkit.jobs.output import _Pipe
from support import commands, faults
from support.refusals import refused

PYTHON = [sys.executable, "-I", "-S", "-u", "-c"]  # starts in a few milliseconds


@pytest.mark.check
def test_a_line_that_ends_in_a_return_is_shown_at_once(capfd):
    """A progress bar, which may not end a line for hours."""
    pipe = _Pipe(b"[0] ", sys.stderr, None, [])
    pipe.take(b"10%\r20%")
    assert capfd.readouterr().err == "[0] 10%\r"
    pipe.take(b"\r30%\r\ndone")
    pipe.take(b"")
    assert capfd.readouterr().err == "[0] 20%\r[0] 30%\r\n[0] done\n"


def program(text):
    """A command that runs `text`, in which `rank` and `restarts` are those of the process."""
    begin = (
        "import os, signal, sys\nrank, restarts = (int(os.environ.get(n, 0)) for n in ('RANK', 'SHARDKIT_RESTARTS'))\n"
    )
    return [*PYTHON, begin + textwrap.dedent(text)]


def test_a_job_that_failed_starts_again_until_it_succeeds(capfd, tmp_path):
    """Also that logs of earlier attempts are kept, and that a new token shuts out what was left of them."""
    text = """
        print(restarts, os.environ["WORLD_SIZE"], os.environ["SHARDKIT_JOB_TOKEN"])
        if rank == 1 and restarts == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    """
    assert launch(program(text), processes=2, restarts=2, output=tmp_path, grace=1) == 0
    err = capfd.readouterr().err
    assert re.fullmatch(
        r"shardkit launch: process 1 failed first, killed by SIGKILL \(others: .*\)\n"
        r"shardkit launch: restart 1 with 2 processes in 1 s\n",
        err,
    )
    rows = [line.split() for line in (tmp_path / "1.out").read_text().splitlines()]
    assert [row[:2] for row in rows] == [["0", "2"], ["1", "2"]] and rows[0][2] != rows[1][2]


# proves F70: planted from outside, as an engine, a person or the system would
def test_a_process_that_is_killed_comes_back(tmp_path):
    text = f"""
        import time
        open(f"{tmp_path}/{{rank}}", "w").close()
        time.sleep(0 if restarts else 600)
    """
    with ThreadPoolExecutor() as pool:
        code = pool.submit(launch, program(text), processes=2, restarts=1, grace=0.2)
        end = time.monotonic() + 120
        while len(list(tmp_path.iterdir())) < 2:
            assert time.monotonic() < end
            time.sleep(0.01)
        faults.plant("kill", os.getpid(), 1, None)
        assert code.result(120) == 0


@pytest.mark.parametrize(("code", "starts"), [(3, 3), (2, 1)])  # an exit code 2 is a wrong command
def test_a_job_that_fails_each_time_starts_so_many_times(code, starts, capfd, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_LONGEST_WAIT", 0.1)
    assert launch(program(f"sys.exit({code})"), processes=1, restarts=2, output=tmp_path) == code
    lines = [line for line in capfd.readouterr().err.splitlines() if "restart" in line]
    assert lines == [f"shardkit launch: restart {i} with 1 process in 0.1 s" for i in range(1, starts)]


@pytest.mark.check
def test_a_limit_is_no_negative_number():
    assert refused(lambda: launch(["true"], processes=2, restarts=-1)) == (
        "launch: restarts must be a whole number of at least 0; got -1. Pass restarts=0 or more."
    )


@pytest.mark.check
def test_restarts_are_no_option_of_a_manifest(monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["shardkit", "launch", "--render", "slurm", "--restarts", "2", "--", "true"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "--restarts must not come with --render slurm" in " ".join(capfd.readouterr().err.split())


# proves F63, F70: a run that lost a process ends with the numbers of one that did not
@pytest.mark.deep
def test_a_killed_job_ends_with_the_same_numbers(tmp_path):
    """Two processes train and save; one is killed, once, after a save; the job comes back by itself."""
    script = tmp_path / "killed_once.py"
    script.write_text(KILLED_ONCE)
    losses = []
    for name, options in (("whole", []), ("killed", ["--restarts", "2"])):
        saved = tmp_path / name
        sizes = ["--layers", 1, "--dim", 32, "--length", 32, "--batch", 16, "--steps", 12, "--save-every", 2]
        words = [script, saved if options else "never", TRAIN_TEXT, "data=-1", *sizes, "--checkpoint", saved]
        done = commands.run("launch", "-n", 2, "--devices", 2, *options, "--", *words)
        assert ("restart 1 with 2 processes" in done.stderr) == bool(options)
        losses.append(re.findall(r"held-out loss \S+", done.stdout + done.stderr)[-1])
    assert losses[0] == losses[1]


TRAIN_TEXT = Path(__file__).parents[2] / "examples" / "train_text.py"

KILLED_ONCE = """
import os, runpy, signal, sys, threading, time

def kill(saved):
    while not os.path.isdir(saved) or len(os.listdir(saved)) < 2:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

saved, program = sys.argv.pop(1), sys.argv.pop(1)
if os.environ["RANK"] == "1" and os.environ.get("SHARDKIT_RESTARTS") == "0":
    threading.Thread(target=kill, args=[saved], daemon=True).start()
runpy.run_path(program, run_name="__main__")
"""
