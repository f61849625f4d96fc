"""Compiled programs that are kept on disk."""

from __future__ import annotations

from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache as _cache

from shardkit._typed import typed
from shardkit.analysis.hlo.saved import writable_by


@typed
def compilation_cache(directory: str | Path) -> None:
    """Keeps every compiled program in a directory, from which the same program is loaded the next time.

    Call it before the first compilation, or at any time for those that follow. A program is the same if its code,
    shapes, layouts, devices, compiler options and the versions of jax and its compiler are. Of many processes, process
    0 writes.

    Args:
        directory: created if it does not exist, for its owner alone. Other users must not be able to write to it:
            what it holds is executed.

    Raises:
        ValueError: a path that is not a directory, or one that others own or can write to.

    Example:
        sk.runtime.compilation_cache("~/.cache/shardkit")
    """
    path = Path(directory).expanduser()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except OSError as error:
        raise ValueError(
            f"compilation_cache: directory must be a directory that can be written to; got {path} ({error.strerror}). "
            "Pass another one."
        ) from None
    if whose := writable_by(found):
        raise ValueError(
            f"compilation_cache: directory must be writable by its owner alone, because its programs are executed; got "
            f"{path}, and {whose}. Run chmod go-w on it, or pass another one."
        )
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    _cache.reset_cache()  # jax looks for a directory once, at the first compilation
