"""The monitor's loop: it reads its process and the other monitors, judges (in process 0), and ends its process."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardkit.jobs.monitor.agreement import Agreement, hash_components
from shardkit.jobs.monitor.judge import Deadlines, Fault, Known, called_apart, fault, unanswered
from shardkit.jobs.monitor.rendezvous import Refused, meet
from shardkit.runtime.channel.place import Place
from shardkit.runtime.channel.recorder import RecordReader, Status, parse_batches, read_process_state
from shardkit.runtime.channel.wire import (
    FAILED,
    LEAVES_LAST,
    LOST,
    Message,
    MessageStream,
    encode,
    encode_output,
    escape,
)

_TICK = 0.1
_BEAT = 0.25  # seconds between two status messages to the others
_MESSAGES = 10_000  # status messages a second that process 0 reads: those of more processes come less often
_REST = 9.0  # times the time of a judgement that process 0 leaves to the reading of messages
_UNHEARD = 3.0  # seconds without a message from process 0 after which the others decide on their own
_AWAY = 1.0  # seconds between two looks after which this monitor was itself stopped or starved
_KILL_AFTER = 0.5  # seconds a process has to exit before SIGKILL
_SPEAK = 1.0  # seconds for the last line and the flight record: a pipe may be full, a file system may hang
_LINGER = 60.0  # seconds that process 0's monitor waits for the others after its own process has exited without a fault
_SHARED = ("status", "stopped", "gone", "left", "cause", "host", "crash")  # what a monitor sends: fields of Known


def main() -> None:
    """Monitors one process; its arguments are the first line of standard input."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)  # it ends after its process, not before
    inbox = MessageStream(0)
    given: list[Message] = []
    while not given and not inbox.closed:
        given = list(inbox.read())
    if not given:
        return
    spec = given[0]
    reader = RecordReader(spec["ring"])
    place = Place(*spec["place"])
    met = threading.Event()
    threading.Thread(target=_end_with, args=(spec["parent"], met), daemon=True).start()
    try:
        peers = meet(place, note=lambda text: _say({"note": text})) if place.size > 1 else []
    except Refused as refusal:
        _say({"refused": str(refusal)})
        return
    met.set()
    _say({"ready": True})
    Monitor(place, spec["parent"], inbox, reader, peers, spec["crash"]).run()


class Monitor:
    """The monitor of one process; that of process 0 is connected to all others, each of them to it alone."""

    def __init__(
        self,
        place: Place,
        parent: int,
        inbox: MessageStream,
        reader: RecordReader,
        peers: list[MessageStream],
        crash: int = -1,
    ):
        self.place, self.parent, self.inbox, self.reader, self.crash = place, parent, inbox, reader, crash
        ranks = range(1, place.size) if place.rank == 0 else [0]
        self.peers = dict(zip(ranks, peers, strict=True))
        self.ranks = {id(line): rank for rank, line in self.peers.items()}
        now = time.monotonic()
        everyone = range(place.size) if place.rank == 0 else [0, place.rank]
        self.known = {rank: Known(heard=now) for rank in everyone}
        self.known[place.rank].host = socket.gethostname()
        self.deadlines = Deadlines(*[math.inf] * 5)  # until the process has a guard
        self.beat = beat(place.size)
        self.agreement = Agreement(place.size)
        self.programs: dict[str, Message] = {}  # of the own process, until all have agreed
        self.rests = 0.0  # until then there is no judgement
        self.flight = ""
        self.alive = True  # the process
        self.suspect: tuple[str, float] | None = None  # a fault, and when to report it
        self.over, self.code = "", FAILED  # why the job ends, and the exit code of its process
        self.hung = False  # whether that is because of the process, which then prints its stacks
        self.printed = False  # whether the process has printed why it ends

    def run(self) -> None:
        """Runs until the process has exited, or a fault has ended it."""
        with selectors.DefaultSelector() as selector:
            for source in [self.inbox, *self.peers.values()]:
                selector.register(source, selectors.EVENT_READ)
            told = ended = 0.0
            seen = time.monotonic()
            while not self.over:
                for key, _ in selector.select(_TICK):
                    line: Any = key.fileobj
                    self.take(line)
                    if line.closed:
                        selector.unregister(line)
                now, before = time.monotonic(), seen
                if now - before < _TICK / 2 and not self.over:  # of a thousand processes there is always a message
                    continue
                self._excuse(now - before, now)
                seen = now
                self._look(now)
                if now - told > self.beat:
                    told = now
                    self._send(self._own())
                self._judge(now)
                if not self.alive and self.known[self.place.rank].left:
                    ended = ended or now
                    others = all(known.left or known.gone for known in self.known.values())
                    if self.place.rank or others or now - ended > _LINGER:
                        return
        self._end()

    def take(self, line: MessageStream) -> None:
        """Reads what arrived on a connection; closes it on what no monitor sends."""
        rank = self.ranks.get(id(line), self.place.rank)
        for message in line.read():
            try:
                self._hear(rank, message)
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
                line.closed = True
        known = self.known[rank]
        if line.closed and rank != self.place.rank and not known.left:  # the own process closes its end when it exits
            known.unseen, known.gone = not known.gone, True  # with its machine or its whole process group
            known.expect(self.deadlines)

    def _excuse(self, away: float, now: float) -> None:
        """Blames nobody for messages that this monitor missed while it was itself stopped or starved."""
        if away > _AWAY:
            for known in self.known.values():
                known.heard = min(now, known.heard + away)

    def _look(self, now: float) -> None:
        """Updates the state of the own process from the flight recorder and the system."""
        own = self.known[self.place.rank]
        own.heard, own.status = now, self.reader.read_status().with_ages(now)
        own.stopped = read_process_state(self.parent) in ("T", "t")
        if self.alive and os.getppid() != self.parent:
            self.alive = False
            self._drain()
            own.gone = not own.left
            own.crash = self._stacks().partition(b"\n")[0].decode().rpartition(": ")[2]
            self._send(self._own())
        own.expect(self.deadlines)

    def _drain(self) -> None:
        """Reads what the process sent before it ended."""
        while not self.inbox.closed and self.inbox.wait():
            self.take(self.inbox)

    def _stacks(self) -> bytes:
        """What Python wrote to `crash` at a fatal signal: `Fatal Python error: Aborted`, and the threads' stacks."""
        return os.pread(self.crash, 1 << 16, 0) if self.crash >= 0 else b""

    def _own(self) -> Message:
        return {name: getattr(self.known[self.place.rank], name) for name in _SHARED}

    def _hear(self, rank: int, message: Message) -> None:
        known, own = self.known[rank], rank == self.place.rank
        known.heard = time.monotonic()
        if "status" in message:
            phase, step, since, dispatched, done, began, batches = message["status"]
            times = int(step), float(since), int(dispatched), int(done), float(began)
            known.status = Status(escape(phase), *times, parse_batches(batches))
            known.stopped, known.gone, known.left = message["stopped"], message["gone"], message["left"]
            known.cause, known.host, known.crash = (escape(message[name]) for name in ("cause", "host", "crash"))
        elif "over" in message:
            self.over, self.code = escape(message["over"]), LOST if message["lost"] is True else FAILED
            self.hung = self.place.rank in message["hung"]
        elif "program" in message:
            self._program(rank, own, message)
        elif "ask" in message:
            self._send(self.programs[message["ask"]])
        elif "agreed" in message:
            self._agreed(message["agreed"])
        elif own:  # from the process
            if "deadlines" in message:
                self.deadlines, self.flight = Deadlines(*message["deadlines"]), message["flight"]
                for each in self.known.values():
                    each.expect(self.deadlines)
            if "cause" in message:
                known.cause = escape(message["cause"])
                self._look(known.heard)
                self._send(self._own())
            if "left" in message:
                known.left = True
                self._send(self._own())
            self.printed = self.printed or "printed" in message
        known.expect(self.deadlines)

    def _program(self, rank: int, own: bool, message: Message) -> None:
        """The fingerprint of a program: of the own process, whose hash is compared, or of one that was asked for it."""
        name = message["program"]
        if own:
            self.programs[name] = message
            message = {"program": name, "digest": hash_components(message)}
        if self.place.rank:
            self._send(message)
        elif "digest" not in message:
            self._compared(name, self.agreement.take_fingerprint(rank, name, message))
        else:
            asked = self.agreement.take_hash(rank, name, message["digest"])
            for other in asked or ():
                if other in self.peers:
                    self.peers[other].send({"ask": name})
                else:
                    self._compared(name, self.agreement.take_fingerprint(other, name, self.programs[name]))
            if asked == []:
                self._compared(name, "")

    def _compared(self, name: str, differs: str | None) -> None:
        if differs:
            self._report(Fault(differs))
        elif differs is not None:
            self._send({"agreed": name})
            self._agreed(name)

    def _agreed(self, name: str) -> None:
        self.programs.pop(name, None)
        _say({"agreed": name})

    def _judge(self, now: float) -> None:
        """Decides on a fault: process 0 does, the others only when it cannot."""
        if now < self.rests:
            return
        begun = time.thread_time()
        found = called_apart(self.known)
        if found is None and now >= min(each.due for each in self.known.values()):
            found = fault(self.known, self.deadlines, now)
        self.rests = now + _REST * (time.thread_time() - begun)
        if self.place.rank:
            hub = self.known[0]
            silent = now - hub.heard > _UNHEARD and not hub.gone
            if found is None or not (hub.gone or silent):
                return
            if silent and not found.primary:  # what is seen here may be a consequence
                found = Fault(unanswered([0], self.known, now), lost=True)
        if found is None:
            self.suspect = None
            return
        wait = found.wait or self.beat - _BEAT  # a deadline may have been met in a status that is on its way
        when = self.suspect[1] if self.suspect else now + wait
        self.suspect = found.text, min(when, now + wait)
        if now >= self.suspect[1]:
            self._report(found)

    def _report(self, found: Fault) -> None:
        self.over, self.code = found.text, LOST if found.lost else FAILED
        self.hung = self.place.rank in found.hung
        self._send({"over": found.text, "lost": found.lost, "hung": found.hung})

    def _send(self, message: Message) -> None:
        line = encode(message)
        for peer in self.peers.values():
            if not peer.closed:
                peer.send_line(line)

    def _end(self) -> None:
        """Writes the flight record, ends the process and has it print the reason as its last line."""
        text = f"shardkit guard: {self.over}."
        text += _in_time(self._record) or f" (No flight record: {self.flight} does not respond.)" if self.flight else ""
        if self.place.rank == 0:
            _wait_until(self._others_closed, LEAVES_LAST)
        if self.alive:
            _say({"end": self.code, "text": text, "stacks": self.hung})
            _wait_until(lambda: os.getppid() != self.parent, _KILL_AFTER)
            if os.getppid() == self.parent:
                with contextlib.suppress(OSError):
                    os.kill(self.parent, signal.SIGKILL)
            self._drain()
        if not self.printed:
            _in_time(lambda: os.write(2, self._stacks() + encode_output(text)))
        os._exit(0)  # even if a thread of `_in_time` hangs

    def _others_closed(self) -> bool:
        for peer in self.peers.values():
            list(peer.read() if not peer.closed and peer.wait() else ())
        return all(peer.closed for peer in self.peers.values())

    def _record(self) -> str:
        path = Path(self.flight) / f"flight.{self.place.rank}.json"
        own = {"process": self.place.rank, "host": self.known[self.place.rank].host}
        try:
            self.reader.save(path, own | {"processes": self.place.size, "fault": self.over})
        except OSError as error:
            return f" (No flight record: {path}: {error.strerror or error}.)"
        return f" Flight record: {path}"


def beat(size: int) -> float:
    """Seconds between two status messages of a process, in a job of so many."""
    return max(_BEAT, size / _MESSAGES)


def _end_with(parent: int, met: threading.Event) -> None:
    """Ends this monitor with its process while it waits for the others: the next run may need its port."""
    while not met.wait(_TICK):
        if os.getppid() != parent:
            os._exit(0)


def _say(message: Message) -> None:
    """Sends a message to the process that this monitor watches."""
    with contextlib.suppress(OSError):
        os.write(1, encode(message))


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    """Returns when the condition holds, or after so many seconds."""
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)


def _in_time(function: Callable[[], Any]) -> Any:
    """What a function returns; None if it fails or takes long."""
    result: list[Any] = []

    def call() -> None:
        with contextlib.suppress(OSError):
            result.append(function())

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(_SPEAK)
    return result[0] if result else None
