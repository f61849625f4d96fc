"""Before jax starts: all processes meet at the coordinator's address and agree on who is who, or all say why not."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import resource
import selectors
import socket
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from .wire import Lines, Message

VERSION = 1
_LATECOMERS = 5.0  # seconds for which process 0 tells those that come after a refusal of it
_NAMED = 8  # so few missing processes are news for all; more would be too many messages


class Refused(Exception):
    """The job cannot start; the message is for the user."""


class Place(NamedTuple):
    """Where a job meets: its coordinator, its size, and which of its processes this is.

    Attributes:
        host: the coordinator's host name or address.
        port: its port.
        rank: this process, from 0.
        size: number of processes.
        timeout: seconds to wait for all.
        cpu: whether the devices are CPUs, whose collectives (gloo) go by the host name's address.
    """

    host: str
    port: int
    rank: int
    size: int
    timeout: float
    cpu: bool

    @property
    def address(self) -> str:
        """host:port."""
        return f"{self.host}:{self.port}"


def meet(place: Place) -> list[Lines]:
    """Connects this process with the coordinator; the connections of process 0 are those of all others, in order.

    Raises:
        Refused: one sentence for the user, the same in every process that could be reached.
    """
    until = time.monotonic() + place.timeout
    return _receive(place, until) if place.rank == 0 else [_join(place, until)]


def _hello(place: Place) -> Message:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = ""
    return {
        "shardkit": VERSION,
        "rank": place.rank,
        "size": place.size,
        "host": name,
        "address": address,
        "cpu": place.cpu,
    }


def _receive(place: Place, until: float) -> list[Lines]:
    """Process 0: waits for all others; a refusal goes to those that are there, and to those that come soon after."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a connection for each process: often more than are free to use
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    listener = _listener(place)
    peers: dict[int, Lines] = {}
    hellos = {0: _hello(place)}
    refusal = ""
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            while len(hellos) < place.size:
                left = until - time.monotonic()
                if left <= 0:
                    refusal = refusal or _missing(place, [rank for rank in range(place.size) if rank not in hellos])
                    break
                for line, hello in _heard(listener, selector, left):
                    refusal = refusal or _objection(place, hello, hellos, peers, line)
                    if refusal:
                        until = min(until, time.monotonic() + _LATECOMERS)
                        for each in [*peers.values(), line]:
                            each.send({"refused": refusal})
                        hellos.setdefault(hello.get("rank", 0), hello)
                        continue
                    if not hello:  # something else that looked in
                        continue
                    peers[hello["rank"]], hellos[hello["rank"]] = line, hello
                    missing = [rank for rank in range(place.size) if rank not in hellos]
                    for peer in peers.values() if len(missing) < _NAMED else [line]:
                        peer.send({"missing": missing[:_NAMED]})
            for key in list(selector.get_map().values()):
                if isinstance(key.fileobj, Lines) and key.fileobj not in peers.values():
                    key.fileobj.close()  # of strangers
        refusal = refusal or _address_refusal(hellos)
    finally:
        listener.close()
    for line in peers.values():
        line.send({"refused": refusal} if refusal else {"welcome": True})
    if refusal:
        raise Refused(refusal)
    return [peers[rank] for rank in range(1, place.size)]


def _heard(
    listener: socket.socket, selector: selectors.BaseSelector, timeout: float
) -> Iterator[tuple[Lines, Message]]:
    """The words of those that came, as they introduce themselves, or an empty one of a connection that ended."""
    for key, _ in selector.select(timeout):
        if key.fileobj is listener:
            connection, _ = listener.accept()
            selector.register(Lines(connection), selectors.EVENT_READ)
            continue
        line: Any = key.fileobj
        for hello in line.read():
            if hello.get("shardkit") == VERSION and hello.keys() >= {"rank", "size", "host", "address", "cpu"}:
                yield line, hello
            else:
                line.closed = True
        if line.closed:
            selector.unregister(line)
            yield line, {}


def _objection(place: Place, hello: Message, hellos: dict[int, Message], peers: dict[int, Lines], line: Lines) -> str:
    """Why the job cannot start with this process; empty if it can."""
    if not hello:
        line.close()
        lost = [rank for rank, peer in peers.items() if peer is line]
        text = "initialize: process {} came to {} and ended before all were there. Look at its output."
        return text.format(lost[0], place.address) if lost else ""
    rank, size, host = hello["rank"], hello["size"], hello["host"]
    if size != place.size:
        return (
            f"initialize: all processes must be started with the same number of processes; process {rank} on {host} "
            f"was started with {size}, process 0 on {hellos[0]['host']} with {place.size}. Correct one of them."
        )
    if rank in hellos:
        return (
            f"initialize: each process must have a number of its own; number {rank} came twice, from "
            f"{hellos[rank]['host']} and from {host}. Start one with another number."
        )
    return ""


def _listener(place: Place) -> socket.socket:
    """Listens where jax's service will: the connections made here do not stand in its way."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        return socket.create_server(
            ("", place.port), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=max(128, place.size)
        )
    except OSError as error:
        raise Refused(
            f"initialize: process 0 cannot listen on port {place.port}: {os.strerror(error.errno or 0)}. Another "
            "program, or an earlier run, may hold it: end that, or choose another port."
        ) from None


def _address_refusal(hellos: dict[int, Message]) -> str:
    """Over several hosts, gloo tells the others the address of its host's name: it must be one that they can reach."""
    if len({hello["host"] for hello in hellos.values()}) == 1:
        return ""
    for rank, hello in sorted(hellos.items()):
        loopback = not hello["address"] or ipaddress.ip_address(hello["address"]).is_loopback
        if hello["cpu"] and loopback:
            got = f"resolves to {hello['address']}" if hello["address"] else "does not resolve"
            return (
                f"initialize: the host name {hello['host']!r} of process {rank} must resolve to an address that the "
                f"other hosts can reach; it {got}. Correct /etc/hosts or the name service on that host."
            )
    return ""


def _join(place: Place, until: float) -> Lines:
    error = "no answer"
    while (left := until - time.monotonic()) > 0:
        try:
            connection = socket.create_connection((place.host, place.port), timeout=min(left, 5.0))
        except socket.gaierror as failure:
            error = f"the name {place.host!r} does not resolve ({failure.strerror})"
        except OSError as failure:
            error = failure.strerror or str(failure)
        else:
            if line := _welcomed(place, Lines(connection), until):
                return line
            error = "what listens there closes the connection"
        time.sleep(min(0.1, max(0.0, until - time.monotonic())))
    raise Refused(
        f"initialize: process {place.rank} cannot reach the coordinator at {place.address} within {place.timeout:g} s: "
        f"{error}. Is process 0 running, and the address that of its host?"
    )


def _welcomed(place: Place, line: Lines, until: float) -> Lines | None:
    """The connection once process 0 says welcome; None if the other side closes it, as an earlier run's may."""
    line.send(_hello(place))
    # Process 0 waits as long as this one: give it the time to say who is missing.
    answer = _answer(line, until + 2.0)
    if "welcome" in answer:
        return line
    closed = line.closed
    line.close()
    if "refused" in answer:
        raise Refused(answer["refused"])
    if closed or "shardkit" in answer:  # a free port of this machine can answer to itself
        return None
    if "missing" in answer:
        raise Refused(_missing(place, answer["missing"]))
    raise Refused(
        f"initialize: what listens at {place.address} did not answer process {place.rank} as shardkit's process 0 "
        f"within {place.timeout:g} s. Another program may hold the port: choose another."
    )


def _answer(line: Lines, until: float) -> Message:
    """The last word of process 0: welcome, refused, or who is missing still; empty if there was none."""
    last: Message = {}
    with selectors.DefaultSelector() as selector:
        selector.register(line, selectors.EVENT_READ)
        while not line.closed and (left := until - time.monotonic()) > 0:
            if selector.select(left):
                for last in line.read():
                    if last.keys() & {"welcome", "refused", "shardkit"}:
                        return last
    return last


def _missing(place: Place, ranks: list[int]) -> str:
    return (
        f"initialize: {processes(ranks)} of {place.size} did not come to {place.address} within {place.timeout:g} s. "
        f"Look at the output of {'it' if len(ranks) == 1 else 'them'}, or raise timeout."
    )


def processes(ranks: list[int]) -> str:
    """Processes by number, for a sentence."""
    return f"process {ranks[0]}" if len(ranks) == 1 else f"processes {', '.join(map(str, ranks))}"
