"""The messages by which the processes of a job introduce themselves: checked, and signed with the job's token.

The token excludes processes that do not have it. Nothing is encrypted: it does not protect against those who can read
or change the traffic between the machines of a job.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import secrets
import socket
from typing import NamedTuple

from shardkit.runtime.channel.place import TOKEN, Place, processes
from shardkit.runtime.channel.wire import Message, plain

VERSION = 4
REJECTIONS = {"token": f"another {TOKEN}", "version": "another version of shardkit"}  # why a process is rejected
_LONGEST_NAME = 255
_MOST = 1 << 20  # processes


class Refused(Exception):
    """The job cannot start; the message is for the user."""


class Hello(NamedTuple):
    """How a process introduces itself.

    Attributes:
        rank: which process it is.
        size: the number of processes that it was started with.
        host: the name of its machine.
        address: what that name resolves to there; empty if it does not.
        cpu: whether its devices are CPUs.
        nonce: signed together with the answers to it.
    """

    rank: int
    size: int
    host: str
    address: str
    cpu: bool
    nonce: str


def own_hello(place: Place) -> Hello:
    """The introduction of this process."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
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
    return Hello(rank, size, plain(host), address, cpu, nonce) if is_signed(message, token) else "token"


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
    return (
        f"initialize: {processes(ranks)} of {place.size} did not connect to {place.address} within {place.timeout:g} "
        f"s. Read {'its' if len(ranks) == 1 else 'their'} output, or raise timeout."
    )
