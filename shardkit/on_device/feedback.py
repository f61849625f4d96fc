"""Error feedback: the next step adds what the compressed reductions of a gradient left out.

Each device has one residual for a leaf. It has the shape of the gradient before the leaf's first reduction with
feedback. A later reduction gets only a part of this gradient: what it leaves out is added to the residual at the rows
of the part. Over an axis of one device nothing is reduced: the residual is added once, and then stays zero.
`residuals.py` says how a state holds residuals.

Worked example: a gradient of 8 rows is scattered over "fsdp" of 4 devices, then summed over "data" of 2, both in int8.
The residual has the 8 rows of the device's own sum, and is added first. The scatter leaves out r1, also of 8 rows. The
sum over "data" leaves out r2 of its 2 rows, the same on both of its devices: the first of them keeps it, at the 2 of 8
rows that it has of the gradient. The next step adds r1 + r2.

Source: Seide et al., 1-Bit Stochastic Gradient Descent (2014); Karimireddy et al., Error Feedback Fixes SignSGD (2019).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardkit._arguments.checks import quote
from shardkit._jax.compat import varying_axes
from shardkit.collectives import all_reduce, axis_index, axis_size, pad_to_axis, vary
from shardkit.collectives.algorithms import Algorithm
from shardkit.meshes.layout import path_name
from shardkit.on_device.cuts import check_shape, find_part_shape, find_whole_shape, list_axes_along, scatter_cuts
from shardkit.plans.splits import Cut, LeafLayout
from shardkit.plans.storage import is_padded, stored_array


class PartialGradient(NamedTuple):
    """A gradient between two of its reductions."""

    grad: jax.Array  # this device's partial sum, after the reductions so far
    path: str  # the leaf's path, for errors
    # What the step before left out, in the unit of `grad`, until it is added; None after that, and without feedback.
    to_add: jax.Array | None = None
    # What the reductions of this step have left out so far; None before `to_add` is added.
    left_out: jax.Array | None = None
    # From an array like `grad` to one like `left_out`: zeros with that array at its rows. None where `left_out` is.
    to_residual: Callable[[jax.Array], jax.Array] | None = None


def attach_residuals(grads: Any, residuals: Any, divisor: jax.Array) -> list[PartialGradient]:
    """The leaves of the gradients, each with its residual times the divisor."""
    structure: Any
    leaves, structure = jax.tree_util.tree_flatten_with_path(grads)
    stored = [None] * len(leaves)
    if residuals is not None:
        stored = structure.flatten_up_to(residuals)
    gradients = []
    for (path, grad), residual in zip(leaves, stored, strict=True):
        if residual is not None:
            # In the state `[R, ...]`, here the one row of this device. It has the unit of the final gradient, and the
            # gradient to which it is added is not divided yet.
            residual = stored_array(residual)[0] * divisor
        gradients.append(PartialGradient(grad, path_name(path), residual))
    return gradients


def add_residual(gradient: PartialGradient) -> PartialGradient:
    """The gradient with its residual added, in float32, and nothing left out yet."""
    if gradient.to_add is None:
        return gradient
    grad_axes = varying_axes(gradient.grad)
    residual_axes = varying_axes(gradient.to_add)
    _refuse_sums(gradient, residual_axes - grad_axes)
    grad = gradient.grad.astype(jnp.float32)
    # Axes that are in no layout, such as the axis of a pipeline's stages. The residual is the same along them: summed
    # after it is added, it would count once for each device. So the gradient is summed over them first.
    further_axes = tuple(sorted(grad_axes - residual_axes))
    if further_axes:
        grad = all_reduce(grad, further_axes)
    return gradient._replace(
        grad=grad + gradient.to_add,
        to_add=None,  # it is added once
        left_out=jnp.zeros_like(gradient.to_add),
        to_residual=lambda left_out: left_out,
    )


def _refuse_sums(gradient: PartialGradient, axes: Collection[str]) -> None:
    """Refuses a gradient that the GradFn has summed over some axes."""
    if not axes:
        return
    raise ValueError(
        "step: with error feedback a GradFn must return gradients that are not summed yet; the gradient of leaf "
        f"{gradient.path} is summed over {quote(sorted(axes))}. Return local sums, as value_and_grad does, or leave "
        "out feedback=True."
    )


def scatter_with_feedback(gradient: PartialGradient, layout: LeafLayout, dtype: Any) -> PartialGradient:
    """A gradient with a residual, summed and split once per step. Reductions without feedback sum in `dtype`."""
    cuts = layout.cuts(scatter=("step",))
    first = find_first_cut(layout)
    cuts_before = cuts[:first]
    cuts_after = cuts[first:]
    gradient = gradient._replace(grad=scatter_cuts(gradient.grad, cuts_before, dtype))
    if not cuts_after:
        return gradient
    gradient = add_residual(gradient)
    for dim in {cut.dim for cut in cuts_after}:
        rows = gradient.grad.shape[dim]
        padded_grad = pad_to_axis(gradient.grad, list_axes_along(cuts_after, dim), dim=dim)
        take_rows = partial(lax.slice_in_dim, start_index=0, limit_index=rows, axis=dim)
        gradient = _advance(gradient, padded_grad, take_rows)
    for cut in cuts_after:
        gradient = _scatter_cut(gradient, cut, dtype)
    return gradient


def _scatter_cut(gradient: PartialGradient, cut: Cut, dtype: Any) -> PartialGradient:
    """Scatters the gradient along one cut, after `add_residual`, and extends `to_residual` by the rows of the part."""
    axes = tuple(axis for axis in cut.axes if axis_size(axis) > 1)
    _refuse_sums(gradient, set(axes) - varying_axes(gradient.grad))
    algorithm = cut.reduce_by
    assert algorithm.reduce_scatter
    # What the algorithm leaves out belongs to this device's operand, before the sum, so the next step adds it before
    # its sum. Added after the sum, every device would add it again.
    shape = gradient.grad.shape
    shape_of_part = find_part_shape(gradient.grad, axes, cut.dim)
    if algorithm.feedback:
        part, left_out = algorithm.reduce_scatter(gradient.grad.astype(jnp.float32), axes, dim=cut.dim)
        check_shape(algorithm, "reduce_scatter", left_out, shape)
        gradient = _add_left_out(gradient, left_out)
    else:
        part = algorithm.reduce_scatter(gradient.grad.astype(dtype), axes, dim=cut.dim)
    check_shape(algorithm, "reduce_scatter", part, shape_of_part)
    return _advance(gradient, part, partial(_place_in_whole, axes=axes, dim=cut.dim))


def sum_by_algorithm(
    algorithm: Algorithm, gradients: Sequence[PartialGradient], axes: tuple[str, ...], dtype: Any
) -> list[PartialGradient]:
    """Gradients summed over some axes by an algorithm: in float32 if it has feedback, else in `dtype`."""
    assert algorithm.all_reduce
    if algorithm.feedback:
        dtype = jnp.float32
        gradients = [add_residual(gradient) for gradient in gradients]
    operands = [gradient.grad.astype(dtype) for gradient in gradients]
    results = algorithm.all_reduce(operands, axes)
    sums = results
    left_out = [None] * len(operands)
    if algorithm.feedback:
        sums, left_out = results
    keep_on_first_device = partial(_keep_on_first_device, axes=axes)
    reduced = []
    for gradient, total, remainder in zip(gradients, sums, left_out, strict=True):
        if remainder is not None:
            # What this device's operand leaves out is added to its next one, before the sum: see `_scatter_cut`.
            check_shape(algorithm, "all_reduce", remainder, gradient.grad.shape)
            gradient = _add_left_out(gradient, remainder)
        check_shape(algorithm, "all_reduce", total, gradient.grad.shape)
        reduced.append(_advance(gradient, total, keep_on_first_device))
    return reduced


def collect_residuals(residuals: Any, gradients: Sequence[PartialGradient], divisor: jax.Array) -> Any:
    """The new residuals, stored as the old ones."""
    # Back in the unit of the final gradient: the weight of the next batch, or its loss scale, may be another.
    new_residuals = []
    for gradient in gradients:
        if gradient.left_out is not None:
            new_residuals.append(gradient.left_out / divisor)
    remaining = iter(new_residuals)

    def replace_residual(old: Any) -> Any:
        new = next(remaining)[None]
        if is_padded(old):
            return dataclasses.replace(old, array=new)
        return new

    return jax.tree.map(replace_residual, residuals, is_leaf=is_padded)


def _add_left_out(gradient: PartialGradient, left_out: jax.Array) -> PartialGradient:
    """The gradient with what one more reduction left out of it."""
    assert gradient.to_residual is not None
    assert gradient.left_out is not None
    return gradient._replace(left_out=gradient.left_out + gradient.to_residual(left_out))


def _advance(gradient: PartialGradient, grad: jax.Array, inverse: Callable[[jax.Array], jax.Array]) -> PartialGradient:
    """The gradient with a new `grad`; `inverse` takes an array like the new one to an array like the old one.

    Worked example: after a scatter of 8 rows into parts of 2, `inverse` puts the 2 rows into 8 rows of zeros. After a
    further scatter, `to_residual` applies both inverses, the later one first.
    """
    before = gradient.to_residual
    if before is None:
        return gradient._replace(grad=grad)
    return gradient._replace(grad=grad, to_residual=lambda left_out: before(inverse(left_out)))


def _keep_on_first_device(left_out: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """What a sum leaves out, on the first of the devices that have the sum; zeros on the others.

    All of them have the same array: in every residual, it would be added as often as there are devices.
    """
    return jnp.where(axis_index(axes) == 0, left_out, jnp.zeros_like(left_out))


def _place_in_whole(part: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """An array of the shape before a scatter: zeros, with this device's part at its rows."""
    zeros = jnp.zeros(find_whole_shape(part, axes, dim), part.dtype)
    first_row = axis_index(axes) * part.shape[dim]
    result_axes = varying_axes(part) | set(axes)
    zeros = vary(zeros, tuple(sorted(result_axes)))
    return lax.dynamic_update_slice_in_dim(zeros, part, first_row, dim)


def find_first_cut(layout: LeafLayout) -> int:
    """How many cuts come before the residual is added: as a rule, all cuts before the first with feedback.

    A dim is padded for all its cuts at once, so the residual is also added before the first cut of a padded dim.
    """
    cuts = layout.cuts(scatter=("step",))
    padded_dims = {dim for dim, _ in layout.padded}
    first = len(cuts)
    for number, cut in enumerate(cuts):
        if cut.reduce_by.feedback:
            first = number
            break
    # Worked example: cuts of dims 0, 1, 0, of which the last has feedback, and dim 0 is padded. The residual is added
    # before all three. Before the last cut would be too late: the gradient has its padding for both cuts of dim 0 then,
    # and the residual has none.
    while True:
        padded_after = padded_dims.intersection(cut.dim for cut in cuts[first:])
        earlier = [number for number in range(first) if cuts[number].dim in padded_after]
        if not earlier:
            return first
        first = earlier[0]
