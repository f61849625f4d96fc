"""A plan, leaf by leaf, for people."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit.layout import local_shape, path_name, table
from shardkit.partitioning.plan import Placement, Plan, Strategy
from shardkit.partitioning.storage import in_rows, is_padded, padded_shape

_TRAVELS = {
    None: "",
    "loss": ", opened by the loss",
    "entry": ", opened before the loss",
}


def describe_plan(plan: Plan, params: Any, mesh: Mesh | None) -> str:
    """A line for each leaf: shape, layout at rest and of the update, bytes one device holds of each, and why.

    Raises:
        ValueError: no mesh is given and no leaf has one.
    """
    mesh = mesh or _mesh_of(params)
    layouts = plan.layouts(params, mesh)
    rows = [("leaf", "shape", "at rest", "bytes/device", "update", "bytes/device", "why")]
    held = updated = 0
    for (path, x), layout in zip(
        jax.tree_util.tree_flatten_with_path(params, is_leaf=is_padded)[0],
        jax.tree.leaves(layouts, is_leaf=_is_layout),
        strict=True,
    ):
        name, shape = path_name(path), tuple(jnp.shape(x))
        stored = in_rows(shape, layout.rows)
        sizes = [_bytes(stored, spec, mesh, x) for spec in (layout.rest, layout.update)]
        longer = padded_shape(stored, layout.update, mesh)
        pads = {dim: f", padded from {size} to {longer[dim]}" for dim, size in layout.padded}
        placed = list(plan.placed(name, x, mesh))
        staged = any(s.name.startswith("pp(") and isinstance(place, Placement) for s, place in placed)
        reasons = [_reason(s, place, pads, staged) for s, place in placed]
        why = "; ".join(reasons) or "no strategy splits leaves"
        held, updated = held + sizes[0], updated + sizes[1]
        specs = [str(tuple(spec)) if tuple(spec) else "whole" for spec in (layout.rest, layout.update)]
        rows.append((name, str(list(shape)), specs[0], f"{sizes[0]:,}", specs[1], f"{sizes[1]:,}", why))
    total = f"{plan}: a device holds {held:,} bytes at rest, and {updated:,} of each copy that the update keeps"
    return f"{table(rows)}\n{total}"


def _is_layout(x: Any) -> bool:
    return hasattr(x, "rest")


def _reason(s: Strategy, place: Placement | str, pads: dict[int, str], staged: bool) -> str:
    if isinstance(place, str):
        return f"{s.name}: {place}"
    travels = _TRAVELS[place.handle]
    if staged and place.rest and not place.seen:  # inside a pipeline it matters how often
        travels = (
            ", gathered at every tick, forward and backward" if place.handle == "loss" else ", gathered once a step"
        )
    return f"{s.name} splits dim {place.dim}{pads.pop(place.dim, '')}{place.note}{travels}"


def _bytes(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh, x: Any) -> int:
    return math.prod(local_shape(padded_shape(shape, spec, mesh), spec, mesh)) * jnp.result_type(x).itemsize


def _mesh_of(params: Any) -> Any:
    for leaf in jax.tree.leaves(params):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            return sharding.mesh
    raise ValueError(
        "describe: the layouts of a plan depend on a mesh, and no leaf has one. Call describe(plan, params, mesh)."
    )
