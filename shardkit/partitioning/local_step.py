"""A device's share of a step or of an evaluation, inside shard_map, before anything is summed over devices."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec

from shardkit.layout import spec_axes
from shardkit.partitioning.batch import accumulated, device_keys
from shardkit.partitioning.gradient import GradFn, LossFn, Mean, named_means
from shardkit.partitioning.handles import parts, shown, with_parts
from shardkit.partitioning.loss_weights import in_compute
from shardkit.partitioning.reshard import enter
from shardkit.partitioning.token_axes import tokens_split


def local_gradients(
    grad_fn: GradFn,
    params: Any,
    batch: Any,
    key: jax.Array,
    scale: jax.Array,
    layouts: Any,
    batch_spec: PartitionSpec,
    policy: Any,
    accumulate: int,
) -> tuple[Any, dict[str, Mean], Any]:
    """What one device computes in a step; `policy` is a Precision.

    Returns:
        The device's examples as the loss sees them, the Means, and the gradients.

    Cost: that of `enter` and of the GradFn, `accumulate` times.
    """
    axes = _axes(batch_spec)
    seen = enter(params, layouts, axes, policy.compute, policy.reduce)
    keys = device_keys(key, batch, batch_spec)

    def first(batch: Any) -> dict[str, Mean]:
        cut = lambda x: x[: x.shape[0] // accumulate] if x.ndim else x  # noqa: E731
        loss, aux, _ = grad_fn(seen, *jax.tree.map(cut, (batch, keys)), scale=scale)
        return named_means((loss, aux))

    with tokens_split(_axes(batch_spec, 1)):
        batch = in_compute(first, batch, policy.compute, once=accumulate == 1 and _in_one(axes, grad_fn))
        means, grads = accumulated(grad_fn, seen, batch, keys, scale, accumulate)
    return batch, means, grads


def local_means(
    loss_fn: LossFn, params: Any, batch: Any, layouts: Any, batch_spec: PartitionSpec, policy: Any
) -> dict[str, Mean]:
    """What one device computes in an evaluation: the loss and the auxiliary Means; `policy` is a Precision.

    Cost: that of `enter` and of the loss.
    """
    axes = _axes(batch_spec)
    seen = enter(params, layouts, axes, policy.compute)
    seen = with_parts(seen, parts(seen))
    means = lambda batch: named_means(shown(loss_fn, seen, batch, None))  # noqa: E731
    with tokens_split(_axes(batch_spec, 1)):
        return means(in_compute(means, batch, policy.compute, once=_in_one(axes, loss_fn)))


def _axes(batch_spec: PartitionSpec, *dims: int) -> tuple[str, ...]:
    """The axes that split the batch, or some of its dims."""
    return tuple(axis for dim, axes in enumerate(spec_axes(batch_spec)) if not dims or dim in dims for axis in axes)


def _in_one(axes: tuple[str, ...], function: Any) -> bool:
    """Whether a function sees all examples of a batch at once: on one device, and in no pipeline."""
    return not axes and not hasattr(function, "stages")
