"""What the monitors of a job cost as it grows: seconds, memory, messages and CPU time at process 0.

The first table is of real monitors beside processes that do nothing else, the second of the monitor of process 0 alone,
which hears of ranks that are only sockets: it cannot tell them from others, and n of them fit on one machine. Their
load on it is a part of all times. In both a member dies at the end of one run, and in another it comes to no step any
more, so that all the others exceed the deadline of 3 s. `--launch 16` starts as many real processes of jax, kills one
of them and lets the job restart.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import resource
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.growth import fit_exponent
from benchmarks.processes import read_cpu_seconds, read_private_bytes

HERE = Path(__file__).parent
STEP = 3.0  # seconds: the deadline of a step in monitor_peers.py
FAULTS = ("dies", "hangs")  # what rank 1 does at the end of a run
COLUMNS = {
    "met": "met, s",
    "held_mb": "process 0's monitor, MB",
    "held_kb_rank": "of it per rank, KB",
    "other_mb": "another monitor, MB",
    "messages": "messages/s, both ways",
    "kb": "KB/s, both ways",
    "cpu": "CPU, cores",
    "dies": "death told to all, s",
    "hangs": "hang told to all, s after the deadline",
}
PROGRAM = """
import os, signal, time
import jax, jax.numpy as jnp, numpy as np, optax
import shardkit as sk
from shardkit import runtime

runtime.initialize(timeout=600)
runtime.log("connected")
mesh, plan = sk.make_mesh(data=-1), sk.dp("data")
init, step = sk.make_train_step(
    sk.value_and_grad(lambda params, batch, keys: sk.Mean.of((batch @ params["w"]) ** 2)),
    optax.sgd(0.1), mesh=mesh, plan=plan)
state = init({"w": jnp.ones(4)}, jax.random.key(0))
step = runtime.guard(mesh=mesh).watch(step)
for index in range(3):
    if index == 2 and jax.process_index() == 1 and os.environ["SHARDKIT_RESTARTS"] == "0":
        print(f"killed at {time.monotonic():.3f}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    rows = np.ones((jax.device_count(), 4), np.float32)
    state, metrics = step(state, runtime.from_full(rows, mesh, plan.batch_spec(mesh)))
    runtime.log(f"loss {float(metrics['loss']):.5f}")
"""


class Peers:
    """A job of monitors: so many processes, and the other ranks as sockets."""

    def __init__(self, size: int, processes: int):
        self.size = size
        self.processes = processes
        self.start_time = time.monotonic()
        command = [sys.executable, "-I", "-S", str(HERE / "monitor_peers.py")]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._messages: list[dict[str, Any]] = []
        job = {
            "port": find_free_port(),
            "size": size,
            "token": secrets.token_hex(16),
            "processes": [0, processes],
            "simulated": [processes, size],
        }
        self._send(job)

    def _send(self, message: dict[str, Any]) -> None:
        """A command to the ranks that are sockets."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        """The next message of any rank."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"monitors: all ranks must wait for a fault; they ended first: {self._messages[-1:]}.")
        message: dict[str, Any] = json.loads(line)
        self._messages.append(message)
        return message

    def _receive_until(self, done: Callable[[], bool]) -> None:
        while not done():
            self._receive()

    def list_messages(self, kind: str) -> list[dict[str, Any]]:
        """What was said of one kind."""
        return [message for message in self._messages if message["kind"] == kind]

    def wait_until_met(self) -> float:
        """When the last rank had a place in the job: all processes, and all sockets, which say it at once."""
        while len(self.list_messages("met")) < self.processes or not self.list_messages("welcome"):
            if self._receive()["kind"] == "end":
                raise SystemExit(f"monitors: all ranks must wait for a fault; they ended first: {self._messages[-1:]}.")
        messages = self.list_messages("met") + self.list_messages("welcome")
        return max(message["at"] for message in messages)

    def find_monitors(self) -> dict[int, int]:
        """The process of the monitor of each rank that is a process."""
        return {message["rank"]: message["monitor"] for message in self.list_messages("met")}

    def plant(self, fault: str) -> None:
        """Has rank 1 die or hang."""
        for message in self.list_messages("met"):
            if fault == "hangs":
                # The others wait for rank 1 in a step, as the ranks of a collective do.
                signal_number = signal.SIGUSR2
                if message["rank"] == 1:
                    signal_number = signal.SIGUSR1
                os.kill(message["process"], signal_number)
            elif message["rank"] == 1:
                os.kill(message["process"], signal.SIGKILL)
        if fault == "hangs" or self.processes < 2:
            self._send({fault: 1})

    def wait_until_told(self, fault: str) -> float:
        """When the last rank was told of the fault; a rank that died is told nothing.

        Of process 0 it is not counted: it ends 1.5 s after all others, so that they hear of it.
        """
        processes = self.processes
        sockets = self.size - self.processes
        if fault == "dies" and self.processes > 1:
            processes -= 1
        elif fault == "dies":
            sockets -= 1
        self._receive_until(lambda: len(self.list_messages("end")) >= processes)
        self._receive_until(lambda: self._count_told_sockets() >= sockets)
        times = [message["at"] for message in self.list_messages("over")]
        for message in self.list_messages("end"):
            if message["rank"] != 0:
                times.append(message["at"])
        return max(times, default=math.nan)

    def _count_told_sockets(self) -> int:
        return max((message["ranks"] for message in self.list_messages("over")), default=0)

    def read_counts(self) -> dict[str, Any]:
        """What the sockets have sent and heard so far."""
        count = len(self.list_messages("counts"))
        self._send({"counts": True})
        self._receive_until(lambda: len(self.list_messages("counts")) > count)
        return self.list_messages("counts")[-1]

    def end(self) -> None:
        """Ends all of it."""
        for message in self.list_messages("met"):
            _kill(message["process"])
            _kill(message["monitor"])
        self._process.kill()
        self._process.wait()


def find_free_port() -> int:
    """A port that no process listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _kill(process_id: int) -> None:
    with contextlib.suppress(OSError):  # it has ended
        os.kill(process_id, signal.SIGKILL)


def measure_quiet_job(peers: Peers, seconds: float, empty: float) -> dict[str, float]:
    """What the monitors hold, send and take while nothing happens: `empty` is what one holds that knows one rank."""
    monitors = peers.find_monitors()
    before = peers.read_counts()
    cpu_before = read_cpu_seconds(monitors[0])
    time.sleep(seconds)
    after = peers.read_counts()
    cpu = read_cpu_seconds(monitors[0]) - cpu_before
    window = after["at"] - before["at"]
    messages = 0
    for field in ("sent", "heard"):
        messages += after[field] - before[field]
    sent_bytes = 0
    for field in ("sent_bytes", "heard_bytes"):
        sent_bytes += after[field] - before[field]
    # The sockets alone are counted: of 10 ranks, 3 of which are processes, 7 of the 9 that process 0 hears.
    all_ranks = (peers.size - 1) / (peers.size - peers.processes)
    memory = read_private_bytes(monitors[0])
    # Process 0's monitor holds what it knows of all ranks; any other one only its own.
    other_memory = [read_private_bytes(monitors[rank]) / 1e6 for rank in range(1, peers.processes)]
    other_median = math.nan
    if other_memory:
        other_median = statistics.median(other_memory)
    return {
        "cpu": cpu / window,
        "messages": all_ranks * messages / window,
        "kb": all_ranks * sent_bytes / window / 1e3,
        "held_mb": memory / 1e6,
        "held_kb_rank": (memory - empty) / 1e3 / (peers.size - 1),
        "other_mb": other_median,
    }


def measure_fault(peers: Peers, fault: str) -> float:
    """Seconds until the last rank is told of a fault, or of a hang from the deadline of the step on."""
    planted = time.monotonic()
    if fault == "hangs":
        planted += STEP
    peers.plant(fault)
    return peers.wait_until_told(fault) - planted


def measure_row(size: int, processes: int, seconds: float, empty: float) -> dict[str, Any]:
    """One row, of a job for each fault: `empty` is what a monitor holds that knows one rank."""
    row: dict[str, Any] = {"n": size}
    for fault in FAULTS:
        peers = Peers(size, processes)
        try:
            met = peers.wait_until_met()
            time.sleep(1.5)  # for what follows the meeting
            # A job that waits for a fault is quiet: it is measured in the first of the two.
            if fault == "dies":
                row["met"] = met - peers.start_time
                row |= measure_quiet_job(peers, seconds, empty)
            row[fault] = measure_fault(peers, fault)
            row[f"{fault}_text"] = peers.list_messages("end")[0]["text"][:200]
        finally:
            peers.end()
    return row


def format_figure(value: float | None) -> str:
    """A figure of the table in two or three digits; nothing where there is none."""
    if value is None or math.isnan(value):
        return ""
    if value < 1:
        return f"{value:.2f}"
    if value < 100:
        return f"{value:.1f}"
    return f"{value:.0f}"


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as markdown, the exponents of the columns ~ n^e last."""
    lines = [f"| n | {' | '.join(COLUMNS.values())} |", "|--:" * (len(COLUMNS) + 1) + "|"]
    for row in rows:
        cells = [format_figure(row[name]) for name in COLUMNS]
        lines.append(f"| {row['n']:,} | {' | '.join(cells)} |")
    sizes = [row["n"] for row in rows]
    exponents = []
    for name in COLUMNS:
        exponent = fit_exponent(sizes, [row[name] for row in rows])
        exponents.append(format_figure(exponent))
    lines.append(f"| exponent | {' | '.join(exponents)} |")
    return "\n".join(lines)


def measure_launch(processes: int) -> None:
    """A job of jax with a kill and a restart, by `shardkit launch`."""
    start_time = time.monotonic()
    killed = math.nan
    resumed = math.nan
    connected = []
    told = []
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program.py"
        program.write_text(PROGRAM)
        launch = f"launch -n {processes} --devices 1 --restarts 1 --".split()
        command = [sys.executable, "-m", "shardkit", *launch, str(program)]
        cpu_before = _read_cpu_seconds_of_children()
        job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert job.stdout is not None
        for line in job.stdout:
            now = time.monotonic()
            if "connected" in line:
                connected.append(now)
            elif "killed at" in line:
                killed = float(line.split()[-1])
            elif "guard: process 1 died" in line:
                told.append(now)
            elif "loss" in line and len(connected) == 2 and math.isnan(resumed):
                resumed = now
        code = job.wait()
    cpu = _read_cpu_seconds_of_children() - cpu_before
    seconds = time.monotonic() - start_time
    print(
        f"{processes} processes of jax: connected after {connected[0] - start_time:.0f} s; killed one, and "
        f"{len(told)} said so within {max(told) - killed:.1f} s; the next loss {resumed - killed:.0f} s after it; "
        f"exit code {code}, {seconds:.0f} s and {cpu:.0f} s of CPU time in all, load {os.getloadavg()[0]:.0f}"
    )


def _read_cpu_seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def raise_file_limit(largest: int) -> None:
    """Lets this process and its children open as many files as the system allows: each rank is one."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    if limit < largest + 100:
        raise SystemExit(
            f"monitors: {largest} ranks need as many open files; the limit is {limit}. Raise it with ulimit -n, or "
            "pass --simulated 100 1000."
        )


def measure_table(kind: str, sizes: Sequence[int], options: argparse.Namespace, empty: float) -> None:
    """Measures jobs of these sizes, and prints their table."""
    rows = []
    for size in sizes:
        processes = 1
        if kind == "real":
            # All but the last rank, which is a socket: it counts the messages.
            processes = size - 1
        row = measure_row(size, processes, options.seconds, empty)
        rows.append(row)
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps({"kind": kind, **row}) + "\n")
    if rows:
        print(f"\n{kind}\n\n{format_table(rows)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", type=int, nargs="*", default=[4, 16, 64], help="sizes of real monitors")
    parser.add_argument("--simulated", type=int, nargs="*", default=[100, 1000, 10_000], help="sizes of sockets")
    parser.add_argument("--seconds", type=float, default=8.0, help="of which CPU time and messages are counted")
    parser.add_argument("--quick", action="store_true", help="the smallest run that exercises everything; no numbers")
    parser.add_argument("--launch", type=int, metavar="N", help="processes of jax, in place of the tables")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one JSON line per row")
    options = parser.parse_args(argv)
    if options.launch:
        measure_launch(options.launch)
        return 0
    if options.quick:
        options.real = [3]
        options.simulated = [8, 40]
        options.seconds = 0.5
    raise_file_limit(max(options.simulated, default=0))
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}, Python {sys.version.split()[0]}")
    # Most of what a monitor holds is Python. What it holds for each rank is what is above this.
    empty = measure_row(2, 1, 0.2, 0.0)["held_mb"] * 1e6
    print(f"a monitor that knows one other rank: {empty / 1e6:.1f} MB")
    measure_table("real", options.real, options, empty)
    measure_table("simulated", options.simulated, options, empty)
    return 0


if __name__ == "__main__":
    sys.exit(main())
