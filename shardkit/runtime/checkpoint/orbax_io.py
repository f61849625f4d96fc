"""Dealing with orbax, which writes and reads the arrays of a checkpoint."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardkit.runtime.checkpoint.progress import Part
from shardkit.runtime.monitor import client


def reason(error: BaseException) -> str:
    """The system's own words where it is at fault, else the error's first line."""
    return system_reason(error) or str(error).partition("\n")[0].rstrip(".") or type(error).__name__


def system_reason(error: BaseException) -> str | None:
    """The system's own words; None where it is not at fault."""
    code = system_code(error)
    return None if code is None else os.strerror(code)


def system_code(error: BaseException) -> int | None:
    """The system's number of an error; None where it is not at fault."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    code = re.search(r"os_error_code='(\d+)'", str(error))  # as tensorstore reports it
    return int(code[1]) if code else None


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps orbax from logging what is raised as well."""
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    ours = lambda record: not record.exc_info and "orbax" not in record.pathname  # noqa: E731
    for logger in loggers:
        logger.addFilter(ours)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(ours)


def save_async(path: Path, arrays: Any, record: Any) -> Any:
    """Orbax's function of this name, with two of its defaults changed; under a guard it tells when its part is written.

    Every piece comes from one of the devices that hold it: if each copy gave a part, copies that have drifted apart
    would be saved as none of them was. Directories are made before it returns: where one cannot be made in the
    background, threads wait for it for minutes, and the process with them when it is to end.
    """
    v1 = orbax()
    saving = v1.options.ArrayOptions.Saving(use_replica_parallel=False)
    background = v1.options.AsyncOptions(create_directories_asynchronously=False)
    how: dict[str, Any] = {"array_options": v1.options.ArrayOptions(saving=saving), "async_options": background}
    if client.running() is None:
        with v1.Context(**how):
            return v1.save_async(path, arrays, custom_metadata=record)
    part = Part()
    registry = v1.handlers.local_registry(include_global_registry=False).add(_telling(v1, part))
    with v1.Context(**how, checkpointables_options=v1.options.CheckpointablesOptions(registry=registry)):
        return part.of(v1.save_async(path, arrays, custom_metadata=record))


def _telling(v1: Any, part: Part) -> type:
    """Orbax's own handler, whose save also tells the part by which writes it ends."""
    plain = v1.handlers.PyTreeHandler

    async def save(self: Any, directory: Any, checkpointable: Any) -> Any:
        saving = await plain.save(self, directory, checkpointable)
        if (writes := getattr(saving, "commit_futures", None)) is not None:
            part.ends_with(writes)
        return saving

    # What is written names its handler, and is to be read by any orbax: under the name of its own.
    names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "save": save}
    return type(plain.__name__, (plain,), names)


def orbax() -> Any:
    """The documented interface of orbax, imported where it is needed first.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import orbax.checkpoint.experimental.v1 as v1
    except ImportError as error:
        raise ImportError(
            "Checkpoints: orbax-checkpoint is not installed. Run pip install 'shardkit[checkpoint]'."
        ) from error
    return v1
