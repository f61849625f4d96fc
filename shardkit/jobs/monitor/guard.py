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
from typing import Any, Generic, ParamSpec, TypeVar

import jax
from jax.sharding import Mesh

from shardkit._arguments.checks import mesh_in_context, quote
from shardkit._arguments.typed import check_fields, typed
from shardkit.jobs.monitor.agreement import agree
from shardkit.jobs.monitor.fingerprint import describe_batch, find_shapes, make_fingerprint
from shardkit.jobs.monitor.members import Deadlines
from shardkit.runtime.channel import client
from shardkit.runtime.channel.place import Place
from shardkit.runtime.channel.recorder import Batches, Recorder

P = ParamSpec("P")
R = TypeVar("R")
_END = object()  # of the batches


class StepClock:
    """Which step and phase the training loop is in, written to the flight recorder.

    Worked example, of a loop that saves after its step 5, which the devices finish during the save. On the left what
    happens, on the right the event that is recorded:

        the loop waits for a batch           data 5
        the batch has come                   user code 4
        the step is called                   step 5
        it is dispatched                     user code 5
        `with guard.phase("save")` begins    save 5
        the devices have finished it         step done 5
        the body has ended                   user code 5
    """

    def __init__(self, recorder: Recorder, first_step: int):
        self._recorder = recorder
        self.next_step: int = first_step
        self._phases: list[tuple[str, int]] = []  # the ones that the loop is in, outermost first
        self._between = "user code"  # the phase outside of these
        self._dispatched: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        self.loop: int = recorder.begin_loop(first_step - 1)  # its number in this process
        self._counts = True  # whether the number of a step tells which call it is
        waiter = threading.Thread(target=self._note_ends, name="shardkit-steps", daemon=True)
        waiter.start()

        def stop() -> None:  # a thread that waits inside jax while Python exits would abort the process
            self._dispatched.put(None)
            waiter.join()

        atexit.register(stop)
        threading.Thread(target=_note_end_of_main, args=(recorder,), name="shardkit-end", daemon=True).start()

    @property
    def in_phase(self) -> bool:
        """Whether the loop is in a phase, whose calls count as no steps."""
        return bool(self._phases)

    def enter(self, phase: str) -> None:
        """The host begins something that belongs to the next step."""
        self._recorder.enter(phase, self.next_step)

    def call(self, phase: str, batch: Batches) -> None:
        """The host calls the next step, in this phase or after it; a call within another phase is no step."""
        step = self.next_step
        call = None
        if self._counts and not self.in_phase:
            call = batch._replace(loop=self.loop, first=step, last=step)
        self._recorder.enter(phase, step, call)

    def note_failure(self) -> None:
        """A call raised an error. A loop that goes on may call the same step again, with a smaller batch."""
        self._counts = False

    def resume(self, phase: str, step: int) -> None:
        """The host returns to the surrounding phase, else to this one."""
        if self._phases:
            phase, step = self._phases[-1]
        self._recorder.enter(phase, step)

    def note_dispatch(self, result: Any) -> None:
        """The host has dispatched the next step."""
        self._recorder.note_dispatch(self.next_step)
        self._dispatched.put((self.next_step, _find_last_array(result)))
        self.next_step += 1
        self._between = "user code"

    def note_last_batch(self) -> None:
        """There is no batch for another step."""
        if not self.in_phase:
            self._between = "after"
            self.resume(self._between, self.next_step - 1)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What runs inside belongs to this phase."""
        step = self.next_step
        if name in ("evaluate", "save"):  # of what the last step has made
            step = self.next_step - 1
        self._phases.append((name, step))
        self._recorder.enter(name, step)
        try:
            yield
        except BaseException as error:
            client.note_phase(error, name, step)
            raise
        finally:
            self._phases.pop()
            self.resume(self._between, self.next_step - 1)

    def _note_ends(self) -> None:
        """Notes the end of each step, in order, while the loop dispatches the next ones."""
        while True:
            dispatched = self._dispatched.get()
            if dispatched is None:
                return
            step, array = dispatched
            with contextlib.suppress(Exception):  # the loop raises it too
                jax.block_until_ready(array)
            self._recorder.note_done(step)


def _note_end_of_main(recorder: Recorder) -> None:
    """Notes that the main thread has ended, unless by an error: Python waits for other threads then."""
    threading.main_thread().join()
    if getattr(sys, "last_value", None) is None:
        recorder.rename_phase("user code", "after")


def _find_last_array(result: Any) -> Any:
    """An array that is ready when the step is done.

    Of the metrics, which come last, if there are any: what the next step donates counts as ready too early. But what
    the last dispatched step returns is not donated, and it is this step that the loop will wait for.
    """
    leaves = []
    if isinstance(result, tuple):
        leaves = jax.tree.leaves(result[-1])
    leaves += jax.tree.leaves(result)
    for leaf in leaves:
        if isinstance(leaf, jax.Array):
            return leaf
    return None


class Watched(Generic[P, R]):
    """A step, guarded: it is called, lowered and traced as the step is; `Guard.watch` creates one."""

    def __init__(self, step: Callable[P, R], clock: StepClock, compare: Callable[[Any, str, int], Batches]):
        self._step = step
        self._clock = clock
        self._compare = compare
        self._jitted: Any = step
        self._compared: dict[Any, Batches] = {}  # by the shapes of the batch

    @property
    def lower(self) -> Callable[P, jax.stages.Lowered]:
        """The program of one call, for the compiler."""
        return self._jitted.lower

    @property
    def trace(self) -> Callable[P, jax.stages.Traced]:
        """The program of one call, as a jaxpr: for a census, and whatever else reads steps."""
        return self._jitted.trace

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """What the step returns."""
        batch = args[1:], kwargs
        shapes = find_shapes(batch)
        # jit compiles for these shapes, too, or has compiled for them before the guard.
        if shapes not in self._compared:
            self._clock.enter("compile")
            lowered = self.lower(*args, **kwargs)
            number = len(self._compared)
            self._compared[shapes] = self._compare(lowered, describe_batch(batch), number)
            self._clock.resume("compile", self._clock.next_step)
        elif not self._clock.in_phase:  # else the deadline of the phase holds
            self._clock.call("step", self._compared[shapes])
        try:
            result = self._step(*args, **kwargs)
        except BaseException:
            self._clock.note_failure()
            raise
        if not self._clock.in_phase:
            self._clock.note_dispatch(result)
        return result


class Guard:
    """A guarded training loop; `guard` creates one."""

    def __init__(self, monitor: client.MonitorClient, mesh: Mesh, config: Mapping[str, Any], first_step: int):
        self._monitor = monitor
        self._mesh = mesh
        self._config = config
        self._clock = StepClock(monitor.recorder, first_step)
        self._comparisons = 0  # of programs so far

    def watch(self, step: Callable[P, R]) -> Watched[P, R]:
        """Returns the step, guarded: every call is under the deadline for steps.

        Before the first call, and again for each new shape of its batch, its program is compared with that of the other
        processes. Within a phase, such as an evaluation, it is compared alone: the calls count as no steps. Where a
        process calls a step with a batch of other global shapes or dtypes than the others, the job ends with both.

        Raises:
            TypeError: a function that cannot be lowered.
        """
        if not hasattr(step, "lower"):
            raise TypeError(
                f"guard: watch takes a jitted step, which has a method lower; got {step!r}. Pass the step of "
                "make_train_step, or a function under jax.jit."
            )
        return Watched(step, self._clock, self._compare)

    def _compare(self, lowered: Any, batch: str, number: int) -> Batches:
        """Compares a program of the next step, the `number`th, with that of the other processes."""
        # Here and no later: the first collective of a step that only some processes run, or that is another one on one
        # of them, waits for ever or sums numbers of unrelated arrays. And no earlier: only the lowered program shows
        # what the step is, with the shapes of this batch. Two processes that compare in another order than each other,
        # or one alone, wait under the deadline for compiling.
        fingerprint = make_fingerprint(lowered, self._mesh, self._config)
        is_everywhere = fingerprint["devices"] == jax.device_count()
        call = Batches(fingerprint["hash"], batch, is_everywhere)
        self._clock.call("compare", call)  # recorded before it waits: perhaps nobody else compares
        step = self._clock.next_step
        name = f"{self._clock.loop}/{self._comparisons}/{step}:{number}"
        self._comparisons += 1
        agree(self._monitor, name, fingerprint | {"step": step, "batch": batch})
        return call

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
                    self._clock.note_last_batch()
                return
            yield batch

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A context whose body is under the deadline of this name: `with guard.phase("save"):`.

        Raises:
            ValueError: a name without a deadline.
        """
        names = list(Deadlines._fields)
        names.remove("silence")
        if name not in names:
            raise ValueError(f"guard: a phase must have a deadline; got {name!r}. Pass one of {quote(names)}.")
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
    exit code 70 (the process with the exception: 1), at most 3 s after the deadline. The last line of each process
    names the process at fault, its host if there are several, the phase and the step. A process that hangs prints the
    stacks of its threads first.

    Args:
        mesh: the mesh, by default the mesh of `jax.set_mesh`; its devices and order must be the same everywhere.
        config: further options that must be the same everywhere, by name, as JSON values.
        deadlines: seconds for each phase.
        flight: directory for the flight records, `flight.PROCESS.json`: the last actions of each process, on failure.
        first_step: the number of the next step, if you resume a run.

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
    if deadlines is None:
        deadlines = Deadlines()
    check_fields(deadlines)
    for name, seconds in deadlines._asdict().items():
        if not seconds > 0:
            raise ValueError(f"Deadlines: {name} must be more than 0 seconds; got {seconds}. Raise {name}.")
    monitor = client.find_monitor()
    if monitor is None:
        monitor = client.start(Place("", 0, 0, 1, 0.0, False))
    folder = str(flight) if flight else ""
    monitor.tell({"deadlines": list(deadlines), "flight": folder})
    return Guard(monitor, mesh, config or {}, first_step)
