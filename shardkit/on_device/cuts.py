"""The collectives of cuts: a part gathered to the whole, a gradient summed and scattered to parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from shardkit._jax.compat import varying_axes
from shardkit._jax.jaxprs import PLAN
from shardkit.collectives import axis_index, axis_size, pad_to_axis
from shardkit.collectives.algorithms import PLAIN, Algorithm
from shardkit.plans.splits import Cuts
from shardkit.plans.storage import cut_padding


def from_end(cuts: Cuts, ndim: int) -> Cuts:
    """Cuts with their dims counted from the end."""
    found = []
    for cut in cuts:
        automatic = tuple((dim - ndim, axes) for dim, axes in cut.automatic)
        found.append(cut._replace(dim=cut.dim - ndim, automatic=automatic))
    return tuple(found)


def in_parts(fn: Callable[[jax.Array], jax.Array], x: jax.Array, split: Mapping[int, tuple[str, ...]]) -> jax.Array:
    """`fn(x)` where the axes that `split` dims of x for the partitioner are Manual too.

    The partitioner would gather what it has split before each all_gather and reduce_scatter. A census sees the parts.
    """
    spec = PartitionSpec(*(split.get(dim) for dim in range(x.ndim)))
    axes = {axis for names in split.values() for axis in names}
    return jax.shard_map(fn, in_specs=spec, out_specs=spec, axis_names=axes)(x)


def _cut_in_parts(cuts: Cuts, fn: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """`fn(x)`, the collectives of some cuts, in the parts of the partitioner where no dim is split by both.

    An algorithm is differentiated with nothing but its operand kept: what it computes from the device's index would be
    a residual, for which jax 0.10 to 0.12 write an invalid program in a shard_map inside another.
    """
    split = {dim % x.ndim: axes for cut in cuts for dim, axes in cut.automatic}
    fn = jax.named_scope(PLAN)(fn)
    if not split or split.keys() & {cut.dim % x.ndim for cut in cuts}:
        return fn(x)
    plain = all((cut.gather_by, cut.reduce_by) == (PLAIN, PLAIN) for cut in cuts)
    nothing = jax.checkpoint_policies.nothing_saveable
    return in_parts(fn if plain else jax.checkpoint(fn, policy=nothing, prevent_cse=False), x, split)


def check_shape(algorithm: Algorithm, kernel: str, got: Any, wanted: tuple[int, ...]) -> Any:
    """What a kernel of an algorithm returned, after a check: an array of another shape would be broadcast later."""
    if jnp.shape(got) != wanted:
        raise ValueError(
            f"{algorithm}: the result of {kernel} must have shape {wanted}; got {jnp.shape(got)}. Return the shape of "
            f"sk.{kernel}, and that of the operand for what feedback leaves out."
        )
    return got


def part_shape(x: jax.Array, axes: tuple[str, ...], dim: int) -> tuple[int, ...]:
    """The shape of a device's part along a dim, padded where it does not divide."""
    return *x.shape[:dim], -(-x.shape[dim] // axis_size(axes)), *x.shape[dim + 1 :]


def whole(x: jax.Array, cuts: Cuts, sizes: Iterable[tuple[int, int]], *, replicated: bool = False) -> jax.Array:
    """An array gathered over these cuts, the last first, and cut to its original sizes."""

    # Cuts are undone in the opposite order: the last one cut the parts of those before it, so that its parts are
    # neighbors in the whole. Gathered the other way round, the rows of a dim that two strategies split come back
    # shuffled.
    def gather(x: jax.Array) -> jax.Array:
        for cut in reversed(cuts):
            assert cut.gather_by.all_gather
            dim = cut.dim % x.ndim
            wanted = *x.shape[:dim], x.shape[dim] * axis_size(cut.axes), *x.shape[dim + 1 :]
            found = cut.gather_by.all_gather(x, cut.axes, dim=dim, replicated=replicated)
            x = check_shape(cut.gather_by, "all_gather", found, wanted)
        return x

    return cut_padding(_cut_in_parts(cuts, gather, x), sizes)


def to_parts(grad: jax.Array, cuts: Cuts, dtype: Any) -> jax.Array:
    """A gradient summed and scattered cut by cut in a dtype, first padded where a dim does not divide.

    Over an axis over which it does not vary, the gradient is complete, and the device takes its part.
    """

    # The first cut scatters first, so that later ones send parts of parts: n times less. A reduce_scatter over an axis
    # over which the gradient is complete already, because the loss summed it there, would multiply it by the devices of
    # that axis; the type of the gradient tells, and the device takes its part of the sum instead.
    def scatter(grad: jax.Array) -> jax.Array:
        for dim in {cut.dim for cut in cuts}:
            grad = pad_to_axis(grad, tuple(axis for cut in cuts if cut.dim == dim for axis in cut.axes), dim=dim)
        for cut in cuts:
            for axes in [cut.axes] if varying_axes(grad) >= set(cut.axes) else [(axis,) for axis in cut.axes]:
                split = cut.reduce_by.reduce_scatter if varying_axes(grad) >= set(axes) else own_part
                assert split
                dim = grad.ndim + cut.dim
                found, wanted = split(grad, axes, dim=dim), part_shape(grad, axes, dim)
                grad = check_shape(cut.reduce_by, "reduce_scatter", found, wanted)
        return grad

    return _cut_in_parts(cuts, scatter, grad.astype(dtype))


def own_part(x: jax.Array, axes: tuple[str, ...], *, dim: int) -> jax.Array:
    """This device's part of an array that all devices have, padded where the dim does not divide."""
    x = pad_to_axis(x, axes, dim=dim)
    size = x.shape[dim] // axis_size(axes)
    return lax.dynamic_slice_in_dim(x, axis_index(axes) * size, size, dim)
