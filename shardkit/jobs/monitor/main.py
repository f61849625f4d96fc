"""The monitor's loop: it reads its process and the other monitors, judges (in process 0), and ends its process.

Worked example, of two processes. Process 1 raises an error, and sends {"cause": "ValueError: x"} to its monitor, which
sends its status with that cause to the monitor of process 0. That waits 0.3 s for a fault that takes precedence, and
then sends {"over": "process 1 failed ...", ...} to all. Each monitor writes the flight record and has its process print
the sentence and exit; what does not exit within half a second gets SIGKILL.
"""

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

from shardkit.jobs.monitor.judge import Fault, find_different_batches, find_fault
from shardkit.jobs.monitor.members import Deadlines, Member
from shardkit.jobs.monitor.rendezvous import Refused, meet
from shardkit.jobs.monitor.wording import describe_silence
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
_SHARED = ("status", "stopped", "gone", "left", "cause", "host", "crash")  # what a monitor sends: fields of Member


def main() -> None:
    """Monitors one process; its arguments are the first line of standard input."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)  # it ends after its process, not before
    inbox = MessageStream(0)
    spec = _read_first_message(inbox)
    if spec is None:
        return
    reader = RecordReader(spec["ring"])
    place = Place(*spec["place"])
    met = threading.Event()
    threading.Thread(target=_end_with, args=(spec["parent"], met), daemon=True).start()
    peers: list[MessageStream] = []
    if place.size > 1:
        try:
            peers = meet(place, note=_tell_note)
        except Refused as refusal:
            _tell_process({"refused": str(refusal)})
            return
    met.set()
    _tell_process({"ready": True})
    Monitor(place, spec["parent"], inbox, reader, peers, spec["crash"]).run()


def _tell_note(text: str) -> None:
    _tell_process({"note": text})


def _read_first_message(inbox: MessageStream) -> Message | None:
    """The first message of the process; None if it ended before. It sends no second one until it has an answer."""
    while not inbox.closed:
        for message in inbox.read():
            return message
    return None


class Monitor:
    """The monitor of one process; that of process 0 is connected to all others, each of them to it alone.

    Attributes:
        members: what is known of the processes: of all in process 0, else of process 0 and this one.
        verdict: why the job ends; empty until then.
        exit_code: that of the process then.
        hung: whether the job ends because of this process, which then prints its stacks.
        printed: whether the process has printed why it ends.
        alive: whether the process runs.
    """

    def __init__(
        self,
        place: Place,
        parent: int,
        inbox: MessageStream,
        reader: RecordReader,
        peers: list[MessageStream],
        crash: int = -1,
    ):
        self.place = place
        self.parent = parent
        self.inbox = inbox
        self.reader = reader
        self.crash = crash
        peer_ranks = [0]
        member_ranks = [0, place.rank]
        if place.rank == 0:
            peer_ranks = list(range(1, place.size))
            member_ranks = list(range(place.size))
        self.peers = dict(zip(peer_ranks, peers, strict=True))
        self.ranks = {id(stream): rank for rank, stream in self.peers.items()}
        now = time.monotonic()
        self.members = {rank: Member(arrival=now) for rank in member_ranks}
        self.members[place.rank].host = socket.gethostname()
        self.deadlines = Deadlines(*[math.inf] * 5)  # until the process has a guard
        self.beat = choose_beat(place.size)
        self.rest_until = 0.0  # until then there is no judgement
        self.flight = ""
        self.alive = True
        self.report_at = math.inf  # when a fault is reported that has been found
        self.verdict = ""
        self.exit_code = FAILED
        self.hung = False
        self.printed = False

    def run(self) -> None:
        """Runs until the process has exited, or a fault has ended it."""
        with selectors.DefaultSelector() as selector:
            for source in [self.inbox, *self.peers.values()]:
                selector.register(source, selectors.EVENT_READ)
            last_sent = 0.0
            last_look = time.monotonic()
            exited: float | None = None
            while not self.verdict:
                self._read_all(selector)
                now = time.monotonic()
                if now - last_look < _TICK / 2 and not self.verdict:  # of a thousand processes one always sends
                    continue
                self.excuse_silence(now - last_look, now)
                last_look = now
                self.look_at_process(now)
                if now - last_sent > self.beat:
                    last_sent = now
                    self._send(self.make_status())
                self.judge(now)
                if not self.alive and self.members[self.place.rank].left:
                    if exited is None:
                        exited = now
                    if self._may_end(now - exited):
                        return
        self.end()

    def _read_all(self, selector: selectors.BaseSelector) -> None:
        """Reads what arrives within a tick."""
        for key, _ in selector.select(_TICK):
            stream: Any = key.fileobj
            self.read(stream)
            if stream.closed:
                selector.unregister(stream)

    def _may_end(self, seconds: float) -> bool:
        """Whether nobody needs this monitor any more, so long after its process has exited without a fault."""
        if self.place.rank != 0 or seconds > _LINGER:
            return True
        return all(member.left or member.gone for member in self.members.values())

    def read(self, stream: MessageStream) -> None:
        """Reads what arrived on a connection; closes it on what no monitor sends."""
        rank = self.ranks.get(id(stream), self.place.rank)
        for message in stream.read():
            try:
                self.handle(rank, message)
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
                stream.closed = True
        member = self.members[rank]
        # The own process closes its end when it exits.
        if stream.closed and rank != self.place.rank and not member.left:
            member.unseen = not member.gone  # its monitor is gone with its machine or its whole process group
            member.gone = True
            member.set_due(self.deadlines)

    def excuse_silence(self, away: float, now: float) -> None:
        """Blames nobody for messages that this monitor missed while it was itself stopped or starved."""
        if away > _AWAY:
            for member in self.members.values():
                member.arrival = min(now, member.arrival + away)

    def look_at_process(self, now: float) -> None:
        """Updates the state of the own process from the flight recorder and the system."""
        member = self.members[self.place.rank]
        member.arrival = now
        member.status = self.reader.read_status().with_ages(now)
        member.stopped = read_process_state(self.parent) in ("T", "t")
        if self.alive and self._has_parent_ended():
            self.alive = False
            self._drain()
            member.gone = not member.left
            # The first line of what Python wrote is for example `Fatal Python error: Aborted`.
            first_line = self._read_stacks().partition(b"\n")[0].decode()
            member.crash = first_line.rpartition(": ")[2]
            self._send(self.make_status())
        member.set_due(self.deadlines)

    def _drain(self) -> None:
        """Reads what the process sent before it ended."""
        while not self.inbox.closed and self.inbox.wait():
            self.read(self.inbox)

    def _read_stacks(self) -> bytes:
        """What Python wrote to `crash` at a fatal signal: the signal, and the threads' stacks."""
        if self.crash < 0:
            return b""
        return os.pread(self.crash, 1 << 16, 0)

    def make_status(self) -> Message:
        """What this monitor tells the others of its process."""
        member = self.members[self.place.rank]
        return {name: getattr(member, name) for name in _SHARED}

    def handle(self, rank: int, message: Message) -> None:
        """Acts on a message of the own process, or of the monitor of another one; raises on what none of them sends."""
        member = self.members[rank]
        member.arrival = time.monotonic()
        if "status" in message:
            _update(member, message)
        elif "over" in message:
            self._take_verdict(message)
        elif rank == self.place.rank:
            self._handle_process(member, message)
        member.set_due(self.deadlines)

    def _take_verdict(self, message: Message) -> None:
        """Ends the job, as process 0 says; nothing is changed where the message is not one of a monitor."""
        verdict = escape(message["over"])
        hung = message["hung"]
        if not isinstance(hung, list):
            raise TypeError("hung must be a list of processes")
        is_lost = message["lost"] is True
        self.verdict = verdict
        self.exit_code = _choose_code(is_lost)
        self.hung = self.place.rank in hung

    def _handle_process(self, own: Member, message: Message) -> None:
        """Acts on a message that only the own process sends."""
        if "deadlines" in message:
            self.deadlines = Deadlines(*message["deadlines"])
            self.flight = message["flight"]
            for member in self.members.values():
                member.set_due(self.deadlines)
        if "cause" in message:
            own.cause = escape(message["cause"])
            self.look_at_process(own.arrival)
            self._send(self.make_status())
        if "differs" in message:  # the program of this process and that of another one, as process 0 found
            self._report(Fault(escape(message["differs"])))
        if "left" in message:
            own.left = True
            self._send(self.make_status())
        if "printed" in message:
            self.printed = True

    def judge(self, now: float) -> None:
        """Decides on a fault: process 0 does, the others only when it cannot."""
        if now < self.rest_until:
            return
        begun = time.thread_time()
        fault = self._find_fault(now)
        self.rest_until = now + _REST * (time.thread_time() - begun)
        if self.place.rank != 0:
            fault = self._judge_without_process_0(fault, now)
            if fault is None:
                return
        if fault is None:
            self.report_at = math.inf
            return
        wait = fault.wait
        if wait == 0.0:  # a deadline may have been met in a status that is on its way
            wait = self.beat - _BEAT
        self.report_at = min(self.report_at, now + wait)
        if now >= self.report_at:
            self._report(fault)

    def _find_fault(self, now: float) -> Fault | None:
        fault = find_different_batches(self.members)
        if fault is not None:
            return fault
        first_due = min(member.due for member in self.members.values())
        if now < first_due:
            return None
        return find_fault(self.members, self.deadlines, now)

    def _judge_without_process_0(self, fault: Fault | None, now: float) -> Fault | None:
        """The fault if process 0 does not answer; None while it does, as it decides then."""
        coordinator = self.members[0]
        is_silent = coordinator.find_silence(now) > _UNHEARD and not coordinator.gone
        if fault is None or not (coordinator.gone or is_silent):
            return None
        if is_silent and not fault.primary:  # what is seen here may be a consequence
            return Fault(describe_silence([0], self.members, now), lost=True)
        return fault

    def _report(self, fault: Fault) -> None:
        self.verdict = fault.text
        self.exit_code = _choose_code(fault.lost)
        self.hung = self.place.rank in fault.hung
        self._send({"over": fault.text, "lost": fault.lost, "hung": fault.hung})

    def _send(self, message: Message) -> None:
        line = encode(message)
        for peer in self.peers.values():
            if not peer.closed:
                peer.send_line(line)

    def end(self) -> None:
        """Writes the flight record, ends the process and has it print the reason as its last line."""
        text = f"shardkit guard: {self.verdict}."
        if self.flight:
            ending = _call_in_time(self._save_record)
            if ending is None:
                ending = f" (No flight record: {self.flight} does not respond.)"
            text += ending
        if self.place.rank == 0:
            _wait_until(self._others_closed, LEAVES_LAST)
        if self.alive:
            _tell_process({"end": self.exit_code, "text": text, "stacks": self.hung})
            _wait_until(self._has_parent_ended, _KILL_AFTER)
            if not self._has_parent_ended():
                with contextlib.suppress(OSError):
                    os.kill(self.parent, signal.SIGKILL)
            self._drain()
        if not self.printed:

            def print_last() -> int:
                return os.write(2, self._read_stacks() + encode_output(text))

            _call_in_time(print_last)
        os._exit(0)  # even if a thread of `_call_in_time` hangs

    def _has_parent_ended(self) -> bool:
        """Whether the process has ended: the system then gives this monitor another parent."""
        return os.getppid() != self.parent

    def _others_closed(self) -> bool:
        for peer in self.peers.values():
            if not peer.closed and peer.wait():
                for _ in peer.read():  # what they still say does not matter
                    pass
        return all(peer.closed for peer in self.peers.values())

    def _save_record(self) -> str:
        """Writes the flight record; the end of the last line: where it is, or why there is none."""
        path = Path(self.flight) / f"flight.{self.place.rank}.json"
        record = {
            "process": self.place.rank,
            "host": self.members[self.place.rank].host,
            "processes": self.place.size,
            "fault": self.verdict,
        }
        try:
            self.reader.save(path, record)
        except OSError as error:
            return f" (No flight record: {path}: {error.strerror or error}.)"
        return f" Flight record: {path}"


def _update(member: Member, message: Message) -> None:
    """Takes over what another monitor says of its process; on what no monitor sends it raises, and changes nothing."""
    phase, step, since, dispatched, done, device_since, batches = message["status"]
    numbers = int(step), float(since), int(dispatched), int(done), float(device_since)
    fields: dict[str, Any] = {"status": Status(escape(phase), *numbers, parse_batches(batches))}
    for name in ("stopped", "gone", "left"):
        if type(message[name]) is not bool:
            raise TypeError(f"{name} must be true or false")
        fields[name] = message[name]
    for name in ("cause", "host", "crash"):
        fields[name] = escape(message[name])
    for name, value in fields.items():
        setattr(member, name, value)


def _choose_code(is_lost: bool) -> int:
    """The exit code: LOST where a process or machine is gone, so that a restart may help."""
    if is_lost:
        return LOST
    return FAILED


def choose_beat(size: int) -> float:
    """Seconds between two status messages of a process, in a job of so many."""
    return max(_BEAT, size / _MESSAGES)


def _end_with(parent: int, met: threading.Event) -> None:
    """Ends this monitor with its process while it waits for the others: the next run may need its port."""
    while not met.wait(_TICK):
        if os.getppid() != parent:
            os._exit(0)


def _tell_process(message: Message) -> None:
    """Sends a message to the process that this monitor watches."""
    with contextlib.suppress(OSError):
        os.write(1, encode(message))


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    """Returns when the condition holds, or after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def _call_in_time(function: Callable[[], Any]) -> Any:
    """What a function returns; None if it fails or takes long."""
    results: list[Any] = []

    def call() -> None:
        with contextlib.suppress(OSError):
            results.append(function())

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(_SPEAK)
    if not results:
        return None
    return results[0]
