"""What the launchers of a job on several hosts and their meeting say to each other, each message in a checked form."""

from __future__ import annotations

import secrets
import socket
from typing import Any, NamedTuple, get_args, get_type_hints

from shardkit.runtime.monitor.hello import VERSION, is_signed, signed
from shardkit.runtime.monitor.wire import Message, plain

SHORT = 1 << 16  # bytes of a line: all of these are short
_MOST = 1 << 31  # no number that is said is as large
_LONGEST_NAME = 255
_KIND = "kind"


class Terms(NamedTuple):
    """What all launchers of a job must have been told alike.

    Attributes:
        hosts: launchers of the job.
        min_hosts: the fewest that it runs on.
        restarts: the most restarts in an hour.
    """

    hosts: int
    min_hosts: int
    restarts: int


class Arrival(NamedTuple):
    """How a launcher introduces itself.

    Attributes:
        id: which launcher it is; the same after a connection was lost.
        host: the name of its machine.
        processes: how many it starts.
        hosts: what it was told, as in `Terms`.
        min_hosts: the same.
        restarts: the same.
        nonce: signed together with the answer.
    """

    id: str
    host: str
    processes: int
    hosts: int
    min_hosts: int
    restarts: int
    nonce: str


class Ready(NamedTuple):
    """A launcher without processes: it can start some, and rank 0 there can listen on this port."""

    port: int


class Ended(NamedTuple):
    """The processes of a launcher have ended: the exit code, whose it is, and what the guard named."""

    attempt: int
    code: int
    first: int | None
    blamed: int | None
    step: int | None


class Leaves(NamedTuple):
    """A launcher got a signal, and will not come back."""

    signal: int


class Beat(NamedTuple):
    """There is nothing to say, and somebody to hear it."""


class Start(NamedTuple):
    """The processes to start: ranks `offset` and up, of `size`; rank 0 listens at `address`."""

    attempt: int
    size: int
    offset: int
    address: str
    port: int


class Stop(NamedTuple):
    """The processes must end, in a way of `Call`."""

    attempt: int
    how: str


class Note(NamedTuple):
    """A line to print."""

    text: str


class Over(NamedTuple):
    """The job has ended: the exit code of every launcher."""

    code: int
    text: str


ToMeeting = Ready | Ended | Leaves | Beat
ToLauncher = Start | Stop | Note | Over | Beat


def told(what: ToMeeting | ToLauncher) -> Message:
    """A message of this content."""
    return {_KIND: type(what).__name__.lower(), **what._asdict()}


def heard(message: Message, kinds: Any) -> Any:
    """The content of a message, if it has the form of one of `kinds`, a union; None for any other message."""
    kind = next((each for each in get_args(kinds) if each.__name__.lower() == message.get(_KIND)), None)
    values = {name: value for name, value in message.items() if name != _KIND}
    return None if kind is None else _checked(kind, values)


def _checked(kind: Any, values: Message) -> Any:
    if values.keys() != set(kind._fields):
        return None
    for name, expected in get_type_hints(kind).items():
        value = values[name]
        if type(value) not in (get_args(expected) or (expected,)):
            return None
        if type(value) is int and not 0 <= value < _MOST:
            return None
    return kind(**values)


def introduction(id: str, processes: int, terms: Terms) -> Arrival:
    """That of a launcher on this machine."""
    return Arrival(id, socket.gethostname()[:_LONGEST_NAME], processes, *terms, secrets.token_hex(16))


def arrival_message(arrival: Arrival, token: str) -> Message:
    """An introduction as a signed message."""
    return signed({"shardkit": VERSION, **arrival._asdict()}, token)


def parse_arrival(message: Message, token: str) -> Arrival | str:
    """The introduction in a message; else a key of REJECTIONS, or an empty string for any other message."""
    if type(message.get("shardkit")) is not int:
        return ""
    if message["shardkit"] != VERSION:
        return "version"
    values = {name: value for name, value in message.items() if name not in ("shardkit", "mac")}
    arrival = _checked(Arrival, values)
    if arrival is None or not 0 < len(arrival.id) <= 64 or len(arrival.host) > _LONGEST_NAME:
        return ""
    if arrival.processes < 1 or len(arrival.nonce) != 32:
        return ""
    return arrival._replace(id=plain(arrival.id), host=plain(arrival.host)) if is_signed(message, token) else "token"


def objection(theirs: Terms, ours: Terms) -> str:
    """Why a launcher that was told something else cannot take part; empty if it can."""
    for name, there, here in zip(Terms._fields, theirs, ours, strict=True):
        if there != here:
            option = f"--{name.replace('_', '-')}"
            return (
                f"launch: all launchers must be started with the same {option}; got {there} here, and {here} where the "
                f"meeting is. Pass the same {option} on all hosts."
            )
    return ""
