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
from typing import Any

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
HANGS, WAITS = b'"user code", 4, %.9f, 4, 4, %.9f', b'"step", 5, %.9f, 5, 4, %.9f'


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
    monitor.stdin.write(
        encode({"ring": str(folder / "ring"), "parent": os.getpid(), "place": list(place), "crash": -1})
    )
    monitor.stdin.flush()
    lines = MessageStream(monitor.stdout.fileno())
    signal.signal(signal.SIGUSR1, lambda *_: recorder.enter("user code", 4))  # it comes to no step any more
    signal.signal(signal.SIGUSR2, lambda *_: recorder.enter("step", 5))  # and the others wait for it
    while not lines.closed:
        for message in lines.read():
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


class Simulated:
    """Ranks first to last - 1: a socket each, which says what a monitor says."""

    def __init__(self, port: int, token: str, first: int, last: int, size: int):
        self.port, self.token, self.size, self.first = port, token, size, first
        self.selector = selectors.DefaultSelector()
        self.sockets: dict[int, socket.socket] = {}
        self.parts: dict[int, bytes] = {}
        self.to_come = list(range(last - 1, first - 1, -1))
        self.counts = dict.fromkeys(["sent", "sent_bytes", "heard", "heard_bytes"], 0)
        self.seen = {"welcome": 0, "over": 0}
        self.hung: tuple[int, float] | None = None  # a rank in user code, for which all others wait since then
        self.next = 0.0

    def connect(self) -> None:
        """Connects some more ranks."""
        for _ in range(min(50, len(self.to_come))):
            try:
                one = socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT)
            except ConnectionRefusedError:  # process 0 does not listen yet
                time.sleep(0.02)
                return
            rank = self.to_come.pop()
            hello = Hello(rank, self.size, "simulated", "", False, f"{rank:032x}")
            one.sendall(encode(make_hello_message(hello, self.token)))
            one.setblocking(False)
            self.sockets[rank], self.parts[rank] = one, b""
            self.selector.register(one, selectors.EVENT_READ, rank)

    def send(self, rank: int, data: bytes) -> None:
        """Sends one message for a rank."""
        with contextlib.suppress(OSError):
            self.sockets[rank].sendall(data)
        self.counts["sent"] += 1
        self.counts["sent_bytes"] += len(data)

    def send_statuses(self, now: float) -> None:
        """Sends the statuses that are due, spread over the time between two of a rank."""
        ranks = list(self.sockets)
        every = choose_beat(self.size) / max(1, len(ranks))
        self.next = max(self.next, now - choose_beat(self.size))  # what was missed for longer is left out
        while self.next < now and ranks:
            rank = ranks[int(self.next / every) % len(ranks)]
            self.send(rank, self.status(rank))
            self.next += every

    def status(self, rank: int) -> bytes:
        """What the monitor of a rank says of its process; pasted together, as ten thousand come in a second."""
        if self.hung is None:
            return STATUS % b'"evaluate", 0, 0.123456789, 0, 0, 0.123456789'
        age = time.monotonic() - self.hung[1]
        return STATUS % ((HANGS if rank == self.hung[0] else WAITS) % (age, age))

    def hear(self, rank: int) -> None:
        """Counts what arrived for a rank."""
        try:
            data = self.sockets[rank].recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.selector.unregister(self.sockets[rank])
            self.sockets.pop(rank).close()
            return
        *ended, self.parts[rank] = (self.parts[rank] + data).split(b"\n")
        self.counts["heard"] += len(ended)
        self.counts["heard_bytes"] += len(data)
        for line in ended:
            for word in self.seen:
                if line.startswith(f'{{"{word}"'.encode()):
                    self.seen[word] += 1
                    if word != "over":
                        continue
                    if self.seen[word] in (1, len(self.sockets)):
                        tell(kind="over", at=time.monotonic(), ranks=self.seen[word], text=json.loads(line)["over"])
        if self.seen["welcome"] == len(self.parts) and not self.to_come:
            tell(kind="welcome", at=time.monotonic())
            self.seen["welcome"] += 1

    def obey(self, command: dict[str, Any]) -> None:
        """One line of standard input."""
        if "dies" in command:
            self.selector.unregister(self.sockets[command["dies"]])
            self.sockets.pop(command["dies"]).close()
        elif "hangs" in command:
            self.hung = command["hangs"], time.monotonic()
        elif "counts" in command:
            tell(kind="counts", at=time.monotonic(), **self.counts)

    def run(self) -> None:
        """Until standard input ends."""
        inbox = MessageStream(0)
        self.selector.register(inbox, selectors.EVENT_READ)
        while not inbox.closed:
            self.connect()
            for key, _ in self.selector.select(0.0 if self.to_come else 0.01):
                if key.fileobj is inbox:
                    for command in inbox.read():
                        self.obey(command)
                else:
                    self.hear(key.data)
            if self.seen["welcome"] > len(self.parts):
                self.send_statuses(time.monotonic())


def main() -> None:
    """Runs what the first line of standard input says: ranks that are processes, then ranks that are sockets."""
    given = json.loads(sys.stdin.buffer.raw.readline())  # type: ignore[attr-defined]
    port, size, token = given["port"], given["size"], given["token"]
    children = []
    for rank in range(given["processes"][0], given["processes"][1]):
        child = os.fork()
        if not child:
            os.close(0)
            os.setpgid(0, 0)
            stand_in(Place("127.0.0.1", port, rank, size, TIMEOUT, False, token))
            os._exit(0)
        children.append(child)
    try:
        Simulated(port, token, *given["simulated"], size).run()
    finally:
        for child in children:
            with contextlib.suppress(OSError):
                os.killpg(child, signal.SIGKILL)


if __name__ == "__main__":
    main()
