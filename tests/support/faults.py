"""Faults planted in a job from outside of it: signals to its processes, files that change, connections that end."""

import contextlib
import ctypes
import os
import resource
import signal
import socket
from pathlib import Path

_TAKE_DESCRIPTOR = 438  # the system call pidfd_getfd, of Linux 5.6
_SIGNALS = {"stop": signal.SIGSTOP, "terminate": signal.SIGTERM}
KINDS = ("kill", "stop", "terminate", "monitor", "damage", "disk", "link")


def processes(launcher):
    """The process ids of a launcher's job by rank."""
    found = {}
    for child in _children(launcher):
        with contextlib.suppress(OSError):
            for each in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                if each.startswith(b"RANK="):
                    found[int(each[5:])] = child
    return found


def plant(kind, launcher, rank, saved):
    """Plants a fault in the process of that rank; `saved` is the directory of the job's checkpoints."""
    process = processes(launcher)[rank]
    if kind == "damage":
        for path in (saved / str(max(steps(saved)))).rglob("*"):
            if path.is_file():
                os.truncate(path, path.stat().st_size // 2)
    if kind == "disk":  # no byte of a file can be written
        _, hard = resource.prlimit(process, resource.RLIMIT_FSIZE)
        resource.prlimit(process, resource.RLIMIT_FSIZE, (0, hard))
    elif kind == "link":
        first, *others = _connections(process)
        _cut(process, first)
        with contextlib.suppress(OSError):  # the process may have ended
            for each in others:
                _cut(process, each)
    else:
        (monitor,) = _children(process) if kind == "monitor" else [process]
        os.kill(monitor, _SIGNALS.get(kind, signal.SIGKILL))


def steps(saved):
    """The steps of the finished checkpoints."""
    return sorted(int(path.name) for path in saved.iterdir() if path.name.isdigit()) if saved.is_dir() else []


def _children(process):
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has ended: the others have children still
                found += map(int, (task / "children").read_text().split())
    return found


def _connections(process):
    """The descriptors of its established TCP connections."""
    rows = [
        row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/{process}/net/{name}").read_text().splitlines()
    ]
    there = {f"socket:[{row[9]}]" for row in rows if row[3] == "01"}
    return [int(each.name) for each in Path(f"/proc/{process}/fd").iterdir() if os.readlink(each) in there]


def _cut(process, descriptor):
    """Ends a connection of another process in both directions."""
    whose = os.pidfd_open(process)
    taken = ctypes.CDLL(None, use_errno=True).syscall(_TAKE_DESCRIPTOR, whose, descriptor, 0)
    os.close(whose)
    if taken < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with socket.socket(fileno=taken) as link:
        link.shutdown(socket.SHUT_RDWR)
