"""Chaos: faults of a seed, planted in a program without jax that resumes, or fails to in ways that must be noticed."""

import json
import os
import socket
import sys
import textwrap
from pathlib import Path
from unittest.mock import Mock

import pytest

from shardkit.runtime.cluster import memory, sockets, wall_clock
from shardkit.runtime.cluster.chaos import _differs, chaos
from shardkit.runtime.cluster.disturbed import Run
from shardkit.runtime.cluster.faults import KINDS, MAY_GO_ON, draw
from support import commands

PYTHON = [sys.executable, "-I", "-S", "-u"]  # starts in a few milliseconds

# What a training program does: resumes from the newest step that it can read, writes losses, saves now and then.
TRAINER = """
import json, os, pathlib, signal, sys, time

run = pathlib.Path(sys.argv[1])
rank, folder = int(os.environ["RANK"]), run / "saved"
folder.mkdir(parents=True, exist_ok=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
state = 0.0
for path in sorted(folder.iterdir(), key=lambda path: int(path.name) if path.name.isdigit() else -1):
    try:
        step, state = json.loads((path / "state").read_text())
    except ValueError:
        pass
step = step if state else 0
beats = [run / f"beat-{os.environ.get('SHARDKIT_RESTARTS')}-{each}" for each in (0, 1)]
while step < STEPS:
    time.sleep(0.02)
    beats[rank].touch()
    os.utime(beats[rank], (time.monotonic(), time.monotonic()))
    if WATCHES and beats[1 - rank].exists() and time.monotonic() - beats[1 - rank].stat().st_mtime > 2:
        sys.exit(70)  # as a collective would end that waits for another process
    step, state = step + 1, state / 2 + step
    if rank == 0:
        with open(run / "log.jsonl", "a") as log:
            log.write(json.dumps({"step": step, "loss": state}) + "\\n")
        if step % 5 == 0:
            new = folder / f"{step}.tmp"
            new.mkdir(exist_ok=True)
            (new / "state").write_text(json.dumps([step, state]))
            if not (folder / str(step)).exists():
                new.rename(folder / str(step))
"""


def under_faults(tmp_path, *, change=("", ""), steps=300, **options):
    script = tmp_path / "trainer.py"
    script.write_text(textwrap.dedent(TRAINER).replace("STEPS", str(steps)).replace(*change).replace("WATCHES", "True"))
    how = {"losses": "{run}/log.jsonl", "checkpoints": "{run}/saved", "patience": 20.0, "processes": 2, "latest": 0.5}
    return chaos([*PYTHON, str(script), "{run}"], folder=tmp_path / "runs", **(how | options))


@pytest.mark.check
def test_a_seed_draws_the_same_faults_and_every_kind():
    drawn = draw(3, 2 * len(KINDS), processes=4)
    assert drawn == draw(3, 2 * len(KINDS), processes=4) != draw(4, 2 * len(KINDS), processes=4)
    assert sorted(fault.kind for fault in drawn) == sorted(KINDS * 2)
    assert {fault.process for fault in draw(0, 100, processes=4)} == set(range(4))
    assert all(0 <= fault.after <= 3 for fault in drawn)


def test_a_job_that_resumes_is_recovered_from_each_fault(tmp_path):
    told = []
    kinds = ["kill", "terminate", "damage"]
    found = under_faults(tmp_path, kinds=kinds, faults=3, seed=1, told=told.append, steps=600, every=60)
    steps = [each.step // 60 for each in found]
    assert steps == sorted(set(steps)) and steps[0]  # no multiple of 60 twice: three faults in one step would be final
    assert sorted(each.fault.kind for each in found) == sorted(kinds) and len(told) == 3
    assert [each.wrong for each in found] == [""] * 3
    assert all(0 < each.detected <= each.recovered < 20 and each.resumed > each.step - 10 for each in found)


# What chaos alone would catch: a job that comes back, and is not the same.
@pytest.mark.deep
@pytest.mark.parametrize(
    ("change", "kind", "wrong"),
    [
        (("state / 2 + step", "state / 2 + step + (os.environ.get('SHARDKIT_RESTARTS') == '1')"), "kill", "and not"),
        (
            ("step, state = json.loads", "raise SystemExit(2) #"),
            "kill",
            "the job ended with 2: shardkit launch: not",
        ),
        (("WATCHES", "False"), "stop", "not detected within 2 s"),
        (("state = 0.0", "state = 0.0"), "slow", "not detected within 2 s, and it did not look for it"),
        (("exit(70)", "exit(print('shardkit guard: process 7 died') or 70)"), "kill", "did not name process"),
        (("step = step if", "step, state = 0, 0.0 #"), "kill", "was saved, and the job went on with step 1"),
    ],
)
def test_what_is_wrong_is_said(change, kind, wrong, tmp_path):
    patience = 2.0 if kind in ("stop", "slow") else 20.0
    (found,) = under_faults(tmp_path, change=change, kinds=[kind], faults=1, patience=patience, every=20)
    assert wrong in found.wrong


@pytest.mark.deep
def test_a_full_disk_and_a_clock_that_jumps(tmp_path):
    """Only a process that writes ends; and the clock of the job must reach its processes, but not its losses."""
    found = under_faults(tmp_path, kinds=["disk", "clock"], faults=4, steps=900, change=("time.sleep(0.02)", SHOWN))
    assert [each.wrong for each in found] == [""] * 4
    for each in found:
        ends = each.fault.kind == "disk" and each.fault.process == 0  # process 1 of this program writes nothing
        assert (each.detected is not None) is ends, each
    hours = [float(line) for line in (tmp_path / "runs" / "faults" / "hours").read_text().split()]
    assert {round(each) for each in hours} - {0} <= {-24, -1, 1, 24} and len({round(each) for each in hours}) > 1


SHOWN = """time.sleep(0.02)
    if rank == 0 and step % 20 == 0:
        with open("/proc/uptime") as up, open("/proc/stat") as stat, open(run / "hours", "a") as hours:
            true = float(up.read().split()[0]) + int(stat.read().partition("btime ")[2].split()[0])
            hours.write(f"{(time.time() - true) / 3600:.2f}\\n")
"""


@pytest.mark.check
def test_a_connection_of_another_process_ends():
    """It alone finds a descriptor of a wrong process, or an end in one direction only."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as here:
        there, _ = server.accept()
        with there:
            assert {here.fileno(), there.fileno()} <= set(sockets.connections(os.getpid()))
            assert server.fileno() not in sockets.connections(os.getpid())
            sockets.cut(os.getpid(), here.fileno())
            assert there.recv(1) == here.recv(1) == b""
            with pytest.raises(OSError):
                here.sendall(b"x")
    assert sockets.connections(2**22 + 1) == []


@pytest.mark.check
def test_what_a_machine_does_not_allow(tmp_path, monkeypatch):
    def forbidden(process, descriptor):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(sockets, "_take", forbidden)
    with pytest.raises(ValueError) as caught:
        under_faults(tmp_path, kinds=["link"])
    assert str(caught.value) == (
        "chaos: link needs Linux 5.6 and the right to take a connection of another process; got 'Operation not "
        "permitted'. Leave link out of kinds (--kinds)."
    )
    monkeypatch.setattr(wall_clock, "_COMPILERS", ())
    with pytest.raises(ValueError) as caught:
        under_faults(tmp_path, kinds=["clock"])
    text = "chaos: clock needs a C compiler; none was found. Install gcc, or leave clock out of kinds."
    assert str(caught.value) == text
    monkeypatch.setattr(wall_clock, "_COMPILERS", ("false",))
    with pytest.raises(ValueError) as caught:
        wall_clock.make_clock(tmp_path / "clock")
    assert "/false ended with 1: . Mend it, or leave clock out of kinds." in str(caught.value)
    spaced = tmp_path / "a b"
    spaced.mkdir()
    with pytest.raises(ValueError) as caught:
        wall_clock.make_clock(spaced / "clock")
    assert str(caught.value) == (
        f"chaos: clock needs a folder without spaces and colons in its path; got {str(spaced)!r}. Pass "
        "another folder (--folder), or leave clock out of kinds."
    )
    spaced.chmod(0o775)
    with pytest.raises(ValueError) as caught:
        chaos(["true"], folder=spaced, processes=1, losses="{run}/log", kinds=["kill"])
    assert str(caught.value) == (
        f"chaos: only this user may write into the folder, from which the job loads a library; {str(spaced)!r} "
        f"has mode 775 and owner {os.getuid()}. Pass another, or one that is missing."
    )


@pytest.mark.check
def test_what_a_run_keeps_in_memory_is_its_own_and_goes_with_it(tmp_path, monkeypatch):
    """It alone would catch runs that go on from the snapshots of the job around them, or leave theirs in memory."""
    monkeypatch.setattr(memory, "MEMORY", str(tmp_path))
    monkeypatch.setenv(memory.JOB, "around")
    started = Mock()
    monkeypatch.setattr("subprocess.Popen", started)
    run = Run(["true"], tmp_path / "run", 1, None, "{run}/log")
    with run.started(restarts=0, environ={}):
        name = started.call_args.kwargs["env"][memory.JOB]
        kept = memory.folder_of_user(tmp_path) / memory.folder_of_job(name)
        kept.mkdir(parents=True)
    assert name not in ("around", run.token) and not kept.exists()


@pytest.mark.check
def test_a_loss_that_is_not_the_undisturbed_one_is_told():
    """The first row above as a function: in the default tier, it alone sees losses that are not compared."""
    undisturbed = {1: 2.0, 2: 1.0}
    assert _differs({1: 2.0, 2: 1.0 + 1e-7}, undisturbed, 1e-6) == ""
    assert _differs({1: 2.0, 2: 1.1}, undisturbed, 1e-6) == "the loss of step 2 is 1.1 and not 1.0"
    assert _differs({3: 1.0}, undisturbed, 1e-6) == "the loss of step 3 is 1.0 and not None"


@pytest.mark.check
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"faults": 0}, "chaos: faults must be at least 1; got 0. Correct faults."),
        (
            {"checkpoints": None},
            "chaos: damage needs the directory of the checkpoints; got none. Pass checkpoints (--checkpoints).",
        ),
        (
            {"checkpoints": "/mine"},
            "chaos: checkpoints must be in the folder of a run, as damage cuts them; got '/mine'. Write {run}/saved, "
            "there and in the command.",
        ),
    ],
)
def test_wrong_options(options, error, tmp_path):
    with pytest.raises(ValueError) as caught:
        under_faults(tmp_path, **options)
    assert str(caught.value) == error


@pytest.mark.deep
def test_a_command_that_fails_by_itself(tmp_path):
    with pytest.raises(ValueError) as caught:
        under_faults(tmp_path, change=("import json", "raise SystemExit(3)\nimport json"))
    log = tmp_path / "runs" / "undisturbed" / "output"
    assert str(caught.value) == (f"chaos: the command must succeed without faults; it ended with 3. Read {log}.")
    with pytest.raises(ValueError) as caught:
        under_faults(tmp_path)
    assert str(caught.value) == (
        f"chaos: folder must be empty; got '{tmp_path / 'runs'}'. Pass another, or delete what is in it."
    )


# proves F61, F63, F66: what users are told to run
@pytest.mark.deep
def test_the_command_plants_faults_in_training(tmp_path):
    log, saved = "{run}/log.jsonl", "{run}/saved"
    train = ["-m", "shardkit", "train", "data=-1", *commands.SMALL, "--steps", 60, "--log-every", 1, "--json", log]
    words = ["-n", 2, "--devices", 2, "--faults", 3, "--latest", 1, "--folder", tmp_path, "--checkpoints", saved]
    done = commands.run("chaos", *words, "--", *train, "--checkpoint", saved, "--checkpoint-every", 3, seconds=900)
    assert done.stdout.count("detected in") == 3


# proves F61, F66: the kinds that come from within, and a link, in a program that guards its steps
@pytest.mark.deep
def test_the_example_recovers_from_every_kind(tmp_path):
    """It alone finds a bit that is flipped and saved, and a fault that the guard blames on another process."""
    program = Path(__file__).parents[3] / "examples" / "restarting.py"
    kinds = [kind for kind in KINDS if kind != "clock" or wall_clock.compiler()]
    options = ["-n", 4, "--devices", 1, "--faults", len(kinds), "--every", 15, "--folder", tmp_path / "runs"]
    options += ["--checkpoints", "{run}/saved", "--output", tmp_path / "chaos.svg", "--json", tmp_path / "chaos.json"]
    commands.run("chaos", *options, "--", program, "{run}", "--steps", 800, seconds=1200)
    rows = json.loads((tmp_path / "chaos.json").read_text())["rows"]
    assert sorted(row["kind"] for row in rows) == sorted(kinds)
    assert all(row["detected"] is not None for row in rows if row["kind"] not in MAY_GO_ON)
    assert "a fault" in (tmp_path / "chaos.svg").read_text()
