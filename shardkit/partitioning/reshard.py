"""Reshard parameters in, gradients out: the collectives of a step that are not the loss's own, for every plan.

`enter`, `leave` and `to_rest` run inside shard_map and read only the layouts of a plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from shardkit._check import named
from shardkit._compat import varying_axes
from shardkit.collectives import all_gather, all_reduce, vary
from shardkit.layout import all_axes, spec_axes
from shardkit.partitioning.handles import Handle, Splits, cast_floating, own_part, to_parts
from shardkit.partitioning.placement import Layout, map_layouts
from shardkit.partitioning.storage import as_stored, cut_padding, stored_array

LAYER_BYTES = 2**20  # below it, the latency of a message per layer costs more than the memory that it saves


def enter(
    params: Any, layouts: Any, batch_spec: PartitionSpec, compute: Any = jnp.float32, reduce: Any = jnp.float32
) -> Any:
    """The parameters as the GradFn sees them, from those at rest: cast, gathered, then marked as varying.

    Every leaf is marked as varying over the axes of the batch, and over those where its strategies say that the data
    differ, so that gradients stay local sums until `leave`. Lazy leaves are gathered by the loss. Gathers are in the
    compute dtype.

    Cost: an all_gather of `rest - seen` for each leaf that is not lazy.
    """
    batch_axes = [axis for axes in spec_axes(batch_spec) for axis in axes]

    def one(layout: Layout, x: Any) -> Any:
        x, data_axes = stored_array(x), (*batch_axes, *layout.varies)
        if layout.grad is not None:
            return _handled(layout, x, data_axes, compute, reduce)
        x = cast_floating(x, compute)
        for dim, axes in _beyond(layout.rest, layout.seen):
            x = all_gather(x, axes, dim=dim)
        return vary(cut_padding(x, layout.padding(layout.rest)), data_axes)

    return map_layouts(one, layouts, params)


def _handled(layout: Layout, x: jax.Array, data_axes: tuple[str, ...], compute: Any, reduce: Any) -> Handle:
    """The Handle of a lazy leaf: opening it gathers what is at rest in parts; a whole leaf gets its part beside it."""
    assert layout.grad is not None
    opens, gathers, scatters = all_axes(layout.opens), [], []
    for dim, axes in _beyond(layout.rest, layout.seen):
        if set(axes) & opens:
            gathers.append((dim - x.ndim, tuple(axis for axis in axes if axis in opens)))
        here = tuple(axis for axis in axes if axis not in opens)
        if here:
            x = cut_padding(
                all_gather(x, here, dim=dim), [each for each in layout.padding(layout.rest) if each[0] == dim]
            )
    part = x
    for dim, axes in _beyond(layout.grad, layout.seen):
        here = tuple(axis for axis in axes if axis not in opens)
        if here:
            scatters.append((dim - x.ndim, here))
            part = own_part(part, here, dim=dim)
    if scatters:  # only its gradient is used, and that is a sum
        part = cast_floating(part, reduce)
    whole = vary(x if gathers else cast_floating(x, compute), data_axes) if scatters else None
    sizes = tuple((dim - x.ndim, size) for dim, size in layout.padding(layout.opens))
    return Handle(vary(part, data_axes), whole, tuple(gathers), tuple(scatters), compute, reduce, layout.entry, sizes)


def leave(grads: Any, layouts: Any, divisor: jax.Array, dtype: Any = jnp.float32) -> Any:
    """The gradients in the layout of the update, from this device's partial sums.

    Their type says what is still to be summed: a reduce_scatter where the update is split further than the seen leaf,
    an all_reduce over every other axis over which the gradient still varies. The division comes last, in float32.

    Cost: a reduce_scatter of `update - seen` and one all_reduce of the rest, for each leaf.
    """

    def one(layout: Layout, grad: jax.Array) -> Any:
        splits = _beyond(layout.update, layout.seen if layout.grad is None else layout.grad)
        grad = _scattered(grad, tuple((dim - grad.ndim, axes) for dim, axes in splits), dtype)
        rest = varying_axes(grad) - all_axes(layout.update)
        if rest:
            grad = all_reduce(grad, tuple(sorted(rest)))
        return as_stored(grad.astype(jnp.float32) / divisor, layout.padded, layout.rows)

    return map_layouts(one, layouts, grads)


def to_rest(params: Any, layouts: Any) -> Any:
    """The parameters at rest, from the updated shards, by all_gathers whose results are invariant over the axis.

    Cost: an all_gather of `update - rest` for each leaf.
    """

    def one(layout: Layout, x: Any) -> Any:
        x, still = stored_array(x), layout.padding(layout.rest)
        for dim, axes in _beyond(layout.update, layout.rest):
            x = all_gather(x, axes, dim=dim, replicated=True)
        return as_stored(cut_padding(x, set(layout.padded) - set(still)), still, layout.rows)

    return map_layouts(one, layouts, params)


def _beyond(longer: PartitionSpec, shorter: PartitionSpec) -> Iterable[tuple[int, tuple[str, ...]]]:
    """The dims that `longer` splits further than `shorter`, each with the axes that it adds."""
    known = spec_axes(shorter)
    for dim, axes in enumerate(spec_axes(longer)):
        prefix = known[dim] if dim < len(known) else ()
        shared = tuple(axis for axis in axes if axis in prefix)
        assert axes[: len(shared)] == shared, f"{named(shared)} must come first in {longer}"
        if axes != shared:
            yield dim, axes[len(shared) :]


def _scattered(grad: jax.Array, splits: Splits, dtype: Any) -> jax.Array:
    """A gradient summed in the reduce dtype and split on these dims."""
    # Layer by layer, where a copy of the whole stack in a wider dtype would be the largest array of the step.
    wider = jnp.dtype(dtype).itemsize * grad.size if jnp.dtype(dtype).itemsize > grad.dtype.itemsize else 0
    if splits and wider > grad.shape[0] * LAYER_BYTES and all(dim > -grad.ndim for dim, _ in splits):
        return lax.map(lambda layer: to_parts(layer, splits, dtype), grad)
    return to_parts(grad, splits, dtype)
