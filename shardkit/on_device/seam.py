"""The seam: parameters in, gradients out, by the collectives that a plan's layouts ask for.

`enter`, `leave` and `to_rest` run inside shard_map and read a placement alone: no strategy is named here.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardkit._jax.compat import varying_axes
from shardkit._jax.jaxprs import PLAN
from shardkit.collectives import all_reduce, vary
from shardkit.meshes.layout import all_axes, spec_axes, split_dims
from shardkit.on_device.cuts import from_end, in_parts, own_part, to_parts, whole
from shardkit.on_device.feedback import Reduced, begun, residuals_after, scattered, summed, with_residuals
from shardkit.on_device.gradient import divisor_of, global_means, largest_weight
from shardkit.on_device.handles import Handle, cast_floating
from shardkit.on_device.precision import Precision
from shardkit.plans.plan import Placement
from shardkit.plans.splits import LeafLayout, is_layout, map_layouts
from shardkit.plans.storage import is_padded, stored_array, wrap_stored

LAYER_BYTES = 2**20  # below it, the latency of a message per layer costs more than the memory that it saves


@jax.named_scope(PLAN)  # what it marks as varying is the same on all devices
def enter(params: Any, placement: Placement, policy: Precision) -> Any:
    """The parameters as the GradFn sees them, from those at rest: cast, gathered, then marked as varying.

    Cost: an all_gather of what is whole once per step for each leaf, in the compute dtype.
    """
    leaves, structure = jax.tree.flatten(params, is_leaf=is_padded)
    layouts = jax.tree.leaves(placement.layouts, is_leaf=is_layout)
    seen = [enter_leaf(placement, policy, layout, x) for layout, x in zip(layouts, leaves, strict=True)]
    return jax.tree.unflatten(structure, seen)


def enter_leaf(placement: Placement, policy: Precision, layout: LeafLayout, x: Any) -> Any:
    """One leaf of `enter`."""
    # The gather stands here, once and before all microbatches, because a leaf that is whole in the loss is the same in
    # each of them: inside the loss it would be sent again for each. A leaf that is to be whole only while its layer
    # computes, or whose gradient is scattered as soon as it exists, goes in as a Handle, which the loss opens.
    #
    # Then the leaf is marked as varying over the axes of the batch, and over those where its strategies say that the
    # data differ. An unmarked leaf is the same on all devices to jax's types, and so must be its gradient: jax would
    # sum it at each use of the leaf, in each microbatch, before `leave` can choose when, in which dtype and by which
    # algorithm. The mark sends nothing, and since the gradient is taken of the marked leaf, it stays this device's sum.
    batch_axes = [axis for axes in spec_axes(placement.batch) for axis in axes]
    x, data_axes = stored_array(x), (*batch_axes, *layout.varies)
    if layout.lazy:
        return _handled(layout, x, data_axes, policy)
    cuts = layout.cuts(gather=("step",))
    return vary(whole(cast_floating(x, policy.compute), cuts, layout.padding(cuts)), data_axes)


def _handled(layout: LeafLayout, x: jax.Array, data_axes: tuple[str, ...], policy: Precision) -> Handle:
    """The Handle of a lazy leaf: opening it gathers what is at rest in parts; a part of a whole leaf has it beside."""
    compute, reduce = policy.compute, policy.reduce
    gathers = layout.cuts(gather=("layer",))
    now = layout.cuts(gather=("step",))
    if now:  # sent in the compute dtype; the part's own decides that of its gradient
        x = whole(cast_floating(x, compute), now, layout.padding(now)).astype(x.dtype)
    scatters = layout.cuts(gather=("step", "update"), scatter=("layer", "microbatch"))
    part = x
    for cut in scatters:
        part = own_part(part, cut.axes, dim=cut.dim)
    if scatters:  # only its gradient is used, and that is a sum
        part = cast_floating(part, reduce)
    beside = vary(x if gathers else cast_floating(x, compute), data_axes) if scatters else None
    sizes = tuple((dim - x.ndim, size) for dim, size in layout.padding(gathers))
    gathers, scatters = from_end(gathers, x.ndim), from_end(scatters, x.ndim)
    return Handle(vary(part, data_axes), beside, gathers, scatters, compute, reduce, layout.entry, sizes)


def leave(
    means: Any, grads: Any, placement: Placement, policy: Precision, scale: jax.Array, residuals: Any
) -> tuple[dict[str, Any], Any, Any]:
    """The means over all devices, the gradients in the layout of the update, and the new residuals.

    From this device's partial sums: the Means by name, and the gradients of `scale` times the loss's total.

    Cost: an all_reduce of 8 bytes for each mean; for each leaf a reduce_scatter of `update - grad` and an all_reduce of
        the rest, in the reduce dtype.
    """
    # The reductions stand here, after the last microbatch, because a sum over devices of a sum over microbatches is
    # sent once for all of them: a reduce_scatter where the update is split further than the gradient, the sums for
    # which strategies have an algorithm, and an all_reduce over what is left. What is left to sum is read from the
    # gradient's type: a loss that has summed over an axis itself (tensor parallelism, a pipeline's last stage) is not
    # summed over it again, and one that has not is not forgotten.
    #
    # The division by the global weight (and the scale) comes last, in float32: dividing by each device's own weight
    # first gives the mean of means, which is another number as soon as two devices have unequal weights.
    means = global_means(means, placement.plan.batch_axes)
    divisor = divisor_of(largest_weight(means["loss"])) * scale
    with jax.named_scope(PLAN):
        layouts = jax.tree.leaves(placement.layouts, is_leaf=is_layout)
        leaves = []
        for layout, leaf in zip(layouts, with_residuals(grads, residuals, divisor), strict=True):
            leaves.append(_scattered(leaf, layout, policy.reduce))
        leaves = [begun(leaf) for leaf in _sum_by_algorithms(leaves, layouts, policy.reduce)]
        reduced = []
        for layout, leaf in zip(layouts, leaves, strict=True):
            grad = _sum_what_varies(leaf.grad, layout, policy.reduce)
            reduced.append(wrap_stored(grad.astype(jnp.float32) / divisor, layout.padded, layout.rows))
    grads = jax.tree.unflatten(jax.tree.structure(grads), reduced)
    return means, grads, residuals_after(residuals, leaves, divisor)


def _sum_what_varies(grad: jax.Array, layout: LeafLayout, dtype: Any) -> jax.Array:
    """The gradient, summed over the axes that its type names and the layout of its update does not."""
    axes = tuple(sorted(varying_axes(grad) - all_axes(layout.update)))
    if not axes:
        return grad
    grad = grad.astype(dtype)
    split = split_dims(layout.automatic)
    if split:
        return in_parts(partial(all_reduce, axis=axes), grad, split)
    return all_reduce(grad, axes)


def _sum_by_algorithms(leaves: list[Reduced], layouts: list[LeafLayout], dtype: Any) -> list[Reduced]:
    """The gradients after the sums for which a strategy has an algorithm of its own, those with feedback last."""
    groups: dict[Any, list[int]] = {}
    for number, layout in enumerate(layouts):
        for axes, algorithm in layout.sums:
            # An algorithm may concatenate leaves, which must be partial sums alike.
            varying = varying_axes(leaves[number].grad)
            axes = tuple(axis for axis in axes if axis in varying)
            if axes:
                groups.setdefault((axes, algorithm, varying), []).append(number)

    def has_feedback(group: Any) -> bool:
        (_, algorithm, _), _ = group
        return bool(algorithm.feedback)

    leaves = list(leaves)
    for (axes, algorithm, _), numbers in sorted(groups.items(), key=has_feedback):
        sums = summed(algorithm, [leaves[number] for number in numbers], axes, dtype)
        for number, leaf in zip(numbers, sums, strict=True):
            leaves[number] = leaf
    return leaves


@jax.named_scope(PLAN)
def to_rest(params: Any, placement: Placement) -> Any:
    """The parameters at rest, from the updated shards.

    Cost: an all_gather of `update - rest` for each leaf.
    """

    # Where the update is split further than the parameters (zero1, zero2), the new parameters are gathered here, after
    # the optimizer, and not where the next step uses them: the state then holds what its plan says, and a step that
    # ends a run leaves whole parameters. The gather's result is typed as the same on all devices. A plain all_gather's
    # would vary, and shard_map would refuse it as replicated, or the partitioner gather what it does not trust.
    def one(layout: LeafLayout, x: Any) -> Any:
        still = layout.padding(layout.cuts(gather=("never", "layer", "step")))
        x = whole(stored_array(x), layout.cuts(gather=("update",)), set(layout.padded) - set(still), replicated=True)
        return wrap_stored(x, still, layout.rows)

    return map_layouts(one, placement.layouts, params)


def _scattered(leaf: Reduced, layout: LeafLayout, dtype: Any) -> Reduced:
    """A gradient summed in the reduce dtype and split once per step."""
    if leaf.residual is not None:
        return scattered(leaf, layout, dtype)
    grad = leaf.grad
    # Layer by layer, where a copy in a wider dtype has more than LAYER_BYTES a layer: it is the largest array of a
    # step.
    wider = jnp.dtype(dtype).itemsize * grad.size if jnp.dtype(dtype).itemsize > grad.dtype.itemsize else 0
    cuts = from_end(layout.cuts(scatter=("step",)), grad.ndim)
    if cuts and wider > grad.shape[0] * LAYER_BYTES and all(cut.dim > -grad.ndim for cut in cuts):
        return leaf._replace(grad=lax.map(lambda layer: to_parts(layer, cuts, dtype), grad))
    return leaf._replace(grad=to_parts(grad, cuts, dtype))
