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
        devices: devices p along it; None: those of the mesh, whatever their number.
        chunks: stages v of the model on each device.
        placement: "loop" puts stage s on device s % p; "v" returns in reverse order.
        layers_per_stage: layers of each of the p v stages; None for equally many.
        spread: which leaves beside the stack are split over the axis, as `pipeline` takes it; None for none.
    """

    axis: Axis
    devices: int | None = None
    chunks: int = 1
    placement: StagePlacement = "loop"
    layers_per_stage: tuple[int, ...] | None = None
    spread: Any = None

    @classmethod
    def of(
        cls, schedule: Schedule, axis: Axis, layers_per_stage: tuple[int, ...] | None = None, spread: Any = None
    ) -> Stages:
        """The stages of a schedule."""
        each = None if layers_per_stage is None else tuple(layers_per_stage)
        return cls(axis, schedule.devices, schedule.chunks, schedule.placement, each, spread)

    def layers_of(self, layers: int) -> tuple[int, ...]:
        """How many layers of a stack each stage has.

        Raises:
            ValueError: layers that the stages do not divide; a `layers_per_stage` of another length or sum, or below 1.
        """
        assert self.devices is not None  # those of a mesh
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
                f"{each}. Pass {stages} numbers that add up to {layers}."
            )
        return each

    def rows(self, layers: int) -> tuple[int, ...]:
        """The original row of each stored row of dim 0: device by device, chunk by chunk.

        Stages of fewer layers than the largest are padded with -1. Empty for the original order.
        """
        sizes = self.layers_of(layers)
        starts, longest, p = (0, *accumulate(sizes)), max(sizes), len(sizes) // self.chunks
        turns = range(0, len(sizes), p)  # the order of "v" is its own inverse
        stages = [t + device_of(t + d, p, self.placement) for d in range(p) for t in turns]
        rows = tuple(starts[s] + i if i < sizes[s] else -1 for s in stages for i in range(longest))
        return () if rows == tuple(range(layers)) else rows

    def note(self) -> str:
        """Their text in a description of the plan."""
        chunks = f", {self.chunks} chunks in stage order" if self.chunks > 1 else ""
        turning = ", placed as a V" if chunks and self.placement == "v" else ""
        each = f", stages of {', '.join(map(str, self.layers_per_stage))} layers" if self.layers_per_stage else ""
        spread = ", embedding and head spread" if self.spread is not None else ""
        return chunks + turning + each + spread
