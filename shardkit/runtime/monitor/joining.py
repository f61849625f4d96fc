"""The side of all processes but 0 in the meeting before jax starts."""

from __future__ import annotations

import socket
import time

from .hello import OTHERS, Place, Refused, is_signed, own, said, too_late
from .wire import LONGEST, Lines, Message, plain

SHORT = 1 << 16  # bytes of a line before the welcome


def join(place: Place, until: float) -> Lines:
    """Connects with process 0 and waits for its welcome.

    Raises:
        Refused: one sentence for the user.
    """
    error = "no answer"
    while (left := until - time.monotonic()) > 0:
        try:
            connection = socket.create_connection((place.host, place.port), timeout=min(left, 5.0))
        except (socket.gaierror, UnicodeError) as failure:
            error = f"the name {place.host!r} does not resolve ({getattr(failure, 'strerror', failure)})"
        except OSError as failure:
            error = failure.strerror or str(failure)
        else:
            found = _welcomed(place, Lines(connection, SHORT), until)
            if isinstance(found, Lines):
                return found
            error = found
        time.sleep(min(0.1, max(0.0, until - time.monotonic())))
    raise Refused(
        f"initialize: process {place.rank} cannot reach the coordinator at {place.address} within {place.timeout:g} s: "
        f"{error}. Is process 0 running, and the address that of its host?"
    )


def _welcomed(place: Place, line: Lines, until: float) -> Lines | str:
    """The connection once process 0 says welcome; why not, if it is worth another attempt."""
    hello = own(place)
    line.send(said(hello, place.token))
    # Process 0 waits as long as this one: give it the time to say who is missing.
    answer = _answer(line, until + 2.0, place.token, hello.nonce)
    if "welcome" in answer:
        line.longest = LONGEST
        return line
    closed = line.closed
    line.close()
    if "refused" in answer:
        raise Refused(plain(answer["refused"]))
    if "another" in answer:
        return f"what listens there has {OTHERS[answer['another']]}"
    if closed or "shardkit" in answer:  # a free port of this machine can answer to itself
        return "what listens there closes the connection"
    if "missing" in answer:
        raise Refused(too_late(place, answer["missing"]))
    raise Refused(
        f"initialize: what listens at {place.address} did not answer process {place.rank} as shardkit's process 0 "
        f"within {place.timeout:g} s. Another program may hold the port: choose another."
    )


def _answer(line: Lines, until: float, token: str, nonce: str) -> Message:
    """The last word of process 0: welcome, refused, or who is missing still; empty if there was none."""
    last: Message = {}
    while not line.closed and (left := until - time.monotonic()) > 0:
        if not line.waits(left):
            continue
        for message in line.read():
            if "shardkit" in message or str(message.get("another")) in OTHERS:
                return message
            if _is_answer(message) and is_signed(message, token, nonce):
                last = message
                if "missing" not in message:
                    return message
    return last


def _is_answer(message: Message) -> bool:
    """Whether a message has one of the forms that process 0 answers in."""
    missing = message.get("missing")
    return message.keys() in ({"welcome", "mac"}, {"refused", "mac"}, {"missing", "mac"}) and (
        message.get("welcome") is True
        or isinstance(message.get("refused"), str)
        or (isinstance(missing, list) and len(missing) > 0 and all(type(rank) is int for rank in missing))
    )
