"""A schedule as one int32 table, which one program for all devices scans over."""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

import numpy as np

from shardkit.schedules.action import OPS
from shardkit.schedules.grid import Grid
from shardkit.schedules.slots import Slots, coloured

MOVES = tuple(f"{what}_from_{where}" for what in ("input", "cotangent") for where in ("left", "right", "self"))
"""What a device may receive at the end of a tick, and from which neighbor."""
FIELDS = (
    *("forward_on", "forward_stage", "forward_chunk", "forward_microbatch", "forward_input", "forward_saved"),
    *("backward_on", "backward_stage", "backward_chunk", "backward_microbatch", "backward_input", "backward_saved"),
    *("backward_cotangent", "backward_kept"),
    *("weight_on", "weight_stage", "weight_chunk", "weight_microbatch", "weight_kept"),
    *MOVES,
)
"""The columns of a `Table`, each a number for every tick of every device."""


class Segment(NamedTuple):
    """Consecutive ticks with the same kinds of op.

    Attributes:
        ops: the kinds that some device runs, in the order F, B, I, W: "F", "FB", "B", ...; "" if all devices idle.
        begin: the first tick.
        ticks: the number of ticks.
        moves: the fields of `MOVES` that some device receives in one of these ticks.
    """

    ops: str
    begin: int
    ticks: int
    moves: tuple[str, ...]


class Table(NamedTuple):
    """What every device does at every tick, and which slots it reads and writes.

    | field | meaning |
    |---|---|
    | `forward_on`, `weight_on` | 1 if the device runs F, or W, in this tick, else 0 |
    | `backward_on` | 1 for a whole backward, 2 for the input gradient alone, else 0 |
    | `.._stage`, `.._chunk`, `.._microbatch` | stage of the model, chunk of the device, microbatch; 0 if off |
    | `forward_input`, `backward_input` | slot of the stage input that is read |
    | `forward_saved`, `backward_saved` | slot of the residuals that F writes, and that B or I reads |
    | `backward_cotangent` | slot of the cotangent that is read |
    | `backward_kept`, `weight_kept` | slot of the weight-gradient residuals that I writes, and that W reads |
    | `input_from_left`, `.._right`, `.._self` | slot for the output received from device d - 1, d + 1 or d |
    | `cotangent_from_left`, `.._right`, `.._self` | slot for the cotangent received from them |

    Neighbors are those on the ring, and sends are at the end of a tick. A loop has inputs from the left and cotangents
    from the right only. Values that nobody needs go to the last slot of their buffer, the scratch slot.

    Attributes:
        rows: int32 `[ticks, devices, fields]`.
        segments: runs of ticks with the same kinds of op, in order.
        slots: the sizes of the buffers, each without its scratch slot.
    """

    rows: np.ndarray
    segments: tuple[Segment, ...]
    slots: Slots

    def column(self, field: str) -> np.ndarray:
        """One field: int32 `[ticks, devices]`."""
        return self.rows[:, :, FIELDS.index(field)]


def lowered(schedule: Grid, saved: bool) -> Table:
    """The table of a schedule; see `Schedule.table`."""
    slots = coloured(schedule, saved)
    ticks = max(map(len, schedule.rows))
    # Off, and pointing at the scratch slots.
    scratch = {"input": slots.inputs, "saved": slots.saved, "cotangent": slots.cotangents, "kept": slots.kept}
    blank = [next((size for kind, size in scratch.items() if _slot(field) == kind), 0) for field in FIELDS]
    rows = np.tile(np.array(blank, np.int32), (ticks, schedule.devices, 1))
    kinds: list[set[str]] = [set() for _ in range(ticks)]
    for (stage, op, i), tick in schedule.ticks.items():
        kinds[tick].add(op)
        work, device = (stage, i), schedule.device(stage)
        name = {"F": "forward", "W": "weight"}.get(op, "backward")
        values = {
            f"{name}_on": 2 if op == "I" else 1,
            f"{name}_stage": stage,
            f"{name}_chunk": stage // schedule.devices,
            f"{name}_microbatch": i,
            f"{name}_input": slots.input_of.get(work, slots.inputs),
            f"{name}_saved": slots.saved_of.get(work, slots.saved),
            f"{name}_cotangent": slots.cotangent_of.get(work, slots.cotangents),
            f"{name}_kept": slots.kept_of.get(work, slots.kept),
        }
        for field in values.keys() & set(FIELDS):
            rows[tick, device, FIELDS.index(field)] = values[field]
        if received := _received(schedule, slots, stage, op, i):
            field, taker, slot = received
            rows[tick, taker, FIELDS.index(field)] = slot
    segments, begin = [], 0
    for ops, run in groupby("".join(op for op in OPS if op in kind) for kind in kinds):
        length = len(list(run))
        moves = tuple(
            field
            for field in MOVES
            if (rows[begin : begin + length, :, FIELDS.index(field)] != blank[FIELDS.index(field)]).any()
        )
        segments.append(Segment(ops, begin, length, moves))
        begin += length
    return Table(rows, tuple(segments), slots)


def _slot(field: str) -> str:
    """The buffer into which a field points: "input", "saved", "cotangent" or "kept"; another word for none."""
    return field.split("_")[0 if field in MOVES else 1]


def _received(schedule: Grid, slots: Slots, stage: int, op: str, i: int) -> tuple[str, int, int] | None:
    """Where the result of an action is received: the field, the device and the slot; None if nowhere."""
    if op == "F":
        to, what, places, side = stage + 1, "input", slots.input_of, "left"
    else:
        to, what, places, side = stage - 1, "cotangent", slots.cotangent_of, "right"
    if op == "W" or (to, i) not in places:
        return None
    taker = schedule.device(to)
    if schedule.placement == "v":
        side = {1: "left", 0: "self", -1: "right"}[taker - schedule.device(stage)]
    return f"{what}_from_{side}", taker, places[to, i]
