"""A training run from its text to its last checkpoint, in one file to read, to import, or to copy and change.

`shardkit train` is this function with a progress bar:

    from shardkit.cli.train_options import TrainOptions
    from shardkit.cli.training import train

    trained = train(TrainOptions(mesh=("data=2", "fsdp=4"), steps=100))

It needs neither tyro nor rich. It is here, above `shardkit.models`, because it uses `shardkit.runtime`. A script of
your own writes down the mesh, plan and model that `plans.py` makes of the options.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import shardkit as sk
from shardkit._arguments.checks import counted
from shardkit.cli import text as text_data
from shardkit.cli.plans import described, mesh_of, mesh_words, model_of
from shardkit.cli.train_options import TrainOptions, changes, check, settings_of
from shardkit.cli.verify import verify
from shardkit.models import transformer
from shardkit.on_device.batch import batch_specs
from shardkit.runtime.channel import client


class Log:
    """What a run says: here lines of text, of process 0. The command's own also moves a bar and writes JSON lines."""

    def say(self, text: str) -> None:
        """A line for people."""
        if sk.runtime.is_main():
            print(text, flush=True)

    def row(self, kind: str, /, **values: Any) -> None:
        """What happened, for programs: "run", "verify", "step", "evaluation", "checkpoint" or "end"."""

    def step(self, number: int) -> None:
        """A step was dispatched; its number is counted from 1."""


class End(NamedTuple):
    """Why training ended, and the exit code."""

    reason: str
    code: int


class Trained(NamedTuple):
    """The last state, why training ended, and the last losses."""

    state: sk.TrainState
    end: End = End("done", 0)
    train_loss: float | None = None
    validation_loss: float | None = None


def norm_noted() -> optax.GradientTransformation:
    """Passes gradients on, and keeps their global norm as its state."""

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, jax.Array]:
        return grads, jnp.sqrt(sum(jnp.sum(x * x) for x in jax.tree.leaves(grads)))

    return optax.GradientTransformation(lambda params: jnp.float32(0), update)


class TrainingRun:
    """What a run is made of, on one mesh: the step, its data, and the loss on held-out text."""

    def __init__(self, options: TrainOptions, mesh: jax.sharding.Mesh):
        o = self.options = options
        self.mesh, self.model = mesh, model_of(o, mesh.shape)
        self.how: Any = {"plan": self.model.plan, "precision": o.precision, "accumulate": o.accumulate}
        self.settings = settings_of(o, self.model.config.experts)
        warm, peak = max(1, o.steps // 10), o.learning_rate
        self.rate = optax.warmup_cosine_decay_schedule(0.0, peak, warm, max(2, o.steps), peak / 10)
        adamw = optax.adamw(self.rate, b2=0.95, weight_decay=0.1)
        self.optimizer = optax.chain(norm_noted(), optax.clip_by_global_norm(1.0), adamw)
        self.params = lambda key: transformer.init(key, self.model.config)
        how: Any = {"mesh": mesh, "nonfinite": o.nonfinite, **self.how}
        self.init, self.step = sk.make_train_step(self.model.grad_fn, self.optimizer, **how)
        plan = self.model.plan
        self.loss = sk.make_eval_step(self.model.loss_fn, mesh=mesh, plan=plan, precision=o.precision)
        self.split = plan.batch_spec(mesh)
        self.text = text = text_data.read_text(o.data) if o.data else text_data.standard_library()
        count = max(1, 512 // o.batch)  # of 512 examples
        batches = text_data.validation_batches(text.validation, count=count, batch=o.batch, length=o.length)
        batch_specs(batches[0], self.split, mesh, o.accumulate)  # raises if the batch cannot be split
        self.held_out = [sk.runtime.from_full(batch, mesh, self.split) for batch in batches]

    def batch(self, index: int) -> dict[str, jax.Array]:
        """The batch of a step, which depends on the seed and the step alone; a process reads its devices' rows."""
        o = self.options
        return text_data.global_batch_at(
            self.text.train, seed=o.seed, step=index, batch=o.batch, length=o.length, mesh=self.mesh, spec=self.split
        )

    def validation(self, params: Any) -> dict[str, float]:
        """The loss in nats per byte, and the accuracy, over the held-out batches."""
        found = jax.device_get([self.loss(params, batch) for batch in self.held_out])
        return {name: sum(float(each[name]) for each in found) / len(found) for name in ("loss", "accuracy")}

    def triage(self, error: sk.NonFiniteError, batch: Any) -> sk.runtime.TriageReport:
        """Repeats the step that failed, which the error's state counts as taken: what is not finite, and where."""
        before = error.state._replace(step=error.state.step - 1)
        return sk.runtime.triage(self.model.grad_fn, mesh=self.mesh, **self.how)(before, batch)


def train(options: TrainOptions, log: Log | None = None) -> Trained:
    """Trains until the last step, a stop signal, or a step that is not finite; with --checkpoint it goes on there."""
    check(options)
    o, log, many = options, log or Log(), sk.runtime.initialize().processes > 1
    mesh = mesh_of("train", o.mesh, many=many)
    log.say(sk.describe(mesh))
    saving: Any = sk.runtime.Checkpoints(o.checkpoint, best="validation_loss") if o.checkpoint else nullcontext()
    with saving as checkpoints:
        run = TrainingRun(o, mesh)
        state, saved, said = first_state(run, checkpoints)
        introduce(run, state, said, log)
        if o.verify and saved:
            log.say("verify: skipped, because a resumed run does not start from step 0")
        elif o.verify:
            log.say(f"verify: {counted(o.verify, 'step')} on the mesh and on one device ...")
            differences = verify(run, state, o.verify)
            log.say(f"verify: {differences}")
            log.row("verify", **differences._asdict())
        if saved and saved.step >= o.steps:
            trained = Trained(state, validation_loss=run.validation(state.params)["loss"])
        else:
            trained = loop(run, state, checkpoints, log, many=many)
        conclude(run, trained, checkpoints, log)
        return trained


def first_state(run: TrainingRun, checkpoints: Any) -> tuple[sk.TrainState, sk.runtime.Run | None, str]:
    """The state to start from, what was saved with it, and where it is from in words; refuses other options."""
    o, key = run.options, jax.random.key(run.options.seed)
    like: Any = run.init.abstract(run.params)
    if checkpoints is not None and checkpoints.latest_step() is not None:
        differ = changes(o, run.settings, checkpoints.run(damaged="older").config)
        state, saved = checkpoints.restore(like, damaged="older")
        then = f"resuming with {', '.join(differ)}" if differ else "resuming"
        then = then if saved.step < o.steps else "already finished"
        return state, saved, f"checkpoint: step {saved.step} of {o.checkpoint}; {then}"
    if o.init_from is not None:
        params = sk.runtime.load_params(o.init_from, like.params, cast=True)
        return run.init(params, key), None, f"parameters: those of {o.init_from}; the optimizer starts from step 0"
    return run.init(run.params, key), None, ""


def loop(run: TrainingRun, state: sk.TrainState, checkpoints: Any, log: Log, *, many: bool) -> Trained:
    """Trains from the state's step on, and does what is due after each step."""
    o, first = run.options, int(state.step)
    step: Any = run.step
    phase: Any = nullcontext
    batches: Any = (run.batch(index) for index in range(first, o.steps))
    if many:  # all processes run the same program, or all end, and say which one was late or died
        deadlines = sk.runtime.Deadlines(step=o.deadline, data=o.deadline)
        guard = sk.runtime.guard(
            mesh=run.mesh, config=run.settings, deadlines=deadlines, flight=o.checkpoint, first_step=first
        )
        step, batches, phase = guard.watch(step), guard.data(batches), guard.phase
    begun = mark = time.perf_counter()
    read = first  # the number of the last step whose loss was read, at `mark`
    end = loss = held = None
    log.say("first step: tracing and compiling ...")
    with stop_signals(checkpoints is not None, many, log.say) as stopped:
        for number, batch in enumerate(batches, first + 1):
            try:
                state, metrics = step(state, batch)
            except sk.NonFiniteError as error:
                log.say(str(run.triage(error, batch)))
                state, end = error.state, End(str(error), 3)
                break
            log.step(number)
            end = stopped(number) or (End("done", 0) if number == o.steps else None)
            logs = end or number % o.log_every == 0 or number == first + 1
            evaluates = end or number % o.evaluate_every == 0
            saves = end or number % o.checkpoint_every == 0
            if o.compare_replicas and number % o.compare_replicas == 0:
                sk.runtime.assert_no_drift(state)
            if not (logs or evaluates or saves):
                continue  # reading a loss would wait for the steps in flight
            loss = float(metrics["loss"])
            now = time.perf_counter()
            speed = (number - read) * o.batch * o.length / (now - mark) if number > first + 1 else None
            if logs:
                rates = {"gradient_norm": float(state.opt_state[0]), "learning_rate": float(run.rate(number - 1))}
                log.row("step", step=number, loss=loss, **rates, tokens_per_second=speed, seconds=now - begun)
                log.say(f"step {number}: loss {loss:.3f}" + (f", {speed:,.0f} tokens/s" if speed else ""))
            scores = None
            if evaluates and not (end and end.code == sk.runtime.PREEMPTED):  # the machine is about to be taken away
                with phase("evaluate"):
                    found = run.validation(state.params)
                held, scores = found["loss"], {"validation_loss": found["loss"]}
                log.say(f"step {number}: validation loss {held:.3f} nats per byte")
                log.row("evaluation", step=number, **scores, accuracy=found["accuracy"])
            if checkpoints is not None and saves:
                with phase("save"):
                    checkpoints.save(state, position=number * o.batch, config=run.settings, metrics=scores)
                    if end:
                        checkpoints.wait()
                log.row("checkpoint", step=number, directory=str(o.checkpoint))
            if end:
                break
            read, mark = number, time.perf_counter()
    return Trained(state, end or End("done", 0), loss, held)


@contextmanager
def stop_signals(saves: bool, many: bool, say: Callable[[str], None]) -> Iterator[Callable[[int], End | None]]:
    """Listens for Ctrl-C and SIGTERM: gives a function of the step's number, the reason to stop after it or None.

    The first signal stops after the step, the second at once. With checkpoints, SIGTERM is a preemption notice, and all
    processes stop after the same step. Among several processes, Ctrl-C is turned into SIGTERM, because each process
    would receive it in another step.
    """
    seen: list[int] = []
    # Not by the handler itself: it may run in the middle of a print, and a stream cannot be entered twice.
    saying = threading.Thread(target=say, args=("stopping after this step; Ctrl-C again stops at once",))

    def note(number: int, frame: Any) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)
        if number == signal.SIGINT:
            saying.start()
        if many:
            os.kill(os.getpid(), signal.SIGTERM)

    # Among several processes jax listens for SIGTERM itself.
    old = {number: signal.signal(number, note) for number in (signal.SIGINT, *([] if many else [signal.SIGTERM]))}
    if saves and not many:
        sk.runtime.watch_preemption()

    def stopped(number: int) -> End | None:
        preempted = (many or saves) and sk.runtime.preempted(number - 1)
        if preempted and saves:  # without a checkpoint, exit code 75 would restart the run from step 0
            return End(f"preempted after step {number}", sk.runtime.PREEMPTED)
        if preempted or (seen and not many):
            return End(f"interrupted after step {number}", 130)
        return None

    try:
        yield stopped
    except KeyboardInterrupt as error:
        client.tell_others(error, 130)  # they are in another step, and wait for this process
        raise
    finally:
        for each, handler in old.items():
            signal.signal(each, handler)
        if saying.ident is not None:
            saying.join()


def introduce(run: TrainingRun, state: sk.TrainState, said: str, log: Log) -> None:
    """Says what the run is: plan, sizes, data, and what it starts from."""
    o, text, model = run.options, run.text, run.model
    pipeline = described(model.schedule) if model.schedule else None
    size, held = sum(x.size for x in jax.tree.leaves(state.params)), sk.bytes_per_device(state)
    if run.mesh.devices.flat[0].platform == "cpu":
        log.say("simulated CPU devices share this machine's cores: the speed means nothing, the numbers do.")
    log.say(f"plan: {model.plan}; {size:,} parameters; {held:,} bytes of state on each device")
    if pipeline:
        log.say(f"pipeline: {pipeline}")
    log.say(f"text: {text.source}, {text.train.size:,} bytes to train on, {text.validation.size:,} held out")
    if said:
        log.say(said)
    row = {"mesh": mesh_words(o.mesh), "plan": str(model.plan), "pipeline": pipeline, "options": asdict(o)}
    log.row("run", first_step=int(state.step) + 1, parameters=size, held_bytes_per_device=held, **row)


def conclude(run: TrainingRun, trained: Trained, checkpoints: Any, log: Log) -> None:
    """Says how the run ended, and how to go on with it if it ended early."""
    state, end, loss, held = trained
    log.say(f"{end.reason}: {counted(int(state.step), 'step')}")
    step = None if checkpoints is None else checkpoints.latest_step()
    if end.code and step is not None:
        log.say(f"step {step} is saved in {run.options.checkpoint}; the same command resumes from there")
    elif end.code:
        log.say("nothing was saved; with --checkpoint DIRECTORY a run is saved, and the same command resumes it")
    if held is not None:
        log.say(f"validation loss {held:.3f} nats per byte on held-out text")
    log.row("end", step=int(state.step), ended=end.reason, exit_code=end.code, train_loss=loss, validation_loss=held)
