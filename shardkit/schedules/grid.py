"""The data of a schedule: for each device and each tick, the actions."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from shardkit.schedules.action import Action, Rows, StagePlacement, device_of
from shardkit.schedules.rules import needs


@dataclass(frozen=True)
class Grid:
    """The fields of a `Schedule`, and what follows from them directly; see there."""

    rows: Rows
    placement: StagePlacement = "loop"
    name: str = field(default="schedule", compare=False)

    @property
    def devices(self) -> int:
        """Number p of pipeline devices; the model has p v stages."""
        return len(self.rows)

    @cached_property
    def chunks(self) -> int:
        """Model stages v per device."""
        return max(action.stage for action in self.ticks) // self.devices + 1

    @cached_property
    def microbatches(self) -> int:
        """Microbatches m per step."""
        return max(action.microbatch for action in self.ticks) + 1

    @cached_property
    def ticks(self) -> dict[Action, int]:
        """The tick of every action, in the order of ticks; in a cell the forward comes first."""
        length = max(map(len, self.rows))
        cells = ((t, row[t]) for t in range(length) for row in self.rows if t < len(row))
        return {action: t for t, cell in cells for action in cell}

    def device(self, stage: int) -> int:
        """The device of a model stage."""
        return device_of(stage, self.devices, self.placement)

    def needs(self, action: Action) -> list[Action]:
        """The actions that must end before this one begins."""
        return needs(action, self.devices * self.chunks - 1, self.ticks)
