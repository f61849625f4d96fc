"""DiLoCo: workers that train alone for many steps, and then exchange what they have learned.

A worker is one index of a slow axis, such as "pod". Its step is any step of `make_train_step` with a plan over other
axes, run for all workers at once by `jax.vmap` over the slow one, so that nothing is sent there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from shardkit._arguments.checks import sized
from shardkit._arguments.typed import Optimizer, typed
from shardkit.collectives.algorithms import PLAIN, Algorithm
from shardkit.meshes.layout import path_name
from shardkit.plans.plan import Plan
from shardkit.plans.storage import Held, is_padded
from shardkit.remat.recompute import Traced
from shardkit.steps.builder import TrainStep
from shardkit.steps.state import TrainState, optimizer_held, shardings, state_held

FragmentOf = Callable[[str, tuple[int, ...]], int | Sequence[int]]


class DilocoState(NamedTuple):
    """What workers carry from step to step."""

    # parameters and optimizer state have a row for each worker as dim 0, split over the axis; step and key are of all
    workers: TrainState
    params: Any  # after the last exchange, the same on all workers
    outer: tuple[Any, ...]  # the outer optimizer's state for each fragment


@dataclass(frozen=True, eq=False)
class Diloco:
    """The functions of a DiLoCo run, as `sk.diloco` returns them."""

    train_step: TrainStep  # the step of one worker
    outer: Optimizer  # the optimizer of the exchange
    axis: str  # the mesh axis of the workers
    fragments: FragmentOf | None  # the fragment of each leaf, or of each row of it; None: all are fragment 0
    reduce: Algorithm  # the algorithm of the exchange
    mesh: Any
    plan: Plan  # of a worker
    count: int  # the number of workers

    def init(self, params: Any, key: jax.Array) -> DilocoState:
        """The first state: every worker begins with the same parameters, and draws with the same key."""
        return self._first(self.train_step.init(params, key))

    def step(self, state: DilocoState, batch: Any) -> tuple[DilocoState, dict[str, jax.Array]]:
        """A step of every worker on its part of the batch, the examples in order; metrics are [workers]."""
        sizes = sorted({jnp.shape(x)[0] for x in jax.tree.leaves(batch) if jnp.ndim(x)})
        if any(size % self.count for size in sizes):
            raise ValueError(
                f"diloco: the examples of a batch must be divisible by its workers; got {', '.join(map(str, sizes))} "
                f"examples for {self.count} workers. Pad with examples of weight 0, or choose another batch."
            )
        return self._step(state, batch)

    def start(self, state: DilocoState, fragment: int = 0) -> Any:
        """Sends one fragment: the mean over workers of what they have moved away from the last exchange, float32.

        `finish` applies it, at once or some steps later; both may be jitted together with steps.
        """
        if not 0 <= fragment < len(state.outer):
            raise ValueError(f"diloco: the fragment must be one of {len(state.outer)}, from 0 on; got {fragment}.")
        return self._start(state, fragment)

    def finish(self, state: DilocoState, moved: Any, fragment: int = 0, *, keep: float = 0.0) -> DilocoState:
        """The outer update with what `start` returned; workers go on from it, with `keep` of their own parameters."""
        return self._finish(state, moved, keep, fragment)

    def exchange(self, state: DilocoState, fragment: int = 0) -> DilocoState:
        """`start` and `finish` at once."""
        return self.finish(state, self.start(state, fragment), fragment)

    @cached_property
    def _step(self) -> Any:
        step, axis, count = self.train_step.step, self.axis, self.count

        def all_workers(state: DilocoState, batch: Any) -> Any:
            workers: Any = state.workers
            number, key = workers.step, workers.key
            own: Any = workers._replace(step=None, key=None)
            parts = jax.tree.map(lambda x: _parts(x, count), batch)
            keys = jax.vmap(lambda worker: jax.random.fold_in(key, worker))(jnp.arange(count))

            def one(own: Any, batch: Any, key: Any, number: Any) -> Any:
                new: Any
                new, metrics = step.inside(own._replace(step=number, key=key), batch)
                return new._replace(step=None, key=None), metrics

            # Over the slow axis nothing is sent: vmap splits every array of the step over it, also inside shard_map,
            # and a worker's collectives run over the axes of its plan. The step is traced before: jax types what a vmap
            # inside of this one returns as varying over the slow axis, and the step would sum it over that.
            alone = jax.eval_shape(lambda *each: jax.tree.map(lambda x: x[0], each), own, parts, keys)
            traced = Traced(one, *alone, number)
            new, metrics = jax.vmap(traced, (0, 0, 0, None), spmd_axis_name=axis)(own, parts, keys, number)
            new = self._pinned(new)._replace(step=number + 1, key=key)
            return state._replace(workers=new), metrics

        return jax.jit(all_workers, donate_argnums=0)

    @cached_property
    def _first(self) -> Any:
        def first(state: Any) -> DilocoState:
            own = state._replace(step=None, key=None)
            rows = self._pinned(jax.tree.map(lambda x: jnp.broadcast_to(x[None], (self.count, *x.shape)), own))
            parts = [_part(state.params, members) for members in self._fragments(state.params)]
            outer = tuple(self._outer_pinned(self.outer.init(part), state.params, part) for part in parts)
            workers = rows._replace(step=state.step, key=state.key)
            return DilocoState(workers, jax.tree.map(jnp.copy, state.params), outer)

        return jax.jit(first)

    @cached_property
    def _start(self) -> Any:
        def start(state: DilocoState, fragment: int) -> Any:
            members, layout = self._fragments(state.params)[fragment], self._specs(state.params)
            specs = {path: layout[path] for path in members}
            rows = {path: PartitionSpec(self.axis, *spec) for path, spec in specs.items()}

            total = self.reduce.all_reduce
            assert total  # `diloco` has refused others

            def on_device(own: dict[str, jax.Array], old: dict[str, jax.Array]) -> dict[str, jax.Array]:
                moved = {path: old[path].astype(jnp.float32) - own[path][0].astype(jnp.float32) for path in old}
                # The only bytes on the slow axis. What a worker moved goes over it, not its gradients, and once in many
                # steps: a sum in each step would be data parallelism. Before the outer optimizer, which all workers
                # run alike: after it their states would have to be exchanged too.
                sums = total([moved[path] for path in moved], (self.axis,))
                return {path: x / self.count for path, x in zip(moved, sums, strict=True)}

            mapped = jax.shard_map(on_device, mesh=self.mesh, in_specs=(rows, specs), out_specs=specs)
            return mapped(_part(state.workers.params, members, workers=True), _part(state.params, members))

        return jax.jit(start, static_argnums=1)

    @cached_property
    def _finish(self) -> Any:
        def finish(state: DilocoState, moved: Any, keep: Any, fragment: int) -> DilocoState:
            members = self._fragments(state.params)[fragment]
            old = _part(state.params, members)
            updates, inner = self.outer.update(moved, state.outer[fragment], old)
            inner = self._outer_pinned(inner, state.params, old)
            new = optax.apply_updates(old, updates)
            mine = _part(state.workers.params, members, workers=True)
            mine = {path: (keep * x + (1 - keep) * new[path][None]).astype(x.dtype) for path, x in mine.items()}
            workers: Any = state.workers
            rows = _with_part(workers.params, members, mine, workers=True)
            pinned = self._pinned(workers._replace(params=rows, step=None, key=None))
            workers = pinned._replace(step=workers.step, key=workers.key)
            outer = tuple(inner if k == fragment else each for k, each in enumerate(state.outer))
            return DilocoState(workers, _with_part(state.params, members, new), outer)

        return jax.jit(finish, static_argnums=3, donate_argnums=0)

    def _specs(self, params: Any) -> dict[str, PartitionSpec]:
        return _named(self.plan.placement(params, self.mesh).rest)

    def _pinned(self, workers: Any) -> Any:
        """The rows of all workers in their layout: another would be moved, and would compile the next step again."""
        alone = jax.eval_shape(lambda tree: jax.tree.map(lambda x: x[0], tree), workers)
        held = state_held("diloco", alone, self.mesh, self.plan)
        rows = jax.tree.map(lambda each: NamedSharding(self.mesh, PartitionSpec(self.axis, *each.spec)), held)
        return lax.with_sharding_constraint(workers, rows)

    def _outer_pinned(self, outer: Any, params: Any, part: dict[str, jax.Array]) -> Any:
        """The outer state of a fragment: what mirrors a parameter, in its layout."""
        held = optimizer_held(outer, part, {path: Held(self._specs(params)[path]) for path in part})
        return lax.with_sharding_constraint(outer, shardings(self.mesh, held))

    def _fragments(self, params: Any) -> list[dict[str, Any]]:
        """The leaves of each fragment by path, each with its rows; a slice of all rows for a whole leaf."""
        specs, numbers = self._specs(params), dict[str, np.ndarray]()
        for path, x in _named(params).items():
            numbers[path] = np.asarray(self.fragments(path, x.shape) if self.fragments else 0)
            split = is_padded(x) or (len(specs[path]) and specs[path][0] is not None)
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
                found[fragment][path] = np.flatnonzero(of == fragment) if of.ndim else slice(None)
        return found


def _named(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: is_padded(x) or isinstance(x, PartitionSpec))
    return {path_name(path): leaf for path, leaf in leaves}


def _array(x: Any) -> Any:
    return x.array if is_padded(x) else x


def _part(tree: Any, members: dict[str, Any], *, workers: bool = False) -> dict[str, jax.Array]:
    """The arrays of a fragment; of `workers` with their dim in front."""
    named = _named(tree)
    return {path: _array(named[path])[(slice(None), rows) if workers else rows] for path, rows in members.items()}


def _with_part(tree: Any, members: dict[str, Any], part: dict[str, jax.Array], *, workers: bool = False) -> Any:
    """The tree with the arrays of a fragment in their places."""

    def one(path: Any, leaf: Any) -> Any:
        name = path_name(path)
        if name not in members:
            return leaf
        at = (slice(None), members[name]) if workers else members[name]
        new = _array(leaf).at[at].set(part[name])
        return replace(leaf, array=new) if is_padded(leaf) else new

    return jax.tree_util.tree_map_with_path(one, tree, is_leaf=is_padded)


def _parts(x: Any, count: int) -> Any:
    """A row of examples for each worker; a scalar is the same for all."""
    return x.reshape(count, x.shape[0] // count, *x.shape[1:]) if jnp.ndim(x) else jnp.broadcast_to(x, count)


@typed
def diloco(
    train_step: TrainStep,
    outer: Optimizer,
    *,
    axis: str,
    fragments: FragmentOf | None = None,
    reduce: Algorithm = PLAIN,
) -> Diloco:
    """Training whose workers exchange parameters once in many steps, over a slow axis.

    In each round every worker takes as many steps of its own as you call; then `exchange` passes the mean of what they
    moved to an outer optimizer as a gradient, and all go on from its result. With one step a round and
    `outer=optax.sgd(1.0)` it is data parallelism, if the step is SGD and all workers' examples weigh the same.

    Args:
        train_step: what `make_train_step` returned, for a mesh that has `axis` too and a plan that does not use it.
        outer: the outer optimizer; of DiLoCo `optax.sgd(0.7, momentum=0.9, nesterov=True)`. Its state must be per
            element.
        axis: the mesh axis of the workers.
        fragments: `(path, shape) -> number`, or a number for each row (layer) of dim 0: what one exchange sends, for
            streaming. None: everything is fragment 0.
        reduce: the algorithm of the exchange, such as `sk.algorithms.compressed(jnp.int4)`.

    Returns:
        A Diloco with `init(params, key)`, `step(state, batch)`, `exchange(state, fragment)`, and its halves `start` and
            `finish`. Steps and `finish` donate the state.

    Raises:
        TypeError: an argument of another type.
        ValueError: an axis that the mesh does not have or the plan uses; a step that was loaded from a file; an
            algorithm without all_reduce. At a call a fragment that is none, rows of a leaf whose dim 0 is split, or
            examples that the workers do not divide.

    Cost: a step sends nothing over `axis`. An exchange sends one all_reduce of the fragment in float32, of the parts
        that a device has, by `reduce`. A device holds its part of the parameters twice, and outer state of as much.

    Example:
        >>> loss_fn = lambda params, batch, keys: jnp.mean((batch @ params - 1) ** 2)
        >>> inner = sk.make_train_step(sk.value_and_grad(loss_fn), optax.sgd(0.1), mesh=mesh, plan=sk.fsdp("model"))
        >>> run = sk.diloco(inner, optax.sgd(0.7, momentum=0.9, nesterov=True), axis="data")
        >>> state = run.init(jnp.zeros(3), jax.random.key(0))
        >>> for _ in range(10):
        ...     state, metrics = run.step(state, jnp.ones((16, 3)))
        >>> state = run.exchange(state)
        >>> metrics["loss"].shape, state.workers.params.shape, state.params.shape
        ((2,), (2, 3), (3,))

    Source: Douillard et al., DiLoCo (arXiv:2311.08105); Douillard et al., Streaming DiLoCo (arXiv:2501.18512).
    """
    step = train_step.step
    if step.plan is None:
        raise ValueError("diloco: the step must be one that make_train_step built; got one that was loaded. Build it.")
    if axis not in step.mesh.shape or axis in step.plan.axes:
        raise ValueError(
            f"diloco: axis must be one of the mesh that the plan of a worker does not use; got {axis!r} for the mesh "
            f"{sized(step.mesh.shape.items())} and the plan {step.plan}. Add an axis to make_mesh, and leave it out of "
            "the plan."
        )
    reduce.check("diloco", "reduce", "all_reduce", (axis,))
    return Diloco(train_step, outer, axis, fragments, reduce, step.mesh, step.plan, step.mesh.shape[axis])
