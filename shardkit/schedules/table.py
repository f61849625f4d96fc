"""A schedule as one int32 table, which one program for all devices scans over."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from shardkit.schedules.action import OPS
from shardkit.schedules.grid import Grid
from shardkit.schedules.slots import Lives, Slots, coloured, lives

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
ENDS = ("embed", "head", "embed_gradient")
"""What all devices do together where embedding and head are spread over them: the columns of `Table.ends`."""


class Segment(NamedTuple):
    """Consecutive ticks with the same kinds of op.

    Attributes:
        ops: the kinds that some device runs, in the order F, B, I, W: "F", "FB", "B", ...; "" if all devices idle.
        begin: the first tick.
        ticks: the number of ticks.
        moves: the fields of `MOVES` that some device receives in one of these ticks.
        ends: what all devices run together in each of these ticks, of `ENDS`; () where nothing is spread over them.
    """

    ops: str
    begin: int
    ticks: int
    moves: tuple[str, ...]
    ends: tuple[str, ...]


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
    from the right only. A value that nobody needs goes to a slot that is free at that tick. Where none is, what moves
    points after the last slot and is dropped, and F and I write to a slot that is there for that alone.

    Attributes:
        rows: int32 `[ticks, devices, fields]`.
        segments: runs of ticks with the same kinds of op, in order.
        slots: how many slots values need, and who uses which.
        buffers: how many slots each buffer has, by the names of `Slots`.
        crowded: the buffers in which at some tick a device has no slot free.
        ends: int32 `[ticks, 3]`, by `ENDS`: the microbatch that enters the first stage, leaves the last one (on its way
            back, where there are backward passes), and whose backward pass leaves the first one; -1 for none.
    """

    rows: np.ndarray
    segments: tuple[Segment, ...]
    slots: Slots
    buffers: dict[str, int]
    crowded: frozenset[str]
    ends: np.ndarray

    def column(self, field: str) -> np.ndarray:
        """One field: int32 `[ticks, devices]`."""
        return self.rows[:, :, FIELDS.index(field)]


def lowered(schedule: Grid, saved: bool, spread: bool) -> Table:
    """The table of a schedule; see `Schedule.table`."""
    needed = lives(schedule, saved)
    slots = coloured(schedule, needed)
    ticks = max(map(len, schedule.rows))
    blank = [_NOWHERE if buffer_of(field) else 0 for field in FIELDS]
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
            f"{name}_input": slots.input_of.get(work, _NOWHERE),
            f"{name}_saved": slots.saved_of.get(work, _NOWHERE),
            f"{name}_cotangent": slots.cotangent_of.get(work, _NOWHERE),
            f"{name}_kept": slots.kept_of.get(work, _NOWHERE),
        }
        for field in values.keys() & set(FIELDS):
            rows[tick, device, FIELDS.index(field)] = values[field]
        if received := _received(schedule, slots, stage, op, i):
            field, taker, slot = received
            rows[tick, taker, FIELDS.index(field)] = slot
    segments, begin, ends = [], 0, _ends(schedule, ticks)
    together = [tuple(end for end, i in zip(ENDS, tick, strict=True) if spread and i >= 0) for tick in ends]
    ops_of = ["".join(op for op in OPS if op in kind) for kind in kinds]
    for (ops, here), run in groupby(zip(ops_of, together, strict=True)):
        length = len(list(run))
        moves = tuple(
            field for field in MOVES if (rows[begin : begin + length, :, FIELDS.index(field)] != _NOWHERE).any()
        )
        segments.append(Segment(ops, begin, length, moves, here))
        begin += length
    crowded = _written_in_vain(rows, segments, slots, _free(schedule, slots, needed))
    rows[rows == _NOWHERE] = 0  # what is read there is discarded
    moved = ("inputs", "cotangents")
    buffers = {
        name: max(1, getattr(slots, name) + (name in crowded and name not in moved)) for name in _BUFFERS.values()
    }
    return Table(rows, tuple(segments), slots, buffers, crowded, ends)


def _ends(schedule: Grid, ticks: int) -> np.ndarray:
    last, backwards = max(stage for stage, _, _ in schedule.ticks), any(op in "BI" for _, op, _ in schedule.ticks)
    ends = np.full((ticks, len(ENDS)), -1, np.int32)
    for (stage, op, i), tick in schedule.ticks.items():
        if stage == 0 and op == "F":
            ends[tick, ENDS.index("embed")] = i
        if stage == 0 and op in "BI":
            ends[tick, ENDS.index("embed_gradient")] = i
        if stage == last and op in ("BI" if backwards else "F"):
            ends[tick, ENDS.index("head")] = i
    return ends


_NOWHERE = -1
_BUFFERS = {"input": "inputs", "saved": "saved", "cotangent": "cotangents", "kept": "kept"}


def buffer_of(field: str) -> str:
    """The buffer into which a field points, by the names of `Slots`; "" for none."""
    return _BUFFERS.get(field.split("_")[0 if field in MOVES else 1], "")


def _free(schedule: Grid, slots: Slots, needed: Sequence[Lives]) -> dict[str, np.ndarray]:
    """For each buffer a slot that no value is in, [ticks + 1, devices]; their number where all are taken."""
    ticks, free = max(map(len, schedule.rows)), {}
    for name, live, places in zip(_BUFFERS.values(), needed, slots[4:], strict=True):
        taken = np.zeros((ticks + 1, schedule.devices, getattr(slots, name) + 1), bool)
        for work, (begin, end) in live.items():
            taken[begin : end + 1, schedule.device(work[0]), places[work]] = True
        free[name] = taken.argmin(axis=2)
    return free


def _written_in_vain(
    rows: np.ndarray, segments: list[Segment], slots: Slots, free: dict[str, np.ndarray]
) -> frozenset[str]:
    """Gives what is written for nobody a free slot, in place; returns the buffers that have none at some tick.

    All devices write what they receive and save in every tick of a segment, whether it is theirs or not. What moves at
    the end of a tick is written at the start of the next.
    """
    crowded = set()
    kinds = {"forward_saved": "F", "backward_kept": "I"}
    for segment in segments:
        for field in (*segment.moves, *(field for field, op in kinds.items() if op in segment.ops)):
            here = rows[segment.begin : segment.begin + segment.ticks, :, FIELDS.index(field)]
            begin = segment.begin + (field in MOVES)
            name = buffer_of(field)
            np.copyto(here, free[name][begin : begin + segment.ticks], where=here == _NOWHERE, casting="unsafe")
            if getattr(slots, name) and (here == getattr(slots, name)).any():
                crowded.add(name)
    return frozenset(crowded)


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
