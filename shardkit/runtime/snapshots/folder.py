"""The folder of a job's snapshots on this host: files in memory (tmpfs), which outlive processes but not the host.

`shardkit-UID/JOB/HOST/STEP-RUN-NUMBER/` has the pieces of each process of this host in `PROCESS.bin`, and what and
where they are in `PROCESS.json`, which is written last.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import stat
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardkit.runtime.checkpoint.directory import named
from shardkit.runtime.cluster.memory import JOB, MEMORY, folder_of_job, folder_of_user, hashed, job_of
from shardkit.runtime.monitor.hello import TOKEN

HOST = "SHARDKIT_HOST"  # names this process's host, where the machine's name and start do not
_ALIGNED = 64  # bytes
_THREADS = 4  # that compute checksums


def host_id(folder: Path) -> str:
    """What tells this host from others: the variable SHARDKIT_HOST, else its name, when it started, and its memory.

    Containers of one machine may have its name, and each a tmpfs of its own.
    """
    memory, started = folder.parents[1].stat().st_dev, ""  # of this user's folder, which is there
    with suppress(OSError):
        started = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return os.environ.get(HOST) or f"{socket.gethostname()} {started} {memory}"


def folder_of(directory: str | os.PathLike[str] | None, name: str | None) -> Path:
    """The folder of this job on this host; the one of this user, around it, is created.

    Raises:
        ValueError: no name of the job, or one that is not a file name; a directory that is missing, not writable,
            or in which others could replace files.
    """
    known = job_of(os.environ)
    if name is not None and not re.fullmatch(r"\w[\w.-]{0,99}", name, re.ASCII):
        raise ValueError(
            f"Snapshots: name must have 1 to 100 ASCII letters, digits, dots, dashes and underscores; got "
            f"{name!r}. Pass for example name='run-7'."
        )
    if name is None and not known:
        raise ValueError(
            f"Snapshots: a job must be recognized when it starts again; got neither name= nor {JOB} nor {TOKEN} "
            "in the environment. Start it with shardkit launch --restarts, or pass name=."
        )
    job = f"name-{name}" if name is not None else folder_of_job(known)
    return (
        _own(Path(MEMORY if directory is None else directory).absolute())
        / job
        / f"host-{hashed(os.environ.get(HOST, ''))}"
    )


def _own(directory: Path) -> Path:
    """This user's folder in a directory, which nobody else can read or replace."""
    if not directory.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
        raise ValueError(
            f"Snapshots: directory must be a writable directory, in memory; got {named(directory)}. Pass directory=, "
            "for example a tmpfs."
        )
    mode = directory.stat().st_mode
    if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
        raise ValueError(
            f"Snapshots: others must not be able to replace files in the directory; {named(directory)} has mode "
            f"{stat.S_IMODE(mode):o}. Pass a directory= of your own, or set its sticky bit with chmod +t."
        )
    folder = folder_of_user(directory)
    folder.mkdir(mode=0o700, exist_ok=True) if not os.path.lexists(folder) else None
    found = folder.lstat()
    why = (
        "is a link" if stat.S_ISLNK(found.st_mode) else "is not a directory" if not stat.S_ISDIR(found.st_mode) else ""
    )
    if not why and found.st_uid != os.getuid():
        why = f"belongs to user {found.st_uid}"
    if not why and stat.S_IMODE(found.st_mode) & 0o077:
        why = f"has mode {stat.S_IMODE(found.st_mode):o}"
    if why:
        raise ValueError(
            f"Snapshots: the folder of snapshots must be this user's alone; {named(folder)} {why}. Remove it, or pass "
            "another directory=."
        )
    return folder


def check_room(folder: Path, needed: int) -> None:
    """Refuses to begin if snapshots of so many bytes on this host do not fit beside what others have there.

    Raises:
        ValueError: with both numbers.
    """
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    held = _bytes_in(folder)  # first: another process of this host may delete older steps meanwhile
    system = os.statvfs(there)
    has = system.f_bavail * system.f_frsize + held
    if has < needed:
        raise ValueError(
            f"save: two snapshots, {needed:,} bytes on this host, must fit into {named(there)}; it has {has:,} bytes. "
            "Enlarge it, for a container with --shm-size, or pass another directory= or more hosts."
        )


def _bytes_in(folder: Path) -> int:
    found = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # it has just been deleted
                found += os.stat(os.path.join(directory, name)).st_size
    return found


def write(folder: Path, process: int, document: dict[str, Any], pieces: Iterable[tuple[int, np.ndarray]]) -> None:
    """Writes numbered pieces of a step, then the record, under its name only when it is complete."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    table, offset = [], 0
    with open(folder / f"{process}.bin", "wb") as file:
        for number, piece in pieces:
            data = np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data
            file.seek(offset)
            file.write(data)
            table.append([number, offset, data.nbytes, zlib.crc32(data)])
            offset += -(-data.nbytes // _ALIGNED) * _ALIGNED
    text = json.dumps(document | {"pieces": table})
    unfinished = folder / f"{process}.json.part"
    unfinished.write_text(f"{zlib.crc32(text.encode()):08x}\n{text}", "utf-8")
    unfinished.replace(folder / f"{process}.json")


class Place(NamedTuple):
    """Where a piece is: file, offset, bytes, and their checksum."""

    file: Path
    offset: int
    size: int
    crc: int

    def read(self) -> np.ndarray:
        """Its bytes, mapped from memory.

        Raises:
            OSError, ValueError: the file is missing or too short.
        """
        if not self.size:
            return np.empty(0, np.uint8)
        return np.memmap(self.file, np.uint8, "r", self.offset, (self.size,))

    def is_intact(self) -> bool:
        """Whether its bytes have the checksum."""
        try:
            return zlib.crc32(self.read().data) == self.crc
        except (OSError, ValueError):
            return False


class Stored(NamedTuple):
    """What this host has of a step.

    Attributes:
        document: the record, without its pieces.
        places: where each piece is, by number.
    """

    document: dict[str, Any]
    places: dict[int, Place]


def steps_of(folder: Path) -> dict[str, Stored]:
    """What this host has of each step, by the names of their folders; records that cannot be read do not count."""
    found = dict[str, Stored]()
    for file in sorted(folder.glob("*/*.json")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            seal, _, text = file.read_text("utf-8").partition("\n")
            if int(seal, 16) != zlib.crc32(text.encode()):
                continue
            document = json.loads(text)
            places = {row[0]: Place(file.with_suffix(".bin"), *row[1:]) for row in document.pop("pieces")}
            stored = found.setdefault(file.parent.name, Stored(document, {}))
            stored.places.update(places)
    return found


def intact(places: dict[int, Place]) -> set[int]:
    """The numbers of the pieces whose checksums are right."""
    with ThreadPoolExecutor(_THREADS) as threads:
        right = threads.map(Place.is_intact, places.values())
    return {number for number, fine in zip(places, right, strict=True) if fine}


def delete_others(folder: Path, kept: set[str]) -> None:
    """Deletes all steps but these; what cannot be deleted stays until the next time."""
    for path in folder.glob("*"):
        if path.name not in kept:
            shutil.rmtree(path, ignore_errors=True)


def delete(folder: Path) -> None:
    """Deletes the snapshots of a job on this host."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # another host's are there, in tests
        folder.parent.rmdir()
