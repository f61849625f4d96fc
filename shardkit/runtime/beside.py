"""This process's side of its monitor: starting it, telling it what the process does, ending when it says so."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import active_children
from pathlib import Path
from types import TracebackType

from shardkit.runtime.monitor.main import FAILED, LEAVES_LAST
from shardkit.runtime.monitor.rendezvous import Place
from shardkit.runtime.monitor.ring import Recorder
from shardkit.runtime.monitor.wire import Message, encoded

_START = "import sys; sys.path.insert(0, sys.argv[1]); from monitor.main import main; main()"
_WORDS = 300  # characters of an exception that go to the other processes
_NO_ANSWER = b"""{"refused": "initialize: the monitor of this process ended before all had met. Start again."}"""
_PHASE = "shardkit_phase"
_STARTED: list[Beside] = []


class Beside:
    """A running monitor, seen from the process that it watches.

    Attributes:
        recorder: the flight recorder.
        place: which process of the job this is.
    """

    def __init__(self, place: Place):
        ring = Path(tempfile.mkdtemp(prefix="shardkit-")) / "ring"
        self.place, self.recorder = place, Recorder(str(ring))
        self._own = os.getpid()
        _open_closed_descriptors()
        command = [sys.executable, "-I", "-S", "-c", _START, str(Path(__file__).parent)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._writing = threading.Lock()
        self._agreed: dict[str, threading.Event] = {}
        self._exit_code: int | None = None
        self._left = False
        self.tell({"ring": str(ring), "parent": os.getpid(), "place": list(place)})
        assert self._process.stdout is not None
        try:
            answer = json.loads(self._process.stdout.readline() or _NO_ANSWER)
        except KeyboardInterrupt:
            self._process.kill()
            raise
        finally:
            shutil.rmtree(ring.parent, ignore_errors=True)  # the monitor has taken the file out already
        if "refused" in answer:
            self._process.wait()
            raise RuntimeError(answer["refused"])
        threading.Thread(target=self._listen, name="shardkit-monitor", daemon=True).start()

    @property
    def process_id(self) -> int:
        """The monitor's own process."""
        return self._process.pid

    def tell(self, message: Message) -> None:
        """Sends a message to the monitor; a forked child, which has a copy of this, does not speak for its parent."""
        assert self._process.stdin is not None
        if os.getpid() != self._own:
            return
        with self._writing, contextlib.suppress(OSError):
            self._process.stdin.write(encoded(message))
            self._process.stdin.flush()

    def agree(self, program: str, message: Message) -> None:
        """Returns when all processes have sent the same fingerprint of a program; else the monitor ends this one."""
        heard = self._agreed.setdefault(program, threading.Event())
        self.tell({"program": program, **message})
        heard.wait()
        del self._agreed[program]

    def failed(self, kind: type[BaseException], error: BaseException | None, code: int = 1) -> None:
        """Tells all processes what this one failed with, and ends it when the monitor has decided."""
        if os.getpid() != self._own:
            return
        self._exit_code = code
        if phase := getattr(error, _PHASE, None):
            self.recorder.enter(*phase)
        words = " ".join(f"{kind.__name__}: {error}".split()).rstrip(":. ")
        self.tell({"cause": words if len(words) <= _WORDS else words[: _WORDS - 3] + "..."})
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10.0)  # it ends this process before
        self._process.kill()
        leave(code)

    def left(self) -> None:
        """Tells all that this process ends in good order."""
        if os.getpid() != self._own:
            return
        self._left = True
        self.recorder.enter("end", self.recorder.status.step)
        self.tell({"left": True})

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            if "end" in message:
                self._leave(self._exit_code or message["end"], message["text"])
            if "agreed" in message and message["agreed"] in self._agreed:
                self._agreed[message["agreed"]].set()
        if not self._left:  # the others have been told that this process ended, and end
            time.sleep(LEAVES_LAST if self.place.rank == 0 else 0.0)
            self._leave(FAILED, f"shardkit guard: the monitor of process {self.place.rank} ended (killed?).")

    def _leave(self, code: int, text: str) -> None:
        """Ends this process, with these as its last words."""

        def say() -> None:
            os.write(2, text.encode() + b"\n")
            self.tell({"told": True})

        leave(code, say)


def start(place: Place) -> Beside:
    """Starts the one monitor of this process; from then on an uncaught exception ends all processes, with its cause.

    Raises:
        RuntimeError: the processes could not meet, in one sentence.
    """
    import atexit

    beside = Beside(place)
    _STARTED.append(beside)
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        try:
            before(kind, error, traceback)
        finally:
            beside.failed(kind, error, 130 if issubclass(kind, KeyboardInterrupt) else 1)  # as a shell says it

    def ends() -> None:
        error = getattr(sys, "last_value", None)
        if sys.excepthook is not hook and error is not None:  # it was replaced, and the error seen by another
            beside.failed(type(error), error)
        beside.left()

    sys.excepthook = hook
    atexit.register(ends)
    return beside


def running() -> Beside | None:
    """The monitor of this process, if it has one."""
    return _STARTED[0] if _STARTED else None


def tell_others(error: BaseException, code: int = 2) -> None:
    """Ends all processes with an error that this one has reported already; alone it does nothing."""
    if _STARTED:
        _STARTED[0].failed(type(error), error, code)


def in_phase(error: BaseException, phase: str, step: int) -> None:
    """Notes where an error came up, for `failed`."""
    setattr(error, _PHASE, (phase, step))


def leave(code: int, last: Callable[[], None] = lambda: None) -> None:
    """Ends this process at once, and those of its multiprocessing; the exit barriers of jax would wait for others."""
    with contextlib.suppress(Exception):
        for child in active_children():
            child.kill()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # None if it was closed from the start
            stream.flush()
    with contextlib.suppress(OSError):
        last()
    os._exit(code)


def _open_closed_descriptors() -> None:
    """A pipe must not become descriptor 1 or 2, which libraries write to, where the job was started without them."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
