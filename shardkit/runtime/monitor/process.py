"""What a monitor does with its process: it speaks to it, looks at it, and ends with it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .wire import Message, encoded

_TICK = 0.1
_SPEAK = 1.0  # seconds for the last line and the flight record: a pipe may be full, a file system may hang


def end_with(parent: int, met: threading.Event) -> None:
    """Ends this monitor with its process while it waits for the others: the next run may need its port."""
    while not met.wait(_TICK):
        if os.getppid() != parent:
            os._exit(0)


def as_line(text: str) -> bytes:
    """A message as a separate line, even if the process was in the middle of one."""
    return b"\n" + text.encode(errors="backslashreplace") + b"\n"


def say(message: Message) -> None:
    """Sends a message to the process that this monitor watches."""
    with contextlib.suppress(OSError):
        os.write(1, encoded(message))


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    """Returns when the condition holds, or after so many seconds."""
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)


def in_time(function: Callable[[], Any]) -> Any:
    """What a function returns; None if it fails or takes long."""
    result: list[Any] = []

    def call() -> None:
        with contextlib.suppress(OSError):
            result.append(function())

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(_SPEAK)
    return result[0] if result else None


def state(process: int) -> str:
    """The system's one-letter state of a process, T for stopped; empty where it shows none."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
