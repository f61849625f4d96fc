"""The residuals of error feedback in a state: their shapes and layouts under a plan, and the checks of both.

In a state a residual has the shape `[R, ...]`: the leaf's shape, with R rows in front. R is the number of devices over
which the gradient is not summed yet when its first reduction with feedback begins; each of them has one row. Only the
sum of the rows matters, so a checkpoint can be restored on any number of devices.

Residuals have the unit of the final gradient: divided by the weight and the loss scale, which change from step to step.
`feedback.py` adds the residuals to the gradients, and returns the new ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit._arguments.checks import mesh_in_context, quote
from shardkit._arguments.typed import Arrays, typed
from shardkit.meshes.layout import all_axes, by_path, canonical, count_devices, spec_axes
from shardkit.on_device.feedback import find_first_cut
from shardkit.plans.plan import Placement, Plan
from shardkit.plans.splits import LeafLayout, make_spec, map_layouts
from shardkit.plans.storage import Storage, is_padded, padded_shape, padding, stored_array, wrap_stored


@typed
def init_residuals(params: Arrays, *, mesh: Mesh | None = None, plan: Plan) -> Any:
    """Makes the residuals of a new TrainState: zeros for each leaf that the plan reduces with error feedback.

    `init` calls this for you. If you turn feedback on later, add them yourself:
    `state._replace(residuals=init_residuals(...))`.

    Layout: `residual[R_a, ...]`, float32, with a row for each device over which the gradient is summed
    Args:
        params: the parameters, a pytree of arrays or of their shapes.
        mesh: the mesh; by default the mesh of `jax.set_mesh`.
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
    return zero_residuals(params, plan.placement(params, mesh))


def zero_residuals(params: Any, placement: Placement) -> Any:
    """The residuals of a new state; None without feedback."""
    shapes = residual_shapes(params, placement)
    if shapes is None:
        return None

    def make_zeros() -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    shardings = jax.tree.map(lambda x: x.sharding, shapes)
    return jax.jit(make_zeros, out_shardings=shardings)()


def residual_shapes(params: Any, placement: Placement) -> Any:
    """The residuals of a plan as shapes, dtypes and layouts, each as it is stored; None without feedback."""
    if not any(strategy.reduce.feedback for strategy in placement.plan.strategies):
        return None
    mesh = placement.mesh
    batch_axes = all_axes(placement.batch)

    def find_shape(layout: LeafLayout, x: Any) -> Any:
        reduction = _find_first_reduction(layout)
        if reduction is None:
            return None
        grad_spec, summed_axes = reduction
        varying = batch_axes | set(layout.varies)
        unreduced_axes = varying - all_axes(grad_spec) - summed_axes
        # In the order of the mesh: the rows stand as the devices do.
        axes = tuple(axis for axis in mesh.axis_names if axis in unreduced_axes)
        rows = count_devices(mesh, axes)
        shape = (rows, *x.shape)
        spec = canonical(PartitionSpec(axes, *grad_spec))
        stored = padded_shape(shape, spec, mesh)
        residual = jax.ShapeDtypeStruct(stored, jnp.float32, sharding=NamedSharding(mesh, spec))
        return wrap_stored(residual, padding(shape, spec, mesh))

    shapes = map_layouts(find_shape, placement.layouts, params)
    if not jax.tree.leaves(shapes):
        return None
    return shapes


def _find_first_reduction(layout: LeafLayout) -> tuple[PartitionSpec, set[str]] | None:
    """How a gradient is split where its first reduction with feedback gets it, and the axes over which it is summed.

    None if it has no such reduction.
    """
    # Worked example: of a gradient that is scattered over "fsdp" by the plain algorithm, and then summed over "data" in
    # int8, the residual is as the gradient between the two: split over "fsdp", not summed yet over "data". A gradient
    # that is scattered over "fsdp" in int8 has a residual of its whole shape, for each device.
    cuts = layout.cuts(scatter=("step",))
    first = find_first_cut(layout)
    is_cut = first < len(cuts)
    if not is_cut and not any(algorithm.feedback for _, algorithm in layout.sums):
        return None
    axes_by_dim = dict(enumerate(spec_axes(layout.grad)))
    for cut in cuts[:first]:
        axes_by_dim[cut.dim] = axes_by_dim.get(cut.dim, ()) + cut.axes
    # Sums come after cuts, and those with feedback after the others.
    summed_axes = set[str]()
    if not is_cut:
        for axes, algorithm in layout.sums:
            if not algorithm.feedback:
                summed_axes.update(axes)
    return make_spec(axes_by_dim), summed_axes


def residual_specs(residuals: Any, params: Any, placement: Placement) -> Any:
    """The specs of a state's residuals in a step, for shard_map, after a check that they are those of its plan."""
    zeros = "residuals=sk.init_residuals(state.params, mesh=mesh, plan=plan)"
    shapes = residual_shapes(params, placement)
    if residuals is None and shapes is not None:
        raise ValueError(
            "step: with error feedback in the plan, the state must hold residuals; it holds none. Pass a state from "
            f"init, or state._replace({zeros}), which begin with zeros."
        )
    if residuals is not None and shapes is None:
        raise ValueError(
            "step: without error feedback in the plan, the state must hold no residuals; it holds residuals of "
            f"{quote(_list_shapes(residuals))}. Pass state._replace(residuals=None): the steps after it never add "
            "what compressed reductions have left out so far."
        )
    for path, ours, theirs in _list_differences(residuals, shapes):
        raise ValueError(
            f"step: the residual of leaf {path} must have shape {theirs} under this plan and mesh; got {ours}. Save a "
            "checkpoint and restore it for this plan, which keeps the sum of the residuals, or pass "
            f"state._replace({zeros}), which begin with zeros."
        )
    return _get_specs(shapes)


def residual_layouts(where: str, residuals: Any, params: Any, placement: Placement) -> Any:
    """How a plan stores the residuals of a state, after a check that they are its own."""
    if residuals is None:
        return None
    shapes = residual_shapes(params, placement)
    for path, ours, theirs in _list_differences(residuals, shapes):
        raise ValueError(
            f"{where} must be a plan with the residuals of the state; the residual of leaf {path} has shape {theirs} "
            f"under the plan and {ours} in the state. Save a checkpoint and restore it for the target, which keeps "
            "the sum of the residuals, or pass state._replace(residuals=None), which drops them."
        )
    return jax.tree.map(Storage, _get_specs(shapes))


def _get_specs(shapes: Any) -> Any:
    return jax.tree.map(lambda x: stored_array(x).sharding.spec, shapes, is_leaf=is_padded)


def _list_differences(residuals: Any, expected: Any) -> Iterator[tuple[str, Any, Any]]:
    """The leaves whose residuals differ: their paths, and both shapes or None."""
    ours = _list_shapes(residuals)
    theirs = _list_shapes(expected)
    for path in {**ours, **theirs}:
        if ours.get(path) != theirs.get(path):
            yield path, ours.get(path), theirs.get(path)


def _list_shapes(residuals: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of residuals by path."""
    leaves = jax.tree_util.tree_leaves_with_path(residuals, is_leaf=is_padded)
    shapes = {}
    for path, residual in by_path("step: residuals", leaves).items():
        shapes[path] = tuple(residual.shape)
    return shapes
