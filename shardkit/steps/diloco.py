"""DiLoCo: workers that train alone for many steps, and then exchange how far their parameters have moved.

A worker is one index of a slow axis, such as "pod". Its step, any result of `make_train_step` on the devices at this
index, is a program of its own: between exchanges no worker waits for another, and nothing can be sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit._arguments.checks import format_sizes
from shardkit._arguments.typed import Optimizer, check_kind, kinds_of, typed
from shardkit.collectives.algorithms import PLAIN, Algorithm
from shardkit.meshes.layout import spec_axes
from shardkit.meshes.submeshes import join_submeshes, submeshes
from shardkit.plans.axis_types import auto_mesh
from shardkit.plans.storage import Storage, leaves_by_path, replace_arrays
from shardkit.steps.alike import AlikePrograms, AlikeRun
from shardkit.steps.builder import TrainStep
from shardkit.steps.optimizer import Master
from shardkit.steps.state import TrainState
from shardkit.steps.state_layouts import match_storage, shardings

FragmentOf = Callable[[str, tuple[int, ...]], int | Sequence[int]]


class DilocoState(NamedTuple):
    """The state of a DiLoCo run."""

    workers: tuple[TrainState | None, ...]  # each worker's state; None for a worker without a device of this process
    params: Any  # the parameters after the last exchange, the same for all workers
    outer: tuple[Any, ...]  # the outer optimizer's state for each fragment

    @property
    def step(self) -> jax.Array:
        """How many steps the workers of this process took, as in a TrainState: a checkpoint is named by it."""
        present_workers = [worker for worker in self.workers if worker is not None]
        return present_workers[0].step


class Moved(NamedTuple):
    """The mean movement of a fragment, which `start` has computed, for one `finish`."""

    parts: dict[str, jax.Array]  # the movement of each leaf, by path
    fragment: int  # the number of the fragment


@dataclass(frozen=True, eq=False)
class WorkerSteps:
    """The steps of all workers; `Diloco.step` is one."""

    train_steps: tuple[TrainStep | None, ...]

    def __call__(self, state: DilocoState, batches: Sequence[Any]) -> tuple[DilocoState, list[Any]]:
        """A step of each worker on its own batch, and the metrics of each; None for workers of other processes."""
        workers = []
        metrics = []
        for train_step, worker, batch in self._match(state, batches):
            values = None
            if train_step is not None:
                worker, values = train_step.step(worker, batch)
            workers.append(worker)
            metrics.append(values)
        return state._replace(workers=tuple(workers)), metrics

    def lower(self, state: DilocoState, batches: Sequence[Any]) -> jax.stages.Lowered:
        """The program of the first worker of this process: all workers have one program, as a guard makes sure."""
        train_step, worker, batch = self._first(state, batches)
        return train_step.step.lower(worker, batch)

    def trace(self, state: DilocoState, batches: Sequence[Any]) -> jax.stages.Traced:
        """The program of the first worker of this process as a jaxpr, for a census."""
        train_step, worker, batch = self._first(state, batches)
        return train_step.step.trace(worker, batch)

    def _first(self, state: DilocoState, batches: Sequence[Any]) -> tuple[TrainStep, TrainState, Any]:
        """Step, state and batch of the first worker of this process."""
        for train_step, worker, batch in self._match(state, batches):
            if train_step is not None:
                return train_step, worker, batch
        raise AssertionError("every process of a mesh has a worker")

    def _match(self, state: DilocoState, batches: Sequence[Any]) -> list[tuple[TrainStep | None, Any, Any]]:
        """Step, state and batch of every worker; the first two are None for workers of other processes."""
        check_kind("diloco", "state", state, kinds_of(DilocoState))
        is_sequence = isinstance(batches, list | tuple)
        got = len(batches) if is_sequence else type(batches).__name__
        if got != len(self.train_steps):
            raise ValueError(
                f"diloco: there must be one batch for each of {len(self.train_steps)} workers; got {got}. Pass a list "
                "of them, with None for workers of other processes."
            )
        return list(zip(self.train_steps, state.workers, batches, strict=True))


@dataclass(frozen=True, eq=False)
class Diloco:
    """The functions of a DiLoCo run, as `sk.diloco` returns them."""

    train_steps: tuple[TrainStep | None, ...]  # of each worker, None where it has no device of this process
    outer: Optimizer  # the optimizer of the exchange
    mesh: Mesh
    axis: str  # the mesh axis of the workers
    fragments: FragmentOf | None  # the fragment of each leaf, or of each row of it; None: all are fragment 0
    reduce: Algorithm  # the algorithm of the exchange

    def init(self, params: Any, key: jax.Array, carried: Any = None) -> DilocoState:
        """The first state: workers begin with the same parameters of `key`, and draw with keys of their own."""
        workers: list[TrainState | None] = [None] * len(self.train_steps)
        copies: list[dict[str, jax.Array] | None] = [None] * len(self.train_steps)
        for number, train_step in enumerate(self.train_steps):
            if train_step is None:
                continue
            worker = train_step.init(params, key, carried)
            workers[number] = worker._replace(key=jax.random.fold_in(worker.key, number))
            # Copied, because a step donates the buffers of its state.
            copies[number] = leaves_by_path(jax.tree.map(jnp.copy, worker.params))
        present_workers = [worker for worker in workers if worker is not None]
        if any(isinstance(worker.opt_state, Master) for worker in present_workers):
            raise ValueError(
                "diloco: a worker must have one copy of its parameters, which an exchange replaces; got a precision "
                "with a master copy, from which the next step would go on. Pass make_train_step precision='bf16'."
            )
        # All workers have the same parameters: as arrays over the whole mesh they are `params` of the state.
        worker_params = present_workers[0].params
        arrays = join_submeshes(copies, self.mesh, self._specs(worker_params))

        @jax.jit
        def init_outer(fragment: dict[str, jax.Array]) -> Any:
            return self._pin_outer(self.outer.init(fragment), fragment, worker_params)

        # An outer state for each fragment: they are exchanged in different steps, and each has taken its own number of
        # updates.
        outer = [init_outer(_take_members(arrays, members)) for members in self._fragments(worker_params)]
        return DilocoState(tuple(workers), replace_arrays(worker_params, arrays), tuple(outer))

    @property
    def step(self) -> WorkerSteps:
        """A step of each worker on its own batch, `step(state, batches)`."""
        return WorkerSteps(self.train_steps)

    @partial(typed, where="diloco")
    def start(self, state: DilocoState, fragment: int = 0) -> Moved:
        """Sends one fragment, for `finish`: the mean of the workers' movements since the last exchange, float32."""
        parts = self._start(self._rows(state, fragment), state.params, fragment)
        return Moved(parts, fragment)

    def finish(self, state: DilocoState, moved: Moved, *, keep: float = 0.0) -> DilocoState:
        """The outer update with what `start` returned; workers go on from it, with `keep` of their own parameters."""
        check_kind("diloco", "state", state, kinds_of(DilocoState))
        check_kind("diloco", "moved", moved, kinds_of(Moved))
        if not isinstance(keep, Real) or not 0 <= keep < 1:
            raise ValueError(f"diloco: keep must be at least 0 and below 1; got {keep}. Pass for example 0.5.")
        parts, fragment = moved
        outer = list(state.outer)
        rows = self._rows(state, fragment)
        rows, params, outer_state = self._finish(rows, state.params, outer[fragment], parts, keep, fragment)
        outer[fragment] = outer_state
        workers = [self._take_rows(worker, rows) for worker in state.workers]
        return DilocoState(tuple(workers), params, tuple(outer))

    @partial(typed, where="diloco")
    def exchange(self, state: DilocoState, fragment: int = 0) -> DilocoState:
        """`start` and `finish` at once."""
        return self.finish(state, self.start(state, fragment))

    @partial(typed, where="diloco")
    def trace(self, state: DilocoState, fragment: int = 0) -> jax.stages.Traced:
        """The program of `start`, which alone sends over the slow axis, for a census."""
        return self._start.trace(self._rows(state, fragment), state.params, fragment)

    # Two programs run over the mesh of all workers. They get the workers' parameters as one array for each leaf, with
    # the rows of one worker after those of another, so that a device has the rows of its own worker. Beside it they get
    # `params`, the parameters after the last exchange.
    #
    # Worked example: w[8, 6] with rows over "fsdp" of 2, for 3 workers along "pod". The array of all workers has 24
    # rows over ("pod", "fsdp"); a device has 4 of them, and the same 4 of the 8 rows of `params`. The worker's rows
    # have moved away from the rows of `params` since the last exchange. The difference, [4, 6], is summed over "pod"
    # and divided by 3: it is the gradient for the outer optimizer.
    @cached_property
    def _start(self) -> Any:
        reduce = self.reduce.all_reduce
        assert reduce  # `diloco` has refused others

        def start(rows: dict[str, jax.Array], params: Any, fragment: int) -> dict[str, jax.Array]:
            members = self._fragments(params)[fragment]
            specs = self._specs(params)

            def on_device(worker: dict[str, jax.Array], params: dict[str, jax.Array]) -> dict[str, jax.Array]:
                before = _take_members(params, members)
                after = _take_members(worker, members)
                moved = []
                for path, old in before.items():
                    new = after[path].reshape(old.shape)
                    # Old minus new, as a gradient points: the outer optimizer subtracts it, and so goes where the
                    # workers went.
                    moved.append(old.astype(jnp.float32) - new.astype(jnp.float32))
                # The only bytes on the slow axis: a worker sends its movement once in many steps, instead of its
                # gradients in each step, as data parallelism does. The sum stands before the outer optimizer, so that
                # all workers run it alike: after it, the optimizer's states would have to be exchanged too.
                sums = reduce(moved, (self.axis,))
                means = {}
                for path, total in zip(members, sums, strict=True):
                    means[path] = total / len(self.train_steps)
                return means

            exchange = jax.shard_map(
                on_device,
                mesh=self.mesh,
                in_specs=(self._row_specs(params), specs),
                out_specs={path: specs[path] for path in members},
            )
            return exchange(rows, leaves_by_path(params))

        return jax.jit(start, static_argnums=2)

    @cached_property
    def _finish(self) -> Any:
        import optax

        def finish(rows: Any, params: Any, outer: Any, moved: Any, keep: Any, fragment: int) -> Any:
            members = self._fragments(params)[fragment]
            specs = self._specs(params)
            row_specs = self._row_specs(params)
            arrays = leaves_by_path(params)
            before = _take_members(arrays, members)
            # On arrays over the whole mesh: along the slow axis all devices compute the same, and nothing is sent.
            updates, outer = self.outer.update(moved, outer, before)
            arrays = arrays | _set_members(arrays, members, optax.apply_updates(before, updates))

            def on_device(worker: dict[str, jax.Array], params: dict[str, jax.Array]) -> dict[str, jax.Array]:
                exchanged = _take_members(params, members)
                mixed = {}
                for path, x in _take_members(worker, members).items():
                    new = exchanged[path].reshape(x.shape)
                    mixed[path] = (keep * x + (1 - keep) * new).astype(x.dtype)
                return worker | _set_members(worker, members, mixed)

            mix = jax.shard_map(on_device, mesh=self.mesh, in_specs=(row_specs, specs), out_specs=row_specs)
            layouts = {path: NamedSharding(self.mesh, spec) for path, spec in specs.items()}
            # With other layouts than the state's, the next exchange would compile again.
            pinned = lax.with_sharding_constraint(arrays, layouts)
            return mix(rows, arrays), replace_arrays(params, pinned), self._pin_outer(outer, before, params)

        return jax.jit(finish, static_argnums=5, donate_argnums=(1, 2))

    def _specs(self, params: Any) -> dict[str, PartitionSpec]:
        """The layout of each leaf of a worker by path."""
        train_step = next(train_step for train_step in self.train_steps if train_step is not None)
        plan = train_step.step.plan
        assert plan is not None  # `diloco` has refused a step that was loaded
        return leaves_by_path(plan.placement(params, self.mesh).rest)

    def _row_specs(self, params: Any) -> dict[str, PartitionSpec]:
        """The parameters of all workers as one array each, with the rows of one worker after those of another."""
        specs = {}
        for path, spec in self._specs(params).items():
            row_axes = spec_axes(spec)[0] if len(spec) else ()
            columns = spec[1:]
            # The slow axis is major: a worker's rows stay together, on its own devices.
            specs[path] = PartitionSpec((self.axis, *row_axes), *columns)
        return specs

    def _rows(self, state: DilocoState, fragment: int) -> dict[str, jax.Array]:
        """The parameters of all workers, after a check of the arguments."""
        if type(fragment) is not int or not 0 <= fragment < len(state.outer):
            raise ValueError(f"diloco: the fragment must be one of {len(state.outer)}, from 0 on; got {fragment!r}.")
        if any(x.is_deleted() for x in jax.tree.leaves((state.workers, state.params, state.outer))):
            raise ValueError("diloco: the state must be the newest; got one that step, finish or exchange was passed.")
        arrays: list[dict[str, jax.Array] | None] = [None] * len(state.workers)
        for number, worker in enumerate(state.workers):
            if worker is not None:
                arrays[number] = leaves_by_path(worker.params)
        return join_submeshes(arrays, self.mesh, self._row_specs(state.params), rows=True)

    def _take_rows(self, worker: TrainState | None, rows: dict[str, jax.Array]) -> TrainState | None:
        """The state of a worker with its parameters taken from the rows of all workers."""
        if worker is None:
            return None
        arrays = {}
        for path, x in leaves_by_path(worker.params).items():
            shards = []
            for shard in rows[path].addressable_shards:
                # Of the rows of all workers those on this worker's devices. The buffers are taken as they are: nothing
                # is copied, but for a scalar, which is one of the rows.
                if shard.device in x.sharding.device_set:
                    shards.append(shard.data if x.shape else shard.data[0])
            arrays[path] = jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)
        return worker._replace(params=replace_arrays(worker.params, arrays))

    def _pin_outer(self, outer: Any, arrays: dict[str, jax.Array], params: Any) -> Any:
        """The outer state of a fragment, with each array that mirrors a parameter in the parameter's layout."""
        specs = self._specs(params)
        storage = match_storage(outer, arrays, {path: Storage(specs[path]) for path in arrays})
        return lax.with_sharding_constraint(outer, shardings(self.mesh, storage))

    def _fragments(self, params: Any) -> list[dict[str, Any]]:
        """The leaves of each fragment by path, each with its rows; `...` for a whole leaf.

        Worked example: a leaf "w" whose two rows are of fragments 0 and 1, and a leaf "b" of fragment 1, give
        [{"w": [0]}, {"w": [1], "b": ...}].
        """
        specs = self._specs(params)
        members: dict[int, dict[str, Any]] = {}
        for path, x in leaves_by_path(params).items():
            numbers = np.asarray(0)  # one number for the leaf, or one for each row
            if self.fragments is not None:
                numbers = np.asarray(self.fragments(path, x.shape))
            _check_fragments(path, x.shape, specs[path], numbers)
            for fragment in np.unique(numbers).tolist():
                rows: Any = ...
                if numbers.ndim:
                    rows = np.flatnonzero(numbers == fragment)
                members.setdefault(fragment, {})[path] = rows
        used = sorted(members)
        if used != list(range(len(used))):
            raise ValueError(f"diloco: fragments must be numbered from 0, none left out; got {used}. Number them so.")
        return [members[fragment] for fragment in used]


def _check_fragments(path: str, shape: tuple[int, ...], spec: PartitionSpec, numbers: np.ndarray) -> None:
    """Refuses fragments of a leaf that are no integers, or not one for each of its rows."""
    if numbers.dtype.kind not in "iu":
        raise TypeError(f"diloco: fragments must return ints; got {numbers!r} for leaf {path}.")
    splits_rows = len(spec) and spec[0] is not None  # a padded dim is split
    if numbers.ndim and (splits_rows or numbers.shape != shape[:1]):
        raise ValueError(
            "diloco: fragments of rows must be a number for each row of a dim 0 that is neither split nor "
            f"padded; got {numbers.size} for leaf {path} of shape {shape}, split as {spec}. "
            "Give the leaf one number, or split another dim."
        )


def _take_members(arrays: dict[str, jax.Array], members: dict[str, Any]) -> dict[str, jax.Array]:
    """The arrays of a fragment."""
    taken = {}
    for path, rows in members.items():  # `...` takes all rows
        taken[path] = arrays[path][rows]
    return taken


def _set_members(arrays: Any, members: dict[str, Any], values: Any) -> dict[str, jax.Array]:
    """The leaves of a fragment, with its values in the rows that are its members."""
    leaves = {}
    for path, rows in members.items():
        leaves[path] = arrays[path].at[rows].set(values[path])
    return leaves


@typed
def diloco(
    make_step: Callable[[Mesh], TrainStep],
    outer: Optimizer,
    *,
    mesh: Mesh,
    axis: str,
    fragments: FragmentOf | None = None,
    reduce: Algorithm = PLAIN,
) -> Diloco:
    """Trains with workers that exchange parameters once in many steps, over a slow axis.

    In each round you call `step` as often as you like, and every worker trains alone. Then you call `exchange`: it
    passes the mean of their movements to an outer optimizer as a gradient, and all workers go on from its result. With
    one step a round and `outer=optax.sgd(1.0)` you get data parallelism, if the step is SGD and the examples of all
    workers have the same weight.

    Args:
        make_step: `make_step(mesh) -> TrainStep` for one worker. It gets this worker's part of `mesh`, where `axis` has
            size 1. An exchange replaces the parameters alone, so do not use optax's schedule_free or lookahead: they
            would go on from a copy in their state.
        outer: the optimizer of a dict of leaves by path, per element; `optax.sgd(0.7, momentum=0.9, nesterov=True)`.
        mesh, axis: the mesh of all workers, and the axis that numbers them.
        fragments: `(path, shape) -> number`, or a number for each row (layer) of dim 0. An exchange sends one fragment.
            None: everything.
        reduce: the algorithm of the exchange, such as `sk.algorithms.compressed(jnp.int4)`.

    Returns:
        A Diloco with `init(params, key, carried=None)`, `step(state, batches)`, `exchange(state, fragment)` and its
            halves `start` and `finish`. Steps and `finish` donate the state.

    Raises:
        TypeError, ValueError: an axis that the mesh does not have or the plan uses; a step of a file; an algorithm
            without all_reduce. At a call: a master copy, an unknown fragment, rows of a split dim 0, or other batches.

    Cost: a step sends nothing over `axis`. An exchange sends one all_reduce, by `reduce`, of the device's parts of the
        fragment in float32. A device holds its part of the parameters twice, and outer state of the same size.

    Example:
        >>> grad_fn = sk.value_and_grad(lambda params, batch, keys: jnp.mean((batch @ params - 1) ** 2))
        >>> make_step = lambda mesh: sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh, plan=sk.fsdp("model"))
        >>> run = sk.diloco(make_step, optax.sgd(0.7, momentum=0.9, nesterov=True), mesh=mesh, axis="data")
        >>> state = run.init(jnp.zeros(3), jax.random.key(0))
        >>> for _ in range(10):
        ...     state, metrics = run.step(state, [jnp.ones((8, 3)), jnp.zeros((8, 3))])
        >>> state = run.exchange(state)
        >>> [round(float(each["loss"]), 3) for each in metrics]
        [0.0, 1.0]

    Source: Douillard et al., DiLoCo (arXiv:2311.08105); Douillard et al., Streaming DiLoCo (arXiv:2501.18512).
    """
    if axis not in mesh.shape:
        raise ValueError(
            f"diloco: axis must be one of the mesh, {format_sizes(mesh.shape.items())}; got {axis!r}. Add it to "
            "make_mesh."
        )
    train_steps: list[TrainStep | None] = []
    programs = AlikePrograms()
    for worker_mesh in submeshes(mesh, axis):
        processes = {device.process_index for device in worker_mesh.devices.flat}
        if jax.process_index() not in processes:
            train_steps.append(None)
            continue
        train_step = make_step(worker_mesh)
        _check_train_step(train_step, worker_mesh, axis)
        train_steps.append(_compile_once(train_step, worker_mesh, programs))
    reduce.check("diloco", "reduce", "all_reduce", (axis,))
    if reduce.feedback:
        raise ValueError(
            "diloco: reduce= must be an Algorithm without error feedback, because no exchange keeps what it left out "
            f"for the next; got {reduce}. Leave out feedback=True."
        )
    return Diloco(tuple(train_steps), outer, auto_mesh(mesh), axis, fragments, reduce)


def _compile_once(train_step: TrainStep, mesh: Mesh, programs: AlikePrograms) -> TrainStep:
    """The step of a worker, which shares the executable of an earlier worker of this process that is alike."""
    devices = list(mesh.devices.flat)
    is_local = all(device.process_index == jax.process_index() for device in devices)
    # A process has several workers where devices are simulated. That other platforms place an executable on other
    # devices was not tried.
    if not is_local or devices[0].platform != "cpu":
        return train_step
    return train_step._replace(step=train_step.step.with_run(lambda run: AlikeRun(run, programs, devices)))


def _check_train_step(train_step: Any, mesh: Mesh, axis: str) -> None:
    """Refuses a result of `make_step` that is no step of one worker on its part of the mesh."""
    if not isinstance(train_step, TrainStep) or train_step.step.mesh.devices.tolist() != mesh.devices.tolist():
        raise TypeError("diloco: make_step must return a TrainStep on the mesh that it is passed; got another.")
    plan = train_step.step.plan
    if plan is None or axis in plan.axes:
        raise ValueError(
            f"diloco: make_step must build the step of one worker, with a plan that does not use {axis!r}; got the "
            f"plan {plan}. Pass lambda mesh: sk.make_train_step(..., mesh=mesh, plan=...) without that axis."
        )
