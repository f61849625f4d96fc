"""Writes the arrays of a checkpoint with orbax."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import jax

from shardkit._arguments.extras import install
from shardkit.runtime.channel import client

_PIECES = 2**22, 2**26  # bytes of a piece of an array in the files: at least, at most


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

    def ours(record: logging.LogRecord) -> bool:
        return not record.exc_info and "orbax" not in record.pathname

    for logger in loggers:
        logger.addFilter(ours)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(ours)


def save_async(path: Path, arrays: Mapping[str, Any], record: Any, complete: Callable[[], None]) -> Saving:
    """Saves in the background with orbax.

    `complete` may change the record: it is called in the background, before that is written.

    Each shard is written from one of its replicas: if each replica wrote a part, replicas that have drifted apart would
    be mixed. In pieces, so that a reader needs no second copy of a shard, and not compressed: zstd takes three times as
    long as writing, and makes trained float32 parameters 7% smaller. Directories are created before it returns: if one
    cannot be created in the background, threads wait for it for minutes, and keep the process from exiting.
    """
    v1 = orbax()
    array = v1.options.ArrayOptions
    least, most = _PIECES  # many small ones take longer to write, few large ones more memory to read
    piece = min(max(sum(x.nbytes for x in arrays.values()) // jax.process_count() // 32, least), most)
    pieces = array.Saving.StorageOptions(chunk_byte_size=piece)
    saving = array.Saving(use_replica_parallel=False, use_compression=False, storage_options=pieces)
    background = v1.options.AsyncOptions(create_directories_asynchronously=False)
    writes: list[Any] = []
    registry = v1.handlers.local_registry(include_global_registry=False).add(_handler(v1, writes, complete))
    with v1.Context(
        array_options=array(saving=saving),
        async_options=background,
        checkpointables_options=v1.options.CheckpointablesOptions(registry=registry),
    ):
        response = v1.save_async(path, by_file_name(arrays), custom_metadata=record)
    return Saving(response, writes)


def by_file_name(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays by names without slashes, except empty arrays, which cannot be stored."""
    return {quote(path, safe=""): x for path, x in arrays.items() if x.size}


def _handler(v1: Any, writes: list[Any], complete: Callable[[], None]) -> type:
    """Orbax's handler, whose save also adds to `writes` what this process writes, and ends with `complete`."""
    plain = v1.handlers.PyTreeHandler

    async def save(self: Any, directory: Any, checkpointable: Any) -> Any:
        saving = await plain.save(self, directory, checkpointable)
        writes.extend(getattr(saving, "commit_futures", None) or ())

        async def completed() -> None:
            await saving
            await asyncio.to_thread(complete)

        return completed()

    # The files contain the name of the handler: with the name of orbax's, any orbax can read them.
    names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "save": save}
    return type(plain.__name__, (plain,), names)


def orbax() -> Any:
    """The public interface of orbax, imported when it is first needed; refuses to go on without the package."""
    try:
        import orbax.checkpoint.experimental.v1 as v1
    except ImportError as error:
        raise ImportError(
            f"Checkpoints: orbax-checkpoint must be installed; it is not. Run {install('checkpoint')}."
        ) from error
    return v1


class Saving(NamedTuple):
    """A save in progress: orbax's response, and what ends when this process's part is written."""

    response: Any
    writes: Sequence[Any]

    def result(self) -> None:
        """Waits until all processes have written their parts; for a guard, it notes when only the others have not."""
        watcher = client.running()
        if watcher is None:
            self.response.result()
            return
        with contextlib.suppress(Exception):  # the response raises it too
            for write in self.writes:
                write.result()
            watcher.recorder.rename_phase("save", "commit")
        try:
            self.response.result()
        finally:
            watcher.recorder.rename_phase("commit", "save")
