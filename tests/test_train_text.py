"""`examples/train_text.py`, as `make train` and a researcher run it."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardkit as sk
from shardkit.models import transformer
from support.commands import deep, environment

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_text.py"
SMALL = ["--layers", "2", "--dim", "16", "--length", "16", "--batch", "8"]


@pytest.fixture
def example():
    return runpy.run_path(str(EXAMPLE))


def run(*words, launched=()):
    """What the program prints, in processes of its own."""
    command = [sys.executable, *(launched or ()), str(EXAMPLE), *map(str, words), *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | environment())
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# The whole program, verification and held-out loss included, on the axes of one layer.
@pytest.mark.parametrize(
    "mesh",
    [
        "data=2 fsdp=2 model=2",
        deep("data=8"),
        deep("data=2 stage=2 model=2"),
        deep("stage=2 model=2 context=2"),
    ],
)
def test_it_trains_with_the_numbers_of_one_device(mesh, example, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_text.py", *mesh.split(), "--steps", "3", "--verify", "2", *SMALL])
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        example["main"]()
    printed = capsys.readouterr().out
    assert "verify: loss, gradients and parameters of 2 steps are those of one device\n" in printed
    losses = re.findall(r"loss (\d\.\d+)", printed)
    assert len(losses) == 2 and all(4 < float(loss) < 7 for loss in losses)  # of step 3, and of what is held out


def test_a_step_that_is_wrong_ends_it_with_what_differs(example):
    """A verdict that is always the good one."""
    config = transformer.Config(layers=1, dim=8, heads=4, hidden=16)
    mesh = sk.make_mesh(jax.devices()[:2], data=2)
    _, loss_fn, plan = example["make_model"](config, {"data": 2}, 8)

    def wrong(params, batch, keys):
        mean, metrics = loss_fn(params, batch, keys)
        return sk.Mean(1.01 * mean.total, mean.weight), metrics

    text = np.arange(200, dtype=np.uint8)
    batches = [example["draw_batch"](text, 1, 8, 4)]
    with pytest.raises(SystemExit) as ended, jax.numpy_dtype_promotion("standard"):
        example["verify"](config, sk.value_and_grad(wrong), optax.sgd(0.1), mesh, plan, batches)
    assert str(ended.value).startswith("verify: assert_same_training: on mesh data=2 with plan dp('data'), step 0: ")
    assert "the loss must equal one device's" in str(ended.value)


# proves F66: a batch follows from its number, and the rows of a smaller batch are those of a larger one
@pytest.mark.check
def test_a_batch_is_a_function_of_its_number(example):
    text = np.arange(200, dtype=np.uint8)
    few, many = (example["draw_batch"](text, 3, batch, 6)["tokens"] for batch in (4, 16))
    np.testing.assert_array_equal(few, many[:4])
    again, other = (example["draw_batch"](text, number, 4, 6) for number in (3, 4))
    np.testing.assert_array_equal(again["tokens"], few)
    np.testing.assert_array_equal(again["targets"], few + 1)
    assert not np.array_equal(other["tokens"], few) and again["tokens"].dtype == jnp.int32


@pytest.mark.deep
def test_it_goes_on_on_another_mesh_and_in_several_processes(tmp_path):
    """The numbers of an undisturbed run, after a save on one mesh and in two processes."""

    def held_out(printed):
        return float(re.search(r"held-out loss (\d\.\d+)", printed)[1])

    saved = ("--checkpoint", tmp_path / "a")
    whole = held_out(run("data=4", "--simulate", "--steps", 6))
    assert held_out(run("fsdp=2", "--simulate", "--steps", 6, *saved)) == pytest.approx(whole, abs=2e-4)
    again = run("model=2", "--simulate", "--steps", 6, *saved)
    assert "goes on after step 6\n" in again and held_out(again) == pytest.approx(whole, abs=2e-4)
    launched = ("-m", "shardkit", "launch", "-n", "2", "--devices", "2", "--")
    assert held_out(run("data=2", "fsdp=2", "--steps", 6, launched=launched)) == pytest.approx(whole, abs=2e-4)
