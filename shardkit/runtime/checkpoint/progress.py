"""Tells the monitor when this process has written its part of a checkpoint, so that the one that has not is named."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

from shardkit.runtime.channel import client


class SaveProgress:
    """A save in progress; `result` waits for all processes, as does that of orbax's response."""

    def __init__(self) -> None:
        self._response: Any = None
        self._lock = threading.Lock()
        self._written = self._waiting = False

    def of(self, response: Any) -> SaveProgress:
        """Takes orbax's response for the save."""
        self._response = response
        return self

    def ends_with(self, writes: Sequence[Any]) -> None:
        """This process's part is written when each of these has a result; the error of one is raised by `result`."""

        def wait() -> None:
            with contextlib.suppress(Exception):
                for write in writes:
                    write.result()
                self._now(written=True)

        threading.Thread(target=wait, name="shardkit-written", daemon=True).start()

    def result(self) -> None:
        """Waits until all processes have written their parts."""
        self._now(waiting=True)
        try:
            self._response.result()
        finally:
            self._now(waiting=False)

    def _now(self, *, written: bool | None = None, waiting: bool | None = None) -> None:
        with self._lock:
            self._written = self._written if written is None else written
            self._waiting = self._waiting if waiting is None else waiting
            if watcher := client.running():
                phases = ("save", "commit") if self._waiting and self._written else ("commit", "save")
                watcher.recorder.turn(*phases)
