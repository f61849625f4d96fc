"""A saved run of the command: evaluated, sampled, gone on with, and what another run starts from."""

import json

import jax
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

import shardkit as sk
from shardkit.cli.train import Options
from shardkit.cli.training import Run, first_state
from shardkit.runtime import Checkpoints, save_params
from support.commands import rows

SIZES = {"layers": 1, "dim": 8, "heads": 2, "length": 16, "batch": 8, "steps": 2}
TINY = [word for name, size in SIZES.items() for word in (f"--{name}", size)]


def run_of(word, corpus, **options):
    """A run on two devices of one axis, of these options and SIZES."""
    given = Options(mesh=(f"{word}=2",), data=(corpus,), **(SIZES | options))
    return Run(given, sk.make_mesh(jax.devices()[:2], **{word: 2}))


def same(found, wanted):
    for x, y in zip(*map(jax.tree.leaves, (sk.unpadded(found), sk.unpadded(wanted))), strict=True):
        np.testing.assert_array_equal(x, y)


# proves F62: on the command, the parameters of a run, evaluated on another mesh and sampled on one device
def test_a_saved_run_is_evaluated_sampled_and_asked_again(inside, corpus, tmp_path):
    saved, out = tmp_path / "run", tmp_path / "run.json"
    train = ["train", "fsdp=2", "--data", corpus, "--checkpoint", saved, *TINY]
    first = inside(*train, "--json", out)
    loss = rows(out)[-1]["validation_loss"]

    done = inside("evaluate", saved, "data=2", "--json", tmp_path / "evaluated.json")
    (found,) = json.loads((tmp_path / "evaluated.json").read_text())["rows"]
    assert found["validation_loss"] == pytest.approx(loss, rel=1e-5) and found["step"] == 2
    assert f"step 2 of {saved}; plan: dp('data'); " in done.stdout
    assert f"validation loss {loss:.3f} nats per byte, accuracy {found['accuracy']:.1%}, on held-out " in done.stdout

    texts = [inside("sample", saved, "--prompt", "the ", "--bytes", 3, "--temperature", t).stdout for t in (0, 0)]
    assert texts[0] == texts[1] and texts[0].startswith("the ")

    again = inside(*train, "--json", tmp_path / "again.json")
    assert f"checkpoint: step 2 of {saved}; already finished\ndone: 2 steps\n" in again.stdout
    last = f"validation loss {loss:.3f} nats per byte on held-out text"
    assert first.stdout.splitlines()[-1] == again.stdout.splitlines()[-1] == last
    assert rows(tmp_path / "again.json")[-1]["validation_loss"] == loss

    none = tmp_path / "none"
    for command in ("evaluate", "sample"):
        assert inside(command, none, code=2).stderr == (
            f"error: {command}: RUN must be a directory of checkpoints from shardkit train --checkpoint; {none} has no "
            "finished step. Correct the path.\n"
        )
    for words, message in (
        (["evaluate", saved, "dta=2"], "evaluate: the axis must be one of 'data', 'fsdp', "),
        (["evaluate", saved, "--batch", 0], "evaluate: --batch must be at least 1; got 0. Pass 1 or more."),
        (["evaluate", saved, "--step", 5], f"restore: '{saved}' has no finished step 5; it has 2. Pass one of these"),
        (["sample", saved, "--bytes", 0], "sample: --bytes must be at least 1; got 0. Pass 1 or more."),
        (["sample", saved, "--temperature", -1], "sample: --temperature must be at least 0; got -1.0. Pass 0 or more."),
        (["sample", saved, "--prompt", ""], "sample: --prompt must have a character to continue; got none. Pass for"),
    ):
        error = inside(*words, code=2).stderr
        assert error.startswith(f"error: {message}") and len(error.splitlines()) == 1


def test_a_checkpoint_of_another_program(inside, tmp_path):
    grad_fn, mesh = sk.value_and_grad(lambda params, batch, keys: 0.0), sk.make_mesh(jax.devices()[:1], data=1)
    init, _ = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh, plan=sk.dp("data"))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(init({"w": np.ones(2, np.float32)}, jax.random.key(0)))
    assert inside("sample", tmp_path, code=2).stderr == (
        "error: sample: RUN must be a directory of checkpoints from shardkit train --checkpoint; another program saved "
        f"step 0 of {tmp_path}. Read its parameters with shardkit.runtime.load_params.\n"
    )


def test_a_run_starts_from_the_parameters_of_another_or_of_a_file(corpus, tmp_path):
    first = run_of("fsdp", corpus)
    state = first.init(first.params, jax.random.key(7))
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(state, position=0)
    save_params(tmp_path / "whole", state.params)
    half = load_file(tmp_path / "whole" / "model-00001-of-00001.safetensors")
    save_file({name: x.astype(np.float16) for name, x in half.items()}, tmp_path / "half.safetensors")
    rounded = jax.tree.map(lambda x: x.astype(np.float16).astype(np.float32), state.params)
    for path, wanted in (("run", state.params), ("half.safetensors", rounded)):
        found, saved, said = first_state(run_of("model", corpus, init_from=tmp_path / path), None)
        assert int(found.step) == 0 and saved is None
        assert said == f"parameters: those of {tmp_path / path}; the optimizer starts from step 0"
        same(found.params, wanted)


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
