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

HERE = Path(__file__).parent
TIMEOUT = 300.0
STEP = 3.0  # seconds: the deadline of a step in monitor_peers.py
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
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.size, self.processes, self.begun = size, processes, time.monotonic()
        command = [sys.executable, "-I", "-S", str(HERE / "monitor_peers.py")]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.heard: list[dict[str, Any]] = []
        given = {"port": port, "size": size, "token": secrets.token_hex(16)}
        self.tell(given | {"processes": [0, processes], "simulated": [processes, size]})

    def tell(self, message: dict[str, Any]) -> None:
        """A command to the ranks that are sockets."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Hears what all say until it is enough."""
        assert self.process.stdout is not None
        while not done():
            line = self.process.stdout.readline()
            if line:
                self.heard.append(json.loads(line))
            if not line or (what == "met" and self.heard[-1]["kind"] == "end"):
                raise SystemExit(f"monitors: all ranks must wait for a fault; they ended first: {self.heard[-1:]}.")

    def of(self, kind: str) -> list[dict[str, Any]]:
        """What was said of one kind."""
        return [each for each in self.heard if each["kind"] == kind]

    def last(self, kind: str, simulated: str) -> float:
        """When the last rank said it."""
        self.wait(lambda: len(self.of(kind)) >= self.processes and bool(self.of(simulated)), kind)
        return max(each["at"] for each in self.of(kind) + self.of(simulated))

    def plant(self, fault: str) -> None:
        """Has rank 1 die or hang."""
        for each in self.of("met"):
            if each["rank"] == 1 and fault == "dies":
                os.kill(each["process"], signal.SIGKILL)
            elif fault == "hangs":
                os.kill(each["process"], signal.SIGUSR1 if each["rank"] == 1 else signal.SIGUSR2)
        if fault == "hangs" or self.processes < 2:
            self.tell({fault: 1})

    def told(self, fault: str) -> list[dict[str, Any]]:
        """What all ranks but one that died say of it."""
        real = self.processes - (fault == "dies" and self.processes > 1)
        sockets = self.size - self.processes - (fault == "dies" and self.processes == 1)
        self.wait(lambda: len(self.of("end")) >= real, "end")
        self.wait(lambda: max((each["ranks"] for each in self.of("over")), default=0) >= sockets, "over")
        return [each for each in self.of("end") if each["rank"]] + self.of("over")  # process 0 ends 1.5 s after them

    def counts(self) -> dict[str, Any]:
        """What the sockets have sent and heard so far."""
        before = len(self.of("counts"))
        self.tell({"counts": True})
        self.wait(lambda: len(self.of("counts")) > before, "counts")
        return self.of("counts")[-1]

    def end(self) -> None:
        """Ends all of it."""
        for each in self.of("met"):
            for process in (each["process"], each["monitor"]):
                with contextlib.suppress(OSError):
                    os.kill(process, signal.SIGKILL)
        self.process.kill()
        self.process.wait()


def memory(process: int) -> float:
    """Bytes that a process holds and shares with no other one."""
    rows = [line.split() for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()]
    return sum(1024.0 * int(row[1]) for row in rows if row[0] in ("Private_Clean:", "Private_Dirty:"))


def cpu_seconds(process: int) -> float:
    """CPU time that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measured(size: int, processes: int, seconds: float, empty: float) -> dict[str, Any]:
    """One row: `empty` is what a monitor holds that knows one rank."""
    row: dict[str, Any] = {"n": size}
    for fault in ("dies", "hangs"):
        peers = Peers(size, processes)
        try:
            met = peers.last("met", "welcome")
            time.sleep(1.5)
            if fault == "dies":
                monitors = {each["rank"]: each["monitor"] for each in peers.of("met")}
                before, used = peers.counts(), cpu_seconds(monitors[0])
                time.sleep(seconds)
                after, used = peers.counts(), cpu_seconds(monitors[0]) - used
                window = after["at"] - before["at"]
                scale = (size - 1) / (size - processes) / window
                row |= {"met": met - peers.begun, "cpu": used / window}
                row["messages"] = scale * sum(after[k] - before[k] for k in ("sent", "heard"))
                row["kb"] = scale * sum(after[k] - before[k] for k in ("sent_bytes", "heard_bytes")) / 1e3
                held = memory(monitors[0])
                others = [memory(monitors[rank]) / 1e6 for rank in range(1, processes)]
                row |= {"held_mb": held / 1e6, "held_kb_rank": (held - empty) / 1e3 / (size - 1)}
                row["other_mb"] = statistics.median(others) if others else math.nan
            planted = time.monotonic() + (STEP if fault == "hangs" else 0.0)
            peers.plant(fault)
            told = peers.told(fault)
            row[fault] = max((each["at"] for each in told), default=math.nan) - planted
            row[f"{fault}_text"] = peers.of("end")[0]["text"][:200]
        finally:
            peers.end()
    return row


def exponent(rows: Sequence[dict[str, Any]], name: str) -> float:
    """The exponent e of the column ~ n^e, by least squares of the logarithms."""
    points = [(math.log(row["n"]), math.log(row[name])) for row in rows if row[name] > 0]
    if len(points) < 2:
        return math.nan
    x, y = (statistics.mean(values) for values in zip(*points, strict=True))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as markdown, the exponents last."""

    def figure(value: float) -> str:
        return "" if math.isnan(value) else f"{value:.{2 if value < 1 else 1 if value < 100 else 0}f}"

    lines = [f"| n | {' | '.join(COLUMNS.values())} |", "|--:" * (len(COLUMNS) + 1) + "|"]
    lines += [f"| {row['n']:,} | {' | '.join(figure(row[name]) for name in COLUMNS)} |" for row in rows]
    return "\n".join([*lines, f"| exponent | {' | '.join(figure(exponent(rows, name)) for name in COLUMNS)} |"])


def launched(processes: int) -> None:
    """A job of jax with a kill and a restart, by `shardkit launch`."""
    begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    killed, told, connected, goes_on = math.nan, [], [], math.nan
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program.py"
        program.write_text(PROGRAM)
        command = [
            sys.executable,
            "-m",
            "shardkit",
            "launch",
            "-n",
            str(processes),
            "--devices",
            "1",
            "--restarts",
            "1",
        ]
        job = subprocess.Popen(
            [*command, "--", str(program)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert job.stdout is not None
        for line in job.stdout:
            now = time.monotonic()
            if "connected" in line:
                connected.append(now)
            elif "killed at" in line:
                killed = float(line.split()[-1])
            elif "guard: process 1 died" in line:
                told.append(now)
            elif "loss" in line and len(connected) == 2 and math.isnan(goes_on):
                goes_on = now
        code = job.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(
        f"{processes} processes of jax: connected after {connected[0] - begun:.0f} s; killed one, and {len(told)} said "
        f"so within {max(told) - killed:.1f} s; the next loss {goes_on - killed:.0f} s after it; exit code {code}, "
        f"{time.monotonic() - begun:.0f} s and {used:.0f} s of CPU time in all, load {os.getloadavg()[0]:.0f}"
    )


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
        launched(options.launch)
        return 0
    if options.quick:
        options.real, options.simulated, options.seconds = [3], [8, 40], 0.5
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if most < max(options.simulated, default=0) + 100:
        raise SystemExit(
            f"monitors: {max(options.simulated)} ranks need as many open files; the limit is {most}. Raise "
            "it with ulimit -n, or pass --simulated 100 1000."
        )
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}, Python {sys.version.split()[0]}")
    empty = measured(2, 1, 0.2, 0.0)["held_mb"] * 1e6
    print(f"a monitor that knows one other rank: {empty / 1e6:.1f} MB")
    for kind, sizes in (("real", options.real), ("simulated", options.simulated)):
        rows = []
        for size in sizes:
            rows.append(measured(size, size - 1 if kind == "real" else 1, options.seconds, empty))
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps({"kind": kind, **rows[-1]}) + "\n")
        print(f"\n{kind}\n\n{table(rows)}" if rows else "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
