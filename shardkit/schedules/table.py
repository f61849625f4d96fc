"""A schedule as one int32 table, which a program that is the same on every device scans over."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardkit.schedules.action import OPS
from shardkit.schedules.slots import Slots

if TYPE_CHECKING:
    from shardkit.schedules.base import Schedule

MOVES = tuple(f"{what}_from_{where}" for what in ("input", "cotangent") for where in ("left", "right", "self"))
FIELDS = (
    *("forward_on", "forward_stage", "forward_chunk", "forward_microbatch", "forward_input", "forward_saved"),
    *("backward_on", "backward_stage", "backward_chunk", "backward_microbatch", "backward_input", "backward_saved"),
    *("backward_cotangent", "backward_kept"),
    *("weight_on", "weight_stage", "weight_chunk", "weight_microbatch", "weight_kept"),
    *MOVES,
)


class Segment(NamedTuple):
    """Ticks one after the other in which some device does each of the same kinds of op.

    Attributes:
        ops: the kinds, in the order F, B, I, W: "F", "FB", "B", ...; empty for ticks in which all devices idle.
        begin: the first tick.
        ticks: how many.
        moves: the fields of `MOVES` that some device receives in one of these ticks.
    """

    ops: str
    begin: int
    ticks: int
    moves: tuple[str, ...]


class Table(NamedTuple):
    """What every device does at every tick, and where it reads and writes.

    | field | meaning |
    |---|---|
    | `forward_on`, `weight_on` | 1 where the device does F, or W, in this tick, else 0 |
    | `backward_on` | 1 for a whole backward, 2 for the input gradient alone, else 0 |
    | `.._stage`, `.._chunk`, `.._microbatch` | of what: stage of the model, chunk of the device; 0 where off |
    | `forward_input`, `backward_input` | slot of the stage input that is read |
    | `forward_saved`, `backward_saved` | slot in which F leaves, and B or I finds, what F saves |
    | `backward_cotangent` | slot of the cotangent that is read |
    | `backward_kept`, `weight_kept` | slot in which I leaves, and W finds, what W needs |
    | `input_from_left`, `.._right`, `.._self` | slot for the output that device d - 1, d + 1 or d itself computed |
    | `cotangent_from_left`, `.._right`, `.._self` | slot for the cotangent that they computed |

    Neighbours are those on the ring, and moves are at the end of a tick. A loop has inputs from the left and cotangents
    from the right only. Whatever is not wanted goes to the last slot of its buffer, the rubbish slot.

    Attributes:
        rows: int32 `[ticks, devices, fields]`.
        segments: runs of ticks with the same kinds of op.
        slots: the sizes of the buffers, each without its rubbish slot.
    """

    rows: np.ndarray
    segments: tuple[Segment, ...]
    slots: Slots

    def column(self, field: str) -> np.ndarray:
        """One field: int32 `[ticks, devices]`."""
        return self.rows[:, :, FIELDS.index(field)]


def lowered(schedule: Schedule, saved: bool) -> Table:
    """The table of a schedule; see `Schedule.table`."""
    slots = schedule.slots(saved)
    ticks = max(map(len, schedule.rows))
    # Off and aimed at the rubbish slots, until an action says otherwise.
    rubbish = {"input": slots.inputs, "saved": slots.saved, "cotangent": slots.cotangents, "kept": slots.kept}
    blank = [next((size for kind, size in rubbish.items() if _slot(field) == kind), 0) for field in FIELDS]
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
    """The buffer into which a field points: "input", "cotangent", "kept", or another word for none."""
    return field.split("_")[0 if field in MOVES else 1]


def _received(schedule: Schedule, slots: Slots, stage: int, op: str, i: int) -> tuple[str, int, int] | None:
    """Who receives what an action hands on: the field, the device and the slot; None where nobody does."""
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
