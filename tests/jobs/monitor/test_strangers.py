"""A port scan and a fuzzer against a job: every port on which its processes listen, from its start to its end."""

import contextlib
import os
import random
import re
import socket
import threading
import time
from pathlib import Path

import pytest

from shardkit.jobs.monitor import introduction, rendezvous
from shardkit.jobs.monitor.introduction import Hello
from shardkit.jobs.monitor.rendezvous import meet
from shardkit.runtime.channel.place import Place
from shardkit.runtime.channel.wire import encode
from support import jobs

# Process 1 comes 4 s late, so that there is a meeting to disturb.
LATE = (
    "import os, runpy, sys, time; time.sleep(4 * int(os.environ['JAX_PROCESS_ID'])); sys.argv = sys.argv[1:]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
FORGED = encode(introduction.make_hello_message(Hello(1, 2, "node1", "127.0.0.1", True, "0" * 32), "guessed"))
CLOSED = b"closed at once"


def said(draw):
    """What each of a round of connections says."""
    return [
        CLOSED,
        b"",
        draw.randbytes(3000),
        FORGED,
        b'{"shardkit": ',
        b"\xff" * 400,
        b"\x00\x00\x00\x7f",
        b"x" * 10**6,
    ]


def family(process):
    """A process, what it started, and so on."""
    with contextlib.suppress(OSError):
        yield process
        for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
            yield from family(int(child))


def ports(processes):
    """Where they listen, and who."""
    owner, found = {}, {}
    for process in processes:
        with contextlib.suppress(OSError):
            for file in Path(f"/proc/{process}/fd").iterdir():
                with contextlib.suppress(OSError):
                    owner[os.readlink(file)] = process
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in owner:
                found[int(fields[1].rpartition(":")[2], 16)] = owner[f"socket:[{fields[9]}]"]
    return found


def memory(process):
    """Kilobytes that it holds alone; 0 once it has ended."""
    with contextlib.suppress(OSError, ValueError):
        rows = [row.split() for row in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()]
        return sum(int(row[1]) for row in rows if row[0].startswith("Private_"))
    return 0


class Attack(threading.Thread):
    """Connects to every port of a job, again and again, and keeps hundreds of connections."""

    def __init__(self, job):
        super().__init__()
        self.job, self.over, self.held = job, threading.Event(), []
        self.reached, self.most = {}, {}  # the connections to each port; the most memory of each monitor

    def run(self):
        draw = random.Random(0)
        while not self.over.wait(0.05):
            roots = [each.pid for each in self.job.running if each.poll() is None]
            for port in ports([process for root in roots for process in family(root)]):
                for words in said(draw):
                    with contextlib.suppress(OSError):
                        one = socket.create_connection(("127.0.0.1", port), timeout=0.2)
                        self.held.append(one)
                        self.reached[port] = self.reached.get(port, 0) + 1
                        if words is CLOSED:
                            one.close()
                        else:
                            one.sendall(words)
            for one in self.held[-100:]:  # slowly, one byte a time
                with contextlib.suppress(OSError):
                    one.settimeout(0.001)
                    one.sendall(b"G")
            for monitor in [child for root in roots for child in family(root) if child != root]:
                self.most[monitor] = max(self.most.get(monitor, 0), memory(monitor))
            while len(self.held) > 400:
                self.held.pop(0).close()
        for one in self.held:
            one.close()


def losses(disturbed):
    """What a guarded job of two processes prints, and who disturbed it."""
    words = ["-c", LATE, str(jobs.WORKERS / "loop.py"), "--steps", "12", "--pace", "0.5", "--deadline", "30"]
    job = jobs.Job(words, processes=2, devices=1, each=lambda rank: {"SHARDKIT_JOB_TOKEN": "secret"})
    attack = Attack(job)
    if disturbed:
        attack.start()
    try:
        return job.wait(120), attack
    finally:
        attack.over.set()
        if disturbed:
            attack.join()


# proves N31: and of a job that runs, to its end
@pytest.mark.deep
def test_a_port_scan_changes_nothing_in_a_job_but_one_line():
    (plain, _), (ended, attack) = losses(False), losses(True)
    assert [each.code for each in plain + ended] == [0, 0, 0, 0], (plain, ended)
    assert [each.last for each in ended] == [each.last for each in plain]
    assert re.fullmatch(r"finished at loss 0\.\d*[1-9]\d*", ended[0].last)
    lines = [line for each in ended for line in each.output.splitlines() if "shardkit" in line]
    assert len(lines) == 1 and re.fullmatch(
        r"shardkit: rejected \d+ connections to 127\.0\.0\.1:\d+ from outside this job, the first from 127\.0\.0\.1 "
        r"\(\d+ with another SHARDKIT_JOB_TOKEN\)\.",
        lines[0],
    )
    assert len(attack.reached) >= 2 and min(attack.reached.values()) > 50  # the meeting and jax's; gloo's, of each
    assert 0 < max(attack.most.values()) < 16_000  # of the monitors; 9 MB without


def disturbed_meeting(strangers, disturb):
    """Process 0 of two notes so many strangers; `disturb` does something with them before process 1 comes."""
    port, notes, met = jobs.free_port(), [], {}

    def come(rank):
        met[rank] = meet(Place("127.0.0.1", port, rank, 2, 120.0, True, "secret"), notes.append)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(2)]
    threads[0].start()
    held, until = [], time.monotonic() + 600.0
    while len(held) < strangers:
        with contextlib.suppress(ConnectionRefusedError):
            held.append(socket.create_connection(("127.0.0.1", port), timeout=600.0))
        assert time.monotonic() < until
    disturb(held)
    threads[1].start()
    for thread in threads:
        thread.join()
    for line in [*held, *met[0], *met[1]]:
        line.close()
    where = f"127.0.0.1:{port} from outside this job, the first from 127.0.0.1."
    assert notes == [f"shardkit: rejected {strangers} connections to {where}"]


def is_closed(connection):
    """Whether the other end closes it."""
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


# proves N31 in part
@pytest.mark.check
def test_who_stays_and_says_too_much_is_closed_and_counted(monkeypatch):
    """As many as there are processes may wait for their introduction: each could hold 64 KB of it."""
    monkeypatch.setattr(rendezvous, "_INTRODUCTION", 1000.0)  # they are not closed for their silence

    def disturb(held):
        for one in held[:10]:
            one.sendall(b"x" * 5000)
        assert all(map(is_closed, held[:10]))

    disturbed_meeting(20, disturb)


# proves N31 in part
@pytest.mark.check
def test_of_those_who_stay_the_oldest_are_closed(monkeypatch):
    """Else as many strangers as process 0 may open files could wait, and cost it memory."""
    monkeypatch.setattr(rendezvous, "_INTRODUCTION", 1000.0)
    monkeypatch.setattr(rendezvous, "UNKNOWN", 3)  # besides two, as there are processes

    def disturb(held):
        assert all(map(is_closed, held[:7]))

    disturbed_meeting(12, disturb)


# proves N31 in part
@pytest.mark.check
def test_the_longest_introduction_is_short_enough():
    longest = Hello((1 << 20) - 1, 1 << 20, "\U0001f600" * 255, ":".join(["ffff"] * 8), False, "f" * 32)
    assert len(encode(introduction.make_hello_message(longest, "secret"))) < rendezvous._LONGEST
