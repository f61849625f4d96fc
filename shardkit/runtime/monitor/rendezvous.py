"""Connects all processes at the coordinator's address before jax starts, or gives all of them the reason why not."""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import os
import resource
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

from .hello import REJECTIONS, Hello, Place, Refused, own_hello, parse_hello, signed, too_late
from .joining import join
from .wire import LONGEST, Lines, Message

_AFTER_REFUSAL = 5.0  # seconds for which process 0 sends a refusal to processes that connect later
_NAMED = 8  # fewer missing processes are reported to all: for more, that would be too many messages
_OWN_FILES = 16  # what else is open: pipes, the listener, libraries
_UNKNOWN = 64  # connections without an introduction, besides one per process
_LONGEST = 4096  # bytes of an introduction: as many strangers as processes may send so much each
_INTRODUCTION = 10.0  # seconds that a connection has to introduce itself


def meet(place: Place, note: Callable[[str], None] = lambda text: None) -> list[Lines]:
    """Connects this process to process 0; returns that connection, on process 0 those to all others, by rank.

    Args:
        place: the place of this process in the job.
        note: called at the end with one sentence, if connections were rejected.

    Raises:
        Refused: one sentence for the user, the same in every process that could be reached.
    """
    until = time.monotonic() + place.timeout
    if place.rank:
        return [join(place, until)]
    refusal = allow_files(place.size)
    with _listener(place) as listener, selectors.DefaultSelector() as selector:
        meeting = _Meeting(place, listener, selector, refusal)
        try:
            return meeting.connections(until)
        finally:
            if text := meeting.rejections():
                note(text)


def allow_files(size: int) -> str:
    """Raises this process's limit of open files to a connection per process of the job; the error where it cannot be.

    Jobs of more than about a thousand processes need it: that is the usual limit, though a process may raise it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least, wanted = size + _OWN_FILES, size + _OWN_FILES + _UNKNOWN
    if soft != resource.RLIM_INFINITY and soft < wanted:
        more = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
            soft = more
    if soft != resource.RLIM_INFINITY and soft < least:
        return (
            f"initialize: process 0 must be able to open {least} files, one for each of {size} processes and "
            f"{_OWN_FILES} of its own; its limit is {soft}. Raise the hard limit: ulimit -Hn {least}, or LimitNOFILE."
        )
    return ""


class _Meeting:
    """Process 0's side: the connections of the job, and those that were rejected."""

    def __init__(self, place: Place, listener: socket.socket, selector: selectors.BaseSelector, refusal: str):
        self._place, self._listener, self._selector = place, listener, selector
        self._hellos = {0: own_hello(place)}
        self._peers: dict[int, Lines] = {}
        self._unknown: dict[Lines, tuple[str, float]] = {}  # their address and deadline, oldest first
        self._rejected: dict[str, int] = {}  # number by reason
        self._first = ""  # address that was rejected
        self._refusal = refusal
        self._lowest = 1  # no lower rank is missing
        selector.register(listener, selectors.EVENT_READ)

    def connections(self, until: float) -> list[Lines]:
        """Waits for all processes; a refusal is sent to those that are connected or connect soon after."""
        while len(self._hellos) < self._place.size:
            now = time.monotonic()
            if self._refusal:
                until = min(until, now + _AFTER_REFUSAL)
            if now >= until:
                self._refusal = self._refusal or self._too_late()
                break
            for key, _ in self._selector.select(min(until - now, 1.0)):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._read(key.fileobj, key.data)
            now = time.monotonic()
            while self._unknown and next(iter(self._unknown.values()))[1] < now:
                self._reject(next(iter(self._unknown)), "silence")
        for line in list(self._unknown):
            self._reject(line, "silence")
        self._refusal = self._refusal or _address_refusal(self._hellos)
        for rank, line in self._peers.items():
            self._tell(rank, {"refused": self._refusal} if self._refusal else {"welcome": True})
            line.longest = LONGEST
        if self._refusal:
            for line in self._peers.values():
                line.close()
            raise Refused(self._refusal)
        return [self._peers[rank] for rank in range(1, self._place.size)]

    def rejections(self) -> str:
        """The sentence about rejected connections; empty without any."""
        count = sum(self._rejected.values())
        if not count:
            return ""
        one = count == 1
        why = [f"{n} with {REJECTIONS[reason]}" for reason, n in self._rejected.items() if reason in REJECTIONS]
        return (
            f"shardkit: rejected {count} connection{'s' * (not one)} to {self._place.address} from outside this job, "
            f"{'' if one else 'the first '}from {self._first}{' (' + ', '.join(why) + ')' if why else ''}."
        )

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError:  # the peer is gone, or too many files are open: then the oldest connection must go
            if self._unknown:
                self._reject(next(iter(self._unknown)), "room")
            return
        if len(self._unknown) >= self._place.size + _UNKNOWN:
            self._reject(next(iter(self._unknown)), "room")
        line = Lines(connection, _LONGEST)
        self._unknown[line] = str(address[0]), time.monotonic() + _INTRODUCTION
        self._selector.register(line, selectors.EVENT_READ)

    def _read(self, line: Any, rank: int | None) -> None:
        if rank is not None:  # it sends nothing before the welcome, so it has closed the connection
            list(line.read())
            self._selector.unregister(line)
            where = self._place.address
            self._refuse(f"process {rank} connected to {where} and exited before all had connected. Read its output.")
            return
        if line not in self._unknown:  # closed a moment ago
            return
        for message in line.read():
            hello = parse_hello(message, self._place.token)
            if isinstance(hello, Hello) and not line.closed:
                self._introduced(line, hello)
            else:
                self._reject(line, hello if isinstance(hello, str) else "")
            return
        if line.closed:
            self._reject(line, "")

    def _introduced(self, line: Lines, hello: Hello) -> None:
        del self._unknown[line]
        objection = self._objection(hello)
        if objection:
            self._refuse(objection)
        if self._refusal:
            line.send(signed({"refused": self._refusal}, self._place.token, hello.nonce))
            self._selector.unregister(line)
            line.close()
            self._hellos.setdefault(hello.rank, hello)
            return
        self._peers[hello.rank], self._hellos[hello.rank] = line, hello
        self._selector.modify(line, selectors.EVENT_READ, hello.rank)
        missing = list(itertools.islice(self._missing(), _NAMED))
        for rank in self._peers if len(missing) < _NAMED else [hello.rank]:
            self._tell(rank, {"missing": missing})

    def _reject(self, line: Lines, why: str) -> None:
        address, _ = self._unknown.pop(line)
        self._first = self._first or address
        self._rejected[why] = self._rejected.get(why, 0) + 1
        if why in REJECTIONS:
            line.send({"another": why})
        self._selector.unregister(line)
        line.close()

    def _refuse(self, why: str) -> None:
        """Refuses the job, with the first reason, and sends it to the connected processes."""
        if not self._refusal:
            self._refusal = f"initialize: {why}"
            for rank in self._peers:
                self._tell(rank, {"refused": self._refusal})

    def _tell(self, rank: int, message: Message) -> None:
        self._peers[rank].send(signed(message, self._place.token, self._hellos[rank].nonce))

    def _missing(self) -> Iterator[int]:
        while self._lowest in self._hellos:
            self._lowest += 1
        return (rank for rank in range(self._lowest, self._place.size) if rank not in self._hellos)

    def _too_late(self) -> str:
        found = too_late(self._place, list(self._missing()))
        count = self._rejected.get("token", 0)
        more = f" {count} connected with {REJECTIONS['token']}: set it to the same value in all processes."
        return found + more if count else found

    def _objection(self, hello: Hello) -> str:
        """Why the job cannot start with this process; else an empty string."""
        first, known = self._hellos[0], self._hellos.get(hello.rank)
        if hello.size != first.size:
            return (
                "all processes must be started with the same number of processes; process "
                f"{hello.rank} on {hello.host} was started with {hello.size}, process 0 on {first.host} with "
                f"{first.size}. Start all with the same num_processes."
            )
        if known is not None:
            return (
                f"the process_id of each process must be unique; {hello.rank} was used twice, on {known.host} and on "
                f"{hello.host}. Start the processes with 0 to {first.size - 1}."
            )
        return ""


def bind_address(host: str) -> str:
    """The address of this machine that a host name resolves to; empty, for all addresses, if there is none.

    A machine's name may resolve to loopback on the machine itself and to its address elsewhere, and a host name may
    resolve to the address of a service in front of the machine.
    """
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        is_loopback = ipaddress.ip_address(address.partition("%")[0]).is_loopback
        if is_loopback and host not in ("localhost", address):
            return ""
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except (OSError, ValueError):
        return ""
    return address


def _listener(place: Place) -> socket.socket:
    """Listens on the address and port that jax's coordination service will use later."""
    address = bind_address(place.host)
    wide = ":" in address or (not address and socket.has_dualstack_ipv6())
    try:
        return socket.create_server(
            (address, place.port),
            family=socket.AF_INET6 if wide else socket.AF_INET,
            dualstack_ipv6=wide and not address,
            backlog=max(128, place.size),
        )
    except OSError as error:
        raise Refused(
            f"initialize: process 0 must listen on port {place.port}; got {os.strerror(error.errno or 0)!r}. End the "
            "program or earlier run that uses the port, or pass a coordinator_address with another port."
        ) from None


def _address_refusal(hellos: dict[int, Hello]) -> str:
    """The error about a host whose name the other hosts cannot reach, as gloo requires; else an empty string."""
    if len({hello.host for hello in hellos.values()}) == 1:
        return ""
    for rank, hello in sorted(hellos.items()):
        loopback = not hello.address or ipaddress.ip_address(hello.address).is_loopback
        if hello.cpu and loopback:
            got = f"resolves to {hello.address}" if hello.address else "does not resolve"
            return (
                f"initialize: the host name {hello.host!r} of process {rank} must resolve to an address that the "
                f"other hosts can reach; it {got}. Correct /etc/hosts or DNS on that host."
            )
    return ""
