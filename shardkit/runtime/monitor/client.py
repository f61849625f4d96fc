"""This process's side of its monitor: starting it, telling it what the process does, ending when it says so."""

from __future__ import annotations

import contextlib
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

from shardkit.runtime.monitor.hello import Place
from shardkit.runtime.monitor.main import FAILED, LEAVES_LAST, as_line, state
from shardkit.runtime.monitor.recorder import SIZE, Recorder
from shardkit.runtime.monitor.wire import Lines, Message, encoded

_START = "import sys; sys.path.insert(0, sys.argv[1]); from monitor.main import main; main()"
_WORDS = 300  # characters of an exception that go to the other processes
_NO_ANSWER = "initialize: the monitor of this process ended before all had met. Start again."
_LOOK = 1.0  # seconds between two looks at the monitor
_STOPPED = 3  # looks at which it may be stopped, as all is when a job is stopped and goes on
_PHASE = "shardkit_phase"
_STARTED: list[Beside] = []


class Beside:
    """A running monitor, seen from the process that it watches.

    Attributes:
        recorder: the flight recorder.
        place: which process of the job this is.
    """

    def __init__(self, place: Place):
        self.place, self._own = place, os.getpid()
        self.recorder, ring = _recorder()
        _open_closed_descriptors()
        command = [sys.executable, "-I", "-S", "-c", _START, str(Path(__file__).parents[1])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._writing = threading.Lock()
        self._agreed: dict[str, threading.Event] = {}
        self._exit_code: int | None = None
        self._left = False
        self.tell({"ring": str(ring), "parent": os.getpid(), "place": list(place)})
        assert self._process.stdout is not None
        words = Lines(self._process.stdout.fileno())
        try:
            refusal = self._met(words)
        except KeyboardInterrupt:
            self._process.kill()
            raise
        finally:
            shutil.rmtree(ring.parent, ignore_errors=True)  # the monitor has taken the file out already
        if refusal:
            self._process.wait()
            raise RuntimeError(refusal)
        threading.Thread(target=self._listen, args=(words,), name="shardkit-monitor", daemon=True).start()

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

    def _met(self, words: Lines) -> str:
        """Waits until all have met; why not, or an empty string."""
        while not words.closed:
            for message in words.read():
                if "note" in message:
                    os.write(2, as_line(message["note"]))
                else:
                    return str(message.get("refused", ""))
        return _NO_ANSWER

    def _listen(self, words: Lines) -> None:
        stopped = 0
        while not words.closed:
            if not words.waits(_LOOK):
                stopped = stopped + 1 if state(self._process.pid) in ("T", "t") else 0
                if stopped > _STOPPED and not self._left:
                    self._process.kill()
                    self._alone("is stopped (SIGSTOP?)")
                continue
            for message in words.read():
                if "end" in message:
                    self._leave(self._exit_code or message["end"], message["text"])
                if "agreed" in message and message["agreed"] in self._agreed:
                    self._agreed[message["agreed"]].set()
        if not self._left:
            self._alone("ended (killed?)")

    def _alone(self, what: str) -> None:
        """Ends this process, whose monitor is no more: the others learn of that, and end."""
        time.sleep(LEAVES_LAST if self.place.rank == 0 else 0.0)
        self._leave(FAILED, f"shardkit guard: the monitor of process {self.place.rank} {what}.")

    def _leave(self, code: int, text: str) -> None:
        """Ends this process, with these as its last words."""

        def say() -> None:
            os.write(2, as_line(text))
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


def _recorder() -> tuple[Recorder, Path]:
    """A flight recorder, and the file that its monitor will open."""
    folder = None
    try:
        folder = Path(tempfile.mkdtemp(prefix="shardkit-"))
        return Recorder(str(folder / "ring")), folder / "ring"
    except OSError as error:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        raise RuntimeError(
            f"initialize: the directory for temporary files must have room for {SIZE} bytes; {error.strerror}. Make "
            "room, or set TMPDIR to another directory."
        ) from None


def _open_closed_descriptors() -> None:
    """A pipe must not become descriptor 1 or 2, which libraries write to, where the job was started without them."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
