"""A schedule as one int32 table, which one program for all devices scans over."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from shardkit.schedules.action import OPS, count_ticks
from shardkit.schedules.grid import Grid
from shardkit.schedules.slots import Lives, Slots, assign_slots, find_lives


class RingMove(NamedTuple):
    """A kind of value that a device may receive at the end of a tick.

    Attributes:
        field: the field of a `Table` with the slot to which the value is written.
        buffer: the buffer of this slot.
        shift: how far the value moves along the ring: 1 from the left neighbor, -1 from the right one, 0 if it stays.
    """

    field: str
    buffer: str
    shift: int


MOVES = (
    RingMove("input_from_left", "inputs", 1),
    RingMove("input_from_right", "inputs", -1),
    RingMove("input_from_self", "inputs", 0),
    RingMove("cotangent_from_left", "cotangents", 1),
    RingMove("cotangent_from_right", "cotangents", -1),
    RingMove("cotangent_from_self", "cotangents", 0),
)
FIELDS = (
    "forward_on",
    "forward_stage",
    "forward_chunk",
    "forward_microbatch",
    "forward_input",
    "forward_saved",
    "backward_on",
    "backward_stage",
    "backward_chunk",
    "backward_microbatch",
    "backward_input",
    "backward_saved",
    "backward_cotangent",
    "backward_kept",
    "weight_on",
    "weight_stage",
    "weight_chunk",
    "weight_microbatch",
    "weight_kept",
    *(move.field for move in MOVES),
)
"""The columns of a `Table`, each a number for every tick of every device."""
ENDS = ("embed", "head", "embed_gradient")
"""The pieces that all devices run together if embedding and head are spread over them: the columns of `Table.ends`."""


class Segment(NamedTuple):
    """Consecutive ticks with the same kinds of op.

    Attributes:
        ops: the kinds that some device runs, in the order F, B, I, W: "F", "FB", "B", ...; "" if all devices idle.
        begin: the first tick.
        ticks: the number of ticks.
        moves: those that bring some device what it needs in one of these ticks.
    """

    ops: str
    begin: int
    ticks: int
    moves: tuple[RingMove, ...]


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

    Neighbors are neighbors on the ring, and devices send at the end of a tick. In a loop, inputs come from the left and
    cotangents from the right only. A value that nobody needs goes to a slot that is free at that tick. If no slot is
    free, a received value gets a number after the last slot, and is dropped; F and I write to an extra slot.

    Attributes:
        rows: int32 `[ticks, devices, fields]`.
        segments: runs of ticks with the same kinds of op, in order.
        slots: the slot of each value that is needed later.
        buffers: how many slots each buffer has, by the names of `Slots`.
        crowded: the buffers in which some device has no free slot at some tick.
        ends: int32 `[ticks, 3]`, by `ENDS`: the microbatch that enters the first stage; the microbatch at the head, in
            training when its backward pass begins; and the microbatch whose backward pass leaves the first stage. -1
            for none.
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


_NOWHERE = -1
_MOST_MOVES = 1.25  # long segments may send so many times what shorter ones send
_NAMES = {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}
_BUFFERS = ("inputs", "saved", "cotangents", "kept")
_MOVED_BUFFERS = ("inputs", "cotangents")
_FIELD_OF_MOVE = {(move.buffer, move.shift): move.field for move in MOVES}
# The fields that are slots, with the buffer of the slot.
_BUFFER_OF_FIELD = {
    "forward_input": "inputs",
    "forward_saved": "saved",
    "backward_input": "inputs",
    "backward_saved": "saved",
    "backward_cotangent": "cotangents",
    "backward_kept": "kept",
    "weight_kept": "kept",
    **{move.field: move.buffer for move in MOVES},
}


def lower_schedule(schedule: Grid, saved: bool, spread: bool) -> Table:
    """The table of a schedule; see `Schedule.table`.

    Worked example: 1F0 in tick 1 of 1F1B on two devices. In the row of tick 1 and device 1 it sets `forward_on` 1,
    `forward_stage` 1, `forward_microbatch` 0 and `forward_input` 0. Slot 0 has the output of 0F0, because the row of
    tick 0 and device 1 has `input_from_left` 0.
    """
    lives = find_lives(schedule, saved)
    slots = assign_slots(schedule, lives)
    rows = _write_rows(schedule, slots)
    ends = _find_ends(schedule)
    segments = _find_segments(schedule, rows)
    if spread:
        segments = _split_by_ends(schedule, rows, ends, segments)
    crowded = _assign_free_slots(rows, segments, slots, _find_free_slots(schedule, slots, lives))
    rows[rows == _NOWHERE] = 0  # a device that is off reads slot 0, and discards the result
    buffers = {}
    for name in _BUFFERS:
        size = getattr(slots, name)
        # F and I of a device that is off must write somewhere, to an extra slot; a received value is dropped instead.
        if name in crowded and name not in _MOVED_BUFFERS:
            size += 1
        # At least one: a device that is off reads slot 0 even of a buffer that no value needs.
        buffers[name] = max(1, size)
    return Table(rows, segments, slots, buffers, crowded, ends)


def _write_rows(schedule: Grid, slots: Slots) -> np.ndarray:
    """The fields of all ticks, int32 `[ticks, devices, fields]`, with `_NOWHERE` for slots that are not needed."""
    rows = np.zeros((count_ticks(schedule.rows), schedule.devices, len(FIELDS)), np.int32)
    for field in _BUFFER_OF_FIELD:
        rows[:, :, FIELDS.index(field)] = _NOWHERE
    for (stage, op, i), tick in schedule.ticks.items():
        work = (stage, i)
        device = schedule.device(stage)
        name = _NAMES[op]
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
        for field, value in values.items():
            # The names are made for all ops alike: `weight_input`, for example, is no field.
            if field in FIELDS:
                rows[tick, device, FIELDS.index(field)] = value
        receipt = _find_receipt(schedule, slots, stage, op, i)
        if receipt is not None:
            field, taker, slot = receipt
            rows[tick, taker, FIELDS.index(field)] = slot
    return rows


def _find_receipt(schedule: Grid, slots: Slots, stage: int, op: str, i: int) -> tuple[str, int, int] | None:
    """Where the result of an action is received: the field, the device and the slot; None if nowhere."""
    # A weight gradient stays on its device.
    if op == "W":
        return None
    if op == "F":
        target = stage + 1
        buffer = "inputs"
        slot_of = slots.input_of
        shift = 1
    else:
        target = stage - 1
        buffer = "cotangents"
        slot_of = slots.cotangent_of
        shift = -1
    # After the last stage is the head, and before the first the embedding: nothing is sent to them.
    if (target, i) not in slot_of:
        return None
    taker = schedule.device(target)
    if schedule.placement == "v":
        # A V never crosses the end of the ring: the next stage is on a neighbor, or at the turn on the same device.
        shift = taker - schedule.device(stage)
    return _FIELD_OF_MOVE[buffer, shift], taker, slot_of[target, i]


def _find_ends(schedule: Grid) -> np.ndarray:
    """See `Table.ends`."""
    last_stage = schedule.devices * schedule.chunks - 1
    has_backward = any(action.op in "BI" for action in schedule.ticks)
    # In training the head runs with the backward of the last stage, which needs its cotangent; in an evaluation with
    # the forward.
    head_ops = "BI" if has_backward else "F"
    ends = np.full((count_ticks(schedule.rows), len(ENDS)), -1, np.int32)
    for (stage, op, i), tick in schedule.ticks.items():
        if stage == 0 and op == "F":
            ends[tick, ENDS.index("embed")] = i
        if stage == 0 and op in "BI":
            ends[tick, ENDS.index("embed_gradient")] = i
        if stage == last_stage and op in head_ops:
            ends[tick, ENDS.index("head")] = i
    return ends


def _split_by_ends(
    schedule: Grid, rows: np.ndarray, ends: np.ndarray, segments: tuple[Segment, ...]
) -> tuple[Segment, ...]:
    """Shorter segments, which have the same ends in all ticks, where the longer ones would send much more.

    Long segments compile faster: what differs in their ticks is in branches. But all devices send in every tick of a
    segment in which some device receives.

    Worked example: 1F1B with 8 microbatches. On four devices outputs and cotangents move in nearly every tick, and the
    four segments send 35 times, where 19 shorter ones send 32 times. On two devices they move in turn, and four
    segments would send nearly twice as often as the shorter ones.
    """
    shorter = _find_segments(schedule, rows, ends)
    if _count_moves(segments) > _MOST_MOVES * _count_moves(shorter):
        return shorter
    return segments


def _count_moves(segments: Sequence[Segment]) -> int:
    return sum(segment.ticks * len(segment.moves) for segment in segments)


def _find_segments(schedule: Grid, rows: np.ndarray, ends: np.ndarray | None = None) -> tuple[Segment, ...]:
    """Runs of ticks with the same kinds of op and, if `ends` are passed, with the same of them."""
    ops_of_ticks = [""] * count_ticks(schedule.rows)
    for op in OPS:
        ticks_with_op = {tick for action, tick in schedule.ticks.items() if action.op == op}
        for tick in ticks_with_op:
            ops_of_ticks[tick] += op
    kinds = []
    for tick, ops in enumerate(ops_of_ticks):
        tick_ends: tuple[bool, ...] = ()
        if ends is not None:
            tick_ends = tuple(ends[tick] >= 0)
        kinds.append((ops, tick_ends))
    segments = []
    begin = 0
    # A segment is compiled as one scan, and its body has these ops alone: in the first ticks of GPipe no device
    # computes a backward that it would discard.
    for (ops, _), run in groupby(kinds):
        ticks = len(list(run))
        moves = _find_moves(rows[begin : begin + ticks])
        segments.append(Segment(ops, begin, ticks, moves))
        begin += ticks
    return tuple(segments)


def _find_moves(rows: np.ndarray) -> tuple[RingMove, ...]:
    """The moves that bring some device what it needs in one of these ticks."""
    moves = []
    for move in MOVES:
        slots = rows[:, :, FIELDS.index(move.field)]
        if (slots != _NOWHERE).any():
            moves.append(move)
    return tuple(moves)


def _find_free_slots(schedule: Grid, slots: Slots, lives: Sequence[Lives]) -> dict[str, np.ndarray]:
    """For each buffer, a free slot at each tick, [ticks + 1, devices]; the number of slots if all are taken."""
    ticks = count_ticks(schedule.rows)
    free = {}
    # The last four fields of `Slots` are the maps, in the order of the buffers.
    for name, live, slot_of in zip(_BUFFERS, lives, slots[4:], strict=True):
        # A tick more: a value that moves at the end of the last tick is written after it. A slot more, which nothing
        # takes: argmin gives the first slot that is not taken, and this one if all others are.
        taken = np.zeros((ticks + 1, schedule.devices, getattr(slots, name) + 1), bool)
        for work, (begin, end) in live.items():
            stage, _ = work
            taken[begin : end + 1, schedule.device(stage), slot_of[work]] = True
        free[name] = taken.argmin(axis=2)
    return free


def _assign_free_slots(
    rows: np.ndarray, segments: Sequence[Segment], slots: Slots, free: dict[str, np.ndarray]
) -> frozenset[str]:
    """Gives values that nobody needs a free slot, in place; returns the buffers without a free slot at some tick.

    In every tick of a segment all devices write a received and a saved value, whether anybody needs it or not. A value
    that moves at the end of a tick is written at the start of the next.

    Worked example: in tick 3 device 0 receives an input that it needs, at slot 1, and device 1 receives one that it
    does not need. At the start of tick 4 the slots 0 and 1 of device 1 hold inputs that it will read, and slot 2 is
    free: the field `input_from_left` of tick 3, [1, nowhere], becomes [1, 2]. If there are only two slots, it becomes
    [1, 2] too, which is beyond them: "inputs" is crowded.
    """
    crowded = set()
    for segment in segments:
        ticks = slice(segment.begin, segment.begin + segment.ticks)
        for field in _list_written_fields(segment):
            name = _BUFFER_OF_FIELD[field]
            column = rows[ticks, :, FIELDS.index(field)]  # a view: what is written there is written to `rows`
            free_slots = free[name][ticks]
            if field in _FIELD_OF_MOVE.values():
                free_slots = free[name][ticks.start + 1 : ticks.stop + 1]
            np.copyto(column, free_slots, where=column == _NOWHERE, casting="unsafe")
            size = getattr(slots, name)
            if size and (column == size).any():
                crowded.add(name)
    return frozenset(crowded)


def _list_written_fields(segment: Segment) -> list[str]:
    """The fields that say where all devices write a value in every tick of a segment."""
    fields = [move.field for move in segment.moves]
    if "F" in segment.ops:
        fields.append("forward_saved")
    if "I" in segment.ops:
        fields.append("backward_kept")
    return fields
