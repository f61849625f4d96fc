"""The axes that are Manual in a step (`manual=`), and how arrays are split over those left to XLA's partitioner.

Where the parameters are split over the latter is the caller's choice, in the layouts of the arrays that `init` gets. It
is read there, and from the first state in each step: the plan splits other dims, and every state keeps its layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardkit._arguments.checks import axis_names, quoted, sized
from shardkit.meshes.layout import by_path, canonical, spec_axes
from shardkit.plans.storage import is_padded, stored_array


def manual_axes(where: str, manual: Any, plan: Any, mesh: Any) -> tuple[str, ...]:
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
    missing = [axis for axis in plan.axes if axis not in axes]
    if missing:
        raise ValueError(
            f"{where}: manual must name every axis of the plan; got {quoted(axes)} for {plan}. Add {missing[0]!r} to "
            "manual, or leave it out of the plan, so that the partitioner splits arrays over it."
        )
    return axes


def record_automatic_splits(plan: Any, params: Any, manual: tuple[str, ...]) -> Any:
    """The plan with the specs of the leaves over the axes that are not Manual.

    A leaf laid out as P(("data", "model"), "expert") has P("model", "expert") there if "data" alone is Manual.
    """
    specs = []
    for path, x in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_padded):
        sharding = getattr(stored_array(x), "sharding", None)
        if not isinstance(sharding, NamedSharding):
            continue
        entries = []
        for axes in spec_axes(sharding.spec):
            entries.append(tuple(axis for axis in axes if axis not in manual))
        spec = canonical(PartitionSpec(*entries))
        if spec:
            specs.append((path, spec))
    return plan._replace(automatic=tuple(by_path("parameters", specs).items()))


class JitByLayouts:
    """A jitted function of a state, or of parameters, and more, built for the layouts of the first that it gets.

    `build(plan, layouts)` gets the plan with these, and the layouts as a tree; `params_of` takes the parameters out of
    the first argument. Arguments with other layouts are right: the results are laid out as the first.
    """

    def __init__(self, build: Callable[..., Any], plan: Any, manual: tuple[str, ...], params_of: Callable[[Any], Any]):
        self._build = build
        self._plan = plan
        self._manual = manual
        self._params_of = params_of
        self._built: dict[Any, Any] = {}

    def _function_for(self, first: Any) -> Any:
        structure = jax.tree.structure(first)
        if structure not in self._built:
            plan = record_automatic_splits(self._plan, self._params_of(first), self._manual)
            layouts = jax.tree.map(lambda x: getattr(x, "sharding", None), first)
            self._built[structure] = self._build(plan, layouts)
        return self._built[structure]

    def __call__(self, first: Any, *args: Any) -> Any:
        return self._function_for(first)(first, *args)

    def trace(self, first: Any, *args: Any) -> Any:
        return self._function_for(first).trace(first, *args)

    def lower(self, first: Any, *args: Any) -> Any:
        return self._function_for(first).lower(first, *args)
