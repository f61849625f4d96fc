"""A process's place in its job: who it is, where the processes meet, and what that takes of the machine."""

from __future__ import annotations

import contextlib
import ipaddress
import resource
import socket
from collections.abc import Iterator, Sequence
from typing import NamedTuple

TOKEN = "SHARDKIT_JOB_TOKEN"  # the environment variable that holds the token
UNKNOWN = 64  # connections to process 0 without an introduction, besides one per process
_OTHER_FILES = 16  # what else it has open: pipes, the listener, libraries
_NAMED = 8  # processes, or runs of processes, that a sentence names


class Place(NamedTuple):
    """A process's place in its job: the coordinator, the number of processes, and which of them this is."""

    host: str  # the coordinator's host name or address
    port: int  # its port
    rank: int  # this process, from 0
    size: int  # number of processes
    timeout: float  # seconds to wait for all
    cpu: bool  # whether the devices are CPUs, whose collectives (gloo) use the address of the host name
    token: str = ""  # the secret that the processes of a job share; empty without one

    @property
    def address(self) -> str:
        """host:port, or [address]:port of IPv6."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def name_processes(ranks: Sequence[int]) -> str:
    """`process 1` or `processes 1, 3`; of many, runs such as `0 to 3`, the first eight of them."""
    if len(ranks) == 1:
        return f"process {ranks[0]}"
    if len(ranks) <= _NAMED:
        return f"processes {', '.join(map(str, ranks))}"
    runs = _find_runs(ranks)
    names = []
    for first, last in runs[:_NAMED]:
        name = str(first)
        if last > first:
            name = f"{first} to {last}"
        names.append(name)
    text = f"processes {', '.join(names)}"
    unnamed = 0
    for first, last in runs[_NAMED:]:
        unnamed += last - first + 1
    if unnamed:
        text += f" and {unnamed} more"
    return text


def _find_runs(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """The first and the last rank of each run of consecutive ranks: of 5, 7, 8, 9 these are (5, 5) and (7, 9)."""
    runs: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            first, _ = runs[-1]
            runs[-1] = (first, rank)
        else:
            runs.append((rank, rank))
    return runs


def allow_files(size: int) -> str:
    """Raises this process's limit of open files to a connection per process of the job; returns the error, or "".

    Jobs of more than about a thousand processes need it: that is the usual limit, though a process may raise it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return ""
    least = size + _OTHER_FILES
    limit = least + UNKNOWN
    if soft < limit:
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            soft = limit
    if soft >= least:
        return ""
    return (
        f"initialize: process 0 must be able to open {least} files, one for each of {size} processes and "
        f"{_OTHER_FILES} of its own; its limit is {soft}. Raise the hard limit: ulimit -Hn {least}, or LimitNOFILE."
    )


def bind_address(host: str) -> str:
    """The address of this machine that a host name resolves to; empty, for all addresses, if there is none.

    A machine's name may resolve to loopback on the machine itself and to its address elsewhere, and a host name may
    resolve to the address of a service in front of the machine.
    """
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        is_loopback = ipaddress.ip_address(address.partition("%")[0]).is_loopback
        if is_loopback and host not in ("localhost", address):
            return ""
        family = socket.AF_INET
        if ":" in address:
            family = socket.AF_INET6
        with socket.socket(family) as probe:
            probe.bind((address, 0))  # fails where the address is another machine's
    except (OSError, ValueError):
        return ""
    return address


@contextlib.contextmanager
def free_port(address: str = "127.0.0.1") -> Iterator[int]:
    """A port that the system gives to no other program meanwhile, though process 0 may listen on it."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((address, 0))
        yield int(reserved.getsockname()[1])
