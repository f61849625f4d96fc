"""Sums of totals and weights over devices: of the metrics of a step, and of a loss that is a sum of means.

A total and its weight are summed over the axes over which their types vary, and divided only after that.

Worked example: two devices along "data", with 3 examples and 1. Their losses are Mean(6, 3) and Mean(2, 1), their
accuracies Mean(2, 3) and Mean(1, 1). Each device concatenates its four numbers, [6, 3, 2, 3] and [2, 1, 1, 1], and one
all_reduce leaves [8, 4, 3, 4] on both: a loss of 8 / 4 and an accuracy of 3 / 4. The mean of the two accuracies, 5 / 6,
would count the one example of the second device as often as the three of the first.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from shardkit._arguments.checks import quote
from shardkit._jax.compat import varying_axes
from shardkit._jax.jaxprs import TOTALS
from shardkit.collectives import all_reduce, vary
from shardkit.collectives.axes import axis_size
from shardkit.on_device.means import Mean, describe_type, divisor_of, is_mean, means_by_path
from shardkit.on_device.pipelines import pipeline_remedy


def global_means(
    means: Mapping[str, Any], batch_axes: Collection[str], stage_axes: Collection[str] = ()
) -> dict[str, Any]:
    """The means over all devices: each summed over exactly the axes over which its total varies.

    The sums are float32 and invariant over all axes. `stage_axes` split the layers of a pipeline: an error along them
    says that the loss must be a pipeline.

    Raises:
        ValueError: a weight varies over other axes than its total. Axes of one device do not count. A weight that
            varies over no axis is right beside a total that varies over `batch_axes`, the axes that split the batch.
            Or an array varies over an axis that does not split the batch: its devices may have parts of the array
            instead of parts of a sum.

    Cost: one all_reduce of 8 bytes per mean, of an array for each element; those over the same axes share one
        collective.
    """
    leaves, structure = jax.tree.flatten(dict(means), is_leaf=is_mean)
    numbers_by_axes: dict[tuple[str, ...], list[int]] = {}
    for number, (name, mean) in enumerate(means_by_path(dict(means))):
        axes = _find_axes_of_sum(name, mean, batch_axes, stage_axes)
        numbers_by_axes.setdefault(axes, []).append(number)
    # Means whose totals vary over the same axes share one collective, after the loss. A sum inside the loss would be
    # sent for each microbatch, and be divided before any device has the weight of all microbatches. Over an axis along
    # which all devices have the same total, such as a tp axis, nothing is summed: a sum would count the total once for
    # each of its devices.
    for axes, numbers in numbers_by_axes.items():
        sums = _sum_together([leaves[number] for number in numbers], axes)
        for number, mean in zip(numbers, sums, strict=True):
            leaves[number] = mean
    sums_by_name = jax.tree.unflatten(structure, leaves)
    return {name: sums_by_name[name] for name in means}


def _sum_together(means: Sequence[Mean], axes: tuple[str, ...]) -> list[Mean]:
    """Means whose totals vary over the same axes, summed over these by one all_reduce, in float32."""
    values = []
    for mean in means:
        values.append(vary(mean.total.astype(jnp.float32), axes))
        values.append(vary(mean.weight.astype(jnp.float32), axes))
    # One vector, so that all means share one message: its time is latency, not bytes.
    flat, restore = ravel_pytree(values)
    with jax.named_scope(TOTALS):
        if axes:
            flat = all_reduce(flat, axes)
        values = restore(flat)
    totals = values[::2]
    weights = values[1::2]
    return [Mean(total, weight) for total, weight in zip(totals, weights, strict=True)]


def _find_axes_of_sum(
    name: str, mean: Mean, batch_axes: Collection[str], stage_axes: Collection[str]
) -> tuple[str, ...]:
    """The axes over which a mean is summed, after a check that its weight belongs to its total.

    Worked example: on data=4, model=2, where "data" splits the batch. Both vary over

        "data"               summed over "data"
        "data", "model"      summed over both: each device has a part of the sum
        the total over "data", the weight over no axis
                             summed over "data": the weight counts once for each of the four devices
        the total over "data", "model", the weight over "data"
                             refused: the weight would count once for each of the two devices along "model"
    """
    total_axes = varying_axes(mean.total)
    weight_axes = varying_axes(mean.weight)
    axes = tuple(sorted(total_axes | weight_axes))
    # Along an axis of one device nothing is counted twice, and what varies by an index along it is whole.
    counted_axes = frozenset(axis for axis in axes if axis_size(axis) > 1)
    foreign_axes = sorted(counted_axes & total_axes - frozenset(batch_axes))
    if foreign_axes and jnp.ndim(mean.total):
        raise ValueError(
            f"Mean {name!r}: an array may vary only over the axes of the batch; got {describe_type(mean.total)}, "
            f"which varies over {quote(foreign_axes)} too. Pass all_gather(..., replicated=True) of parts of the "
            "array, or all_reduce(...) of parts of a sum."
        )
    unmatched_axes = sorted(counted_axes & _find_unmatched_axes(total_axes, weight_axes, batch_axes))
    if unmatched_axes:
        remedy = _find_remedy(unmatched_axes, foreign_axes, stage_axes)
        raise ValueError(
            f"Mean {name!r}: total and weight must vary over the same axes; the total varies over "
            f"{quote(sorted(total_axes))} and the weight over {quote(sorted(weight_axes))}, which differ in "
            f"{quote(unmatched_axes)}. {remedy}"
        )
    return axes


def _find_unmatched_axes(
    total_axes: frozenset[str], weight_axes: frozenset[str], batch_axes: Collection[str]
) -> frozenset[str]:
    """The axes over which a total or its weight varies, and the other neither varies nor may be cast."""
    # A weight that varies over no axis, such as a number of values, counts once on each device; one that varies over
    # only some of the axes of the total would be counted again along the others.
    castable = frozenset[str]() if weight_axes else frozenset(batch_axes)
    missing_of_total = weight_axes - total_axes
    missing_of_weight = total_axes - weight_axes - castable
    return missing_of_total | missing_of_weight


def _find_remedy(unmatched_axes: Sequence[str], foreign_axes: Sequence[str], stage_axes: Collection[str]) -> str:
    """What to do where a total and its weight vary over different axes."""
    stages = [axis for axis in unmatched_axes if axis in stage_axes]
    if stages:
        return pipeline_remedy(stages)
    example = ", as row_linear over a tp axis" if foreign_axes else ""
    return f"Compute both from the same shards, or reduce both alike{example}."


def combine_terms(terms: Sequence[Mean]) -> jax.Array:
    """The scalar of which a sum of means is differentiated: each total over its own weight, times the largest weight.

    The weights are those of the whole batch. A device knows only its share of them, so an all_reduce sums them here,
    before the gradient. The step then divides the gradient by the largest weight, as it does by the weight of one Mean.

    Worked example: of a batch, `a` has weight 8 and `b` weight 2. The total is `8/8 * a.total + 8/2 * b.total`, and
    after the sum over devices it is divided by 8: `a.total / 8 + b.total / 2`.
    """
    axes_of_terms = [varying_axes(mean.total) for mean in terms]
    axes = tuple(sorted(frozenset[str]().union(*axes_of_terms)))
    weights = jnp.stack([vary(mean.weight.astype(jnp.float32), axes) for mean in terms])
    if axes:
        weights = all_reduce(weights, axes)
    # A term may be the same along an axis over which another term varies. Then its gradient is summed once for each
    # device of the axis, and so is its weight, in the all_reduce above: the copies cancel. The weights by which the
    # step divides have no copies, so the largest of them is found without copies.
    copies = jnp.array([_count_copies(axes, term_axes) for term_axes in axes_of_terms], jnp.float32)
    largest = divisor_of(jnp.max(weights / copies))
    divisors = divisor_of(weights)
    totals = []
    for mean, divisor in zip(terms, divisors, strict=True):
        totals.append(largest / divisor * mean.total)
    return reduce(jnp.add, totals)


def _count_copies(axes: tuple[str, ...], term_axes: frozenset[str]) -> int:
    """How many devices along some axes have the same term."""
    return math.prod(axis_size(axis) for axis in axes if axis not in term_axes)
