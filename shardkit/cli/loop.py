"""The training loop of `shardkit train`, and its hooks: what happens every n steps, and after the last one."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import shardkit as sk
from shardkit.cli.curve import Point
from shardkit.cli.run import CommandRun
from shardkit.runtime.monitor import client

_LOG_EVERY = 10


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
    console: Console,
) -> Trained:
    """Trains from step index `first` until the last step, a stop signal, or a step that is not finite."""
    o = run.options
    end: End | None = DONE
    train_step = guard.watch(run.step) if guard else run.step
    batches: Any = (run.batch(index) for index in range(first, o.steps))
    with _progress(console) as progress, _stop_signals(checkpoints is not None, guard is not None) as stopped:
        phase = guard.phase if guard else lambda name: nullcontext()
        record = _Record(run, first, phase, checkpoints, progress)
        hooks = [
            every(o.compare_replicas, lambda step: sk.runtime.assert_no_drift(step.state), last=False),
            every(_LOG_EVERY, record.log, also=first + 1),
            every(o.evaluate_every, record.evaluate),
            every(o.checkpoint_every, record.save),
        ]
        for index, batch in enumerate(guard.data(batches) if guard else batches, first):
            try:
                state, metrics = train_step(state, batch)
            except sk.NonFiniteError as error:
                console.print(str(run.triage(error, batch)))
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
    progress: Progress
    curve: list[Point] = field(default_factory=list)
    seconds: float = 0.0
    steps: int = 0
    mark: float = 0.0  # when the next step could begin

    def __post_init__(self) -> None:
        fields: Any = {"loss": math.nan, "validation": math.nan, "speed": 0.0}
        self.task = self.progress.add_task("train", total=self.run.options.steps, completed=self.first, **fields)

    def log(self, step: Step) -> None:
        """Reads the loss, which waits for the steps in flight."""
        if self.curve and self.curve[-1].step == step.number:
            return
        loss = float(step.metrics["loss"])
        if step.number > self.first + 1:  # the first step compiles
            self.seconds += time.perf_counter() - self.mark
            self.steps = step.number - self.first - 1
        self.curve.append(Point(step.number, loss, None))
        speed = self.run.tokens_per_second(self.steps, self.seconds)
        self.progress.update(self.task, completed=step.number, loss=loss, speed=speed)
        self.mark = time.perf_counter()

    def evaluate(self, step: Step) -> None:
        """Adds the validation loss to the curve, unless the machine is about to be taken away."""
        self.log(step)
        if step.end and step.end.code == sk.runtime.PREEMPTED:
            return
        with self.phase("evaluate"):
            validation = self.run.validation(step.state.params)["loss"]
        self.curve[-1] = self.curve[-1]._replace(validation_loss=validation)
        self.progress.update(self.task, validation=validation)
        self.progress.console.print(
            f"step {step.number}: loss {self.curve[-1].train_loss:.3f}, validation {validation:.3f} nats per byte"
        )
        self.mark = time.perf_counter()

    def save(self, step: Step) -> None:
        """Saves a checkpoint, with the validation loss if there is one, and waits for it after the last step."""
        if self.checkpoints is None:
            return
        point = self.curve[-1]
        evaluated = point.step == step.number and point.validation_loss is not None
        metrics = {"validation_loss": point.validation_loss} if evaluated else None
        position = step.number * self.run.options.batch
        config = self.run.settings() | {"optimizer_began": self.run.began}
        with self.phase("save"):
            self.checkpoints.save(step.state, position=position, config=config, metrics=metrics)
            if step.end:
                self.checkpoints.wait()


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  validation {task.fields[validation]:.3f}"),
        TextColumn("{task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(),
        console=console,
    )


@contextmanager
def _stop_signals(saves: bool, many: bool) -> Iterator[Callable[[int], End | None]]:
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
