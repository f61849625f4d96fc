"""A job on several hosts without a scheduler: one launcher on each, which start its processes again together."""

from __future__ import annotations

import os
import queue
import re
import secrets
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from shardkit._check import at_least_zero, count, positive
from shardkit._typed import typed
from shardkit.runtime.cluster.attempt import End, Events, Job, Place, attempt, free_port, signals_to
from shardkit.runtime.cluster.attending import Attendance, News, Refusal
from shardkit.runtime.cluster.launch import check_counts, program, say
from shardkit.runtime.cluster.meeting import Limits
from shardkit.runtime.cluster.memory import JOB, delete_memory, job_of
from shardkit.runtime.cluster.messages import Ended, Over, Terms
from shardkit.runtime.cluster.restarts import RESTARTS
from shardkit.runtime.cluster.serving import Server, listener
from shardkit.runtime.monitor.hello import TOKEN


@typed
def launch_on_hosts(
    command: Sequence[str],
    *,
    meet: str,
    hosts: int,
    min_hosts: int | None = None,
    processes: int = 1,
    restarts: int = 0,
    wait: float = 30.0,
    silence: float = 10.0,
    patience: float = 600.0,
    devices: int | None = None,
    output: str | Path | None = None,
    grace: float = 10.0,
    port: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> int:
    """Runs the processes of this host in a job of several; call it on each of them, with the same SHARDKIT_JOB_TOKEN.

    The launcher on the host whose address `meet` is serves the meeting; the others connect to it, and come back when
    the connection was lost. When all hosts are there, or `min_hosts` after `wait` seconds, the meeting gives each its
    ranks, and all start their processes as `launch` does. When one fails, all end, and start again by the rules of
    `launch`. A host that is not heard for `silence` seconds is left out, and ends its own processes; when it is back,
    the processes of the others get SIGTERM, save and exit, and all start together. That is no fault. A signal ends this
    host's part; one to the launcher that serves the meeting ends the job. What a job that succeeded left in memory is
    deleted.

    Args:
        command: as for `launch`.
        meet: HOST:PORT of the meeting; HOST is one of the hosts, by an address or name that the others reach.
        hosts: number of hosts.
        min_hosts: the fewest hosts that the job runs on; by default all.
        processes: number of processes on this host.
        restarts: the most restarts in an hour, after faults.
        wait: seconds to wait for all hosts, and that an attempt runs before it ends for a host that came.
        silence: seconds without a sign of life after which a host is left out.
        patience: seconds to look for the meeting, and for the meeting to wait with fewer than `min_hosts`.
        devices: as for `launch`.
        output: a directory for `RANK.out` and `RANK.err`.
        grace: seconds from the first failure, or from a signal, to SIGTERM.
        port: the coordinator's port, if process 0 is on this host; by default a free one.
        environ: the environment to start from; by default that of this process.

    Returns:
        0 if all processes of the job succeed, else the exit code of the process that `guard` named, or of the first to
        fail; 1 if the meeting cannot be reached or too few hosts come. The same on all hosts that are there at the end.

    Raises:
        ValueError: an address without a port, no or another token, launchers that were started with other `hosts`,
            `min_hosts` or `restarts`; numbers and commands that `launch` refuses.

    Example:
        On each of three hosts, of which the first is called node0:

            code = sk.runtime.launch_on_hosts(
                ["train.py"], meet="node0:29400", hosts=3, min_hosts=2, processes=8, restarts=5
            )
    """
    at_least_zero("launch", grace=grace, wait=wait)
    positive("launch", silence=silence, patience=patience)
    words = program(command)
    check_counts("launch", processes=processes, devices=devices, port=port)
    host, meeting_port = _address(meet)
    terms = Terms(hosts, _fewest_hosts(hosts, min_hosts), *count("launch", restarts=restarts))
    environ = os.environ if environ is None else environ
    token = environ.get(TOKEN, "")
    if not token:
        raise ValueError(
            f"launch: {TOKEN} must be set to the same secret on all hosts; it is not. Run for example "
            f'export {TOKEN}="$(openssl rand -hex 32)" on one, and copy its value to the others.'
        )
    environ = {**environ, JOB: job_of(environ)}  # the same for all attempts
    job = Job(words, devices, None if output is None else Path(output), grace, environ)
    limits = Limits(terms, wait, silence, patience)
    own = secrets.token_hex(16)
    events: Events = queue.SimpleQueue()
    attendance = Attendance(
        host,
        meeting_port,
        id=own,
        processes=processes,
        terms=terms,
        token=token,
        silence=silence,
        patience=patience,
        put=events.put,
        say=say,
    )

    def received(number: signal.Signals) -> None:
        attendance.leaves(number)
        events.put(number)

    with _served(limits, host, meeting_port, own, token) as serves, signals_to(received):
        attendance.start()
        try:
            code = _launched(job, attendance, events, range(processes), port, serves)
            if not code:  # otherwise the same command may go on
                delete_memory(environ[JOB])
            return code
        finally:
            attendance.close()


def _launched(job: Job, attendance: Attendance, events: Events, here: range, port: int | None, serves: bool) -> int:
    """Starts processes as often as the meeting says, until the job is over; returns its exit code."""
    while True:
        with nullcontext(port) if port else free_port("") as own_port:  # process 0 will listen on it, if it is here
            attendance.ready(own_port)
            news = _next(attendance, events)
            if isinstance(news, signal.Signals):
                say("ended while it waited for the next start")
                return 128 + news
            if isinstance(news, Refusal):
                raise ValueError(news.text)
            if isinstance(news, Over):
                return _over(news)
            ranks = range(news.offset, news.offset + len(here))
            end = attempt(
                job._replace(environ={**job.environ, RESTARTS: str(news.attempt)}),
                Place(ranks, news.size, news.address, news.port, news.attempt),
                events,
            )
        attendance.ended(_report(news.attempt, end))
        if end.received is not None:
            last = _next(attendance, events) if serves else None  # the others end first
            return _over(last) if isinstance(last, Over) else end.code or 128 + end.received


def _next(attendance: Attendance, events: Events) -> News | signal.Signals:
    """What is to be done next: news of the meeting, or a signal."""
    while (news := attendance.news()) is None:
        event = events.get()
        if isinstance(event, signal.Signals):
            return event
    return news


def _over(news: Over) -> int:
    if news.text:
        say(news.text)
    return news.code


def _report(number: int, end: End) -> Ended:
    process, step = end.blamed or (None, None)
    return Ended(number, end.code, end.first, process, step)


@contextmanager
def _served(limits: Limits, host: str, port: int, own: str, token: str) -> Iterator[bool]:
    """Serves the meeting meanwhile, if the address is that of this host; whether it does."""
    listens = listener(host, port)
    if listens is None:
        yield False
        return
    server = Server(limits, host, listens, own, token, say)
    server.start()
    try:
        yield True
    finally:
        server.leave()


def _address(meet: str) -> tuple[str, int]:
    found = re.fullmatch(r"\[?([^\[\]\s]+?)\]?:(\d{1,5})", meet)
    if not found or not 0 < int(found[2]) < 65536 or found[1] in ("0.0.0.0", "::"):
        raise ValueError(
            f"launch: meet must be the HOST:PORT of one of the hosts; got {meet!r}. Pass for example "
            f"{socket.gethostname()}:29400 (--meet)."
        )
    return found[1], int(found[2])


def _fewest_hosts(hosts: int, min_hosts: int | None) -> int:
    hosts, fewest = count("launch", hosts=hosts, min_hosts=hosts if min_hosts is None else min_hosts)
    if not 1 <= fewest <= hosts:
        raise ValueError(
            f"launch: min_hosts must be from 1 to hosts, {hosts}; got {fewest}. Correct min_hosts (--min-hosts)."
        )
    return fewest
