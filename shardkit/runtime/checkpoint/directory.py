"""The directory of a run's checkpoints: its finished steps, its lock, and the deletion of old steps."""

from __future__ import annotations

import contextlib
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

from shardkit._arguments.files import open_file
from shardkit.runtime.checkpoint.orbax_io import reason, system_code, system_reason
from shardkit.runtime.checkpoint.record import RECORD, NewerError, Run, read_record

# Errors that do not mean damage: too many open files, too little memory, no permission, a network failure.
_NO_DAMAGE = {
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM),
    *(errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENETDOWN),
}
_LOCK = ".lock"
_LOCKS: dict[Path, tuple[int, int]] = {}  # the descriptor, and the number of Checkpoints of this process that hold it


def directory_of(where: str, directory: str | os.PathLike[str]) -> Path:
    """An absolute path that orbax supports; refuses a URL, or a path with one of `*?[`."""
    path = Path(directory).absolute()
    if ".." in path.parts:
        path = path.resolve()  # tensorstore refuses such a path when it reads, which would look like damage
    if re.match(r"\w[\w+.-]+:/", os.fspath(directory)):  # Path("gs://bucket") has lost a slash
        raise ValueError(
            f"{where}: directory must be a path in a file system; got the URL {os.fspath(directory)!r}. Mount it, and "
            "pass the path of the mount."
        )
    if re.search(r"[*?[]", str(path)):  # orbax takes the path for a glob pattern when it merges the parts of a save
        raise ValueError(
            f"{where}: directory must have no *, ? or [ in its path, which orbax takes for a pattern; got "
            f"{named(path)}. Pass a path without them."
        )
    return path


def check_writable(directory: Path) -> None:
    """Refuses a directory that, or whose nearest existing parent, cannot be written, without creating it."""
    there = next(path for path in (directory, *directory.parents) if os.path.lexists(path))
    why = "is not a directory" if not there.is_dir() else "is not writable" if not os.access(there, os.W_OK) else ""
    if why:
        raise ValueError(
            f"Checkpoints: directory must be writable; {named(there)} {why}. Pass another directory, or read_only=True "
            "to restore only."
        )


def lock(directory: Path) -> Callable[[], None]:
    """Locks a directory for this process, until the returned function is called or it ends; refuses another's."""
    descriptor, holders = _LOCKS.get(directory) or (_locked(directory), 0)
    _LOCKS[directory] = descriptor, holders + 1

    def unlock() -> None:
        descriptor, holders = _LOCKS.pop(directory)
        if holders > 1:
            _LOCKS[directory] = descriptor, holders - 1
        else:
            os.close(descriptor)  # which releases the lock

    return unlock


def _locked(directory: Path) -> int:
    try:
        descriptor = open_file(directory / _LOCK, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise RuntimeError(
            f"save: {named(directory)} cannot be locked: {reason(error)}. Save to another directory."
        ) from error
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not inherited by forked children
    except (BlockingIOError, PermissionError):
        owner = os.read(descriptor, 1000)
        os.close(descriptor)
        raise RuntimeError(
            f"save: a directory must be written by one job; another job writes to {named(directory)}{_owner(owner)}. "
            "End that job, or save to another directory."
        ) from None
    except OSError:  # a file system without locks
        return descriptor
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    owner = json.dumps({"process": os.getpid(), "host": socket.gethostname(), "since": since}).encode()
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, owner, 0)
    return descriptor


def _owner(owner: bytes) -> str:
    try:
        who = json.loads(owner)
        return f" (process {int(who['process'])} on {str(who['host'])!r} since {str(who['since'])!r})"
    except (ValueError, TypeError, KeyError):
        return ""


def steps_in(directory: Path) -> list[int]:
    """The finished steps: directories with a record and a number below 2^31 as their name."""
    return sorted(step for step in _numbered(directory) if (directory / str(step) / RECORD).exists())


def runs_in(directory: Path) -> dict[int, Run]:
    """The finished steps whose record can be read."""
    runs = {}
    for step in steps_in(directory):
        with contextlib.suppress(ValueError, OSError):  # damaged, or not from shardkit: neither counted nor deleted
            runs[step] = read_record(directory / str(step))[0]
    return runs


def warn_of_strange(directory: Path, newest: int) -> None:
    """Warns of a directory that looks like a newer step, but is not finished."""
    strange = sorted({step for step in _numbered(directory) if step > newest} - {*steps_in(directory)})
    if strange:
        warnings.warn(
            f"restore: ignored {named(directory / str(strange[-1]))}, which is not a finished step: it has no "
            f"{RECORD}.",
            RuntimeWarning,
            stacklevel=4,
        )


def _numbered(directory: Path) -> list[int]:
    if not directory.is_dir():
        return []
    found = (path for path in directory.iterdir() if re.fullmatch(r"0|[1-9][0-9]{0,9}", path.name))
    return [int(path.name) for path in found if int(path.name) < 2**31 and path.is_dir()]


def is_newer(path: Path) -> bool:
    """Whether a newer version of shardkit wrote a step, which is no damage."""
    try:
        read_record(path)
    except (ValueError, OSError) as error:
        return isinstance(error, NewerError)
    return False


def set_aside(path: Path, why: str) -> None:
    """Renames a step that no longer counts, or is none, with a warning that says why; refuses one that `is_newer`."""
    if is_newer(path):
        raise ValueError(
            f"save: a step must not be set aside if a newer version of shardkit wrote it; {named(path)} has a newer "
            "format. Go on with that version, or save to another directory."
        )
    number = 0
    while os.path.lexists(aside := path.with_name(f"{path.name}.aside" + f"-{number}" * (number > 0))):
        number += 1
    path.rename(aside)
    warnings.warn(f"save: {why}, and was renamed to {aside.name!r}.", RuntimeWarning, stacklevel=3)


def check_damage(path: Path, error: BaseException) -> None:
    """Raises for a system error that does not mean that a step is damaged."""
    if system_code(error) in _NO_DAMAGE:
        raise RuntimeError(
            f"restore: step {path.name} of {named(path.parent)} could not be read: {system_reason(error)}. The step "
            "may be intact: fix the cause, then restore again."
        ) from error


def delete(path: Path, name: str) -> None:
    """Renames a path and deletes it; of a link only the link. A failure is a warning, as the run can continue."""
    try:
        gone = path.rename(path.with_name(name))
        if gone.is_symlink() or not gone.is_dir():
            gone.unlink()
        else:
            shutil.rmtree(gone)
    except OSError as error:
        warnings.warn(
            f"save: {named(path)} is no longer needed, but could not be deleted: {reason(error)}. Delete it.",
            RuntimeWarning,
            stacklevel=2,
        )


def named(directory: Path) -> str:
    """A path for an error."""
    return repr(str(directory))
