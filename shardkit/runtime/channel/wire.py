"""Messages between monitors, and between a monitor and its process: one JSON object per line; exit codes."""

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
LONGEST = 1 << 20  # bytes of a line; a peer that sends more is not a monitor
_LONGEST_TEXT = 2000  # characters of another process's text that are shown
_PATIENCE = 5.0  # seconds without progress in a send before a peer counts as closed: it may be reading many others


def encode(message: Message) -> bytes:
    """A message as a line of bytes."""
    return json.dumps(message).encode() + b"\n"


def escape(text: str) -> str:
    """Another process's text for a log: on one line, unprintable characters escaped, of limited length."""
    if not isinstance(text, str):
        raise TypeError("a message's text must be a string")
    characters = []
    for character in text[:_LONGEST_TEXT]:
        if not character.isprintable():
            character = character.encode("unicode_escape").decode()
        characters.append(character)
    return "".join(characters)


def encode_output(text: str) -> bytes:
    """A text for standard error as a separate line, even if the process was in the middle of one."""
    return b"\n" + text.encode(errors="backslashreplace") + b"\n"


class MessageStream:
    """Messages over a file descriptor or socket; anything else, and a line above `longest` bytes, closes it."""

    __slots__ = ("__weakref__", "_incomplete", "_source", "closed", "longest")  # process 0 has one per process

    def __init__(self, source: socket.socket | int, longest: int = LONGEST):
        if isinstance(source, socket.socket):
            source.setblocking(False)
        self._source = source
        self._incomplete = bytearray()  # the last line so far: it grows in place, whatever pieces it comes in
        self.longest = longest
        self.closed = False

    def fileno(self) -> int:
        """The descriptor, for a selector."""
        if isinstance(self._source, int):
            return self._source
        return self._source.fileno()

    def read(self) -> Iterator[Message]:
        """The messages that one read completes; sets `closed` at the end of the stream.

        Worked example: of the pieces `{"a": 1}\\n{"b"` and `: 2}\\n` the first read yields {"a": 1}, the second
        {"b": 2}.
        """
        try:
            data = os.read(self.fileno(), 1 << 16)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        *lines, incomplete = data.split(b"\n")
        if lines and self._incomplete:
            lines[0] = bytes(self._incomplete) + lines[0]
            self._incomplete = bytearray()
        if incomplete:
            self._incomplete += incomplete
        is_too_long = len(self._incomplete) > self.longest
        self.closed = self.closed or not data or is_too_long
        for line in lines:
            message = self._parse(line)
            if message is None:
                self.closed = True
                return
            yield message

    def _parse(self, line: bytes) -> Message | None:
        """The message in a line; None if there is none."""
        if len(line) > self.longest:
            return None
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):  # deeply nested brackets
            return None
        if not isinstance(message, dict):
            return None
        return message

    def wait(self, seconds: float = 0.0) -> bool:
        """Waits at most so many seconds; returns whether there is something to read."""
        return self._poll(select.POLLIN, seconds)

    def _poll(self, event: int, seconds: float) -> bool:
        poll = select.poll()  # select.select fails on descriptors above 1023
        poll.register(self, event)
        return bool(poll.poll(1000 * seconds))

    def send(self, message: Message) -> None:
        """Sends a message of any length; a peer that does not read it counts as closed."""
        self.send_line(encode(message))

    def send_line(self, line: bytes) -> None:
        """Sends a message that is encoded already, as one that goes to many peers is."""
        assert isinstance(self._source, socket.socket)
        unsent = memoryview(line)
        try:
            while unsent:
                try:
                    sent = self._source.send(unsent)
                except BlockingIOError:
                    if not self._poll(select.POLLOUT, _PATIENCE):
                        raise TimeoutError from None
                    continue
                unsent = unsent[sent:]
        except OSError:
            self.closed = True

    def close(self) -> None:
        """Closes a socket."""
        self.closed = True
        if isinstance(self._source, socket.socket):
            self._source.close()
