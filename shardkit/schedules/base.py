"""A schedule as data: what each device does at each tick. Printed, parsed, checked, simulated and run from one table.

The words of the papers: p stages are the devices of the pipe axis, each with v chunks of the model, so that the model
has p v stages; m microbatches are in a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import get_args

from shardkit.cost import _check
from shardkit.schedules import rules
from shardkit.schedules.action import Action, Cell, Rows, StagePlacement, device_of, drawn, parsed, written
from shardkit.schedules.simulate import Timeline, simulated
from shardkit.schedules.slots import Slots, coloured
from shardkit.schedules.table import Table, lowered


@dataclass(frozen=True)
class Schedule:
    """When each device does which piece of which microbatch.

    Attributes:
        rows: for each device, for each tick, the actions of that tick: none, one, or a forward and then a backward.
        placement: "loop" puts stage s on device s % p; "v" there and back again, so that the first and the last stage
            share device 0 where there are two chunks.
        name: what errors and drawings call it.
    """

    rows: Rows
    placement: StagePlacement = "loop"
    name: str = field(default="schedule", compare=False)

    @property
    def devices(self) -> int:
        """Devices p of the pipe axis."""
        return len(self.rows)

    @cached_property
    def chunks(self) -> int:
        """Stages v of the model on each device."""
        return max(action.stage for action in self.ticks) // self.devices + 1

    @cached_property
    def microbatches(self) -> int:
        """Microbatches m in a step."""
        return max(action.microbatch for action in self.ticks) + 1

    @cached_property
    def ticks(self) -> dict[Action, int]:
        """The tick of every action, in the order of ticks; in a cell the forward comes first."""
        length = max(map(len, self.rows))
        cells = ((t, row[t]) for t in range(length) for row in self.rows if t < len(row))
        return {action: t for t, cell in cells for action in cell}

    def device(self, stage: int) -> int:
        """The device that holds a stage of the model."""
        return device_of(stage, self.devices, self.placement)

    def needs(self, action: Action) -> list[Action]:
        """The actions that must be over before this one begins."""
        return rules.needs(action, self.devices * self.chunks - 1, self.ticks)

    def order(self, device: int) -> list[str]:
        """What a device does, one after the other: `["0F0", "0F1", "0B0", ...]`."""
        [device] = _check.count("Schedule.order", device=device)
        if device >= self.devices:
            raise ValueError(
                f"Schedule.order: device must be one of {self.devices}; got {device}. Choose 0 to {self.devices - 1}."
            )
        return [str(action) for cell in self.rows[device] for action in cell]

    def check(self) -> None:
        """Refuses a table that does not do every piece of work once, in the right place and after its inputs.

        Raises:
            ValueError: a missing action or one too many, a wrong device, two actions at a tick, B before F, W before I,
                an input that comes too late or never. The message has the grid, with an arrow at the cell.
        """
        rules.check(self.name, self.rows, self.placement)

    def to_csv(self) -> str:
        """The table in PyTorch's notation: a line a device, a cell a tick, `2F0`, `(2F1;2B0)OVERLAP_F_B` or nothing."""
        return "".join(",".join(map(written, row)) + "\n" for row in self.rows)

    @staticmethod
    def from_csv(text: str) -> Schedule:
        """The schedule that a text in the notation of `to_csv` holds.

        A cell keeps its column, or moves right until its inputs are there: a file without idle ticks is an order.

        Args:
            text: one line a device; the columns are ticks, an empty cell is an idle one. A byte-order mark and blank
                lines before the first device are skipped.

        Returns:
            A checked schedule; its placement is the one that fits more of its actions.

        Raises:
            ValueError: a cell that is no action, or as `check`.
        """
        if not isinstance(text, str):
            raise TypeError(f"from_csv: text must be a string; got a {type(text).__name__}. Pass what to_csv made.")
        lines = text.removeprefix("\ufeff").rstrip().splitlines()
        while lines and not lines[0].strip():
            del lines[0]
        cells = [[parsed(cell.strip()) for cell in line.split(",")] for line in lines]
        for device, row in enumerate(cells):
            if None in row:
                tick = row.index(None)
                raise ValueError(
                    "from_csv: a cell must be empty, an action such as 2F0, or a pair such as (2F1;2B0)OVERLAP_F_B; "
                    f"got {lines[device].split(',')[tick].strip()!r} on device {device} at tick {tick}. Correct it."
                )
        rows = tuple(tuple(cell or () for cell in row) for row in cells)
        placement = _placement(rows)
        rules.check_cells("from_csv", rows, placement)
        return Schedule(rules.times("from_csv", rows), placement, "from_csv")

    def simulate(
        self,
        forward: float = 1,
        backward: float = 2,
        input_grad: float | None = None,
        weight_grad: float | None = None,
        communication: float = 0,
        *,
        overlapped: float | None = None,
        synchronous: bool = False,
    ) -> Timeline:
        """How long a step takes, how long devices idle in it and how many microbatches they hold.

        Args:
            forward: time of one microbatch's forward on one device's whole share of layers, in any unit.
            backward: time of its whole backward.
            input_grad: time of the part I; None: half of `backward`, or what `weight_grad` leaves of it.
            weight_grad: time of the part W; None: what I leaves of `backward`.
            communication: time from the end of an action until its result is on another device.
            overlapped: time of a forward and a backward that share a cell and run together; None: one after the other.
            synchronous: False: each device begins an action as soon as it is free and the inputs are there. True: as
                one program for all devices runs it, where the moves at the end of a tick hold up every device: a tick
                lasts as long as its longest cell, and `communication` after it.

        Returns:
            A Timeline.

        Raises:
            ValueError: a cost that is negative; forward, backward or overlapped that is not positive.
        """
        return simulated(self, forward, backward, input_grad, weight_grad, communication, overlapped, synchronous)

    def forward(self) -> Schedule:
        """The forwards alone, each device in the same order and as soon as it can: a step of evaluation."""
        orders = [[(action,) for cell in row for action in cell if action.op == "F"] for row in self.rows]
        return scheduled(self.name, orders, self.microbatches, self.placement)

    def slots(self, saved: bool = False) -> Slots:
        """How many stage inputs and cotangents a device holds at once, and in which slot each of them lies.

        Args:
            saved: F saves what B needs; otherwise B begins again with the stage input.
        """
        return coloured(self, saved)

    def table(self, saved: bool = False) -> Table:
        """The int32 table that one program for all devices scans over; `saved` as for `slots`."""
        return lowered(self, saved)

    def __str__(self) -> str:
        return drawn(self.rows)


def _placement(rows: Rows) -> StagePlacement:
    """Where most of the actions are at home, so that one wrong cell does not turn the others; "loop" in doubt."""
    placed = [(action.stage, device) for device, row in enumerate(rows) for cell in row for action in cell]
    loop, turned = (
        sum(device_of(stage, len(rows), placement) == device for stage, device in placed)
        for placement in get_args(StagePlacement)
    )
    return "v" if turned > loop else "loop"


def scheduled(
    name: str, orders: Iterable[Sequence[Cell]], microbatches: int, placement: StagePlacement = "loop"
) -> Schedule:
    """The schedule in which each device keeps to its order and begins each cell as soon as its inputs are there.

    Actions of microbatches from `microbatches` on are left out: an order for more of them stays an order.
    """
    kept = [[tuple(a for a in cell if a.microbatch < microbatches) for cell in order] for order in orders]
    rows = rules.times(name, [[cell for cell in order if cell] for order in kept])
    return Schedule(rows, placement if len(rows) > 1 else "loop", name)
