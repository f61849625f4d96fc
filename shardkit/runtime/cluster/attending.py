"""The side of a meeting that connects: one launcher's connection, which comes back when it was lost."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, get_args

from shardkit.runtime.cluster.attempt import Call, How
from shardkit.runtime.cluster.messages import (
    SHORT,
    Beat,
    Ended,
    Leaves,
    Note,
    Over,
    Ready,
    Start,
    Stop,
    Terms,
    ToLauncher,
    ToMeeting,
    arrival_message,
    heard,
    introduction,
    told,
)
from shardkit.runtime.monitor.hello import REJECTIONS, TOKEN, is_signed
from shardkit.runtime.monitor.wire import Lines, Message, plain

_TICK = 0.1
_BEATS = 4  # messages in the time of silence
_ANSWER = 5.0  # seconds for the meeting to answer an introduction
_AGAIN = 0.2  # seconds between two attempts to connect
_LATE = 3.0  # seconds without a connection after which that is printed
_NO_MEETING = "the program that listens there does not answer as a meeting"
_WELCOME, _FULL = "welcome", "full"
NEWS = -1  # the attempt of a call that only wakes the launcher


class Refusal(NamedTuple):
    """The meeting does not take this launcher, and never will; the sentence is for the user."""

    text: str


News = Start | Over | Refusal


class Attendance(threading.Thread):
    """Keeps one launcher connected to its meeting; it says what is to be done by `news`, and wakes by `put`."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        id: str,
        processes: int,
        terms: Terms,
        token: str,
        silence: float,
        patience: float,
        put: Callable[[Call], None],
        say: Callable[[str], None],
    ):
        super().__init__(daemon=True)
        self._host, self._port, self._where = host, port, f"{host}:{port}"
        self._id, self._processes, self._terms, self._token = id, processes, terms, token
        self._silence, self._patience = silence, patience
        self._put, self._say = put, say
        self._lock = threading.Lock()  # of `_line`, on which two threads send, and of what is sent again
        self._line: Lines | None = None
        self._ready: Ready | None = None
        self._running: int | None = None  # the attempt whose processes are here
        self._early: list[Message] = []
        self._news: deque[News] = deque()
        self._signal = 0
        self._closing = threading.Event()

    def news(self) -> News | None:
        """The next thing that the launcher has to do, if there is one."""
        return self._news.popleft() if self._news else None

    def ready(self, port: int) -> None:
        """Says, now and after each new connection, that no processes are here."""
        with self._lock:
            self._ready = Ready(port)
            self._send(self._ready)

    def ended(self, how: Ended) -> None:
        """Says how the processes of an attempt ended."""
        with self._lock:
            self._running = None
            self._send(how)

    def leaves(self, number: signal.Signals) -> None:
        """Remembers to say that this launcher got a signal; for a handler, which must not wait for the lock."""
        self._signal = number

    def close(self) -> None:
        """Ends the connection."""
        self._closing.set()
        self.join()

    def run(self) -> None:
        """Connects, listens, and connects again; whatever ends it, the launcher does not wait for it."""
        try:
            self._attend_until_over()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            self._tell(Over(1, f"the launcher cannot attend the meeting at {self._where} any more ({why})"))
            if self._running is not None:
                self._put(Call(self._running, "lost"))

    def _attend_until_over(self) -> None:
        lost, told_late, back = time.monotonic(), False, False
        while not self._closing.is_set():
            line = self._connected()
            if isinstance(line, Refusal):
                self._tell(line)
                return
            if isinstance(line, Lines):
                if back or told_late:
                    self._say(f"is in the meeting at {self._where} now")
                if self._attend(line):
                    return
                self._say(f"lost the meeting at {self._where}; it tries to come back for {self._patience:g} s")
                lost, told_late, back = time.monotonic(), False, True
                continue
            waited = time.monotonic() - lost
            if waited > self._patience:
                self._tell(Over(1, self._gave_up(line)))
                return
            if waited > _LATE and not told_late and not back:
                told_late = True
                self._say(f"cannot join the meeting at {self._where} yet ({line}); it tries for {self._patience:g} s")
            self._closing.wait(_AGAIN)

    def _gave_up(self, why: str) -> str:
        if why == _FULL:
            return (
                f"the meeting at {self._where} had all its hosts for {self._patience:g} s: start it with more --hosts"
            )
        return (
            f"the meeting at {self._where} has not answered for {self._patience:g} s ({why}): start `shardkit launch` "
            "there again"
        )

    def _connected(self) -> Lines | Refusal | str:
        """The connection after the meeting's welcome; else why there is none."""
        try:
            connection = socket.create_connection((self._host, self._port), timeout=_ANSWER)
        except (socket.gaierror, UnicodeError) as failure:
            return f"the name {self._host!r} does not resolve ({getattr(failure, 'strerror', failure)})"
        except OSError as failure:
            return failure.strerror or str(failure)
        line = Lines(connection, SHORT)
        arrival = introduction(self._id, self._processes, self._terms)
        line.send(arrival_message(arrival, self._token))
        until = time.monotonic() + _ANSWER
        answer: Refusal | str = ""
        self._early.clear()
        while not line.closed and time.monotonic() < until and not self._closing.is_set():
            for message in line.read() if line.waits(_TICK) else ():
                if answer != _WELCOME:
                    answer = self._answer(message, arrival.nonce)
                else:  # came together with the welcome
                    self._early.append(message)
            if answer == _WELCOME:
                return line
            if answer:
                break
        line.close()
        return answer or _NO_MEETING

    def _answer(self, message: Message, nonce: str) -> Refusal | str:
        another = message.get("another")
        if isinstance(another, str) and another in REJECTIONS:
            remedy = f"Set the same {TOKEN}" if another == "token" else "Install the same version"
            return Refusal(
                f"launch: the launcher that serves the meeting at {self._where} must belong to the same job; it has "
                f"{REJECTIONS[another]}. {remedy} on all hosts."
            )
        if is_signed(message, self._token, nonce):
            if message.keys() == {_WELCOME, "mac"}:
                return _WELCOME
            if message.keys() == {_FULL, "mac"}:
                return _FULL
            if message.keys() == {"refused", "mac"} and isinstance(message["refused"], str):
                return Refusal(plain(message["refused"]))
        return _NO_MEETING

    def _attend(self, line: Lines) -> bool:
        """Listens until the connection is lost, or the job is over, which it returns."""
        with self._lock:
            self._line = line
            if self._ready is not None:
                self._send(self._ready)
        last = seen = time.monotonic()
        beat, told_signal, over = 0.0, False, False
        while not (over or line.closed or self._closing.is_set()):
            messages = list(line.read() if line.waits(0.0 if self._early else _TICK) else ())
            messages, self._early = self._early + messages, []
            for message in messages:
                found: ToLauncher | None = heard(message, ToLauncher)
                if found is None:
                    line.closed = True
                    break
                last = time.monotonic()
                over = over or self._take(found)
            now = time.monotonic()
            last += now - seen if now - seen > 1.0 else 0.0  # this process was itself stopped or starved
            seen = now
            if now - last > self._silence:
                line.closed = True
            with self._lock:
                if now - beat > self._silence / _BEATS:
                    beat = now
                    self._send(Beat())
                if self._signal and not told_signal:
                    told_signal = True
                    self._send(Leaves(self._signal))
        with self._lock:
            self._line = None
            line.close()
            if self._running is not None and not self._closing.is_set():
                self._put(Call(self._running, "lost"))
        return over or self._closing.is_set()

    def _take(self, found: ToLauncher) -> bool:
        """Passes on what the meeting said; whether that was the end of the job."""
        if isinstance(found, Note):
            self._say(plain(found.text))
        elif isinstance(found, Stop):
            how: How = found.how if found.how in get_args(How) else "failed"  # type: ignore[assignment]
            self._put(Call(found.attempt, how))
        elif isinstance(found, Start):
            with self._lock:
                self._ready, self._running = None, found.attempt
            self._tell(found)
        elif isinstance(found, Over):
            self._tell(found._replace(text=plain(found.text)))
            return True
        return False

    def _tell(self, news: News) -> None:
        self._news.append(news)
        self._put(Call(NEWS, "failed"))

    def _send(self, message: ToMeeting) -> None:
        """With the lock held."""
        if self._line is not None and not self._line.closed:
            self._line.send(told(message))
