"""The directory of a run's checkpoints: its finished steps, its lock, and the deletion of old steps.

Of a run with `keep=2` that saves its step 300 at this moment:

    .lock                                 which job writes here
    100.aside                             a step that no longer counts; nothing reads or deletes it
    100, 200                              finished steps, each with its record
    300.orbax-checkpoint-tmp              in progress; renamed to 300 when it is complete
"""

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
from shardkit.runtime.checkpoint.orbax_io import describe_error, describe_system_error, find_system_code
from shardkit.runtime.checkpoint.record import RECORD, NewerError, Run, read_record

# Errors that do not mean damage: too many open files, too little memory, no permission, a network failure.
_NO_DAMAGE = {
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM),
    *(errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENETDOWN),
}
_LOCK = ".lock"
# By directory the descriptor of its lock, and how many Checkpoints of this process hold it. A process that locks a file
# twice and closes one descriptor loses both locks: so it has one.
_LOCKS: dict[Path, tuple[int, int]] = {}


def resolve_directory(where: str, directory: str | os.PathLike[str]) -> Path:
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
            f"{quote_path(path)}. Pass a path without them."
        )
    return path


def check_writable(directory: Path) -> None:
    """Refuses a directory that, or whose nearest existing parent, cannot be written, without creating it."""
    existing = directory
    while not os.path.lexists(existing):  # the root exists
        existing = existing.parent
    fault = "is not a directory"
    if existing.is_dir():
        if os.access(existing, os.W_OK):
            return
        fault = "is not writable"
    raise ValueError(
        f"Checkpoints: directory must be writable; {quote_path(existing)} {fault}. Pass another directory, or "
        "read_only=True to restore only."
    )


def lock(directory: Path) -> Callable[[], None]:
    """Locks a directory for this process, until the returned function is called or it ends; refuses another's."""
    if directory not in _LOCKS:
        _LOCKS[directory] = _lock_file(directory), 0
    descriptor, holders = _LOCKS[directory]
    _LOCKS[directory] = descriptor, holders + 1

    def unlock() -> None:
        descriptor, holders = _LOCKS.pop(directory)
        if holders > 1:
            _LOCKS[directory] = descriptor, holders - 1
        else:
            os.close(descriptor)  # which releases the lock

    return unlock


def _lock_file(directory: Path) -> int:
    """Locks the file `.lock`, which says who holds it; its descriptor."""
    try:
        descriptor = open_file(directory / _LOCK, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise RuntimeError(
            f"save: {quote_path(directory)} cannot be locked: {describe_error(error)}. Save to another directory."
        ) from error
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not inherited by forked children
    except (BlockingIOError, PermissionError):
        owner = os.read(descriptor, 1000)
        os.close(descriptor)
        raise RuntimeError(
            f"save: a directory must be written by one job; another job writes to {quote_path(directory)}"
            f"{_describe_owner(owner)}. End that job, or save to another directory."
        ) from None
    except OSError:  # a file system without locks
        return descriptor
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    owner = json.dumps({"process": os.getpid(), "host": socket.gethostname(), "since": since}).encode()
    # Only when the lock is held: until then the file says who else holds it.
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, owner, 0)
    return descriptor


def _describe_owner(text: bytes) -> str:
    """Who holds a lock, from what the file says; nothing if it says no such thing."""
    try:
        owner = json.loads(text)
        return f" (process {int(owner['process'])} on {str(owner['host'])!r} since {str(owner['since'])!r})"
    except (ValueError, TypeError, KeyError):
        return ""


def list_steps(directory: Path) -> list[int]:
    """The finished steps: directories with a record and a number below 2^31 as their name."""
    steps = []
    for step in _list_numbers(directory):
        if (directory / str(step) / RECORD).exists():
            steps.append(step)
    return steps


def _list_numbers(directory: Path) -> list[int]:
    """The directories with a number as their name, ascending, finished steps or not."""
    if not directory.is_dir():
        return []
    numbers = []
    for path in directory.iterdir():
        if re.fullmatch(r"0|[1-9][0-9]{0,9}", path.name) and int(path.name) < 2**31 and path.is_dir():
            numbers.append(int(path.name))
    return sorted(numbers)


def read_runs(directory: Path) -> dict[int, Run]:
    """The finished steps whose record can be read."""
    runs = {}
    for step in list_steps(directory):
        with contextlib.suppress(ValueError, OSError):  # damaged, or not from shardkit: neither counted nor deleted
            runs[step], _ = read_record(directory / str(step))
    return runs


def warn_of_unfinished(directory: Path, newest: int) -> None:
    """Warns of a directory that looks like a newer step, but is not finished."""
    finished = list_steps(directory)
    unfinished = []
    for step in _list_numbers(directory):
        if step > newest and step not in finished:
            unfinished.append(step)
    if unfinished:
        warnings.warn(
            f"restore: ignored {quote_path(directory / str(unfinished[-1]))}, which is not a finished step: it has no "
            f"{RECORD}.",
            RuntimeWarning,
            stacklevel=4,
        )


def is_newer(path: Path) -> bool:
    """Whether a newer version of shardkit wrote a step, which is no damage."""
    try:
        read_record(path)
    except (ValueError, OSError) as error:
        return isinstance(error, NewerError)
    return False


def set_aside(path: Path, reason: str) -> None:
    """Renames a step that no longer counts, or is none, with a warning that says why; refuses one that `is_newer`."""
    if is_newer(path):
        raise ValueError(
            f"save: a step must not be set aside if a newer version of shardkit wrote it; {quote_path(path)} has a "
            "newer format. Go on with that version, or save to another directory."
        )
    aside = path.with_name(f"{path.name}.aside")
    number = 0
    while os.path.lexists(aside):
        number += 1
        aside = path.with_name(f"{path.name}.aside-{number}")
    path.rename(aside)
    warnings.warn(f"save: {reason}, and was renamed to {aside.name!r}.", RuntimeWarning, stacklevel=4)


def check_damage(path: Path, error: BaseException) -> None:
    """Raises for a system error that does not mean that a step is damaged."""
    if find_system_code(error) in _NO_DAMAGE:
        raise RuntimeError(
            f"restore: step {path.name} of {quote_path(path.parent)} could not be read: "
            f"{describe_system_error(error)}. The step may be intact: fix the cause, then restore again."
        ) from error


def delete(path: Path, temporary_name: str) -> None:
    """Renames a path and deletes it; of a link only the link. A failure is a warning, as the run can continue."""
    try:
        renamed = path.rename(path.with_name(temporary_name))
        if renamed.is_symlink() or not renamed.is_dir():
            renamed.unlink()
        else:
            shutil.rmtree(renamed)
    except OSError as error:
        warnings.warn(
            f"save: {quote_path(path)} is no longer needed, but could not be deleted: {describe_error(error)}. Delete "
            "it.",
            RuntimeWarning,
            stacklevel=2,
        )


def quote_path(path: Path) -> str:
    """A path for an error."""
    return repr(str(path))
