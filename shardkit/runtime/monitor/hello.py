"""What the processes of a job say to each other when they meet: checked, and signed with the job's token.

The token keeps out whoever does not have it. It is no encryption: who can read or change what goes over the network
between the machines of a job is not kept out.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import secrets
import socket
from typing import NamedTuple

from .wire import Message, plain

VERSION = 2
TOKEN = "SHARDKIT_JOB_TOKEN"  # the variable in which each process of a job finds the token
OTHERS = {"token": f"another {TOKEN}", "version": "another version of shardkit"}  # why a process is turned away
_LONGEST_NAME = 255
_MOST = 1 << 20  # processes


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
        token: the secret that the processes of a job share; empty without one.
    """

    host: str
    port: int
    rank: int
    size: int
    timeout: float
    cpu: bool
    token: str = ""

    @property
    def address(self) -> str:
        """host:port."""
        return f"{self.host}:{self.port}"


class Hello(NamedTuple):
    """How a process introduces itself.

    Attributes:
        rank: which process it is.
        size: the number of processes that it was told.
        host: the name of its machine.
        address: what that name resolves to there; empty if to nothing.
        cpu: whether its devices are CPUs.
        nonce: what the answers to it are signed with.
    """

    rank: int
    size: int
    host: str
    address: str
    cpu: bool
    nonce: str


def own(place: Place) -> Hello:
    """The introduction of this process."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except (OSError, UnicodeError):  # UnicodeError: a name of more than 63 letters
        address = ""
    return Hello(place.rank, place.size, name, address, place.cpu, secrets.token_hex(16))


def said(hello: Hello, token: str) -> Message:
    """An introduction as a message."""
    return signed({"shardkit": VERSION, **hello._asdict()}, token)


def heard(message: Message, token: str) -> Hello | str:
    """The introduction in a message; why it is none of this job's, a key of OTHERS, or empty if it is none at all."""
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
    return Hello(rank, size, plain(host), address, cpu, nonce) if is_signed(message, token) else "token"


def signed(message: Message, token: str, nonce: str = "") -> Message:
    """A message with its signature; an answer is signed together with the nonce of what it answers."""
    text = json.dumps([nonce, message], sort_keys=True)
    return {**message, "mac": hmac.new(token.encode("utf-8", "surrogateescape"), text.encode(), "sha256").hexdigest()}


def is_signed(message: Message, token: str, nonce: str = "") -> bool:
    """Whether a message comes from who has the token."""
    unsigned = {name: value for name, value in message.items() if name != "mac"}
    mac = message.get("mac")
    if not isinstance(mac, str) or not mac.isascii():
        return False
    return hmac.compare_digest(mac, signed(unsigned, token, nonce)["mac"])


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def too_late(place: Place, ranks: list[int]) -> str:
    """Why the job cannot start without these processes."""
    return (
        f"initialize: {processes(ranks)} of {place.size} did not come to {place.address} within {place.timeout:g} s. "
        f"Look at the output of {'it' if len(ranks) == 1 else 'them'}, or raise timeout."
    )


def processes(ranks: list[int]) -> str:
    """Processes by number, for a sentence."""
    return f"process {ranks[0]}" if len(ranks) == 1 else f"processes {', '.join(map(str, ranks))}"
