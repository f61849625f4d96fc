"""One start of a job's processes on this machine: their environment, their output, and their end."""

from __future__ import annotations

import math
import os
import queue
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import BinaryIO, Literal, NamedTuple

from shardkit.runtime.cluster.groups import groups
from shardkit.runtime.cluster.output import Blamed, passing_on, summary
from shardkit.runtime.monitor.hello import TOKEN
from shardkit.simulated import cpu_environment

_LONGEST_BEFORE_KILL = 5.0  # seconds from SIGTERM to SIGKILL
_LAST_OUTPUT = 3.0  # seconds for the last output of what the processes started, such as their monitors
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_LOST = 2.0  # seconds in which the monitors may say what they know of a host that is lost

How = Literal["failed", "stop", "lost"]
_Child = subprocess.Popen[bytes]


class Call(NamedTuple):
    """What the other hosts of a job ask of this one: to end its processes.

    Attributes:
        attempt: which attempt they belong to.
        how: "failed" (one of the others did: they have the grace to report), "stop" (by SIGTERM, to save) or "lost" (a
            host is: nothing that they wait for will come).
    """

    attempt: int
    how: How


Events = queue.SimpleQueue[int | signal.Signals | Call]  # a process that has ended, by index, or what is asked of all


class Job(NamedTuple):
    """What all attempts of a job have in common."""

    words: Sequence[str]
    devices: int | None
    output: Path | None
    grace: float
    environ: Mapping[str, str]


class Place(NamedTuple):
    """Which processes of the job are started here.

    Attributes:
        ranks: theirs.
        size: number of processes of the job.
        host: the coordinator's host.
        port: its port.
        attempt: how many attempts there were before.
    """

    ranks: range
    size: int
    host: str
    port: int
    attempt: int


class End(NamedTuple):
    """How the processes of an attempt ended.

    Attributes:
        codes: the return code of each, by rank.
        first: the one that the guard named, or the first to fail; None if all succeeded.
        blamed: what the guard named, on any host; None if it named none.
        received: the signal that the launcher got.
    """

    codes: Mapping[int, int]
    first: int | None
    blamed: Blamed | None
    received: signal.Signals | None

    @property
    def code(self) -> int:
        """The exit code of `first`, or 0."""
        code = 0 if self.first is None else self.codes[self.first]
        return code if code >= 0 else 128 - code

    def __str__(self) -> str:
        return "" if self.first is None else summary(self.first, self.codes, self.received)


def attempt(job: Job, place: Place, events: Events) -> End:
    """Starts the processes of this host once, and waits for their end."""
    blamed: list[Blamed] = []
    with ExitStack() as stack:  # exits when all processes have ended: passes on the last lines, closes files
        files = [] if job.output is None else _files(job.output, place.ranks, stack, append=place.attempt > 0)
        common = _environment(job.environ, place, job.devices)
        with groups(len(place.ranks)) as theirs:
            children = []
            for index, (rank, group) in enumerate(zip(place.ranks, theirs, strict=True)):
                own = dict.fromkeys(("JAX_PROCESS_ID", "RANK"), str(rank)) | {"LOCAL_RANK": str(index)}
                children.append(stack.enter_context(_start(job.words, common | own, group)))
            reader = stack.enter_context(passing_on(children, place.ranks, files, blamed))
            order, received = _supervised(children, theirs, events, job.grace, place.attempt)
            reader.join(_LAST_OUTPUT)
    named = [each.process for each in blamed]
    codes = {rank: child.returncode for rank, child in zip(place.ranks, children, strict=True)}
    failed = sorted((place.ranks[index] for index in order), key=lambda rank: rank not in named)
    first = next((rank for rank in failed if codes[rank]), None)
    return End(codes, first, blamed[0] if blamed else None, received)


@contextmanager
def free_port(address: str = "127.0.0.1") -> Iterator[int]:
    """A port that the system gives to no other program meanwhile, though process 0 may listen on it."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((address, 0))
        yield int(reserved.getsockname()[1])


def _environment(environ: Mapping[str, str], place: Place, devices: int | None) -> dict[str, str]:
    common = {
        "JAX_COORDINATOR_ADDRESS": f"{place.host}:{place.port}",
        "JAX_NUM_PROCESSES": str(place.size),
        "MASTER_ADDR": place.host,
        "MASTER_PORT": str(place.port),
        "WORLD_SIZE": str(place.size),
        "PYTHONUNBUFFERED": "1",
        TOKEN: environ.get(TOKEN) or secrets.token_hex(32),
    }
    if devices is not None:
        common |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)} | cpu_environment(devices, environ)
    return {**environ, **common}


def _files(output: Path, ranks: range, stack: ExitStack, append: bool) -> list[BinaryIO]:
    """The files that the pipes are copied to: unbuffered, so that they are complete even if the launcher is killed."""
    names = [f"{rank}.{end}" for rank in ranks for end in ("out", "err")]
    try:
        output.mkdir(parents=True, exist_ok=True)
        return [stack.enter_context(open(output / name, "ab" if append else "wb", buffering=0)) for name in names]
    except OSError as error:
        raise ValueError(
            f"launch: output must be a writable directory; got {error.filename} ({error.strerror}). Pass another "
            "directory."
        ) from None


@contextmanager
def signals_to(put_signal: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Turns signals into events, except ignored ones; does nothing outside the main thread."""

    def put(number: int, frame: FrameType | None) -> None:
        put_signal(signal.Signals(number))

    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in _PASSED_ON if is_main}
    before = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, put)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(words: Sequence[str], environ: Mapping[str, str], group: int) -> _Child:
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    try:
        return subprocess.Popen(words, stdin=nothing, stdout=pipe, stderr=pipe, env=environ, process_group=group)
    except (OSError, ValueError) as error:  # ValueError: a null byte in a word
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"launch: the command must be an executable program; got {words[0]!r} ({reason}). Correct its name or "
            "permissions, or put its interpreter first, such as python or sh."
        ) from None


def _supervised(
    children: Sequence[_Child], groups_: Sequence[int], events: Events, grace: float, number: int
) -> tuple[list[int], signal.Signals | None]:
    """Waits for all processes, and ends them once one failed or a signal came; returns their order and the signal."""
    for index, child in enumerate(children):
        threading.Thread(target=_announce, args=(index, child, events), daemon=True).start()
    steps, deadline = [signal.SIGTERM, signal.SIGKILL], math.inf
    running, order = set(range(len(children))), list[int]()
    received: signal.Signals | None = None
    lost = False
    while running:
        try:
            event = events.get(timeout=min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX))
        except queue.Empty:
            step = steps.pop(0)
            for index in running:
                if lost:  # with their monitors, who would say that this process died
                    os.killpg(groups_[index], step)
                children[index].send_signal(step)
            deadline = time.monotonic() + min(grace, _LONGEST_BEFORE_KILL) if steps else math.inf
            continue
        called = isinstance(event, Call)
        if isinstance(event, Call):
            if event.attempt != number:  # of an earlier attempt
                continue
            for index in running if event.how == "stop" else ():
                children[index].send_signal(signal.SIGTERM)
            if event.how == "lost" and not lost:
                lost, steps = True, [signal.SIGKILL]
                deadline = time.monotonic() + min(grace, _LOST)
        elif isinstance(event, signal.Signals):
            received = received or event
            for index in running:
                children[index].send_signal(event)
        else:
            running.remove(event)
            order.append(event)
        failed = bool(order and children[order[-1]].returncode)
        if (received or called or failed) and steps and deadline == math.inf:
            deadline = time.monotonic() + grace
    return order, received


def _announce(index: int, child: _Child, events: Events) -> None:
    child.wait()
    events.put(index)
