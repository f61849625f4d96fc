"""The table that `describe(plan, params, mesh)` prints: a line for each leaf."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit.layout import local_shape, table
from shardkit.partitioning.placement import Layout, Placement, Strategy
from shardkit.partitioning.storage import in_rows, padded_shape

_LAZY = {
    None: "",
    "loss": ", passed lazily to the loss",
    "entry": ", gradient scattered in the backward pass",
}


class Planned(NamedTuple):
    """A leaf, its layout, and what each strategy says of it: a placement, or why it leaves the leaf whole."""

    path: str
    leaf: Any
    layout: Layout
    placed: list[tuple[Strategy, Placement | str]]


def plan_table(plan: str, leaves: Iterable[Planned], mesh: Mesh) -> str:
    """A line for each leaf: shape, layout at rest and in the update, bytes per device of each, and why."""
    rows = [("leaf", "shape", "at rest", "bytes/device", "update", "bytes/device", "why")]
    totals = [0, 0]
    for path, x, layout, placed in leaves:
        shape = tuple(jnp.shape(x))
        stored = in_rows(shape, layout.rows)
        specs = (layout.rest, layout.update)
        sizes = [_bytes(stored, spec, mesh, x) for spec in specs]
        totals = [total + size for total, size in zip(totals, sizes, strict=True)]
        longer = padded_shape(stored, layout.update, mesh)
        pads = {dim: f", padded from {size} to {longer[dim]}" for dim, size in layout.padded}
        staged = any(s.stages is not None and not isinstance(place, str) for s, place in placed)
        why = "; ".join(_reason(s, place, pads, staged) for s, place in placed) or "no strategy splits leaves"
        written = [str(tuple(spec)) if tuple(spec) else "whole" for spec in specs]
        rows.append((path, str(list(shape)), written[0], f"{sizes[0]:,}", written[1], f"{sizes[1]:,}", why))
    held, updated = totals
    return f"{table(rows)}\n{plan}: {held:,} bytes per device at rest, {updated:,} per gradient or optimizer moment"


def _reason(s: Strategy, place: Placement | str, pads: dict[int, str], staged: bool) -> str:
    if isinstance(place, str):
        return f"{s.name}: {place}"
    lazy = _LAZY[place.handle]
    if staged and place.rest and not place.seen:  # inside a pipeline it matters how often
        lazy = ", gathered at every tick, forward and backward" if place.handle == "loss" else ", gathered once a step"
    return f"{s.name} splits dim {place.dim}{pads.pop(place.dim, '')}{place.note}{lazy}"


def _bytes(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh, x: Any) -> int:
    return math.prod(local_shape(padded_shape(shape, spec, mesh), spec, mesh)) * jnp.result_type(x).itemsize


def mesh_of(params: Any) -> Any:
    """The mesh on which parameters are laid out.

    Raises:
        ValueError: no leaf has a mesh.
    """
    for leaf in jax.tree.leaves(params):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            return sharding.mesh
    raise ValueError(
        "describe: the layouts of a plan depend on a mesh, and no leaf has one. Call describe(plan, params, mesh)."
    )
