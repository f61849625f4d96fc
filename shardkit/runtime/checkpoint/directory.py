"""The directory of a run's checkpoints: which names in it are finished steps, whose it is, and how what is old goes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import socket
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from shardkit.runtime.checkpoint.orbax_io import reason, system_code, system_reason
from shardkit.runtime.checkpoint.record import RECORD

# Too many files are open, too little memory, no permission, a network that is down.
_NO_DAMAGE = {
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM),
    *(errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENETDOWN),
}
_LOCK = ".lock"
_LOCKS: dict[Path, tuple[int, int]] = {}  # the descriptor, and how many in this process write there


def directory_of(where: str, directory: str | os.PathLike[str]) -> Path:
    """An absolute path of which orbax can make use.

    Raises:
        ValueError: an address, or a path with one of `*?[`.
    """
    path = Path(directory).absolute()
    if re.match(r"\w[\w+.-]+:/", os.fspath(directory)):  # Path("gs://bucket") has lost a slash
        raise ValueError(
            f"{where}: directory must be a path in a file system; got the address {os.fspath(directory)!r}. Mount it, "
            "and pass where."
        )
    if re.search(r"[*?[]", str(path)):  # orbax would look for the parts of a save elsewhere, and not put it together
        raise ValueError(
            f"{where}: directory must have no *, ? or [ in its path, which orbax takes for a pattern; got "
            f"{named(path)}. Choose another name."
        )
    return path


def check_writable(directory: Path) -> None:
    """Refuses a directory into which nothing can be saved; it makes none.

    Raises:
        ValueError: it, or the nearest directory above it that is there, cannot be written.
    """
    there = next(path for path in (directory, *directory.parents) if os.path.lexists(path))
    why = "is no directory" if not there.is_dir() else "may not be written" if not os.access(there, os.W_OK) else ""
    if why:
        raise ValueError(
            f"Checkpoints: directory must be one that can be written; {named(there)} {why}. Choose another one, or "
            "pass read_only=True to restore alone."
        )


def lock(directory: Path) -> Callable[[], None]:
    """Makes this process the one that writes there, until what is returned is called or the process ends.

    Raises:
        RuntimeError: another one writes there; with who it is.
    """
    descriptor, holders = _LOCKS.get(directory) or (_locked(directory), 0)
    _LOCKS[directory] = descriptor, holders + 1

    def unlock() -> None:
        descriptor, holders = _LOCKS.pop(directory)
        if holders > 1:
            _LOCKS[directory] = descriptor, holders - 1
        else:
            os.close(descriptor)  # and with that the lock

    return unlock


def _locked(directory: Path) -> int:
    descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a child that is forked does not have it
    except (BlockingIOError, PermissionError):
        owner = os.read(descriptor, 1000)
        os.close(descriptor)
        raise RuntimeError(
            f"save: {named(directory)} is written by another job{_told(owner)}. End that one, or save into another "
            "directory."
        ) from None
    except OSError:  # a file system without locks
        return descriptor
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    owner = json.dumps({"process": os.getpid(), "host": socket.gethostname(), "since": since}).encode()
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, owner, 0)
    return descriptor


def _told(owner: bytes) -> str:
    try:
        who = json.loads(owner)
        return f", process {int(who['process'])} on {str(who['host'])!r} since {str(who['since'])!r}"
    except (ValueError, TypeError, KeyError):
        return ""


def steps_in(directory: Path) -> list[int]:
    """The finished steps, by name; a directory without a record, or with a number beyond int32, is none."""
    return sorted(step for step in _numbered(directory) if (directory / str(step) / RECORD).exists())


def warn_of_strange(directory: Path, newest: int) -> None:
    """Names what looks like a step that is newer than the newest, and is none."""
    strange = sorted({step for step in _numbered(directory) if step > newest} - {*steps_in(directory)})
    if strange:
        warnings.warn(
            f"restore: {named(directory / str(strange[-1]))} is passed over: it has no {RECORD}, and so is no finished "
            "step.",
            RuntimeWarning,
            stacklevel=4,
        )


def _numbered(directory: Path) -> list[int]:
    if not directory.is_dir():
        return []
    found = (path for path in directory.iterdir() if re.fullmatch(r"0|[1-9][0-9]{0,9}", path.name))
    return [int(path.name) for path in found if int(path.name) < 2**31 and path.is_dir()]


def set_aside(directory: Path, since: float) -> None:
    """Gives the steps after one, which no longer count, another name, with a warning."""
    for step in [step for step in steps_in(directory) if step > since]:
        path, number = directory / str(step), 0
        while os.path.lexists(aside := path.with_name(f"{step}.aside" + f"-{number}" * (number > 0))):
            number += 1
        path.rename(aside)
        warnings.warn(
            f"save: this run goes on from step {since} of {named(directory)}; step {step}, which is newer, no longer "
            f"counts and is now called {aside.name!r}.",
            RuntimeWarning,
            stacklevel=3,
        )


def check_free(path: Path) -> None:
    """Refuses the name of a step that something else has, which is no step."""
    if os.path.lexists(path):
        raise ValueError(
            f"save: {named(path)} must not be there before that step is saved; it is no finished step. Move it away, "
            "or save into another directory."
        )


def check_damage(path: Path, error: BaseException) -> None:
    """Refuses to call a step damaged for what says nothing of its files."""
    if system_code(error) in _NO_DAMAGE:
        raise RuntimeError(
            f"restore: step {path.name} of {named(path.parent)} could not be read: {system_reason(error)}. That says "
            "nothing of the step itself: see to it, and start again."
        ) from error


def delete(path: Path, name: str) -> None:
    """Gives what is no longer needed another name and deletes it: of a link the link itself, not what it leads to.

    Where that fails it is a warning: it takes room, and the run can go on.
    """
    try:
        gone = path.rename(path.with_name(name))
        if gone.is_symlink() or not gone.is_dir():
            gone.unlink()
        else:
            shutil.rmtree(gone)
    except OSError as error:
        warnings.warn(
            f"save: {named(path)} is no longer needed and could not be deleted: {reason(error)}. See to it by hand.",
            RuntimeWarning,
            stacklevel=2,
        )


def named(directory: Path) -> str:
    """A path as an error shows it."""
    return repr(str(directory))
