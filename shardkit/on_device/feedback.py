"""Error feedback: what compressed reductions of a gradient leave out, and the next step adds.

A leaf has one residual on each device, of the shape that the gradient has where its first reduction with feedback gets
it. What later reductions of the leaf leave out is added where their operand was cut from. In a state a residual is
`[R, ...]` of the leaf's shape, with a row for each of the R devices whose gradients are still to be summed there. Only
the sum of the rows matters, so a checkpoint can be restored on any number of devices. Residuals are in units of the
gradient after it is divided by its weight and the loss scale, which change from step to step. An axis of one device
reduces nothing: there the residual is added once, and then stays zero.

Source: Seide et al., 1-Bit Stochastic Gradient Descent (2014); Karimireddy et al., Error Feedback Fixes SignSGD (2019).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit._arguments.checks import mesh_in_context, quoted
from shardkit._arguments.typed import Arrays, typed
from shardkit._jax.compat import varying_axes
from shardkit.collectives import all_reduce, axis_index, axis_size, pad_to_axis, vary
from shardkit.collectives.algorithms import Algorithm
from shardkit.meshes.layout import all_axes, by_path, canonical, path_name, spec_axes
from shardkit.on_device.cuts import check_shape, from_end, part_shape, to_parts
from shardkit.plans.plan import Placement, Plan
from shardkit.plans.splits import Cut, LeafLayout, map_layouts
from shardkit.plans.storage import Storage, is_padded, padded_shape, padding, stored_array, wrap_stored


class Reduced(NamedTuple):
    """A gradient on its way through its reductions."""

    grad: jax.Array  # what is not reduced yet, this device's
    path: str  # the leaf
    # in units of `grad` what the gradient still lacks; after `begun` what its reductions have left out. None without
    # feedback.
    residual: jax.Array | None = None
    # places what a later reduction leaves out in an array like `residual`; None before `begun`
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


def scattered(each: Reduced, layout: LeafLayout, dtype: Any) -> Reduced:
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
    # What the algorithm leaves out is of this device's operand before the sum, and is added before the next step's sum:
    # added after it, every device would add it again.
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


@typed
def init_residuals(params: Arrays, *, mesh: Mesh | None = None, plan: Plan) -> Any:
    """The residuals of a new TrainState: zeros for each leaf that the plan reduces with error feedback.

    `init` makes them; pass them to a state from before feedback: `state._replace(residuals=init_residuals(...))`.

    Layout: `residual[R_a, ...]`, float32, with a row for each device over which the gradient is summed
    Args:
        params: the parameters, a pytree of arrays or of their shapes.
        mesh: the mesh; by default that of `jax.set_mesh`.
        plan: the plan.

    Returns:
        The pytree of the parameters, with None for leaves without feedback; None for a plan without feedback.

    Raises:
        ValueError: as `plan.layouts`; a leaf that is not reduced once per step.

    Cost: nothing is sent. A device holds a float32 for each element of its gradients before they are reduced.

    Example:
        >>> plan = sk.dp("data", reduce=sk.algorithms.compressed(jnp.int8, feedback=True))
        >>> residuals = sk.init_residuals({"w": jnp.ones(3)}, mesh=mesh, plan=plan)
        >>> residuals["w"].shape, residuals["w"].sharding.spec
        ((2, 3), P('data',))
    """
    mesh = mesh_in_context("init_residuals", mesh)
    plan.check(mesh)
    return first_residuals(params, plan.placement(params, mesh))


def first_residuals(params: Any, placement: Placement) -> Any:
    """The residuals of a new state, zeros; None without feedback."""
    shapes = residual_shapes(params, placement)
    if shapes is None:
        return None

    def zeros() -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    return jax.jit(zeros, out_shardings=jax.tree.map(lambda x: x.sharding, shapes))()


def residual_shapes(params: Any, placement: Placement) -> Any:
    """The residuals of a plan as shapes, dtypes and layouts, each as it is stored; None without feedback."""
    if not any(s.reduce.feedback for s in placement.plan.strategies):
        return None
    mesh, batch_axes = placement.mesh, all_axes(placement.batch)

    def one(layout: LeafLayout, x: Any) -> Any:
        first = _first(layout)
        if first is None:
            return None
        spec, summed = first
        varies = (batch_axes | set(layout.varies)) - all_axes(spec) - summed
        axes = tuple(axis for axis in mesh.axis_names if axis in varies)
        shape = (math.prod(mesh.shape[axis] for axis in axes), *x.shape)
        spec = canonical(PartitionSpec(axes, *spec))
        held = jax.ShapeDtypeStruct(padded_shape(shape, spec, mesh), jnp.float32, sharding=NamedSharding(mesh, spec))
        return wrap_stored(held, padding(shape, spec, mesh))

    shapes = map_layouts(one, placement.layouts, params)
    return shapes if jax.tree.leaves(shapes) else None


def _first(layout: LeafLayout) -> tuple[PartitionSpec, set[str]] | None:
    """How a gradient is split where its first reduction with feedback gets it, and the axes over which it is summed.

    None if it has no such reduction.
    """
    cuts, sums = layout.cuts(scatter=("step",)), layout.sums
    first = first_cut(layout)
    if first == len(cuts) and not any(algorithm.feedback for _, algorithm in sums):
        return None
    axes = dict(enumerate(spec_axes(layout.grad)))
    for cut in cuts[:first]:
        axes[cut.dim] = axes.get(cut.dim, ()) + cut.axes
    spec = PartitionSpec(*(axes.get(dim, ()) for dim in range(max(axes, default=-1) + 1)))
    # Sums come after cuts, and those with feedback after the others.
    summed = {axis for over, algorithm in sums if first == len(cuts) and not algorithm.feedback for axis in over}
    return spec, summed


def first_cut(layout: LeafLayout) -> int:
    """The number of cuts before the residual is added: those before the first with feedback, as a rule.

    A dim is padded for all its cuts at once, so that it is before the first cut of a padded dim, too.
    """
    cuts, padded_dims = layout.cuts(scatter=("step",)), dict(layout.padded)
    first = len(cuts)
    for number, cut in enumerate(cuts):
        if cut.reduce_by.feedback:
            first = number
            break
    # Worked example: cuts of dims 0, 1, 0, of which the last has feedback, and dim 0 is padded. The residual comes in
    # before all three: at cut 2 the gradient has its padding already, which is for both cuts of dim 0.
    while True:
        later_dims = {cut.dim for cut in cuts[first:]}
        earlier = [i for i in range(first) if cuts[i].dim in padded_dims and cuts[i].dim in later_dims]
        if not earlier:
            return first
        first = earlier[0]


def residual_specs(residuals: Any, params: Any, placement: Placement) -> Any:
    """The specs of a state's residuals in a step, for shard_map, after a check that they are those of its plan."""
    made = "residuals=sk.init_residuals(state.params, mesh=mesh, plan=plan)"
    shapes = residual_shapes(params, placement)
    if residuals is None and shapes is not None:
        raise ValueError(
            "step: a state whose plan reduces gradients with error feedback must hold residuals; it holds none. Pass a "
            f"state from init, or state._replace({made}), which begin with zeros."
        )
    if residuals is not None and shapes is None:
        raise ValueError(
            "step: a state whose plan has no error feedback must hold no residuals; it holds those of "
            f"{quoted(_shapes(residuals))}. Pass state._replace(residuals=None): the steps after it never add what "
            "compressed reductions have left out so far."
        )
    for path, ours, theirs in _differences(residuals, shapes):
        raise ValueError(
            f"step: the residual of leaf {path} must have shape {theirs} under this plan and mesh; got {ours}. Save a "
            "checkpoint and restore it for this plan, which keeps the sum of the residuals, or pass "
            f"state._replace({made}), which begin with zeros."
        )
    return _specs(shapes)


def residuals_held(where: str, residuals: Any, params: Any, placement: Placement) -> Any:
    """How a plan stores the residuals of a state, after a check that they are its own."""
    if residuals is None:
        return None
    shapes = residual_shapes(params, placement)
    for path, ours, theirs in _differences(residuals, shapes):
        raise ValueError(
            f"{where} must be a plan with residuals as those of the state; that of leaf {path} has shape {theirs} "
            f"under the plan and {ours} in the state. Save a checkpoint and restore it for the target, which keeps the "
            "sum of the residuals, or pass state._replace(residuals=None), which drops them."
        )
    return jax.tree.map(Storage, _specs(shapes))


def _specs(shapes: Any) -> Any:
    return jax.tree.map(lambda x: stored_array(x).sharding.spec, shapes, is_leaf=is_padded)


def _differences(found: Any, wanted: Any) -> Iterator[tuple[str, Any, Any]]:
    """The leaves whose residuals differ: their paths, and both shapes or None."""
    ours, theirs = _shapes(found), _shapes(wanted)
    for path in {**ours, **theirs}:
        if ours.get(path) != theirs.get(path):
            yield path, ours.get(path), theirs.get(path)


def _shapes(residuals: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(residuals, is_leaf=is_padded)
    return {path: tuple(x.shape) for path, x in by_path("step: residuals", leaves).items()}
