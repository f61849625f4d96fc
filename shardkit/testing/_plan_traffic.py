"""The bytes that a plan must send per step, from the layouts of each leaf: independent of the code that sends them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from shardkit.collectives.algorithms import PLAIN, Algorithm, Sent
from shardkit.meshes.layout import all_axes, local_shape, path_name
from shardkit.on_device.precision import precision_of
from shardkit.plans.dim_rules import is_stacked
from shardkit.plans.plan import Plan
from shardkit.plans.splits import Cuts, LeafLayout, separate_kept_cuts
from shardkit.plans.storage import is_padded, padded_shape, stored_shape
from shardkit.testing.rows import Row

GATHERS = 2  # a layer is gathered in the forward pass and again in the backward pass


def plan_traffic(plan: Plan, params: Any, mesh: Mesh, row: Row, *, prefetched: bool = False) -> Sent:
    """Bytes that one device sends per step to gather parameters and reduce gradients, by the axes of the collectives.

    `params` are as the state holds them, or their shapes. With `prefetched` stacks are run with `prefetch=True`, which
    gathers the last layer once.
    """
    policy = precision_of(row.precision)
    dtypes = (policy.compute, policy.reduce, policy.param)
    compute, reduce, held = (jnp.dtype(each or jnp.float32).itemsize for each in dtypes)
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_padded)
    names = tuple(name for s in plan.strategies for name in s.names)
    layouts = jax.tree.leaves(plan.layouts(params, mesh), is_leaf=lambda x: isinstance(x, LeafLayout))
    batch_axes = all_axes(plan.batch_spec(mesh))
    bill = _Bill(mesh)
    sums: dict[tuple[tuple[str, ...], Algorithm, frozenset[str]], list[int]] = {}
    for layout, (path, x) in zip(layouts, leaves, strict=True):
        original = stored_shape(tuple(x.shape), layout.rows)

        def block(axes: Any, original: tuple[int, ...] = original) -> tuple[int, ...]:
            return local_shape(padded_shape(original, axes, mesh), axes, mesh)

        # A stack is opened layer by layer, a message each.
        by_layer = layout.lazy and not layout.entry and is_stacked(path_name(path), names)
        here, opened = layout.cuts(gather=("step",)), layout.cuts(gather=("layer",))
        early = layout.cuts(gather=("step", "update"), scatter=("layer", "microbatch"))
        closed = LeafLayout(tuple(s for s in layout.splits if s.gather in ("never", "layer"))).rest
        bill.gathers(here, block(layout.rest), compute)
        first, again = separate_kept_cuts(opened)
        each = bill.gathers(first, block(closed), compute, row.accumulate, by_layer)
        bill.gathers(again, each, compute, row.accumulate * (1 if layout.entry else GATHERS), by_layer)
        if prefetched and by_layer:
            bill.gathers(again, (1, *each[1:]), compute, -row.accumulate, by_layer)
        bill.gathers(layout.cuts(gather=("update",)), block(layout.update), held)
        if row.deterministic:
            bill.groups(layout, padded_shape(original, layout.update, mesh), row.deterministic, plan.batch_spec(mesh))
            continue
        grad = bill.scatters((*opened, *early), block(layout.seen), reduce, row.accumulate, by_layer)
        grad = bill.scatters(layout.cuts(scatter=("step",)), grad, reduce)
        varying = frozenset(batch_axes | set(layout.varies) | all_axes(layout.update))
        left = sorted(varying - all_axes(layout.update))
        for axes, algorithm in (*layout.sums, (tuple(left), PLAIN)):
            axes = tuple(axis for axis in axes if axis in left)
            left = [axis for axis in left if axis not in axes]
            sums.setdefault((axes, algorithm, varying), []).append(math.prod(grad))
    for (axes, algorithm, _), elements in sums.items():
        bill.add(algorithm, "all_reduce", elements, reduce, axes)
    return bill.sent


class _Bill:
    """What is sent, added up."""

    def __init__(self, mesh: Mesh):
        self.mesh, self.sent = mesh, Sent()

    def add(
        self,
        algorithm: Algorithm,
        kernel: str,
        elements: Sequence[int],
        itemsize: int,
        axes: Collection[str],
        times: int = 1,
    ) -> None:
        if algorithm.cost is None:
            raise ValueError(
                f"plan_traffic: the algorithm {algorithm} must have a cost, to be compared with the census; it has "
                "none. Pass Algorithm(..., cost=...)."
            )
        ways = {axis: self.mesh.shape[axis] for axis in axes if self.mesh.shape[axis] > 1}
        if ways:
            if algorithm.feedback and kernel != "all_gather":
                itemsize = 4  # with feedback sums are in float32
            for over, sent in algorithm.cost(kernel, elements, itemsize, ways).items():
                self.sent[over] = self.sent.get(over, Fraction(0)) + times * sent

    def gathers(
        self, cuts: Cuts, shape: tuple[int, ...], itemsize: int, times: int = 1, by_layer: bool = False
    ) -> tuple[int, ...]:
        """The shape after gathers, the last first."""
        for cut in reversed(cuts):
            messages = shape[0] if by_layer else 1
            size = [math.prod(shape) // max(messages, 1)]
            self.add(cut.gather_by, "all_gather", size, itemsize, cut.axes, times * messages)
            shape = _scaled(shape, cut.dim, self._ways(cut.axes), 1)
        return shape

    def scatters(
        self, cuts: Cuts, shape: tuple[int, ...], itemsize: int, times: int = 1, by_layer: bool = False
    ) -> tuple[int, ...]:
        """The shape after reduce_scatters, of dims that are padded first."""
        for dim in {cut.dim for cut in cuts}:
            ways = math.prod(self._ways(cut.axes) for cut in cuts if cut.dim == dim)
            shape = _scaled(shape, dim, -(-shape[dim] // ways) * ways, shape[dim])
        for cut in cuts:
            messages = shape[0] if by_layer else 1
            size = [math.prod(shape) // max(messages, 1)]
            self.add(cut.reduce_by, "reduce_scatter", size, itemsize, cut.axes, times * messages)
            shape = _scaled(shape, cut.dim, 1, self._ways(cut.axes))
        return shape

    def groups(self, layout: LeafLayout, shape: tuple[int, ...], groups: int, batch_spec: PartitionSpec) -> None:
        """A gradient summed group by group: pieces sent to all devices, and gathered where no update splits them."""
        axes = all_axes(batch_spec)
        split = axes & all_axes(layout.update)
        devices, pieces = self._ways(axes), self._ways(axes - split)
        mine = groups // devices
        piece = -(-math.prod(shape) // self._ways(split) // pieces)
        runs = mine // (mine & -mine)  # the partial sums that a device sends
        self.add(PLAIN, "all_to_all", [piece * devices * runs], 4, axes)
        self.add(PLAIN, "all_gather", [piece], 4, axes - split)

    def _ways(self, axes: Collection[str]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)


def _scaled(shape: tuple[int, ...], dim: int, times: int, over: int) -> tuple[int, ...]:
    return (*shape[:dim], shape[dim] * times // max(over, 1), *shape[dim + 1 :])
