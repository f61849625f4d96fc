"""The seam: parameters in, gradients out, by the collectives that a plan's layouts ask for.

`enter`, `leave` and `to_rest` run inside shard_map and read a placement alone: no strategy is named here. When a dim is
gathered and when its gradient is scattered ("step", "layer", "microbatch", "update", "never") is in the table of
`plans/splits.py`, with what makes a leaf `lazy` or `automatic`, and with its four layouts: at `rest` in the state, as
`seen` by the loss, as its `grad` leaves the loss, and in the `update`, which optimizer states share.

A leaf may be stored as a `Padded` (`plans/storage.py`): with zeros at the end of dims, or with layers in the order of
pipeline stages. `stored_array` takes it out, and `wrap_stored` puts it back.

Worked example: a leaf w[8, 6] under `dp("data")` of 2 and `fsdp("fsdp")` of 4, which split the batch, in bfloat16.

    state    w[2, 6] float32, rows over "fsdp"; the same along "data"
    enter    cast to bfloat16, all_gather over "fsdp" -> w[8, 6], marked as varying over "data" and "fsdp"
    loss     of this device's examples -> total, weight, gradient[8, 6] bfloat16: partial sums over both axes
    leave    all_reduce of total and weight over both axes
             cast to float32, reduce_scatter over "fsdp" -> gradient[2, 6], still partial over "data"
             all_reduce over "data", divided by the weight of all 8 devices' examples
    update   w[2, 6] float32, which is at rest already: `to_rest` sends nothing
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardkit._jax.compat import varying_axes
from shardkit._jax.jaxprs import PLAN
from shardkit.collectives import all_reduce, vary
from shardkit.collectives.algorithms import Algorithm
from shardkit.meshes.layout import all_axes, spec_axes, split_dims
from shardkit.on_device.cuts import count_from_end, gather_cuts, in_automatic_parts, scatter_cuts, take_part
from shardkit.on_device.feedback import (
    PartialGradient,
    add_residual,
    attach_residuals,
    collect_residuals,
    scatter_with_feedback,
    sum_by_algorithm,
)
from shardkit.on_device.handles import Handle, cast_floating
from shardkit.on_device.mean_sums import global_means
from shardkit.on_device.means import divisor_of, largest_weight
from shardkit.on_device.precision import Precision
from shardkit.plans.plan import Placement
from shardkit.plans.splits import Cuts, LeafLayout, is_layout, map_layouts
from shardkit.plans.storage import is_padded, stored_array, wrap_stored

LAYER_BYTES = 2**20  # below it, the latency of a message per layer costs more than the memory that it saves


# By this name readers of a trace, as lint and the check of a first step, tell what a plan does from what a loss does.
@jax.named_scope(PLAN)
def enter(params: Any, placement: Placement, policy: Precision) -> Any:
    """The parameters as the GradFn sees them, from those at rest: cast, gathered, then marked as varying.

    Cost: one all_gather per step, in the compute dtype, of each leaf that is split at rest and whole in the loss.
    """
    leaves, structure = jax.tree.flatten(params, is_leaf=is_padded)
    layouts = jax.tree.leaves(placement.layouts, is_leaf=is_layout)
    entered = []
    for layout, x in zip(layouts, leaves, strict=True):
        entered.append(enter_leaf(placement, policy, layout, x))
    return jax.tree.unflatten(structure, entered)


def enter_leaf(placement: Placement, policy: Precision, layout: LeafLayout, x: Any) -> Any:
    """One leaf of `enter`."""
    # The gather stands here, once and before all microbatches, because a leaf that is whole in the loss is the same in
    # each of them: inside the loss it would be sent again for each. A leaf that is to be whole only while its layer
    # computes, or whose gradient is scattered as soon as it exists, goes in as a Handle, which the loss opens.
    #
    # Then the leaf is marked as varying over the axes of the batch, and over those where its strategies say that the
    # data differ. An unmarked leaf is the same on all devices to jax's types, and so must be its gradient: jax would
    # sum it at each use of the leaf, in each microbatch, before `leave` can choose when, in which dtype and by which
    # algorithm. The mark sends nothing, and since the gradient is with respect to the marked leaf, it stays this
    # device's sum.
    batch_axes = itertools.chain(*spec_axes(placement.batch))
    data_axes = (*batch_axes, *layout.varies)
    x = stored_array(x)
    if layout.lazy:
        return _make_handle(layout, x, data_axes, policy)
    return vary(_gather_before_loss(layout, x, policy.compute), data_axes)


def _make_handle(layout: LeafLayout, x: jax.Array, data_axes: tuple[str, ...], policy: Precision) -> Handle:
    """The Handle of a lazy leaf, which the loss opens, or the GradFn just before it (`opened_before_loss`).

    Where the loss gathers the leaf by layer (`fsdp(layerwise=...)`), the handle has this device's part alone: it is
    what is gathered, and what is differentiated. Where the loss needs the whole weight now and its gradient is
    scattered early (zero2), the value and its gradient have two shapes: `whole` is the value, and `part` is there so
    that a gradient of its shape exists, which is the scattered one: opening is a custom_vjp from `part` to `whole`.
    Nobody reads the numbers of that `part`. A leaf may be both, with `fsdp` by layer over one axis and zero2 over
    another: then `whole` is whole over the second axis alone, and the layer gathers it over the first.
    """
    gathered_by_layer = layout.cuts(gather=("layer",))
    padded_dims = layout.padding(gathered_by_layer)
    # `cuts` gives the cuts that meet both conditions: gathered at one of these times and scattered at one of those.
    scattered_early = layout.cuts(gather=("step", "update"), scatter=("layer", "microbatch"))
    # Where nothing is gathered here it keeps its dtype: the part is what is differentiated, and the layer casts it.
    value = x
    if layout.cuts(gather=("step",)):
        # Sent in the compute dtype, and cast back, because the leaf may be gathered by layer too.
        value = _gather_before_loss(layout, x, policy.compute).astype(x.dtype)
    part = value
    whole = None
    if scattered_early:
        for cut in scattered_early:
            part = take_part(part, cut.axes, dim=cut.dim)
        part = cast_floating(part, policy.reduce)
        whole = value
        if not gathered_by_layer:
            whole = cast_floating(whole, policy.compute)
        whole = vary(whole, data_axes)
    return Handle(
        vary(part, data_axes),
        whole,
        gathers=count_from_end(gathered_by_layer, x.ndim),
        scatters=count_from_end(scattered_early, x.ndim),
        compute=policy.compute,
        reduce=policy.reduce,
        opened_before_loss=layout.opened_before_loss,
        original_sizes=tuple((dim - x.ndim, size) for dim, size in padded_dims),
    )


def _gather_before_loss(layout: LeafLayout, x: jax.Array, dtype: Any) -> jax.Array:
    """A leaf in a dtype, gathered over the axes over which it is whole during the whole step."""
    cuts = layout.cuts(gather=("step",))
    return gather_cuts(cast_floating(x, dtype), cuts, layout.padding(cuts))


def leave(
    means: Any, grads: Any, placement: Placement, policy: Precision, scale: jax.Array, residuals: Any
) -> tuple[dict[str, Any], Any, Any]:
    """The means over all devices, the gradients in the layout of the update, and the new residuals.

    From this device's partial sums: the Means by name, and the gradients of `scale` times the loss's total. `residuals`
    are those of error feedback: what compressed reductions of the step before left out (`feedback.py`).

    Cost: an all_reduce of 8 bytes for each mean, in one message for all that are summed over the same axes; for each
        leaf a reduce_scatter over the axes that its update has and its gradient has not, and an all_reduce over the
        others, in the reduce dtype.
    """
    # The reductions stand here, after the last microbatch, because a sum over devices of a sum over microbatches is
    # sent once for all of them: a reduce_scatter where the update is split further than the gradient, the sums for
    # which strategies have an algorithm, and an all_reduce over what is left. What is left to sum is read from the
    # gradient's type: a loss that has summed over an axis itself (tensor parallelism, a pipeline's last stage) is not
    # summed over it again, and one that has not is not forgotten.
    #
    # The division by the global weight (and the scale) comes last, in float32: dividing by each device's own weight
    # first gives the mean of means, which is another number as soon as two devices have unequal weights. A loss may be
    # a sum of means with other weights, as one over 8 tokens and one over 2 images. Then each term's total was
    # multiplied, before it was differentiated, by the largest weight over its own (`mean_sums.py`), here the images'
    # by 8 / 2: so the one division by 8 is right for both.
    means = global_means(means, placement.plan.batch_axes, placement.plan.stage_axes)
    divisor = divisor_of(largest_weight(means["loss"])) * scale
    structure = jax.tree.structure(grads)
    layouts = jax.tree.leaves(placement.layouts, is_leaf=is_layout)
    with jax.named_scope(PLAN):
        partial_sums = attach_residuals(grads, residuals, divisor)
        for number, layout in enumerate(layouts):
            partial_sums[number] = _scatter(partial_sums[number], layout, policy.reduce)
        partial_sums = _sum_by_algorithms(partial_sums, layouts, policy.reduce)
        # Where no reduction has feedback after all, as over an axis of one device.
        partial_sums = [add_residual(gradient) for gradient in partial_sums]
        update_grads = []
        for layout, gradient in zip(layouts, partial_sums, strict=True):
            grad = _sum_what_varies(gradient.grad, layout, policy.reduce)
            grad = grad.astype(jnp.float32) / divisor
            update_grads.append(wrap_stored(grad, layout.padded, layout.rows))
    residuals = collect_residuals(residuals, partial_sums, divisor)
    return means, jax.tree.unflatten(structure, update_grads), residuals


def _scatter(gradient: PartialGradient, layout: LeafLayout, dtype: Any) -> PartialGradient:
    """A gradient summed in the reduce dtype and split once per step."""
    if gradient.to_add is not None:
        return scatter_with_feedback(gradient, layout, dtype)
    grad = gradient.grad
    cuts = count_from_end(layout.cuts(scatter=("step",)), grad.ndim)
    if cuts and _scatters_by_layer(grad, cuts, dtype):
        # A message for each layer, so that only one layer is copied to the wider dtype at a time.
        scatter_layer = partial(scatter_cuts, cuts=cuts, dtype=dtype)
        return gradient._replace(grad=lax.map(scatter_layer, grad))
    return gradient._replace(grad=scatter_cuts(grad, cuts, dtype))


def _scatters_by_layer(grad: jax.Array, cuts: Cuts, dtype: Any) -> bool:
    """Whether a stack of layers [layers, ...] is scattered layer by layer: if its copy in a wider dtype is large.

    With more than LAYER_BYTES a layer, a copy of all layers in float32 would be the largest array of a step. Nothing
    says that dim 0 counts layers: of any other leaf with rows as large, row by row gives the same sums.
    """
    itemsize = jnp.dtype(dtype).itemsize
    if itemsize <= grad.dtype.itemsize:
        return False
    splits_layers = any(cut.dim == -grad.ndim for cut in cuts)
    has_large_layers = itemsize * grad.size > grad.shape[0] * LAYER_BYTES
    return has_large_layers and not splits_layers


class _AlikeSums(NamedTuple):
    """What sums by an algorithm have in common, of the leaves that one call of the algorithm gets.

    The algorithm may concatenate the leaves, so they must be partial sums over the same axes.
    """

    axes: tuple[str, ...]
    algorithm: Algorithm
    varying: frozenset[str]  # the axes of the leaves' types: of partial sums, and those over which leaves are split


def _sum_by_algorithms(
    gradients: Sequence[PartialGradient], layouts: Sequence[LeafLayout], dtype: Any
) -> list[PartialGradient]:
    """The gradients after the sums for which a strategy has an algorithm of its own."""
    leaves_by_call: dict[_AlikeSums, list[int]] = {}
    for number, layout in enumerate(layouts):
        varying = varying_axes(gradients[number].grad)
        for axes, algorithm in layout.sums:
            unreduced_axes = tuple(axis for axis in axes if axis in varying)
            if unreduced_axes:
                call = _AlikeSums(unreduced_axes, algorithm, varying)
                leaves_by_call.setdefault(call, []).append(number)
    # Sums with feedback come last: a residual is stored as this device's gradient is before the first of them, and is
    # added there. Added earlier, it would be summed over the axes of the other sums, once for each of their devices.
    calls = sorted(leaves_by_call, key=lambda call: call.algorithm.feedback)
    gradients = list(gradients)
    for call in calls:
        numbers = leaves_by_call[call]
        operands = [gradients[number] for number in numbers]
        sums = sum_by_algorithm(call.algorithm, operands, call.axes, dtype)
        for number, gradient in zip(numbers, sums, strict=True):
            gradients[number] = gradient
    return gradients


def _sum_what_varies(grad: jax.Array, layout: LeafLayout, dtype: Any) -> jax.Array:
    """The gradient, summed over the axes that its type names and the layout of its update does not."""
    unreduced_axes = varying_axes(grad) - all_axes(layout.update)
    if not unreduced_axes:
        return grad
    axes = tuple(sorted(unreduced_axes))
    grad = grad.astype(dtype)
    # Where XLA's partitioner splits dims of the leaf too (`manual=`), each device sums only its own part.
    automatic_split = split_dims(layout.automatic)
    if automatic_split:
        return in_automatic_parts(partial(all_reduce, axis=axes), grad, automatic_split)
    return all_reduce(grad, axes)


@jax.named_scope(PLAN)
def to_rest(params: Any, placement: Placement) -> Any:
    """The parameters at rest, from the updated shards.

    Cost: for each leaf an all_gather over the axes that its update has and its resting layout has not.
    """

    # Where the update is split further than the parameters (zero1, zero2), the new parameters are gathered here, after
    # the optimizer, and not where the next step uses them: the state then holds what its plan says, and a step that
    # ends a run leaves whole parameters. The gather's result is typed as the same on all devices. A plain all_gather's
    # would vary: shard_map would refuse it where out_specs say that it is replicated.
    def gather_update(layout: LeafLayout, x: Any) -> Any:
        cuts_at_rest = layout.cuts(gather=("never", "layer", "step"))  # all but those of the update alone
        padded_at_rest = layout.padding(cuts_at_rest)
        padded_in_update_alone = set(layout.padded) - set(padded_at_rest)
        cuts_in_update_alone = layout.cuts(gather=("update",))
        x = gather_cuts(stored_array(x), cuts_in_update_alone, padded_in_update_alone, replicated=True)
        return wrap_stored(x, padded_at_rest, layout.rows)

    return map_layouts(gather_update, placement.layouts, params)
