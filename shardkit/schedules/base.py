"""A schedule as data: what each device does at each tick. Printed, parsed, checked, simulated and run from one table.

In the words of the papers, p is the number of devices along the pipeline axis, each with v chunks of the model, so that
the model has p v stages; m is the number of microbatches per step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, TypeVar

from shardkit._arguments import checks
from shardkit.schedules import rules
from shardkit.schedules.action import Cell, Rows, StagePlacement, device_of, draw_grid, format_cell, parse_cell
from shardkit.schedules.grid import Grid
from shardkit.schedules.simulate import StageCost, Timeline, find_costs, find_least_makespan, simulate
from shardkit.schedules.slots import Slots, assign_slots, find_lives
from shardkit.schedules.table import Table, lower_schedule

F = TypeVar("F", bound=Callable[..., "Schedule"])


class Schedule(Grid):
    """A table of work: the piece and the microbatch of each device in each tick.

    Attributes:
        rows: for each device, for each tick, its actions: none, one, or a forward and then a backward.
        placement: "loop" puts stage s on device s % p; "v" reverses the order for every other chunk, so that with
            two chunks the first and the last stage share device 0.
        name: the name in errors and drawings.
    """

    def order(self, device: int) -> list[str]:
        """The actions of a device in order: `["0F0", "0F1", "0B0", ...]`."""
        (device,) = checks.integers_from_zero("Schedule.order", device=device)
        if device >= self.devices:
            raise ValueError(
                f"Schedule.order: device must be one of {self.devices}; got {device}. Pass 0 to {self.devices - 1}."
            )
        order: list[str] = []
        for cell in self.rows[device]:
            order += map(str, cell)
        return order

    def check(self) -> None:
        """Raises an error unless every action runs once, on the right device and after its inputs.

        Raises:
            ValueError: a missing or repeated action, one on another device, two actions in a tick, B before F, W
                before I, an input that comes too late or never. The message has the grid, with an arrow at the cell.
        """
        rules.check(self.name, self.rows, self.placement)

    def to_csv(self) -> str:
        """The table in PyTorch's notation: a line per device; cells such as `2F0`, `(2F1;2B0)OVERLAP_F_B`, or empty."""
        text = ""
        for row in self.rows:
            text += ",".join(map(format_cell, row)) + "\n"
        return text

    @staticmethod
    def from_csv(text: str) -> Schedule:
        """Reads a schedule from a text in the notation of `to_csv`.

        A cell keeps its column, or moves right until its inputs are there. So a file may leave out idle ticks.

        Args:
            text: one line per device; the columns are ticks, an empty cell is an idle tick. A byte-order mark and blank
                lines before the first device are skipped.

        Returns:
            A checked schedule, with the placement that fits most of its actions.

        Raises:
            ValueError: a cell that is not an action, or as `check`.
        """
        if not isinstance(text, str):
            raise TypeError(f"from_csv: text must be a string; got a {type(text).__name__}. Pass the result of to_csv.")
        # Spreadsheets put a byte-order mark before the first cell, which would then be no action.
        lines = text.removeprefix("\ufeff").rstrip().splitlines()
        while lines and not lines[0].strip():
            del lines[0]
        rows = tuple(_parse_line(device, line) for device, line in enumerate(lines))
        placement = _find_placement(rows)
        # Not `rules.check`: in a file without idle ticks inputs come too late for the columns as they stand.
        # `find_ticks` moves the cells to the right until they do not.
        rules.check_cells("from_csv", rows, placement)
        return Schedule(rules.find_ticks("from_csv", rows), placement, "from_csv")

    def simulate(
        self,
        forward: StageCost = 1,
        backward: StageCost = 2,
        input_grad: StageCost | None = None,
        weight_grad: StageCost | None = None,
        communication: float = 0,
        *,
        overlapped: float | None = None,
        synchronous: bool = False,
    ) -> Timeline:
        """Simulates a step: its time, the idle time of devices, and the microbatches in flight.

        Args:
            forward: time of one microbatch's forward through all chunks of a device, in any unit; or, if stages differ,
                a sequence of p v numbers, one for each stage alone. The next three may be sequences too.
            backward: time of its whole backward.
            input_grad: time of the part I; None: half of `backward`, or `backward - weight_grad`.
            weight_grad: time of the part W; None: `backward - input_grad`.
            communication: time from the end of an action until its result is on another device.
            overlapped: time of a forward and a backward that share a cell and run together; None: one after the other.
            synchronous: False: each device begins an action as soon as it is free and the inputs are there. True: all
                devices run one program, and the sends at the end of a tick synchronize them: a tick lasts as long as
                its longest cell, plus `communication`.

        Returns:
            A Timeline.

        Raises:
            ValueError: a cost below 0; forward, backward or overlapped of 0; a sequence of another length.
        """
        return simulate(self, forward, backward, input_grad, weight_grad, communication, overlapped, synchronous)

    def least_makespan(
        self,
        forward: StageCost = 1,
        backward: StageCost = 2,
        input_grad: StageCost | None = None,
        weight_grad: StageCost | None = None,
        communication: float = 0,
        *,
        memory: float | None = None,
    ) -> float:
        """A lower bound of the makespan, for every schedule of these devices, microbatches and chunks, in a loop or a
        V.

        It is the largest of three times: the work of a device, after the first microbatch has come through the stages
        before it; the way of one microbatch through all stages and back; and, with a memory cap, the sum of the times
        that microbatches are in flight on a device, divided by the number of microbatches that may be there at once.

        Args:
            forward, backward, input_grad, weight_grad, communication: costs, as for `simulate`.
            memory: the most microbatches in flight on a device; a chunk counts 1/v. None: any number.

        Raises:
            ValueError: costs as for `simulate`, or a memory that is not positive.

        Example:
            >>> schedule = sk.schedules.zero_bubble_v(8, 32)
            >>> schedule.simulate().makespan, schedule.least_makespan(), schedule.least_makespan(memory=1)
            (99.5, 99.5, 288.0)
        """
        p = self.devices
        v = self.chunks
        costs = find_costs("least_makespan", p * v, v, forward, backward, input_grad, weight_grad, communication)
        if memory is not None:
            (memory,) = checks.positive("least_makespan", memory=memory)
        return find_least_makespan(p, self.microbatches, v, costs, memory)

    def forward(self) -> Schedule:
        """The schedule of an evaluation step: the forwards alone, on each device in the same order and as early as
        possible."""
        orders = []
        for row in self.rows:
            order: list[Cell] = []
            for cell in row:
                # The forward of a pair comes first.
                if cell and cell[0].op == "F":
                    order.append(cell[:1])
            orders.append(order)
        # Timed anew: at the ticks of the training table each forward would still wait where a backward stood.
        return build_schedule(self.name, orders, self.microbatches, self.placement)

    def slots(self, saved: bool = False) -> Slots:
        """Counts the buffers a device needs for stage inputs, residuals and cotangents, and assigns them.

        Args:
            saved: F saves the residuals of B; False: B recomputes them from the stage input.
        """
        return assign_slots(self, find_lives(self, saved))

    def table(self, saved: bool = False, spread: bool = False) -> Table:
        """The int32 table that one program for all devices scans over; `saved` as for `slots`.

        With `spread`, where all devices run embedding and head together, its segments may differ in these two as well.
        """
        return lower_schedule(self, saved, spread)

    def __str__(self) -> str:
        return draw_grid(self.rows)


def _parse_line(device: int, line: str) -> tuple[Cell, ...]:
    """The cells of a line of a CSV file."""
    row = []
    for tick, text in enumerate(line.split(",")):
        cell = parse_cell(text.strip())
        if cell is None:
            raise ValueError(
                "from_csv: a cell must be empty, an action such as 2F0, or a pair such as (2F1;2B0)OVERLAP_F_B; "
                f"got {text.strip()!r} on device {device} at tick {tick}. Write one."
            )
        row.append(cell)
    return tuple(row)


def _find_placement(rows: Rows) -> StagePlacement:
    """The placement that fits most actions, so that one wrong cell does not change it; "loop" if both fit equally."""
    loop = _count_at_home(rows, "loop")
    turned = _count_at_home(rows, "v")
    return "v" if turned > loop else "loop"


def _count_at_home(rows: Rows, placement: StagePlacement) -> int:
    """How many actions are on the device that has their stage under this placement."""
    count = 0
    for device, row in enumerate(rows):
        for cell in row:
            for action in cell:
                if device_of(action.stage, len(rows), placement) == device:
                    count += 1
    return count


def build_schedule(
    name: str, orders: Iterable[Sequence[Cell]], microbatches: int, placement: StagePlacement = "loop"
) -> Schedule:
    """The schedule in which each device follows its order and begins each cell as soon as its inputs are there.

    Actions of microbatches from `microbatches` on are left out, so that an order may be written for more.

    Worked example: the orders 0F0 0F1 0B0 0B1 and 1F0 1B0 1F1 1B1 become

        tick      0   1   2   3   4   5
        device 0  0F0 0F1 .   0B0 .   0B1
        device 1  .   1F0 1B0 1F1 1B1 .
    """
    rows = []
    for order in orders:
        row = []
        for cell in order:
            actions = tuple(action for action in cell if action.microbatch < microbatches)
            if actions:
                row.append(actions)
        rows.append(row)
    table = rules.find_ticks(name, rows)
    # On one device a V is a loop. Under one name the two tables are also equal in a comparison.
    return Schedule(table, placement if len(table) > 1 else "loop", name)


def builder(build: F) -> F:
    """Refuses `stages=`, because a device may have several stages."""

    @wraps(build)
    def check_and_build(*args: Any, **options: Any) -> Schedule:
        if "stages" in options:
            stages = options["stages"]
            raise TypeError(
                f"{build.__name__}: a schedule is made for devices, which may have several stages each; got "
                f"stages={stages!r}. Pass devices={stages!r}."
            )
        return build(*args, **options)

    return check_and_build  # type: ignore[return-value]


def check_sizes(where: str, **values: int) -> tuple[int, ...]:
    """The sizes of a schedule as whole numbers from 1, of at most a million actions together."""
    sizes = checks.integers_from_one(where, **values)
    if math.prod(sizes) > 10**6:
        got = checks.format_sizes(zip(values, sizes, strict=True))
        raise ValueError(f"{where}: a schedule must have a million pieces of work at most; got {got}. Lower one.")
    return sizes
