"""Guards a training loop: the same program on all processes before the first step, a deadline for every phase."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import platform
import queue
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from importlib import metadata
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

import jax
from jax.sharding import Mesh

from shardkit._arguments.checks import mesh_in_context, quoted
from shardkit._arguments.typed import check_fields, typed
from shardkit.jobs.monitor.members import Deadlines
from shardkit.runtime.channel import client
from shardkit.runtime.channel.place import Place
from shardkit.runtime.channel.recorder import LONGEST_BATCH, Batches, Recorder

_COLLECTIVE = re.compile(
    r"stablehlo\.(all_reduce|all_gather|reduce_scatter|all_to_all|collective_permute|collective_broadcast)"
)
_PARTITIONS = re.compile(r"mhlo\.num_partitions = (\d+)")  # devices of a program, in its first line
_LINE_BYTES = 4  # of each line's hash: enough to find the line; the text is compared by a longer hash
# Paths, caches and process identities: these may differ between processes.
_OWN = re.compile(r"cache|dir|dump|path|log|visible|process|profil|traceback|address|mtls|color|num_cpu_devices")
_OWN_FLAGS = re.compile(r"dump|cache|gpu_target_config|force_host_platform_device_count")

P = ParamSpec("P")
R = TypeVar("R")


class StepClock:
    """Which step and phase the training loop is in, written to the flight recorder."""

    def __init__(self, recorder: Recorder, first_step: int):
        self._recorder = recorder
        self.next_step: int = first_step
        self._phases: list[tuple[str, int]] = []  # the ones that the loop is in, outermost first
        self._between = "user code"  # the phase outside of these
        self._dispatched: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        self._loop = recorder.begin_loop(first_step - 1)
        self._counts = True  # whether the number of a step tells which call it is
        waiter = threading.Thread(target=self._note_ends, name="shardkit-steps", daemon=True)
        waiter.start()

        def stop() -> None:  # a thread that waits inside jax while Python exits would abort the process
            self._dispatched.put(None)
            waiter.join()

        atexit.register(stop)

        def note_end() -> None:  # Python waits for other threads then
            threading.main_thread().join()
            if getattr(sys, "last_value", None) is None:  # else an error ended it, in user code
                recorder.rename_phase("user code", "after")

        threading.Thread(target=note_end, name="shardkit-end", daemon=True).start()

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
        counts = self._counts and not self.in_phase
        called = batch._replace(loop=self._loop, first=step, last=step) if counts else None
        self._recorder.enter(phase, step, called)

    def failed(self) -> None:
        """A call raised an error. A loop that goes on may call the same step again, with a smaller batch."""
        self._counts = False

    def resume(self, phase: str, step: int) -> None:
        """The host returns to the surrounding phase, else to this one."""
        self._recorder.enter(*self._phases[-1] if self._phases else (phase, step))

    def dispatched(self, result: Any) -> None:
        """The host has dispatched the next step."""
        self._recorder.note_dispatch(self.next_step)
        # Of the metrics, if there are any: what the next step donates counts as ready too early. But what the last
        # dispatched step returns is not donated, and it is this step that the loop will wait for.
        leaves = jax.tree.leaves(result[-1] if isinstance(result, tuple) else ()) + jax.tree.leaves(result)
        ready = next((leaf for leaf in leaves if isinstance(leaf, jax.Array)), None)
        self._dispatched.put((self.next_step, ready))
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
        step = self.next_step - 1 if name in ("evaluate", "save") else self.next_step
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
        while (each := self._dispatched.get()) is not None:
            step, array = each
            with contextlib.suppress(Exception):  # the loop raises it too
                jax.block_until_ready(array)
            self._recorder.note_done(step)


class Watched(Generic[P, R]):
    """A step, guarded: it is called, lowered and traced as the step is; `Guard.watch` creates one."""

    def __init__(self, step: Callable[P, R], clock: StepClock, compare: Callable[[Any, str, int], Batches]):
        self._step, self._clock, self._compare = step, clock, compare
        self._jitted: Any = step
        self._seen: dict[Any, Batches] = {}

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
        shapes = _shapes(batch)
        if shapes not in self._seen:
            self._clock.enter("compile")
            self._seen[shapes] = self._compare(self.lower(*args, **kwargs), described(batch), len(self._seen))
            self._clock.resume("compile", self._clock.next_step)
        elif not self._clock.in_phase:
            self._clock.call("step", self._seen[shapes])
        try:
            result = self._step(*args, **kwargs)
        except BaseException:
            self._clock.failed()
            raise
        if not self._clock.in_phase:
            self._clock.dispatched(result)
        return result


class Guard:
    """A guarded training loop; `guard` creates one."""

    def __init__(self, monitor: client.MonitorClient, mesh: Mesh, config: Mapping[str, Any], first_step: int):
        self._monitor, self._mesh, self._config = monitor, mesh, config
        self._clock = StepClock(monitor.recorder, first_step)

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
        message = fingerprint(lowered, self._mesh, self._config)
        called = Batches(message["hash"], batch, message["devices"] == jax.device_count())
        self._clock.call("compare", called)  # told before it waits: perhaps nobody else compares
        step = self._clock.next_step
        self._monitor.agree(f"{step}:{number}", message | {"step": step, "batch": batch})
        return called

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


def _shapes(batch: Any) -> Any:
    leaves, structure = jax.tree.flatten(batch)
    return structure, tuple((getattr(leaf, "shape", ()), getattr(leaf, "dtype", type(leaf))) for leaf in leaves)


def described(batch: Any) -> str:
    """The global shapes and dtypes of a batch's arrays, equal ones counted, for a sentence; of limited length.

    As jax takes them: a NumPy array of int64 is one of int32, and what is no array has no shape.
    """
    counts: Counter[str] = Counter()
    for leaf in jax.tree.leaves(batch):
        with contextlib.suppress(TypeError):
            value = jax.typeof(leaf)
            counts[f"{value.dtype}[{','.join(map(str, value.shape))}]"] += 1
    text = ", ".join(f"{count} x {name}" if count > 1 else name for name, count in counts.items()) or "no array"
    if len(text) <= LONGEST_BATCH:
        return text
    ending = f"... (with hash {_digest(text)})"
    return text[: LONGEST_BATCH - len(ending)] + ending


def fingerprint(lowered: Any, mesh: Mesh, config: Mapping[str, Any]) -> dict[str, Any]:
    """The components by name, and of the program a hash of every line and its collectives, to show where two differ."""
    text, versions = lowered.as_text(), {"python": platform.python_version()}
    partitions = _PARTITIONS.search(text)
    for name in ("jax", "jaxlib", "shardkit", "libtpu", "jax-cuda13-plugin"):
        for distribution in metadata.distributions(name=name):
            versions.setdefault(name, distribution.version)
    settings = {name: x for name, x in jax.config.values.items() if isinstance(x, bool | int | float | str | None)}
    components = {
        "program": _digest(text),
        "world size": jax.process_count(),
        "mesh axes": dict(mesh.shape),
        "mesh devices (id, process)": [[d.id, d.process_index] for d in mesh.devices.flat],
        **{f"version of {name}": version for name, version in versions.items()},
        "XLA_FLAGS": _flags("XLA_FLAGS"),
        "LIBTPU_INIT_ARGS": _flags("LIBTPU_INIT_ARGS"),
        **{f"setting {name}": settings[name] for name in sorted(settings) if not _OWN.search(name)},
        **{f"configuration {name}": value for name, value in config.items()},
    }
    return {
        "components": {name: json.dumps(value, default=_plain, sort_keys=True) for name, value in components.items()},
        "lines": [_digest(line)[: 2 * _LINE_BYTES] for line in text.splitlines()],
        "collectives": Counter(_COLLECTIVE.findall(text)),
        "hash": _digest(text),
        "devices": int(partitions[1]) if partitions else 1,
    }


def _plain(value: Any) -> Any:
    """A value that is no JSON as one, without what may differ between processes: the order of sets, addresses."""
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else re.sub(r" at 0x\w+", "", str(value))


def _flags(variable: str) -> str:
    return " ".join(sorted(flag for flag in os.environ.get(variable, "").split() if not _OWN_FLAGS.search(flag)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
