"""What the command does around a run, with the run itself replaced."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardkit as sk
from shardkit.cli import doctor
from shardkit.cli.loop import loop
from shardkit.cli.resuming import resumed
from shardkit.cli.verify import verify
from support.counting import Compiles


def loss_fn(params, batch, keys):
    return sk.Mean.of((batch["x"] @ params["w"]) ** 2), {}


def test_the_largest_difference_of_any_step_is_reported():
    """The first step differs, the second does not, and no program is compiled again for it: a model's takes minutes."""
    optimizer = optax.sgd(0.1, momentum=0.9)
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
    before = []
    with Compiles() as counted:
        found = verify(loss_fn, run, state, 3, lambda number: before.append(counted.count))
    assert found.loss == 1.0 and found.parameters < 1e-6
    assert 0 < before[1] == before[2]


def saved_with(**config):
    """Checkpoints whose newest step was saved with these options, three steps of four examples."""
    run = SimpleNamespace(position=12, config=config, step=3)
    return SimpleNamespace(latest_step=lambda: 3, run=lambda damaged: run)


def test_a_run_resumes_at_the_step_after_the_last_one():
    """A step left out, or taken twice, changes the losses of a resumed run by less than a plot shows."""
    found = resumed({}, SimpleNamespace(batch=4, change=(), damaged="stop"), saved_with())
    assert (found.first, found.began, found.anew) == (3, 0, False)


def test_a_snapshot_is_resumed_if_it_is_as_new_and_of_the_same_options():
    """It alone would catch steps that are lost because the older is read, and a snapshot of other options."""
    in_memory = SimpleNamespace(run=lambda: SimpleNamespace(position=20, config={"a": 1, "optimizer_began": 2}, step=5))
    options = SimpleNamespace(batch=4, change=(), damaged="stop")
    found = resumed({"a": 1}, options, saved_with(a=1), in_memory)
    assert (found.first, found.began, found.memory) == (5, 2, True)
    assert resumed({"a": 1}, options, None, in_memory).first == 5
    older = SimpleNamespace(run=lambda: SimpleNamespace(position=8, config={"a": 1, "optimizer_began": 2}, step=2))
    assert not resumed({"a": 1}, options, saved_with(a=1), older).memory
    other = SimpleNamespace(run=lambda: SimpleNamespace(position=20, config={"a": 2, "optimizer_began": 2}, step=5))
    assert not resumed({"a": 1}, options, saved_with(a=1), other).memory
    assert resumed({"a": 1}, options, None, other) is None
    assert resumed({}, options, None, SimpleNamespace(run=lambda: None)) is None


@pytest.mark.check
def test_a_state_is_checked_before_it_is_kept_in_memory(monkeypatch):
    """It alone would catch a bit that flipped between two steps, and that each restart finds in the snapshot again."""
    done = []

    class Replay:
        def __init__(self, step, *arguments, **options):
            self.step, self.check = step, lambda: done.append("check")

        def __call__(self, state, batch):
            return self.step(state, batch)

    monkeypatch.setattr(sk.runtime, "Replay", Replay)
    run = MagicMock()
    zero = dict.fromkeys(("compare_replicas", "checkpoint_every", "log_every"), 0)
    run.options = SimpleNamespace(**zero, snapshot_every=2, replay_every=9, evaluate_every=9, steps=4, batch=1)
    run.step = lambda state, batch: (state, {"loss": np.float32(1)})
    run.validation.return_value = {"loss": 1.0, "accuracy": 1.0}
    run.tokens_per_second.return_value = 1.0
    memory = SimpleNamespace(save=lambda state, position, config: done.append(position))
    trained = loop(run, MagicMock(), 0, None, None, MagicMock(moves=False), MagicMock(), memory)
    assert trained.end.code == 0 and done[:6] == [1, "check", 2, 3, "check", "check"]


def test_what_may_change_when_a_run_is_resumed():
    was = {"steps": 3, "optimizer": "adamw", "clip": 1.0, "dim": 8, "optimizer_began": 1}

    def found(*change, **options):
        settings = {name: value for name, value in (was | options).items() if name != "optimizer_began"}
        return resumed(settings, SimpleNamespace(batch=4, change=change, damaged="stop"), saved_with(**was))

    assert found() == found("steps") == (found().saved, 3, 1, False, (), False)
    longer = found("steps", "clip", steps=9, clip=0.5)
    assert longer[1:-1] == (3, 1, False, ("--steps 9 (was 3)", "--clip 0.5 (was 1.0)"))
    other = found("optimizer", optimizer="sgd")
    assert other[1:-1] == (3, 3, True, ("--optimizer sgd (was adamw)",))
    assert found("clip", clip=0.0).anew  # clipping has a place in the state
    same = "--checkpoint: a run must be resumed with the same options; "
    for options, message in (
        ({"steps": 9}, "steps was 3 and is 9. Pass the same value, --change steps if that is meant, or another"),
        ({"dim": 9}, "dim was 8 and is 9. Pass the same value, or another"),
    ):
        with pytest.raises(ValueError) as error:
            found("clip", **options)
        assert str(error.value) == f"{same}{message} directory."


def test_a_wrong_collective_fails_the_check(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "self_test", lambda mesh: {"shift": 0.0, "broadcast": 1.0})
    assert doctor.doctor(doctor.Options()) == 1
    assert "collectives that are WRONG on this machine: 1" in capsys.readouterr().out
