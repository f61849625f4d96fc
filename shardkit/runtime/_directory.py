"""The directory of a run's checkpoints: which names in it are finished steps, and how what is not needed goes."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from pathlib import Path

from shardkit.runtime._orbax import reason


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


def steps_in(directory: Path) -> list[int]:
    """The steps whose name says that they are finished; a number beyond int32 is no step."""
    if not directory.is_dir():
        return []
    numbered = (path for path in directory.iterdir() if re.fullmatch(r"0|[1-9][0-9]{0,9}", path.name))
    return sorted(int(path.name) for path in numbered if int(path.name) < 2**31 and path.is_dir())


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
