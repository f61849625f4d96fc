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
    rest: bytearray = field(default_factory=bytearray)

    def take(self, data: bytes) -> None:
        """Passes on the lines that `data` completes; empty data is the end, and completes the last line."""
        if self.file is not None:
            try:
                self.file.write(data)
            except OSError as error:
                say(f"stopped writing {self.file.name} ({error.strerror})")
                self.file = None
        more = data or (b"\n" if self.rest else b"")
        self.rest += more
        if b"\n" in more or b"\r" in more:
            end = 1 + max(self.rest.rfind(b"\n"), self.rest.rfind(b"\r"))
            lines = _LINE.findall(self.rest[:end])  # beyond, each byte would be tried as the start of a line
            del self.rest[:end]
            self.blamed += [int(found[1]) for line in lines if (found := _BLAMES.match(line))]
            shown = [line for line in lines if not _CHATTER.fullmatch(line)]
            write(self.stream, b"".join(self.prefix + line for line in shown))


@contextmanager
def passing_on(
    children: Sequence[subprocess.Popen[bytes]], files: Sequence[BinaryIO], blamed: list[int]
) -> Iterator[threading.Thread]:
    """Reads all pipes in one thread, so that lines are never mixed; at exit, until they are empty.

    What a line of the guard names is appended to `blamed`.
    """
    pipes: dict[int, _Pipe] = {}
    for index, child in enumerate(children):
        for place, (pipe, stream) in enumerate(((child.stdout, sys.stdout), (child.stderr, sys.stderr))):
            assert pipe is not None
            file = files[2 * index + place] if files else None
            pipes[pipe.fileno()] = _Pipe(f"[{index}] ".encode(), stream, file, blamed)
    over = threading.Event()
    reader = threading.Thread(target=_read, args=(pipes, over), daemon=True)
    reader.start()
    try:
        yield reader
    finally:
        over.set()
        reader.join()


def _read(pipes: Mapping[int, _Pipe], over: threading.Event) -> None:
    with selectors.DefaultSelector() as selector:
        for number in pipes:
            selector.register(number, selectors.EVENT_READ)
        while selector.get_map():
            was_over = over.is_set()
            ready = selector.select(_SILENCE)
            if was_over and not ready:
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
        rest = memoryview(data)  # not through the stream, whose buffer would keep what it could not write
        while rest:
            rest = rest[os.write(number, rest) :]


def summary(first: int, codes: Sequence[int], received: signal.Signals | None, killed: Collection[int]) -> str:
    """How the processes of a job ended, `first` before the others; those in `killed` by the launcher."""
    if set(codes) == {PREEMPTED}:
        return f"all processes were preempted, and exited with code {PREEMPTED}"
    after = f"after {received.name} " if received else ""
    if first in killed:
        names = name_processes([rank for rank in range(len(codes)) if rank in killed])
        others = ", ".join(f"{rank}: {_end(code)}" for rank, code in enumerate(codes) if rank not in killed)
        said = f"{after}the launcher killed {names}, which did not end in time"
        return said + (f" (others: {others})" if others else "")
    ends = [f"{_end(code)} of the launcher" if rank in killed else _end(code) for rank, code in enumerate(codes)]
    others = ", ".join(f"{rank}: {end}" for rank, end in enumerate(ends) if rank != first)
    end = ends[first] if codes[first] < 0 else f"exit code {codes[first]}"
    return f"{after}process {first} failed first, {end}" + (f" (others: {others})" if others else "")


def _end(code: int) -> str:
    if code >= 0:
        return str(code)
    names = {number.value: number.name for number in signal.Signals}
    return f"killed by {names.get(-code, f'signal {-code}')}"
