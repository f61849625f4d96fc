"""The function that makes the first state of a run, for the plan, precision and mesh of a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from shardkit._arguments.typed import check_keys
from shardkit.on_device.precision import Precision
from shardkit.plans.axis_types import auto_mesh, change_axis_types
from shardkit.plans.manual import record_automatic_splits
from shardkit.plans.plan import Plan
from shardkit.steps.arguments import check_key
from shardkit.steps.carry import Update, check_carried, make_abstract_carried, make_carried
from shardkit.steps.state import TrainState, call_initializer, is_initializer, make_abstract_state, make_first_state
from shardkit.steps.state_layouts import attach_shardings


@dataclass(frozen=True, eq=False)
class Init:
    """`init(params, key, carried=None)` makes the first state of a run, `init.abstract` its shapes and layouts.

    It has the attributes of the step. Over axes that are not `manual`, parameters keep the caller's layout; `reads`
    says whether the loss takes carried state, and `carry` updates it.
    """

    optimizer: Any
    policy: Precision
    mesh: Any
    plan: Plan
    manual: tuple[str, ...]
    reads: bool
    carry: Update | None

    def __call__(self, params: Any, key: Any = None, carried: Any = None) -> TrainState:
        """The first state. If the mesh has Explicit axes, it is made over the same mesh with Auto axes, and cast."""
        mesh = auto_mesh(self.mesh)
        if mesh is self.mesh:
            return self._init(mesh, params, key, carried)
        with jax.set_mesh(mesh):
            params, key, carried = change_axis_types((params, key, carried), mesh)
            state = self._init(mesh, params, key, carried)
            return change_axis_types(state, self.mesh)

    def abstract(self, params: Any, carried: Any = None) -> TrainState:
        """Shapes, dtypes and layouts of the first state, over any mesh, without making an array."""
        check_keys("init", "params", params)
        mesh = auto_mesh(self.mesh)
        params, carried = change_axis_types((params, carried), mesh)
        check_carried("init", self.reads, self.carry, carried)
        plan = self.plan
        if self._has_automatic_axes:
            plan = record_automatic_splits(plan, params, self.manual)
        state = make_abstract_state(params, self.optimizer, mesh, plan, self.policy)
        if carried is not None:
            state = state._replace(carried=make_abstract_carried(carried, state.params, mesh, plan))
        return change_axis_types(state, self.mesh)

    @property
    def _has_automatic_axes(self) -> bool:
        """Whether some axes are left to the partitioner."""
        return set(self.manual) != set(self.mesh.axis_names)

    def _init(self, mesh: Any, params: Any, key: Any, carried: Any) -> TrainState:
        """The first state over a mesh with Auto axes."""
        check_keys("init", "params", params)
        check_carried("init", self.reads, self.carry, carried)
        key = check_key(key)
        plan = self.plan
        if self._has_automatic_axes:
            arrays = params
            if is_initializer(params):  # compiled to learn the layouts that its constraints and the partitioner choose
                program = jax.jit(partial(call_initializer, params)).lower(key)
                arrays = attach_shardings(program.out_info, program.compile().output_shardings)
            plan = record_automatic_splits(plan, arrays, self.manual)
        state = make_first_state(params, key, self.optimizer, mesh, plan, self.policy)
        if carried is None:
            return state
        return state._replace(carried=make_carried(carried, state.params, mesh, plan))
