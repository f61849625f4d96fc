"""Writes and reads the arrays of a checkpoint with orbax."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jax
import jax.numpy as jnp

from shardkit.runtime.checkpoint.progress import SaveProgress
from shardkit.runtime.monitor import client


def reason(error: BaseException) -> str:
    """The text of the system error behind an exception, else the exception's first line."""
    return system_reason(error) or str(error).partition("\n")[0].rstrip(".") or type(error).__name__


def system_reason(error: BaseException) -> str | None:
    """The text of the system error behind an exception; None without one."""
    code = system_code(error)
    return None if code is None else os.strerror(code)


def system_code(error: BaseException) -> int | None:
    """The number of the system error behind an exception; None without one."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    code = re.search(r"os_error_code='(\d+)'", str(error))  # in the text of tensorstore
    return int(code[1]) if code else None


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps orbax from logging errors that it also raises."""
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    ours = lambda record: not record.exc_info and "orbax" not in record.pathname  # noqa: E731
    for logger in loggers:
        logger.addFilter(ours)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(ours)


def save_async(path: Path, arrays: Mapping[str, Any], record: Any) -> Any:
    """Saves in the background with orbax; under a guard, it notes when this process's part is written.

    Each shard is written from one of its replicas: if each replica wrote a part, replicas that have drifted apart would
    be mixed. Directories are created before it returns: if one cannot be created in the background, threads wait for it
    for minutes, and keep the process from exiting.
    """
    v1 = orbax()
    saving = v1.options.ArrayOptions.Saving(use_replica_parallel=False)
    background = v1.options.AsyncOptions(create_directories_asynchronously=False)
    how: dict[str, Any] = {"array_options": v1.options.ArrayOptions(saving=saving), "async_options": background}
    stored = _stored(arrays)
    if client.running() is None:
        with v1.Context(**how):
            return v1.save_async(path, stored, custom_metadata=record)
    progress = SaveProgress()
    registry = v1.handlers.local_registry(include_global_registry=False).add(_noting(v1, progress))
    with v1.Context(**how, checkpointables_options=v1.options.CheckpointablesOptions(registry=registry)):
        return progress.of(v1.save_async(path, stored, custom_metadata=record))


def load(path: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """The arrays of a step with these shapes, dtypes and shardings; others that it has are not read."""
    v1 = orbax()
    only_these = v1.options.PyTreeOptions.Loading(partial_load=True)
    with quiet(), v1.Context(pytree_options=v1.options.PyTreeOptions(loading=only_these)):
        loaded = v1.load(path, _stored(wanted))
    return {
        name: loaded[_file_name(name)] if x.size else jnp.zeros(x.shape, x.dtype, device=x.sharding)
        for name, x in wanted.items()
    }


def _stored(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays by names without slashes, except empty arrays, which cannot be stored."""
    return {_file_name(path): x for path, x in arrays.items() if x.size}


def _file_name(path: str) -> str:
    return quote(path, safe="")


def _noting(v1: Any, progress: SaveProgress) -> type:
    """Orbax's handler, whose save also passes its writes to `progress`."""
    plain = v1.handlers.PyTreeHandler

    async def save(self: Any, directory: Any, checkpointable: Any) -> Any:
        saving = await plain.save(self, directory, checkpointable)
        if (writes := getattr(saving, "commit_futures", None)) is not None:
            progress.ends_with(writes)
        return saving

    # The files contain the name of the handler: with the name of orbax's, any orbax can read them.
    names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "save": save}
    return type(plain.__name__, (plain,), names)


def orbax() -> Any:
    """The public interface of orbax, imported when it is first needed.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import orbax.checkpoint.experimental.v1 as v1
    except ImportError as error:
        raise ImportError(
            "Checkpoints: orbax-checkpoint must be installed; it is not. Run pip install 'shardkit[checkpoint]'."
        ) from error
    return v1
