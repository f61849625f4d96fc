"""The monitor's loop: hears its process and the other monitors, judges (in process 0), and ends its process."""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .agreement import Agreement
from .hello import Place, Refused
from .judge import Deadlines, Fault, Known, fault, unanswered
from .recorder import Reader, Status
from .rendezvous import meet
from .wire import Lines, Message, encoded, plain

FAILED = 70  # the exit code of a process that the guard ends
_TICK = 0.1
_BEAT = 0.25  # seconds between two words to the others
_UNHEARD = 3.0  # seconds without a word from process 0 after which the others decide by themselves
_AWAY = 1.0  # seconds between two looks after which this monitor was stopped or starved itself
_KILL_AFTER = 0.5  # seconds a process has to end by itself once told
_SPEAK = 1.0  # seconds for the last words: whoever reads the output, or a file system, may take nothing any more
LEAVES_LAST = 1.5  # seconds that process 0 stays for the others to end: with it ends jax's service: that aborts them
_LINGER = 60.0  # seconds that process 0's monitor waits for the others once all is well and its own process has ended


def main() -> None:
    """Runs beside one process; its arguments come as the first line of standard input."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)  # it ends when its process has, and not before
    inbox = Lines(0)
    given: list[Message] = []
    while not given and not inbox.closed:
        given = list(inbox.read())
    if not given:
        return
    spec = given[0]
    reader = Reader(spec["ring"])
    place = Place(*spec["place"])
    met = threading.Event()
    threading.Thread(target=_end_with, args=(spec["parent"], met), daemon=True).start()
    try:
        peers = meet(place, note=lambda text: say({"note": text})) if place.size > 1 else []
    except Refused as refusal:
        say({"refused": str(refusal)})
        return
    met.set()
    say({"ready": True})
    Monitor(place, spec["parent"], inbox, reader, peers).run()


def _end_with(parent: int, met: threading.Event) -> None:
    """Ends this monitor with its process while it still waits for the others: it may hold the port of the next run."""
    while not met.wait(_TICK):
        if os.getppid() != parent:
            os._exit(0)


def as_line(text: str) -> bytes:
    """Last words: a line of their own, even where the process was in the middle of one."""
    return b"\n" + text.encode(errors="backslashreplace") + b"\n"


def say(message: Message) -> None:
    """Tells the process that this monitor watches."""
    with contextlib.suppress(OSError):
        os.write(1, encoded(message))


class Monitor:
    """One process's monitor; that of process 0 has a connection to each of the others, they to it alone."""

    def __init__(self, place: Place, parent: int, inbox: Lines, reader: Reader, peers: list[Lines]):
        self.place, self.parent, self.inbox, self.reader = place, parent, inbox, reader
        ranks = range(1, place.size) if place.rank == 0 else [0]
        self.peers = dict(zip(ranks, peers, strict=True))
        self.ranks = {id(line): rank for rank, line in self.peers.items()}
        now = time.monotonic()
        everyone = range(place.size) if place.rank == 0 else [0, place.rank]
        self.known = {rank: Known(heard=now) for rank in everyone}
        self.deadlines = Deadlines(*[math.inf] * 5)  # until the process has a guard
        self.agreement = Agreement(place.size)
        self.flight = ""
        self.alive = True  # the process
        self.suspect: tuple[str, float] | None = None  # a fault, and when to report it
        self.over = ""
        self.told = False  # whether the process has said why it ends

    def run(self) -> None:
        """Until the process has ended well, or a fault has ended it."""
        with selectors.DefaultSelector() as selector:
            for source in [self.inbox, *self.peers.values()]:
                selector.register(source, selectors.EVENT_READ)
            beat = ended = 0.0
            seen = time.monotonic()
            while not self.over:
                for key, _ in selector.select(_TICK):
                    line: Any = key.fileobj
                    self.take(line)
                    if line.closed:
                        selector.unregister(line)
                now, before = time.monotonic(), seen
                if now - before < _TICK / 2 and not self.over:  # among a thousand processes there is always something
                    continue
                self._excuse(now - before, now)
                seen = now
                self._look(now)
                if now - beat > _BEAT:
                    beat = now
                    self._send(self._own())
                self._judge(now)
                if not self.alive and self.known[self.place.rank].left:
                    ended = ended or now
                    if self.place.rank or self._all_left() or now - ended > _LINGER:
                        return
        self._end()

    def take(self, line: Lines) -> None:
        """Hears what came by a line; what no monitor says ends it."""
        for message in line.read():
            try:
                self._hear(self._rank_of(line), message)
            except (KeyError, TypeError, ValueError, AttributeError):
                line.closed = True
        if line.closed:
            self._closed(self._rank_of(line))

    def _excuse(self, away: float, now: float) -> None:
        """What this monitor did not hear while it was stopped or starved itself is no one's fault."""
        if away > _AWAY:
            for known in self.known.values():
                known.heard = min(now, known.heard + away)

    def _rank_of(self, line: Lines) -> int:
        return self.ranks.get(id(line), self.place.rank)

    def _look(self, now: float) -> None:
        """What this machine shows of the process itself."""
        own = self.known[self.place.rank]
        status = self.reader.status()
        own.heard, own.status = now, _aged(status, now)
        own.stopped = state(self.parent) in ("T", "t")
        if self.alive and os.getppid() != self.parent:
            self.alive = False
            self._last_words()
            own.gone = not own.left
            self._send(self._own())

    def _last_words(self) -> None:
        """What a process said before it ended and was not read yet."""
        while not self.inbox.closed and self.inbox.waits():
            for message in self.inbox.read():
                self._hear(self.place.rank, message)

    def _own(self) -> Message:
        own = self.known[self.place.rank]
        return {
            "status": own.status,
            "stopped": own.stopped,
            "gone": own.gone,
            "left": own.left,
            "cause": own.cause,
        }

    def _hear(self, rank: int, message: Message) -> None:
        known, own = self.known[rank], rank == self.place.rank
        known.heard = time.monotonic()
        if "status" in message:
            phase, step, since, dispatched, done, device_since = message["status"]
            known.status = Status(
                plain(phase), int(step), float(since), int(dispatched), int(done), float(device_since)
            )
            known.stopped, known.gone, known.left = message["stopped"], message["gone"], message["left"]
            known.cause = plain(message["cause"])
        elif "over" in message:
            self.over = plain(message["over"])
        elif "program" in message and self.place.rank == 0:
            self._agree(rank, message)
        elif "program" in message:
            self._send(message)
        elif "agreed" in message:
            say(message)
        elif own:  # from the process
            if "deadlines" in message:
                self.deadlines, self.flight = Deadlines(*message["deadlines"]), message["flight"]
            if "cause" in message:
                known.cause = plain(message["cause"])
                self._look(known.heard)
                self._send(self._own())
            if "left" in message:
                known.left = True
                self._send(self._own())
            self.told = self.told or "told" in message

    def _agree(self, rank: int, message: Message) -> None:
        answer = self.agreement.hear(rank, message)
        if answer is None:
            return
        if answer:
            self._report(answer)
        else:
            agreed = {"agreed": message["program"]}
            self._send(agreed)
            say(agreed)

    def _closed(self, rank: int) -> None:
        """The connection to a monitor ended: with it, its machine or its whole process group did."""
        if rank == self.place.rank:  # the process closed its end: it is ending
            return
        known = self.known[rank]
        if not known.left:
            known.unseen = not known.gone
            known.gone = True

    def _judge(self, now: float) -> None:
        """Process 0 decides; the others only if it cannot."""
        found = fault(self.known, self.deadlines, now)
        if self.place.rank:
            hub = self.known[0]
            silent = now - hub.heard > _UNHEARD and not hub.gone
            if found is None or not (hub.gone or silent):
                return
            if silent and not found.primary:  # whatever is seen from here may follow from that
                found = Fault(unanswered([0], self.known, now))
        if found is None:
            self.suspect = None
            return
        when = self.suspect[1] if self.suspect else now + found.wait
        self.suspect = found.text, min(when, now + found.wait)
        if now >= self.suspect[1]:
            self._report(found.text)

    def _report(self, text: str) -> None:
        self.over = text
        self._send({"over": text})

    def _all_left(self) -> bool:
        return all(known.left or known.gone for known in self.known.values())

    def _send(self, message: Message) -> None:
        for peer in self.peers.values():
            if not peer.closed:
                peer.send(message)

    def _end(self) -> None:
        """Writes the flight record, ends the process and has it say why, last of all that it says."""
        text = f"shardkit guard: {self.over}."
        text += _in_time(self._record) or f" (No flight record: {self.flight} does not answer.)" if self.flight else ""
        until = time.monotonic() + LEAVES_LAST
        while self.place.rank == 0 and time.monotonic() < until and not all(p.closed for p in self.peers.values()):
            for peer in self.peers.values():
                list(peer.read() if not peer.closed and peer.waits() else ())
            time.sleep(0.01)
        if self.alive:
            say({"end": FAILED, "text": text})
            until = time.monotonic() + _KILL_AFTER
            while os.getppid() == self.parent and time.monotonic() < until:
                time.sleep(0.01)
            if os.getppid() == self.parent:
                with contextlib.suppress(OSError):
                    os.kill(self.parent, signal.SIGKILL)
            self._last_words()
        if not self.told:
            _in_time(lambda: _print(text))
        os._exit(0)  # whatever of this could not be said

    def _record(self) -> str:
        now, clock = time.monotonic(), time.time()
        status = self.reader.status()
        record: dict[str, Any] = {
            "process": self.place.rank,
            "processes": self.place.size,
            "fault": self.over,
            "status": _aged(status, now)._asdict(),
            "events": [
                {"time": round(clock - (now - at), 6), "phase": phase, "step": step}
                for at, phase, step in self.reader.events()
            ],
        }
        path = Path(self.flight) / f"flight.{self.place.rank}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(record, indent=1) + "\n")
        except OSError as error:
            return f" (No flight record: {path}: {error.strerror}.)"
        return f" Flight record: {path}"


def _aged(status: Status, now: float) -> Status:
    """A status with ages in place of times: the clocks of two machines have nothing in common."""
    return status._replace(since=now - status.since, device_since=now - status.device_since)


def _in_time(speak: Callable[[], str | None]) -> str | None:
    """What a function returns, if it does so soon."""
    said: list[str | None] = []
    thread = threading.Thread(target=lambda: said.append(speak()), daemon=True)
    thread.start()
    thread.join(_SPEAK)
    return said[0] if said else None


def state(process: int) -> str:
    """The system's one-letter state of a process, T for stopped; empty where it shows none."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _print(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, as_line(text))
