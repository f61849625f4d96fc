"""Error feedback: what compressed reductions of a gradient leave out, and the next step adds.

A leaf has one residual on each device, of the shape that the gradient has where its first reduction with feedback gets
it. What later reductions of the leaf leave out is added where their operand was cut from.

Source: Seide et al., 1-Bit Stochastic Gradient Descent (2014); Karimireddy et al., Error Feedback Fixes SignSGD (2019).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardkit._arguments.checks import quoted
from shardkit._jax.compat import varying_axes
from shardkit.collectives import all_reduce, axis_index, axis_size, pad_to_axis, vary
from shardkit.collectives.algorithms import Algorithm
from shardkit.meshes.layout import path_name
from shardkit.on_device.cuts import check_shape, from_end, part_shape, to_parts
from shardkit.on_device.residuals import first_cut
from shardkit.plans.placement import Cut, Layout
from shardkit.plans.storage import is_padded, stored_array


class Reduced(NamedTuple):
    """A gradient on its way through its reductions.

    Attributes:
        grad: what is not reduced yet, this device's.
        path: the leaf.
        residual: in units of `grad` what the gradient still lacks; after `begun` what its reductions have left out.
            None without feedback.
        back: places what a later reduction leaves out in an array like `residual`; None before `begun`.
    """

    grad: jax.Array
    path: str
    residual: jax.Array | None = None
    back: Callable[[jax.Array], jax.Array] | None = None


def with_residuals(grads: Any, residuals: Any, divisor: jax.Array) -> list[Reduced]:
    """The leaves of the gradients, each with its residual times the divisor."""
    structure: Any
    leaves, structure = jax.tree_util.tree_flatten_with_path(grads)
    held = [None] * len(leaves) if residuals is None else structure.flatten_up_to(residuals)
    missing = [None if r is None else stored_array(r)[0] * divisor for r in held]
    return [Reduced(grad, path_name(path), r) for (path, grad), r in zip(leaves, missing, strict=True)]


def begun(each: Reduced) -> Reduced:
    """The gradient with its residual added, in float32, and nothing left out yet."""
    if each.residual is None or each.back:
        return each
    here, wanted = varying_axes(each.grad), varying_axes(each.residual)
    if wanted - here:
        raise _summed_before(each, wanted - here)
    grad = each.grad.astype(jnp.float32)
    if here - wanted:  # axes that are in no layout, such as that of a pipeline's stages
        grad = all_reduce(grad, tuple(sorted(here - wanted)))
    return each._replace(grad=grad + each.residual, residual=jnp.zeros_like(each.residual), back=lambda left: left)


def _summed_before(each: Reduced, axes: Iterable[str]) -> ValueError:
    return ValueError(
        "step: with error feedback a GradFn must return gradients that are not summed yet; that of leaf "
        f"{each.path} is summed over {quoted(sorted(axes))}. Return local sums, as value_and_grad does, or leave out "
        "feedback=True."
    )


def scattered(each: Reduced, layout: Layout, dtype: Any) -> Reduced:
    """A gradient that has a residual, summed and split once per step; in a dtype where there is no feedback."""
    cuts, first = layout.cuts(scatter=("step",)), first_cut(layout)
    each = each._replace(grad=to_parts(each.grad, from_end(cuts[:first], each.grad.ndim), dtype))
    if first == len(cuts):
        return each
    each = begun(each)
    for dim in {cut.dim for cut in cuts[first:]}:
        wider = pad_to_axis(each.grad, tuple(a for cut in cuts[first:] if cut.dim == dim for a in cut.axes), dim=dim)
        each = _after(each, wider, partial(lax.slice_in_dim, start_index=0, limit_index=each.grad.shape[dim], axis=dim))
    for cut in cuts[first:]:
        each = _cut(each, cut, dtype)
    return each


def _cut(each: Reduced, cut: Cut, dtype: Any) -> Reduced:
    """One cut after `begun`, which remembers from where the part is."""
    axes = tuple(axis for axis in cut.axes if axis_size(axis) > 1)
    if set(axes) - varying_axes(each.grad):
        raise _summed_before(each, set(axes) - varying_axes(each.grad))
    assert cut.reduce_by.reduce_scatter
    # What the algorithm leaves out is this device's own, of the operand before the sum: it is kept where it was cut
    # from, and added before the next step's reduction. Added after it, every device of the sum would add it again.
    left = None
    if cut.reduce_by.feedback:
        part, left = cut.reduce_by.reduce_scatter(each.grad.astype(jnp.float32), axes, dim=cut.dim)
        check_shape(cut.reduce_by, "reduce_scatter", left, each.grad.shape)
    else:
        part = cut.reduce_by.reduce_scatter(each.grad.astype(dtype), axes, dim=cut.dim)
    check_shape(cut.reduce_by, "reduce_scatter", part, part_shape(each.grad, axes, cut.dim))
    return _after(_leaving_out(each, left), part, partial(_in_whole, axes=axes, dim=cut.dim))


def summed(algorithm: Algorithm, several: Sequence[Reduced], axes: tuple[str, ...], dtype: Any) -> list[Reduced]:
    """Gradients summed over some axes by an algorithm, in a dtype where it has no feedback."""
    assert algorithm.all_reduce
    if algorithm.feedback:
        several = [begun(each) for each in several]
        sums, lefts = algorithm.all_reduce([each.grad.astype(jnp.float32) for each in several], axes)
        for each, left in zip(several, lefts, strict=True):
            check_shape(algorithm, "all_reduce", left, each.grad.shape)
        several = [_leaving_out(each, left) for each, left in zip(several, lefts, strict=True)]
    else:
        sums = algorithm.all_reduce([each.grad.astype(dtype) for each in several], axes)
    for each, grad in zip(several, sums, strict=True):
        check_shape(algorithm, "all_reduce", grad, each.grad.shape)
    return [_after(each, grad, partial(_on_first, axes=axes)) for each, grad in zip(several, sums, strict=True)]


def residuals_after(residuals: Any, several: Sequence[Reduced], divisor: jax.Array) -> Any:
    """The new residuals, stored as the old ones."""
    left = iter([each.residual / divisor for each in several if each.residual is not None])

    def one(old: Any) -> Any:
        new = next(left)[None]
        return dataclasses.replace(old, array=new) if is_padded(old) else new

    return jax.tree.map(one, residuals, is_leaf=is_padded)


def _leaving_out(each: Reduced, left: jax.Array | None) -> Reduced:
    if left is None:
        return each
    assert each.back and each.residual is not None
    return each._replace(residual=each.residual + each.back(left))


def _after(each: Reduced, grad: jax.Array, inverse: Callable[[jax.Array], jax.Array]) -> Reduced:
    """The next form of a gradient; `inverse` places what is left out of it in the form before."""
    back = each.back
    return each._replace(grad=grad, back=back and (lambda left: back(inverse(left))))


def _on_first(left: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """What is left out of a sum that all devices of some axes have, which one of them keeps."""
    return jnp.where(axis_index(axes) == 0, left, jnp.zeros_like(left))


def _in_whole(part: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """Zeros with this device's part."""
    size = part.shape[dim]
    zeros = jnp.zeros((*part.shape[:dim], size * axis_size(axes), *part.shape[dim + 1 :]), part.dtype)
    at = axis_index(axes) * size
    whole = vary(zeros, tuple(sorted(varying_axes(part) | set(axes))))
    return lax.dynamic_update_slice_in_dim(whole, part, at, dim)
