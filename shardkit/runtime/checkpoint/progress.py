"""Telling the monitor that this process's part of a checkpoint is written, so that one whose is not is named."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from shardkit.runtime.monitor import client


class Part:
    """This process's part of a save; `result` waits for the whole, as the response of orbax does."""

    def __init__(self) -> None:
        self._response: Any = None
        self._turning = threading.Lock()
        self._written = self._waiting = False

    def of(self, response: Any) -> Part:
        """Takes the response of the save that this is a part of."""
        self._response = response
        return self

    def ends_with(self, writes: Sequence[Any]) -> None:
        """The part is written when each of these has a result; one that fails ends the save, which will say so."""

        def wait() -> None:
            with contextlib.suppress(Exception):
                for write in writes:
                    write.result()
                with self._turning:
                    self._written = True
                    self._tell()

        threading.Thread(target=wait, name="shardkit-written", daemon=True).start()

    def result(self) -> None:
        """Waits until all processes have written theirs."""
        with self._waits():
            self._response.result()

    @contextlib.contextmanager
    def _waits(self) -> Iterator[None]:
        with self._turning:
            self._waiting = True
            self._tell()
        try:
            yield
        finally:
            with self._turning:
                self._waiting = False
                self._tell()

    def _tell(self) -> None:
        watcher = client.running()
        if watcher is None:
            return
        if self._waiting and self._written:
            watcher.recorder.turn("save", "written")
        else:
            watcher.recorder.turn("written", "save")
