"""How a training run begins: its first state, or the shapes of one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from shardkit.on_device.precision import Precision
from shardkit.plans.axis_types import auto_mesh, retyped
from shardkit.plans.manual import leaving_automatic
from shardkit.plans.plan import Plan
from shardkit.steps.arguments import checked_key
from shardkit.steps.carry import Update, abstract_carried, check_carried, first_carried
from shardkit.steps.state import TrainState, abstract_state, described, first_state, made_by, makes


@dataclass(frozen=True, eq=False)
class Init:
    """`init(params, key, carried=None)` makes the first state of a run, `init.abstract` its shapes and layouts.

    Attributes: those of the step. Over axes that are not `manual`, parameters keep the layout that they come with;
    `reads` says whether the loss takes carried state, and `carry` updates it.
    """

    optimizer: Any
    policy: Precision
    mesh: Any
    plan: Plan
    manual: tuple[str, ...]
    reads: bool
    carry: Update | None

    def __call__(self, params: Any, key: Any = None, carried: Any = None) -> TrainState:
        """The first state; of a mesh with Explicit axes, made over the same devices with Auto ones."""
        mesh = auto_mesh(self.mesh)
        if mesh is self.mesh:
            return self._first(mesh, params, key, carried)
        with jax.set_mesh(mesh):
            return retyped(self._first(mesh, *retyped((params, key, carried), mesh)), self.mesh)

    def abstract(self, params: Any, carried: Any = None) -> TrainState:
        """Shapes, dtypes and layouts of the first state, over any mesh, without making an array."""
        mesh = auto_mesh(self.mesh)
        params, carried = retyped((params, carried), mesh)
        check_carried("init", self.reads, self.carry, carried)
        plan = leaving_automatic(self.plan, params, self.manual) if self._leaves_some else self.plan
        state = abstract_state(params, self.optimizer, mesh, plan, self.policy)
        if carried is not None:
            state = state._replace(carried=abstract_carried(carried, state.params, mesh, plan))
        return retyped(state, self.mesh)

    @property
    def _leaves_some(self) -> bool:
        """Whether some axes are left to the partitioner."""
        return set(self.manual) != set(self.mesh.axis_names)

    def _first(self, mesh: Any, params: Any, key: Any, carried: Any) -> TrainState:
        check_carried("init", self.reads, self.carry, carried)
        key, plan = checked_key(key), self.plan
        if self._leaves_some:
            laid_out = params
            if makes(params):  # the layouts that its constraints and the partitioner give it
                program = jax.jit(partial(made_by, params)).lower(key)
                laid_out = described(program.out_info, program.compile().output_shardings)
            plan = leaving_automatic(plan, laid_out, self.manual)
        state = first_state(params, key, self.optimizer, mesh, plan, self.policy)
        if carried is None:
            return state
        return state._replace(carried=first_carried(carried, state.params, mesh, plan))
