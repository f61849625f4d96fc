"""The training loop of `shardkit train`, and its hooks: what happens every n steps, and after the last one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import jax

import shardkit as sk
from shardkit.cli.curve import Point
from shardkit.cli.display import Display, duration
from shardkit.cli.run import CommandRun
from shardkit.cli.trainlog import TrainLog
from shardkit.runtime.channel import client

_LOOK = 0.25  # seconds between looks at the loss


class End(NamedTuple):
    """Why training ended, and the exit code."""

    reason: str
    code: int


DONE = End("done", 0)


class Trained(NamedTuple):
    """The last state, why training ended, the losses, and the time and number of the steps after the first."""

    state: sk.TrainState
    end: End = DONE
    curve: tuple[Point, ...] = ()
    seconds: float = 0.0
    steps: int = 0
    validation_loss: float | None = None


class Step(NamedTuple):
    """A step that was taken: its number, counted from 1; its results; and why it is the last one, if it is."""

    number: int
    state: sk.TrainState
    metrics: dict[str, jax.Array]
    end: End | None


Hook = Callable[[Step], None]


def every(n: int, hook: Hook, *, also: int | None = None, last: bool = True) -> Hook:
    """Calls the hook after every n-th step (0: never), after step `also`, and after the last one unless last=False."""

    def call(step: Step) -> None:
        if (n and step.number % n == 0) or step.number == also or (last and step.end):
            hook(step)

    return call


def loop(
    run: CommandRun,
    state: sk.TrainState,
    first: int,
    guard: sk.runtime.Guard | None,
    checkpoints: Any,
    display: Display,
    log: TrainLog,
    snapshots: Any = None,
) -> Trained:
    """Trains from step index `first` until the last step, a stop signal, or a step that is not finite."""
    o = run.options
    end: End | None = DONE
    train_step = guard.watch(run.step) if guard else run.step
    replay = None
    if o.replay_every:
        replay = sk.runtime.Replay(train_step, run.step_on, mesh=run.mesh, every=o.replay_every, first_step=first)
        train_step = replay
    batches: Any = (run.batch(index) for index in range(first, o.steps))
    many, tell = guard is not None, display.console.print
    with _stop_signals(checkpoints is not None, many, tell) as stopped:
        phase = guard.phase if guard else lambda name: nullcontext()
        record = _Record(run, first, phase, checkpoints, display, log, snapshots)
        hooks = [
            every(o.compare_replicas, lambda step: sk.runtime.assert_no_drift(step.state), last=False),
            every(o.checkpoint_every, lambda step: replay.check() if replay else None),
            every(o.snapshot_every, lambda step: replay.check() if replay else None, last=False),
            record.take,
            every(o.log_every, record.log, also=first + 1),
            every(o.evaluate_every, record.evaluate),
            every(1 if snapshots is not None else 0, record.snapshot, last=False),
            every(o.checkpoint_every, record.save),
        ]
        for index, batch in enumerate(guard.data(batches) if guard else batches, first):
            try:
                with display.building("first step") if index == first else nullcontext():
                    state, metrics = train_step(state, batch)
                    if index == first:
                        jax.block_until_ready(metrics)
            except sk.NonFiniteError as error:
                tell(str(run.triage(error, batch)))
                state, end = error.state, End(str(error), 3)
                break
            end = stopped(index) or (DONE if index + 1 == o.steps else None)
            taken = Step(index + 1, state, metrics, end)
            for hook in hooks:
                hook(taken)
            if end:
                break
    return Trained(state, end or DONE, tuple(record.curve), record.seconds, record.steps)


@dataclass
class _Record:
    """The hooks, and what they leave for the summary: the loss curve and the time in steps."""

    run: CommandRun
    first: int
    phase: Callable[[str], AbstractContextManager[Any]]
    checkpoints: Any
    display: Display
    rows: TrainLog
    snapshots: Any
    curve: list[Point] = field(default_factory=list)
    seconds: float = 0.0
    steps: int = 0
    begun: float = field(default_factory=time.perf_counter)
    begun_after: float = 0.0  # the end of the first step
    mark: float = 0.0  # when the next step could begin
    unread: list[tuple[int, jax.Array]] = field(default_factory=list)
    logged: tuple[int, float] = (0, 0.0)  # steps and seconds at the last row

    def take(self, step: Step) -> None:
        """Keeps the loss for later; reading it waits for the steps in flight, so a terminal shows it now and then."""
        self.unread.append((step.number, step.metrics["loss"]))
        if self.display.moves and (time.perf_counter() - self.mark > _LOOK or self.run.options.nonfinite == "stop"):
            self.read(step.number)

    def read(self, number: int) -> None:
        """Adds the losses up to this step to the curve."""
        if not self.unread:
            return
        self.curve += [Point(each, float(loss), None) for each, loss in self.unread]
        self.unread.clear()
        if number > self.first + 1:  # the first step compiles
            self.seconds += time.perf_counter() - self.mark
            self.steps = number - self.first - 1
        self.mark = time.perf_counter()
        self.display.step(number, self.said(number))

    def said(self, number: int) -> str:
        """The last losses, the speed and the time left, as far as they are known."""
        held = [point.validation_loss for point in self.curve if point.validation_loss is not None]
        words = [f"loss {self.curve[-1].train_loss:.3f}"] + [f"validation {loss:.3f}" for loss in held[-1:]]
        if self.steps:
            left = (self.run.options.steps - number) * (time.perf_counter() - self.begun_after) / self.steps
            words += [f"{self.run.tokens_per_second(self.steps, self.seconds):,.0f} tokens/s"]
            words += [f"{duration(left)} left"] if number < self.run.options.steps else []
        return ", ".join(words)

    def log(self, step: Step) -> None:
        """Writes a row; in a pipe, a line too."""
        self.read(step.number)
        steps, seconds = self.steps - self.logged[0], self.seconds - self.logged[1]
        self.logged = self.steps, self.seconds
        now = time.perf_counter()
        self.rows.row(
            "step",
            step=step.number,
            loss=self.curve[-1].train_loss,
            gradient_norm=self.run.gradient_norm(step.state),
            learning_rate=self.run.learning_rate(step.number),
            tokens_per_second=self.run.tokens_per_second(steps, seconds) or None,
            seconds=now - self.begun,
        )
        if step.number == self.first + 1:
            self.begun_after = now
            if not self.display.moves:
                self.display.console.print(f"first step after {now - self.begun:.0f} s")
        evaluates = step.end or step.number % self.run.options.evaluate_every == 0  # says the same, and more
        if not self.display.moves and not evaluates:
            self.display.console.print(f"step {step.number}/{self.run.options.steps}: {self.said(step.number)}")
        self.mark = time.perf_counter()

    def evaluate(self, step: Step) -> None:
        """Adds the validation loss to the curve, unless the machine is about to be taken away."""
        self.read(step.number)
        if step.end and step.end.code == sk.runtime.PREEMPTED:
            return
        with self.phase("evaluate"), self.display.phase("evaluating") if self.display.moves else nullcontext():
            found = self.run.validation(step.state.params)
        self.curve[-1] = self.curve[-1]._replace(validation_loss=found["loss"])
        self.display.step(step.number, self.said(step.number))
        self.display.console.print(
            f"step {step.number}: loss {self.curve[-1].train_loss:.3f}, validation {found['loss']:.3f} nats per byte"
        )
        self.rows.row("evaluation", step=step.number, validation_loss=found["loss"], accuracy=found["accuracy"])
        self.mark = time.perf_counter()

    def snapshot(self, step: Step) -> None:
        """Keeps the state in memory, after every so many steps."""
        with self.phase("save"):
            self.snapshots.save(step.state, position=step.number * self.run.options.batch, config=self._config())

    def _config(self) -> dict[str, Any]:
        return self.run.settings() | {"optimizer_began": self.run.began}

    def save(self, step: Step) -> None:
        """Saves a checkpoint, with the validation loss if there is one, and waits for it after the last step."""
        if self.checkpoints is None:
            return
        self.read(step.number)
        point = self.curve[-1]
        evaluated = point.step == step.number and point.validation_loss is not None
        metrics = {"validation_loss": point.validation_loss} if evaluated else None
        position = step.number * self.run.options.batch
        with self.phase("save"), self.display.phase("saving") if self.display.moves else nullcontext():
            self.checkpoints.save(step.state, position=position, config=self._config(), metrics=metrics)
            if step.end:
                self.checkpoints.wait()
        self.rows.row("checkpoint", step=step.number, directory=self.run.options.checkpoint)


@contextmanager
def _stop_signals(
    saves: bool, many: bool, tell: Callable[[str], None] = print
) -> Iterator[Callable[[int], End | None]]:
    """Listens for Ctrl-C and SIGTERM: gives a function of the step's index, the reason to stop after it or None.

    The first signal stops after the step, the second at once. With checkpoints, SIGTERM is a preemption notice, and all
    processes stop after the same step. Among several processes, Ctrl-C is turned into SIGTERM, because each process
    would receive it in another step.
    """
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)
        if number == signal.SIGINT:
            tell("stopping after this step; Ctrl-C again stops at once")
        if many:
            os.kill(os.getpid(), signal.SIGTERM)

    # Among several processes jax listens for SIGTERM itself.
    old = {number: signal.signal(number, note) for number in (signal.SIGINT, *([] if many else [signal.SIGTERM]))}
    if saves and not many:
        sk.runtime.watch_preemption()

    def stopped(index: int) -> End | None:
        preempted = (many or saves) and sk.runtime.preempted(index)
        if preempted and saves:  # without a checkpoint, exit code 75 would restart the run from step 0
            return End(f"preempted after step {index + 1}", sk.runtime.PREEMPTED)
        if preempted or (seen and not many):
            return End(f"interrupted after step {index + 1}", 130)
        return None

    try:
        yield stopped
    except KeyboardInterrupt as error:
        client.tell_others(error, 130)  # they are in another step, and wait for this process
        raise
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
