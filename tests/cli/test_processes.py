"""`shardkit train` over several processes: the numbers of one process, going on after any end, and agreeing on one."""

import signal
import subprocess
import sys
import time

import pytest

from support.commands import environment, rows

SMALL = ["--layers", "1", "--dim", "32", "--heads", "2", "--length", "32", "--batch", "8", "--evaluate-every", "1000"]


def command(corpus, folder, mesh, *words, processes=1, devices=2):
    train = ["train", *mesh.split(), "--data", str(corpus), "--json", str(folder / "out.json"), *SMALL, *words]
    shardkit = [sys.executable, "-m", "shardkit"]
    if processes == 1:
        return [*shardkit, *train]
    return [*shardkit, "launch", "-n", str(processes), "--devices", str(devices), "--", "-m", "shardkit", *train]


def run(*args, **options):
    ended = subprocess.run(command(*args, **options), capture_output=True, text=True, timeout=240, env=environment())
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


@pytest.fixture
def alone(inside, corpus):
    """Runs the command in this process."""

    def run(folder, mesh, *words, code=0):
        ended = inside(*command(corpus, folder, mesh, *words)[3:], code=code)
        return ended.stdout + ended.stderr

    return run


def losses(folder):
    return {row["step"]: row["loss"] for row in rows(folder / "out.json", "step")}


@pytest.mark.deep
def test_two_processes_train_as_one_does(corpus, tmp_path):
    (one := tmp_path / "one").mkdir(), (two := tmp_path / "two").mkdir()
    run(corpus, one, "data=2 fsdp=2", "--steps", "12")
    printed = run(corpus, two, "data=2 fsdp=2", "--steps", "12", "--verify", "2", processes=2)
    assert losses(one).keys() == losses(two).keys()
    for step, loss in losses(one).items():
        assert losses(two)[step] == pytest.approx(loss, rel=1e-6)
    assert "[0] verify: after 2 steps the loss differs from one device's by" in printed
    assert "[1] mesh" not in printed  # only process 0 speaks


@pytest.mark.deep
def test_a_notice_ends_all_after_the_same_step(corpus, tmp_path):
    words = ["--steps", "100000", "--checkpoint", str(tmp_path / "c"), "--checkpoint-every", "20"]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    job = subprocess.Popen(command(corpus, tmp_path, "data=4", *words, processes=2), env=environment(), **options)
    until = time.monotonic() + 120
    while not (tmp_path / "c" / "20").exists() and job.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    job.send_signal(signal.SIGTERM)
    printed, _ = job.communicate(timeout=60)
    assert job.returncode == 75, printed
    assert "shardkit launch: all processes were preempted, and exited with code 75" in printed
    newest = max(int(path.name) for path in (tmp_path / "c").glob("[0-9]*"))
    assert f"preempted after step {newest}: {newest} steps" in printed


def test_a_directory_that_cannot_be_written_is_refused_at_once(alone, tmp_path):
    (tmp_path / "file").write_text("")
    printed = alone(tmp_path, "data=2", "--checkpoint", tmp_path / "file", code=2)
    assert "error: Checkpoints: directory must be writable; " in printed and "text:" not in printed


# proves F16: copies are compared, and what is not finite is found
def test_a_loss_that_is_not_finite_is_looked_into(alone, tmp_path):
    words = ["--learning-rate", "1e30", "--steps", "6", "--compare-replicas", "1"]
    printed = alone(tmp_path, "data=2 fsdp=2", *words, code=3)
    assert "not finite before the cross-device reduction:" in printed
    assert "grads.layers.query" in printed
    assert "a gradient is not finite. The parameters are as before the step" in printed
