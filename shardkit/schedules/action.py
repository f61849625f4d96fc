"""One action, its notation, the device of a stage, and the text grid."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

StagePlacement = Literal["loop", "v"]
OPS = "FBIW"
_ACTION = re.compile(rf"(\d+)([{OPS}])(\d+)")
# PyTorch ends a pair with OVERLAP_F_B; a file that is written by hand may leave it out.
_PAIR = re.compile(r"\((.*);(.*)\)(?:OVERLAP_F_B)?")
_SHOWN = 8  # ticks on either side of the arrow


class Action(NamedTuple):
    """A piece of work on one microbatch, written `2F0`.

    Attributes:
        stage: model stage, counted over all devices and chunks.
        op: "F" forward, "B" whole backward, "I" its input gradient, "W" its weight gradient.
        microbatch: the number of the microbatch, from 0.
    """

    stage: int
    op: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"


# What a device does in one tick: nothing, one action, or a forward and then a backward.
Cell = tuple[Action, ...]
Rows = tuple[tuple[Cell, ...], ...]


def make_cell(stage: int, op: str, microbatch: int) -> Cell:
    """A cell with one action."""
    return (Action(stage, op, microbatch),)


def make_cells(stage: int, op: str, microbatches: Iterable[int]) -> list[Cell]:
    """Cells with one action each, for one microbatch after the other."""
    return [make_cell(stage, op, i) for i in microbatches]


def count_ticks(rows: Sequence[Sequence[Cell]]) -> int:
    """The length of the longest row."""
    return max(map(len, rows), default=0)


def walk_cells(rows: Sequence[Sequence[Cell]]) -> Iterator[tuple[int, int, Cell]]:
    """Tick, device and cell of a table, tick by tick over all devices."""
    for tick in range(count_ticks(rows)):
        for device, row in enumerate(rows):
            if tick < len(row):
                yield tick, device, row[tick]


def device_of(stage: int, devices: int, placement: StagePlacement) -> int:
    """The device of a stage: stages are placed in a loop, or along a V.

    Worked example: six stages on three devices are on devices 0 1 2 0 1 2 in a loop, and on 0 1 2 2 1 0 along a V.
    """
    chunk, device = divmod(stage, devices)
    if placement == "v" and chunk % 2:
        return devices - 1 - device
    return device


def parse_cell(text: str) -> Cell | None:
    """The cell of `2F0`, of `(2F1;2B0)OVERLAP_F_B`, or of nothing; None for any other text."""
    if not text:
        return ()
    words: Sequence[str] = (text,)
    pair = _PAIR.fullmatch(text)
    if pair is not None:
        words = pair.groups()
    cell = []
    for word in words:
        match = _ACTION.fullmatch(word)
        if match is None:
            return None
        stage, op, microbatch = match.groups()
        cell.append(Action(int(stage), op, int(microbatch)))
    return tuple(cell)


def format_cell(cell: Cell) -> str:
    """The cell in the notation that `parse_cell` reads."""
    text = ";".join(map(str, cell))
    if len(cell) > 1:
        return f"({text})OVERLAP_F_B"
    return text


def draw_grid(rows: Sequence[Sequence[Cell]], arrow: tuple[int, int] | None = None) -> str:
    """The grid: a line per device, a column per tick. With an arrow under (device, tick), only the ticks around it."""
    ticks = range(count_ticks(rows))
    if arrow:
        _, tick = arrow
        end = min(len(ticks), tick + _SHOWN + 1)
        # The arrow at a missing action points one tick after the last: the window must still reach it.
        ticks = range(max(0, tick - _SHOWN), max(tick + 1, end))
    lines = [("tick", list(map(str, ticks)))]
    for device, row in enumerate(rows):
        cells = [_format_short(row, tick) for tick in ticks]
        lines.append((f"device {device}", cells))
        if arrow and arrow[0] == device:
            marks = ["^" if tick == arrow[1] else "" for tick in ticks]
            lines.append(("", marks))
    width = 0
    for _, cells in lines:
        width = max([width, *map(len, cells)])
    label_width = len("device ") + 1 + len(str(len(rows)))
    texts = []
    for label, cells in lines:
        padded = [cell.ljust(width) for cell in cells]
        texts.append(" ".join([label.ljust(label_width), *padded]).rstrip())
    return "\n".join(texts)


def _format_short(row: Sequence[Cell], tick: int) -> str:
    """The actions of a tick, as a drawing has them: `2F1/2B0`; "." for none, and after the end of the row."""
    if tick >= len(row) or not row[tick]:
        return "."
    return "/".join(map(str, row[tick]))
