"""How one array gets from one layout to another: the move of each leaf, as data and as a program."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardkit.layout import canonical, check_spec, local_shape, spec_axes, table
from shardkit.partitioning.array_views import DimAxes
from shardkit.partitioning.redistribute import Redistribution, redistribution
from shardkit.partitioning.run_steps import mesh_apart, parts_of, run_steps
from shardkit.partitioning.storage import Held, in_rows, is_padded, padded_shape, stored_array


class Move(NamedTuple):
    """How one leaf gets from one layout to another. Bytes are per device.

    Attributes:
        path: the leaf.
        shape: its global shape as the steps see it, padding included.
        dtype: its dtype.
        source: its spec before.
        target: its spec after.
        found: the steps, as a `Redistribution`; its sizes are in elements.
        cut: the shape that the leaf is stored with afterwards: padding that the target does not need is cut off.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    source: PartitionSpec
    target: PartitionSpec
    found: Redistribution
    cut: tuple[int, ...]

    @property
    def sent(self) -> int:
        """Bytes that each device sends."""
        return self.found.sent * self.dtype.itemsize

    @property
    def least(self) -> int:
        """Bytes that some device must receive: the part of its new shard that it does not hold."""
        return self.found.least * self.dtype.itemsize

    @property
    def peak(self) -> int:
        """Bytes of the two largest consecutive shards."""
        return self.found.peak * self.dtype.itemsize


class Moves(NamedTuple):
    """The steps of `reshard`, leaf by leaf; `print` them."""

    leaves: tuple[Move, ...]

    @property
    def sent(self) -> int:
        """Bytes that each device sends."""
        return sum(each.sent for each in self.leaves)

    @property
    def least(self) -> int:
        """Bytes that some device must receive, summed over the leaves."""
        return sum(each.least for each in self.leaves)

    def __str__(self) -> str:
        rows = [("leaf", "from", "to", "steps", "sent/device", "must receive", "two shards")]
        for each in self.leaves:
            steps = "; ".join(step.told(each.found.dims) for step in each.found.steps) or "none"
            sizes = (f"{each.sent:,}", f"{each.least:,}", f"{each.peak:,}")
            rows.append((each.path, str(each.source), str(each.target), steps, *sizes))
        return f"{table(rows)}\n{self.sent:,} bytes sent by each device; some device must receive {self.least:,}"


def move_of(where: str, path: str, x: Any, before: tuple[Held, bool], after: tuple[Held, bool], mesh: Any) -> Move:
    """The steps of one leaf; the padding of either layout counts."""
    if before[0].rows != after[0].rows:
        raise ValueError(
            f"{where} is stored in the order of the stages of a pipeline, which source and target do not share. Pass "
            "unpadded(...) of it to the init of the other plan."
        )
    original = in_rows(tuple(x.shape), before[0].rows)
    shapes = []
    for held, by_plan in (before, after):
        check_spec(where, held.spec, mesh, len(original))
        if not by_plan and not is_padded(x):
            try:
                local_shape(original, held.spec, mesh)
            except ValueError as error:
                raise ValueError(str(error).replace("local_shape", where, 1)) from None
        shapes.append(padded_shape(original, held.spec, mesh))
    for dim, (size, a, b) in enumerate(zip(original, *shapes, strict=True)):
        if a != b and size not in (a, b):
            raise ValueError(
                f"{where}: dim {dim} of {size} is padded to {a} by source and to {b} by target, which would move every "
                "shard. Pass unpadded(...) of it to the init of the other plan."
            )
    stored = tuple(jnp.shape(stored_array(x)))
    if stored != shapes[0]:
        raise ValueError(
            f"{where} must be stored as source says, with the shape {shapes[0]}; got {stored}. Pass the plan that made "
            "it as source."
        )
    shape = tuple(map(max, *shapes)) if original else ()
    first, last = canonical(before[0].spec), canonical(after[0].spec)
    found = redistribution(shape, _split(first, len(shape)), _split(last, len(shape)), tuple(mesh.shape.items()))
    return Move(path, shape, jnp.result_type(stored_array(x)), first, last, found, shapes[1])


def _split(spec: PartitionSpec, ndim: int) -> DimAxes:
    axes = spec_axes(spec)
    return (*axes, *[()] * (ndim - len(axes)))


@lru_cache(maxsize=1024)
def program(mesh: Any, move: Move, piece_bytes: int) -> Any:
    """The jitted program that moves one leaf; leaves that are alike share it."""
    parts = dict(move.found.parts)

    def spec(spec: PartitionSpec) -> PartitionSpec:  # an axis of size 1 would have to be gathered to be left
        dims = [[axis for axis in axes if mesh.shape[axis] > 1] for axes in spec_axes(spec)]
        return PartitionSpec(*(tuple(part for axis in axes for part in parts_of(axis, parts)) for axes in dims))

    def device(x: jax.Array) -> jax.Array:
        whole = local_shape(move.shape, move.source, mesh)
        x = jnp.pad(x, [(0, size - held) for size, held in zip(whole, x.shape, strict=True)])
        varying = tuple(axis for axes in spec_axes(spec(move.target)) for axis in axes)
        x = run_steps(x, move.found, varying, piece_bytes // move.dtype.itemsize)
        x = x.reshape(local_shape(move.shape, move.target, mesh))
        return x[tuple(slice(size) for size in local_shape(move.cut, move.target, mesh))]

    on_mesh = jax.shard_map(
        device, mesh=mesh_apart(mesh, parts), in_specs=spec(move.source), out_specs=spec(move.target)
    )
    return jax.jit(on_mesh, out_shardings=NamedSharding(mesh, move.target))
