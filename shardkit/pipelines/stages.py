"""The plan of a pipeline's stack.

A device stores the layers of its own stages, stage by stage. With several stages per device that is not the original
order of the layers, and stages of unequal size are padded to the largest: such a leaf is stored as a `Padded` with its
rows, and `unpadded` returns it in original order, as in a checkpoint.
"""

from __future__ import annotations

from typing import Any

from shardkit._arguments.checks import axis_names, name_axes
from shardkit.on_device.pipelines import Staged
from shardkit.plans.dim_rules import is_in_subtrees, make_dim_chooser, split_by_rules
from shardkit.plans.plan import Plan, strategy
from shardkit.plans.splits import Leaf, Split
from shardkit.schedules.stages import Stages


def build_stack_plan(stages: Stages) -> Plan:
    """The plan of `pp` for these stages."""
    axes = axis_names("pp", stages.axis)
    spread = None
    if stages.spread is not None:
        spread = make_dim_chooser("pipeline", axes, stages.spread)

    def place(leaf: Leaf) -> Split | str:
        if not is_in_subtrees(leaf.path, (stages.stack,)):
            if spread is None:
                return f"not in the stack {stages.stack!r}"
            return split_by_rules("pipeline", axes, spread, leaf)
        # `devices` is None for stages that fit any mesh: here they get the devices of this mesh.
        mesh_stages = stages._replace(devices=stages.devices or leaf.ways)
        _check_leaf(leaf, mesh_stages, axes)
        rows = mesh_stages.rows(leaf.shape[0])
        if leaf.ways == 1 and not rows:
            return "the axis has one device"
        return Split(0, rows=rows, note=mesh_stages.note())

    plan = strategy("pp", axes, place=place, rank=0, rules=stages.spread)
    (pp,) = plan.strategies
    return Plan((pp._replace(stages=stages),))


def _check_leaf(leaf: Leaf, stages: Stages, axes: tuple[str, ...]) -> None:
    """Refuses a leaf of the stack whose layers cannot be split into these stages."""
    if stages.devices != leaf.ways:
        raise ValueError(
            f"pp: the schedule is for {stages.devices} devices; {name_axes(axes)} has {leaf.ways}. Make the mesh with "
            f"{stages.devices} devices there, or the schedule with devices={leaf.ways}."
        )
    if not leaf.shape or 0 in leaf.split:
        reason = "is split on dim 0 by another strategy" if leaf.shape else "has no dims"
        raise ValueError(
            f"pp: dim 0 of a leaf of the stack must be its layers, split over {name_axes(axes)} only; leaf {leaf.path} "
            f"{reason}. Move it out of {stages.stack!r}, or split another dim."
        )


def fit_plan(plan: Plan, function: Any, accumulate: int = 1) -> Plan:
    """The plan for a GradFn or loss: accumulated if it has several microbatches, its `pp` with a pipeline's stages.

    Raises:
        ValueError: the plan has no `pp` over the pipeline's axis, or one with the stages of another pipeline.
    """
    if accumulate > 1 or isinstance(function, Staged):
        plan = plan.accumulate()
    if not isinstance(function, Staged):
        return plan
    stages = function.stages
    (pp,) = build_stack_plan(stages).strategies
    planned = _find_pp(plan, pp.axes)
    if planned is None or planned.stages is None:
        raise ValueError(
            f"pp: the plan of a pipeline must have {pp.name}, which assigns layers to stages; got {plan}. "
            f"Pass chain({pp.name}, ...)."
        )
    if planned.stages.devices is not None and planned.stages[1:] != stages[1:]:
        raise ValueError(
            f"pp: the plan of a pipeline must have the stages of its schedule, {_describe(stages)}; got the stages of "
            f"another, {_describe(planned.stages)}. Pass the plan of the same pipeline, or chain({pp.name}, ...)."
        )
    strategies = []
    for part in plan.strategies:
        strategies.append(pp if part is planned else part)
    return plan._replace(strategies=tuple(strategies))


def _find_pp(plan: Plan, axes: tuple[str, ...]) -> Any:
    """The strategy of a plan that splits a stack into stages over these axes; None if there is none."""
    for part in plan.strategies:
        if part.stages is not None and part.axes == axes:
            return part
    return None


def _describe(stages: Stages) -> str:
    return f"{stages.devices} devices{stages.note()}"
