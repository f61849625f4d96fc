"""Jobs of real processes on this machine, for tests: started together, ended for certain, with what each printed."""

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardkit.runtime.channel import place
from support.compiling import QUICK

WORKERS = Path(__file__).parent / "workers"
PATH = os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parents[1])])  # the package and the tests
_PORTS = contextlib.ExitStack()
atexit.register(_PORTS.close)


@dataclass
class Ended:
    """One process of a job: its exit code (-9 for SIGKILL), its output, and when it ended on the machine's clock."""

    code: int
    output: str
    at: float

    @property
    def last(self) -> str:
        """The last line of its output."""
        return (self.output.strip().splitlines() or [""])[-1]


def free_port() -> int:
    """A port that nobody else is given while this process runs, though whoever names it may listen."""
    return _PORTS.enter_context(place.free_port())


class Job:
    """Processes that run; `wait` for their end."""

    def __init__(
        self, command: Sequence[str], *, processes: int, devices: int, each: Callable[[int], Mapping[str, Any]]
    ):
        port = free_port()
        plain = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
        plain |= {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
            "NPROC": "16",
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": str(processes),
            "PYTHONPATH": PATH,
            "XLA_FLAGS": QUICK,
        }
        self.running = []
        for rank in range(processes):
            given = plain | {"JAX_PROCESS_ID": str(rank)} | dict(each(rank))
            environ = {name: value for name, value in given.items() if value is not None}
            options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "env": environ}
            self.running.append(subprocess.Popen([sys.executable, *command], start_new_session=True, **options))

    def wait(self, timeout: float) -> list[Ended]:
        """What became of each; fails when one of them, or anything it started, is left after `timeout` seconds."""
        until, ended = time.monotonic() + timeout, []
        ends: dict[int, float] = {}
        try:
            while len(ends) < len(self.running):
                for rank, process in enumerate(self.running):
                    if rank not in ends and process.poll() is not None:
                        ends[rank] = time.monotonic()
                assert time.monotonic() < until, f"only {sorted(ends)} of {len(self.running)} ended in {timeout:g} s"
                time.sleep(0.01)
            for rank, process in enumerate(self.running):  # to the end of its output: its monitor has ended as well
                output, _ = process.communicate(timeout=max(1.0, until - time.monotonic()))
                ended.append(Ended(process.returncode, _readable(output), ends[rank]))
            return ended
        finally:
            for process in self.running:
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)


def run(
    worker: str, *words: Any, processes: int, devices: int = 1, timeout: float = 300.0, each: Any = None
) -> list[Ended]:
    """Runs a script of `tests/support/workers` in many processes; `each(rank)` changes its variables, None unsets."""
    command = [str(WORKERS / worker), *map(str, words)]
    return Job(command, processes=processes, devices=devices, each=each or (lambda rank: {})).wait(timeout)


def _readable(output: bytes) -> str:
    lines = output.decode(errors="replace").splitlines()
    return "\n".join(line for line in lines if "[Gloo]" not in line and "connected peer ranks" not in line)
