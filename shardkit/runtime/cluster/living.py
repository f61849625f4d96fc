"""The processes of a job on this machine, found by a variable of their environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class Living(NamedTuple):
    """A process of a job.

    Attributes:
        id: its process id.
        parent: that of its parent.
        rank: its index in the job, or that of the process that started it; None outside of them.
    """

    id: int
    parent: int
    rank: int | None


def living(name: str, value: str) -> list[Living]:
    """The processes with this value of a variable, but not those that have ended and were not waited for; on Linux."""
    found, wanted = [], f"{name}={value}".encode()
    for path in Path("/proc").iterdir():
        if not path.name.isdigit() or int(path.name) == os.getpid():
            continue
        try:
            environ = (path / "environ").read_bytes().split(b"\0")
            state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has ended, or is another user's
            continue
        if wanted in environ and state != "Z":
            rank = next((int(each[5:]) for each in environ if each.startswith(b"RANK=")), None)
            found.append(Living(int(path.name), int(parent), rank))
    return found
