"""Checkpoints of a training run, on orbax: saved in the background, restored on any mesh, plan and number of processes.

A checkpoint contains the TrainState in original shapes and order of layers, and a JSON record. Every process must call
every function here, in the same order, and see the same directory: each writes its shards, process 0 the record.

Orbax writes a step, in the background, and finishes it. Which steps count, and which are deleted, is decided here: to
orbax's own Checkpointer every finished directory with a number is a step, also one that is damaged or that another
program wrote, so that keeping the newest three may delete the only one that can be restored. Nor has it checksums, or
a lock against a second job in the directory.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax

from shardkit._arguments.checks import at_least
from shardkit._arguments.typed import typed
from shardkit.plans.storage import is_padded
from shardkit.runtime.checkpoint.directory import (
    check_writable,
    delete,
    list_steps,
    lock,
    quote_path,
    read_runs,
    resolve_directory,
    set_aside,
)
from shardkit.runtime.checkpoint.orbax_io import Saving, describe_error, import_orbax, save_async, silence_orbax
from shardkit.runtime.checkpoint.portable import (
    describe_leaf,
    describe_stored,
    flatten_state,
    from_portable,
    to_portable,
)
from shardkit.runtime.checkpoint.reading import DamagedError, find_step, newest_step, read_arrays
from shardkit.runtime.checkpoint.record import Residuals, Run, make_record, seal, select_records
from shardkit.runtime.checkpoint.workers import find_workers
from shardkit.runtime.data.checksums import start_checksums
from shardkit.steps.diloco import DilocoState
from shardkit.steps.state import TrainState

State = TypeVar("State", TrainState, DilocoState)
T = TypeVar("T")
_UNFINISHED = ".orbax-checkpoint-tmp"


class Checkpoints:
    """The checkpoints of a run, in one directory. Use it in a `with` block: its end waits for the save in progress.

    Only finished steps count: a step has a temporary name until it is complete on disk. So you never read an
    interrupted save, and the next run's first save deletes it.

    Args:
        directory: a path that is the same for all processes; created if missing.
        keep: number of newest steps to keep.
        best: name of a metric, to keep the best steps too; None for none.
        keep_best: number of best steps to keep. Steps without the metric, or with NaN, do not count.
        higher_is_better: whether a high metric is better (an accuracy) or a low one (a loss).
        read_only: True to restore from a directory that is not writable.

    Raises:
        ImportError: orbax-checkpoint is not installed.
        ValueError: a count below 1, a directory that is a URL, has one of `*?[` in its path, or is not writable.
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
        import_orbax()
        at_least("Checkpoints", 1, keep=keep, keep_best=keep_best)
        self._directory = resolve_directory("Checkpoints", directory)
        if not read_only:
            check_writable(self._directory)
        self._read_only = read_only
        self._keep = keep
        self._best = best
        self._keep_best = keep_best
        self._higher_is_better = higher_is_better
        self._saving: tuple[int, Saving] | None = None
        self._has_cleaned = False  # of what an interrupted save left
        self._last_step = math.inf  # restored or saved by this object
        self._unlock: Callable[[], None] | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self.wait()
        except RuntimeError as failure:
            if error is None or isinstance(error, SystemExit):
                raise  # the exit code may mean that everything is saved
            error.add_note(str(failure))  # the first error ended the run
        finally:
            if self._unlock is not None:
                self._unlock = self._unlock()

    def latest_step(self) -> int | None:
        """The newest finished step according to process 0; None without one.

        Cost: with several processes, a broadcast of 4 bytes.
        """
        return newest_step(self._directory)

    def save(
        self, state: TrainState | DilocoState, *, position: Any = None, config: Any = None, metrics: Any = None
    ) -> None:
        """Saves a state under its step, in the background. It waits for the previous save first.

        You may pass the state to the next step at once. By then orbax has copied its arrays to the host. If the host is
        the device, it keeps them until they are written, and the step takes new memory.

        Args:
            state: the TrainState, or the state of a DiLoCo run; each process then saves its workers.
            position: the data position, any JSON value.
            config: the configuration you need to resume, any JSON value.
            metrics: numbers by name, or None.

        You may resume from an older step, for example because the newest is damaged. The run then
        renames the newer steps before it saves an older one, with a warning: they no longer count. A save also renames
        an unfinished step with its number, such as a step without its record.

        Raises:
            ValueError: a step that is not newer than all steps that stay; a position or configuration other than JSON;
                metrics other than numbers; two leaves with one path; `read_only`; a step to rename from a newer
                version of shardkit.
            RuntimeError: this save or the previous one could not be written, or another job writes to the directory.

        Cost: it returns as early as orbax alone. One pass over the state on the devices, for its checksums, then runs
            before the next step, with a psum of 4 bytes per leaf; the first save compiles it. Leaves in pipeline-stage
            order move between devices, padded leaves are whole on every device until they are written, and DiLoCo's
            workers are copied. Files are not compressed.
        """
        self.wait()
        if self._read_only:
            raise ValueError(
                f"save: {quote_path(self._directory)} was opened with read_only=True. Open it without, to save."
            )
        step = int(state.step)
        goes_back = self._check_step(step)
        leaves = flatten_state("save", state)
        workers = find_workers(state)
        arrays = workers.stack(to_portable(leaves))
        records = workers.stack_records(_describe_leaves(leaves))
        record = make_record(step, position, config, metrics, records)
        with self._errors_of_save(step):
            self._directory.mkdir(parents=True, exist_ok=True)
        if jax.process_index() == 0:
            self._make_room(step, goes_back)
        with self._errors_of_save(step):
            if jax.process_index() == 0 and not self._has_cleaned:
                for path in self._directory.glob(f"[0-9]*{_UNFINISHED}*"):
                    delete(path, path.name)
            self._has_cleaned = True
            # The sums are computed on the devices, before the next step may donate the arrays, and are waited for in
            # orbax's thread, which writes the record last.
            wait_for_sums = start_checksums(arrays)

            def complete_record() -> None:
                seal(record, wait_for_sums())

            saving = save_async(self._path(step), arrays, record, complete_record)
        self._saving = step, saving
        self._last_step = step

    def _check_step(self, step: int) -> bool:
        """Refuses a step that is not newer than all others; whether it may go back, as after a restore of an older one.

        Of steps 100, 200 and 300, of which 300 is damaged, a run that restored 200 saves 250 and later 300 again.
        """
        newest = self.latest_step()
        goes_back = newest is not None and self._last_step < step <= newest
        if newest is not None and step <= newest and not goes_back:
            raise ValueError(
                f"save: a step must be newer than all saved steps; got step {step}, and {quote_path(self._directory)} "
                f"has step {newest}. Restore that step first, delete it, or save to another directory."
            )
        return goes_back

    def _make_room(self, step: int, goes_back: bool) -> None:
        """Locks the directory, and renames what no longer counts, or has the step's name; on process 0."""
        if self._unlock is None:
            self._unlock = lock(self._directory)
        if goes_back:
            run = f"this run resumed from step {self._last_step} of {quote_path(self._directory)}"
            for newer in list_steps(self._directory):
                if newer > self._last_step:
                    set_aside(self._path(newer), f"{run}; the newer step {newer} no longer counts")
        if os.path.lexists(self._path(step)):
            set_aside(self._path(step), f"{quote_path(self._path(step))} is not a finished step")

    def wait(self) -> None:
        """Waits for the save in progress, then deletes old steps; a failed deletion is a warning.

        Raises:
            RuntimeError: the save could not be written.
        """
        if self._saving is None:
            return
        step, saving = self._saving
        with self._errors_of_save(step):
            saving.result()
        self._saving = None
        if jax.process_index() == 0:
            self._delete_old()

    def restore(
        self,
        target: State,
        step: int | None = None,
        *,
        residuals: Residuals = "keep",
        damaged: Literal["stop", "older"] = "stop",
    ) -> tuple[State, Run]:
        """Restores a saved state, with the shardings of the target. Use `load_params` if you need the parameters alone.

        Shapes and dtypes are compared before arrays are read, and checksums after. Keys have the saved implementation.

        Args:
            target: shapes, dtypes and shardings, from `init.abstract(params)`, on any mesh, under any plan. For a
                DiLoCo run, its `init(params, key)` with the same number of workers.
            step: the step; by default the newest finished one.
            residuals: for error feedback. "keep" restores them (on another number of devices, their sum). "reset" sets
                them to zero; pass it if only one of checkpoint and target has residuals.
            damaged: the reaction to a damaged step: an error, or a warning and the next older step. The next save then
                renames the newer steps, and they no longer count.

        Returns:
            The state, and the Run saved with it. A step compiled for the target accepts the state without recompiling.

        Raises:
            ValueError: there is no such step, a newer version of shardkit wrote it, or its leaves, shapes or dtypes
                differ from the target's.
            DamagedError: the step is damaged or not a checkpoint of shardkit; with "older", every step before it too.
            RuntimeError: the step could not be read, but may be intact, for example with too many open files.

        Cost: each process reads the shards of its devices, and padded leaves whole, the largest first, in pieces of 4
            to 64 MiB. On CPU it holds 1.2 times the state, and 15 MB to compile: the bytes it read are the array, so
            the first step takes new memory. On other devices the host holds one leaf and the last piece. Older files,
            not written in pieces, add their largest shard. Programs move the leaves that the target stores padded or
            permuted, 64 MiB or one leaf at a time. Several processes agree on damage by an all_gather of one byte each.
        """

        return _read_intact(lambda step: self._restore_step(target, step, residuals), step, damaged)

    def _restore_step(self, target: State, step: int | None, residuals: Residuals) -> tuple[State, Run]:
        """The state of a step, like the target: its records compared, its arrays read and checked, then moved."""
        step, run, stored_records = find_step("restore", self._directory, step)
        leaves = flatten_state("restore", target)
        workers = find_workers(target)
        target_records = workers.stack_records(_describe_leaves(leaves))
        where = f"restore: step {step} of {quote_path(self._directory)}"
        stacked_records = select_records(where, stored_records, target_records, residuals)
        records = workers.unstack_records(stacked_records, leaves)

        shapes = describe_stored(leaves, records)
        stacked = read_arrays("restore", self._directory, step, workers.describe_stacked(shapes), stacked_records)
        arrays = workers.unstack(stacked, shapes)
        del stacked  # the arrays of all workers, which would stay in memory while the leaves are moved
        restored = from_portable(arrays, leaves, records)
        self._last_step = step
        treedef = jax.tree.structure(target, is_leaf=is_padded)
        return jax.tree.unflatten(treedef, restored.values()), run

    def run(self, step: int | None = None, *, damaged: Literal["stop", "older"] = "stop") -> Run:
        """Returns the Run saved with a step, by default the newest. It reads no arrays. `damaged` is as in `restore`.

        Raises:
            ValueError: there is no such step.
            DamagedError: it is damaged, or not a checkpoint of shardkit.
        """

        def read_run(step: int | None) -> Run:
            _, run, _ = find_step("restore", self._directory, step)
            return run

        return _read_intact(read_run, step, damaged)

    def _path(self, step: int) -> Path:
        return self._directory / str(step)

    def _delete_old(self) -> None:
        """Deletes all steps but the newest and the best; a step that is damaged neither counts nor is deleted."""
        runs = read_runs(self._directory)
        # Of steps that can be read: a damaged one in the list would push out one that can be restored.
        newest = sorted(runs)[-self._keep :]
        best = self._rank(runs)[: self._keep_best]
        for step in runs:
            if step not in newest and step not in best:
                delete(self._path(step), f"{step}{_UNFINISHED}")  # renamed first: a half deleted step does not count

    def _rank(self, runs: Mapping[int, Run]) -> list[int]:
        """The steps with the metric, the best first, and of equal ones the newer."""
        if self._best is None:
            return []
        scores = {}
        for step, run in runs.items():
            score = run.metrics.get(self._best, math.nan)
            if self._higher_is_better:
                score = -score
            if not math.isnan(score):
                scores[step] = score
        # Scores are losses by now, the smallest the best. Of equal ones, which sorting leaves in their order, the newer
        # comes first.
        newest_first = sorted(scores, reverse=True)
        return sorted(newest_first, key=scores.__getitem__)

    @contextmanager
    def _errors_of_save(self, step: int) -> Iterator[None]:
        """What fails while a step is written is one sentence, which says what can still be restored."""
        try:
            with silence_orbax():
                yield
        except Exception as error:
            self._saving = None
            self._has_cleaned = False
            newest = latest_step(self._directory)
            intact = "No finished step is there"
            if newest is not None:
                intact = f"Step {newest}, the newest finished, is intact"
            raise RuntimeError(
                f"save: step {step} could not be written to {quote_path(self._directory)}: {describe_error(error)}. "
                f"{intact}; free or repair the disk, then save again."
            ) from error


def _describe_leaves(leaves: Mapping[str, Any]) -> dict[str, Any]:
    return {path: describe_leaf(x) for path, x in leaves.items()}


def _read_intact(read: Callable[[int | None], T], step: int | None, damaged: str) -> T:
    """What `read` finds in a step or, if that is damaged and may be left out, in the newest intact one before it."""
    while True:
        try:
            return read(step)
        except DamagedError as error:
            if damaged == "stop" or error.older is None:
                raise
            # The next round may find this one damaged too; each goes to an older step, so that the loop ends.
            step = error.older
            warnings.warn(f"{error.found} Step {step} is taken instead.", RuntimeWarning, stacklevel=4)


@typed
def latest_step(directory: str | os.PathLike[str]) -> int | None:
    """The newest finished step in a directory of checkpoints, as this process sees it; None without one.

    Raises:
        ValueError: as `Checkpoints`.

    Example:
        >>> from shardkit.runtime.checkpoint.checkpoints import latest_step
        >>> latest_step("no-such-directory") is None
        True
    """
    return max(list_steps(resolve_directory("latest_step", directory)), default=None)
