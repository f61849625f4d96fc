"""The stages of a schedule: which device stores which layers of a stack, and in which order."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

from shardkit._arguments.checks import Axis
from shardkit.schedules.action import StagePlacement, device_of
from shardkit.schedules.base import Schedule


class Stages(NamedTuple):
    """How the layers of a stack are assigned to the devices of a pipeline.

    Attributes:
        axis: mesh axis of the pipeline.
        devices: number p of devices along it; None: as many as the mesh has.
        chunks: stages v of the model on each device.
        placement: "loop" puts stage s on device s % p; "v" returns in reverse order.
        layers_per_stage: layers of each of the p v stages; None for equally many.
        spread: which leaves outside the stack are split over the axis, in the form that `pipeline` takes; None: none.
        stack: the entry of the parameters that has the layers.
    """

    axis: Axis
    devices: int | None = None
    chunks: int = 1
    placement: StagePlacement = "loop"
    layers_per_stage: tuple[int, ...] | None = None
    spread: Any = None
    stack: str = "layers"

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        axis: Axis,
        layers_per_stage: tuple[int, ...] | None = None,
        spread: Any = None,
        stack: str = "layers",
    ) -> Stages:
        """The stages of a schedule."""
        counts = None
        if layers_per_stage is not None:
            counts = tuple(layers_per_stage)
        return cls(axis, schedule.devices, schedule.chunks, schedule.placement, counts, spread, stack)

    def layers_of(self, layers: int) -> tuple[int, ...]:
        """How many layers of a stack each stage has.

        Raises:
            ValueError: layers that the stages do not divide; a `layers_per_stage` of another length or sum, or below 1.
        """
        assert self.devices is not None  # those of a mesh
        stages = self.devices * self.chunks
        counts = self.layers_per_stage
        if counts is None:
            if layers % stages or not layers:
                raise ValueError(
                    f"pp: the layers of a stack must be divisible by its stages; got {layers} layers over {stages} "
                    "stages. Pass layers_per_stage=, or choose another number of layers or stages."
                )
            return (layers // stages,) * stages
        if len(counts) != stages or sum(counts) != layers or min(counts) < 1:
            raise ValueError(
                f"pp: layers_per_stage= must give each of {stages} stages at least one layer, {layers} in all; got "
                f"{counts}. Pass {stages} numbers that add up to {layers}."
            )
        return counts

    def rows(self, layers: int) -> tuple[int, ...]:
        """The original row of each stored row of dim 0: device by device, chunk by chunk.

        Stages of fewer layers than the largest are padded with -1. Empty for the original order.

        Worked example: two devices with two chunks each, in a loop, and stages of 1, 2, 2 and 2 layers, which begin at
        rows 0, 1, 3 and 5. Device 0 has stages 0 and 2, device 1 stages 1 and 3: 0 -1, 3 4, 1 2, 5 6.
        """
        sizes = self.layers_of(layers)
        starts = (0, *accumulate(sizes))
        longest = max(sizes)
        p = len(sizes) // self.chunks
        rows: list[int] = []
        for device in range(p):
            for first in range(0, len(sizes), p):  # the stages of a chunk begin with this one
                # The order of "v" is its own inverse: this is the stage of the chunk that the device has.
                stage = first + device_of(first + device, p, self.placement)
                rows += range(starts[stage], starts[stage] + sizes[stage])
                rows += [-1] * (longest - sizes[stage])
        # With () every reader leaves the stack as it is, and no rows are moved.
        if rows == list(range(layers)):
            return ()
        return tuple(rows)

    def note(self) -> str:
        """The text about the stages in a description of the plan."""
        notes = []
        if self.chunks > 1:
            notes.append(f", {self.chunks} chunks in stage order")
            if self.placement == "v":
                notes.append(", placed as a V")
        if self.layers_per_stage:
            notes.append(f", stages of {', '.join(map(str, self.layers_per_stage))} layers")
        if self.spread is not None:
            notes.append(", embedding and head spread")
        return "".join(notes)
