"""Connects a process other than 0 with process 0, before jax starts."""

from __future__ import annotations

import socket
import time

from .hello import REJECTIONS, Place, Refused, hello_message, is_signed, own_hello, too_late
from .wire import LONGEST, Lines, Message, plain

_SHORT = 1 << 16  # bytes of a line before the welcome


def join(place: Place, until: float) -> Lines:
    """Connects to process 0 and waits for its welcome.

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
            found = _welcomed(place, Lines(connection, _SHORT), until)
            if isinstance(found, Lines):
                return found
            error = found
        time.sleep(min(0.1, max(0.0, until - time.monotonic())))
    raise Refused(
        f"initialize: process {place.rank} could not connect to the coordinator at {place.address} within "
        f"{place.timeout:g} s: {error}. Check that process 0 runs, and that this is the address of its host."
    )


def _welcomed(place: Place, line: Lines, until: float) -> Lines | str:
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
        raise Refused(plain(answer["refused"]))
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


def _answer(line: Lines, until: float, token: str, nonce: str) -> Message:
    """The last message of process 0: welcome, refused, or which processes are missing; empty if there was none."""
    last: Message = {}
    while not line.closed and (left := until - time.monotonic()) > 0:
        if not line.waits(left):
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
