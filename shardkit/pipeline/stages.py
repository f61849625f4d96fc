"""The stack of a pipeline: which device stores which layers, and in which order.

A device stores the layers of its own stages, stage by stage. With several stages per device that is not the natural
order of the layers, and stages of unequal size are padded to the largest: such a leaf is stored as a `Padded` with its
rows, and `unpadded` returns it in natural order, as in a checkpoint.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

from shardkit._check import Axis, axis_names, named
from shardkit.partitioning.dim_rules import in_subtrees
from shardkit.partitioning.placement import Leaf, Split
from shardkit.partitioning.plan import Plan, strategy
from shardkit.schedules import Schedule
from shardkit.schedules.action import StagePlacement, device_of

STACK = "layers"


class Stages(NamedTuple):
    """How the layers of a stack are assigned to the devices of a pipeline.

    Attributes:
        axis: mesh axis of the pipeline.
        devices: devices p along it.
        chunks: stages v of the model on each device.
        placement: "loop" puts stage s on device s % p; "v" returns in reverse order.
        layers_per_stage: layers of each of the p v stages; None for equally many.
    """

    axis: Axis
    devices: int
    chunks: int = 1
    placement: StagePlacement = "loop"
    layers_per_stage: tuple[int, ...] | None = None

    @classmethod
    def of(cls, schedule: Schedule, axis: Axis, layers_per_stage: tuple[int, ...] | None = None) -> Stages:
        """The stages of a schedule."""
        each = None if layers_per_stage is None else tuple(layers_per_stage)
        return cls(axis, schedule.devices, schedule.chunks, schedule.placement, each)

    def layers_of(self, layers: int) -> tuple[int, ...]:
        """How many layers of a stack each stage has.

        Raises:
            ValueError: layers that the stages do not divide; a `layers_per_stage` of another length or sum, or below 1.
        """
        stages, each = self.devices * self.chunks, self.layers_per_stage
        if each is None:
            if layers % stages or not layers:
                raise ValueError(
                    f"pp: the layers of a stack must be divisible by its stages; got {layers} layers over {stages} "
                    "stages. Pass layers_per_stage=, or choose another number of layers or stages."
                )
            return (layers // stages,) * stages
        if len(each) != stages or sum(each) != layers or min(each) < 1:
            raise ValueError(
                f"pp: layers_per_stage= must give each of {stages} stages at least one layer, {layers} in all; got "
                f"{each}. Correct layers_per_stage=."
            )
        return each

    def rows(self, layers: int) -> tuple[int, ...]:
        """The natural row of each stored row of dim 0: device by device, chunk by chunk.

        Stages of fewer layers than the largest are padded with -1. Empty for the natural order.

        Raises:
            ValueError: as `layers_of`.
        """
        sizes = self.layers_of(layers)
        starts, longest = (0, *accumulate(sizes)), max(sizes)
        turns = range(0, len(sizes), self.devices)  # the order of "v" is its own inverse
        stages = [t + device_of(t + d, self.devices, self.placement) for d in range(self.devices) for t in turns]
        rows = tuple(starts[s] + i if i < sizes[s] else -1 for s in stages for i in range(longest))
        return () if rows == tuple(range(layers)) else rows

    def arrange(self, plan: Plan) -> Plan:
        """The plan with these stages in its `pp` over this axis.

        Raises:
            ValueError: the plan has no `pp` over this axis.
        """
        (mine,) = stack_plan(self.axis, self).strategies
        if mine.name not in [s.name for s in plan.strategies]:
            raise ValueError(
                f"pp: the plan of a pipeline must have {mine.name}, which assigns layers to stages; got {plan}. "
                f"Pass chain({mine.name}, ...)."
            )
        return Plan(tuple(mine if s.name == mine.name else s for s in plan.strategies))

    def note(self) -> str:
        """Their text in a description of the plan."""
        chunks = f", {self.chunks} chunks in stage order" if self.chunks > 1 else ""
        turning = ", there and back" if chunks and self.placement == "v" else ""
        each = f", stages of {', '.join(map(str, self.layers_per_stage))} layers" if self.layers_per_stage else ""
        return chunks + turning + each


def arranged(plan: Plan, function: Any) -> Plan:
    """The plan with the stages of a GradFn or loss, if it has any."""
    stages = getattr(function, "stages", None)
    return plan if stages is None else stages.arrange(plan)


def stack_plan(axis: Axis, stages: Stages | None) -> Plan:
    """The plan of `pp` for the stages of a schedule; None: one stage per device."""
    axes = axis_names("pp", axis)

    def place(leaf: Leaf) -> Split | str:
        here = stages or Stages(axis, leaf.ways)
        if not in_subtrees(leaf.path, (STACK,)):
            return f"not in the stack {STACK!r}"
        if here.devices != leaf.ways:
            raise ValueError(
                f"pp: the schedule is for {here.devices} stages; {named(axes)} has {leaf.ways} devices. Make the mesh "
                f"with {here.devices} devices there, or the schedule with {leaf.ways} stages."
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

    return strategy("pp", axis, place=place, rank=0)
