"""The wire: known integers through each collective of a step, on its own mesh, while the machine is busy.

A law compares a step with one device on small arrays and a quiet machine. What carries the collectives may be wrong
only at the step's own sizes, or only under load, and then on all replicas alike, which drift detection does not see.
"""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import jax

from shardkit._arguments.checks import format_count
from shardkit._arguments.typed import Arrays, typed
from shardkit._jax import backends
from shardkit.analysis.jaxpr.step import trace_step
from shardkit.testing._wire_cases import WireProgram, group_by_mesh, list_collectives

_TIMEOUT = 300.0
# A process that is busy until its parent ends it, or has ended itself.
_BUSY_LOOP = """
import os, time
end = time.monotonic() + {seconds}
while time.monotonic() < end and os.getppid() == {parent}:
    pass
"""
_CALLS = itertools.count()  # every process makes the same calls, so that the number names one call on all


@dataclass(frozen=True)
class Delivery:
    """The collectives whose results arrived right.

    Attributes:
        collectives: a text for each, such as "reduce_scatter over 'd', float32[1024]".
        unchecked: collectives that this check cannot run.
        devices: how many devices took part.
        rounds: how often each ran, every time with other integers.
        seconds: how long the rounds took, without compilation.
    """

    collectives: tuple[str, ...]
    unchecked: tuple[str, ...]
    devices: int
    rounds: int
    seconds: float

    def __str__(self) -> str:
        unchecked = ""
        if self.unchecked:
            unchecked = "; unchecked: " + ", ".join(self.unchecked)
        if not self.collectives:
            return "wire: this step sends nothing that can be checked" + unchecked
        title = (
            f"wire: every element of {format_count(len(self.collectives), 'collective')} was right on {self.devices} "
            f"devices, in {format_count(self.rounds, 'round')} of {self.seconds:.1f} s beside busy processes{unchecked}"
        )
        return "\n    ".join([title, *self.collectives])


@typed
def wire(step: Callable[..., Any], state: Arrays, batch: Arrays, *, seconds: float = 5.0) -> Delivery:
    """Sends known integers through each collective of a step, and compares every element on every device.

    It traces the step, and does not run it. Instead it runs each of its collectives exactly as in the program
    (primitive, axes, groups, dims, dtype, shape) on the step's mesh, again and again with new integers. Each device
    computes the integers itself, and their result is exact in this dtype. In turn each process comes late and is slow:
    it shares one processor with two busy processes, which it starts and ends. In a job, call it in every process; all
    end with the same verdict. To find a random fault, you may need more seconds than the default.

    Args:
        step: the step, of shardkit or any function of arrays with `jax.shard_map`.
        state: its first argument.
        batch: its second argument.
        seconds: the time to go on after compilation; at least two rounds.

    Returns:
        The collectives, and how often each one ran; `print` it.

    Raises:
        AssertionError: a wrong element. The message names collective, device and element.
        ValueError: a mesh without devices, or `seconds` other than a positive number.
        RuntimeError: another process of the job did not call it.

    Cost: the bytes of the step, in each round.

    Example:
        >>> total = jax.jit(jax.shard_map(lambda s, x: s + jax.lax.psum(x, "model"), mesh=mesh, in_specs=P("model"),
        ...                               out_specs=P("model")))
        >>> print(sk.testing.wire(total, jnp.ones(8), jnp.ones(8), seconds=0.1).collectives[0])
        all_reduce over 'model', float32[2]
    """
    __tracebackhide__ = True
    if not 0 < seconds < math.inf:
        raise ValueError(f"wire: seconds must be a positive number; got {seconds}. Pass for example seconds=5.0.")
    cases, unchecked = list_collectives(trace_step(step, (state, batch)).jaxpr)
    if not cases:
        return Delivery((), unchecked, devices=0, rounds=0, seconds=0.0)
    programs = []
    devices = 0
    for mesh, cases_of_mesh in group_by_mesh(cases).items():
        programs.append(WireProgram(mesh, tuple(cases_of_mesh)))
        devices = max(devices, mesh.size)
    names = tuple(map(str, cases))
    call = next(_CALLS)
    start = time.monotonic()
    number = 0
    while True:
        # A load that delays all processes alike hides what goes wrong when one is slower than the others. Therefore one
        # process after the other is slow; then none.
        is_slow = number % (jax.process_count() + 1) == jax.process_index()
        with _starve(is_slow):
            fault = _find_fault(programs, number)
        elapsed = time.monotonic() - start
        # Two rounds at least: an element that is left from the round before is right in the first.
        has_enough = number > 0 and elapsed >= seconds
        verdict, is_last = _agree(call, number, fault, has_enough)
        if verdict:
            raise AssertionError(verdict)
        number += 1
        if is_last:
            return Delivery(names, unchecked, devices, number, elapsed)


def _find_fault(programs: Sequence[WireProgram], number: int) -> str:
    """The first fault of a round, as a sentence; "" if there is none."""
    for program in programs:
        fault = program.find_fault(number)
        if fault:
            return fault
    return ""


@contextmanager
def _starve(is_slow: bool) -> Iterator[None]:
    """Slows this process down: its threads share one processor with two busy processes, if threads can be bound.

    The busy processes end when the context ends, or by themselves if this process is killed. The threads are bound as
    before again.
    """
    if not is_slow:
        yield
        return
    code = _BUSY_LOOP.format(seconds=_TIMEOUT, parent=os.getpid())
    busy: list[subprocess.Popen[bytes]] = []
    processors_of_threads: dict[int, set[int]] = {}
    try:
        for _ in range(2):
            # -S: without the packages of this environment, Python starts sooner.
            busy.append(subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.DEVNULL))
        if sys.platform == "linux":
            allowed = sorted(os.sched_getaffinity(0))
            # Processes of one machine choose different processors, so that each is slow for itself.
            processor = allowed[jax.process_index() % len(allowed)]
            for process in busy:
                os.sched_setaffinity(process.pid, {processor})
            for thread in map(int, os.listdir("/proc/self/task")):
                with suppress(OSError):  # it has ended
                    processors_of_threads[thread] = os.sched_getaffinity(thread)
                    os.sched_setaffinity(thread, {processor})
        time.sleep(0.01)
        yield
    finally:
        for thread, processors in processors_of_threads.items():
            with suppress(OSError):
                os.sched_setaffinity(thread, processors)
        for process in busy:
            process.kill()
            process.wait()


def _agree(call: int, number: int, fault: str, is_last: bool) -> tuple[str, bool]:
    """The first fault that a process saw, and whether process 0 ends it: the same answer in every process.

    By jax's coordination service, since a collective would trust what is on trial.
    """
    count = jax.process_count()
    if count == 1:
        return fault, is_last
    # A message is "1" or "0", whether the process has had enough rounds, and the fault that it saw, if any.
    key = f"shardkit/wire/{call}/{number}"
    backends.tell_processes(f"{key}/{jax.process_index()}", f"{int(is_last)}{fault}")
    messages = []
    for process in range(count):
        message = backends.told(f"{key}/{process}", _TIMEOUT)
        if message is None:
            raise RuntimeError(
                f"wire: every process of a job must call it; process {process} did not come to round {number} in "
                f"{_TIMEOUT:g} s. Call wire in each process, with the same step."
            )
        messages.append(message)
    # Process 0 decides. By their own clocks processes could end in different rounds, and one would wait for the others.
    ends = messages[0].startswith("1")
    for message in messages:
        fault = message[1:]
        if fault:
            return fault, ends
    return "", ends
