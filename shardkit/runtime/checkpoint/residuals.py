"""The residuals of error feedback in a checkpoint: of which only the sum over the devices must be kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardkit._check import one_of
from shardkit.layout import canonical, spec_axes
from shardkit.runtime.checkpoint.record import compare, some

Residuals = Literal["keep", "reset"]
Records = Mapping[str, Any]


def is_residual(path: str) -> bool:
    """Whether a leaf of a TrainState is a residual, by its path."""
    return path.partition(".")[0] == "residuals"


def compared(where: str, stored: Records, wanted: Records, residuals: Residuals) -> Records:
    """The records of the leaves to read, after a check that they are those that a target wants.

    "keep" reads residuals with as many rows as were saved, "reset" reads none.

    Raises:
        ValueError: as `compare`; only one of the two has residuals, or another choice.
    """
    one_of("restore", "residuals", residuals, ("keep", "reset"))
    if residuals == "reset":
        stored, wanted = ({p: record for p, record in each.items() if not is_residual(p)} for each in (stored, wanted))
    theirs, ours = ([path for path in records if is_residual(path)] for records in (stored, wanted))
    if ours and not theirs:
        raise ValueError(
            f"{where} lacks the residuals of error feedback, which the plan of this state needs for {some(ours)}. Pass "
            "residuals='reset' to begin with zeros, or restore into a state of a plan without feedback."
        )
    if theirs and not ours:
        raise ValueError(
            f"{where} has the residuals of error feedback, for {some(theirs)}, and the plan of this state has none. "
            "Pass residuals='reset' to leave out what they hold, or restore into a state of a plan with feedback."
        )
    rows = {path: stored[path]["shape"][0] for path in ours if path in stored}
    shapes = {path: {**wanted[path], "shape": [saved, *wanted[path]["shape"][1:]]} for path, saved in rows.items()}
    compare(where, stored, {path: shapes.get(path, record) for path, record in wanted.items()})
    return stored


def rows_of(path: str, x: Any, records: Records) -> int | None:
    """How many rows of a residual were saved, if not as many as the target has."""
    saved = records[path]["shape"][0] if is_residual(path) and path in records else None
    return None if saved is None or saved == x.shape[0] else saved


def sharding_of_rows(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """The layout in which to read another number of rows: split over the same axes, by rows or along another dim."""
    entries = [*spec_axes(sharding.spec), *[()] * len(shape)][: len(shape)]
    axes, mesh = entries[0], sharding.mesh
    ways = lambda axes: math.prod(mesh.shape[axis] for axis in axes)  # noqa: E731
    entries[0] = ()
    fits = [dim for dim, size in enumerate(shape) if size % ways(entries[dim] + axes) == 0]
    if fits:
        entries[fits[0]] += axes
    return NamedSharding(mesh, canonical(PartitionSpec(*entries)))


def shared_out(array: jax.Array, rows: int) -> jax.Array:
    """Residuals with the same sum over the rows, in another number of rows."""
    return jnp.broadcast_to(array.sum(axis=0, keepdims=True) / rows, (rows, *array.shape[1:]))
