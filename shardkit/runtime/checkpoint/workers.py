"""The workers of a DiLoCo run as a checkpoint holds them: each leaf as one array of all workers, along a first dim.

A process has the arrays of its own workers alone, and in a job of several processes orbax writes arrays of all devices.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
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

    def together(self, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The arrays of this process's workers as those of all, [workers, ...], the others unchanged."""
        if self.mesh is None:
            return dict(arrays)
        others: dict[str, jax.Array] = {}
        own: list[dict[str, Any]] = [{} for _ in range(self.count)]
        for path, x in arrays.items():
            name, worker = self._parted(path)
            (others if worker is None else own[worker])[name] = x
        specs = {name: PartitionSpec(self.axis, *x.sharding.spec) for each in own for name, x in each.items()}
        layouts = [{name: _with_first_dim(x.sharding) for name, x in each.items()} for each in own]
        stacked = [
            jax.jit(_expanded, out_shardings=layout)(each) if each else None
            for each, layout in zip(own, layouts, strict=True)
        ]
        return join_submeshes(stacked, self.mesh, specs, rows=True) | others

    def records(self, records: Mapping[str, Any]) -> dict[str, Any]:
        """The records of what `together` returns."""
        found = {}
        for path, record in records.items():
            name, worker = self._parted(path)
            more = [] if worker is None else [self.count]
            found[name] = {**record, "shape": more + record["shape"]}
        return found

    def apart(self, records: Mapping[str, Any], leaves: Mapping[str, Any]) -> dict[str, Any]:
        """Those of `records` for the leaves of a state, by their own paths, without the dim of the workers."""
        found = {}
        for path in leaves:
            name, worker = self._parted(path)
            record = records.get(name)
            if record is not None:
                found[path] = record if worker is None else {**record, "shape": record["shape"][1:]}
        return found

    def to_read(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
        """What to read of all workers for what this process's are to have."""
        found = {}
        for path, x in wanted.items():
            name, worker = self._parted(path)
            if worker is not None:
                assert self.mesh is not None
                spec = canonical(PartitionSpec(self.axis, *x.sharding.spec))
                sharding = NamedSharding(self.mesh, spec, memory_kind=x.sharding.memory_kind)
                x = jax.ShapeDtypeStruct((self.count, *x.shape), x.dtype, sharding=sharding)
            found[name] = x
        return found

    def own(
        self, arrays: dict[str, jax.Array], wanted: Mapping[str, jax.ShapeDtypeStruct]
    ) -> Iterator[tuple[str, jax.Array]]:
        """The arrays of this process's workers out of those of all, by their own paths, and the others."""
        for path, x in wanted.items():
            name, worker = self._parted(path)
            if worker is None:
                yield path, arrays[name]
                continue
            layout = _with_first_dim(x.sharding)
            shards = [each.data for each in arrays[name].addressable_shards if each.device in layout.device_set]
            alone = jax.make_array_from_single_device_arrays((1, *x.shape), layout, shards)
            yield path, jax.jit(_first, out_shardings=x.sharding)(alone)

    def _parted(self, path: str) -> tuple[str, int | None]:
        """The path without the number of a worker, and that number; of a state without workers the path."""
        found = _WORKER.match(path) if self.count else None
        return (path, None) if found is None else (f"workers.{path[found.end() :]}", int(found[1]))


def workers_of(state: Any) -> Workers:
    """Those of a state."""
    if not isinstance(state, DilocoState):
        return Workers()
    mesh = stored_array(jax.tree.leaves(state.params, is_leaf=is_padded)[0]).sharding.mesh
    one: Any = next(each for each in state.workers if each).step.sharding
    sizes = one.mesh.shape
    axis = next((name for name in mesh.axis_names if sizes[name] != mesh.shape[name]), None)  # None: of one worker
    return Workers(len(state.workers), mesh, axis)


def _expanded(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: x[None] for name, x in arrays.items()}


def _first(x: jax.Array) -> jax.Array:
    return x[0]


def _with_first_dim(sharding: Any) -> NamedSharding:
    """The layout with one dim more, whole, in front."""
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec), memory_kind=sharding.memory_kind)
