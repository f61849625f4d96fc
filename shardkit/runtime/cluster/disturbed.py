"""A run of a job that `shardkit chaos` disturbs: its launcher, and what it has written since it was last looked at."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from shardkit.runtime.cluster.memory import JOB, delete_memory, hashed
from shardkit.runtime.monitor.hello import TOKEN

RUN = "{run}"  # in the words of a command: the folder of this run
_RESTART = "shardkit launch: restart "
_GUARD = re.compile(r"shardkit guard: (.*)")


class Run:
    """A run of the job, in a folder of its own.

    Attributes:
        latest: the loss of each step, as last written.
        restarts: how often the launcher has decided to start again.
        said: what the guard has said since the attribute was last emptied.
    """

    def __init__(self, command: Sequence[str], folder: Path, processes: int, devices: int | None, losses: str):
        self.folder, self.log = folder, folder / "output"
        self.words = [word.replace(RUN, str(folder)) for word in command]
        self.losses = Path(losses.replace(RUN, str(folder)))
        self.options = ["-n", str(processes)] + ([] if devices is None else ["--devices", str(devices)])
        self.token = secrets.token_hex(32)
        self.latest: dict[int, float] = {}
        self.restarts, self.said = 0, list[str]()
        self._output, self._rows = _Tail(self.log), _Tail(self.losses)

    @contextmanager
    def started(self, *, restarts: int, environ: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
        """The launcher, which is ended at exit, with all that it started."""
        self.folder.mkdir(parents=True)
        options = [*self.options, *(["--restarts", str(restarts)] if restarts else [])]
        words = [sys.executable, "-m", "shardkit", "launch", *options, "--", *self.words]
        with open(self.log, "wb") as log:
            name = hashed(self.token)  # of its own: a run must not find the snapshots of another
            environ = {**os.environ, TOKEN: self.token, JOB: name, **environ}
            job = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ)
        try:
            yield job
        finally:
            job.kill()
            job.wait()
            delete_memory(name)

    def new(self) -> dict[int, float]:
        """The losses that were written since the last call, by step."""
        found = _losses(self._rows.new())
        self.latest |= found
        return found

    def listen(self) -> int:
        """Reads what the launcher and the guard have said since; returns the number of restarts."""
        for line in self._output.new():
            self.restarts += line.startswith(_RESTART)
            self.said += _GUARD.findall(line)
        return self.restarts

    def last_line(self) -> str:
        """The last line of the output."""
        return self.log.read_text(errors="replace").strip().rpartition("\n")[2]


class _Tail:
    """A file that grows: its complete lines since the last look."""

    def __init__(self, path: Path):
        self._path, self._read = path, 0

    def new(self) -> list[str]:
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            if file.seek(0, os.SEEK_END) < self._read:  # it was begun anew
                self._read = 0
            file.seek(self._read)
            data = file.read()
        data = data[: data.rfind(b"\n") + 1]
        self._read += len(data)
        return data.decode(errors="replace").splitlines()


def losses_in(path: Path) -> dict[int, float]:
    """The losses of a file of JSON lines, by step; the last one counts."""
    return _losses(_Tail(path).new())


def _losses(lines: Sequence[str]) -> dict[int, float]:
    found = {}
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:  # the process was ended while it wrote it
            continue
        if isinstance(row, dict) and {"step", "loss"} <= row.keys():
            found[int(row["step"])] = float(row["loss"])
    return found
