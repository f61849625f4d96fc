"""Starts the processes of a job on this machine, passes on their output, ends them together, and starts them again.

A job on several machines is started by their scheduler (`manifests.py` writes its input) or, without a scheduler, by
ssh (`docs/howto/which_engine.md`).
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import BinaryIO, NamedTuple

from shardkit._arguments.checks import at_least, at_least_zero, format_count, integers_from_zero
from shardkit._arguments.files import open_file
from shardkit._arguments.typed import typed
from shardkit.jobs.output import describe_ends, pass_on, say
from shardkit.meshes.simulated import cpu_environment
from shardkit.runtime.channel.place import TOKEN, free_port

RESTARTS = "SHARDKIT_RESTARTS"  # how many there were: in the environment of the processes of a job that may restart
_LONGEST_WAIT = 60.0
_WRONG_USAGE = 2  # the exit code of command lines that are wrong: they will be wrong again

_LONGEST_BEFORE_KILL = 5.0  # seconds from SIGTERM to SIGKILL
_LAST_OUTPUT = 3.0  # seconds for the last output of what the processes started, such as their monitors
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A leader is the first of the process group of each process: while it lives, no other group can get its number. The
# keeper is in a group of its own, so that a stop of the others does not stop it. It reads their numbers from a pipe
# that only the launcher holds open: it notices the end of the launcher, even by SIGKILL, and kills the groups.
_LASTING = "trap '' HUP INT QUIT TERM USR1 USR2; "
_LEADER = ("/bin/sh", "-c", _LASTING + "exec sleep 2147483647")
_KEEPER = ("/bin/sh", "-c", _LASTING + 'ids=; while read -r id; do ids="$ids -$id"; done; kill -KILL $ids')
_Child = subprocess.Popen[bytes]
Events = queue.SimpleQueue[int | signal.Signals]  # a process that has ended, by index, or a signal to the launcher


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
) -> int:
    """Runs one command in several processes on this machine. When one process fails, it ends all, and may restart them.

    Each process gets its place in JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, and in MASTER_ADDR,
    MASTER_PORT, WORLD_SIZE, RANK and LOCAL_RANK. It also gets a new secret in SHARDKIT_JOB_TOKEN, unless the
    environment has one; no process can join without it. You see complete lines of each process's output, with the
    prefix `[index] `. When one process fails, the others have `grace` seconds to report and exit. Then they get
    SIGTERM, and after the same time again, at most 5 s, SIGKILL. The launcher passes SIGINT, SIGTERM and SIGHUP on to
    the processes, with the same consequences. Child processes that stay in the process groups end with the last
    process, and everything ends with the launcher, even by SIGKILL. Standard input is empty.

    With `restarts`, a failed job starts again with all its processes, after a wait that doubles from a second to a
    minute. Your program then resumes from its newest checkpoint. An exit code 2 (a wrong command) and a signal to the
    launcher are final. SHARDKIT_RESTARTS tells the processes the number of restarts.

    Args:
        command: the words of the command; `script.py ...` and `-m module ...` run under this Python.
        processes: number of processes.
        devices: simulated CPU devices per process; by default jax detects the devices.
        output: a directory for `INDEX.out` and `INDEX.err`: the output of each process, without prefixes.
        grace: seconds from the first failure, or from a signal, to SIGTERM.
        port: the coordinator's port; by default a free port.
        environ: the environment to start from; by default the environment of this process.
        restarts: the most restarts.

    Returns:
        0 if all processes succeed. Otherwise the exit code of the process that `guard` named, or of the first process
            that failed: 128 + s if signal s ended it, or if signal s came to the launcher and it had to kill processes.

    Raises:
        ValueError: fewer than one process or device, an invalid port, a negative grace, no command, a command that
            cannot start, or an output directory that is not writable.

    Example:
        Two processes with four simulated devices each:

            from shardkit.jobs.launch import launch

            code = launch(["train.py", "--steps", "100"], processes=2, devices=4)
    """
    at_least_zero("launch", grace=grace)
    words = find_program(command)
    check_counts("launch", processes=processes, devices=devices, port=port)
    (restarts,) = integers_from_zero("launch", restarts=restarts)
    folder = None
    if output is not None:
        folder = Path(output)
    if environ is None:
        environ = os.environ
    job = Job(words, processes, devices, folder, grace, environ)
    events: Events = queue.SimpleQueue()
    with send_signals_to(events):
        for number in range(restarts + 1):
            if restarts:
                job = job._replace(environ={**job.environ, RESTARTS: str(number)})
            with _choose_port(port) as coordinator_port:
                code, has_signal = run_attempt(job, coordinator_port, events, first=number == 0)
            is_final = has_signal or code in (0, _WRONG_USAGE)
            if is_final or number == restarts:
                break
            wait = min(2.0**number, _LONGEST_WAIT)
            say(f"restart {number + 1} with {format_count(processes, 'process', 'es')} in {wait:g} s")
            if _is_stopped_within(wait, events):
                say("ended while it waited for the restart")
                break
    return code


def _choose_port(port: int | None) -> contextlib.AbstractContextManager[int]:
    """The port of an attempt: as passed, or one that nobody else gets while it lasts."""
    if port is None:
        return free_port()
    return contextlib.nullcontext(port)


def _is_stopped_within(wait: float, events: Events) -> bool:
    """Waits, at most so many seconds, for a signal to the launcher: no process runs that could end."""
    try:
        events.get(timeout=wait)
    except queue.Empty:
        return False
    return True


def find_program(command: Sequence[str], python: str = sys.executable) -> list[str]:
    """The words to execute: scripts and modules run under `python`, anything else unchanged."""
    if not command or not command[0]:
        raise ValueError("launch: a command must be given; got none. Pass for example -- train.py --steps 100.")
    is_python = command[0] == "-m" or command[0].endswith(".py")
    if is_python:
        return [python, *command]
    return list(command)


def check_counts(where: str, *, processes: int, devices: int | None, port: int | None) -> None:
    """Refuses fewer than one process or device, and invalid ports."""
    at_least(where, 1, processes=processes, devices=devices)
    if port is not None and not 0 < port < 65536:
        raise ValueError(f"{where}: port must be from 1 to 65535; got {port}. Leave it out, or pass one above 1023.")


class Job(NamedTuple):
    """What all attempts of a job have in common."""

    words: Sequence[str]
    processes: int
    devices: int | None
    output: Path | None
    grace: float
    environ: Mapping[str, str]


def run_attempt(job: Job, port: int, events: Events, *, first: bool) -> tuple[int, bool]:
    """Starts all processes once, and waits for their end; the first attempt replaces the files of an earlier job.

    Returns the exit code of the process that the guard named, else of the first to fail, and whether a signal came.
    """
    blamed: list[int] = []  # the processes that a line of the guard names
    with ExitStack() as stack:  # exits when all processes have ended: passes on the last lines, closes files
        files: list[BinaryIO] = []
        if job.output is not None:
            files = _open_files(job.output, job.processes, stack, append=not first)
        environ = _make_environment(job, port)
        with _make_groups(job.processes) as groups:
            children = []
            for rank, group in enumerate(groups):
                place = {"JAX_PROCESS_ID": str(rank), "RANK": str(rank), "LOCAL_RANK": str(rank)}
                children.append(stack.enter_context(_start(job.words, environ | place, group)))
            reader = stack.enter_context(pass_on(children, files, blamed))
            supervision = _Supervision(children, groups, events, job.grace)
            supervision.run()
            reader.join(_LAST_OUTPUT)
    return _find_code(supervision, blamed)


def _find_code(supervision: _Supervision, blamed: Sequence[int]) -> tuple[int, bool]:
    """The exit code of an attempt that has ended, and whether a signal came; says how a failed one ended.

    Worked example: process 1 has exit code 3. The guard of process 0 then ends it with 1, and the launcher kills
    process 2. They ended in the order 1, 0, 2; if a line of the guard names process 0, it is the first: code 1.
    """
    codes = supervision.find_codes()
    received = supervision.received
    killed = supervision.find_killed()

    def priority(rank: int) -> tuple[bool, bool]:
        # That a process was killed here says nothing of it; a process that the guard named comes before others.
        return rank in killed, rank not in blamed

    order = sorted(supervision.order, key=priority)
    failed = [rank for rank in order if codes[rank]]
    if not failed:
        return 0, received is not None
    say(describe_ends(failed[0], codes, received, killed))
    code = codes[failed[0]]
    if received and failed[0] in killed:
        code = -received
    if code < 0:  # -s: a signal s ended it
        code = 128 - code
    return code, received is not None


def _make_environment(job: Job, port: int) -> dict[str, str]:
    """The environment that all processes of a job have in common."""
    common = {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": str(job.processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(job.processes),
        "PYTHONUNBUFFERED": "1",
        TOKEN: job.environ.get(TOKEN) or secrets.token_hex(32),
    }
    if job.devices is not None:
        common |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(job.devices)}
        common |= cpu_environment(job.devices, job.environ)
    return {**job.environ, **common}


def _open_files(output: Path, processes: int, stack: ExitStack, append: bool) -> list[BinaryIO]:
    """The files that the pipes are copied to: unbuffered, so that they are complete even if the launcher is killed."""
    names = []
    for rank in range(processes):
        names += [f"{rank}.out", f"{rank}.err"]
    files: list[BinaryIO] = []
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name in names:
            file = open(output / name, "ab", buffering=0, opener=open_file)  # noqa: SIM115
            files.append(stack.enter_context(file))
            _lock(file, output)
            if not append:
                with contextlib.suppress(OSError):  # a device has no length
                    file.truncate(0)
    except OSError as error:
        raise ValueError(
            f"launch: output must be a writable directory; got {error.filename} ({error.strerror}). Pass another "
            "directory."
        ) from None
    return files


def _lock(file: BinaryIO, output: Path) -> None:
    """Refuses a file of a job that runs: two would write over each other."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"launch: output must be a directory of one job; another job that runs writes to {str(output)!r}. Pass "
            "another directory, or end that job."
        ) from None
    except OSError:  # a file system without locks
        return


@contextmanager
def send_signals_to(events: Events) -> Iterator[None]:
    """Turns signals into events, except ignored ones; does nothing outside the main thread."""

    def put(number: int, frame: FrameType | None) -> None:
        events.put(signal.Signals(number))

    replaced = {}
    if threading.current_thread() is threading.main_thread():
        for number in _PASSED_ON:
            handler = signal.getsignal(number)
            if handler is not signal.SIG_IGN:
                replaced[number] = handler
    for number in replaced:
        signal.signal(number, put)
    try:
        yield
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)


@contextmanager
def _make_groups(count: int) -> Iterator[list[int]]:
    """The numbers of `count` process groups; everything in them is killed at exit, and should the launcher die."""
    keeper_end, launcher_end = os.pipe()
    nothing = subprocess.DEVNULL
    keeper = subprocess.Popen(_KEEPER, stdin=keeper_end, stdout=nothing, stderr=nothing, process_group=0)
    os.close(keeper_end)
    leaders: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            leaders.append(subprocess.Popen(_LEADER, stdin=nothing, stdout=nothing, stderr=nothing, process_group=0))
            os.write(launcher_end, b"%d\n" % leaders[-1].pid)
        yield [leader.pid for leader in leaders]
    finally:
        for leader in leaders:
            os.killpg(leader.pid, signal.SIGKILL)
            leader.wait()
        keeper.kill()  # before the pipe closes: the numbers may have become another's
        keeper.wait()
        os.close(launcher_end)


def _start(words: Sequence[str], environ: Mapping[str, str], group: int) -> _Child:
    """Starts a process in a group."""
    try:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environ,
            process_group=group,
        )
    except (OSError, ValueError) as error:  # ValueError: a null byte in a word
        reason: str | None = str(error)
        if isinstance(error, OSError):
            reason = error.strerror
        raise ValueError(
            f"launch: the command must be an executable program; got {words[0]!r} ({reason}). Give its path and "
            "permission to run, or put its interpreter first, such as python or sh."
        ) from None


class _Supervision:
    """Waits for all processes of an attempt, and ends them once one failed or a signal came.

    Worked example, with a grace of 10 s: process 1 fails at 0 s. The others may report and exit until 10 s, and those
    that still run get SIGTERM. What runs at 15 s gets SIGKILL, with everything in its process group.

    Attributes:
        order: the processes that have ended, in the order in which they ended.
        received: the first signal to the launcher, or None.
    """

    def __init__(self, children: Sequence[_Child], groups: Sequence[int], events: Events, grace: float):
        self.order: list[int] = []
        self.received: signal.Signals | None = None
        self._children = children
        self._groups = groups
        self._events = events
        self._grace = grace
        self._running = set(range(len(children)))
        self._told_to_end: set[int] = set()  # by the launcher, because the grace was over
        self._steps = [signal.SIGTERM, signal.SIGKILL]  # that are still to come
        self._deadline = math.inf  # of the next step

    def run(self) -> None:
        """Returns when all processes have ended."""
        for rank, child in enumerate(self._children):
            threading.Thread(target=_announce_end, args=(rank, child, self._events), daemon=True).start()
        while self._running:
            wait = min(max(0.0, self._deadline - time.monotonic()), threading.TIMEOUT_MAX)
            try:
                event = self._events.get(timeout=wait)
            except queue.Empty:
                self._take_step()
                continue
            self._note(event)

    def find_codes(self) -> list[int]:
        """The exit codes of all processes."""
        return [child.returncode for child in self._children]

    def find_killed(self) -> set[int]:
        """The processes that ended by a signal of the launcher, and not before it by themselves."""
        signals = (-signal.SIGTERM, -signal.SIGKILL)
        killed = set()
        for rank in self._told_to_end:
            if self._children[rank].returncode in signals:
                killed.add(rank)
        return killed

    def _note(self, event: int | signal.Signals) -> None:
        """Passes on a signal, or notes the end of a process; the first signal or failure sets the deadline."""
        failed = False
        if isinstance(event, signal.Signals):
            if self.received is None:
                self.received = event
            for rank in self._running:
                self._children[rank].send_signal(event)
        else:
            self._running.remove(event)
            self.order.append(event)
            failed = self._children[event].wait() != 0
        must_end = self.received is not None or failed
        if must_end and self._steps and self._deadline == math.inf:
            self._deadline = time.monotonic() + self._grace

    def _take_step(self) -> None:
        """Sends SIGTERM to what still runs; the next time SIGKILL."""
        step = self._steps.pop(0)
        for rank in self._running:
            if step is signal.SIGTERM:
                self._children[rank].send_signal(step)
            else:  # with its monitor, which would wonder who did it
                os.killpg(self._groups[rank], step)
        self._told_to_end |= self._running
        self._deadline = math.inf
        if self._steps:
            self._deadline = time.monotonic() + min(self._grace, _LONGEST_BEFORE_KILL)


def _announce_end(rank: int, child: _Child, events: Events) -> None:
    # Announced before it is reaped (`_note` does that): a process that waits until this one is gone, and then ends too,
    # is announced after it. Threads that reap first may announce two ends in the other order.
    if hasattr(os, "waitid"):
        with contextlib.suppress(ChildProcessError):  # reaped already, by a signal that was sent to it
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    else:  # macOS before Python 3.13
        child.wait()
    events.put(rank)
