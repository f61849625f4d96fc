"""Connects all processes at the coordinator's address before jax starts, or gives all of them the reason why not.

The messages by which they introduce themselves are checked, and signed with the job's token, which excludes processes
that do not have it. Nothing is encrypted: it does not protect against those who can read or change the traffic between
the machines of a job.
"""

from __future__ import annotations

import hmac
import ipaddress
import itertools
import json
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from shardkit.runtime.channel.place import TOKEN, UNKNOWN, Place, allow_files, bind_address, name_processes
from shardkit.runtime.channel.wire import LONGEST, Message, MessageStream, escape

VERSION = 6
REJECTIONS = {"token": f"another {TOKEN}", "version": "another version of shardkit"}  # why a process is rejected
_LONGEST_NAME = 255
_MOST = 1 << 20  # processes
_AFTER_REFUSAL = 5.0  # seconds for which process 0 sends a refusal to processes that connect later
_NAMED = 8  # fewer missing processes are reported to all: for more, that would be too many messages
_LONGEST = 4096  # bytes of an introduction: as many strangers as processes may send so much each
_SHORT = 1 << 16  # bytes of a line before the welcome, to a process other than 0
_INTRODUCTION = 10.0  # seconds that a connection has to introduce itself


class Refused(Exception):
    """The job cannot start; the message is for the user."""


class Hello(NamedTuple):
    """How a process introduces itself."""

    rank: int  # which process it is
    size: int  # the number of processes that it was started with
    host: str  # the name of its machine
    address: str  # what that name resolves to there; empty if it does not
    cpu: bool  # whether its devices are CPUs
    nonce: str  # signed together with the answers to it


def meet(place: Place, note: Callable[[str], None] = lambda text: None) -> list[MessageStream]:
    """Connects this process to process 0; returns that connection, on process 0 those to all others, by rank.

    It raises Refused with one sentence for the user, the same in every process that could be reached. `note` is called
    at the end with one sentence, if connections were rejected.
    """
    until = time.monotonic() + place.timeout
    if place.rank:
        return [_join(place, until)]
    refusal = allow_files(place.size)
    with _listener(place) as listener, selectors.DefaultSelector() as selector:
        meeting = _Meeting(place, listener, selector, refusal)
        try:
            return meeting.connections(until)
        finally:
            if text := meeting.rejections():
                note(text)


class _Meeting:
    """Process 0's side: the connections of the job, and those that were rejected."""

    def __init__(self, place: Place, listener: socket.socket, selector: selectors.BaseSelector, refusal: str):
        self._place, self._listener, self._selector = place, listener, selector
        self._hellos = {0: own_hello(place)}
        self._peers: dict[int, MessageStream] = {}
        self._unknown: dict[MessageStream, tuple[str, float]] = {}  # their address and deadline, oldest first
        self._rejected: dict[str, int] = {}  # number by reason
        self._first = ""  # address that was rejected
        self._refusal = refusal
        self._lowest = 1  # no lower rank is missing
        selector.register(listener, selectors.EVENT_READ)

    def connections(self, until: float) -> list[MessageStream]:
        """Waits for all processes; a refusal is sent to those that are connected or connect soon after."""
        while len(self._hellos) < self._place.size:
            now = time.monotonic()
            if self._refusal:
                until = min(until, now + _AFTER_REFUSAL)
            if now >= until:
                if not self._refusal:
                    self._refusal = too_late(self._place, list(self._missing()))
                    if count := self._rejected.get("token"):
                        self._refusal += f" {count} connected with {REJECTIONS['token']}: set it to the same value "
                        self._refusal += "in all processes."
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
        if len(self._unknown) >= self._place.size + UNKNOWN:
            self._reject(next(iter(self._unknown)), "room")
        line = MessageStream(connection, _LONGEST)
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

    def _introduced(self, line: MessageStream, hello: Hello) -> None:
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

    def _reject(self, line: MessageStream, why: str) -> None:
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
    """The error about a host whose name gloo cannot use: the other hosts must reach it; else an empty string."""
    alone = len({hello.host for hello in hellos.values()}) == 1
    for rank, hello in sorted(hellos.items()):
        if hello.cpu and (not hello.address or (not alone and ipaddress.ip_address(hello.address).is_loopback)):
            got = f"resolves to {hello.address}" if hello.address else "does not resolve"
            others = "an address" if alone else "an address that the other hosts can reach"
            return (
                f"initialize: the host name {hello.host!r} of process {rank} must resolve to {others}; it {got}. "
                "Give it an address in /etc/hosts or DNS on that host."
            )
    return ""


def _join(place: Place, until: float) -> MessageStream:
    """Connects to process 0 and waits for its welcome; raises Refused."""
    error = "no answer"
    while (left := until - time.monotonic()) > 0:
        try:
            connection = socket.create_connection((place.host, place.port), timeout=min(left, 5.0))
        except (socket.gaierror, UnicodeError) as failure:
            error = f"the name {place.host!r} does not resolve ({getattr(failure, 'strerror', failure)})"
        except OSError as failure:
            error = failure.strerror or str(failure)
        else:
            found = _welcomed(place, MessageStream(connection, _SHORT), until)
            if isinstance(found, MessageStream):
                return found
            error = found
        time.sleep(min(0.1, max(0.0, until - time.monotonic())))
    raise Refused(
        f"initialize: process {place.rank} could not connect to the coordinator at {place.address} within "
        f"{place.timeout:g} s: {error}. Check that process 0 runs, and that this is the address of its host."
    )


def _welcomed(place: Place, line: MessageStream, until: float) -> MessageStream | str:
    """The connection after the welcome of process 0; else the reason to try again."""
    hello = own_hello(place)
    line.send(hello_message(hello, place.token))
    # Process 0 waits as long as this process: the extra time is for its message about who is missing.
    answer = _answer(line, until + 2.0, place.token, hello.nonce)
    if "welcome" in answer:
        line.longest = LONGEST
        return line
    closed = line.closed
    line.close()
    if "refused" in answer:
        raise Refused(escape(answer["refused"]))
    if "another" in answer:
        return f"the program that listens there has {REJECTIONS[answer['another']]}"
    if closed or "shardkit" in answer:  # a socket can connect to its own free port
        return "the program that listens there closes the connection"
    if "missing" in answer:
        raise Refused(too_late(place, answer["missing"]))
    raise Refused(
        f"initialize: the program that listens at {place.address} must be process 0 of this job; it did not answer "
        f"process {place.rank} within {place.timeout:g} s. Pass a coordinator_address with a port that is free."
    )


def _answer(line: MessageStream, until: float, token: str, nonce: str) -> Message:
    """The last message of process 0: welcome, refused, or which processes are missing; empty if there was none."""
    last: Message = {}
    while not line.closed and (left := until - time.monotonic()) > 0:
        if not line.wait(left):
            continue
        for message in line.read():
            if "shardkit" in message or str(message.get("another")) in REJECTIONS:
                return message
            if _is_answer(message) and is_signed(message, token, nonce):
                last = message
                if "missing" not in message:
                    return message
    return last


def _is_answer(message: Message) -> bool:
    """Whether a message has the form of an answer of process 0."""
    missing = message.get("missing")
    return message.keys() in ({"welcome", "mac"}, {"refused", "mac"}, {"missing", "mac"}) and (
        message.get("welcome") is True
        or isinstance(message.get("refused"), str)
        or (isinstance(missing, list) and len(missing) > 0 and all(type(rank) is int for rank in missing))
    )


def own_hello(place: Place) -> Hello:
    """The introduction of this process."""
    name = socket.gethostname()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)  # the first, of IPv6 too, is what gloo takes
        address = str(found[0][4][0]).partition("%")[0]
    except (OSError, UnicodeError):  # UnicodeError: a name of more than 63 letters
        address = ""
    return Hello(place.rank, place.size, name, address, place.cpu, secrets.token_hex(16))


def hello_message(hello: Hello, token: str) -> Message:
    """An introduction as a signed message."""
    return signed({"shardkit": VERSION, **hello._asdict()}, token)


def parse_hello(message: Message, token: str) -> Hello | str:
    """The introduction in a message; else a key of REJECTIONS, or an empty string for any other message."""
    if type(message.get("shardkit")) is not int:
        return ""
    if message["shardkit"] != VERSION:
        return "version"
    if message.keys() != {"shardkit", "mac", *Hello._fields}:
        return ""
    fields = rank, size, host, address, cpu, nonce = [message[name] for name in Hello._fields]
    if any(type(field) is not kind for field, kind in zip(fields, (int, int, str, str, bool, str), strict=True)):
        return ""
    if not 0 < rank < size <= _MOST or len(nonce) != 32:
        return ""
    if len(host) > _LONGEST_NAME or (address and not _is_address(address)):
        return ""
    return Hello(rank, size, escape(host), address, cpu, nonce) if is_signed(message, token) else "token"


def signed(message: Message, token: str, nonce: str = "") -> Message:
    """A message with its signature; an answer is signed together with the nonce of the introduction."""
    text = json.dumps([nonce, message], sort_keys=True)
    return {**message, "mac": hmac.new(token.encode("utf-8", "surrogateescape"), text.encode(), "sha256").hexdigest()}


def is_signed(message: Message, token: str, nonce: str = "") -> bool:
    """Whether a message was signed with the token."""
    unsigned = {name: value for name, value in message.items() if name != "mac"}
    mac = message.get("mac")
    if not isinstance(mac, str) or not mac.isascii():
        return False
    try:
        return hmac.compare_digest(mac, signed(unsigned, token, nonce)["mac"])
    except RecursionError:  # brackets that can just be read
        return False


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def too_late(place: Place, ranks: list[int]) -> str:
    """The error about processes that are missing."""
    whose = "its" if len(ranks) == 1 else "their"
    return (
        f"initialize: {name_processes(ranks)} of {place.size} did not connect to {place.address} within "
        f"{place.timeout:g} s. Read {whose} output, or raise timeout."
    )
