"""Where a job's files in the memory of a host are, so that they go with the job."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from shardkit.runtime.monitor.hello import TOKEN

JOB = "SHARDKIT_JOB"  # the environment variable that is the same for all attempts of a job
MEMORY = "/dev/shm"


def hashed(text: str) -> str:
    """A name that does not tell the text."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def job_of(environ: Mapping[str, str]) -> str:
    """The name of the job that an environment gives, without telling its token; empty if there is neither."""
    token = environ.get(TOKEN)
    return environ.get(JOB) or (hashed(token) if token else "")


def folder_of_user(directory: Path) -> Path:
    """This user's folder in a directory."""
    return directory / f"shardkit-{os.getuid()}"


def folder_of_job(job: str) -> str:
    """The name of a job's folder in it."""
    return f"job-{hashed(job)}"


def delete_memory(job: str) -> None:
    """Deletes what a job that has ended left in the memory of this host."""
    folder = folder_of_user(Path(MEMORY))
    if not folder.is_symlink():
        shutil.rmtree(folder / folder_of_job(job), ignore_errors=True)
