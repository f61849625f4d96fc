"""The table that `describe(plan, params, mesh)` prints: a line for each leaf."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit._arguments.checks import mesh_in_context, quoted
from shardkit.collectives.algorithms import PLAIN
from shardkit.meshes.layout import local_shape, split_dims, table
from shardkit.plans.placement import LeafLayout, Split, Strategy
from shardkit.plans.storage import in_rows, padded_shape


class Planned(NamedTuple):
    """A leaf, its layout, and what each strategy does with it: a split, or why it leaves the leaf whole."""

    path: str
    leaf: Any
    layout: LeafLayout
    placed: list[tuple[Strategy, Split | str]]


class PlanTable(NamedTuple):
    """The layouts of a plan: the names of the columns, a row of texts for each leaf, and the sums in a sentence."""

    head: tuple[str, ...]
    rows: list[tuple[str, ...]]
    total: str

    def __str__(self) -> str:
        return f"{table([self.head, *self.rows])}\n{self.total}"


def plan_table(plan: str, leaves: Iterable[Planned], mesh: Mesh) -> PlanTable:
    """A row for each leaf: shape, layout at rest and in the update, bytes per device of each, and why."""
    rows: list[tuple[str, ...]] = []
    totals = [0, 0]
    for path, x, layout, placed in leaves:
        shape = tuple(jnp.shape(x))
        stored = in_rows(shape, layout.rows)
        specs = (layout.at_rest().spec, layout.in_update().spec)
        sizes = [_bytes(stored, spec, mesh, x) for spec in specs]
        totals = [total + size for total, size in zip(totals, sizes, strict=True)]
        longer = padded_shape(stored, specs[1], mesh)
        pads = {dim: f", padded from {size} to {longer[dim]}" for dim, size in layout.padded}
        staged = any(s.stages is not None and not isinstance(split, str) for s, split in placed)
        reasons = [_reason(s, split, pads, staged) for s, split in placed] or ["no strategy splits leaves"]
        left = split_dims(layout.automatic).items()
        reasons += [f"the partitioner splits dim {dim} over {quoted(axes)}" for dim, axes in left]
        reasons += [f"summed over {quoted(axes)} by {algorithm}" for axes, algorithm in layout.sums]
        why = "; ".join(reasons)
        written = [str(tuple(spec)) if tuple(spec) else "whole" for spec in specs]
        rows.append((path, str(list(shape)), written[0], f"{sizes[0]:,}", written[1], f"{sizes[1]:,}", why))
    held, updated = totals
    total = f"{plan}: {held:,} bytes per device at rest, {updated:,} per gradient or optimizer moment"
    return PlanTable(("leaf", "shape", "at rest", "bytes/device", "update", "bytes/device", "why"), rows, total)


def _reason(s: Strategy, split: Split | str, pads: dict[int, str], staged: bool) -> str:
    if isinstance(split, str):
        return f"{s.name}: {split}"
    return f"{s.name} splits dim {split.dim}{pads.pop(split.dim, '')}{split.note}{_when(split, staged)}{_by(split)}"


def _when(split: Split, staged: bool) -> str:
    if staged and split.gather in ("layer", "step"):  # inside a pipeline it matters how often
        often = "at every tick, forward and backward" if split.gather == "layer" else "once a step"
        return f", gathered {often}"
    if "layer" in (split.gather, split.scatter):
        kept = f", its parts over {quoted(split.secondary)} kept for the backward pass" if split.secondary else ""
        return f", passed lazily to the loss{kept}"
    return ", gradient scattered in the backward pass" if split.scatter == "microbatch" else ""


def _by(split: Split) -> str:
    """The algorithms that are not the plain ones."""
    gather = "" if split.gather_by is PLAIN else f", gathered by {split.gather_by}"
    return gather + ("" if split.reduce_by is PLAIN else f", gradient reduced by {split.reduce_by}")


def _bytes(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh, x: Any) -> int:
    return math.prod(local_shape(padded_shape(shape, spec, mesh), spec, mesh)) * jnp.result_type(x).itemsize


def mesh_of(params: Any) -> Any:
    """The mesh on which parameters are laid out, or that of `jax.set_mesh`.

    Raises:
        ValueError: there is neither.
    """
    for leaf in jax.tree.leaves(params):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            return sharding.mesh
    return mesh_in_context("describe", None)
