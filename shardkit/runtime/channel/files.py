"""Files of ours, opened by their names: what a symbolic link in their place leads to is neither read nor written."""

from __future__ import annotations

import errno
import os


def open_file(path: str | os.PathLike[str], flags: int) -> int:
    """A descriptor, as of `os.open`, of the file of that name itself; a link is an OSError with a text of its own."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(f"{os.fspath(path)!r} is a symbolic link, which is not followed") from None


def create_file(path: str | os.PathLike[str]) -> int:
    """A descriptor of a new file, in place of one that an earlier run left under that name."""
    os.close(open_file(path, os.O_WRONLY | os.O_CREAT))
    os.unlink(path)
    return open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
