"""How many bytes a plan sends in a step, from the layouts of the leaves: independent of the code that sends them.

This is the one count for any plan (`cost.zero_volume` has the closed forms of the ZeRO stages). The proof kit compares
it with the census of a traced step; the planner ranks the layouts of a counted model by it. Bytes that the loss itself
sends, such as activations under tensor parallelism, are not in it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from shardkit.collectives.algorithms import PLAIN, Algorithm, Sent
from shardkit.meshes.layout import all_axes, count_devices, local_shape, path_name
from shardkit.plans.dim_rules import is_stacked
from shardkit.plans.plan import Plan
from shardkit.plans.splits import Cuts, LeafLayout, is_layout, separate_kept_cuts
from shardkit.plans.storage import is_padded, padded_shape, stored_shape

_GATHERS = 2  # a layer is gathered in the forward pass and again in the backward pass


class ValueBytes(NamedTuple):
    """Bytes of one number on the wire.

    Attributes:
        compute: a number of a parameter that is gathered for the loss.
        reduce: a number of a gradient.
        param: a number of a parameter that is gathered after its update.
    """

    compute: int = 4
    reduce: int = 4
    param: int = 4


_FLOAT32 = ValueBytes()


class PlanTraffic(NamedTuple):
    """Bytes that one device sends in a step, by the axes of the collectives.

    Attributes:
        gathered: gathers of whole leaves, before the loss or after the update, where no computation overlaps with them.
        opened: gathers of layers, where the loss uses them.
        reduced: sums and scatters of gradients.
    """

    gathered: Sent
    opened: Sent
    reduced: Sent

    @property
    def sent(self) -> Sent:
        """All together."""
        total: Sent = {}
        for part in self:
            for axes, sent in part.items():
                total[axes] = total.get(axes, Fraction(0)) + sent
        return total


def plan_traffic(
    plan: Plan,
    params: Any,
    mesh: Mesh,
    *,
    accumulate: int = 1,
    deterministic: int | None = None,
    value_bytes: ValueBytes = _FLOAT32,
    prefetched: bool = False,
) -> PlanTraffic:
    """Bytes that one device sends per step to gather parameters and reduce gradients.

    Args:
        plan: the plan.
        params: as the state holds them, or their shapes.
        mesh: the mesh, which may be abstract.
        accumulate: microbatches, as for `make_train_step`.
        deterministic: as for `make_train_step`.
        value_bytes: bytes per value.
        prefetched: stacks are run with `prefetch=True`, which gathers the last layer once.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_padded)
    layouts = jax.tree.leaves(plan.layouts(params, mesh), is_leaf=is_layout)
    counter = _Counter(plan, mesh, accumulate, value_bytes, prefetched, deterministic)
    for layout, (path, x) in zip(layouts, leaves, strict=True):
        counter.add_leaf(layout, path_name(path), tuple(x.shape))
    counter.add_sums()
    return counter.traffic


class _Counter:
    """The bytes that are sent, added up leaf by leaf.

    For example, one leaf [8, 6] of float32 on fsdp=4, whole, without accumulation. It rests as [2, 6] on each device: a
    gather sends 3 times 48 bytes, and the reduce_scatter of its gradient [8, 6] another 3 times 48. Layer by layer with
    accumulate=2, each microbatch gathers it twice and reduces it once: 4 gathers and 2 reduce_scatters.
    """

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        accumulate: int,
        value_bytes: ValueBytes,
        prefetched: bool,
        deterministic: int | None,
    ):
        self.mesh = mesh
        self.accumulate = accumulate
        self.value_bytes = value_bytes
        self.prefetched = prefetched
        self.deterministic = deterministic
        self.traffic = PlanTraffic({}, {}, {})
        self.layerwise_names: tuple[str, ...] = ()
        for strategy in plan.strategies:
            self.layerwise_names += strategy.names
        self.batch_axes = all_axes(plan.batch_spec(mesh))
        # The numbers of elements that are summed in one all_reduce: gradients that are summed over the same axes by the
        # same algorithm, and vary over the same axes, are sent together.
        self.sums: dict[tuple[tuple[str, ...], Algorithm, frozenset[str]], list[int]] = {}

    def add_leaf(self, layout: LeafLayout, name: str, shape: tuple[int, ...]) -> None:
        """Adds the collectives of one leaf, of which the state holds an array of this shape."""
        original = stored_shape(shape, layout.rows)
        # A stack is opened layer by layer, a message each.
        by_layer = layout.lazy and not layout.opened_before_loss and is_stacked(name, self.layerwise_names)
        self._add_parameter(layout, original, by_layer)
        if self.deterministic:
            padded = padded_shape(original, layout.update, self.mesh)
            self._add_groups(layout, padded, self.deterministic)
        else:
            self._add_gradient(layout, original, by_layer)

    def _add_parameter(self, layout: LeafLayout, original: tuple[int, ...], by_layer: bool) -> None:
        """Adds the gathers of a parameter: before the loss, in each microbatch, and after the update."""
        compute = self.value_bytes.compute
        gathered = self.traffic.gathered
        opened = self.traffic.opened
        gathered_first = layout.cuts(gather=("step",))
        at_rest = self._local_shape(original, layout.rest)
        self._add_gathers(gathered, gathered_first, at_rest, compute)
        # What a handle holds in the loss: whole over the axes that are gathered once per step, still a part over those
        # of the layer.
        closed_splits = tuple(split for split in layout.splits if split.gather in ("never", "layer"))
        closed = LeafLayout(closed_splits).rest
        kept_cuts, regathered_cuts = separate_kept_cuts(layout.cuts(gather=("layer",)))
        shape = self._local_shape(original, closed)
        # The kept cuts first, as `separate_kept_cuts` orders them: once per microbatch. The others are gathered in the
        # forward pass, and in the backward pass again; a leaf that is opened before the loss stays whole between them.
        shape = self._add_gathers(opened, kept_cuts, shape, compute, self.accumulate, by_layer)
        gathers = 1 if layout.opened_before_loss else _GATHERS
        times = self.accumulate * gathers
        self._add_gathers(opened, regathered_cuts, shape, compute, times, by_layer)
        if self.prefetched and by_layer:
            # The backward pass begins with the last layer, which the forward pass has just gathered: one layer less.
            last_layer = (1, *shape[1:])
            self._add_gathers(opened, regathered_cuts, last_layer, compute, -self.accumulate, by_layer)
        gathered_last = layout.cuts(gather=("update",))
        updated = self._local_shape(original, layout.update)
        self._add_gathers(gathered, gathered_last, updated, self.value_bytes.param)

    def _add_gradient(self, layout: LeafLayout, original: tuple[int, ...], by_layer: bool) -> None:
        """Adds the reduce_scatters of a gradient, and notes the all_reduces over the other axes for `add_sums`."""
        # In the order of the step: what the loss scatters in each microbatch, what is scattered once at the end, then
        # the sums.
        opened = layout.cuts(gather=("layer",))
        early = layout.cuts(gather=("step", "update"), scatter=("layer", "microbatch"))
        shape = self._local_shape(original, layout.seen)
        shape = self._add_scatters((*opened, *early), shape, self.accumulate, by_layer)
        shape = self._add_scatters(layout.cuts(scatter=("step",)), shape)
        # A gradient differs along the axes of the batch, and along those where a strategy says so. Over the axes of the
        # update the scatters above have summed it.
        update_axes = all_axes(layout.update)
        varying = frozenset(self.batch_axes | set(layout.varies) | update_axes)
        unreduced = sorted(varying - update_axes)
        # An algorithm takes its own axes; what is left is summed plainly, in one collective over all of it.
        for axes, algorithm in layout.sums:
            summed_axes = [axis for axis in axes if axis in unreduced]
            self._collect_sum(summed_axes, algorithm, varying, shape)
            unreduced = [axis for axis in unreduced if axis not in summed_axes]
        self._collect_sum(unreduced, PLAIN, varying, shape)

    def _collect_sum(
        self, axes: Sequence[str], algorithm: Algorithm, varying: frozenset[str], shape: tuple[int, ...]
    ) -> None:
        self.sums.setdefault((tuple(axes), algorithm, varying), []).append(math.prod(shape))

    def add_sums(self) -> None:
        """Adds the all_reduces of all leaves' gradients."""
        for (axes, algorithm, _), elements in self.sums.items():
            self._add(self.traffic.reduced, algorithm, "all_reduce", elements, self.value_bytes.reduce, axes)

    def _local_shape(self, original: tuple[int, ...], spec: Any) -> tuple[int, ...]:
        return local_shape(padded_shape(original, spec, self.mesh), spec, self.mesh)

    def _add(
        self,
        part: Sent,
        algorithm: Algorithm,
        kernel: str,
        elements: Sequence[int],
        itemsize: int,
        axes: Collection[str],
        times: int = 1,
    ) -> None:
        """Adds one collective of arrays with these numbers of elements to a part of the traffic, `times` times."""
        if algorithm.cost is None:
            raise ValueError(
                f"plan_traffic: the algorithm {algorithm} must have a cost, to be compared with the census; it has "
                "none. Pass Algorithm(..., cost=...)."
            )
        sizes = {}
        for axis in axes:
            # As in the step: over one device no collective is traced.
            if self.mesh.shape[axis] > 1:
                sizes[axis] = self.mesh.shape[axis]
        if not sizes:
            return
        if algorithm.feedback and kernel != "all_gather":
            itemsize = 4  # with feedback sums are in float32
        for link_axes, sent in algorithm.cost(kernel, elements, itemsize, sizes).items():
            # Fractions: (n-1)/n of a leaf is no float, and the sum must equal the bytes of the census exactly.
            part[link_axes] = part.get(link_axes, Fraction(0)) + times * sent

    def _add_gathers(
        self,
        part: Sent,
        cuts: Cuts,
        shape: tuple[int, ...],
        itemsize: int,
        times: int = 1,
        by_layer: bool = False,
    ) -> tuple[int, ...]:
        """Adds gathers, the last cut first; returns the shape after them."""
        for cut in reversed(cuts):
            messages, elements = _split_into_messages(shape, by_layer)
            self._add(part, cut.gather_by, "all_gather", [elements], itemsize, cut.axes, times * messages)
            shape = _scale_dim(shape, cut.dim, count_devices(self.mesh, cut.axes), 1)
        return shape

    def _add_scatters(
        self, cuts: Cuts, shape: tuple[int, ...], times: int = 1, by_layer: bool = False
    ) -> tuple[int, ...]:
        """Adds reduce_scatters of dims that are padded first; returns the shape after them."""
        # A dim is padded once for all its cuts, before the first of them: [6] over 2 and then 2 devices is sent as [8].
        for dim in {cut.dim for cut in cuts}:
            devices = 1
            for cut in cuts:
                if cut.dim == dim:
                    devices *= count_devices(self.mesh, cut.axes)
            padded_rows = -(-shape[dim] // devices) * devices
            shape = _scale_dim(shape, dim, padded_rows, shape[dim])
        reduced = self.traffic.reduced
        itemsize = self.value_bytes.reduce
        for cut in cuts:
            messages, elements = _split_into_messages(shape, by_layer)
            self._add(reduced, cut.reduce_by, "reduce_scatter", [elements], itemsize, cut.axes, times * messages)
            shape = _scale_dim(shape, cut.dim, 1, count_devices(self.mesh, cut.axes))
        return shape

    def _add_groups(self, layout: LeafLayout, shape: tuple[int, ...], groups: int) -> None:
        """Adds the collectives of a gradient that is summed group by group.

        An all_to_all sends pieces to all devices; an all_gather joins the pieces over axes that do not split the
        update.

        Worked example: a leaf [8, 6] on data=2 and fsdp=4, which splits its update, in 16 groups. A device has 2
        groups, which it adds to one partial sum. A quarter of the leaf is 12 elements, shared by the 2 devices along
        "data": a piece has 6. The all_to_all sends 8 pieces, 48 elements, and the all_gather over "data" one piece.
        """
        axes = self.batch_axes
        split_axes = axes & all_axes(layout.update)
        shared_axes = axes - split_axes
        devices = count_devices(self.mesh, axes)
        local_groups = groups // devices
        part = math.prod(shape) // count_devices(self.mesh, split_axes)
        piece = -(-part // count_devices(self.mesh, shared_axes))  # rounded up
        # Of 12 groups 4 add up pairwise to one sum, and 3 such sums are sent: 12 & -12 is 4.
        largest_power_of_two = local_groups & -local_groups
        partial_sums = local_groups // largest_power_of_two  # that a device sends
        elements = piece * devices * partial_sums
        self._add(self.traffic.reduced, PLAIN, "all_to_all", [elements], 4, axes)
        self._add(self.traffic.reduced, PLAIN, "all_gather", [piece], 4, shared_axes)


def _split_into_messages(shape: tuple[int, ...], by_layer: bool) -> tuple[int, int]:
    """How many messages send an array, and the elements of each.

    A stack [4 layers, 8, 6] is opened by four messages of 48 elements: by some algorithms a message is padded or scaled
    by itself, and the bytes of one large message would be others.
    """
    messages = 1
    if by_layer:
        messages = shape[0]
    return messages, math.prod(shape) // max(messages, 1)


def _scale_dim(shape: tuple[int, ...], dim: int, times: int, divisor: int) -> tuple[int, ...]:
    """The shape with one dim `times / divisor` as large."""
    return (*shape[:dim], shape[dim] * times // max(divisor, 1), *shape[dim + 1 :])
