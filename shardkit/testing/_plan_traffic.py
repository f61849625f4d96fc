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
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_padded)
    layouts = jax.tree.leaves(plan.layouts(params, mesh), is_leaf=lambda x: isinstance(x, LeafLayout))
    traffic = _Traffic(plan, mesh, row, prefetched)
    for layout, (path, x) in zip(layouts, leaves, strict=True):
        traffic.add_leaf(layout, path_name(path), tuple(x.shape))
    traffic.add_sums()
    return traffic.sent


class _Traffic:
    """The bytes that are sent, added up leaf by leaf.

    For example, one leaf [8, 6] of float32 on fsdp=4, whole, without accumulation. It rests as [2, 6] on each device: a
    gather sends 3 times 48 bytes, and the reduce_scatter of its gradient [8, 6] another 3 times 48. Layer by layer with
    accumulate=2, each microbatch gathers it twice and reduces it once: 4 gathers and 2 reduce_scatters.
    """

    def __init__(self, plan: Plan, mesh: Mesh, row: Row, prefetched: bool):
        self.mesh = mesh
        self.row = row
        self.prefetched = prefetched
        self.sent = Sent()
        policy = precision_of(row.precision)
        self.compute_size = jnp.dtype(policy.compute or jnp.float32).itemsize
        self.reduce_size = jnp.dtype(policy.reduce or jnp.float32).itemsize
        self.param_size = jnp.dtype(policy.param or jnp.float32).itemsize
        self.layerwise_names = tuple(name for strategy in plan.strategies for name in strategy.names)
        self.batch_spec = plan.batch_spec(mesh)
        # The numbers of elements that are summed in one all_reduce: gradients that are summed over the same axes by the
        # same algorithm, and vary over the same axes, are sent together.
        self.sums: dict[tuple[tuple[str, ...], Algorithm, frozenset[str]], list[int]] = {}

    def add_leaf(self, layout: LeafLayout, name: str, shape: tuple[int, ...]) -> None:
        """Adds the collectives of one leaf, of which the state holds an array of this shape."""
        original = stored_shape(shape, layout.rows)
        # A stack is opened layer by layer, a message each.
        by_layer = layout.lazy and not layout.entry and is_stacked(name, self.layerwise_names)
        self._add_parameter(layout, original, by_layer)
        if self.row.deterministic:
            padded = padded_shape(original, layout.update, self.mesh)
            self._add_groups(layout, padded, self.row.deterministic, self.batch_spec)
        else:
            self._add_gradient(layout, original, by_layer)

    def _add_parameter(self, layout: LeafLayout, original: tuple[int, ...], by_layer: bool) -> None:
        """The gathers of a parameter: before the loss, in each microbatch, and after the update."""
        accumulate = self.row.accumulate
        gathered_first = layout.cuts(gather=("step",))
        self.add_gathers(gathered_first, self._local_shape(original, layout.rest), self.compute_size)
        closed_splits = tuple(split for split in layout.splits if split.gather in ("never", "layer"))
        closed = LeafLayout(closed_splits).rest
        once, again = separate_kept_cuts(layout.cuts(gather=("layer",)))
        opened = self.add_gathers(once, self._local_shape(original, closed), self.compute_size, accumulate, by_layer)
        gathers = 1 if layout.entry else GATHERS
        self.add_gathers(again, opened, self.compute_size, accumulate * gathers, by_layer)
        if self.prefetched and by_layer:
            self.add_gathers(again, (1, *opened[1:]), self.compute_size, -accumulate, by_layer)
        gathered_last = layout.cuts(gather=("update",))
        self.add_gathers(gathered_last, self._local_shape(original, layout.update), self.param_size)

    def _add_gradient(self, layout: LeafLayout, original: tuple[int, ...], by_layer: bool) -> None:
        """The reduce_scatters of a gradient, and its part of the sums over all other axes."""
        opened = layout.cuts(gather=("layer",))
        early = layout.cuts(gather=("step", "update"), scatter=("layer", "microbatch"))
        shape = self._local_shape(original, layout.seen)
        shape = self.add_scatters((*opened, *early), shape, self.reduce_size, self.row.accumulate, by_layer)
        shape = self.add_scatters(layout.cuts(scatter=("step",)), shape, self.reduce_size)
        update_axes = all_axes(layout.update)
        varying = frozenset(all_axes(self.batch_spec) | set(layout.varies) | update_axes)
        unreduced = sorted(varying - update_axes)
        for axes, algorithm in layout.sums:
            self._collect_sum([axis for axis in axes if axis in unreduced], algorithm, varying, shape)
            unreduced = [axis for axis in unreduced if axis not in axes]
        self._collect_sum(unreduced, PLAIN, varying, shape)

    def _collect_sum(
        self, axes: Sequence[str], algorithm: Algorithm, varying: frozenset[str], shape: tuple[int, ...]
    ) -> None:
        self.sums.setdefault((tuple(axes), algorithm, varying), []).append(math.prod(shape))

    def add_sums(self) -> None:
        """Adds the all_reduces of all leaves' gradients."""
        for (axes, algorithm, _), elements in self.sums.items():
            self.add(algorithm, "all_reduce", elements, self.reduce_size, axes)

    def _local_shape(self, original: tuple[int, ...], spec: Any) -> tuple[int, ...]:
        return local_shape(padded_shape(original, spec, self.mesh), spec, self.mesh)

    def add(
        self,
        algorithm: Algorithm,
        kernel: str,
        elements: Sequence[int],
        itemsize: int,
        axes: Collection[str],
        times: int = 1,
    ) -> None:
        """Adds one collective of arrays with these numbers of elements, `times` times."""
        if algorithm.cost is None:
            raise ValueError(
                f"plan_traffic: the algorithm {algorithm} must have a cost, to be compared with the census; it has "
                "none. Pass Algorithm(..., cost=...)."
            )
        ways = {axis: self.mesh.shape[axis] for axis in axes if self.mesh.shape[axis] > 1}
        if not ways:
            return
        if algorithm.feedback and kernel != "all_gather":
            itemsize = 4  # with feedback sums are in float32
        for sent_over, sent in algorithm.cost(kernel, elements, itemsize, ways).items():
            self.sent[sent_over] = self.sent.get(sent_over, Fraction(0)) + times * sent

    def add_gathers(
        self, cuts: Cuts, shape: tuple[int, ...], itemsize: int, times: int = 1, by_layer: bool = False
    ) -> tuple[int, ...]:
        """Adds gathers, the last cut first; returns the shape after them."""
        for cut in reversed(cuts):
            messages = shape[0] if by_layer else 1
            elements = [math.prod(shape) // max(messages, 1)]
            self.add(cut.gather_by, "all_gather", elements, itemsize, cut.axes, times * messages)
            shape = _scale_dim(shape, cut.dim, self._count_devices(cut.axes), 1)
        return shape

    def add_scatters(
        self, cuts: Cuts, shape: tuple[int, ...], itemsize: int, times: int = 1, by_layer: bool = False
    ) -> tuple[int, ...]:
        """Adds reduce_scatters of dims that are padded first; returns the shape after them."""
        for dim in {cut.dim for cut in cuts}:
            ways = math.prod(self._count_devices(cut.axes) for cut in cuts if cut.dim == dim)
            padded_rows = -(-shape[dim] // ways) * ways
            shape = _scale_dim(shape, dim, padded_rows, shape[dim])
        for cut in cuts:
            messages = shape[0] if by_layer else 1
            elements = [math.prod(shape) // max(messages, 1)]
            self.add(cut.reduce_by, "reduce_scatter", elements, itemsize, cut.axes, times * messages)
            shape = _scale_dim(shape, cut.dim, 1, self._count_devices(cut.axes))
        return shape

    def _add_groups(self, layout: LeafLayout, shape: tuple[int, ...], groups: int, batch_spec: PartitionSpec) -> None:
        """A gradient summed group by group: pieces sent to all devices, and gathered where no update splits them."""
        axes = all_axes(batch_spec)
        split_axes = axes & all_axes(layout.update)
        devices = self._count_devices(axes)
        pieces = self._count_devices(axes - split_axes)
        local_groups = groups // devices
        piece = -(-math.prod(shape) // self._count_devices(split_axes) // pieces)
        largest_power_of_two = local_groups & -local_groups
        partial_sums = local_groups // largest_power_of_two  # that a device sends
        self.add(PLAIN, "all_to_all", [piece * devices * partial_sums], 4, axes)
        self.add(PLAIN, "all_gather", [piece], 4, axes - split_axes)

    def _count_devices(self, axes: Collection[str]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)


def _scale_dim(shape: tuple[int, ...], dim: int, times: int, divisor: int) -> tuple[int, ...]:
    """The shape with one dim `times / divisor` as large."""
    return (*shape[:dim], shape[dim] * times // max(divisor, 1), *shape[dim + 1 :])
