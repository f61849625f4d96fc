"""A schedule as data: what each device does at each tick. Printed, parsed, checked, simulated and run from one table.

In the words of the papers, p is the number of devices along the pipeline axis, each with v chunks of the model, so that
the model has p v stages; m is the number of microbatches per step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, TypeVar, get_args

from shardkit._arguments import checks
from shardkit.schedules import rules
from shardkit.schedules.action import Cell, Rows, StagePlacement, device_of, drawn, parsed, written
from shardkit.schedules.grid import Grid
from shardkit.schedules.simulate import Each, Timeline, costs_of, least, simulated
from shardkit.schedules.slots import Slots, coloured, lives
from shardkit.schedules.table import Table, lowered

F = TypeVar("F", bound=Callable[..., "Schedule"])


class Schedule(Grid):
    """When each device runs which piece of which microbatch.

    Attributes:
        rows: for each device, for each tick, the actions of that tick: none, one, or a forward and then a backward.
        placement: "loop" puts stage s on device s % p; "v" reverses the order for every other chunk, so that with
            two chunks the first and the last stage share device 0.
        name: the name in errors and drawings.
    """

    def order(self, device: int) -> list[str]:
        """The actions of a device in order: `["0F0", "0F1", "0B0", ...]`."""
        [device] = checks.count("Schedule.order", device=device)
        if device >= self.devices:
            raise ValueError(
                f"Schedule.order: device must be one of {self.devices}; got {device}. Pass 0 to {self.devices - 1}."
            )
        return [str(action) for cell in self.rows[device] for action in cell]

    def check(self) -> None:
        """Refuses a table that does not run every action once, on the right device and after its inputs.

        Raises:
            ValueError: an action that is missing or repeated, on another device, two actions in a tick, B before F, W
                before I, an input that comes too late or never. The message has the grid, with an arrow at the cell.
        """
        rules.check(self.name, self.rows, self.placement)

    def to_csv(self) -> str:
        """The table in PyTorch's notation: a line per device; cells such as `2F0`, `(2F1;2B0)OVERLAP_F_B`, or empty."""
        return "".join(",".join(map(written, row)) + "\n" for row in self.rows)

    @staticmethod
    def from_csv(text: str) -> Schedule:
        """The schedule in a text in the notation of `to_csv`.

        A cell keeps its column, or moves right until its inputs are there: a file without idle ticks is an order.

        Args:
            text: one line per device; the columns are ticks, an empty cell is an idle tick. A byte-order mark and blank
                lines before the first device are skipped.

        Returns:
            A checked schedule, with the placement that fits most of its actions.

        Raises:
            ValueError: a cell that is no action, or as `check`.
        """
        if not isinstance(text, str):
            raise TypeError(f"from_csv: text must be a string; got a {type(text).__name__}. Pass what to_csv returned.")
        lines = text.removeprefix("\ufeff").rstrip().splitlines()
        while lines and not lines[0].strip():
            del lines[0]
        cells = [[parsed(cell.strip()) for cell in line.split(",")] for line in lines]
        for device, row in enumerate(cells):
            if None in row:
                tick = row.index(None)
                raise ValueError(
                    "from_csv: a cell must be empty, an action such as 2F0, or a pair such as (2F1;2B0)OVERLAP_F_B; "
                    f"got {lines[device].split(',')[tick].strip()!r} on device {device} at tick {tick}. Write one."
                )
        rows = tuple(tuple(cell or () for cell in row) for row in cells)
        placement = _placement(rows)
        rules.check_cells("from_csv", rows, placement)
        return Schedule(rules.times("from_csv", rows), placement, "from_csv")

    def simulate(
        self,
        forward: Each = 1,
        backward: Each = 2,
        input_grad: Each | None = None,
        weight_grad: Each | None = None,
        communication: float = 0,
        *,
        overlapped: float | None = None,
        synchronous: bool = False,
    ) -> Timeline:
        """How long a step takes, how long devices idle and how many microbatches they have in flight.

        Args:
            forward: time of one microbatch's forward through all chunks of a device, in any unit; or a sequence with
                the time of each stage alone, p v numbers, where stages differ. So may the next three.
            backward: time of its whole backward.
            input_grad: time of the part I; None: half of `backward`, or `backward - weight_grad`.
            weight_grad: time of the part W; None: `backward - input_grad`.
            communication: time from the end of an action until its result is on another device.
            overlapped: time of a forward and a backward that share a cell and run together; None: one after the other.
            synchronous: False: each device begins an action as soon as the device is free and the inputs are there.
                True: as one program for all devices runs it, where the sends at the end of a tick synchronize the
                devices: a tick lasts as long as its longest cell, plus `communication`.

        Returns:
            A Timeline.

        Raises:
            ValueError: a cost below 0; forward, backward or overlapped of 0; a sequence of another length.
        """
        return simulated(self, forward, backward, input_grad, weight_grad, communication, overlapped, synchronous)

    def least_makespan(
        self,
        forward: Each = 1,
        backward: Each = 2,
        input_grad: Each | None = None,
        weight_grad: Each | None = None,
        communication: float = 0,
        *,
        memory: float | None = None,
    ) -> float:
        """What no schedule of as many devices, microbatches and chunks goes below, in a loop or along a V.

        The largest of three: the work of a device, after the first microbatch has come through the stages before it;
        one microbatch through all stages and back; and, with a memory cap, the time for which microbatches are in
        flight on a device, over how many may be there at once.

        Args:
            forward, backward, input_grad, weight_grad, communication: costs, as for `simulate`.
            memory: the most microbatches in flight on a device, where a chunk counts 1/v; None: any number.

        Raises:
            ValueError: costs as `simulate` refuses them, or a memory that is not positive.

        Example:
            >>> schedule = sk.schedules.zero_bubble_v(8, 32)
            >>> schedule.simulate().makespan, schedule.least_makespan(), schedule.least_makespan(memory=1)
            (99.5, 99.5, 288.0)
        """
        p, v = self.devices, self.chunks
        costs = costs_of("least_makespan", p * v, v, forward, backward, input_grad, weight_grad, communication)
        if memory is not None:
            [memory] = checks.positive("least_makespan", memory=memory)
        return least(p, self.microbatches, v, costs, memory)

    def forward(self) -> Schedule:
        """The forwards alone, on each device in the same order and as early as possible: a step of evaluation."""
        orders = [[(action,) for cell in row for action in cell if action.op == "F"] for row in self.rows]
        return scheduled(self.name, orders, self.microbatches, self.placement)

    def slots(self, saved: bool = False) -> Slots:
        """The number of buffers that a device needs for stage inputs, residuals and cotangents, and who uses which.

        Args:
            saved: F saves the residuals of B; False: B recomputes them from the stage input.
        """
        return coloured(self, lives(self, saved))

    def table(self, saved: bool = False, spread: bool = False) -> Table:
        """The int32 table that one program for all devices scans over; `saved` as for `slots`.

        With `spread` its segments differ too in what all devices run together, embedding and head.
        """
        return lowered(self, saved, spread)

    def __str__(self) -> str:
        return drawn(self.rows)


def _placement(rows: Rows) -> StagePlacement:
    """The placement of most actions, so that one wrong cell does not change it; "loop" if they are equally many."""
    placed = [(action.stage, device) for device, row in enumerate(rows) for cell in row for action in cell]
    loop, turned = (
        sum(device_of(stage, len(rows), placement) == device for stage, device in placed)
        for placement in get_args(StagePlacement)
    )
    return "v" if turned > loop else "loop"


def scheduled(
    name: str, orders: Iterable[Sequence[Cell]], microbatches: int, placement: StagePlacement = "loop"
) -> Schedule:
    """The schedule in which each device follows its order and begins each cell as soon as its inputs are there.

    Actions of microbatches from `microbatches` on are left out, so that an order may be written for more.
    """
    kept = [[tuple(a for a in cell if a.microbatch < microbatches) for cell in order] for order in orders]
    rows = rules.times(name, [[cell for cell in order if cell] for order in kept])
    return Schedule(rows, placement if len(rows) > 1 else "loop", name)


def builder(build: F) -> F:
    """Refuses `stages=`, because a device may have several stages."""

    @wraps(build)
    def checked(*args: Any, **sizes: Any) -> Schedule:
        if "stages" in sizes:
            given = sizes["stages"]
            raise TypeError(
                f"{build.__name__}: a schedule is made for devices, which may have several stages each; got "
                f"stages={given!r}. Pass devices={given!r}."
            )
        return build(*args, **sizes)

    return checked  # type: ignore[return-value]


def sizes(where: str, **values: int) -> tuple[int, ...]:
    """The sizes of a schedule as whole numbers from 1, of at most a million actions together."""
    found = checks.whole(where, **values)
    if math.prod(found) > 10**6:
        given = checks.sized(zip(values, found, strict=True))
        raise ValueError(f"{where}: a schedule must have a million pieces of work at most; got {given}. Lower one.")
    return found
