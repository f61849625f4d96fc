"""Chaos: faults of a seed, planted in a program without jax that resumes, or fails to in ways that must be noticed."""

import sys
import textwrap

import pytest

from shardkit.runtime.cluster.chaos import KINDS, _differs, chaos, draw
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
    if WATCHES and beats[1 - rank].exists() and time.time() - beats[1 - rank].stat().st_mtime > 2:
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
    drawn = draw(3, 10, processes=4)
    assert drawn == draw(3, 10, processes=4) != draw(4, 10, processes=4)
    assert sorted(fault.kind for fault in drawn) == sorted(KINDS * 2)
    assert {fault.process for fault in draw(0, 100, processes=4)} == set(range(4))
    assert all(0 <= fault.after <= 3 for fault in drawn)


def test_a_job_that_resumes_is_recovered_from_each_fault(tmp_path):
    told = []
    kinds = ["kill", "terminate", "damage"]
    found = under_faults(tmp_path, kinds=kinds, faults=3, seed=1, told=told.append, steps=600)
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
    ],
)
def test_what_is_wrong_is_said(change, kind, wrong, tmp_path):
    patience = 2.0 if kind == "stop" else 20.0
    (found,) = under_faults(tmp_path, change=change, kinds=[kind], faults=1, patience=patience)
    assert wrong in found.wrong


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
