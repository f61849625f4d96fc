"""How a process introduces itself to process 0, and what process 0 answers: fields of checked types, signed.

The signature is a keyed hash (HMAC) of the message with the job's token, which excludes processes that do not have it.
An answer is signed together with the nonce of the introduction, a random number: who repeats an answer to an earlier
introduction has the wrong one.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import secrets
import socket
from typing import NamedTuple

from shardkit.runtime.channel.place import TOKEN, Place
from shardkit.runtime.channel.wire import Message, escape

VERSION = 7
REJECTIONS = {"token": f"another {TOKEN}", "version": "another version of shardkit"}  # why a process is rejected
_LONGEST_NAME = 255
_MOST = 1 << 20  # processes
_NONCE_BYTES = 16
_TYPES = (int, int, str, str, bool, str)  # of the fields of Hello


class Hello(NamedTuple):
    """How a process introduces itself."""

    rank: int  # which process it is
    size: int  # the number of processes that it was started with
    host: str  # the name of its machine
    address: str  # what that name resolves to there; empty if it does not
    cpu: bool  # whether its devices are CPUs
    nonce: str  # signed together with the answers to it


def describe_process(place: Place) -> Hello:
    """The introduction of this process."""
    name = socket.gethostname()
    address = ""
    try:
        addresses = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        first = str(addresses[0][4][0])  # gloo takes the first, of IPv6 too
        address = first.partition("%")[0]
    except (OSError, UnicodeError):  # UnicodeError: a name of more than 63 letters
        pass
    return Hello(place.rank, place.size, name, address, place.cpu, secrets.token_hex(_NONCE_BYTES))


def make_hello_message(hello: Hello, token: str) -> Message:
    """An introduction as a signed message."""
    return sign({"shardkit": VERSION, **hello._asdict()}, token)


def parse_hello(message: Message, token: str) -> Hello | str:
    """The introduction in a message; else a key of REJECTIONS, or an empty string for any other message."""
    version = message.get("shardkit")
    if type(version) is not int:
        return ""
    if version != VERSION:
        return "version"
    if message.keys() != {"shardkit", "mac", *Hello._fields}:
        return ""
    fields = [message[name] for name in Hello._fields]
    for field, kind in zip(fields, _TYPES, strict=True):
        if type(field) is not kind:
            return ""
    hello = Hello(*fields)
    if not 0 < hello.rank < hello.size <= _MOST:
        return ""
    if len(hello.nonce) != 2 * _NONCE_BYTES:
        return ""
    if len(hello.host) > _LONGEST_NAME:
        return ""
    if hello.address and not _is_address(hello.address):
        return ""
    if not is_signed(message, token):
        return "token"
    return hello._replace(host=escape(hello.host))


def is_answer(message: Message) -> bool:
    """Whether a message has the form of an answer of process 0."""
    keys = message.keys()
    if keys == {"welcome", "mac"}:
        return message["welcome"] is True
    if keys == {"refused", "mac"}:
        return isinstance(message["refused"], str)
    if keys == {"missing", "mac"}:
        missing = message["missing"]
        return isinstance(missing, list) and len(missing) > 0 and all(type(rank) is int for rank in missing)
    return False


def sign(message: Message, token: str, nonce: str = "") -> Message:
    """A message with its signature; an answer is signed together with the nonce of the introduction."""
    text = json.dumps([nonce, message], sort_keys=True)
    key = token.encode("utf-8", "surrogateescape")
    return {**message, "mac": hmac.new(key, text.encode(), "sha256").hexdigest()}


def is_signed(message: Message, token: str, nonce: str = "") -> bool:
    """Whether a message was signed with the token."""
    signature = message.get("mac")
    if not isinstance(signature, str) or not signature.isascii():
        return False
    unsigned = {name: value for name, value in message.items() if name != "mac"}
    try:
        expected = sign(unsigned, token, nonce)["mac"]
    except RecursionError:  # brackets that can just be read
        return False
    return hmac.compare_digest(signature, expected)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
