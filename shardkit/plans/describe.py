"""The table that `describe(plan, params, mesh)` prints: a line for each leaf."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit._arguments.checks import mesh_in_context, quote
from shardkit.collectives.algorithms import PLAIN
from shardkit.meshes.layout import local_shape, split_dims, table
from shardkit.plans.splits import LeafLayout, Split, Strategy
from shardkit.plans.storage import padded_shape, stored_shape


class LeafRow(NamedTuple):
    """A leaf, its layout, and what each strategy does with it: a split, or why it leaves the leaf whole."""

    path: str
    leaf: Any
    layout: LeafLayout
    decisions: list[tuple[Strategy, Split | str]]


class PlanTable(NamedTuple):
    """The layouts of a plan: the names of the columns, a row of texts for each leaf, and the sums in a sentence."""

    head: tuple[str, ...]
    rows: list[tuple[str, ...]]
    total: str

    def __str__(self) -> str:
        return f"{table([self.head, *self.rows])}\n{self.total}"


def make_plan_table(plan: str, leaves: Iterable[LeafRow], mesh: Mesh) -> PlanTable:
    """A row for each leaf: shape, layout at rest and in the update, bytes per device of each, and why."""
    rows: list[tuple[str, ...]] = []
    rest_total = 0
    update_total = 0
    for leaf in leaves:
        shape = tuple(jnp.shape(leaf.leaf))
        stored = stored_shape(shape, leaf.layout.rows)
        # With the partitioner's axes, unlike `layout.rest`: the bytes are those of one device.
        rest = leaf.layout.at_rest().spec
        update = leaf.layout.in_update().spec
        rest_bytes = _count_bytes(stored, rest, mesh, leaf.leaf)
        update_bytes = _count_bytes(stored, update, mesh, leaf.leaf)
        rest_total += rest_bytes
        update_total += update_bytes
        reasons = "; ".join(_list_reasons(leaf, stored, update, mesh))
        cells = [leaf.path, str(list(shape)), _describe_spec(rest), f"{rest_bytes:,}"]
        cells += [_describe_spec(update), f"{update_bytes:,}", reasons]
        rows.append(tuple(cells))
    total = f"{plan}: {rest_total:,} bytes per device at rest, {update_total:,} per gradient or optimizer moment"
    return PlanTable(("leaf", "shape", "at rest", "bytes/device", "update", "bytes/device", "why"), rows, total)


def _list_reasons(leaf: LeafRow, stored: tuple[int, ...], update: PartitionSpec, mesh: Mesh) -> list[str]:
    """What each strategy does with a leaf, the partitioner's splits, and the algorithms of sums, in words."""
    padded = padded_shape(stored, update, mesh)
    paddings = {dim: f", padded from {size} to {padded[dim]}" for dim, size in leaf.layout.padded}
    staged = False
    for strategy, split in leaf.decisions:
        if strategy.stages is not None and isinstance(split, Split):
            staged = True
    reasons = []
    for strategy, split in leaf.decisions:
        if isinstance(split, str):
            reasons.append(f"{strategy.name}: {split}")
        else:
            padding = paddings.pop(split.dim, "")  # the first strategy that splits the dim tells
            times = _describe_times(split, staged) + _describe_algorithms(split)
            reasons.append(f"{strategy.name} splits dim {split.dim}{padding}{split.note}{times}")
    if not reasons:
        reasons.append("no strategy splits leaves")
    for dim, axes in split_dims(leaf.layout.automatic).items():
        reasons.append(f"the partitioner splits dim {dim} over {quote(axes)}")
    for axes, algorithm in leaf.layout.sums:
        reasons.append(f"summed over {quote(axes)} by {algorithm}")
    return reasons


def _describe_times(split: Split, staged: bool) -> str:
    if staged and split.gather == "layer":  # inside a pipeline it matters how often
        return ", gathered at every tick, forward and backward"
    if staged and split.gather == "step":
        return ", gathered once a step"
    if "layer" in (split.gather, split.scatter):
        if split.secondary:
            parts = quote(split.secondary)
            return f", passed lazily to the loss, its parts over {parts} kept for the backward pass"
        return ", passed lazily to the loss"
    if split.scatter == "microbatch":
        return ", gradient scattered in the backward pass"
    return ""


def _describe_algorithms(split: Split) -> str:
    """The algorithms that are not the plain ones."""
    words = ""
    if split.gather_by is not PLAIN:
        words += f", gathered by {split.gather_by}"
    if split.reduce_by is not PLAIN:
        words += f", gradient reduced by {split.reduce_by}"
    return words


def _describe_spec(spec: PartitionSpec) -> str:
    return str(tuple(spec)) if tuple(spec) else "whole"


def _count_bytes(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh, x: Any) -> int:
    """The bytes of a leaf on one device."""
    padded = padded_shape(shape, spec, mesh)
    elements = math.prod(local_shape(padded, spec, mesh))
    return elements * jnp.result_type(x).itemsize


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
