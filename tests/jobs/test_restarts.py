"""Restarts: which follow which faults, and when; real processes that fail, and resume."""

import os
import re
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardkit.cli import main
from shardkit.jobs.launch import Attempt, after, launch
from shardkit.jobs.output import Blamed, _Pipe
from support import commands, faults

PYTHON = [sys.executable, "-I", "-S", "-u", "-c"]  # starts in a few milliseconds


def failed(steps, *, in_step=True, code=1, seconds=10.0, pause=0.0, signalled=False):
    """Attempts that failed in these steps, one after another."""
    began, past = 0.0, []
    for step in steps:
        past.append(Attempt(code, step, in_step and step is not None, began, began + seconds, signalled))
        began += seconds + pause
    return past


def following(past, restarts=5):
    return after(past, restarts)


@pytest.mark.check
def test_a_job_that_got_further_starts_again_at_once():
    assert following(failed([7])) == 1.0
    assert following(failed([7, 9, 20])) == 0.0
    assert following(failed([None, 7])) == 0.0
    assert following(failed([None, None], seconds=601)) == 0.0  # no guard, so time is what is known


@pytest.mark.check
def test_a_job_that_does_not_get_further_waits_longer():
    assert following(failed([7, 7])) == 2.0
    assert following(failed([7, 6])) == 2.0
    assert following(failed([None, None, None, None])) == 8.0
    assert following(failed([7, 7, 9])) == 0.0
    assert following(failed([None] * 12), restarts=99) == 60.0


@pytest.mark.check
def test_what_is_final():
    assert following(failed([7], signalled=True)) == ""
    assert following(failed([7]), restarts=0) == ""
    assert following(failed([7], code=2)) == "not restarted: exit code 2 says that the command is wrong"
    assert following(failed([7, 7, 7])) == (
        "not restarted: step 7 failed 3 times in a row. Look at its batch, number 7 from 0"
    )
    assert following(failed([7, 8, 7, 7])) == 4.0
    assert following(failed([7, 7, 7], in_step=False)) == 4.0  # a full disk, a lost machine: no batch is at fault


@pytest.mark.check
def test_the_limit_is_one_of_an_hour():
    past = failed(range(6), pause=60.0)
    assert following(past[:5]) == 0.0
    assert following(past) == (
        "not restarted: 5 restarts in an hour are the limit. Mend the cause, or raise --restarts"
    )
    assert following(failed(range(60), pause=900.0)) == 0.0  # four an hour, for fifteen hours


@pytest.mark.check
@pytest.mark.parametrize(
    ("line", "blamed"),
    [
        (b"shardkit guard: process 3 failed in step 57: ValueError: step 9", Blamed(3, 57, True)),
        (b"shardkit guard: process 3 on node-a.x failed in step 57: ValueError: step 9", Blamed(3, 57, True)),
        (b"shardkit guard: process 3 on node-a.x failed saving after step 5: ValueError", Blamed(3, 5, False)),
        (b"shardkit guard: process 0 died without reporting an error (SIGKILL?) in step 4", Blamed(0, 4, True)),
        (b"shardkit guard: processes 1, 2 timed out waiting for the data of step 12: 10.1 s", Blamed(1, 12, False)),
        (
            b"shardkit guard: process 2 failed in startup, before its first step: ValueError: step 3",
            Blamed(2, None, False),
        ),
        (b"shardkit guard: process 0 failed saving after step 4: RuntimeError: No space left", Blamed(0, 4, False)),
        (
            b"shardkit guard: process 1 died without reporting an error (?) in user code after step 9.",
            Blamed(1, 9, False),
        ),
        (b"shardkit guard: process 1 died without reporting an error (?), last seen in step 4.", Blamed(1, 4, False)),
        (b"shardkit guard: process 1 has not answered for 30 s, last seen in step 41.", Blamed(1, 41, False)),
        (b"shardkit guard: process 1 failed compiling step 0: XlaRuntimeError", Blamed(1, 0, False)),
        (b"shardkit guard: process 1 died of a fatal signal (Aborted) in step 4.", Blamed(1, 4, True)),
        (b"shardkit guard: all processes died of a fatal signal (Aborted) in step 4: jax ends them", None),
        (b"a line about step 3", None),
    ],
)
def test_the_guards_line_names_process_and_step(line, blamed, capfd):
    found = []
    _Pipe(b"", sys.stderr, None, found).take(line + b"\n")
    assert found == [blamed] * (blamed is not None)


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


def test_a_poison_step_is_named(capfd):
    text = """
        print(f"shardkit guard: process {rank} failed in step 5: ValueError: a bad batch", file=sys.stderr)
        sys.exit(70)
    """
    assert launch(program(text), processes=1, restarts=9) == 70
    assert capfd.readouterr().err.splitlines()[-1] == (
        "shardkit launch: not restarted: step 5 failed 3 times in a row. Look at its batch, number 5 from 0"
    )


@pytest.mark.check
def test_a_limit_is_no_negative_number():
    with pytest.raises(ValueError) as caught:
        launch(["true"], processes=2, restarts=-1)
    assert (
        str(caught.value) == "launch: restarts must be a whole number of at least 0; got -1. Pass restarts=0 or more."
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
        saved, results = tmp_path / name, tmp_path / f"{name}.json"
        train = ["train", "data=-1", *commands.SMALL, "--steps", 12, "--checkpoint-every", 2]
        words = [
            *options,
            "--",
            script,
            saved if options else "never",
            *train,
            "--checkpoint",
            saved,
            "--json",
            results,
        ]
        said = commands.run("launch", "-n", 2, "--devices", 2, *words).stderr
        assert ("restart 1 with 2 processes" in said) == bool(options)
        losses.append(commands.rows(results)[-1]["validation_loss"])
    assert losses[0] == losses[1]


KILLED_ONCE = """
import os, runpy, signal, sys, threading, time

def kill(saved):
    while not os.path.isdir(saved) or len(os.listdir(saved)) < 2:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

saved = sys.argv.pop(1)
if os.environ["RANK"] == "1" and os.environ.get("SHARDKIT_RESTARTS") == "0":
    threading.Thread(target=kill, args=[saved], daemon=True).start()
runpy.run_module("shardkit", run_name="__main__")
"""
