"""Finds a finished step of a run, and reads its record and its arrays."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from shardkit.runtime.checkpoint.directory import check_damage, named, runs_in, steps_in, warn_of_strange
from shardkit.runtime.checkpoint.orbax_io import reason, system_reason
from shardkit.runtime.checkpoint.pieces import load
from shardkit.runtime.checkpoint.record import Run, read_record
from shardkit.runtime.checkpoint.sums import checksums


class DamagedError(ValueError):
    """A step that cannot be restored.

    Attributes:
        found: which step, and why, as a sentence.
        older: the newest step before it that may be intact, or None.
    """

    def __init__(self, found: str, older: int | None):
        remedy = (
            "No older step can be either." if older is None else f"To restore the newest before it, pass step={older}."
        )
        super().__init__(f"{found} {remedy}")
        self.found, self.older = found, older


def newest_step(directory: Path) -> int | None:
    """The newest finished step according to process 0; None without one."""
    newest = max(steps_in(directory), default=None)
    if jax.process_count() == 1:
        return newest
    from jax.experimental import multihost_utils

    newest = int(multihost_utils.broadcast_one_to_all(np.int32(-1 if newest is None else newest)))
    return None if newest < 0 else newest


def find_step(where: str, directory: Path, step: int | None) -> tuple[int, Run, dict[str, Any]]:
    """A step, by default the newest, with its run and the records of its leaves.

    Raises:
        ValueError: there is no such step.
        DamagedError: it is damaged, or not a checkpoint of shardkit.
    """
    steps = steps_in(directory)
    if step is None:
        step = newest_step(directory)
        warn_of_strange(directory, -1 if step is None else step)
    if step is None:
        raise ValueError(
            f"{where}: {named(directory)} has no finished step. Start with init(params, key), or correct the directory."
        )
    if step not in steps:
        known = ", ".join(map(str, steps)) or "none"
        raise ValueError(
            f"{where}: {named(directory)} has no finished step {step!r}; it has {known}. Pass one of these as step=."
        )
    try:
        return step, *read_record(directory / str(step))
    except (ValueError, OSError) as error:
        check_damage(directory / str(step), error)
        raise _unusable(where, directory, step, reason(error)) from error


def read_arrays(
    where: str, directory: Path, step: int, wanted: Mapping[str, jax.ShapeDtypeStruct], records: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """These arrays of a step, after a comparison of their checksums with the records.

    Raises:
        DamagedError: they are damaged, for whichever process.
        RuntimeError: they could not be read although they may be intact, for example with too many open files.
    """
    damage, arrays = None, dict[str, jax.Array]()
    try:
        arrays = load(directory / str(step), wanted)
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise  # which does not mean damage
    except Exception as error:  # a reader may raise anything on a damaged file
        check_damage(directory / str(step), error)
        system = system_reason(error)
        what = f"its arrays cannot be read ({system})" if system else "its arrays are damaged"
        damage = _unusable(where, directory, step, what)
        damage.__cause__ = error
    if _any_process(damage is not None):  # before the checksums, for which every process must have its arrays
        raise damage or _unusable(where, directory, step, "another process cannot read its part")
    wrong = [path for path, found in checksums(arrays).items() if found != records[path]["checksum"]]
    if wrong:
        raise _unusable(where, directory, step, f"the checksum of its leaf {wrong[0]!r} differs")
    return arrays


def _any_process(found: bool) -> bool:
    if jax.process_count() == 1:
        return found
    from jax.experimental import multihost_utils

    return bool(np.any(multihost_utils.process_allgather(np.bool_(found))))


def _unusable(where: str, directory: Path, step: int, reason: str) -> DamagedError:
    older = max((other for other in runs_in(directory) if other < step), default=None)
    return DamagedError(f"{where}: step {step} of {named(directory)} cannot be restored: {reason}.", older)
