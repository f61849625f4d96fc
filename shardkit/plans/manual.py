"""The axes that are Manual in a step (`manual=`), and how arrays are split over the axes left to XLA's partitioner.

The caller chooses how parameters are split over the partitioner's axes, by the layouts of the arrays that `init` gets.
`init` reads these layouts; each step reads them from the first state that it gets. The plan splits other dims, and
every state keeps its layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardkit._arguments.checks import axis_names, format_sizes, quote
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
                f"{where}: manual must name axes of the mesh; got {axis!r}; its axes are "
                f"{format_sizes(mesh.shape.items())}. Use some of them, or leave manual out, which means all."
            )
    for axis in plan.axes:
        if axis not in axes:
            raise ValueError(
                f"{where}: manual must name every axis of the plan; got {quote(axes)} for {plan}. Add {axis!r} to "
                "manual, or leave it out of the plan, so that the partitioner splits arrays over it."
            )
    return axes


def record_automatic_splits(plan: Any, params: Any, manual: tuple[str, ...]) -> Any:
    """The plan with the specs of the leaves over the axes that are not Manual.

    If "data" alone is Manual, the plan has P("model", "expert") for a leaf laid out as P(("data", "model"), "expert").
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
    """A jitted function whose first argument is a state or parameters, built when it is first called.

    `build(plan, layouts)` makes it. The layouts are those of the first argument of the first call, as a tree; the plan
    has the partitioner's splits of its parameters, which `params_of` takes out of it. A later call may pass arrays with
    other layouts: the results are laid out as in the first call.
    """

    def __init__(self, build: Callable[..., Any], plan: Any, manual: tuple[str, ...], params_of: Callable[[Any], Any]):
        self._build = build
        self._plan = plan
        self._manual = manual
        self._params_of = params_of
        self._built: dict[Any, Any] = {}

    def _find_function(self, first: Any) -> Any:
        structure = jax.tree.structure(first)
        # A state with another tree, as one with residuals, has layouts of its own.
        if structure not in self._built:
            plan = record_automatic_splits(self._plan, self._params_of(first), self._manual)
            layouts = jax.tree.map(lambda x: getattr(x, "sharding", None), first)
            self._built[structure] = self._build(plan, layouts)
        return self._built[structure]

    def __call__(self, first: Any, *args: Any) -> Any:
        return self._find_function(first)(first, *args)

    def trace(self, first: Any, *args: Any) -> Any:
        return self._find_function(first).trace(first, *args)

    def lower(self, first: Any, *args: Any) -> Any:
        return self._find_function(first).lower(first, *args)
