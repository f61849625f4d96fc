"""TCP connections of other processes, found in /proc and ended from outside, as a cut link would; on Linux."""

from __future__ import annotations

import ctypes
import os
import socket
from pathlib import Path

_GET = 438  # pidfd_getfd, the same number on all processors
_ESTABLISHED = "01"


def connections(process: int) -> list[int]:
    """The file descriptors of a process that are established TCP connections; none if it has ended."""
    try:
        rows = [row.split() for name in ("tcp", "tcp6") for row in _table(process, name)]
        there = {f"socket:[{row[9]}]" for row in rows if row[3] == _ESTABLISHED}
        return [int(each.name) for each in Path(f"/proc/{process}/fd").iterdir() if _target(each) in there]
    except OSError:
        return []


def cut(process: int, descriptor: int) -> None:
    """Ends a connection of another process in both directions.

    Raises:
        OSError: the system does not allow it, or the process or its connection has ended.
    """
    taken = _take(process, descriptor)
    with socket.socket(fileno=taken) as link:
        link.shutdown(socket.SHUT_RDWR)


def check_cut() -> None:
    """Refuses a system on which no process can take a connection of another."""
    there, here = socket.socketpair()
    with there, here:
        try:
            os.close(_take(os.getpid(), there.fileno()))
        except OSError as error:
            raise ValueError(
                "chaos: link needs Linux 5.6 and the right to take a connection of another process; got "
                f"{error.strerror!r}. Leave link out of kinds (--kinds)."
            ) from None


def _take(process: int, descriptor: int) -> int:
    """A descriptor of this process for what a descriptor of another one is."""
    whose = os.pidfd_open(process)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        taken = int(libc.syscall(_GET, whose, descriptor, 0))
        if taken < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return taken
    finally:
        os.close(whose)


def _table(process: int, name: str) -> list[str]:
    path = Path(f"/proc/{process}/net/{name}")
    return path.read_text().splitlines()[1:] if path.exists() else []


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # closed meanwhile
        return ""
