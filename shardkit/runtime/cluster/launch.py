"""Local processes of one job: started, heard, and ended together.

Jobs on several machines are started by their scheduler (`manifests.py` writes what it needs), or, on machines that know
no scheduler, by ssh. On a TPU slice jax finds everything by itself:

    gcloud compute tpus tpu-vm ssh NAME --worker=all --command='python train.py'

On GPU machines, whose names stand one a line in the file `hosts`:

    export job="JAX_COORDINATOR_ADDRESS=$(head -n 1 hosts):12355 JAX_NUM_PROCESSES=$(wc -l < hosts)"
    nl -v 0 hosts | xargs -P 0 -L 1 sh -c 'ssh "$1" env $job JAX_PROCESS_ID="$0" python train.py'
"""

from __future__ import annotations

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
from typing import BinaryIO

from shardkit._check import finite
from shardkit._typed import typed
from shardkit.runtime.cluster.output import passing_on, write
from shardkit.runtime.cluster.preemption import PREEMPTED
from shardkit.runtime.monitor.hello import TOKEN
from shardkit.simulated import cpu_environment

_LONGEST_BEFORE_KILL = 5.0  # seconds from SIGTERM to SIGKILL
_LAST_WORDS = 3.0  # seconds that what the processes started, such as their monitors, has to say something yet
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# A keeper leads the process group of each process. Its standard input is a pipe that only the launcher holds open, so
# that it learns of the launcher's end, by SIGKILL too; and while it is there, no other group is given its number.
_KEEPER = ("/bin/sh", "-c", "trap '' HUP INT QUIT TERM USR1 USR2; read -r _; kill -KILL 0")

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
) -> int:
    """Runs `processes` processes of one command on this machine, and ends all of them when one fails.

    Each finds its place in JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, and in MASTER_ADDR,
    MASTER_PORT, WORLD_SIZE, RANK and LOCAL_RANK; and in SHARDKIT_JOB_TOKEN, if the environment has none, a new secret
    without which no other process can join. Its lines are passed on behind `[index] `, each when it is complete. When
    one fails, the others have `grace` seconds to report and to end by themselves, then they get SIGTERM, and after as
    long again, at most 5 s, SIGKILL. SIGINT, SIGTERM and SIGHUP to the launcher are passed on, with the same sequel.
    Signals reach the processes alone. What these have started ends with the last of them, and all of it with the
    launcher, even by SIGKILL, as far as it stays in their process groups. Standard input is empty.

    Args:
        command: the words of the command; `script.py ...` and `-m module ...` run under this Python.
        processes: number of processes.
        devices: simulated CPU devices in each; by default jax finds the devices.
        output: a directory for `INDEX.out` and `INDEX.err`: what each process wrote, and nothing else.
        grace: seconds from the first failure, or from a signal, to SIGTERM.
        port: the coordinator's port; by default a free one.
        environ: the environment to start from; by default that of this process.

    Returns:
        0 if all processes succeed, else the exit code of the first to fail, or of that which `guard` named: 128 + s
        when signal s ended it.

    Raises:
        ValueError: no process, no device, no such port, a negative grace, no command or one that cannot be started, or
            an output directory that cannot be written.
    """
    finite("launch", grace=grace)
    words = program(command)
    check_counts("launch", processes=processes, devices=devices, port=port)
    if not grace >= 0:
        raise ValueError(f"launch: grace must be 0 seconds or more; got {grace:g}. Raise it.")
    environ = os.environ if environ is None else environ
    events: _Events = queue.SimpleQueue()
    blamed: list[int] = []
    with ExitStack() as stack:  # what is left when all have ended: to pass on their last lines, and to close
        files = [] if output is None else _files(Path(output), processes, stack)
        common = _environment(environ, processes, devices, port or stack.enter_context(_free_port()))
        with _signals_to(events), _keepers(processes) as keepers:
            children = []
            for index, keeper in enumerate(keepers):
                own = dict.fromkeys(("JAX_PROCESS_ID", "RANK", "LOCAL_RANK"), str(index))
                children.append(stack.enter_context(_start(words, common | own, keeper.pid)))
            reader = stack.enter_context(passing_on(children, files, blamed))
            order, told = _supervised(children, events, grace)
            reader.join(_LAST_WORDS)
    failed = sorted((index for index in order if children[index].returncode), key=lambda index: index not in blamed)
    if not failed:
        return 0
    write(sys.stderr, f"shardkit launch: {_summary(failed[0], children, told)}\n".encode())
    code = children[failed[0]].returncode
    return code if code > 0 else 128 - code


def program(command: Sequence[str], python: str = sys.executable) -> list[str]:
    """The words to execute: a script and a module run under `python`, anything else as it is."""
    if not command or not command[0]:
        raise ValueError("launch: a command must be given; got none. Write for example -- train.py --steps 100.")
    return [python, *command] if command[0] == "-m" or command[0].endswith(".py") else list(command)


def check_counts(where: str, *, processes: int, devices: int | None, port: int | None) -> None:
    """Refuses fewer than one process, or than one device in each, and a port that there is not."""
    for name, count in (("processes", processes), ("devices", devices)):
        if count is not None and count < 1:
            raise ValueError(f"{where}: {name} must be at least 1; got {count}. Raise it.")
    if port is not None and not 0 < port < 65536:
        raise ValueError(f"{where}: port must be from 1 to 65535; got {port}. Choose another one.")


@contextmanager
def _free_port() -> Iterator[int]:
    """A port that no other program is given meanwhile, though process 0 may listen on it."""
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


def _files(output: Path, processes: int, stack: ExitStack) -> list[BinaryIO]:
    """The files that the pipes are copied to: unbuffered, so that they are whole whatever becomes of the launcher."""
    names = [f"{index}.{end}" for index in range(processes) for end in ("out", "err")]
    try:
        output.mkdir(parents=True, exist_ok=True)
        return [stack.enter_context(open(output / name, "wb", buffering=0)) for name in names]
    except OSError as error:
        raise ValueError(
            f"launch: output must be a directory that can be written; {error.filename} cannot ({error.strerror}). "
            "Choose another one."
        ) from None


@contextmanager
def _signals_to(events: _Events) -> Iterator[None]:
    """Signals become events; those that are ignored stay so, and other threads than the main one hear of none."""

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


@contextmanager
def _keepers(count: int) -> Iterator[list[_Child]]:
    """The leaders of `count` process groups; on the way out nothing is left in any of them."""
    theirs, ours = os.pipe()
    keepers: list[_Child] = []
    nothing = subprocess.DEVNULL
    try:
        for _ in range(count):
            keepers.append(subprocess.Popen(_KEEPER, stdin=theirs, stdout=nothing, stderr=nothing, process_group=0))
        yield keepers
    finally:
        for keeper in keepers:
            os.killpg(keeper.pid, signal.SIGKILL)
            keeper.wait()
        os.close(theirs)
        os.close(ours)


def _start(words: Sequence[str], environ: Mapping[str, str], group: int) -> _Child:
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    try:
        return subprocess.Popen(words, stdin=nothing, stdout=pipe, stderr=pipe, env=environ, process_group=group)
    except (OSError, ValueError) as error:  # ValueError: a null byte in a word
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"launch: the command must be a program that can be started; {words[0]!r} cannot ({reason}). Check its "
            "name and permissions, or write in front of it what runs it, such as python or sh."
        ) from None


def _supervised(children: Sequence[_Child], events: _Events, grace: float) -> tuple[list[int], signal.Signals | None]:
    """Waits for the end of all, hastened once one failed or a signal came: the order of their ends, and the signal."""
    for index, child in enumerate(children):
        threading.Thread(target=_announce, args=(index, child, events), daemon=True).start()
    steps, deadline = [signal.SIGTERM, signal.SIGKILL], math.inf
    running, order = set(range(len(children))), list[int]()
    told: signal.Signals | None = None
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
            told = told or event
            for index in running:
                children[index].send_signal(event)
        else:
            running.remove(event)
            order.append(event)
        if (told or children[order[-1]].returncode) and steps and deadline == math.inf:
            deadline = time.monotonic() + grace
    return order, told


def _announce(index: int, child: _Child, events: _Events) -> None:
    child.wait()
    events.put(index)


def _summary(first: int, children: Sequence[_Child], told: signal.Signals | None) -> str:
    codes = [child.returncode for child in children]
    if set(codes) == {PREEMPTED}:
        return f"all processes were told to end, and ended with exit code {PREEMPTED}"
    others = ", ".join(f"{index}: {_end(code)}" for index, code in enumerate(codes) if index != first)
    end = _end(codes[first]) if codes[first] < 0 else f"with exit code {codes[first]}"
    after = f"after {told.name} " if told else ""
    return f"{after}process {first} failed first, {end}" + (f" (others: {others})" if others else "")


def _end(code: int) -> str:
    if code >= 0:
        return str(code)
    names = {number.value: number.name for number in signal.Signals}
    return f"killed by {names.get(-code, f'signal {-code}')}"
