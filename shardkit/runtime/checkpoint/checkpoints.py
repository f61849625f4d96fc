"""Checkpoints of a training run, on orbax: saved in the background, each process its own shards, restored anywhere.

A checkpoint holds every leaf of the TrainState in its natural form, and beside them the data position, configuration
and metrics as JSON. So it can be restored onto another mesh, under another plan, by another number of processes.

Every process calls every function here, at the same place of its program. All write the shards that they hold of split
leaves, one of those that hold the same, and process 0 what is JSON: the directory must be one that all see.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jax
import jax.numpy as jnp
import numpy as np

from shardkit._typed import typed
from shardkit.partitioning.storage import is_padded
from shardkit.runtime.checkpoint.directory import (
    check_damage,
    check_free,
    check_writable,
    delete,
    directory_of,
    lock,
    named,
    set_aside,
    steps_in,
    warn_of_strange,
)
from shardkit.runtime.checkpoint.orbax_io import orbax, quiet, reason, save_async, system_reason
from shardkit.runtime.checkpoint.portable import abstract, checksums, form, held, leaves_of, natural
from shardkit.runtime.checkpoint.record import Run, compare, make_record, read_record
from shardkit.state import TrainState

_UNFINISHED = ".orbax-checkpoint-tmp"


class Checkpoints:
    """The checkpoints of a run, in one directory; a context manager, which waits at its end for what is under way.

    Only finished steps count: a step that is being written has another name, which is changed when all is on disk. A
    save that was cut off, by a kill or a full disk, leaves nothing that is ever read, and the next run's first save
    clears it away.

    Args:
        directory: where they are; made if missing. One that every process sees under the same name.
        keep: the newest steps that are kept.
        best: the name of a metric by which further steps are kept; None for none.
        keep_best: how many of those. Steps without that metric, or for which it is not a number, are none of the best.
        higher_is_better: whether the best have the highest metric, as an accuracy, or the lowest, as a loss.
        read_only: to restore from a directory that cannot be written.

    Raises:
        ImportError: orbax-checkpoint is not installed.
        ValueError: a count below 1, a directory that is an address or has one of `*?[` in its path, or one that cannot
            be written.
    """

    @typed
    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        best: str | None = None,
        keep_best: int = 1,
        higher_is_better: bool = False,
        read_only: bool = False,
    ):
        orbax()
        for name, count in (("keep", keep), ("keep_best", keep_best)):
            if count < 1:
                raise ValueError(f"Checkpoints: {name} must be at least 1; got {count}. Pass how many steps to keep.")
        self._directory = directory_of("Checkpoints", directory)
        if not read_only:
            check_writable(self._directory)
        self._read_only = read_only
        self._keep, self._best = keep, best
        self._keep_best, self._higher_is_better = keep_best, higher_is_better
        self._saving: tuple[int, Any] | None = None
        self._cleared = False
        self._since = math.inf  # the step that was restored or saved last
        self._unlock: Callable[[], None] | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self.wait()
        except RuntimeError as failed:
            if error is None or isinstance(error, SystemExit):
                raise  # an exit code may say that all is saved
            error.add_note(str(failed))  # what ended the run is the error; this came on top of it
        finally:
            if self._unlock is not None:
                self._unlock = self._unlock()

    def latest_step(self) -> int | None:
        """The newest finished step, as process 0 sees the directory; None without one.

        Cost: with several processes a broadcast of 4 bytes.
        """
        newest = latest_step(self._directory)
        if jax.process_count() == 1:
            return newest
        from jax.experimental import multihost_utils

        newest = int(multihost_utils.broadcast_one_to_all(np.int32(-1 if newest is None else newest)))
        return None if newest < 0 else newest

    def save(self, state: TrainState, *, position: Any = None, config: Any = None, metrics: Any = None) -> None:
        """Saves a state under the number of its steps, in the background.

        The next step may donate the state: orbax has copied its arrays to the host by then, or, where the host is the
        device, holds them until they are written. Waits first for the save before.

        Args:
            state: the TrainState.
            position: where the data stand, any JSON value.
            config: what the run is to be resumed with, any JSON value.
            metrics: numbers by name, or None.

        A run that goes on from a step that is not the newest, because that is damaged for example, renames those that
        are newer where a save would come before them, with a warning: they no longer count.

        Raises:
            ValueError: a step that is not newer than all that are there, other than those; a position or configuration
                that is no JSON; metrics that are no numbers; two leaves of one path; `read_only`.
            RuntimeError: this save, or the one before, could not be written, or another job writes there.

        Cost: one pass over the state on the devices for its checksums, a psum of 4 bytes a leaf. Leaves in the order of
            pipeline stages move between devices, and padded ones are whole on every device until they are written.
        """
        self.wait()
        if self._read_only:
            raise ValueError(
                f"save: {named(self._directory)} was opened with read_only=True. Leave it out to save there."
            )
        step, newest = int(state.step), self.latest_step()
        goes_back = newest is not None and self._since < step <= newest
        if newest is not None and step <= newest and not goes_back:
            raise ValueError(
                f"save: a step must be newer than all that are there; got step {step}, and {named(self._directory)} "
                f"has step {newest}. Restore that step first, delete it, or save into another directory."
            )
        leaves = leaves_of("save", state)
        arrays = natural(leaves)
        sums = checksums(arrays)
        forms = {path: {**form(x), "checksum": sums[path]} for path, x in leaves.items()}
        record = make_record(step, position, config, metrics, forms)
        with self._writing(step):
            self._directory.mkdir(parents=True, exist_ok=True)
        if jax.process_index() == 0:
            self._unlock = self._unlock or lock(self._directory)
            if goes_back:
                set_aside(self._directory, self._since)
            check_free(self._path(step))
        with self._writing(step):
            self._clear()
            response = save_async(self._path(step), _stored(arrays), record)
        self._saving, self._since = (step, response), step

    def wait(self) -> None:
        """Waits until the save under way is finished, and deletes the steps that are no longer kept.

        A step that cannot be deleted is a warning.

        Raises:
            RuntimeError: it could not be written.
        """
        if self._saving is None:
            return
        step, response = self._saving
        with self._writing(step):
            response.result()
        self._saving = None
        if jax.process_index() == 0:
            self._forget()

    def restore(self, target: TrainState, step: int | None = None) -> tuple[TrainState, Run]:
        """A state as it was saved, laid out as the target.

        Its metadata are compared before an array is read, and its checksums after. Keys have the implementation that
        was saved.

        Args:
            target: shapes, dtypes and layouts, from `init.abstract(params)`, on any mesh, under any plan.
            step: the step; by default the newest that is finished.

        Returns:
            The state, and the Run that was saved with it. A step compiled for the target takes the state as it is.

        Raises:
            ValueError: there is no such step, it is damaged or no checkpoint of shardkit, or has leaves, shapes or
                dtypes other than the target.
            RuntimeError: it could not be read, for a reason that says nothing of it, such as too many open files.

        Cost: each process reads what its devices hold, of padded leaves all. Those that the target pads or orders are
            moved by one program.
        """
        step, (run, forms) = self._record(step)
        leaves, where = leaves_of("restore", target), f"restore: step {step} of {named(self._directory)}"
        compare(where, forms, {path: form(x) for path, x in leaves.items()})
        try:
            arrays = _load(self._path(step), abstract(leaves, forms))
        except (MemoryError, jax.errors.JaxRuntimeError):
            raise  # which says nothing of the files
        except Exception as error:  # whatever a damaged file makes of a reader
            check_damage(self._path(step), error)
            words = system_reason(error)
            what = f"its arrays cannot be read, {words}" if words else "its arrays are damaged"
            raise self._unusable(step, what) from error
        wrong = [path for path, found in checksums(arrays).items() if found != forms[path]["checksum"]]
        if wrong:
            raise self._unusable(step, f"its leaf {wrong[0]!r} is not what was saved")
        treedef = jax.tree.structure(target, is_leaf=is_padded)
        self._since = step
        return jax.tree.unflatten(treedef, held(arrays, leaves, forms).values()), run

    def run(self, step: int | None = None) -> Run:
        """What was saved with a step, by default the newest, without its arrays.

        Raises:
            ValueError: there is no such step, it is damaged, or no checkpoint of shardkit.
        """
        return self._record(step)[1][0]

    def _record(self, step: int | None) -> tuple[int, tuple[Run, dict[str, Any]]]:
        where, steps = named(self._directory), steps_in(self._directory)
        if step is None:
            step = self.latest_step()
            warn_of_strange(self._directory, -1 if step is None else step)
        if step is None:
            raise ValueError(
                f"restore: {where} has no finished step. Begin with init(params, key), or correct the directory."
            )
        if step not in steps:
            known = ", ".join(map(str, steps)) or "none"
            raise ValueError(
                f"restore: {where} has no finished step {step!r}; it has {known}. Pass one of them as step=."
            )
        try:
            return step, read_record(self._path(step))
        except (ValueError, OSError) as error:
            check_damage(self._path(step), error)
            raise self._unusable(step, reason(error)) from error

    def _path(self, step: int) -> Path:
        return self._directory / str(step)

    def _unusable(self, step: int, reason: str) -> ValueError:
        older = max((other for other in self._runs() if other < step), default=None)
        remedy = (
            "No step before it can." if older is None else f"Step {older} is the newest before it: pass step={older}."
        )
        return ValueError(f"restore: step {step} of {named(self._directory)} cannot be restored: {reason}. {remedy}")

    def _runs(self) -> dict[int, Run]:
        """The finished steps whose record can be read."""
        runs = {}
        for step in steps_in(self._directory):
            try:
                runs[step] = read_record(self._path(step))[0]
            except (ValueError, OSError):
                continue  # not ours, or damaged: neither counted nor touched
        return runs

    def _forget(self) -> None:
        runs = self._runs()
        sign = -1 if self._higher_is_better else 1
        scores = {step: sign * run.metrics.get(self._best, math.nan) for step, run in runs.items() if self._best}
        ranked = sorted((step for step in scores if not math.isnan(scores[step])), key=lambda s: (scores[s], -s))
        kept = {*sorted(runs)[-self._keep :], *ranked[: self._keep_best]}
        for step in set(runs) - kept:
            delete(self._path(step), f"{step}{_UNFINISHED}")  # first the name: a step that is half deleted is no step

    def _clear(self) -> None:
        """Clears away what saves that were cut off have left."""
        if jax.process_index() == 0 and not self._cleared:
            for path in self._directory.glob(f"[0-9]*{_UNFINISHED}*"):
                delete(path, path.name)
        self._cleared = True

    @contextmanager
    def _writing(self, step: int) -> Iterator[None]:
        try:
            with quiet():
                yield
        except Exception as error:
            self._saving, self._cleared = None, False
            newest = latest_step(self._directory)
            left = "No step is finished there" if newest is None else f"Step {newest}, the newest that is, is untouched"
            raise RuntimeError(
                f"save: step {step} could not be written to {named(self._directory)}: {reason(error)}. {left}; see "
                "to the disk and save again."
            ) from error


@typed
def latest_step(directory: str | os.PathLike[str]) -> int | None:
    """The newest finished step in a directory of checkpoints, as this process sees it; None without one.

    Raises:
        ValueError: as Checkpoints.
    """
    return max(steps_in(directory_of("latest_step", directory)), default=None)


def _stored(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays under names that are no paths; empty ones, which cannot be stored, are left out."""
    return {quote(path, safe=""): x for path, x in arrays.items() if x.size}


def _load(path: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    with quiet():
        loaded = orbax().load(path, _stored(wanted))

    def array(name: str, x: jax.ShapeDtypeStruct) -> jax.Array:
        return loaded[quote(name, safe="")] if x.size else jnp.zeros(x.shape, x.dtype, device=x.sharding)

    return {name: array(name, x) for name, x in wanted.items()}
