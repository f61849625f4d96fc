"""A wall clock that jumps, for jobs under `shardkit chaos`; and that nothing of the runtime waits by it."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardkit.runtime.cluster import sockets, wall_clock


@pytest.mark.check
def test_the_clock_of_a_process_jumps_and_its_monotonic_clock_does_not(tmp_path):
    """It alone finds a clock that is read once, or that stops `time.sleep`."""
    if wall_clock.compiler() is None:
        pytest.skip("no C compiler")
    environ = wall_clock.make_clock(tmp_path / "clock")
    code = "import time\nwhile input(): time.sleep(0.01); print(time.time(), time.monotonic(), flush=True)"
    words, pipe = [sys.executable, "-I", "-S", "-c", code], subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, env=os.environ | environ) as process:
        found = []
        for seconds in (0, -86_400, 3_600):
            wall_clock.set_clock(tmp_path / "clock", seconds)
            process.stdin.write("go\n")
            process.stdin.flush()
            wall, monotonic = map(float, process.stdout.readline().split())
            found.append((round((wall - time.time()) / 60), round((monotonic - time.monotonic()) / 60)))
        process.stdin.write("\n")
    assert found == [(0, 0), (-1440, 0), (60, 0)]


@pytest.mark.check
def test_a_wait_until_a_time_is_as_long_by_a_clock_that_jumped(tmp_path):
    """It alone finds waits that end at once, again and again, because the kernel's own clock has not jumped."""
    if wall_clock.compiler() is None:
        pytest.skip("no C compiler")
    environ = wall_clock.make_clock(tmp_path / "clock")
    code = """
import ctypes, time
libc, half, semaphore = ctypes.CDLL(None), time.time() + 0.5, ctypes.create_string_buffer(64)
libc.sem_init(semaphore, 0, 0)
before = time.monotonic()
libc.sem_timedwait(semaphore, (ctypes.c_long * 2)(int(half), int(half % 1 * 1e9)))
print(time.monotonic() - before)
"""
    for seconds in (-86_400, 0):
        wall_clock.set_clock(tmp_path / "clock", seconds)
        words = [sys.executable, "-I", "-S", "-c", code]
        done = subprocess.run(words, env=os.environ | environ, capture_output=True, text=True, check=True)
        assert 0.3 < float(done.stdout) < 5


@pytest.mark.check
def test_the_runtime_does_not_wait_by_the_wall_clock():
    """It alone finds a deadline that passes when a host's clock is set."""
    files = Path(sockets.__file__).parents[1].rglob("*.py")
    reads = re.compile(r"time\.time(_ns)?\(|datetime\.(now|today)|import datetime|from time import .*\btime\b")
    found = {file.name for file in files if reads.search(file.read_text())}
    assert found == {"recorder.py", "snapshots.py"}  # the date of a record; the name of a run
