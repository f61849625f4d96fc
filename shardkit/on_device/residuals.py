"""The residuals of error feedback in a state: an array for each leaf of what its compressed reductions have left out.

It is `[R, ...]` of the leaf's shape, with a row for each of the R devices whose gradients are still to be summed where
the first reduction with feedback gets them. Only the sum of the rows matters, so a checkpoint can be restored on any
number of devices. Residuals are in units of the gradient after it is divided by its weight and the loss scale, which
change from step to step. An axis of one device reduces nothing: there the residual is added once, and then stays zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit._arguments.checks import quoted
from shardkit._arguments.context import mesh_in_context
from shardkit._arguments.typed import Arrays, typed
from shardkit.meshes.layout import all_axes, canonical, path_name, spec_axes
from shardkit.plans.placement import Layout, map_layouts
from shardkit.plans.plan import Placement, Plan
from shardkit.plans.storage import Held, as_stored, is_padded, padded_shape, padding, stored_array


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

    def one(layout: Layout, x: Any) -> Any:
        first = _first(layout)
        if first is None:
            return None
        spec, summed = first
        varies = (batch_axes | set(layout.varies)) - all_axes(spec) - summed
        axes = tuple(axis for axis in mesh.axis_names if axis in varies)
        shape = (math.prod(mesh.shape[axis] for axis in axes), *x.shape)
        spec = canonical(PartitionSpec(axes, *spec))
        held = jax.ShapeDtypeStruct(padded_shape(shape, spec, mesh), jnp.float32, sharding=NamedSharding(mesh, spec))
        return as_stored(held, padding(shape, spec, mesh))

    shapes = map_layouts(one, placement.layouts, params)
    return shapes if jax.tree.leaves(shapes) else None


def _first(layout: Layout) -> tuple[PartitionSpec, set[str]] | None:
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


def first_cut(layout: Layout) -> int:
    """The number of cuts before the residual is added: those before the first with feedback, as a rule.

    A dim is padded for all its cuts at once, so that it is before the first cut of a padded dim, too.
    """
    cuts, padded = layout.cuts(scatter=("step",)), dict(layout.padded)
    first = next((i for i, cut in enumerate(cuts) if cut.reduce_by.feedback), len(cuts))
    while again := [i for i in range(first) if cuts[i].dim in padded and cuts[i].dim in {c.dim for c in cuts[first:]}]:
        first = again[0]
    return first


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
    return jax.tree.map(Held, _specs(shapes))


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
    return {path_name(path): tuple(x.shape) for path, x in leaves}
