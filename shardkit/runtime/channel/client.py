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
_LONGEST_VERDICT = 10.0  # seconds in which a monitor decides on an error
_LOOK = 1.0  # seconds between two checks of the monitor
_STOPPED = 3  # checks at which it may be stopped, as it is when a whole job is stopped and continued
_PHASE = "shardkit_phase"
_STARTED: list[MonitorClient] = []


class MonitorClient:
    """The monitor of this process, which has the `place` in the job and the flight `recorder`."""

    def __init__(self, place: Place):
        self.place: Place = place
        self._process_id = os.getpid()
        self.recorder: Recorder
        self.recorder, ring = _make_recorder()
        _open_standard_descriptors()
        # Python writes a fatal signal, such as the abort of jax, to this file, and not SIGKILL: it tells the two apart.
        crash, name = tempfile.mkstemp(dir=ring.parent)
        os.unlink(name)
        faulthandler.enable(crash)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_MONITOR)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[crash],
        )
        self._writing = threading.Lock()
        self._exit_code: int | None = None  # of an error of this process
        self._has_left = False
        self.tell({"ring": str(ring), "parent": os.getpid(), "place": list(place), "crash": crash})
        assert self._process.stdout is not None
        stream = MessageStream(self._process.stdout.fileno())
        try:
            refusal = self._wait_for_others(stream)
        except KeyboardInterrupt:
            self._process.kill()
            raise
        finally:
            shutil.rmtree(ring.parent, ignore_errors=True)  # the monitor has removed the file already
        if refusal:
            self._process.wait()
            raise RuntimeError(refusal)
        threading.Thread(target=self._listen, args=(stream,), name="shardkit-monitor", daemon=True).start()

    @property
    def process_id(self) -> int:
        """The process id of the monitor."""
        return self._process.pid

    def tell(self, message: Message) -> None:
        """Sends a message to the monitor; does nothing in a forked child, which has a copy of this object."""
        assert self._process.stdin is not None
        if self._is_copy():
            return
        with self._writing, contextlib.suppress(OSError):
            self._process.stdin.write(encode(message))
            self._process.stdin.flush()

    def report_error(self, kind: type[BaseException], error: BaseException | None, code: int = 1) -> None:
        """Sends the error to all processes, and exits when the monitor has decided on the fault."""
        if self._is_copy():
            return
        self._exit_code = code
        phase = getattr(error, _PHASE, None)
        if phase is not None:
            self.recorder.enter(*phase)
        self.tell({"cause": _describe_cause(kind, error)})
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LONGEST_VERDICT)  # it ends this process sooner
        self._process.kill()
        leave(code)

    def report_exit(self) -> None:
        """Tells all processes that this one exits without an error."""
        if self._is_copy():
            return
        self._has_left = True
        self.recorder.enter("end", self.recorder.status.step)
        self.tell({"left": True})

    def _is_copy(self) -> bool:
        """Whether this is the copy of a forked child, which must not speak for its parent."""
        return os.getpid() != self._process_id

    def _wait_for_others(self, stream: MessageStream) -> str:
        """Waits until all processes are connected; returns the refusal, or an empty string."""
        while not stream.closed:
            for message in stream.read():
                if "note" not in message:
                    return str(message.get("refused", ""))
                os.write(2, encode_output(message["note"]))
        return _NO_ANSWER

    def _listen(self, stream: MessageStream) -> None:
        """Acts on what the monitor says, and ends this process if it is stopped or dies: nobody would watch it."""
        stopped = 0  # checks in a row at which it was stopped
        while not stream.closed:
            if stream.wait(_LOOK):
                for message in stream.read():
                    self._handle(message)
                continue
            is_stopped = read_process_state(self._process.pid) in ("T", "t")
            stopped = stopped + 1 if is_stopped else 0
            if stopped > _STOPPED and not self._has_left:
                self._process.kill()
                self._end_without_monitor("is stopped (SIGSTOP?)")
        if not self._has_left:
            self._end_without_monitor("died (SIGKILL or out of memory?)")

    def _handle(self, message: Message) -> None:
        if "end" in message:
            code = message["end"]
            if code != LOST and self._exit_code:  # else an error of this process is a consequence
                code = self._exit_code
            self._end(code, message["text"], stacks=message["stacks"])

    def _end_without_monitor(self, what: str) -> None:
        """Ends this process, whose monitor is gone: the others notice, and end."""
        if self.place.rank == 0:
            time.sleep(LEAVES_LAST)
        self._end(LOST, f"shardkit guard: the monitor of process {self.place.rank} {what}.")

    def _end(self, code: int, text: str, stacks: bool = False) -> None:
        """Ends this process, and prints the text last; before it the stacks of all threads, if it hangs."""

        def print_last() -> None:
            if stacks:
                os.write(2, encode_output(f"shardkit: the stacks of process {self.place.rank}:"))
                faulthandler.dump_traceback(2)
            os.write(2, encode_output(text))
            self.tell({"printed": True})

        leave(code, print_last)


def start(place: Place) -> MonitorClient:
    """Starts the monitor of this process, or raises why the processes could not connect in one sentence.

    From then on an uncaught exception ends all processes, with its text.
    """
    import atexit

    monitor = MonitorClient(place)
    _STARTED.append(monitor)
    previous_hook = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        code = 1
        if issubclass(kind, KeyboardInterrupt):
            code = 130  # as in a shell
        try:
            previous_hook(kind, error, traceback)
        finally:
            monitor.report_error(kind, error, code)

    def report_end() -> None:
        error = getattr(sys, "last_value", None)
        if sys.excepthook is not report and error is not None:  # the hook was replaced: the error has not been sent
            monitor.report_error(type(error), error)
        monitor.report_exit()

    sys.excepthook = report
    atexit.register(report_end)
    return monitor


def find_monitor() -> MonitorClient | None:
    """The monitor of this process, if it has one."""
    if not _STARTED:
        return None
    return _STARTED[0]


def tell_others(error: BaseException, code: int = 2) -> None:
    """Ends all processes with an error that this one has already printed; without a monitor it does nothing."""
    monitor = find_monitor()
    if monitor is not None:
        monitor.report_error(type(error), error, code)


def note_phase(error: BaseException, phase: str, step: int) -> None:
    """Notes the phase in which an error was raised, for `report_error`."""
    setattr(error, _PHASE, (phase, step))


def leave(code: int, print_last: Callable[[], None] = lambda: None) -> None:
    """Exits at once, and kills multiprocessing children: the exit barriers of jax would wait for other processes."""
    with contextlib.suppress(Exception):
        for child in active_children():
            child.kill()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # None if it was closed at the start
            stream.flush()
    with contextlib.suppress(OSError):
        print_last()
    os._exit(code)


def _describe_cause(kind: type[BaseException], error: BaseException | None) -> str:
    """An exception as one line of limited length."""
    text = " ".join(f"{kind.__name__}: {error}".split())
    text = text.rstrip(":. ")
    if len(text) <= _LONGEST_CAUSE:
        return text
    return text[: _LONGEST_CAUSE - 3] + "..."


def _open_standard_descriptors() -> None:
    """Leaves none of descriptors 0 to 2 closed: libraries write to 1 and 2, which must not become pipes to the monitor.

    The system gives the lowest free number: where 1 was closed, the first file that is opened gets it.
    """
    while True:
        descriptor = os.open(os.devnull, os.O_RDWR)
        if descriptor > 2:
            os.close(descriptor)
            return
        os.set_inheritable(descriptor, True)


def _make_recorder() -> tuple[Recorder, Path]:
    """A flight recorder, and the file that its monitor will open."""
    folder = None
    try:
        folder = Path(tempfile.mkdtemp(prefix="shardkit-"))
        ring = folder / "ring"
        return Recorder(str(ring)), ring
    except OSError as error:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        raise RuntimeError(
            f"initialize: the directory for temporary files must have {SIZE} bytes free; {error.strerror}. Free space "
            "there, or set TMPDIR to another directory."
        ) from None
