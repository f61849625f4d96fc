"""Messages between monitors, and between a monitor and its process: one JSON object per line; how a process ends."""

from __future__ import annotations

import json
import os
import select
import socket
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]
FAILED = 70  # the exit code of a process that its monitor ends
LOST = 76  # where another process died or its machine does not answer: the same job may go on when it starts again
# Seconds that process 0 outlives the others: jax's coordination service, whose end aborts them, is in it.
LEAVES_LAST = 1.5
LONGEST = 1 << 28  # bytes of a line; a peer that sends more is not a monitor
_LONGEST_TEXT = 2000  # characters of another process's text that are shown
_PATIENCE = 5.0  # seconds without progress in a send before a peer counts as closed: it may be reading many others


def encoded(message: Message) -> bytes:
    """A message as a line of bytes."""
    return json.dumps(message).encode() + b"\n"


def plain(text: str) -> str:
    """Another process's text for a log: on one line, unprintable characters escaped, of limited length; a string."""
    if not isinstance(text, str):
        raise TypeError("a message's text must be a string")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:_LONGEST_TEXT])


def as_line(text: str) -> bytes:
    """A message as a separate line, even if the process was in the middle of one."""
    return b"\n" + text.encode(errors="backslashreplace") + b"\n"


class Lines:
    """Messages over a file descriptor or socket; anything else, and a line above `longest` bytes, closes it."""

    __slots__ = ("__weakref__", "_begun", "_source", "closed", "longest")  # process 0 has one per process

    def __init__(self, source: socket.socket | int, longest: int = LONGEST):
        if isinstance(source, socket.socket):
            source.setblocking(False)
        self._source, self.longest = source, longest
        self._begun = bytearray()  # of the next line: it grows in place, whatever pieces it comes in
        self.closed = False

    def fileno(self) -> int:
        """The descriptor, for a selector."""
        return self._source if isinstance(self._source, int) else self._source.fileno()

    def read(self) -> Iterator[Message]:
        """The messages that one read completes; sets `closed` at the end of the stream."""
        try:
            data = os.read(self.fileno(), 1 << 16)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        *ended, rest = data.split(b"\n")
        if ended and self._begun:
            ended[0] = bytes(self._begun) + ended[0]
            self._begun = bytearray()
        if rest:
            self._begun += rest
        self.closed = self.closed or not data or len(self._begun) > self.longest
        for line in ended:
            try:
                message = json.loads(line) if len(line) <= self.longest else None
            except (ValueError, RecursionError):  # deeply nested brackets
                message = None
            if not isinstance(message, dict):
                self.closed = True
                return
            yield message

    def waits(self, seconds: float = 0.0) -> bool:
        """Whether there is something to read within so many seconds."""
        return self._polls(select.POLLIN, seconds)

    def _polls(self, event: int, seconds: float) -> bool:
        poll = select.poll()  # select.select fails on descriptors above 1023
        poll.register(self, event)
        return bool(poll.poll(1000 * seconds))

    def send(self, message: Message) -> None:
        """Sends a message of any length; a peer that does not read it counts as closed."""
        self.send_line(encoded(message))

    def send_line(self, line: bytes) -> None:
        """Sends a message that is encoded already, as one that goes to many peers is."""
        assert isinstance(self._source, socket.socket)
        rest = memoryview(line)
        try:
            while rest:
                try:
                    rest = rest[self._source.send(rest) :]
                except BlockingIOError:
                    if not self._polls(select.POLLOUT, _PATIENCE):
                        raise TimeoutError from None
        except OSError:
            self.closed = True

    def close(self) -> None:
        """Closes a socket."""
        self.closed = True
        if isinstance(self._source, socket.socket):
            self._source.close()
