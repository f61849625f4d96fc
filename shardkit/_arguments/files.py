"""The files that a user names, and those that a run leaves for the next: no link is written through, and no pipe or
device is read for ever. The standard library alone, because the monitor must not import jax.
"""

from __future__ import annotations

import errno
import os
import stat


class FileError(OSError):
    """What stands under a name is not the file that it must be."""

    def __init__(self, path: str | os.PathLike[str], why: str):
        super().__init__(None, why, os.fspath(path))

    def __str__(self) -> str:
        return f"{self.filename!r} is {self.strerror}"


def why(error: Exception) -> str:
    """Why a file cannot be used, in a few words."""
    return getattr(error, "strerror", None) or type(error).__name__


def open_file(path: str | os.PathLike[str], flags: int) -> int:
    """A descriptor of the file of that name itself, as of `os.open`; for `open` as `opener=`.

    A link in its place may lead to a file of somebody else, which it would overwrite, and is refused.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise FileError(path, "a symbolic link, which is not followed") from None


def create_file(path: str | os.PathLike[str]) -> int:
    """A descriptor of a new file, in place of one that an earlier run left under that name."""
    os.close(open_file(path, os.O_WRONLY | os.O_CREAT))
    os.unlink(path)
    return open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)


def read_file(path: str | os.PathLike[str], most: int, *, links: bool = True) -> bytes:
    """What a regular file of at most so many bytes holds; else an OSError: a pipe waits, and a device never ends."""
    flags = os.O_RDONLY | os.O_NONBLOCK
    with open(os.open(path, flags) if links else open_file(path, flags), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise FileError(path, "no regular file")
        content = file.read(most + 1)
    if len(content) > most:
        raise FileError(path, f"larger than {most:,} bytes")
    return content
