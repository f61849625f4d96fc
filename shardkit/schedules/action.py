"""One action, its notation, the device of a stage, and the text grid."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
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
    pair = _PAIR.fullmatch(text)
    words = pair.groups() if pair else (text,)
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
    words = [str(action) for action in cell]
    if len(words) > 1:
        return f"({';'.join(words)})OVERLAP_F_B"
    return "".join(words)


def draw_grid(rows: Sequence[Sequence[Cell]], arrow: tuple[int, int] | None = None) -> str:
    """The grid: a line per device, a column per tick. With an arrow under (device, tick), only the ticks around it."""
    ticks = range(max(map(len, rows), default=0))
    if arrow:
        _, tick = arrow
        end = min(len(ticks), tick + _SHOWN + 1)
        # The arrow at a missing action points one tick after the last: the window must still reach it.
        ticks = range(max(0, tick - _SHOWN), max(tick + 1, end))
    header = [str(tick) for tick in ticks]
    texts = []
    width = max(map(len, header), default=0)
    for row in rows:
        cells = [_format_short(row, tick) for tick in ticks]
        texts.append(cells)
        width = max([width, *map(len, cells)])
    label_width = len("device ") + 1 + len(str(len(rows)))

    def format_line(label: str, cells: Iterable[str]) -> str:
        padded = [cell.ljust(width) for cell in cells]
        return " ".join([label.ljust(label_width), *padded]).rstrip()

    lines = [format_line("tick", header)]
    for device, cells in enumerate(texts):
        lines.append(format_line(f"device {device}", [cell or "." for cell in cells]))
        if arrow and arrow[0] == device:
            marks = [""] * len(ticks)
            if arrow[1] in ticks:
                marks[ticks.index(arrow[1])] = "^"
            lines.append(format_line("", marks))
    return "\n".join(lines)


def _format_short(row: Sequence[Cell], tick: int) -> str:
    """The actions of a tick, as a drawing has them: `2F1/2B0`; "" for none, and after the end of the row."""
    if tick >= len(row):
        return ""
    return "/".join(str(action) for action in row[tick])
