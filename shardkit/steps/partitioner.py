"""Axes that a step leaves to XLA's partitioner, in addition to the Manual ones of its plan.

Where the parameters are split over them is the caller's choice, in the layouts of the arrays that `init` gets. It is
read there, and from the first state in each step, so that the plan splits other dims, and every state keeps its layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from shardkit.plans.manual import leaving_automatic
from shardkit.plans.plan import Plan
from shardkit.steps.state import TrainState


class AsLaidOut:
    """A jitted function of a state, or of parameters, and more, built for the layouts of the first that it gets.

    `build(plan, layouts)` gets the plan with these, and the layouts as a tree. Arguments with other layouts are right:
    the results are laid out as the first.
    """

    def __init__(self, build: Callable[..., Any], plan: Plan, manual: tuple[str, ...]):
        self._build, self._plan, self._manual = build, plan, manual
        self._built: dict[Any, Any] = {}

    def _for(self, first: Any) -> Any:
        structure = jax.tree.structure(first)
        if structure not in self._built:
            params = first.params if isinstance(first, TrainState) else first
            layouts = jax.tree.map(lambda x: getattr(x, "sharding", None), first)
            self._built[structure] = self._build(leaving_automatic(self._plan, params, self._manual), layouts)
        return self._built[structure]

    def __call__(self, first: Any, *args: Any) -> Any:
        return self._for(first)(first, *args)

    def trace(self, first: Any, *args: Any) -> Any:
        return self._for(first).trace(first, *args)

    def lower(self, first: Any, *args: Any) -> Any:
        return self._for(first).lower(first, *args)
