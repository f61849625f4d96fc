"""Guards a training loop: the same program on all processes before the first step, a deadline for every phase."""

from __future__ import annotations

import atexit
import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

from shardkit._arguments.checks import quoted
from shardkit._arguments.context import mesh_in_context
from shardkit._arguments.typed import check_fields, typed
from shardkit.jobs.monitor.fingerprint import fingerprint
from shardkit.jobs.monitor.judge import Deadlines
from shardkit.runtime.channel import client
from shardkit.runtime.channel.place import Place
from shardkit.runtime.channel.recorder import Recorder

F = TypeVar("F", bound=Callable[..., Any])


class StepClock:
    """Which step and phase the training loop is in, written to the flight recorder."""

    def __init__(self, recorder: Recorder, first_step: int):
        self._recorder = recorder
        self.next_step: int = first_step
        self._phases: list[tuple[str, int]] = []  # the ones that the loop is in, outermost first
        self._between = "user code"  # the phase outside of these
        self._dispatched: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        recorder.restart(first_step - 1)
        waiter = threading.Thread(target=self._note_ends, name="shardkit-steps", daemon=True)
        waiter.start()

        def stop() -> None:  # a thread that waits inside jax while Python exits would abort the process
            self._dispatched.put(None)
            waiter.join()

        atexit.register(stop)

        def note_end() -> None:  # Python waits for other threads then
            threading.main_thread().join()
            if getattr(sys, "last_value", None) is None:  # else an error ended it, in user code
                recorder.turn("user code", "after")

        threading.Thread(target=note_end, name="shardkit-end", daemon=True).start()

    @property
    def in_phase(self) -> bool:
        """Whether the loop is in a phase, whose calls count as no steps."""
        return bool(self._phases)

    def enter(self, phase: str) -> None:
        """The host begins something that belongs to the next step."""
        self._recorder.enter(phase, self.next_step)

    def resume(self, phase: str, step: int) -> None:
        """The host returns to the surrounding phase, else to this one."""
        self._recorder.enter(*self._phases[-1] if self._phases else (phase, step))

    def dispatched(self, result: Any) -> None:
        """The host has dispatched the next step."""
        self._recorder.dispatched(self.next_step)
        self._dispatched.put((self.next_step, _ready_with(result)))
        self.next_step += 1
        self._between = "user code"

    def after_the_last(self) -> None:
        """There is no batch for another step."""
        if not self.in_phase:
            self._between = "after"
            self.resume(self._between, self.next_step - 1)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What runs inside belongs to this phase."""
        here = name, self.next_step - 1 if name in ("evaluate", "save") else self.next_step
        self._phases.append(here)
        self._recorder.enter(*here)
        try:
            yield
        except BaseException as error:
            client.note_phase(error, *here)
            raise
        finally:
            self._phases.pop()
            self.resume(self._between, self.next_step - 1)

    def _note_ends(self) -> None:
        """Notes the end of each step, in order, while the loop dispatches the next ones."""
        while (each := self._dispatched.get()) is not None:
            step, array = each
            with contextlib.suppress(Exception):  # the loop raises it too
                jax.block_until_ready(array)
            self._recorder.done(step)


class Guard:
    """A guarded training loop; `guard` creates one."""

    def __init__(self, monitor: client.MonitorClient, mesh: Mesh, config: Mapping[str, Any], first_step: int):
        self._monitor, self._mesh, self._config = monitor, mesh, config
        self._clock = StepClock(monitor.recorder, first_step)

    def watch(self, step: F) -> F:
        """Returns the step, guarded: every call is under the deadline for steps.

        Before the first call, and again for each new shape of its batch, its program is compared with that of the other
        processes. Within a phase, such as an evaluation, it is compared alone: the calls count as no steps.

        Raises:
            TypeError: a function that cannot be lowered.
        """
        lower = getattr(step, "lower", None)
        if lower is None:
            raise TypeError(
                f"guard: watch takes a jitted step, which has a method lower; got {step!r}. Pass the step of "
                "make_train_step, or a function under jax.jit."
            )
        clock, seen = self._clock, set[Any]()

        def watched(state: Any, *batch: Any) -> Any:
            shapes = _shapes(batch)
            if shapes not in seen:
                clock.enter("compile")
                message = fingerprint(lower(state, *batch), self._mesh, self._config)
                clock.enter("compare")
                self._monitor.agree(f"{clock.next_step}:{len(seen)}", message | {"step": clock.next_step})
                seen.add(shapes)
                clock.resume("compile", clock.next_step)
            elif not clock.in_phase:
                clock.enter("step")
            result = step(state, *batch)
            if not clock.in_phase:
                clock.dispatched(result)
            return result

        watched.lower = lower  # type: ignore[attr-defined]
        return watched  # type: ignore[return-value]

    def data(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Iterates over batches, with each wait for the next one under the deadline for data.

        What makes them must not communicate, as `from_full` does: the process that is late could not be told from those
        that wait for it.
        """
        iterator = iter(batches)
        while True:
            with self.phase("data"):
                batch = next(iterator, _END)
            if batch is _END:
                if self._monitor.place.size > 1:  # one that is alone may be a notebook, and idle
                    self._clock.after_the_last()
                return
            yield batch

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A context whose body is under the deadline of this name: `with guard.phase("save"):`.

        Raises:
            ValueError: a name without a deadline.
        """
        known = [field for field in Deadlines._fields if field != "silence"]
        if name not in known:
            raise ValueError(f"guard: a phase must have a deadline; got {name!r}. Pass one of {quoted(known)}.")
        return self._clock.phase(name)


@typed
def guard(
    *,
    mesh: Mesh | None = None,
    config: Mapping[str, Any] | None = None,
    deadlines: Deadlines | None = None,
    flight: str | Path | None = None,
    first_step: int = 0,
) -> Guard:
    """Guards a training loop: it runs on all processes, or ends on all of them with the reason.

    When a process dies, raises, is stopped, exceeds a deadline, or its machine stops answering, every process ends with
    exit code 70 (1 where the exception was raised), at most 3 s after the deadline. The last line of each names the
    process, in a job on several hosts its host, the phase and the step; what hangs prints its threads' stacks before.

    Args:
        mesh: the mesh, by default that of `jax.set_mesh`; its devices and order must be the same everywhere.
        config: what else must be the same everywhere: options by name, as JSON values.
        deadlines: seconds for each phase.
        flight: directory for the flight records: what each process did last, `flight.PROCESS.json`, on failure.
        first_step: the number of the next step, where a run resumes.

    Returns:
        A Guard: `watch(step)`, `data(batches)` and `phase(name)`.

    Raises:
        TypeError, ValueError: a deadline that is not a number above 0.

    Cost: no communication between devices. About 40 microseconds of host time per call of a step, and 0.3% of a core
        for the monitor (`benchmarks/guard.py`); the monitors exchange about 1 KB per second each.

    Example:
        A training loop, in a job that `launch` or a scheduler started:

            sk.runtime.initialize()
            guard = sk.runtime.guard(mesh=mesh, deadlines=sk.runtime.Deadlines(step=60, data=30))
            step = guard.watch(step)
            for batch in guard.data(batches):
                state, metrics = step(state, batch)
                with guard.phase("save"):
                    checkpoints.save(state)
    """
    mesh = mesh_in_context("guard", mesh)
    deadlines = Deadlines() if deadlines is None else deadlines
    check_fields(deadlines)
    for name, seconds in deadlines._asdict().items():
        if not seconds > 0:
            raise ValueError(f"Deadlines: {name} must be more than 0 seconds; got {seconds}. Raise {name}.")
    monitor = client.running() or client.start(Place("", 0, 0, 1, 0.0, False))
    monitor.tell({"deadlines": list(deadlines), "flight": str(flight) if flight else ""})
    return Guard(monitor, mesh, config or {}, first_step)


_END = object()


def _ready_with(result: Any) -> Any:
    """An array that is ready when the step has ended: one of the metrics if there are any.

    An array that the next step donates counts as ready too early. But that of the last dispatched step is not donated,
    and it is this step that the loop will wait for.
    """
    leaves = jax.tree.leaves(result[-1] if isinstance(result, tuple) else ()) + jax.tree.leaves(result)
    return next((leaf for leaf in leaves if isinstance(leaf, jax.Array)), None)


def _shapes(batch: Any) -> Any:
    leaves, structure = jax.tree.flatten(batch)
    return structure, tuple((getattr(leaf, "shape", ()), getattr(leaf, "dtype", type(leaf))) for leaf in leaves)
