"""The bytes that a plan must send per step, from its layouts alone: independent of the code that sends them.

An all_gather sends the size of its result minus that of its operand, a reduce_scatter the size of its operand minus
that of its result, an all_reduce over n devices 2 (n-1)/n of its operand. A chain of gathers, or of scatters, costs the
difference between its two ends.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from shardkit.layout import all_axes, local_shape
from shardkit.partitioning.placement import Layout
from shardkit.partitioning.plan import Plan
from shardkit.partitioning.storage import is_padded, padded_shape
from shardkit.precision import precision_of
from shardkit.testing.rows import Row

GATHERS = 2  # a layer is gathered in the forward pass and again in the backward pass


def plan_traffic(plan: Plan, params: Any, mesh: Mesh, row: Row) -> Fraction:
    """Bytes that one device sends per step to gather parameters and reduce gradients.

    Args:
        plan: the plan.
        params: the parameters as the state holds them, or their shapes.
        mesh: the mesh.
        row: for its accumulation and precision.
    """
    policy = precision_of(row.precision)
    dtypes = [jnp.dtype(each or jnp.float32).itemsize for each in (policy.compute, policy.reduce, policy.param)]
    layouts = plan.layouts(params, mesh)
    batch_axes = all_axes(plan.batch_spec(mesh))
    total = Fraction(0)
    leaves = jax.tree.leaves(params, is_leaf=is_padded)
    each = jax.tree.leaves(layouts, is_leaf=lambda x: isinstance(x, Layout))
    for layout, x in zip(each, leaves, strict=True):
        total += _leaf(layout, tuple(x.shape), mesh, batch_axes, row.accumulate, dtypes)
    return total


def _leaf(
    layout: Layout,
    shape: tuple[int, ...],
    mesh: Mesh,
    batch_axes: frozenset[str],
    accumulate: int,
    dtypes: list[int],
) -> Fraction:
    compute, reduce, held = dtypes

    def between(longer: PartitionSpec, shorter: PartitionSpec) -> int:
        """Elements of a padded leaf laid out as `shorter`, less those laid out as `longer`."""
        whole = padded_shape(shape, longer, mesh)
        return math.prod(local_shape(whole, shorter, mesh)) - math.prod(local_shape(whole, longer, mesh))

    sent = Fraction(0)
    if layout.lazy:
        here = [split for split in layout.splits if split.gather in ("never", "layer")]
        closed = Layout(tuple(here)).update  # at rest, less what is gathered before the loss
        sent += compute * between(layout.rest, closed)
        sent += accumulate * (1 if layout.entry else GATHERS) * compute * between(closed, layout.seen)
        sent += accumulate * reduce * between(layout.grad, layout.seen)
    else:
        sent += compute * between(layout.rest, layout.seen)
    sent += reduce * between(layout.update, layout.grad)
    rest = (batch_axes | set(layout.varies)) - all_axes(layout.update)
    if rest:
        n = math.prod(mesh.shape[axis] for axis in rest)
        size = math.prod(local_shape(padded_shape(shape, layout.update, mesh), layout.update, mesh))
        sent += Fraction(2 * (n - 1), n) * reduce * size
    return sent + held * between(layout.update, layout.rest)
