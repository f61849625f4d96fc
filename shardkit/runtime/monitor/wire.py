"""Messages between monitors, and between a monitor and its process: one JSON object a line."""

from __future__ import annotations

import json
import os
import select
import socket
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]
_LONGEST = 1 << 28  # a peer that sends more without an end of line is not one of ours
_PATIENCE = 5.0  # seconds in which a peer takes nothing before it counts as closed: it may be hearing many others


def encoded(message: Message) -> bytes:
    """A message as a line of bytes."""
    return json.dumps(message).encode() + b"\n"


class Lines:
    """Messages from a file descriptor or socket as they come; what is not a message closes the line."""

    def __init__(self, source: socket.socket | int):
        self._source, self._buffer = source, bytearray()
        self.closed = False

    def fileno(self) -> int:
        """The descriptor, for a selector."""
        return self._source if isinstance(self._source, int) else self._source.fileno()

    def read(self) -> Iterator[Message]:
        """The messages that one read completes; `closed` afterwards when there will be no more."""
        try:
            data = os.read(self.fileno(), 1 << 16)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        self.closed = self.closed or not data or len(self._buffer) > _LONGEST
        self._buffer += data
        *lines, rest = self._buffer.split(b"\n") if b"\n" in data else [self._buffer]
        self._buffer = bytearray(rest)
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                self.closed = True
                return
            yield message

    def waits(self) -> bool:
        """Whether a read would find something."""
        poll = select.poll()  # select itself knows no descriptor above 1023
        poll.register(self, select.POLLIN)
        return bool(poll.poll(0))

    def send(self, message: Message) -> None:
        """Sends a message, however long; a peer that takes nothing counts as closed."""
        assert isinstance(self._source, socket.socket)
        try:
            self._source.settimeout(_PATIENCE)
            rest = memoryview(encoded(message))
            while rest:
                rest = rest[self._source.send(rest) :]
        except OSError:
            self.closed = True

    def close(self) -> None:
        """Closes a socket."""
        if isinstance(self._source, socket.socket):
            self._source.close()
