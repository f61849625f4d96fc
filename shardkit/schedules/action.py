"""One action, its notation, the device of a stage, and the text grid."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

StagePlacement = Literal["loop", "v"]
OPS = "FBIW"
_ACTION = re.compile(rf"(\d+)([{OPS}])(\d+)")
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


def alone(stage: int, op: str, microbatch: int) -> Cell:
    """A cell with one action."""
    return (Action(stage, op, microbatch),)


def device_of(stage: int, devices: int, placement: StagePlacement) -> int:
    """The device of a stage: stages are placed in a loop, or along a V."""
    turn, place = divmod(stage, devices)
    return devices - 1 - place if placement == "v" and turn % 2 else place


def parsed(text: str) -> Cell | None:
    """The cell of `2F0`, of `(2F1;2B0)OVERLAP_F_B`, or of nothing; None for any other text."""
    pair = _PAIR.fullmatch(text)
    matches = [_ACTION.fullmatch(part) for part in (pair.groups() if pair else [text] if text else [])]
    if None in matches:
        return None
    return tuple(Action(int(m[1]), m[2], int(m[3])) for m in matches if m)


def written(cell: Cell) -> str:
    """The cell in the notation that `parsed` reads."""
    return f"({';'.join(map(str, cell))})OVERLAP_F_B" if len(cell) > 1 else "".join(map(str, cell))


def drawn(rows: Sequence[Sequence[Cell]], arrow: tuple[int, int] | None = None) -> str:
    """The grid, a line per device and a column per tick; with an arrow under (device, tick), the ticks around it."""
    ticks = range(max(map(len, rows), default=0))
    if arrow:
        ticks = range(max(0, arrow[1] - _SHOWN), max(arrow[1] + 1, min(len(ticks), arrow[1] + _SHOWN + 1)))
    texts = [["/".join(map(str, row[t])) if t < len(row) else "" for t in ticks] for row in rows]
    width = max(len(text) for row in [map(str, ticks), *texts] for text in row) if ticks else 0

    def line(head: str, cells: Iterable[str]) -> str:
        return " ".join([head.ljust(8 + len(str(len(rows)))), *(cell.ljust(width) for cell in cells)]).rstrip()

    lines = [line("tick", map(str, ticks))]
    for device, row in enumerate(texts):
        lines.append(line(f"device {device}", [text or "." for text in row]))
        if arrow and arrow[0] == device:
            lines.append(line("", ["^" if t == arrow[1] else "" for t in ticks]))
    return "\n".join(lines)
