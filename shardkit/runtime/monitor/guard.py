"""The guard of a run: the same program everywhere before the first step, a deadline for every phase after it."""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from shardkit._check import quoted
from shardkit._typed import check_fields, typed
from shardkit.runtime.monitor import client
from shardkit.runtime.monitor.fingerprint import fingerprint
from shardkit.runtime.monitor.hello import Place
from shardkit.runtime.monitor.judge import Deadlines


class Guard(NamedTuple):
    """The functions of a guarded run.

    Attributes:
        watch: `watch(step) -> step`: compares its program with the other processes' before it runs first, and again
            for each new shape of its batch; then watches every call. The result is used as the step was. Within a
            phase, such as an evaluation, it only compares: the calls belong to the phase and count as no steps.
        data: `data(batches)`: iterates over them, each wait for the next under the deadline for data.
        phase: `with phase("save"):` puts what it encloses under the deadline of that name.
    """

    watch: Callable[[Callable[..., Any]], Callable[..., Any]]
    data: Callable[[Iterable[Any]], Iterator[Any]]
    phase: Callable[[str], AbstractContextManager[None]]


@typed
def guard(
    *,
    mesh: Mesh,
    config: Mapping[str, Any] | None = None,
    deadlines: Deadlines | None = None,
    flight: str | Path | None = None,
    first_step: int = 0,
) -> Guard:
    """Guards a training loop: it runs on all processes alike, or ends on all of them with the reason.

    ```python
    sk.runtime.initialize()
    guard = sk.runtime.guard(mesh=mesh, config=vars(options), deadlines=sk.runtime.Deadlines(step=60, data=30))
    step = guard.watch(step)
    for batch in guard.data(batches):
        state, metrics = step(state, batch)
    ```

    When a process ends without a word (killed), raises, is stopped, is late, or its machine is no longer heard of,
    every process ends with exit code 70 (1 where the exception was raised), at most 3 s after the deadline. The last
    line of each says which process it was, in which phase of which step.

    Args:
        mesh: the mesh, whose devices and order must be the same everywhere.
        config: what else must be the same everywhere: options by name, as JSON can hold them.
        deadlines: seconds for each phase.
        flight: directory for the flight records: what each process did last, `flight.PROCESS.json`, on failure.
        first_step: the number of the next step, where a run goes on.

    Returns:
        Guard(watch, data, phase).

    Raises:
        TypeError, ValueError: a deadline that is no number above 0.

    Cost: no communication between devices. About 40 microseconds of the host for each call of a step, and 0.3% of a
        core for the monitor (`benchmarks/guard.py`); the monitors exchange about 1 KB a second each.
    """
    deadlines = Deadlines() if deadlines is None else deadlines
    check_fields(deadlines)
    for name, seconds in deadlines._asdict().items():
        if not seconds > 0:
            raise ValueError(f"Deadlines: {name} must be more than 0 seconds; got {seconds}. Raise it.")
    watcher = client.running() or client.start(Place("", 0, 0, 1, 0.0, False))
    watcher.tell({"deadlines": list(deadlines), "flight": str(flight) if flight else ""})
    recorder = watcher.recorder
    recorder.restart(first_step - 1)
    finished: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
    waiter = threading.Thread(target=_wait, args=(finished, recorder.done), name="shardkit-steps", daemon=True)
    waiter.start()

    def ends() -> None:  # a thread that waits inside jax while Python ends would abort the process
        finished.put(None)
        waiter.join()

    atexit.register(ends)
    next_step = first_step
    within: list[tuple[str, int]] = []  # the phases that the loop is in

    def watch(step: Callable[..., Any]) -> Callable[..., Any]:
        lower = check_step(step)
        seen: set[Any] = set()

        def watched(state: Any, *batch: Any) -> Any:
            nonlocal next_step
            index = next_step
            shapes = _shapes(batch)
            if shapes not in seen:
                recorder.enter("compile", index)
                message = fingerprint(lower(state, *batch), mesh, config or {})
                recorder.enter("agree", index)
                watcher.agree(f"{index}:{len(seen)}", message | {"step": index})
                seen.add(shapes)
                recorder.enter(*within[-1] if within else ("compile", index))
            elif not within:
                recorder.enter("step", index)
            result = step(state, *batch)
            if within:
                return result
            recorder.dispatched(index)
            finished.put((index, _telling(result)))
            next_step = index + 1
            return result

        watched.lower = lower  # type: ignore[attr-defined]
        return watched

    def data(batches: Iterable[Any]) -> Iterator[Any]:
        iterator = iter(batches)
        while True:
            with phase("data"):
                batch = next(iterator, _END)
            if batch is _END:
                return
            yield batch

    @contextlib.contextmanager
    def phase(name: str) -> Iterator[None]:
        check_phase(name)
        within.append((name, next_step - 1 if name in ("evaluate", "save") else next_step))
        recorder.enter(*within[-1])
        try:
            yield
        except BaseException as error:
            client.in_phase(error, *within[-1])
            raise
        finally:
            within.pop()
            recorder.enter(*within[-1] if within else ("host", next_step - 1))

    return Guard(watch, data, phase)


def check_step(step: Any) -> Callable[..., Any]:
    """The step's `lower`; what has none cannot be compared before it runs."""
    lower = getattr(step, "lower", None)
    if lower is None:
        raise TypeError(
            f"guard: watch takes a compiled step, which has a method lower; got {step!r}. Pass the step of "
            "make_train_step, or a function under jax.jit."
        )
    return lower


def check_phase(name: str) -> None:
    """Whether a phase has a deadline."""
    known = [field for field in Deadlines._fields if field != "silence"]
    if name not in known:
        raise ValueError(
            f"guard: a phase must be one with a deadline: {quoted(known)}; got {name!r}. Choose one of them."
        )


_END = object()


def _wait(finished: queue.SimpleQueue[tuple[int, Any] | None], done: Callable[[int], None]) -> None:
    """Notes each step's end, in order, without holding up the loop that dispatches them."""
    while (each := finished.get()) is not None:
        step, result = each
        with contextlib.suppress(Exception):  # the loop itself will meet it
            jax.block_until_ready(result)
        done(step)


def _telling(result: Any) -> Any:
    """An array that tells when the step has ended, one of the metrics if there are any.

    One that the next step is given to donate tells it too soon, but not that of the last step dispatched, which is what
    the loop will wait for.
    """
    leaves = jax.tree.leaves(result[-1] if isinstance(result, tuple) else ()) + jax.tree.leaves(result)
    return next((leaf for leaf in leaves if isinstance(leaf, jax.Array)), None)


def _shapes(batch: Any) -> Any:
    leaves, structure = jax.tree.flatten(batch)
    return structure, tuple((getattr(leaf, "shape", ()), getattr(leaf, "dtype", type(leaf))) for leaf in leaves)
