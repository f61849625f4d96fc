"""Connects all processes at the coordinator's address before jax starts, or gives all of them the reason why not.

The messages by which they introduce themselves (`introduction.py`) are checked, and signed with the job's token.
Nothing is encrypted: it does not protect against those who can read or change the traffic between the machines of a
job.

Worked example, of process 1 of 3 and process 0, which listens:

    1 -> 0   {"shardkit": 7, "rank": 1, "size": 3, "host": "node1", ..., "nonce": "5f...", "mac": "..."}
    0 -> 1   {"missing": [2], "mac": "..."}      if process 2 does not come, process 1 can say so
    0 -> 1   {"welcome": true, "mac": "..."}     once process 2 has come, else {"refused": "initialize: ...", ...}
"""

from __future__ import annotations

import ipaddress
import itertools
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from shardkit.jobs.monitor.introduction import (
    REJECTIONS,
    Hello,
    describe_process,
    is_answer,
    is_signed,
    make_hello_message,
    parse_hello,
    sign,
)
from shardkit.runtime.channel.place import UNKNOWN, Place, allow_files, bind_address, name_processes
from shardkit.runtime.channel.wire import LONGEST, Message, MessageStream, escape

_AFTER_REFUSAL = 5.0  # seconds for which process 0 sends a refusal to processes that connect later
_NAMED = 8  # fewer missing processes are reported to all: for more, that would be too many messages
_LONGEST = 4096  # bytes of an introduction: as many strangers as processes may send so much each
_SHORT = 1 << 16  # bytes of a line before the welcome, to a process other than 0
_INTRODUCTION = 10.0  # seconds that a connection has to introduce itself
_LONGEST_TRY = 5.0  # seconds to wait for one connection to process 0, before the next try
_PAUSE = 0.1  # seconds between two tries
_LAST_ANSWER = 2.0  # seconds after its time-out for which a process waits for what process 0 says of the missing


class Refused(Exception):
    """The job cannot start; the message is for the user."""


def meet(place: Place, note: Callable[[str], None] = lambda text: None) -> list[MessageStream]:
    """Connects this process to process 0; returns that connection, on process 0 those to all others, by rank.

    It raises Refused with one sentence for the user, the same in every process that could be reached. `note` is called
    at the end with one sentence, if connections were rejected.
    """
    deadline = time.monotonic() + place.timeout
    if place.rank != 0:
        return [_join(place, deadline)]
    refusal = allow_files(place.size)
    with _listen(place) as listener, selectors.DefaultSelector() as selector:
        meeting = _Meeting(place, listener, selector, refusal)
        try:
            return meeting.gather(deadline)
        finally:
            text = meeting.describe_rejections()
            if text:
                note(text)


class _Stranger(NamedTuple):
    """A connection without an introduction: where it comes from, and until when it may introduce itself."""

    address: str
    deadline: float


class _Meeting:
    """Process 0's side: the connections of the job, and those that were rejected."""

    def __init__(self, place: Place, listener: socket.socket, selector: selectors.BaseSelector, refusal: str):
        self._place = place
        self._listener = listener
        self._selector = selector
        self._hellos = {0: describe_process(place)}  # the introduction of each process that has come
        self._peers: dict[int, MessageStream] = {}
        self._strangers: dict[MessageStream, _Stranger] = {}  # oldest first
        self._rejected: dict[str, int] = {}  # number by reason
        self._first_rejected = ""  # its address
        self._refusal = refusal  # why the job cannot start; empty while it can
        self._lowest = 1  # no lower rank is missing
        selector.register(listener, selectors.EVENT_READ)

    def gather(self, deadline: float) -> list[MessageStream]:
        """Waits for all processes; a refusal is sent to those that are connected or connect soon after."""
        while len(self._hellos) < self._place.size:
            now = time.monotonic()
            if self._refusal:
                deadline = min(deadline, now + _AFTER_REFUSAL)
            if now >= deadline:
                if not self._refusal:
                    self._refusal = self._describe_missing()
                break
            self._handle_events(min(deadline - now, 1.0))
            self._reject_silent(time.monotonic())
        for stream in list(self._strangers):
            self._reject(stream, "silence")
        if not self._refusal:
            self._refusal = _refuse_addresses(self._hellos)
        if self._refusal:
            self._close_all()
            raise Refused(self._refusal)
        for rank, stream in self._peers.items():
            self._send(rank, {"welcome": True})
            stream.longest = LONGEST
        return [self._peers[rank] for rank in range(1, self._place.size)]

    def describe_rejections(self) -> str:
        """The sentence about rejected connections; empty without any."""
        count = sum(self._rejected.values())
        if count == 0:
            return ""
        reasons = []
        for reason, number in self._rejected.items():
            if reason in REJECTIONS:
                reasons.append(f"{number} with {REJECTIONS[reason]}")
        text = f"shardkit: rejected {count} connections to {self._place.address} from outside this job, the first from "
        if count == 1:
            text = f"shardkit: rejected 1 connection to {self._place.address} from outside this job, from "
        text += self._first_rejected
        if reasons:
            text += f" ({', '.join(reasons)})"
        return text + "."

    def _handle_events(self, seconds: float) -> None:
        """Accepts connections and reads from them, for at most so long."""
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._accept()
                continue
            stream: Any = key.fileobj
            if key.data is None:
                self._read_stranger(stream)
            else:
                self._read_peer(stream, key.data)

    def _reject_silent(self, now: float) -> None:
        """Rejects those that have not introduced themselves in time."""
        while self._strangers:
            oldest, stranger = next(iter(self._strangers.items()))
            if stranger.deadline >= now:
                return
            self._reject(oldest, "silence")

    def _reject_oldest(self) -> None:
        if self._strangers:
            self._reject(next(iter(self._strangers)), "room")

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError:  # the peer is gone, or too many files are open: then the oldest connection must go
            self._reject_oldest()
            return
        if len(self._strangers) >= self._place.size + UNKNOWN:
            self._reject_oldest()
        stream = MessageStream(connection, _LONGEST)
        self._strangers[stream] = _Stranger(str(address[0]), time.monotonic() + _INTRODUCTION)
        self._selector.register(stream, selectors.EVENT_READ)

    def _read_peer(self, stream: MessageStream, rank: int) -> None:
        """A process sends nothing before the welcome, so it has closed the connection."""
        for _ in stream.read():
            pass
        self._selector.unregister(stream)
        where = self._place.address
        self._refuse(f"process {rank} connected to {where} and exited before all had connected. Read its output.")

    def _read_stranger(self, stream: MessageStream) -> None:
        """Takes the introduction of a process, or rejects the connection."""
        if stream not in self._strangers:  # closed a moment ago
            return
        for message in stream.read():
            hello = parse_hello(message, self._place.token)
            if isinstance(hello, str):
                self._reject(stream, hello)
            elif stream.closed:
                self._reject(stream, "")
            else:
                self._introduce(stream, hello)
            return
        if stream.closed:
            self._reject(stream, "")

    def _introduce(self, stream: MessageStream, hello: Hello) -> None:
        """A process has introduced itself: it is told who is missing, or why the job cannot start."""
        del self._strangers[stream]
        objection = self._find_objection(hello)
        if objection:
            self._refuse(objection)
        if self._refusal:
            stream.send(sign({"refused": self._refusal}, self._place.token, hello.nonce))
            self._selector.unregister(stream)
            stream.close()
            self._hellos.setdefault(hello.rank, hello)
            return
        self._peers[hello.rank] = stream
        self._hellos[hello.rank] = hello
        self._selector.modify(stream, selectors.EVENT_READ, hello.rank)
        missing = list(itertools.islice(self._find_missing(), _NAMED))
        informed = [hello.rank]
        if len(missing) < _NAMED:
            informed = list(self._peers)
        for rank in informed:
            self._send(rank, {"missing": missing})

    def _reject(self, stream: MessageStream, reason: str) -> None:
        stranger = self._strangers.pop(stream)
        if not self._first_rejected:
            self._first_rejected = stranger.address
        self._rejected[reason] = self._rejected.get(reason, 0) + 1
        if reason in REJECTIONS:
            stream.send({"another": reason})
        self._selector.unregister(stream)
        stream.close()

    def _refuse(self, reason: str) -> None:
        """Refuses the job, with the first reason, and sends it to the connected processes."""
        if not self._refusal:
            self._refusal = f"initialize: {reason}"
            for rank in self._peers:
                self._send(rank, {"refused": self._refusal})

    def _close_all(self) -> None:
        """Sends the refusal to all processes that are connected, and closes the connections."""
        for rank in self._peers:
            self._send(rank, {"refused": self._refusal})
        for stream in self._peers.values():
            stream.close()

    def _send(self, rank: int, message: Message) -> None:
        self._peers[rank].send(sign(message, self._place.token, self._hellos[rank].nonce))

    def _find_missing(self) -> Iterator[int]:
        while self._lowest in self._hellos:
            self._lowest += 1
        return (rank for rank in range(self._lowest, self._place.size) if rank not in self._hellos)

    def _describe_missing(self) -> str:
        text = describe_missing(self._place, list(self._find_missing()))
        count = self._rejected.get("token")
        if count:
            text += f" {count} connected with {REJECTIONS['token']}: set it to the same value in all processes."
        return text

    def _find_objection(self, hello: Hello) -> str:
        """Why the job cannot start with this process; else an empty string."""
        first = self._hellos[0]
        if hello.size != first.size:
            return (
                "all processes must be started with the same number of processes; process "
                f"{hello.rank} on {hello.host} was started with {hello.size}, process 0 on {first.host} with "
                f"{first.size}. Start all with the same num_processes."
            )
        namesake = self._hellos.get(hello.rank)
        if namesake is not None:
            return (
                f"the process_id of each process must be unique; {hello.rank} was used twice, on {namesake.host} and "
                f"on {hello.host}. Start the processes with 0 to {first.size - 1}."
            )
        return ""


def _listen(place: Place) -> socket.socket:
    """Listens on the address and port that jax's coordination service will use later.

    The smallest address: that of the coordinator, if it is one of this machine, else all.
    """
    address = bind_address(place.host)
    uses_ipv6 = ":" in address
    if not address:
        uses_ipv6 = socket.has_dualstack_ipv6()
    family = socket.AF_INET
    if uses_ipv6:
        family = socket.AF_INET6
    try:
        # A backlog for all processes, because a scheduler starts them at the same moment.
        return socket.create_server(
            (address, place.port),
            family=family,
            dualstack_ipv6=uses_ipv6 and not address,
            backlog=max(128, place.size),
        )
    except OSError as error:
        raise Refused(
            f"initialize: process 0 must listen on port {place.port}; got {os.strerror(error.errno or 0)!r}. End the "
            "program or earlier run that uses the port, or pass a coordinator_address with another port."
        ) from None


def _refuse_addresses(hellos: dict[int, Hello]) -> str:
    """The error about a host whose name gloo cannot use: the other hosts must reach it; else an empty string."""
    hosts = {hello.host for hello in hellos.values()}
    needed = "an address"
    if len(hosts) > 1:
        needed = "an address that the other hosts can reach"
    for rank, hello in sorted(hellos.items()):
        if not hello.cpu:
            continue
        if not hello.address:
            result = "does not resolve"
        elif len(hosts) > 1 and ipaddress.ip_address(hello.address).is_loopback:
            result = f"resolves to {hello.address}"
        else:
            continue
        return (
            f"initialize: the host name {hello.host!r} of process {rank} must resolve to {needed}; it {result}. Give "
            "it an address in /etc/hosts or DNS on that host."
        )
    return ""


def _join(place: Place, deadline: float) -> MessageStream:
    """Connects to process 0 and waits for its welcome; raises Refused."""
    reason = "no answer"
    while True:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            break
        try:
            connection = socket.create_connection((place.host, place.port), timeout=min(seconds, _LONGEST_TRY))
        except (socket.gaierror, UnicodeError) as error:
            reason = f"the name {place.host!r} does not resolve ({getattr(error, 'strerror', error)})"
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            stream = MessageStream(connection, _SHORT)
            reason = _wait_for_welcome(place, stream, deadline)
            if not reason:
                return stream
        time.sleep(min(_PAUSE, max(0.0, deadline - time.monotonic())))
    raise Refused(
        f"initialize: process {place.rank} could not connect to the coordinator at {place.address} within "
        f"{place.timeout:g} s: {reason}. Check that process 0 runs, and that this is the address of its host."
    )


def _wait_for_welcome(place: Place, stream: MessageStream, deadline: float) -> str:
    """Introduces this process; an empty string after the welcome of process 0, else the reason to try again."""
    hello = describe_process(place)
    stream.send(make_hello_message(hello, place.token))
    # Process 0 waits as long as this process: the extra time is for its message about who is missing.
    answer = _wait_for_answer(stream, deadline + _LAST_ANSWER, place.token, hello.nonce)
    if "welcome" in answer:
        stream.longest = LONGEST
        return ""
    was_closed = stream.closed
    stream.close()
    if "refused" in answer:
        raise Refused(escape(answer["refused"]))
    if "another" in answer:
        return f"the program that listens there has {REJECTIONS[answer['another']]}"
    if was_closed or "shardkit" in answer:  # a socket can connect to its own free port
        return "the program that listens there closes the connection"
    if "missing" in answer:
        raise Refused(describe_missing(place, answer["missing"]))
    raise Refused(
        f"initialize: the program that listens at {place.address} must be process 0 of this job; it did not answer "
        f"process {place.rank} within {place.timeout:g} s. Pass a coordinator_address with a port that is free."
    )


def _wait_for_answer(stream: MessageStream, deadline: float, token: str, nonce: str) -> Message:
    """The last message of process 0: welcome, refused, or which processes are missing; empty if there was none."""
    last: Message = {}
    while not stream.closed:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            break
        if not stream.wait(seconds):
            continue
        for message in stream.read():
            if "shardkit" in message or str(message.get("another")) in REJECTIONS:
                return message
            if is_answer(message) and is_signed(message, token, nonce):
                last = message
                if "missing" not in message:
                    return message
    return last


def describe_missing(place: Place, ranks: list[int]) -> str:
    """The error about processes that are missing."""
    whose = "its" if len(ranks) == 1 else "their"
    return (
        f"initialize: {name_processes(ranks)} of {place.size} did not connect to {place.address} within "
        f"{place.timeout:g} s. Read {whose} output, or raise timeout."
    )
