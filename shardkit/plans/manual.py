"""The axes that are Manual in a step (`manual=`), and how arrays are split over those left to XLA's partitioner."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardkit._arguments.checks import axis_names, quoted, sized
from shardkit.meshes.layout import canonical, path_name, spec_axes
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
    left = [axis for axis in plan.axes if axis not in axes]
    if left:
        raise ValueError(
            f"{where}: manual must name every axis of the plan; got {quoted(axes)} for {plan}. Add {left[0]!r} to "
            "manual, or leave it out of the plan, and the partitioner splits what is laid out over it."
        )
    return axes


def leaving_automatic(plan: Any, params: Any, manual: tuple[str, ...]) -> Any:
    """The plan, told how arrays are split over axes that are not Manual."""
    found = []
    for path, x in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_padded):
        layout = getattr(stored_array(x), "sharding", None)
        if isinstance(layout, NamedSharding):
            entries = [tuple(axis for axis in axes if axis not in manual) for axes in spec_axes(layout.spec)]
            spec = canonical(PartitionSpec(*entries))
            found += [(path_name(path), spec)] if spec else []
    return plan._replace(automatic=tuple(found))
