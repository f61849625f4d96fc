"""Before jax starts: all processes meet at the coordinator's address and agree on who is who, or all say why not."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import resource
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

from .hello import OTHERS, Hello, Place, Refused, heard, own, signed, too_late
from .joining import SHORT, join
from .wire import LONGEST, Lines, Message

_LATECOMERS = 5.0  # seconds for which process 0 tells those that come after a refusal of it
_NAMED = 8  # so few missing processes are news for all; more would be too many messages
_UNKNOWN = 64  # connections, besides one a process, that have not introduced themselves yet
_SHY = 10.0  # seconds that a connection has to introduce itself


def meet(place: Place, note: Callable[[str], None] = lambda text: None) -> list[Lines]:
    """Connects this process with the coordinator; the connections of process 0 are those of all others, in order.

    Args:
        place: where, and as whom.
        note: is told in one sentence, at the end, of connections that were turned away.

    Raises:
        Refused: one sentence for the user, the same in every process that could be reached.
    """
    until = time.monotonic() + place.timeout
    if place.rank:
        return [join(place, until)]
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a connection for each process: often more than are free to use
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with _listener(place) as listener, selectors.DefaultSelector() as selector:
        meeting = _Meeting(place, listener, selector)
        try:
            return meeting.held(until)
        finally:
            if words := meeting.strangers():
                note(words)


class _Meeting:
    """Process 0's side: who has come, and who was turned away."""

    def __init__(self, place: Place, listener: socket.socket, selector: selectors.BaseSelector):
        self._place, self._listener, self._selector = place, listener, selector
        self._hellos = {0: own(place)}
        self._peers: dict[int, Lines] = {}
        self._unknown: dict[Lines, tuple[str, float]] = {}  # from where, and until when, oldest first
        self._turned_away: dict[str, int] = {}  # why, and how many
        self._first = ""  # address that was turned away
        self._refusal = ""
        selector.register(listener, selectors.EVENT_READ)

    def held(self, until: float) -> list[Lines]:
        """The connections once all are there; a refusal goes to those that are, and to those that come soon after."""
        while len(self._hellos) < self._place.size:
            now = time.monotonic()
            if self._refusal:
                until = min(until, now + _LATECOMERS)
            if now >= until:
                self._refusal = self._refusal or self._too_late()
                break
            for key, _ in self._selector.select(min(until - now, 1.0)):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._read(key.fileobj)
            for line in [line for line, (_, end) in self._unknown.items() if end < time.monotonic()]:
                self._turn_away(line, "silence")
        for line in list(self._unknown):
            line.close()
        self._refusal = self._refusal or _address_refusal(self._hellos)
        for rank, line in self._peers.items():
            self._tell(rank, {"refused": self._refusal} if self._refusal else {"welcome": True})
            line.longest = LONGEST
        if self._refusal:
            for line in self._peers.values():
                line.close()
            raise Refused(self._refusal)
        return [self._peers[rank] for rank in range(1, self._place.size)]

    def strangers(self) -> str:
        """What to say of the connections that were turned away."""
        count = sum(self._turned_away.values())
        if not count:
            return ""
        one = count == 1
        why = [f"{n} with {OTHERS[reason]}" for reason, n in self._turned_away.items() if reason in OTHERS]
        return (
            f"shardkit: {count} connection{'s' * (not one)} to {self._place.address} {'was' if one else 'were'} not of "
            f"this job and turned away, {'' if one else 'the first '}from {self._first}"
            f"{' (' + ', '.join(why) + ')' if why else ''}."
        )

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError:  # it has gone already, or this process may open no more files: others must go first
            if self._unknown:
                self._turn_away(next(iter(self._unknown)), "room")
            return
        if len(self._unknown) >= self._place.size + _UNKNOWN:
            self._turn_away(next(iter(self._unknown)), "room")
        line = Lines(connection, SHORT)
        self._unknown[line] = str(address[0]), time.monotonic() + _SHY
        self._selector.register(line, selectors.EVENT_READ)

    def _read(self, line: Any) -> None:
        rank = next((rank for rank, peer in self._peers.items() if peer is line), None)
        if rank is not None:  # it has nothing to say before the welcome
            list(line.read())
            self._selector.unregister(line)
            where = self._place.address
            self._refuse(f"process {rank} came to {where} and ended before all were there. Look at its output.")
            return
        if line not in self._unknown:  # closed a moment ago
            return
        for message in line.read():
            hello = heard(message, self._place.token)
            if isinstance(hello, Hello) and not line.closed:
                self._came(line, hello)
            else:
                self._turn_away(line, hello if isinstance(hello, str) else "")
            return
        if line.closed:
            self._turn_away(line, "")

    def _came(self, line: Lines, hello: Hello) -> None:
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
        missing = self._missing()
        for rank in self._peers if len(missing) < _NAMED else [hello.rank]:
            self._tell(rank, {"missing": missing[:_NAMED]})

    def _turn_away(self, line: Lines, why: str) -> None:
        address, _ = self._unknown.pop(line)
        self._first = self._first or address
        self._turned_away[why] = self._turned_away.get(why, 0) + 1
        if why in OTHERS:
            line.send({"another": why})
        self._selector.unregister(line)
        line.close()

    def _refuse(self, why: str) -> None:
        """The first refusal stays; those that are there hear it at once."""
        if not self._refusal:
            self._refusal = f"initialize: {why}"
            for rank in self._peers:
                self._tell(rank, {"refused": self._refusal})

    def _tell(self, rank: int, message: Message) -> None:
        self._peers[rank].send(signed(message, self._place.token, self._hellos[rank].nonce))

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._place.size) if rank not in self._hellos]

    def _too_late(self) -> str:
        found = too_late(self._place, self._missing())
        count = self._turned_away.get("token", 0)
        return found + (f" {count} came with {OTHERS['token']}: it must be the same in all." if count else "")

    def _objection(self, hello: Hello) -> str:
        """Why the job cannot start with this process; empty if it can."""
        first, known = self._hellos[0], self._hellos.get(hello.rank)
        if hello.size != first.size:
            return (
                "all processes must be started with the same number of processes; process "
                f"{hello.rank} on {hello.host} was started with {hello.size}, process 0 on {first.host} with "
                f"{first.size}. Correct one of them."
            )
        if known is not None:
            return (
                f"each process must have a number of its own; number {hello.rank} came twice, from {known.host} and "
                f"from {hello.host}. Start one with another number."
            )
        return ""


def bind_address(host: str) -> str:
    """The address of this machine that a host name stands for; empty, for all addresses, where it stands for none.

    A machine's own name may lead to loopback on the machine itself and to its address elsewhere; and the address of a
    service in front of a machine is not its own.
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
    """Listens where jax's service will: the connections made here do not stand in its way."""
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
            f"initialize: process 0 cannot listen on port {place.port}: {os.strerror(error.errno or 0)}. Another "
            "program, or an earlier run, may hold it: end that, or choose another port."
        ) from None


def _address_refusal(hellos: dict[int, Hello]) -> str:
    """Over several hosts, gloo tells the others the address of its host's name: it must be one that they can reach."""
    if len({hello.host for hello in hellos.values()}) == 1:
        return ""
    for rank, hello in sorted(hellos.items()):
        loopback = not hello.address or ipaddress.ip_address(hello.address).is_loopback
        if hello.cpu and loopback:
            got = f"resolves to {hello.address}" if hello.address else "does not resolve"
            return (
                f"initialize: the host name {hello.host!r} of process {rank} must resolve to an address that the "
                f"other hosts can reach; it {got}. Correct /etc/hosts or the name service on that host."
            )
    return ""
