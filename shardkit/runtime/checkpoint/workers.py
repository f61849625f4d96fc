"""The workers of a DiLoCo run as a checkpoint holds them: each leaf as one array of all workers, along a first dim.

A process has the arrays of its workers alone, and in a job of several processes orbax writes arrays of all devices.

For example of two workers with parameters w of shape [8, 4]:

    in the state           workers.0.params.w [8, 4] and workers.1.params.w [8, 4], each on its worker's devices
    in a checkpoint        workers.params.w [2, 8, 4], over all devices
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit.meshes.layout import canonical
from shardkit.meshes.submeshes import join_submeshes
from shardkit.plans.storage import is_padded, stored_array
from shardkit.steps.diloco import DilocoState

_WORKER = re.compile(r"workers\.(\d+)\.")


@dataclass(frozen=True)
class Workers:
    """How many workers a state has, and the axis of its mesh along which they are; of a TrainState none."""

    count: int = 0
    mesh: Mesh | None = None
    axis: str | None = None

    def stack(self, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The arrays of this process's workers as those of all, [workers, ...], the others unchanged."""
        if self.mesh is None:
            return dict(arrays)
        shared: dict[str, jax.Array] = {}
        by_worker: list[dict[str, Any]] = [{} for _ in range(self.count)]
        specs = {}
        for path, x in arrays.items():
            name, worker = self._split_path(path)
            if worker is None:
                shared[name] = x
            else:
                by_worker[worker][name] = x
                sharding: Any = x.sharding
                specs[name] = PartitionSpec(self.axis, *sharding.spec)
        stacked = list(map(_add_dims, by_worker))
        return join_submeshes(stacked, self.mesh, specs, rows=True) | shared

    def stack_records(self, records: Mapping[str, Any]) -> dict[str, Any]:
        """The records of what `stack` returns."""
        stacked = {}
        for path, record in records.items():
            name, worker = self._split_path(path)
            if worker is not None:
                record = {**record, "shape": [self.count, *record["shape"]]}
            stacked[name] = record
        return stacked

    def unstack_records(self, records: Mapping[str, Any], paths: Iterable[str]) -> dict[str, Any]:
        """Those of `records` for the leaves of a state, by their paths there, without the dim of the workers."""
        unstacked = {}
        for path in paths:
            name, worker = self._split_path(path)
            if name not in records:
                continue
            record = records[name]
            if worker is not None:
                record = {**record, "shape": record["shape"][1:]}
            unstacked[path] = record
        return unstacked

    def describe_stacked(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
        """What to read of all workers, for what those of this process want."""
        stacked = {}
        for path, x in wanted.items():
            name, worker = self._split_path(path)
            if worker is not None:
                assert self.mesh is not None
                spec = canonical(PartitionSpec(self.axis, *x.sharding.spec))
                sharding = NamedSharding(self.mesh, spec, memory_kind=x.sharding.memory_kind)
                x = jax.ShapeDtypeStruct((self.count, *x.shape), x.dtype, sharding=sharding)
            stacked[name] = x
        return stacked

    def unstack(self, arrays: dict[str, jax.Array], wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """The arrays of this process's workers out of those of all, by their paths there, and the others."""
        unstacked = {}
        for path, x in wanted.items():
            name, worker = self._split_path(path)
            array = arrays[name]
            if worker is not None:
                array = _take_worker(array, x)
            unstacked[path] = array
        return unstacked

    def _split_path(self, path: str) -> tuple[str, int | None]:
        """The path without the number of a worker, and that number; of a state without workers the path."""
        match = None
        if self.count:
            match = _WORKER.match(path)
        if match is None:
            return path, None
        # "workers.3.params.w" is "workers.params.w" of worker 3.
        in_worker = path[match.end() :]
        return f"workers.{in_worker}", int(match[1])


def find_workers(state: Any) -> Workers:
    """The workers of a state."""
    if not isinstance(state, DilocoState):
        return Workers()
    first_leaf = jax.tree.leaves(state.params, is_leaf=is_padded)[0]
    mesh = stored_array(first_leaf).sharding.mesh
    worker: Any = next(worker for worker in state.workers if worker)
    worker_sizes = worker.step.sharding.mesh.shape
    # Along the axis of the workers a worker has one device where the mesh of all has as many as there are workers. All
    # other axes are the same in both.
    for axis in mesh.axis_names:
        if worker_sizes[axis] != mesh.shape[axis]:
            return Workers(len(state.workers), mesh, axis)
    return Workers(len(state.workers), mesh, None)  # of one worker


def _add_dims(arrays: dict[str, jax.Array]) -> dict[str, jax.Array] | None:
    """A worker's arrays with a dim of 1 in front; None of a worker of another process."""
    if not arrays:
        return None
    layouts = {name: _add_dim(x.sharding) for name, x in arrays.items()}
    return jax.jit(_expand, out_shardings=layouts)(arrays)


def _expand(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: x[None] for name, x in arrays.items()}


def _take_worker(array: jax.Array, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    """A worker's part of an array of all workers, from the shards that are on its devices."""
    layout = _add_dim(wanted.sharding)
    # `array[number]` would be a program of all processes, in which each must name the same worker. The shards of this
    # one are here already.
    shards = []
    for shard in array.addressable_shards:
        if shard.device in layout.device_set:
            shards.append(shard.data)
    part = jax.make_array_from_single_device_arrays((1, *wanted.shape), layout, shards)
    return jax.jit(_take_first, out_shardings=wanted.sharding)(part)


def _take_first(x: jax.Array) -> jax.Array:
    return x[0]


def _add_dim(sharding: Any) -> NamedSharding:
    """The layout with one dim more, which is not split, in front."""
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec), memory_kind=sharding.memory_kind)
