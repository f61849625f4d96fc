"""The one way in and out of a step, for every plan: from the leaves at rest to what the loss sees, and back.

`enter`, `leave` and `to_rest` read nothing but the layouts of a plan, and run inside shard_map.
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
from shardkit.partitioning.handles import Handle, Splits, cast, own_part, to_parts
from shardkit.partitioning.plan import Layout, map_layouts
from shardkit.partitioning.storage import array_of, cut, wrapped

LAYER_BYTES = 2**20  # a smaller message costs more than the memory that it saves


def enter(
    params: Any, layouts: Any, batch_axes: tuple[str, ...], compute: Any = jnp.float32, reduce: Any = jnp.float32
) -> Any:
    """From the leaves at rest to what the GradFn sees, inside shard_map: casts, gathers, then marks as varying.

    Every leaf is marked as varying over the batch's axes, and over those where its strategies say that the data differ,
    so that gradients stay local sums until `leave`. A leaf with a handle is gathered when the handle is opened; gathers
    are in the compute dtype.

    Cost: an all_gather of `rest - seen` for each leaf without a handle.
    """

    def one(layout: Layout, x: Any) -> Any:
        x, data_axes = array_of(x), (*batch_axes, *layout.varies)
        if layout.grad is not None:
            return _handled(layout, x, data_axes, compute, reduce)
        x = cast(x, compute)
        for dim, axes in _beyond(layout.rest, layout.seen):
            x = all_gather(x, axes, dim=dim)
        return vary(cut(x, layout.padding(layout.rest)), data_axes)

    return map_layouts(one, layouts, params)


def _handled(layout: Layout, x: jax.Array, data_axes: tuple[str, ...], compute: Any, reduce: Any) -> Handle:
    """A leaf behind its handle: what is held in parts is gathered by opening it, what is whole is given its part."""
    assert layout.grad is not None
    opens, gathers, scatters = all_axes(layout.opens), [], []
    for dim, axes in _beyond(layout.rest, layout.seen):
        if set(axes) & opens:
            gathers.append((dim - x.ndim, tuple(axis for axis in axes if axis in opens)))
        here = tuple(axis for axis in axes if axis not in opens)
        if here:
            x = cut(all_gather(x, here, dim=dim), [each for each in layout.padding(layout.rest) if each[0] == dim])
    part = x
    for dim, axes in _beyond(layout.grad, layout.seen):
        here = tuple(axis for axis in axes if axis not in opens)
        if here:
            scatters.append((dim - x.ndim, here))
            part = own_part(part, here, dim=dim)
    if scatters:  # its value is never used, and its gradient is a sum
        part = cast(part, reduce)
    whole = vary(x if gathers else cast(x, compute), data_axes) if scatters else None
    sizes = tuple((dim - x.ndim, size) for dim, size in layout.padding(layout.opens))
    return Handle(vary(part, data_axes), whole, tuple(gathers), tuple(scatters), compute, reduce, layout.entry, sizes)


def leave(grads: Any, layouts: Any, divisor: jax.Array, dtype: Any = jnp.float32) -> Any:
    """From this device's partial sums to the layout of the update, inside shard_map.

    The type says what is still to be summed: a reduce_scatter where the update is split further than what was seen, an
    all_reduce over every other axis over which the gradient still varies. The division comes last, in float32.

    Cost: a reduce_scatter of `update - seen` and one all_reduce of the rest, for each leaf.
    """

    def one(layout: Layout, grad: jax.Array) -> Any:
        splits = _beyond(layout.update, layout.seen if layout.grad is None else layout.grad)
        grad = _scattered(grad, tuple((dim - grad.ndim, axes) for dim, axes in splits), dtype)
        rest = varying_axes(grad) - all_axes(layout.update)
        if rest:
            grad = all_reduce(grad, tuple(sorted(rest)))
        return wrapped(grad.astype(jnp.float32) / divisor, layout.padded, layout.rows)

    return map_layouts(one, layouts, grads)


def to_rest(params: Any, layouts: Any) -> Any:
    """From updated shards to the leaves at rest, inside shard_map, by all_gathers typed as equal.

    Cost: an all_gather of `update - rest` for each leaf.
    """

    def one(layout: Layout, x: Any) -> Any:
        x, still = array_of(x), layout.padding(layout.rest)
        for dim, axes in _beyond(layout.update, layout.rest):
            x = all_gather(x, axes, dim=dim, replicated=True)
        return wrapped(cut(x, set(layout.padded) - set(still)), still, layout.rows)

    return map_layouts(one, layouts, params)


def _beyond(longer: PartitionSpec, shorter: PartitionSpec) -> Iterable[tuple[int, tuple[str, ...]]]:
    """The dims on which `longer` splits further than `shorter`, with the axes it adds there."""
    known = spec_axes(shorter)
    for dim, axes in enumerate(spec_axes(longer)):
        prefix = known[dim] if dim < len(known) else ()
        shared = tuple(axis for axis in axes if axis in prefix)
        assert axes[: len(shared)] == shared, f"{named(shared)} must come first in {longer}"
        if axes != shared:
            yield dim, axes[len(shared) :]


def _scattered(grad: jax.Array, splits: Splits, dtype: Any) -> jax.Array:
    """A gradient in the reduce dtype, split on these dims."""
    # A wider copy of a whole stack's gradient would be the largest array of the step: one layer at a time.
    wider = jnp.dtype(dtype).itemsize * grad.size if jnp.dtype(dtype).itemsize > grad.dtype.itemsize else 0
    if splits and wider > grad.shape[0] * LAYER_BYTES and all(dim > -grad.ndim for dim, _ in splits):
        return lax.map(lambda layer: to_parts(layer, splits, dtype), grad)
    return to_parts(grad, splits, dtype)
