"""Whether a state fits a plan and a mesh: the check of `step` before it runs, and how a plan stores each leaf."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit._arguments.checks import format_sizes
from shardkit._jax import compat
from shardkit.meshes.layout import canonical, path_name, spec_axes
from shardkit.on_device.residuals import residual_layouts
from shardkit.plans.plan import Plan
from shardkit.plans.storage import Storage, is_padded, stored_array
from shardkit.steps.state import TrainState
from shardkit.steps.state_layouts import match_storage


def state_storage(where: str, state: TrainState, mesh: Any, plan: Plan) -> TrainState:
    """How a plan stores each leaf of a state, as a `Storage` for each; `where` begins the errors about residuals."""
    placement = plan.placement(state.params, mesh)
    replicate = partial(jax.tree.map, lambda _: Storage(PartitionSpec()))
    return TrainState(
        step=replicate(state.step),
        params=placement.at_rest,
        opt_state=match_storage(state.opt_state, state.params, placement.in_update),
        key=replicate(state.key),
        loss_scale=replicate(state.loss_scale),
        residuals=residual_layouts(where, state.residuals, state.params, placement),
        carried=match_storage(state.carried, state.params, placement.at_rest),
    )


class StateCheck:
    """The check of a state before each step: it must be on the mesh of the step, in the layouts of its plan.

    Otherwise jit would move its leaves by collectives that stand nowhere in the program.
    """

    def __init__(self, plan: Plan, mesh: Mesh):
        self._plan = plan
        self._mesh = mesh
        self._right: set[tuple[Any, ...]] = set()  # layouts that were right: comparing leaves again costs every step
        self._newest_layouts: tuple[Any, ...] = ()
        self._newest_key: Any = None

    def __call__(self, state: TrainState, leaves: list[Any]) -> None:
        """Refuses a state that does not fit; `leaves` are those of the state without its key."""
        # Inside another jit the leaves have no layouts yet.
        if isinstance(state.step, jax.core.Tracer):
            return
        layouts = compat.layouts_of(leaves)
        # The states that one program returns have the same objects for layouts, and a run has one key. So nothing is
        # compared here, but identities: that two layouts are equal takes 0.2 us a leaf, and the layout of a typed key,
        # which jax makes anew whenever it is asked, 8 us. A small step takes 50.
        if layouts == self._newest_layouts and state.key is self._newest_key:
            return
        with_key = (*layouts, getattr(state.key, "sharding", None))
        if with_key not in self._right:
            self._check_leaves(state)
            self._right.add(with_key)
        self._newest_layouts = layouts
        self._newest_key = state.key

    def _check_leaves(self, state: TrainState) -> None:
        state = state._replace(residuals=None)  # their shape is checked where the step is traced
        leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_padded)
        expected = jax.tree.leaves(state_storage("step", state, self._mesh, self._plan))
        for (path, x), storage in zip(leaves, expected, strict=True):
            _check_leaf(path_name(path), x, storage.spec, self._mesh)


def _check_leaf(path: str, x: Any, spec: PartitionSpec, mesh: Mesh) -> None:
    """Refuses a leaf that is on another mesh, or laid out otherwise."""
    sharding = getattr(stored_array(x), "sharding", None)
    if not isinstance(sharding, NamedSharding):  # an array of the host, or of one device: jit moves it once
        return
    if dict(sharding.mesh.shape) != dict(mesh.shape):
        raise ValueError(
            f"step: the state must be on the mesh of the step, {format_sizes(mesh.shape.items())}; leaf "
            f"{path} is on {format_sizes(sharding.mesh.shape.items())}. Save and restore it as a "
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
