"""Starts the processes of a job on this machine, passes on their output and ends them together.

A job on several machines is started by their scheduler (`manifests.py` writes its input) or, without a scheduler, by
ssh (`docs/howto/which_engine.md`).
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardkit._arguments.checks import at_least, at_least_zero, count, counted
from shardkit._arguments.typed import typed
from shardkit.jobs.attempt import Events, Job, attempt, signals_to
from shardkit.jobs.output import say
from shardkit.jobs.restarts import RESTARTS, Attempt, after
from shardkit.runtime.channel.place import free_port


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
    """Runs `processes` processes of one command on this machine, ends all when one fails, and may start them again.

    Each process gets its place in JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, and in MASTER_ADDR,
    MASTER_PORT, WORLD_SIZE, RANK and LOCAL_RANK; and a new secret in SHARDKIT_JOB_TOKEN, unless the environment has
    one, without which no other process can join. Complete lines of a process's output are printed with the prefix
    `[index] `. When one process fails, the others have `grace` seconds to report and exit, then they get SIGTERM, and
    after as long again, at most 5 s, SIGKILL. SIGINT, SIGTERM and SIGHUP to the launcher are passed on to the
    processes, with the same consequences. Child processes that stay in the process groups end with the last process,
    and everything ends with the launcher, even by SIGKILL. Standard input is empty.

    With `restarts` a job that failed starts again with all its processes, and its program resumes from its newest
    checkpoint: at once where it got further than the time before, else after a wait that doubles from a second to a
    minute. A step that fails three times in a row, an exit code 2 (a wrong command) and a signal to the launcher are
    final. SHARDKIT_RESTARTS tells its processes how many restarts there were.

    Args:
        command: the words of the command; `script.py ...` and `-m module ...` run under this Python.
        processes: number of processes.
        devices: simulated CPU devices per process; by default jax detects the devices.
        output: a directory for `INDEX.out` and `INDEX.err`: the output of each process, without prefixes.
        grace: seconds from the first failure, or from a signal, to SIGTERM.
        port: the coordinator's port; by default a free one.
        environ: the environment to start from; by default that of this process.
        restarts: the most restarts in an hour.

    Returns:
        0 if all processes succeed, else the exit code of the process that `guard` named, or of the first to fail: 128
        + s if signal s ended it.

    Raises:
        ValueError: fewer than one process or device, an invalid port, a negative grace, no command or one that cannot
            be started, or an output directory that cannot be written.

    Example:
        Two processes with four simulated devices each:

            code = sk.runtime.launch(["train.py", "--steps", "100"], processes=2, devices=4)
    """
    at_least_zero("launch", grace=grace)
    words = program(command)
    check_counts("launch", processes=processes, devices=devices, port=port)
    (restarts,) = count("launch", restarts=restarts)
    folder = None if output is None else Path(output)
    job = Job(words, processes, devices, folder, grace, os.environ if environ is None else environ)
    events: Events = queue.SimpleQueue()
    past: list[Attempt] = []
    with signals_to(events):
        while True:
            if restarts:
                job = job._replace(environ={**job.environ, RESTARTS: str(len(past))})
            with contextlib.nullcontext(port) if port else free_port() as coordinator:
                past.append(attempt(job, coordinator, events, first=not past))
            if not past[-1].code:
                return 0
            wait = after(past, restarts)
            if isinstance(wait, str):
                if wait:
                    say(wait)
                return past[-1].code
            when = f"in {wait:g} s" if wait else "now"
            say(f"restart {len(past)} with {counted(processes, 'process', 'es')} {when}")
            with contextlib.suppress(queue.Empty):
                events.get(timeout=wait)
                say("ended while it waited for the restart")
                return past[-1].code


def program(command: Sequence[str], python: str = sys.executable) -> list[str]:
    """The words to execute: scripts and modules run under `python`, anything else unchanged."""
    if not command or not command[0]:
        raise ValueError("launch: a command must be given; got none. Pass for example -- train.py --steps 100.")
    return [python, *command] if command[0] == "-m" or command[0].endswith(".py") else list(command)


def check_counts(where: str, *, processes: int, devices: int | None, port: int | None) -> None:
    """Refuses fewer than one process or device, and invalid ports."""
    at_least(where, 1, processes=processes, devices=devices)
    if port is not None and not 0 < port < 65536:
        raise ValueError(f"{where}: port must be from 1 to 65535; got {port}. Leave it out, or pass one above 1023.")
