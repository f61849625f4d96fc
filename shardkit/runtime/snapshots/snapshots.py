"""Snapshots of a training state in the memory of hosts: from them a job that lost a host goes on, without its disk.

Every k steps each process keeps its shards in files in memory, and another host has the same shards or gets a copy of
them. Every process must call every function here, in the same order.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any, Literal

import jax

from shardkit._check import at_least
from shardkit._typed import typed
from shardkit.runtime.checkpoint.checkpoints import Checkpoints
from shardkit.runtime.checkpoint.directory import named
from shardkit.runtime.checkpoint.orbax_io import reason
from shardkit.runtime.checkpoint.portable import leaf_record, leaves_of, to_portable
from shardkit.runtime.checkpoint.record import Run, make_record, seal
from shardkit.runtime.checkpoint.residuals import Residuals
from shardkit.runtime.cluster.barrier import absent
from shardkit.runtime.snapshots import folder as files
from shardkit.runtime.snapshots.finding import Found, find, restored
from shardkit.runtime.snapshots.moving import exchange
from shardkit.runtime.snapshots.planned import Copies, Plan, plan_of, storable
from shardkit.state import TrainState

_LATEST = 600.0  # seconds until all processes must have written a step


class Snapshots:
    """The snapshots of a run, in the memory of its hosts; a context manager, which waits at exit for the last one.

    The newest two steps stay. They outlive the processes, and so the next attempt of `shardkit launch --restarts` finds
    them; it may have another mesh, plan and number of processes. After the loss of one host the others still have every
    shard. What is in memory ends with the hosts: use Checkpoints too. A run that goes back to an older checkpoint on
    purpose, or starts anew under the name of one that failed, calls `clear` first.

    Args:
        every: number of steps between snapshots.
        name: names the job; by default SHARDKIT_JOB does, which `launch` sets, else SHARDKIT_JOB_TOKEN.
        directory: a directory in the memory of each host; by default /dev/shm.

    Raises:
        ValueError: fewer than one step, no name of the job, or a directory in which others can replace files.

    Example:
        >>> import tempfile
        >>> grad_fn = sk.value_and_grad(lambda w, batch, keys: sk.Mean.of(w))
        >>> init, step = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh, plan=sk.dp("data"))
        >>> state, memory = init(jnp.ones(4), jax.random.key(0)), tempfile.mkdtemp()
        >>> with sk.runtime.Snapshots(every=5, name="example", directory=memory) as snapshots:
        ...     snapshots.save(state, position=0)
        ...     state, run = snapshots.restore(init.abstract(jnp.ones(4)))
        ...     snapshots.clear()
        >>> run.step
        0
    """

    @typed
    def __init__(self, *, every: int, name: str | None = None, directory: str | os.PathLike[str] | None = None):
        at_least("Snapshots", 1, every=every)
        self._every = every
        self._folder = files.folder_of(directory, name)
        self._hosts: list[str] = []
        self._began = ""  # when this run began to save, for the names of its steps
        self._whole = ""  # the newest step that all hosts are known to have
        self._found: Found | None = None
        self._looked = False
        self._calls = 1  # of save until the step must be looked at
        self._saved = 0  # how many steps this run has kept, for their names too
        self._last: int | None = None
        self._planned: tuple[Any, Plan] | None = None
        self._writing: threading.Thread | None = None
        self._failed: BaseException | None = None

    def __enter__(self) -> Snapshots:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, SystemExit):
            self.wait()  # otherwise other processes may have ended

    def save(self, state: TrainState, *, position: Any = None, config: Any = None, metrics: Any = None) -> None:
        """Keeps a state if its step is a multiple of `every`, in the background; call it after every step.

        Each process copies its shards to the host, and sends the arrays of which a shard is on one host alone to
        another host; the next step may donate the state. The rest is in the background: what was received is copied to
        the host, both are written to memory with checksums, all processes wait for each other, and older steps go.

        Args:
            state: the TrainState.
            position, config, metrics: as `Checkpoints.save`.

        Raises:
            ValueError: too little memory for two steps, one host with more than half of the devices, or what
                `Checkpoints.save` refuses.
            RuntimeError: this or the previous snapshot could not be written.

        Cost: nothing is sent of an array that is whole on every host, or whose shards are all on two hosts; of others a
            device sends its shard once, a ppermute. Until they are on the host, devices hold what they received. A host
            holds two steps, each with one copy of its shards and of those received.
        """
        self._calls -= 1
        if self._calls > 0:
            return
        step = int(state.step)  # waits for the step, so not after each of them
        due = step % self._every == 0 or (self._last is not None and step - self._last >= self._every)
        self._calls = self._every - step % self._every
        if due:
            self._save(step, state, position, config, metrics)
            self._last = step

    def _save(self, step: int, state: TrainState, position: Any, config: Any, metrics: Any) -> None:
        self.wait()
        self._found, self._looked = None, False
        leaves = leaves_of("save", state)
        records = {path: leaf_record(x) for path, x in leaves.items()}
        run = make_record(step, position, config, metrics, records)
        seal(run, {})  # the pieces have checksums of their own
        arrays = to_portable(storable(leaves))
        hosts = self._on_hosts()
        began = self._began = self._began or exchange(f"{time.time_ns():x}".encode())[0].decode()
        layout = [(x.shape, x.dtype, x.sharding) for x in arrays.values()]
        if self._planned is None or self._planned[0] != layout:
            self._planned = layout, plan_of(leaves, arrays, lambda device: hosts[device.process_index])
            files.check_room(self._folder, 2 * self._planned[1].host_bytes)
        plan = self._planned[1]
        copies = Copies(plan, arrays)
        document = {"run": run, "grids": list(plan.grids.values())}
        if self._last is not None and step < self._last:  # the run went back, to a checkpoint
            self._whole = ""  # a restart must not find the steps that it left
        self._saved += 1
        name = f"{step:010d}-{began}-{self._saved:08d}"  # a step that is kept again overwrites nothing
        if hosts.index(hosts[jax.process_index()]) == jax.process_index():
            files.delete_others(self._folder, {self._whole, name})
        self._writing = threading.Thread(
            target=self._write, args=(name, document, copies), name="shardkit-snapshot", daemon=True
        )
        self._writing.start()

    def _write(self, name: str, document: dict[str, Any], copies: Copies) -> None:
        """In the background: writes, then waits for the others, as only a step that all have may replace another."""
        try:
            files.write(self._folder / name, jax.process_index(), document, copies)
            missing = absent(f"shardkit.snapshots.{name}", _LATEST) if jax.process_count() > 1 else None
            if missing is not None:
                raise RuntimeError(f"{missing} did not write it within {_LATEST:g} s")
            self._whole = name
        except BaseException as error:  # raised by `wait`
            self._failed = error

    def wait(self) -> None:
        """Waits until all processes have written the snapshot in progress.

        Raises:
            RuntimeError: it could not be written.
        """
        if self._writing is None:
            return
        self._writing.join()
        self._writing = None
        if self._failed is not None:
            error, self._failed = self._failed, None
            raise RuntimeError(
                f"save: step {self._last} could not be written to {named(self._folder)}: {reason(error)}. The step "
                "before it is intact; free memory, or pass another directory=."
            ) from error

    def latest_step(self) -> int | None:
        """The newest step of which the hosts together have every piece, with its checksum; None without one.

        A newer step with lost or damaged pieces is a warning.

        Cost: one pass over the pieces of this host, shared by its processes, and an all_gather of which are intact.
        """
        found = self._look()
        return None if found is None else found.run.step

    def run(self) -> Run | None:
        """The Run saved with the newest step that is whole, without its arrays; None without one."""
        found = self._look()
        return None if found is None else found.run

    def restore(self, target: TrainState, *, residuals: Residuals = "keep") -> tuple[TrainState, Run]:
        """The newest whole state with the shardings of the target: those of `init.abstract(params)`, under any plan.

        Args:
            target: shapes, dtypes and shardings, on any mesh and number of processes.
            residuals: as `Checkpoints.restore`.

        Returns:
            The state, and the Run saved with it.

        Raises:
            ValueError: no step is whole, or its leaves, shapes or dtypes differ from the target's.

        Cost: that of `latest_step`, if it was not called before. Pieces of a process's own host are copied from memory;
            those that a process needs and its host lacks are sent by one process to all, an all_reduce of their bytes.
        """
        found = self._look()
        if found is None:
            raise ValueError(
                f"restore: {named(self._folder)} and the other hosts have no whole step. Start with init(params, key), "
                "or restore a checkpoint."
            )
        state = restored(found, target, self._on_hosts(), residuals)
        self._whole, self._last = found.name, found.run.step
        return state, found.run

    def clear(self) -> None:
        """Deletes the snapshots of this job, whose memory is then free: at the end of training, on every process."""
        self.wait()
        self._found, self._looked, self._whole = None, False, ""
        files.delete(self._folder)

    def _look(self) -> Found | None:
        self.wait()
        if not self._looked:
            self._found, self._looked = find(self._folder, self._on_hosts()), True
        return self._found

    def _on_hosts(self) -> list[str]:
        """The host of each process."""
        self._hosts = self._hosts or [message.decode() for message in exchange(files.host_id(self._folder).encode())]
        return self._hosts


@typed
def restore_newest(
    target: TrainState,
    snapshots: Snapshots,
    checkpoints: Checkpoints,
    *,
    residuals: Residuals = "keep",
    damaged: Literal["stop", "older"] = "older",
) -> tuple[TrainState, Run] | None:
    """Restores the newer of the newest snapshot and the newest checkpoint; None if there is neither.

    Args:
        target: shapes, dtypes and shardings, from `init.abstract(params)`.
        snapshots: the snapshots of the run.
        checkpoints: its checkpoints.
        residuals, damaged: as `Checkpoints.restore`.

    Raises:
        ValueError, DamagedError, RuntimeError: as `restore` of both.

    Example:
        >>> import tempfile
        >>> grad_fn = sk.value_and_grad(lambda w, batch, keys: sk.Mean.of(w))
        >>> init, step = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh, plan=sk.dp("data"))
        >>> snapshots = sk.runtime.Snapshots(every=5, name="example", directory=tempfile.mkdtemp())
        >>> checkpoints = sk.runtime.Checkpoints(tempfile.mkdtemp())
        >>> print(sk.runtime.restore_newest(init.abstract(jnp.ones(4)), snapshots, checkpoints))
        None
    """
    in_memory, on_disk = snapshots.latest_step(), checkpoints.latest_step()
    if in_memory is not None and (on_disk is None or in_memory >= on_disk):
        return snapshots.restore(target, residuals=residuals)
    found = None if on_disk is None else checkpoints.restore(target, residuals=residuals, damaged=damaged)
    if found is None or in_memory is None or in_memory <= found[1].step:
        return found
    return snapshots.restore(target, residuals=residuals)  # the newest checkpoint was damaged
