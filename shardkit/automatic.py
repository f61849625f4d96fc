"""Axes that a step leaves to XLA's partitioner, in addition to the Manual ones of its plan.

Where the parameters are split over them is the caller's choice, in the layouts of the arrays that `init` gets. It is
read there, and from the first state in each step, so that the plan splits other dims, and every state keeps its layout.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardkit._check import axis_names, quoted, sized
from shardkit.layout import canonical, path_name, spec_axes
from shardkit.partitioning.plan import Plan
from shardkit.partitioning.storage import is_padded, stored_array
from shardkit.state import TrainState, described, made_by, makes


def manual_axes(where: str, manual: Any, plan: Plan, mesh: Any) -> tuple[str, ...]:
    """The axes of a mesh that are Manual inside a step: all, or those that the caller names.

    Raises:
        ValueError: an axis that the mesh does not have, or one of the plan that is not among them.
    """
    if manual is None:
        return tuple(mesh.axis_names)
    axes = axis_names(where, manual)
    for axis in axes:
        if axis not in mesh.shape:
            raise ValueError(
                f"{where}: manual must name axes of the mesh; got {axis!r}; its axes are {sized(mesh.shape.items())}. "
                "Use some of them, or leave manual out, which means all."
            )
    left = [axis for axis in plan.axes if axis not in axes]
    if left:
        raise ValueError(
            f"{where}: manual must name every axis of the plan; got {quoted(axes)} for {plan}. Add {left[0]!r} to "
            "manual, or leave it out of the plan, and the partitioner splits what is laid out over it."
        )
    return axes


def leaving_automatic(plan: Plan, params: Any, manual: tuple[str, ...]) -> Plan:
    """The plan with how arrays are split over axes that are not Manual."""
    found = []
    for path, x in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_padded):
        layout = getattr(stored_array(x), "sharding", None)
        if isinstance(layout, NamedSharding):
            entries = [tuple(axis for axis in axes if axis not in manual) for axes in spec_axes(layout.spec)]
            spec = canonical(PartitionSpec(*entries))
            found += [(path_name(path), spec)] if spec else []
    return plan._replace(automatic=tuple(found))


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


def init_as_laid_out(make: Callable[[Plan], Any], plan: Plan, manual: tuple[str, ...]) -> Any:
    """The `init` of a plan that keeps the layouts of the parameters over axes that are not Manual."""

    def init(params: Any, key: jax.Array, carried: Any = None) -> Any:
        laid_out = params
        if makes(params):  # the layouts that its constraints and the partitioner give it
            program = jax.jit(partial(made_by, params)).lower(key)
            laid_out = described(program.out_info, program.compile().output_shardings)
        return make(leaving_automatic(plan, laid_out, manual))(params, key, carried)

    def abstract(params: Any, carried: Any = None) -> Any:
        return make(leaving_automatic(plan, params, manual)).abstract(params, carried)

    init.abstract = abstract  # type: ignore[attr-defined]
    return init
