"""What the command does around a run, with the run itself replaced."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardkit as sk
from shardkit.cli import doctor
from shardkit.cli.run import first_state
from shardkit.cli.verify import verify


def loss_fn(params, batch, keys):
    return sk.Mean.of((batch["x"] @ params["w"]) ** 2), {}


def test_the_largest_difference_of_any_step_is_reported():
    """The first step differs, the second does not."""
    optimizer = optax.sgd(0.1)
    grad_fn = sk.value_and_grad(loss_fn)
    init, step = sk.make_train_step(
        grad_fn, optimizer, mesh=sk.make_mesh(jax.devices()[:2], data=2), plan=sk.dp("data")
    )
    batch = {"x": np.eye(4, dtype=np.float32)}

    def off_at_first(state, batch):
        first = int(state.step) == 0
        state, metrics = step(state, batch)
        return state, metrics | {"loss": metrics["loss"] * (2 if first else 1)}

    run = SimpleNamespace(
        options=SimpleNamespace(precision=None),
        optimizer=optimizer,
        step=off_at_first,
        batch=lambda index: batch,
        plain_batch=lambda index: batch,
    )
    state = init({"w": jnp.ones(4)}, jax.random.key(0))
    found = verify(loss_fn, run, state, 2)
    assert found.loss == 1.0 and found.parameters < 1e-6


def test_a_run_resumes_at_the_step_after_the_last_one():
    """A step left out, or taken twice, changes the losses of a resumed run by less than a plot shows."""
    options = SimpleNamespace(batch=4, steps=10)
    saved = SimpleNamespace(position=12, config={}, step=3)
    checkpoints = SimpleNamespace(
        latest_step=lambda: 3, restore=lambda state: ("state", saved), record=lambda: saved, run=lambda: saved
    )
    run = SimpleNamespace(
        options=options, settings=dict, params={}, init=SimpleNamespace(abstract=lambda params: "abstract")
    )
    assert first_state(run, checkpoints) == ("state", 3)


def test_a_wrong_collective_fails_the_check(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "self_test", lambda mesh: {"shift": 0.0, "broadcast": 1.0})
    assert doctor.doctor(doctor.Options()) == 1
    assert "collectives that are WRONG on this machine: 1" in capsys.readouterr().out
