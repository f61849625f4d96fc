"""Writes the arrays of a checkpoint with orbax, in its format and its background threads.

What is here: the options of a write, what a guard sees of it, and errors in one sentence.
"""

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


def describe_error(error: BaseException) -> str:
    """The text of the system error behind an exception, else the exception's first line."""
    first_line = str(error).partition("\n")[0].rstrip(".")
    return describe_system_error(error) or first_line or type(error).__name__


def describe_system_error(error: BaseException) -> str | None:
    """The text of the system error behind an exception; None without one."""
    code = find_system_code(error)
    if code is None:
        return None
    return os.strerror(code)


def find_system_code(error: BaseException) -> int | None:
    """The number of the system error behind an exception; None without one."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    code = re.search(r"os_error_code='(\d+)'", str(error))  # tensorstore has it in the text alone
    if code is None:
        return None
    return int(code[1])


@contextmanager
def silence_orbax() -> Iterator[None]:
    """Keeps orbax from logging errors that it also raises."""
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]

    def is_shown(record: logging.LogRecord) -> bool:
        return not record.exc_info and "orbax" not in record.pathname

    for logger in loggers:
        logger.addFilter(is_shown)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_shown)


def save_async(path: Path, arrays: Mapping[str, Any], record: Any, complete: Callable[[], None]) -> Saving:
    """Saves in the background with orbax.

    `complete` may change the record: it is called in the background, before that is written.

    Each shard is written from one of its replicas: if each replica wrote a part, replicas that have drifted apart would
    be mixed. In pieces, so that a reader needs no second copy of a shard, and not compressed: zstd takes three times as
    long as writing, and makes trained float32 parameters 7% smaller. Directories are created before it returns: if one
    cannot be created in the background, threads wait for it for minutes, and keep the process from exiting.
    """
    v1 = import_orbax()
    options = v1.options
    saving = options.ArrayOptions.Saving(
        use_replica_parallel=False,
        use_compression=False,
        storage_options=options.ArrayOptions.Saving.StorageOptions(chunk_byte_size=_choose_piece(arrays)),
    )
    writes: list[Any] = []
    registry = v1.handlers.local_registry(include_global_registry=False).add(_make_handler(v1, writes, complete))
    with v1.Context(
        array_options=options.ArrayOptions(saving=saving),
        async_options=options.AsyncOptions(create_directories_asynchronously=False),
        checkpointables_options=options.CheckpointablesOptions(registry=registry),
    ):
        response = v1.save_async(path, to_file_names(arrays), custom_metadata=record)
    return Saving(response, writes)


def _choose_piece(arrays: Mapping[str, Any]) -> int:
    """Bytes of a piece: many small ones take longer to write, few large ones more memory to read."""
    least, most = _PIECES
    total = sum(x.nbytes for x in arrays.values())
    nbytes = total // jax.process_count()
    return min(max(nbytes // 32, least), most)


def to_file_names(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays by names without slashes, except empty arrays, which cannot be stored."""
    by_file_name = {}
    for path, x in arrays.items():
        if x.size:
            # A slash in a path would be read as a folder.
            by_file_name[quote(path, safe="")] = x
    return by_file_name


def _make_handler(v1: Any, writes: list[Any], complete: Callable[[], None]) -> type:
    """Orbax's handler, with a save that also adds to `writes` what this process writes, and ends with `complete`."""
    base = v1.handlers.PyTreeHandler

    async def save(self: Any, directory: Any, checkpointable: Any) -> Any:
        saving = await base.save(self, directory, checkpointable)
        # orbax does not promise this attribute. Without it a guard sees less of a save, which is the same.
        writes.extend(getattr(saving, "commit_futures", None) or ())

        async def finish() -> None:
            await saving
            await asyncio.to_thread(complete)

        return finish()

    # The files contain the name of the handler: with the name of orbax's, any orbax can read them.
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "save": save}
    return type(base.__name__, (base,), names)


def import_orbax() -> Any:
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
        watcher = client.find_monitor()
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
