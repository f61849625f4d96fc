"""Whether a state fits a plan and a mesh: the check of `step` before it runs, and how a plan stores each leaf."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit._arguments.checks import sized
from shardkit.meshes.layout import canonical, path_name, spec_axes
from shardkit.on_device.residuals import residual_layouts
from shardkit.plans.plan import Plan
from shardkit.plans.storage import Storage, is_padded, stored_array
from shardkit.steps.state import TrainState
from shardkit.steps.state_layouts import optimizer_storage


def state_storage(where: str, state: TrainState, mesh: Any, plan: Plan) -> TrainState:
    """How a plan stores each leaf of a state, as a `Storage` for each; `where` begins the errors about residuals."""
    placement = plan.placement(state.params, mesh)
    replicate = partial(jax.tree.map, lambda _: Storage(PartitionSpec()))
    return TrainState(
        step=replicate(state.step),
        params=placement.at_rest,
        opt_state=optimizer_storage(state.opt_state, state.params, placement.in_update),
        key=replicate(state.key),
        loss_scale=replicate(state.loss_scale),
        residuals=residual_layouts(where, state.residuals, state.params, placement),
        carried=optimizer_storage(state.carried, state.params, placement.at_rest),
    )


def make_state_check(plan: Plan, mesh: Mesh) -> Callable[[Any], None]:
    """The check of a state before each step: it must be a TrainState, on this mesh, in the layouts of this plan.

    Otherwise jit would move its leaves by collectives that stand nowhere in the program.
    """
    checked: set[tuple[Any, ...]] = set()  # layouts that were right: to compare leaves again would cost every step

    def check(state: Any) -> None:
        if not isinstance(state, TrainState):
            raise TypeError(
                f"step: the first argument must be the TrainState that init or the last step returned; got "
                f"{type(state).__name__}. Call step(state, batch), with state = init(params, key)."
            )
        # Inside another jit the leaves have no layouts yet.
        if isinstance(state.step, jax.core.Tracer):
            return
        layouts = tuple(getattr(x, "sharding", None) for x in jax.tree.leaves(state))
        if layouts in checked:
            return
        state = state._replace(residuals=None)  # their shape is checked where the step is traced
        leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_padded)
        expected = jax.tree.leaves(state_storage("step", state, mesh, plan))
        for (path, x), storage in zip(leaves, expected, strict=True):
            _check_leaf(path_name(path), x, storage.spec, mesh)
        checked.add(layouts)

    return check


def _check_leaf(path: str, x: Any, spec: PartitionSpec, mesh: Mesh) -> None:
    """Refuses a leaf that is on another mesh, or laid out otherwise."""
    sharding = getattr(stored_array(x), "sharding", None)
    if not isinstance(sharding, NamedSharding):  # an array of the host, or of one device: jit moves it once
        return
    if dict(sharding.mesh.shape) != dict(mesh.shape):
        raise ValueError(
            f"step: the state must be on the mesh of the step, {sized(mesh.shape.items())}; leaf "
            f"{path} is on {sized(sharding.mesh.shape.items())}. Save and restore it as a "
            "checkpoint, or pass jax.device_put(state, layouts of init.abstract(params))."
        )
    if _splits(sharding.spec, mesh) != _splits(spec, mesh):
        raise ValueError(
            f"step: the state must be laid out as the plan of the step says; leaf {path} is "
            f"{canonical(sharding.spec)} and must be {canonical(spec)}. Pass sk.reshard(state, its plan, "
            "the plan of the step, mesh=mesh)."
        )


def _splits(spec: PartitionSpec, mesh: Mesh) -> list[tuple[str, ...]]:
    """The axes that split each dim, without axes of one device and without whole dims at the end."""
    splits = []
    for axes in spec_axes(spec):
        splits.append(tuple(axis for axis in axes if mesh.shape[axis] > 1))
    while splits and not splits[-1]:
        splits.pop()
    return splits
