"""The collectives of cuts: a part gathered to the whole, a gradient summed and scattered to parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from shardkit._jax.compat import varying_axes
from shardkit._jax.jaxprs import PLAN
from shardkit.collectives import axis_index, axis_size, pad_to_axis
from shardkit.collectives.algorithms import PLAIN, Algorithm
from shardkit.plans.splits import Cut, Cuts
from shardkit.plans.storage import cut_padding


def count_from_end(cuts: Cuts, ndim: int) -> Cuts:
    """Cuts with their dims counted from the end."""
    counted = []
    for cut in cuts:
        automatic = tuple((dim - ndim, axes) for dim, axes in cut.automatic)
        counted.append(cut._replace(dim=cut.dim - ndim, automatic=automatic))
    return tuple(counted)


def in_automatic_parts(
    fn: Callable[[jax.Array], jax.Array], x: jax.Array, split: Mapping[int, tuple[str, ...]]
) -> jax.Array:
    """`fn(x)` on the partitioner's parts of x: the axes by which it splits dims, `split`, are Manual inside.

    Without it the partitioner would gather its parts before each all_gather and reduce_scatter. A census counts the
    bytes of the parts.
    """
    entries = [split.get(dim) for dim in range(x.ndim)]
    spec = PartitionSpec(*entries)
    axes: set[str] = set()
    for dim_axes in split.values():
        axes.update(dim_axes)
    return jax.shard_map(fn, in_specs=spec, out_specs=spec, axis_names=axes)(x)


def _find_automatic_split(cuts: Cuts, ndim: int) -> dict[int, tuple[str, ...]]:
    """The axes by which the partitioner splits an array's dims, if it splits no dim that is cut too."""
    split: dict[int, tuple[str, ...]] = {}
    cut_dims = set()
    for cut in cuts:
        cut_dims.add(cut.dim % ndim)
        for dim, axes in cut.automatic:
            split[dim % ndim] = axes
    if split.keys() & cut_dims:
        return {}
    return split


def _run_in_parts(fn: Callable[..., jax.Array], x: jax.Array, cuts: Cuts, split: Mapping[int, Any]) -> jax.Array:
    """`fn(x, cuts=...)`, the collectives of some cuts, on the partitioner's parts of x.

    Inside, the partitioner splits no dim. The backward pass of an algorithm recomputes everything from its operand:
    values that it computes from the device's index would be residuals, for which jax 0.10 to 0.12 write an invalid
    program in a shard_map inside another.
    """
    cuts_of_parts = []
    plain = True
    for cut in cuts:
        cuts_of_parts.append(cut._replace(automatic=()))
        plain = plain and cut.gather_by == PLAIN and cut.reduce_by == PLAIN
    fn = partial(fn, cuts=tuple(cuts_of_parts))
    if not plain:
        fn = jax.checkpoint(fn, policy=jax.checkpoint_policies.nothing_saveable, prevent_cse=False)
    return in_automatic_parts(fn, x, split)


def check_shape(algorithm: Algorithm, kernel: str, result: Any, shape: tuple[int, ...]) -> Any:
    """The result of an algorithm's kernel, after a check: an array of another shape would be broadcast later."""
    if jnp.shape(result) != shape:
        raise ValueError(
            f"{algorithm}: the result of {kernel} must have shape {shape}; got {jnp.shape(result)}. Return the shape "
            f"of sk.{kernel}, and the operand's shape for the feedback."
        )
    return result


def find_part_shape(x: jax.Array, axes: tuple[str, ...], dim: int) -> tuple[int, ...]:
    """The shape of a device's part along a dim, padded where it does not divide."""
    return _replace_size(x.shape, dim, -(-x.shape[dim] // axis_size(axes)))


def find_whole_shape(part: jax.Array, axes: tuple[str, ...], dim: int) -> tuple[int, ...]:
    """The shape of an array that is gathered along a dim, padding included."""
    return _replace_size(part.shape, dim, part.shape[dim] * axis_size(axes))


def _replace_size(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return *shape[:dim], size, *shape[dim + 1 :]


def gather_cuts(
    x: jax.Array, cuts: Cuts, sizes: Iterable[tuple[int, int]] = (), *, replicated: bool = False
) -> jax.Array:
    """An array gathered over these cuts, the last first, and cut to its original sizes."""
    automatic_split = _find_automatic_split(cuts, x.ndim)
    if automatic_split:
        x = _run_in_parts(partial(gather_cuts, replicated=replicated), x, cuts, automatic_split)
        return cut_padding(x, sizes)
    # Cuts are undone in the opposite order: the last one cut the parts of those before it, so that its parts are
    # neighbors in the whole. Gathered the other way round, the rows of a dim that two strategies split come back
    # shuffled.
    #
    # Worked example: 8 rows cut over "model" of 2, then over "fsdp" of 2. Device (model 1, fsdp 0) has rows 4 and 5.
    # Gathered over "fsdp" it has 4, 5, 6, 7; then over "model" 0 to 7. Over "model" first it would have 0, 1, 4, 5.
    with jax.named_scope(PLAN):
        for cut in reversed(cuts):
            assert cut.gather_by.all_gather
            dim = cut.dim % x.ndim
            shape = find_whole_shape(x, cut.axes, dim)
            x = cut.gather_by.all_gather(x, cut.axes, dim=dim, replicated=replicated)
            x = check_shape(cut.gather_by, "all_gather", x, shape)
    return cut_padding(x, sizes)


def scatter_cuts(grad: jax.Array, cuts: Cuts, dtype: Any) -> jax.Array:
    """A gradient summed and scattered cut by cut in a dtype, first padded where a dim does not divide.

    Over an axis over which it does not vary, the gradient is complete, and the device takes its part.
    """
    grad = grad.astype(dtype)
    automatic_split = _find_automatic_split(cuts, grad.ndim)
    if automatic_split:
        return _run_in_parts(partial(scatter_cuts, dtype=dtype), grad, cuts, automatic_split)
    # The first cut scatters first, so that later ones send parts of parts: n times less. A reduce_scatter over an axis
    # over which the gradient is complete already, because the loss summed it there, would multiply it by the devices of
    # that axis; the type of the gradient tells, and the device takes its part of the sum instead.
    with jax.named_scope(PLAN):
        for dim in {cut.dim for cut in cuts}:
            grad = pad_to_axis(grad, list_axes_along(cuts, dim), dim=dim)
        for cut in cuts:
            grad = _scatter_cut(grad, cut)
    return grad


def _scatter_cut(grad: jax.Array, cut: Cut) -> jax.Array:
    """This device's part along one cut: of the sum over its axes, or of a gradient that is complete over them."""
    dim = cut.dim % grad.ndim
    if varying_axes(grad) >= set(cut.axes):
        axes_by_step = [cut.axes]  # a partial sum over all axes: one reduce_scatter
    else:
        # Complete over some axes and partial over others: one axis after the other.
        axes_by_step = [(axis,) for axis in cut.axes]
    for axes in axes_by_step:
        shape = find_part_shape(grad, axes, dim)
        if varying_axes(grad) >= set(axes):
            assert cut.reduce_by.reduce_scatter
            grad = cut.reduce_by.reduce_scatter(grad, axes, dim=dim)
        else:
            grad = take_part(grad, axes, dim=dim)
        grad = check_shape(cut.reduce_by, "reduce_scatter", grad, shape)
    return grad


def list_axes_along(cuts: Cuts, dim: int) -> tuple[str, ...]:
    """The axes of all cuts of a dim."""
    axes: tuple[str, ...] = ()
    for cut in cuts:
        if cut.dim == dim:
            axes += cut.axes
    return axes


def take_part(x: jax.Array, axes: tuple[str, ...], *, dim: int) -> jax.Array:
    """This device's part of an array that all devices have, padded where the dim does not divide."""
    x = pad_to_axis(x, axes, dim=dim)
    size = x.shape[dim] // axis_size(axes)
    return lax.dynamic_slice_in_dim(x, axis_index(axes) * size, size, dim)
