"""Two hosts on this machine: network namespaces with a throttled link between them, and one job of two processes.

What is made is removed again, on an error, Ctrl-C and SIGTERM too; what a killed run left, by the next one.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from shardkit import runtime

PROGRAMS = ("ip", "tc", "unshare")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
_PORT = 29519
# What a queue lets through at once after a pause: little beside a message, and enough for a processor that comes late.
_BURST, _PAUSE = 16384, 1e-3  # bytes, or seconds of the rate
_LIMIT = "4mb"  # what waits in the queue; TCP sends no more than that
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_OWN_HOST = 'mount --bind "$0/hosts" /etc/hosts && hostname "$1" && shift && exec "$@"'


class Pair(NamedTuple):
    """The names of what is made: two namespaces, and the two ends of the link between them."""

    spaces: tuple[str, str]
    ends: tuple[str, str]


def pair_of(process: int) -> Pair:
    """The names for a run by this process."""
    a, b = (f"shardkit-links-{process}-{letter}" for letter in "ab")
    return Pair((a, b), (f"skl{process}a", f"skl{process}b"))


def bits(rate: str) -> float:
    """Bits per second of a rate as tc writes it.

    Raises:
        ValueError: anything but a number and kbit, mbit or gbit.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", str(rate).lower())
    if not found or not float(found[1]):
        raise ValueError(
            f"bench links: the rate must be a number and kbit, mbit or gbit; got {rate!r}. Write for example 100mbit."
        )
    return float(found[1]) * _UNITS[found[2]]


def burst(rate: str) -> int:
    """The bytes that leave at once after a pause, before the queue slows what follows down to the rate."""
    return max(_BURST, round(bits(rate) / 8 * _PAUSE))


def commands(pair: Pair, rate: str) -> list[list[str]]:
    """The commands that make the two namespaces and their link, each end throttled."""
    (a, b), ends = pair
    words = [f"ip netns add {a}", f"ip netns add {b}"]
    words += [f"ip link add {ends[0]} netns {a} type veth peer name {ends[1]} netns {b}"]
    for space, end, address in zip(pair.spaces, ends, ADDRESSES, strict=True):
        words += [f"ip -n {space} addr add {address}/24 dev {end}"]
        words += [f"ip -n {space} link set {each} up" for each in (end, "lo")]
        words += [f"tc -n {space} qdisc add dev {end} root tbf rate {rate} burst {burst(rate)}b limit {_LIMIT}"]
    return [line.split() for line in words]


def removal(pair: Pair) -> list[list[str]]:
    """The commands that remove them; a link ends with the namespaces that hold it."""
    return [["ip", "netns", "delete", space] for space in pair.spaces]


def missing() -> str:
    """What this process lacks to make namespaces, in words; "" if nothing."""
    lacks = [f"the command {name}" for name in PROGRAMS if not shutil.which(name)]
    user = os.geteuid() if hasattr(os, "geteuid") else -1
    return ", ".join([f"root (this is user {user})"] * (user != 0) + lacks)


@contextlib.contextmanager
def made(rate: str) -> Iterator[Pair]:
    """Two namespaces whose link sends `rate` each way, until the end of the block.

    Raises:
        RuntimeError: without root or the commands, or where the system refuses one of them.
    """
    if lacks := missing():
        raise RuntimeError(
            f"bench links: it makes network namespaces, which needs root and the commands {', '.join(PROGRAMS)}; "
            f"missing: {lacks}. Run it as root with iproute2 and util-linux installed."
        )
    _remove_leftovers()
    pair = pair_of(os.getpid())
    with _terminated_as_interrupt():
        try:
            for command in commands(pair, rate):
                _run(command)
            yield pair
        finally:
            for command in removal(pair):
                subprocess.run(command, check=False, capture_output=True)


def run(pair: Pair, module: str, folder: Path, *, devices: int) -> None:
    """Runs `python -m module FOLDER` as one process on each host, joined by jax's variables, until both have ended.

    Their output goes to `FOLDER/0.log` and `FOLDER/1.log`, their standard files are otherwise closed.

    Raises:
        RuntimeError: a process failed, with the last of its errors, or a signal has ended them.
        KeyboardInterrupt: Ctrl-C.
    """
    lines = ["127.0.0.1 localhost", *(f"{address} host{i}" for i, address in enumerate(ADDRESSES))]
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    script = (
        'folder="$0"; i="$JAX_PROCESS_ID"; space="$1"; [ "$i" = 0 ] || space="$2"; shift 2; '
        f'exec ip netns exec "$space" env JAX_COORDINATOR_ADDRESS={ADDRESSES[0]}:{_PORT} unshare --uts --mount '
        f'sh -c \'{_OWN_HOST}\' "$folder" "host$i" "$@" >"$folder/$i.log" 2>&1'
    )
    command = ["sh", "-c", script, str(folder), *pair.spaces, sys.executable, "-P", "-m", module, str(folder)]
    code = runtime.launch(command, processes=2, devices=devices, environ=_environment(), grace=3.0)
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if code > 128:
        raise RuntimeError(f"bench links: signal {code - 128} ended the run; nothing is reported. Run it again.")
    if code:
        raise RuntimeError(f"bench links: a process ended with exit code {code}: {_last(folder)}")


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder for what the processes read and write, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="shardkit-links-") as name:
        yield Path(name)


def _environment() -> Mapping[str, str]:
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _last(folder: Path) -> str:
    lines = [line for log in sorted(folder.glob("*.log")) for line in log.read_text(errors="replace").splitlines()]
    told = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (told or lines or ["it printed nothing"])[-1].strip()


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"bench links: the system must allow network namespaces and tbf queues; {' '.join(command)!r} failed: "
            f"{done.stderr.strip() or f'exit code {done.returncode}'}. Run it on a machine or in a container that does."
        )


def _remove_leftovers() -> None:
    """Removes the namespaces of runs that were killed."""
    listed = subprocess.run(["ip", "netns", "list"], check=False, capture_output=True, text=True).stdout
    for process in {int(each) for each in re.findall(r"^shardkit-links-(\d+)-[ab]\b", listed, re.MULTILINE)}:
        if not Path(f"/proc/{process}").exists():
            for command in removal(pair_of(process)):
                subprocess.run(command, check=False, capture_output=True)


@contextlib.contextmanager
def _terminated_as_interrupt() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, so that it removes what it made."""
    try:
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    except ValueError:  # not the main thread, which alone gets signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
