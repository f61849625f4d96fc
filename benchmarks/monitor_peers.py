"""What stands in for the processes of a job in `monitors.py`: processes without jax, and ranks that are only sockets.

It uses the standard library and the monitor's own code, as the monitor does. Commands are lines of standard input,
results lines of standard output, both JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

MONITOR = Path(__file__).parents[1] / "shardkit" / "jobs" / "monitor" / "__main__.py"
if "shardkit" not in sys.modules:  # as the monitor does, without the package itself
    runpy.run_path(str(MONITOR))

from shardkit.jobs.monitor.introduction import Hello, make_hello_message  # noqa: E402
from shardkit.jobs.monitor.main import choose_beat  # noqa: E402
from shardkit.runtime.channel.place import Place  # noqa: E402
from shardkit.runtime.channel.recorder import Recorder  # noqa: E402
from shardkit.runtime.channel.wire import MessageStream, encode  # noqa: E402

TIMEOUT = 300.0
DEADLINES = [1800.0, 3.0, 900.0, 300.0, 1800.0, 30.0]  # of which a hanging rank meets that of a step
BATCHES = b', [["0123456789abcdef", "float32[512,1024]", true, 1, 0, 5]]'
STATUS = b'{"status": [%b' + BATCHES + b'], "stopped": false, "gone": false, "left": false, "cause": "", "host": "", '
STATUS += b'"crash": ""}\n'
IDLE = b'"evaluate", 0, 0.123456789, 0, 0, 0.123456789'
HANGS = b'"user code", 4, %.9f, 4, 4, %.9f'
WAITS = b'"step", 5, %.9f, 5, 4, %.9f'
NEW_RANKS = 50  # that connect before messages are heard again


def tell(**message: Any) -> None:
    """One result, whole, though others write to the same pipe."""
    os.write(1, json.dumps(message).encode() + b"\n")


def stand_in(place: Place) -> None:
    """A process of the job: starts its monitor as `initialize` does, ends when it is told."""
    folder = Path(tempfile.mkdtemp(prefix="shardkit-"))
    recorder = Recorder(str(folder / "ring"))
    command = [sys.executable, "-I", "-S", str(MONITOR)]
    monitor = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert monitor.stdin is not None and monitor.stdout is not None
    introduction = {"ring": str(folder / "ring"), "parent": os.getpid(), "place": list(place), "crash": -1}
    monitor.stdin.write(encode(introduction))
    monitor.stdin.flush()
    stream = MessageStream(monitor.stdout.fileno())
    # The rank of the first signal comes to no step any more, and those of the second wait for it.
    signal.signal(signal.SIGUSR1, lambda *_: recorder.enter("user code", 4))
    signal.signal(signal.SIGUSR2, lambda *_: recorder.enter("step", 5))
    while not stream.closed:
        for message in stream.read():
            now = time.monotonic()
            if "ready" in message:
                shutil.rmtree(folder)
                tell(kind="met", rank=place.rank, at=now, process=os.getpid(), monitor=monitor.pid)
                monitor.stdin.write(encode({"deadlines": DEADLINES, "flight": ""}))
                monitor.stdin.flush()
                recorder.enter("evaluate", 0)
            elif "end" in message or "refused" in message:
                tell(kind="end", rank=place.rank, at=now, text=message.get("text") or message.get("refused"))
                os._exit(0)


class Hang(NamedTuple):
    """A rank in user code, for which all others wait since then."""

    rank: int
    time: float


class Simulated:
    """Ranks first to last - 1: a socket each, which says what a monitor says."""

    def __init__(self, port: int, token: str, first: int, last: int, size: int):
        self.port = port
        self.token = token
        self.size = size
        self.selector = selectors.DefaultSelector()
        # By rank: the socket, and the start of a message whose end has not come.
        self.sockets: dict[int, socket.socket] = {}
        self.parts: dict[int, bytes] = {}
        self.to_connect = list(range(last - 1, first - 1, -1))
        self.counts = {"sent": 0, "sent_bytes": 0, "heard": 0, "heard_bytes": 0}
        self.welcomed = 0
        self.told = 0  # that the job is over
        self.met = False  # whether all have been welcomed
        self.hang: Hang | None = None
        self.next_status = 0.0

    def connect(self) -> None:
        """Connects some more ranks."""
        for _ in range(min(NEW_RANKS, len(self.to_connect))):
            try:
                rank_socket = socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT)
            except ConnectionRefusedError:  # process 0 does not listen yet
                time.sleep(0.02)
                return
            rank = self.to_connect.pop()
            hello = Hello(rank, self.size, "simulated", "", False, f"{rank:032x}")
            rank_socket.sendall(encode(make_hello_message(hello, self.token)))
            rank_socket.setblocking(False)
            self.sockets[rank] = rank_socket
            self.parts[rank] = b""
            self.selector.register(rank_socket, selectors.EVENT_READ, rank)

    def close(self, rank: int) -> None:
        """Closes the socket of a rank: for process 0 it has died."""
        rank_socket = self.sockets.pop(rank)
        self.selector.unregister(rank_socket)
        rank_socket.close()

    def send(self, rank: int, data: bytes) -> None:
        """Sends one message for a rank."""
        with contextlib.suppress(OSError):
            self.sockets[rank].sendall(data)
        self.counts["sent"] += 1
        self.counts["sent_bytes"] += len(data)

    def send_statuses(self, now: float) -> None:
        """Sends the statuses that are due, spread over the time between two of a rank.

        For example 100 ranks that report once a second: a status of another rank is due every 10 ms.
        """
        beat = choose_beat(self.size)
        ranks = list(self.sockets)
        if not ranks:
            return
        interval = beat / len(ranks)
        self.next_status = max(self.next_status, now - beat)  # what was missed for longer is left out
        while self.next_status < now:
            rank = ranks[int(self.next_status / interval) % len(ranks)]
            self.send(rank, self.make_status(rank))
            self.next_status += interval

    def make_status(self, rank: int) -> bytes:
        """What the monitor of a rank says of its process; pasted together, as ten thousand come in a second."""
        if self.hang is None:
            return STATUS % IDLE
        age = time.monotonic() - self.hang.time
        if rank == self.hang.rank:
            return STATUS % (HANGS % (age, age))
        return STATUS % (WAITS % (age, age))

    def hear(self, rank: int) -> None:
        """Counts what arrived for a rank."""
        if rank not in self.sockets:
            return  # it died by a command that was read in the same moment
        try:
            data = self.sockets[rank].recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close(rank)
            return
        *messages, self.parts[rank] = (self.parts[rank] + data).split(b"\n")
        self.counts["heard"] += len(messages)
        self.counts["heard_bytes"] += len(data)
        for message in messages:
            # By their first bytes: to parse ten thousand in a second would be a load on the monitor that is measured.
            if message.startswith(b'{"welcome"'):
                self.welcomed += 1
            elif message.startswith(b'{"over"'):
                self.told += 1
                self.tell_of_end(message)
        if not self.met and not self.to_connect and self.welcomed == len(self.parts):
            self.met = True
            tell(kind="welcome", at=time.monotonic())

    def tell_of_end(self, message: bytes) -> None:
        """Says when the first rank was told that the job is over, and when all had been."""
        if self.told in (1, len(self.sockets)):
            text = json.loads(message)["over"]
            tell(kind="over", at=time.monotonic(), ranks=self.told, text=text)

    def obey(self, command: dict[str, Any]) -> None:
        """One line of standard input."""
        if "dies" in command:
            self.close(command["dies"])
        elif "hangs" in command:
            self.hang = Hang(command["hangs"], time.monotonic())
        elif "counts" in command:
            tell(kind="counts", at=time.monotonic(), **self.counts)

    def run(self) -> None:
        """Until standard input ends."""
        inbox = MessageStream(0)
        self.selector.register(inbox, selectors.EVENT_READ)
        while not inbox.closed:
            self.connect()
            timeout = 0.01
            if self.to_connect:
                timeout = 0.0
            for key, _ in self.selector.select(timeout):
                if key.fileobj is inbox:
                    for command in inbox.read():
                        self.obey(command)
                else:
                    self.hear(key.data)
            if self.met:
                self.send_statuses(time.monotonic())


def main() -> None:
    """Runs what the first line of standard input says: ranks that are processes, then ranks that are sockets."""
    # Unbuffered: what follows the first line is read by `Simulated.run`.
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        job = json.loads(stdin.readline())
    port = job["port"]
    size = job["size"]
    token = job["token"]
    first_process, last_process = job["processes"]
    first_simulated, last_simulated = job["simulated"]
    children = []
    for rank in range(first_process, last_process):
        child = os.fork()
        if not child:
            os.close(0)
            os.setpgid(0, 0)  # with its monitor, so that both are ended
            stand_in(Place("127.0.0.1", port, rank, size, TIMEOUT, False, token))
            os._exit(0)
        children.append(child)
    try:
        Simulated(port, token, first_simulated, last_simulated, size).run()
    finally:
        for child in children:
            with contextlib.suppress(OSError):
                os.killpg(child, signal.SIGKILL)


if __name__ == "__main__":
    main()
