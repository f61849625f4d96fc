"""DiLoCo: workers that train alone for many steps, and then exchange what they have learned.

A worker is one index of a slow axis, as "pod". Its step, any of `make_train_step` on the devices at that index, is a
program of its own: between exchanges no worker waits for another, and nothing can be sent.
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

from shardkit._arguments.checks import sized
from shardkit._arguments.typed import Optimizer, check_kind, kinds_of, typed
from shardkit.collectives.algorithms import PLAIN, Algorithm
from shardkit.meshes.layout import spec_axes
from shardkit.meshes.submeshes import join_submeshes, submeshes
from shardkit.plans.axis_types import auto_mesh
from shardkit.plans.storage import Storage, collect_arrays, replace_arrays
from shardkit.steps.builder import TrainStep
from shardkit.steps.state import Master, TrainState, optimizer_held, shardings

FragmentOf = Callable[[str, tuple[int, ...]], int | Sequence[int]]


class DilocoState(NamedTuple):
    """What a run carries from step to step."""

    workers: tuple[TrainState | None, ...]  # of each worker, on its devices; None where none of them is of this process
    params: Any  # after the last exchange, on all devices, the same for all workers
    outer: tuple[Any, ...]  # the outer optimizer's state for each fragment

    @property
    def step(self) -> jax.Array:
        """How many steps the workers of this process took, as a TrainState has it: a checkpoint is named by it."""
        return next(each.step for each in self.workers if each)


class Moved(NamedTuple):
    """What `start` has sent of a fragment, for one `finish`."""

    parts: dict[str, jax.Array]  # by path
    fragment: int


@dataclass(frozen=True, eq=False)
class WorkerSteps:
    """The steps of all workers; `Diloco.step` is one."""

    train_steps: tuple[TrainStep | None, ...]

    def __call__(self, state: DilocoState, batches: Sequence[Any]) -> tuple[DilocoState, list[Any]]:
        """A step of each worker on its own batch, and the metrics of each; None for workers of other processes."""
        workers, metrics = [], []
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
        """The same, as a jaxpr, for a census."""
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
        got = len(batches) if isinstance(batches, list | tuple) else type(batches).__name__
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
        workers: list[TrainState | None] = []
        copies: list[dict[str, jax.Array] | None] = []
        for number, train_step in enumerate(self.train_steps):
            worker = copy = None
            if train_step is not None:
                worker = train_step.init(params, key, carried)
                worker = worker._replace(key=jax.random.fold_in(worker.key, number))
                copy = collect_arrays(jax.tree.map(jnp.copy, worker.params))
                first = worker.params
            workers.append(worker)
            copies.append(copy)
        if any(isinstance(worker.opt_state, Master) for worker in workers if worker is not None):
            raise ValueError(
                "diloco: a worker must have one copy of its parameters, which an exchange replaces; got a precision "
                "with a master copy, from which the next step would go on. Pass make_train_step precision='bf16'."
            )
        whole = join_submeshes(copies, self.mesh, self._specs(first))

        def init_outer(fragment: dict[str, jax.Array]) -> Any:
            return self._pin_outer(self.outer.init(fragment), fragment, first)

        init_outer = jax.jit(init_outer)
        outer = [init_outer(_part(whole, members)) for members in self._fragments(first)]
        return DilocoState(tuple(workers), replace_arrays(first, whole), tuple(outer))

    @property
    def step(self) -> WorkerSteps:
        """A step of each worker on its own batch, `step(state, batches)`."""
        return WorkerSteps(self.train_steps)

    @partial(typed, where="diloco")
    def start(self, state: DilocoState, fragment: int = 0) -> Moved:
        """Sends one fragment, for `finish`: the mean of what workers moved since the last exchange, float32."""
        return Moved(self._start(self._rows(state, fragment), state.params, fragment), fragment)

    def finish(self, state: DilocoState, moved: Moved, *, keep: float = 0.0) -> DilocoState:
        """The outer update with what `start` returned; workers go on from it, with `keep` of their own parameters."""
        check_kind("diloco", "state", state, kinds_of(DilocoState))
        check_kind("diloco", "moved", moved, kinds_of(Moved))
        if not isinstance(keep, Real) or not 0 <= keep < 1:
            raise ValueError(f"diloco: keep must be at least 0 and below 1; got {keep}. Pass for example 0.5.")
        parts, at = moved
        rows, whole, outer = self._finish(self._rows(state, at), state.params, state.outer[at], parts, keep, at)
        workers = [self._own(each, rows) for each in state.workers]
        others = (outer if k == at else each for k, each in enumerate(state.outer))
        return DilocoState(tuple(workers), whole, tuple(others))

    @partial(typed, where="diloco")
    def exchange(self, state: DilocoState, fragment: int = 0) -> DilocoState:
        """`start` and `finish` at once."""
        return self.finish(state, self.start(state, fragment))

    @partial(typed, where="diloco")
    def trace(self, state: DilocoState, fragment: int = 0) -> jax.stages.Traced:
        """The program of `start`, which alone sends over the slow axis, for a census."""
        return self._start.trace(self._rows(state, fragment), state.params, fragment)

    @cached_property
    def _start(self) -> Any:
        def start(rows: dict[str, jax.Array], params: Any, fragment: int) -> dict[str, jax.Array]:
            members, specs, total = self._fragments(params)[fragment], self._specs(params), self.reduce.all_reduce
            assert total  # `diloco` has refused others

            def on_device(own: dict[str, jax.Array], whole: dict[str, jax.Array]) -> dict[str, jax.Array]:
                old, own = _part(whole, members), _part(own, members)
                own = {path: own[path].reshape(x.shape).astype(jnp.float32) for path, x in old.items()}
                moved = [x.astype(jnp.float32) - own[path] for path, x in old.items()]
                # The only bytes on the slow axis. What a worker moved goes over it, not its gradients, and once in many
                # steps: a sum in each step would be data parallelism. Before the outer optimizer, which all workers
                # run alike: after it their states would have to be exchanged too.
                sums = zip(members, total(moved, (self.axis,)), strict=True)
                return {path: x / len(self.train_steps) for path, x in sums}

            out = {path: specs[path] for path in members}
            mapped = jax.shard_map(on_device, mesh=self.mesh, in_specs=(self._row_specs(params), specs), out_specs=out)
            return mapped(rows, collect_arrays(params))

        return jax.jit(start, static_argnums=2)

    @cached_property
    def _finish(self) -> Any:
        import optax

        def finish(rows: Any, params: Any, outer: Any, moved: Any, keep: Any, fragment: int) -> Any:
            members, specs = self._fragments(params)[fragment], self._specs(params)
            old = _part(collect_arrays(params), members)
            updates, outer = self.outer.update(moved, outer, old)
            arrays = collect_arrays(params)
            whole = arrays | _with_part(arrays, members, optax.apply_updates(old, updates))

            def on_device(own: dict[str, jax.Array], whole: dict[str, jax.Array]) -> dict[str, jax.Array]:
                new, mine = _part(whole, members), _part(own, members)
                new = {path: new[path].reshape(x.shape) for path, x in mine.items()}
                mixed = {path: (keep * x + (1 - keep) * new[path]).astype(x.dtype) for path, x in mine.items()}
                return own | _with_part(own, members, mixed)

            row_specs = self._row_specs(params)
            mapped = jax.shard_map(on_device, mesh=self.mesh, in_specs=(row_specs, specs), out_specs=row_specs)
            layout = {path: NamedSharding(self.mesh, spec) for path, spec in specs.items()}
            pinned = lax.with_sharding_constraint(whole, layout)  # another would compile the next exchange again
            return mapped(rows, whole), replace_arrays(params, pinned), self._pin_outer(outer, old, params)

        return jax.jit(finish, static_argnums=5, donate_argnums=(1, 2))

    def _specs(self, params: Any) -> dict[str, PartitionSpec]:
        plan = next(each.step.plan for each in self.train_steps if each)
        assert plan is not None  # `diloco` has refused a step that was loaded
        return collect_arrays(plan.placement(params, self.mesh).rest)

    def _row_specs(self, params: Any) -> dict[str, PartitionSpec]:
        """The parameters of all workers as one array each, with the rows of one worker after those of another."""
        found = {}
        for path, spec in self._specs(params).items():
            first = spec_axes(spec)[0] if len(spec) else ()
            found[path] = PartitionSpec((self.axis, *first), *spec[1:])
        return found

    def _rows(self, state: DilocoState, fragment: int) -> dict[str, jax.Array]:
        if type(fragment) is not int or not 0 <= fragment < len(state.outer):
            raise ValueError(f"diloco: the fragment must be one of {len(state.outer)}, from 0 on; got {fragment!r}.")
        if any(x.is_deleted() for x in jax.tree.leaves((state.workers, state.params, state.outer))):
            raise ValueError("diloco: the state must be the newest; got one that step, finish or exchange was passed.")
        named = [each and collect_arrays(each.params) for each in state.workers]
        return join_submeshes(named, self.mesh, self._row_specs(state.params), rows=True)

    def _own(self, state: TrainState | None, rows: dict[str, jax.Array]) -> TrainState | None:
        """The state of a worker with its parameters out of those of all."""
        if state is None:
            return None
        own = {}
        for path, x in collect_arrays(state.params).items():
            here = [each.data for each in rows[path].addressable_shards if each.device in x.sharding.device_set]
            here = here if x.shape else [each[0] for each in here]
            own[path] = jax.make_array_from_single_device_arrays(x.shape, x.sharding, here)
        return state._replace(params=replace_arrays(state.params, own))

    def _pin_outer(self, outer: Any, part: dict[str, jax.Array], params: Any) -> Any:
        """The outer state of a fragment: what mirrors a parameter, in its layout."""
        specs = self._specs(params)
        held = optimizer_held(outer, part, {path: Storage(specs[path]) for path in part})
        return lax.with_sharding_constraint(outer, shardings(self.mesh, held))

    def _fragments(self, params: Any) -> list[dict[str, Any]]:
        """The leaves of each fragment by path, each with its rows; `...` for a whole leaf."""
        specs, numbers = self._specs(params), dict[str, np.ndarray]()
        for path, x in collect_arrays(params).items():
            numbers[path] = np.asarray(self.fragments(path, x.shape) if self.fragments else 0)
            if numbers[path].dtype.kind not in "iu":
                raise TypeError(f"diloco: fragments must return ints; got {numbers[path]!r} for leaf {path}.")
            split = len(specs[path]) and specs[path][0] is not None  # a padded dim is
            if numbers[path].ndim and (split or numbers[path].shape != x.shape[:1]):
                raise ValueError(
                    "diloco: fragments of rows must be a number for each row of a dim 0 that is neither split nor "
                    f"padded; got {numbers[path].size} for leaf {path} of shape {x.shape}, split as {specs[path]}. "
                    "Give the leaf one number, or split another dim."
                )
        known = sorted({int(each) for of in numbers.values() for each in of.flat})
        if known != [*range(len(known))]:
            raise ValueError(f"diloco: fragments must be numbered from 0, none left out; got {known}. Number them so.")
        found: list[dict[str, Any]] = [{} for _ in known]
        for path, of in numbers.items():
            for fragment in np.unique(of):
                found[fragment][path] = np.flatnonzero(of == fragment) if of.ndim else ...
        return found


def _part(named: dict[str, jax.Array], members: dict[str, Any]) -> dict[str, jax.Array]:
    """The arrays of a fragment."""
    return {path: named[path][rows] for path, rows in members.items()}


def _with_part(named: Any, members: dict[str, Any], part: Any) -> dict[str, jax.Array]:
    """The arrays of its leaves with those of a fragment in their places."""
    return {path: named[path].at[rows].set(part[path]) for path, rows in members.items()}


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
    """Training whose workers exchange parameters once in many steps, over a slow axis.

    In each round every worker takes as many steps of its own as you call; then `exchange` passes the mean of what they
    moved to an outer optimizer as a gradient, and all go on from its result. With one step a round and
    `outer=optax.sgd(1.0)` it is data parallelism, if the step is SGD and all workers' examples weigh the same.

    Args:
        make_step: `make_step(mesh) -> TrainStep`, of a worker, with its part of `mesh`; `axis` has size 1 there. An
            exchange replaces the parameters alone: optax's schedule_free or lookahead would go on from their own.
        outer: the optimizer of a dict of leaves by path, per element; `optax.sgd(0.7, momentum=0.9, nesterov=True)`.
        mesh, axis: the mesh of all workers, and its axis along which they are.
        fragments: `(path, shape) -> number`, or one for each row (layer) of dim 0: what an exchange sends; None: all.
        reduce: the algorithm of the exchange, such as `sk.algorithms.compressed(jnp.int4)`.

    Returns:
        A Diloco with `init(params, key, carried=None)`, `step(state, batches)`, `exchange(state, fragment)` and its
            halves `start` and `finish`. Steps and `finish` donate the state.

    Raises:
        TypeError, ValueError: an axis that the mesh does not have or the plan uses; a step of a file; an algorithm
            without all_reduce. At a call a master copy, no such fragment, rows of a split dim 0, or other batches.

    Cost: a step sends nothing over `axis`. An exchange sends one all_reduce of the fragment in float32, of the parts
        that a device has, by `reduce`. A device holds its part of the parameters twice, and outer state of as much.

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
            f"diloco: axis must be one of the mesh, {sized(mesh.shape.items())}; got {axis!r}. Add it to make_mesh."
        )
    here, steps = jax.process_index(), list[TrainStep | None]()
    for part in submeshes(mesh, axis):
        if all(device.process_index != here for device in part.devices.flat):
            steps.append(None)
            continue
        steps.append(each := make_step(part))
        if not (isinstance(each, TrainStep) and each.step.mesh.devices.tolist() == part.devices.tolist()):
            raise TypeError("diloco: make_step must return a TrainStep on the mesh that it is passed; got another.")
        if each.step.plan is None or axis in each.step.plan.axes:
            raise ValueError(
                f"diloco: make_step must build the step of one worker, whose plan does not use {axis!r}; got the plan "
                f"{each.step.plan}. Pass lambda mesh: sk.make_train_step(..., mesh=mesh, plan=...) without that axis."
            )
    reduce.check("diloco", "reduce", "all_reduce", (axis,))
    return Diloco(tuple(steps), outer, auto_mesh(mesh), axis, fragments, reduce)
