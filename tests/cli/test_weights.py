"""A saved run of the command: asked again, gone on with, and what another run starts from."""

import jax
import numpy as np
import pytest

import shardkit as sk
from shardkit.cli.train import Options
from shardkit.cli.training import TrainingRun, first_state
from shardkit.runtime import Checkpoints
from support.commands import rows

SIZES = {"layers": 1, "dim": 8, "heads": 2, "length": 16, "batch": 8, "steps": 2}
TINY = [word for name, size in SIZES.items() for word in (f"--{name}", size)]


def run_of(word, corpus, **options):
    """A run on two devices of one axis, of these options and SIZES."""
    given = Options(mesh=(f"{word}=2",), data=(corpus,), **(SIZES | options))
    return TrainingRun(given, sk.make_mesh(jax.devices()[:2], **{word: 2}))


def same(found, wanted):
    for x, y in zip(*map(jax.tree.leaves, (sk.unpadded(found), sk.unpadded(wanted))), strict=True):
        np.testing.assert_array_equal(x, y)


# proves F62: on the command, a finished run on another mesh
def test_a_finished_run_says_its_loss_again_on_another_mesh(inside, corpus, tmp_path):
    saved, out, again = tmp_path / "run", tmp_path / "run.json", tmp_path / "again.json"
    train = ["--data", corpus, "--checkpoint", saved, *TINY]
    first = inside("train", "fsdp=2", *train, "--json", out)
    second = inside("train", "data=2", *train, "--json", again)
    assert f"checkpoint: step 2 of {saved}; already finished\ndone: 2 steps\n" in second.stdout
    losses = [rows(file)[-1]["validation_loss"] for file in (out, again)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    last = f"validation loss {losses[0]:.3f} nats per byte on held-out text"
    assert first.stdout.splitlines()[-1] == second.stdout.splitlines()[-1] == last


def test_a_run_starts_from_the_parameters_of_another(corpus, tmp_path):
    first = run_of("fsdp", corpus)
    state = first.init(first.params, jax.random.key(7))
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(state, position=0)
    found, saved, said = first_state(run_of("model", corpus, init_from=tmp_path / "run"), None)
    assert int(found.step) == 0 and saved is None
    assert said == f"parameters: those of {tmp_path / 'run'}; the optimizer starts from step 0"
    same(found.params, state.params)


def test_a_run_goes_on_where_another_mesh_left_it_with_what_may_change(corpus, tmp_path):
    first = run_of("data", corpus)
    state = first.init(first.params, jax.random.key(0))
    state = state._replace(step=jax.device_put(np.int32(2), state.step.sharding))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, position=16, config=first.settings)
        checkpoints.wait()
        how = {"checkpoint": tmp_path, "steps": 10, "change": ("steps",)}
        found, saved, said = first_state(run_of("fsdp", corpus, **how), checkpoints)
    assert said == f"checkpoint: step 2 of {tmp_path}; resuming with --steps 10 (was 2)"
    assert int(found.step) == saved.step == 2
    same((found.params, found.opt_state), (state.params, state.opt_state))
