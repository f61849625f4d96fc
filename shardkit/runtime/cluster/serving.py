"""The side of a meeting that listens: connections of launchers, and those that are turned away."""

from __future__ import annotations

import errno
import ipaddress
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from shardkit.runtime.cluster.meeting import Limits, Meeting
from shardkit.runtime.cluster.messages import (
    SHORT,
    Beat,
    Terms,
    ToMeeting,
    heard,
    objection,
    parse_arrival,
    told,
)
from shardkit.runtime.monitor.hello import REJECTIONS, signed
from shardkit.runtime.monitor.rendezvous import bind_address
from shardkit.runtime.monitor.wire import Lines

_TICK = 0.1
_BEATS = 4  # messages in the time of silence
_UNKNOWN = 64  # connections without an introduction
_INTRODUCTION = 10.0  # seconds that a connection has to introduce itself
_FAREWELL = 5.0  # seconds for the launchers to read how the job ended


def listener(host: str, port: int) -> socket.socket | None:
    """A socket that listens, if the host is this machine and no other launcher here listens already; else None."""
    address = bind_address(host)
    if not address and not _is_own_name(host):
        return None
    wide = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if ":" in address or wide else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, dualstack_ipv6=wide, backlog=_UNKNOWN)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
            return None
        raise ValueError(
            "launch: the port of meet must be one on which this user may listen; "
            f"got {port} ({os.strerror(error.errno or 0)}). Pass a port above 1023."
        ) from None


def _is_own_name(host: str) -> bool:
    """Whether the name is that of this machine, where it may resolve to loopback."""
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except (OSError, ValueError, UnicodeError):
        return False


class Server(threading.Thread):
    """Serves a meeting until the job is over."""

    def __init__(
        self, limits: Limits, host: str, listens: socket.socket, own: str, token: str, say: Callable[[str], None]
    ):
        """`host` is the machine as the other hosts know it, `own` the id of the launcher that this is a part of."""
        super().__init__(daemon=True)
        self._limits, self._host, self._own, self._token, self._say = limits, host, own, token, say
        self._listener = listens
        self._meeting = Meeting(limits, time.monotonic())
        self._peers: dict[Lines, str] = {}
        self._unknown: dict[Lines, tuple[str, float]] = {}  # address and deadline, oldest first
        self._selector = selectors.DefaultSelector()
        self._named: set[str] = set()  # addresses whose rejection was printed
        self._left = threading.Event()

    def leave(self) -> None:
        """Ends the meeting with its launcher."""
        self._left.set()
        self.join(_FAREWELL + 1.0)

    def run(self) -> None:
        """Serves."""
        self._selector.register(self._listener, selectors.EVENT_READ)
        beat, seen, ends = 0.0, time.monotonic(), 0.0
        try:
            while not ends or (self._peers and time.monotonic() < ends):
                for key, _ in self._selector.select(_TICK):
                    if key.fileobj is self._listener:
                        self._accept()
                    else:
                        self._read(key.fileobj)
                now = time.monotonic()
                self._excuse(now - seen)
                seen = now
                self._meeting.tick(now)
                if self._left.is_set():
                    self._meeting.ends("the launcher that serves the meeting has ended")
                if now - beat > self._limits.silence / _BEATS:
                    beat = now
                    self._meeting.out += [(id, Beat()) for id in self._peers.values()]
                self._send()
                for line in [line for line, (_, end) in self._unknown.items() if end < now]:
                    self._drop(line)
                if self._meeting.over and not ends:
                    ends = now + _FAREWELL
        finally:
            for line in [*self._unknown, *self._peers]:
                line.close()
            self._listener.close()
            self._selector.close()

    def _excuse(self, away: float) -> None:
        """Leaves nobody out for messages that were not read while this process was itself stopped or starved."""
        if away > 1.0:
            for host in self._meeting.hosts.values():
                host.heard += away

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError:  # the peer is gone, or too many files are open: then the oldest connection must go
            if self._unknown:
                self._drop(next(iter(self._unknown)))
            return
        if len(self._unknown) >= _UNKNOWN:
            self._drop(next(iter(self._unknown)))
        line = Lines(connection, SHORT)
        self._unknown[line] = str(address[0]).removeprefix("::ffff:"), time.monotonic() + _INTRODUCTION
        self._selector.register(line, selectors.EVENT_READ)

    def _read(self, line: Any) -> None:
        if line not in self._peers and line not in self._unknown:  # dropped a moment ago
            return
        for message in line.read():
            if line in self._unknown:
                self._introduced(line, message)
            else:
                found: ToMeeting | None = heard(message, ToMeeting)
                if found is None:
                    line.closed = True
                    break
                self._meeting.hears(self._peers[line], found, time.monotonic())
            if line.closed:
                break
        if line.closed:
            self._drop(line)

    def _introduced(self, line: Lines, message: Any) -> None:
        """Takes in a connection that introduces itself as a launcher of this job, or answers why not."""
        address, _ = self._unknown[line]
        arrival = parse_arrival(message, self._token)
        if isinstance(arrival, str):
            if arrival in REJECTIONS:
                line.send({"another": arrival})
                self._print_once(address, REJECTIONS[arrival])
            line.closed = True
            return
        theirs, ours = Terms(arrival.hosts, arrival.min_hosts, arrival.restarts), self._limits.terms
        answer: dict[str, Any] = {"welcome": True}
        serves = arrival.id == self._own
        if refusal := objection(theirs, ours):
            answer = {"refused": refusal}
        else:
            known = next((peer for peer, id in self._peers.items() if id == arrival.id), None)
            if known is not None:
                self._drop(known)
            if not self._meeting.arrives(arrival, self._reached(address, serves), serves, time.monotonic()):
                answer = {"full": True}
        line.send(signed(answer, self._token, arrival.nonce))
        if "welcome" in answer:
            del self._unknown[line]
            self._peers[line] = arrival.id
        else:
            line.closed = True

    def _reached(self, address: str, serves: bool) -> str:
        """By which address the other hosts reach this one: the meeting's own, as they reach the meeting."""
        if serves or ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            return self._host
        return address

    def _print_once(self, address: str, why: str) -> None:
        if address not in self._named and len(self._named) < _UNKNOWN:
            self._named.add(address)
            self._say(f"rejected a launcher from {address} with {why}")

    def _send(self) -> None:
        lines = {id: line for line, id in self._peers.items()}
        out, self._meeting.out = self._meeting.out, []
        for id, message in out:
            if id in lines and not lines[id].closed:
                lines[id].send(told(message))
        for line in [line for line in self._peers if line.closed]:
            self._drop(line)

    def _drop(self, line: Lines) -> None:
        self._selector.unregister(line)
        line.close()
        self._unknown.pop(line, None)
        id = self._peers.pop(line, None)
        if id is not None:
            self._meeting.loses(id, "its connection closed", time.monotonic())
