"""Starts the processes of a job on this machine, passes on their output and ends them together.

A job on several machines is started by their scheduler (`manifests.py` writes its input) or, without a scheduler, by
ssh. On a TPU slice jax detects everything:

    gcloud compute tpus tpu-vm ssh NAME --worker=all --command='python train.py'

On GPU machines, with their names in the file `hosts`, one per line:

    export job="JAX_COORDINATOR_ADDRESS=$(head -n 1 hosts):12355 JAX_NUM_PROCESSES=$(wc -l < hosts)"
    nl -v 0 hosts | xargs -P 0 -L 1 sh -c 'ssh "$1" env $job JAX_PROCESS_ID="$0" python train.py'
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import BinaryIO, NamedTuple

from shardkit._check import at_least, at_least_zero, count, counted
from shardkit._typed import typed
from shardkit.runtime.cluster.groups import groups
from shardkit.runtime.cluster.output import Blamed, passing_on, summary, write
from shardkit.runtime.cluster.restarts import RESTARTS, Attempt, after, fewest
from shardkit.runtime.monitor.hello import TOKEN
from shardkit.simulated import cpu_environment

_LONGEST_BEFORE_KILL = 5.0  # seconds from SIGTERM to SIGKILL
_LAST_OUTPUT = 3.0  # seconds for the last output of what the processes started, such as their monitors
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_Child = subprocess.Popen[bytes]
_Events = queue.SimpleQueue[int | signal.Signals]  # the index of a process that has ended, or a signal for the launcher


@typed
def launch(
    command: Sequence[str],
    *,
    processes: int,
    devices: int | None = None,
    output: str | Path | None = None,
    grace: float = 10.0,
    port: int | None = None,
    environ: Mapping[str, str] | None = None,
    restarts: int = 0,
    minimum: int | None = None,
) -> int:
    """Runs `processes` processes of one command on this machine, ends all when one fails, and may start them again.

    Each process gets its place in JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, and in MASTER_ADDR,
    MASTER_PORT, WORLD_SIZE, RANK and LOCAL_RANK; and a new secret in SHARDKIT_JOB_TOKEN, unless the environment has
    one, without which no other process can join. Complete lines of its output are printed with the prefix `[index] `.
    When one process fails, the others have `grace` seconds to report and exit, then they get SIGTERM, and after as long
    again, at most 5 s, SIGKILL. SIGINT, SIGTERM and SIGHUP to the launcher are passed on to the processes, with the
    same consequences. Child processes that stay in the process groups end with the last process, and everything ends
    with the launcher, even by SIGKILL. Standard input is empty.

    With `restarts` a job that failed starts again, and its program resumes from its newest checkpoint. It has
    `processes` processes again; one fewer, down to `minimum`, after two attempts that did not get further. The wait
    before doubles from a second to a minute. A step that fails three times in a row, an exit code 2 (a wrong command)
    and a signal to the launcher are final. SHARDKIT_RESTARTS tells its processes how many restarts there were.

    Args:
        command: the words of the command; `script.py ...` and `-m module ...` run under this Python.
        processes: number of processes.
        devices: simulated CPU devices per process; by default jax detects the devices.
        output: a directory for `INDEX.out` and `INDEX.err`: the output of each process, without prefixes.
        grace: seconds from the first failure, or from a signal, to SIGTERM.
        port: the coordinator's port; by default a free one.
        environ: the environment to start from; by default that of this process.
        restarts: the most restarts in an hour.
        minimum: the fewest processes of a restart; by default `processes`.

    Returns:
        0 if all processes succeed, else the exit code of the process that `guard` named, or of the first to fail: 128
        + s if signal s ended it.

    Raises:
        ValueError: fewer than one process or device, an invalid port, a negative grace, no command or one that cannot
            be started, an output directory that cannot be written, or a minimum above `processes` or without restarts.

    Example:
        Two processes with four simulated devices each:

            code = sk.runtime.launch(["train.py", "--steps", "100"], processes=2, devices=4)
    """
    at_least_zero("launch", grace=grace)
    words = program(command)
    check_counts("launch", processes=processes, devices=devices, port=port)
    least = fewest(processes, minimum, *count("launch", restarts=restarts))
    job = _Job(
        words,
        devices,
        None if output is None else Path(output),
        grace,
        port,
        os.environ if environ is None else environ,
    )
    events: _Events = queue.SimpleQueue()
    past: list[Attempt] = []
    now = processes
    with _signals_to(events):
        while True:
            if restarts:
                job = job._replace(environ={**job.environ, RESTARTS: str(len(past))})
            past.append(_attempt(job, now, len(past), events))
            if not past[-1].code:
                return 0
            then = after(past, processes=processes, minimum=least, restarts=restarts)
            if isinstance(then, str):
                if then:
                    _say(then)
                return past[-1].code
            now = then.processes
            _say(f"restart {len(past)} with {counted(now, 'process', 'es')} in {then.wait:g} s")
            with contextlib.suppress(queue.Empty):
                events.get(timeout=then.wait)
                _say("ended while it waited for the restart")
                return past[-1].code


class _Job(NamedTuple):
    """What all attempts of a job have in common."""

    words: Sequence[str]
    devices: int | None
    output: Path | None
    grace: float
    port: int | None
    environ: Mapping[str, str]


def _attempt(job: _Job, processes: int, restarts: int, events: _Events) -> Attempt:
    """Starts all processes once, and waits for their end."""
    blamed: list[Blamed] = []
    began = time.monotonic()
    with ExitStack() as stack:  # exits when all processes have ended: passes on the last lines, closes files
        files = [] if job.output is None else _files(job.output, processes, stack, append=restarts > 0)
        port = job.port or stack.enter_context(_free_port())
        common = _environment(job.environ, processes, job.devices, port)
        with groups(processes) as theirs:
            children = []
            for index, group in enumerate(theirs):
                own = dict.fromkeys(("JAX_PROCESS_ID", "RANK", "LOCAL_RANK"), str(index))
                children.append(stack.enter_context(_start(job.words, common | own, group)))
            reader = stack.enter_context(passing_on(children, files, blamed))
            order, received = _supervised(children, events, job.grace)
            reader.join(_LAST_OUTPUT)
    named = [each.process for each in blamed]
    failed = sorted((index for index in order if children[index].returncode), key=lambda index: index not in named)
    code = 0
    if failed:
        _say(summary(failed[0], [child.returncode for child in children], received))
        code = children[failed[0]].returncode
    step = blamed[0].step if blamed else None
    return Attempt(processes, code if code >= 0 else 128 - code, step, began, time.monotonic(), received is not None)


def _say(text: str) -> None:
    write(sys.stderr, f"shardkit launch: {text}\n".encode())


def program(command: Sequence[str], python: str = sys.executable) -> list[str]:
    """The words to execute: scripts and modules run under `python`, anything else unchanged."""
    if not command or not command[0]:
        raise ValueError("launch: a command must be given; got none. Pass for example -- train.py --steps 100.")
    return [python, *command] if command[0] == "-m" or command[0].endswith(".py") else list(command)


def check_counts(where: str, *, processes: int, devices: int | None, port: int | None) -> None:
    """Refuses fewer than one process or device, and invalid ports."""
    at_least(where, 1, processes=processes, devices=devices)
    if port is not None and not 0 < port < 65536:
        raise ValueError(f"{where}: port must be from 1 to 65535; got {port}. Correct port.")


@contextmanager
def _free_port() -> Iterator[int]:
    """A port that the system gives to no other program meanwhile, though process 0 may listen on it."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield int(reserved.getsockname()[1])


def _environment(environ: Mapping[str, str], processes: int, devices: int | None, port: int) -> dict[str, str]:
    place = {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(processes),
        "PYTHONUNBUFFERED": "1",
        TOKEN: environ.get(TOKEN) or secrets.token_hex(32),
    }
    if devices is not None:
        place |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)} | cpu_environment(devices, environ)
    return {**environ, **place}


def _files(output: Path, processes: int, stack: ExitStack, append: bool) -> list[BinaryIO]:
    """The files that the pipes are copied to: unbuffered, so that they are complete even if the launcher is killed."""
    names = [f"{index}.{end}" for index in range(processes) for end in ("out", "err")]
    try:
        output.mkdir(parents=True, exist_ok=True)
        return [stack.enter_context(open(output / name, "ab" if append else "wb", buffering=0)) for name in names]
    except OSError as error:
        raise ValueError(
            f"launch: output must be a writable directory; got {error.filename} ({error.strerror}). Pass another "
            "directory."
        ) from None


@contextmanager
def _signals_to(events: _Events) -> Iterator[None]:
    """Turns signals into events, except ignored ones; does nothing outside the main thread."""

    def put(number: int, frame: FrameType | None) -> None:
        events.put(signal.Signals(number))

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


def _supervised(children: Sequence[_Child], events: _Events, grace: float) -> tuple[list[int], signal.Signals | None]:
    """Waits for all processes, and ends them once one failed or a signal came; returns their order and the signal."""
    for index, child in enumerate(children):
        threading.Thread(target=_announce, args=(index, child, events), daemon=True).start()
    steps, deadline = [signal.SIGTERM, signal.SIGKILL], math.inf
    running, order = set(range(len(children))), list[int]()
    received: signal.Signals | None = None
    while running:
        try:
            event = events.get(timeout=min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX))
        except queue.Empty:
            step = steps.pop(0)
            for index in running:
                children[index].send_signal(step)
            deadline = time.monotonic() + min(grace, _LONGEST_BEFORE_KILL) if steps else math.inf
            continue
        if isinstance(event, signal.Signals):
            received = received or event
            for index in running:
                children[index].send_signal(event)
        else:
            running.remove(event)
            order.append(event)
        if (received or children[order[-1]].returncode) and steps and deadline == math.inf:
            deadline = time.monotonic() + grace
    return order, received


def _announce(index: int, child: _Child, events: _Events) -> None:
    child.wait()
    events.put(index)
