"""The training loop in Python, and what it does around a step, with the step itself replaced."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardkit as sk
from shardkit.cli import training, verify
from shardkit.cli.train_options import TrainOptions, changes, settings_of
from shardkit.runtime.channel import client
from support.compiling import QUICK
from support.counting import Compiles
from support.refusals import refused


def loss_fn(params, batch, keys):
    return sk.Mean.of((batch["x"] @ params["w"]) ** 2), {}


def test_the_loop_runs_without_tyro_and_rich_as_its_docstring_says(corpus, tmp_path):
    """A user imports it, or copies it, without the extra [cli]."""
    code = (
        "import sys, pathlib\n"
        "for name in ('tyro', 'rich'): sys.modules[name] = None\n"
        "from shardkit.cli.train_options import TrainOptions\n"
        "from shardkit.cli.training import train\n"
        f"options = TrainOptions(mesh=('data=2',), data=(pathlib.Path({str(corpus)!r}),), steps=2, layers=1, dim=8,\n"
        f"    heads=2, length=16, batch=8, checkpoint=pathlib.Path({str(tmp_path / 'c')!r}))\n"
        "assert int(train(options).state.step) == 2\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ | {"XLA_FLAGS": QUICK}
    )
    assert "done: 2 steps\n" in done.stdout
    assert len(Path(training.__file__).read_text().splitlines()) <= 300  # a user reads it from top to bottom


def test_the_largest_difference_of_any_step_is_reported(monkeypatch):
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

    def batch_of(index):
        before.setdefault(index, counted.count)
        return batch

    run = SimpleNamespace(
        options=SimpleNamespace(precision=None), optimizer=optimizer, step=off_at_first, batch=batch_of
    )
    monkeypatch.setattr(verify, "loss_of", lambda run: loss_fn)
    state = init({"w": jnp.ones(4)}, jax.random.key(0))
    before = {}
    with Compiles() as counted:
        found = verify.verify(run, state, 3)
    assert found.loss == 1.0 and found.parameters < 1e-6
    assert 0 < before[1] == before[2]


class Recorded(training.Log):
    """The rows of a run, and nothing printed."""

    def __init__(self):
        self.rows = []

    def say(self, text):
        self.rows.append(text)

    def row(self, kind, /, **values):
        self.rows.append((kind, values.get("step")))


def looped(log, taken, first=0, **options):
    """The loop with a step that only counts: `taken` lists what it, and what saves and evaluates, did."""

    def step(state, batch):
        taken.append(("step", batch))
        return state._replace(step=state.step + 1), {"loss": np.float32(1)}

    def validation(params):
        taken.append("evaluate")
        return {"loss": 1.0, "accuracy": 1.0}

    given = {"step": step, "mesh": None, "settings": {}, "rate": lambda count: 0.0, "batch": lambda index: index}
    run = SimpleNamespace(options=TrainOptions(**options), validation=validation, **given)
    checkpoints = SimpleNamespace(
        save=lambda state, position, config, metrics: taken.append(("save", position, metrics)), wait=lambda: None
    )
    state = sk.TrainState(np.int32(first), None, (np.float32(2),), None)
    return training.loop(run, state, checkpoints, log, many=False)


@pytest.mark.check
def test_a_run_resumes_at_the_step_after_the_last_one_and_does_what_is_due_after_each():
    """A step left out, or taken twice, changes the losses of a resumed run by less than a plot shows."""
    log, taken = Recorded(), []
    trained = looped(log, taken, first=3, steps=8, batch=4, log_every=2, evaluate_every=5, checkpoint_every=3)
    assert taken == [
        *[("step", 3), ("step", 4), "evaluate", ("step", 5), ("save", 24, None), ("step", 6), ("step", 7)],
        *["evaluate", ("save", 32, {"validation_loss": 1.0})],
    ]
    kinds = [("step", 4), ("evaluation", 5), ("step", 6), ("checkpoint", 6)]
    kinds += [("step", 8), ("evaluation", 8), ("checkpoint", 8)]
    assert [row for row in log.rows if isinstance(row, tuple)] == kinds
    assert (trained.end, trained.train_loss, trained.validation_loss) == (training.End("done", 0), 1.0, 1.0)


@pytest.mark.check
def test_a_step_that_is_not_finite_is_looked_into_and_ends_the_run(monkeypatch):
    """The error's state counts the failed step as taken; the keys of dropout depend on the step."""
    repeated = []
    run = training.TrainingRun.__new__(training.TrainingRun)  # without a model
    run.model, run.mesh, run.how = SimpleNamespace(grad_fn=None), None, {}
    monkeypatch.setattr(sk.runtime, "triage", lambda *a, **o: lambda state, batch: repeated.append((state.step, batch)))
    run.triage(sk.NonFiniteError("", sk.TrainState(4, None, None, None), {}), "batch")
    assert repeated == [(3, "batch")]


# proves F68: the other processes, in a step that this one has left, would hear of nothing
@pytest.mark.check
def test_a_second_interrupt_ends_all_at_once(monkeypatch):
    told = []
    monkeypatch.setattr(client, "tell_others", lambda error, code: told.append((type(error), code)))
    passed_on = signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    try:
        with pytest.raises(KeyboardInterrupt), training.stop_signals(saves=True, many=True, say=print):
            os.kill(os.getpid(), signal.SIGINT)
            assert told == [signal.SIGTERM]
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, passed_on)
    assert told == [signal.SIGTERM, (KeyboardInterrupt, 130)]


# Catches a handler that prints: where it interrupts a print, the stream is entered twice, which is an error.
@pytest.mark.check
def test_an_interrupt_in_the_middle_of_a_print():
    written = []

    class Interrupted(io.RawIOBase):
        def writable(self):
            return True

        def write(self, data):
            if not written:
                os.kill(os.getpid(), signal.SIGINT)
            written.append(bytes(data))
            return len(data)

    out = io.TextIOWrapper(io.BufferedWriter(Interrupted()), write_through=True)
    with training.stop_signals(saves=False, many=False, say=lambda text: print(text, file=out, flush=True)) as stopped:
        print("step 4", file=out, flush=True)
        assert stopped(4) == training.End("interrupted after step 4", 130)
    assert b"".join(written).split(b"\n")[0] == b"step 4" and b"stopping after this step" in b"".join(written)


@pytest.mark.check
def test_what_may_change_when_a_run_is_resumed():
    def found(*change, **options):
        now = TrainOptions(change=change, **options)
        return changes(now, settings_of(now, 0), settings_of(TrainOptions(mesh=("fsdp=2",), accumulate=2), 0))

    assert found() == found("steps") == found(log_every=3) == []
    longer = found("steps", "learning-rate", steps=200, learning_rate=0.5)
    assert longer == ["--steps 200 (was 150)", "--learning-rate 0.5 (was 0.003)"]
    same = "--checkpoint: a run must be resumed with the same options; "
    for options, message in (
        ({"steps": 9}, "steps was 150 and is 9. Pass the same value, --change steps if that is meant, or another"),
        ({"dim": 8}, "dim was 128 and is 8. Pass the same value, or another"),
    ):
        assert refused(lambda: found("learning-rate", **options)) == f"{same}{message} directory."
