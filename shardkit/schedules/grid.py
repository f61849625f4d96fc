"""The data of a schedule: for each device and each tick, the actions."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from shardkit.schedules.action import Action, Rows, StagePlacement, device_of, walk_cells
from shardkit.schedules.rules import find_needs


@dataclass(frozen=True)
class Grid:
    """The fields of a `Schedule`, which documents them, and properties that follow from them."""

    rows: Rows
    placement: StagePlacement = "loop"
    # The same table from a builder and from a file is equal.
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
        ticks = {}
        # In this order each action comes after its inputs, so that `search` may run the keys one after the other.
        for tick, _, cell in walk_cells(self.rows):
            ticks.update(dict.fromkeys(cell, tick))
        return ticks

    def device(self, stage: int) -> int:
        """The device of a model stage."""
        return device_of(stage, self.devices, self.placement)

    def needs(self, action: Action) -> list[Action]:
        """The actions that must end before this one begins."""
        return find_needs(action, self.devices * self.chunks - 1, self.ticks)
