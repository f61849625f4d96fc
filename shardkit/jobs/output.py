"""Passes on the output of processes, line by line, with the index of the process as a prefix."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import BinaryIO, TextIO

from shardkit.runtime.channel.place import name_processes
from shardkit.runtime.cluster.preemption import PREEMPTED

# Of each process, without news: what gloo prints when jax connects CPU devices. The ranks of one process print at once,
# so that a line may have parts of several.
_PARTS = rb"\[Gloo\] Rank|is connected to|peer ranks\.|Expected number of connected peer ranks is ?:"
_CHATTER = re.compile(rb"(?=.*(?:%b))(?:%b|[\d\s]++)*+" % (_PARTS, _PARTS))

_LINE = re.compile(rb"[^\r\n]*(?:\r?\n|\r)")  # a progress bar ends its lines in \r alone

_SILENCE = 0.5  # seconds without output after which a pipe is left that a process outside the groups holds open

# The guard names the process at fault; which of the processes that it ends exits first is a matter of milliseconds.
_BLAMES = re.compile(rb"shardkit guard: process(?:es)? (\d+)\b")


@dataclass
class _Pipe:
    """The destinations of one pipe, and the incomplete last line."""

    prefix: bytes
    stream: TextIO
    file: BinaryIO | None
    blamed: list[int]
    incomplete: bytearray = field(default_factory=bytearray)

    def take(self, data: bytes) -> None:
        """Passes on the lines that `data` completes; empty data is the end, and completes the last line.

        Worked example, of process 1: `step 1\\nst` prints `[1] step 1`, and `ep 2\\n` after it `[1] step 2`.
        """
        self._copy_to_file(data)
        is_end = not data
        if is_end and self.incomplete:
            data = b"\n"
        self.incomplete += data
        if b"\n" not in data and b"\r" not in data:
            return
        end = 1 + max(self.incomplete.rfind(b"\n"), self.incomplete.rfind(b"\r"))
        lines = _LINE.findall(self.incomplete[:end])  # beyond, each byte would be tried as the start of a line
        del self.incomplete[:end]
        shown = []
        for line in lines:
            blame = _BLAMES.match(line)
            if blame is not None:
                self.blamed.append(int(blame[1]))
            if not _CHATTER.fullmatch(line):
                shown.append(self.prefix + line)
        write(self.stream, b"".join(shown))

    def _copy_to_file(self, data: bytes) -> None:
        if self.file is None:
            return
        try:
            self.file.write(data)
        except OSError as error:
            say(f"stopped writing {self.file.name} ({error.strerror})")
            self.file = None


@contextmanager
def pass_on(
    children: Sequence[subprocess.Popen[bytes]], files: Sequence[BinaryIO], blamed: list[int]
) -> Iterator[threading.Thread]:
    """Reads all pipes in one thread, so that lines are never mixed; at exit, until they are empty.

    `files` has that of the standard output and that of the standard error of each process, or none. What a line of the
    guard names is appended to `blamed`.
    """
    pipes: dict[int, _Pipe] = {}
    for rank, child in enumerate(children):
        output_file = None
        error_file = None
        if files:
            output_file = files[2 * rank]
            error_file = files[2 * rank + 1]
        prefix = f"[{rank}] ".encode()
        assert child.stdout is not None and child.stderr is not None
        pipes[child.stdout.fileno()] = _Pipe(prefix, sys.stdout, output_file, blamed)
        pipes[child.stderr.fileno()] = _Pipe(prefix, sys.stderr, error_file, blamed)
    ended = threading.Event()
    reader = threading.Thread(target=_read, args=(pipes, ended), daemon=True)
    reader.start()
    try:
        yield reader
    finally:
        ended.set()
        reader.join()


def _read(pipes: Mapping[int, _Pipe], ended: threading.Event) -> None:
    """Reads all pipes to their ends, or once the processes have ended until nothing comes for a while."""
    with selectors.DefaultSelector() as selector:
        for number in pipes:
            selector.register(number, selectors.EVENT_READ)
        while selector.get_map():
            had_ended = ended.is_set()
            ready = selector.select(_SILENCE)
            if had_ended and not ready:
                return
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                pipes[key.fd].take(data)
                if not data:
                    selector.unregister(key.fd)


def say(text: str) -> None:
    """Prints a line of the launcher."""
    write(sys.stderr, f"shardkit launch: {text}\n".encode())


def write(stream: TextIO, data: bytes) -> None:
    """Writes bytes unbuffered; a closed reader (`| head`) or a full disk does not end the job."""
    with contextlib.suppress(OSError):
        stream.flush()
        try:
            number = stream.fileno()
        except (OSError, AttributeError):  # a notebook's stream accepts text only
            stream.write(data.decode(errors="replace"))
            stream.flush()
            return
        unwritten = memoryview(data)  # not through the stream, whose buffer would keep what it could not write
        while unwritten:
            count = os.write(number, unwritten)
            unwritten = unwritten[count:]


def describe_ends(first: int, codes: Sequence[int], received: signal.Signals | None, killed: Collection[int]) -> str:
    """How the processes of a job ended, `first` before the others; those in `killed` by the launcher."""
    if set(codes) == {PREEMPTED}:
        return f"all processes were preempted, and exited with code {PREEMPTED}"
    prefix = ""
    if received is not None:
        prefix = f"after {received.name} "
    if first in killed:
        return prefix + _describe_killed(codes, killed)
    ends = {}
    for rank, code in enumerate(codes):
        ends[rank] = _describe_end(code)
        if rank in killed:
            ends[rank] += " of the launcher"
    end = ends.pop(first)
    if codes[first] >= 0:
        end = f"exit code {end}"
    return f"{prefix}process {first} failed first, {end}" + _describe_others(ends)


def _describe_killed(codes: Sequence[int], killed: Collection[int]) -> str:
    """Which processes the launcher killed, and how the others ended."""
    ranks = []
    ends = {}
    for rank, code in enumerate(codes):
        if rank in killed:
            ranks.append(rank)
        else:
            ends[rank] = _describe_end(code)
    return f"the launcher killed {name_processes(ranks)}, which did not end in time" + _describe_others(ends)


def _describe_others(ends: Mapping[int, str]) -> str:
    """The ends of the other processes in brackets, as ` (others: 0: 0, 2: killed by SIGTERM)`; empty without any."""
    if not ends:
        return ""
    texts = [f"{rank}: {end}" for rank, end in ends.items()]
    return f" (others: {', '.join(texts)})"


def _describe_end(code: int) -> str:
    if code >= 0:
        return str(code)
    names = {number.value: number.name for number in signal.Signals}  # of real-time signals there are none
    name = names.get(-code, f"signal {-code}")
    return f"killed by {name}"
