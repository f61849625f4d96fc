"""The plan of a pipeline's stack.

A device stores the layers of its own stages, stage by stage. With several stages per device that is not the original
order of the layers, and stages of unequal size are padded to the largest: such a leaf is stored as a `Padded` with its
rows, and `unpadded` returns it in original order, as in a checkpoint.
"""

from __future__ import annotations

from typing import Any

from shardkit._arguments.checks import axis_names, named
from shardkit.on_device.pipelines import Staged
from shardkit.plans.dim_rules import is_in_subtrees, make_dim_chooser, split_by_rules
from shardkit.plans.plan import Plan, strategy
from shardkit.plans.splits import Leaf, Split
from shardkit.schedules import Stages

STACK = "layers"


def stack_plan(stages: Stages) -> Plan:
    """The plan of `pp` for these stages."""
    axes = axis_names("pp", stages.axis)
    spread = None if stages.spread is None else make_dim_chooser("pipeline", axes, stages.spread)

    def place(leaf: Leaf) -> Split | str:
        here = stages._replace(devices=stages.devices or leaf.ways)
        if not is_in_subtrees(leaf.path, (STACK,)):
            return split_by_rules("pipeline", axes, spread, leaf) if spread else f"not in the stack {STACK!r}"
        if here.devices != leaf.ways:
            raise ValueError(
                f"pp: the schedule is for {here.devices} devices; {named(axes)} has {leaf.ways}. Make the mesh with "
                f"{here.devices} devices there, or the schedule with devices={leaf.ways}."
            )
        if not leaf.shape or 0 in leaf.split:
            what = "has no dims" if not leaf.shape else "is split on dim 0 by another strategy"
            raise ValueError(
                f"pp: dim 0 of a leaf of the stack must be its layers, split over {named(axes)} only; leaf {leaf.path} "
                f"{what}. Move it out of {STACK!r}, or split another dim."
            )
        rows = here.rows(leaf.shape[0])
        if leaf.ways == 1 and not rows:
            return "the axis has one device"
        return Split(0, rows=rows, note=here.note())

    (made,) = strategy("pp", axes, place=place, rank=0, rules=stages.spread).strategies
    return Plan((made._replace(stages=stages),))


def arranged(plan: Plan, function: Any, accumulate: int = 1) -> Plan:
    """The plan for a GradFn or loss: accumulated if it has several microbatches, its `pp` with a pipeline's stages.

    Raises:
        ValueError: the plan has no `pp` over the pipeline's axis, or one with the stages of another pipeline.
    """
    if accumulate > 1 or isinstance(function, Staged):
        plan = plan.accumulate()
    if not isinstance(function, Staged):
        return plan
    stages = function.stages
    (mine,) = stack_plan(stages).strategies
    found = next((s for s in plan.strategies if s.stages is not None and s.axes == mine.axes), None)
    if found is None or found.stages is None:
        raise ValueError(
            f"pp: the plan of a pipeline must have {mine.name}, which assigns layers to stages; got {plan}. "
            f"Pass chain({mine.name}, ...)."
        )
    if found.stages.devices is not None and found.stages[1:] != stages[1:]:
        theirs, ours = (f"{each.devices} devices{each.note()}" for each in (found.stages, stages))
        raise ValueError(
            f"pp: the plan of a pipeline must have the stages of its schedule, {ours}; got those of another, {theirs}. "
            f"Pass the plan of the same pipeline, or chain({mine.name}, ...)."
        )
    return plan._replace(strategies=tuple(mine if s is found else s for s in plan.strategies))
