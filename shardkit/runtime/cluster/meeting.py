"""Which hosts of a job run its next attempt, and what follows its end: decisions without sockets, processes or clocks.

One launcher runs on each host, and one of them serves the meeting (`serving.py`). A launcher that has no processes is
ready. When all are, or enough for long enough, an attempt starts: the hosts in it are its members. It is over when all
of them have reported the end of their processes, or were left out. Then `restarts.after` decides, as on one host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from shardkit._check import counted
from shardkit.runtime.cluster.attempt import How
from shardkit.runtime.cluster.messages import (
    Arrival,
    Ended,
    Leaves,
    Note,
    Over,
    Ready,
    Start,
    Stop,
    Terms,
    ToLauncher,
    ToMeeting,
)
from shardkit.runtime.cluster.restarts import Attempt, after

_FAILED = 1  # the exit code where no process gave one


class Limits(NamedTuple):
    """What decides who takes part.

    Attributes:
        terms: the number of hosts, and of restarts.
        wait: seconds until an attempt starts with fewer hosts, and that it lasts before it ends for a newcomer.
        silence: seconds without a message after which a host is left out.
        patience: seconds with too few hosts after which the job ends.
    """

    terms: Terms
    wait: float
    silence: float
    patience: float


@dataclass
class Host:
    """What the meeting knows of one launcher.

    Attributes:
        name: of its machine.
        address: by which the others reach it.
        processes: how many it starts.
        serves: whether the meeting is in it.
        heard: when its last message came.
        port: where rank 0 can listen there; 0 while it has processes.
        signal: what it was ended by; 0 if it was not.
    """

    name: str
    address: str
    processes: int
    serves: bool
    heard: float
    port: int = 0
    signal: int = 0


@dataclass
class _Running:
    """An attempt: its members in the order of their ranks, how far it has ended, and whether it was for a fault."""

    members: dict[str, Host]
    began: float
    reports: dict[str, Ended] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    fault: bool | None = None  # None: it goes on


def begins(ready: int, expected: int, fewest: int, waited: float, wait: float) -> bool:
    """Whether an attempt starts with the hosts that are ready."""
    return ready >= max(expected, fewest) or (ready >= fewest and waited >= wait)


def in_order(hosts: Mapping[str, Host]) -> dict[str, Host]:
    """Hosts in the order of their ranks: the meeting's first, without which the others cannot go on anyway."""
    return dict(sorted(hosts.items(), key=lambda item: (not item[1].serves, item[1].name, item[0])))


def starts(members: Mapping[str, Host], attempt: int) -> dict[str, Start]:
    """What each member is told to start."""
    size, first = sum(host.processes for host in members.values()), next(iter(members.values()))
    told, offset = {}, 0
    for id, host in members.items():
        told[id] = Start(attempt, size, offset, first.address, first.port)
        offset += host.processes
    return told


def outcome(reports: Iterable[Ended]) -> Ended | None:
    """The report of the host whose process failed first, by the word of the guard, else by time; None if none did."""
    failed = [report for report in reports if report.code]
    blame = next((report for report in failed if report.blamed is not None), None)
    if blame is None:
        return failed[0] if failed else None
    own = next((report for report in failed if report.first == blame.blamed), blame)
    return own._replace(blamed=blame.blamed, step=blame.step)


class Meeting:
    """The meeting of the launchers of a job; `now` is in seconds of any clock.

    Attributes:
        hosts: those that take part, by the id of their launcher.
        out: what is to be sent, and to which of them.
        over: how the job ended; None while it goes on.
    """

    def __init__(self, limits: Limits, now: float):
        self.limits = limits
        self.hosts: dict[str, Host] = {}
        self.out: list[tuple[str, ToLauncher]] = []
        self.over: Over | None = None
        self._running: _Running | None = None
        self._past: list[Attempt] = []  # those that count as faults
        self._number = 0  # attempts so far
        self._gathers = now  # since when
        self._not_before = now
        self._expected = limits.terms.hosts
        self._told_to_wait = False

    def arrives(self, arrival: Arrival, address: str, serves: bool, now: float) -> bool:
        """Takes a launcher in, unless the job has all its hosts."""
        if arrival.id in self.hosts:
            self.loses(arrival.id, "it connected again", now)
        if len(self.hosts) >= self.limits.terms.hosts or self.over:
            return False
        self.hosts[arrival.id] = Host(arrival.host, address, arrival.processes, serves, now)
        return True

    def hears(self, id: str, message: ToMeeting, now: float) -> None:
        """Takes note of a message."""
        host = self.hosts.get(id)
        if host is None or self.over:
            return
        host.heard = now
        run = self._running
        if isinstance(message, Ready):
            if run is None or id not in run.members or id in run.reports or id in run.lost:
                host.port = message.port
        elif isinstance(message, Leaves):
            host.signal = message.signal
            host.port = 0
            if run is not None and id in run.members:
                self._end(run, "stop", but=id)
        elif (
            isinstance(message, Ended) and run is not None and id in run.members and message.attempt == self._number - 1
        ):
            run.reports.setdefault(id, message)
            if message.code and not host.signal:
                self._end(run, "failed", but=id)
            self._conclude(run, now)

    def loses(self, id: str, why: str, now: float) -> None:
        """Leaves a launcher out."""
        host, run = self.hosts.pop(id, None), self._running
        if host is None or self.over:
            return
        if not host.signal:
            self._say(f"host {host.name} is left out: {why}")
        if run is not None and id in run.members:
            if id not in run.reports:
                run.lost.add(id)
                self._end(run, "stop" if host.signal else "lost", but=id)
            self._conclude(run, now)

    def ends(self, text: str) -> None:
        """Ends the job, if nothing else has."""
        if not self.over:
            self._finish(_FAILED, text)

    def tick(self, now: float) -> None:
        """Does what time asks for."""
        for id, host in list(self.hosts.items()):
            if now - host.heard > self.limits.silence and not self.over:
                self.loses(id, f"it was not heard for {self.limits.silence:g} s", now)
        if self.over:
            return
        ready = {id: host for id, host in self.hosts.items() if host.port}
        run = self._running
        if run is not None:
            came = [host.name for id, host in ready.items() if id not in run.members]
            if came and run.fault is None and now - run.began >= self.limits.wait:
                names = ", ".join(came)
                self._say(f"{names} came: the others end, to start again together")
                self._end(run, "stop")
        elif now >= self._not_before:
            self._gather(ready, now)

    def _gather(self, ready: Mapping[str, Host], now: float) -> None:
        terms, waited = self.limits.terms, now - self._gathers
        if begins(len(ready), self._expected, terms.min_hosts, waited, self.limits.wait):
            members = in_order(ready)
            told = starts(members, self._number)
            size = sum(host.processes for host in members.values())
            what = f"restart {self._number}: " if self._number else ""
            number = f"{len(members)} of {counted(terms.hosts, 'host')}"
            names = ", ".join(host.name for host in members.values())
            self._say(f"{what}{counted(size, 'process', 'es')} on {number} ({names})")
            self.out += told.items()
            self._running = _Running(members, now)
            self._number += 1
            for host in members.values():
                host.port = 0
        elif waited >= self.limits.patience:
            self._finish(
                _FAILED,
                f"{len(ready)} of at least {counted(terms.min_hosts, 'host')} (--min-hosts) came within "
                f"{self.limits.patience:g} s: start `shardkit launch` on the others again",
            )
        elif waited >= self.limits.wait and not self._told_to_wait:
            self._told_to_wait = True
            self._say(f"{len(ready)} of at least {counted(terms.min_hosts, 'host')} so far; it waits for more")

    def _end(self, run: _Running, how: How, but: str = "") -> None:
        """Has the members end their processes; the first reason says whether it was a fault."""
        if run.fault is None or how == "lost":
            run.fault = how != "stop" if run.fault is None else run.fault
            stop = Stop(self._number - 1, how)
            self.out += [(id, stop) for id in run.members if id in self.hosts and id != but and id not in run.reports]

    def _conclude(self, run: _Running, now: float) -> None:
        """Decides what follows, once all members have ended or were left out."""
        if run.reports.keys() | run.lost != run.members.keys():
            return
        self._running = None
        for id in [id for id, host in self.hosts.items() if host.signal and not host.serves]:
            del self.hosts[id]  # it does not come back
        found = outcome(run.reports.values())
        signalled = next((host.signal for host in run.members.values() if host.serves), 0)
        if found is None and not run.lost:
            self._finish(0, "")
            return
        code = found.code if found else _FAILED
        self._gathers = self._not_before = now
        self._told_to_wait = False
        if signalled:
            self._finish(found.code if found else 128 + signalled, "")
        elif run.fault:
            self._fault(run, found, code, now)
        else:
            self._expected = len(self.hosts)

    def _fault(self, run: _Running, found: Ended | None, code: int, now: float) -> None:
        size = sum(host.processes for host in run.members.values())
        if found is not None and run.lost and found.blamed not in self._ranks(run):
            found = found._replace(step=None)  # it was ended for the host that was lost
        self._past.append(Attempt(size, code, found.step if found else None, run.began, now, signalled=False))
        if found is not None and found.first is not None and not run.lost:
            host = next(run.members[id].name for id, report in run.reports.items() if report.first == found.first)
            self._say(f"process {found.first} on {host} failed first, exit code {code}")
        # A host that does not come back is what makes the job smaller, not a number of failures.
        then = after(self._past, processes=size, minimum=size, restarts=self.limits.terms.restarts)
        if isinstance(then, str):
            self._finish(code, then)
            return
        self._not_before = now + then.wait
        self._expected = len(run.members)
        if run.lost:
            names = ", ".join(run.members[id].name for id in run.lost)
            self._say(f"waits {self.limits.wait:g} s for {names}, then goes on without")

    def _ranks(self, run: _Running) -> set[int]:
        """Those on the hosts that were lost."""
        told = starts(run.members, 0)
        return {told[id].offset + index for id in run.lost for index in range(run.members[id].processes)}

    def _finish(self, code: int, text: str) -> None:
        self.over = Over(code, text)
        self.out += [(id, self.over) for id in self.hosts]

    def _say(self, text: str) -> None:
        self.out += [(id, Note(text)) for id in self.hosts]
