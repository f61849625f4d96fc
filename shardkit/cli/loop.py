"""The loop of `shardkit train`: steps, validations, checkpoints, and an end in good order."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import shardkit as sk
from shardkit.cli.curve import Point
from shardkit.cli.run import CommandRun
from shardkit.runtime.monitor import client

_LOG_EVERY = 10


class Trained(NamedTuple):
    """What came of the loop.

    Attributes:
        curve: losses by step.
        state: the last state.
        seconds: spent in steps after the first.
        steps: taken in them.
        ended: "done", or why it ended early.
        code: the exit code.
    """

    curve: list[Point]
    state: sk.TrainState
    seconds: float
    steps: int
    ended: str
    code: int


def loop(
    run: CommandRun,
    state: sk.TrainState,
    first: int,
    guard: sk.runtime.Guard | None,
    checkpoints: Any,
    console: Console,
) -> Trained:
    """Trains from step `first`."""
    o = run.options
    curve: list[Point] = []
    seconds, timed, ended, code = 0.0, 0, "done", 0
    step = guard.watch(run.step) if guard else run.step
    batches: Any = (run.batch(index) for index in range(first, o.steps))
    phase = guard.phase if guard else lambda name: nullcontext()
    with _progress(console) as progress, _asked_to_end(checkpoints is not None, guard is not None) as asked:
        nan = float("nan")
        task = progress.add_task("train", total=o.steps, completed=first, loss=nan, validation=nan, speed=0.0)
        mark = time.perf_counter()
        for index, batch in enumerate(guard.data(batches) if guard else batches, first):
            try:
                state, metrics = step(state, batch)
            except sk.NonFiniteError as error:
                state, ended, code = error.state, str(error), 3
                console.print(str(run.triage(error, batch)))
                break
            why, preempted = asked(index)
            last, evaluates = index + 1 == o.steps or bool(why), (index + 1) % o.evaluate_every == 0
            if o.compare_replicas and (index + 1) % o.compare_replicas == 0:
                sk.runtime.assert_no_drift(state)
            validation = None
            if index == first or last or evaluates or (index + 1) % _LOG_EVERY == 0:
                loss = float(metrics["loss"])  # waits for the steps in flight
                if index > first:  # the first step compiles
                    seconds, timed = seconds + time.perf_counter() - mark, index - first
                if (last or evaluates) and not preempted:
                    with phase("evaluate"):
                        validation = run.validation_loss(state)
                    progress.update(task, validation=validation)
                    console.print(f"step {index + 1}: loss {loss:.3f}, validation {validation:.3f} nats per byte")
                curve.append(Point(index + 1, loss, validation))
                speed = timed * o.batch * o.length / seconds if seconds else 0.0
                progress.update(task, completed=index + 1, loss=loss, speed=speed)
                mark = time.perf_counter()
            if checkpoints is not None and (last or (index + 1) % o.checkpoint_every == 0):
                with phase("save"):
                    best = {"validation_loss": validation} if validation is not None else None
                    checkpoints.save(state, position=(index + 1) * o.batch, config=run.settings(), metrics=best)
                    if last:
                        checkpoints.wait()
            if why:
                ended, code = f"{why} after step {index + 1}", sk.runtime.PREEMPTED if preempted else 130
                break
    return Trained(curve, state, seconds, timed, ended, code)


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
def _asked_to_end(saves: bool, many: bool) -> Iterator[Any]:
    """Gives a function of the step's index: why the run shall end after it, or "", and whether that was a notice.

    A first Ctrl-C ends after the step, a second at once. SIGTERM does the same; where there are checkpoints it is a
    notice that the machine will be taken, and all processes end after the same step. Among many processes a Ctrl-C is
    passed on as such a notice, since each would hear it in another step.
    """
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)
        if many:
            os.kill(os.getpid(), signal.SIGTERM)

    # Among many processes jax listens for SIGTERM itself.
    old = {number: signal.signal(number, note) for number in (signal.SIGINT, *([] if many else [signal.SIGTERM]))}
    if saves and not many:
        sk.runtime.watch_preemption()

    def asked(index: int) -> tuple[str, bool]:
        if (many or saves) and sk.runtime.preempted(index):
            return ("preempted", True) if saves else ("interrupted", False)  # 75 would start an unsaved run again
        return ("interrupted", False) if seen and not many else ("", False)

    try:
        yield asked
    except KeyboardInterrupt as error:
        client.tell_others(error, 130)  # in another step than this one, and waiting for it
        raise
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
