"""A process's side of its monitor: starts it, sends it what the process does, exits when the monitor says so."""

from __future__ import annotations

import contextlib
import faulthandler
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

from shardkit.runtime.channel.place import Place
from shardkit.runtime.channel.recorder import SIZE, Recorder, read_process_state
from shardkit.runtime.channel.wire import LEAVES_LAST, LOST, Message, MessageStream, encode, encode_output

_MONITOR = Path(__file__).parents[2] / "jobs" / "monitor" / "__main__.py"  # a program, not an import
_LONGEST_CAUSE = 300  # characters of an exception that are sent to the other processes
_NO_ANSWER = (
    "initialize: all processes must connect before training; the monitor of this process died first (SIGKILL or out of "
    "memory?). Start the job again."
)
_LOOK = 1.0  # seconds between two checks of the monitor
_STOPPED = 3  # checks at which it may be stopped, as it is when a whole job is stopped and continued
_PHASE = "shardkit_phase"
_STARTED: list[MonitorClient] = []


class MonitorClient:
    """The monitor of this process, which has the `place` in the job and the flight `recorder`."""

    def __init__(self, place: Place):
        self.place: Place = place
        self._own = os.getpid()
        self.recorder: Recorder
        self.recorder, ring = _recorder()
        # Of descriptors 0 to 2 none stays closed: libraries write to 1 and 2, which must not become pipes to it.
        while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
            os.set_inheritable(descriptor, True)
        os.close(descriptor)
        crash, name = tempfile.mkstemp(dir=ring.parent)  # tells a fatal signal, such as the abort of jax, from SIGKILL
        os.unlink(name)
        faulthandler.enable(crash)
        command, pipe = [sys.executable, "-I", "-S", str(_MONITOR)], subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, pass_fds=[crash])
        self._writing = threading.Lock()
        self._agreed: dict[str, threading.Event] = {}
        self._exit_code: int | None = None
        self._left = False
        self.tell({"ring": str(ring), "parent": os.getpid(), "place": list(place), "crash": crash})
        assert self._process.stdout is not None
        lines = MessageStream(self._process.stdout.fileno())
        try:
            refusal = self._connected(lines)
        except KeyboardInterrupt:
            self._process.kill()
            raise
        finally:
            shutil.rmtree(ring.parent, ignore_errors=True)  # the monitor has removed the file already
        if refusal:
            self._process.wait()
            raise RuntimeError(refusal)
        threading.Thread(target=self._listen, args=(lines,), name="shardkit-monitor", daemon=True).start()

    @property
    def process_id(self) -> int:
        """The process id of the monitor."""
        return self._process.pid

    def tell(self, message: Message) -> None:
        """Sends a message to the monitor; does nothing in a forked child, which has a copy of this object."""
        assert self._process.stdin is not None
        if os.getpid() != self._own:
            return
        with self._writing, contextlib.suppress(OSError):
            self._process.stdin.write(encode(message))
            self._process.stdin.flush()

    def agree(self, program: str, message: Message) -> None:
        """Returns when all processes have sent the same fingerprint; if they differ, the monitor ends this process."""
        agreed = self._agreed.setdefault(program, threading.Event())
        self.tell({"program": program, **message})
        agreed.wait()
        del self._agreed[program]

    def failed(self, kind: type[BaseException], error: BaseException | None, code: int = 1) -> None:
        """Sends the error to all processes, and exits when the monitor has decided on the fault."""
        if os.getpid() != self._own:
            return
        self._exit_code = code
        if phase := getattr(error, _PHASE, None):
            self.recorder.enter(*phase)
        cause = " ".join(f"{kind.__name__}: {error}".split()).rstrip(":. ")
        self.tell({"cause": cause if len(cause) <= _LONGEST_CAUSE else cause[: _LONGEST_CAUSE - 3] + "..."})
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10.0)  # it ends this process sooner
        self._process.kill()
        leave(code)

    def left(self) -> None:
        """Tells all processes that this one exits without an error."""
        if os.getpid() != self._own:
            return
        self._left = True
        self.recorder.enter("end", self.recorder.status.step)
        self.tell({"left": True})

    def _connected(self, lines: MessageStream) -> str:
        """Waits until all processes are connected; returns the refusal, or an empty string."""
        while not lines.closed:
            for message in lines.read():
                if "note" in message:
                    os.write(2, encode_output(message["note"]))
                else:
                    return str(message.get("refused", ""))
        return _NO_ANSWER

    def _listen(self, lines: MessageStream) -> None:
        stopped = 0
        while not lines.closed:
            if not lines.wait(_LOOK):
                stopped = stopped + 1 if read_process_state(self._process.pid) in ("T", "t") else 0
                if stopped > _STOPPED and not self._left:
                    self._process.kill()
                    self._alone("is stopped (SIGSTOP?)")
                continue
            for message in lines.read():
                if "end" in message:
                    lost = message["end"] == LOST  # and then an error of this process is a consequence
                    code = LOST if lost else self._exit_code or message["end"]
                    self._leave(code, message["text"], stacks=message["stacks"])
                if "agreed" in message and message["agreed"] in self._agreed:
                    self._agreed[message["agreed"]].set()
        if not self._left:
            self._alone("died (SIGKILL or out of memory?)")

    def _alone(self, what: str) -> None:
        """Ends this process, whose monitor is gone: the others notice, and end."""
        time.sleep(LEAVES_LAST if self.place.rank == 0 else 0.0)
        self._leave(LOST, f"shardkit guard: the monitor of process {self.place.rank} {what}.")

    def _leave(self, code: int, text: str, stacks: bool = False) -> None:
        """Ends this process, and prints the text last; before it the stacks of all threads, if it hangs."""

        def last() -> None:
            if stacks:
                os.write(2, encode_output(f"shardkit: the stacks of process {self.place.rank}:"))
                faulthandler.dump_traceback(2)
            os.write(2, encode_output(text))
            self.tell({"printed": True})

        leave(code, last)


def start(place: Place) -> MonitorClient:
    """Starts the monitor of this process, or raises why the processes could not connect in one sentence.

    From then on an uncaught exception ends all processes, with its text.
    """
    import atexit

    monitor = MonitorClient(place)
    _STARTED.append(monitor)
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        try:
            before(kind, error, traceback)
        finally:
            monitor.failed(kind, error, 130 if issubclass(kind, KeyboardInterrupt) else 1)  # as in a shell

    def ends() -> None:
        error = getattr(sys, "last_value", None)
        if sys.excepthook is not hook and error is not None:  # the hook was replaced, so the error has not been sent
            monitor.failed(type(error), error)
        monitor.left()

    sys.excepthook = hook
    atexit.register(ends)
    return monitor


def running() -> MonitorClient | None:
    """The monitor of this process, if it has one."""
    return _STARTED[0] if _STARTED else None


def tell_others(error: BaseException, code: int = 2) -> None:
    """Ends all processes with an error that this one has already printed; without a monitor it does nothing."""
    if _STARTED:
        _STARTED[0].failed(type(error), error, code)


def note_phase(error: BaseException, phase: str, step: int) -> None:
    """Notes the phase in which an error was raised, for `failed`."""
    setattr(error, _PHASE, (phase, step))


def leave(code: int, last: Callable[[], None] = lambda: None) -> None:
    """Exits at once, and kills multiprocessing children: the exit barriers of jax would wait for other processes."""
    with contextlib.suppress(Exception):
        for child in active_children():
            child.kill()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # None if it was closed at the start
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
            f"initialize: the directory for temporary files must have {SIZE} bytes free; {error.strerror}. Free space "
            "there, or set TMPDIR to another directory."
        ) from None
