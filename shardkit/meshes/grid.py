"""Tables of device ids: which devices are at which place of a mesh, or hold which piece of an array."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

Ids = tuple[int, ...]
_LISTED = 8  # of more devices in one cell, consecutive ones are written as a range


class GridTable(NamedTuple):
    """A table of a grid.

    Attributes:
        at: the labels of the dims before the last two.
        sides: the label of each row.
        heads: the label of each column.
        cells: rows of cells; a cell holds the ids of its devices.
    """

    at: str
    sides: list[str]
    heads: list[str]
    cells: list[list[Ids]]


class DeviceGrid(NamedTuple):
    """Device ids over a grid of any number of dims.

    Attributes:
        title: lines above the tables.
        labels: for each dim the label of each place along it.
        cells: the ids of the devices at each place.
    """

    title: tuple[str, ...]
    labels: Sequence[Sequence[str]]
    cells: Mapping[Ids, Ids]

    def blocks(self) -> Iterator[GridTable]:
        """The tables, whose rows and columns are the last two dims."""
        rows, columns = [[""], [""], *self.labels][-2:]
        before = self.labels[:-2]
        places = [range(len(each)) for each in self.labels]
        for outer in product(*places[:-2]):
            inner = iter(product(*places[-2:]))
            cells = [[self.cells[*outer, *next(inner)] for _ in columns] for _ in rows]
            at = ", ".join(each[i] for each, i in zip(before, outer, strict=True))
            yield GridTable(at, list(rows), list(columns), cells)

    def __str__(self) -> str:
        blocks = list(self.blocks())
        left = max(len(side) for side in blocks[0].sides)
        texts = [[[written(cell) for cell in row] for row in block.cells] for block in blocks]
        columns = [[row[i] for text in texts for row in text] for i in range(len(blocks[0].heads))]
        widths = [max(map(len, [head, *c])) for head, c in zip(blocks[0].heads, columns, strict=True)]
        lines = list(self.title)
        for block, text in zip(blocks, texts, strict=True):
            lines += [block.at] if block.at else []
            for side, row in zip(["", *block.sides], [block.heads, *text], strict=True):
                cells = "".join(f"  {cell:>{width}}" for cell, width in zip(row, widths, strict=True))
                lines += [f"{side:<{left}}{cells}"] if any(row) else []
        return "\n".join(line.rstrip() for line in lines)


def written(ids: Ids) -> str:
    """The ids of a cell as text: `0,4`, and `0-15,32-47` for many."""
    if len(ids) <= _LISTED:
        return ",".join(map(str, ids))
    runs: list[list[int]] = []
    for each in ids:
        if runs and each == runs[-1][-1] + 1:
            runs[-1][1:] = [each]
        else:
            runs.append([each])
    return ",".join("-".join(map(str, run)) for run in runs)


def beside(left: str, right: str) -> str:
    """Two texts of several lines next to each other."""
    one, other = left.split("\n"), right.split("\n")
    width = max(map(len, one))
    rows = max(len(one), len(other))
    pairs = zip(one + [""] * (rows - len(one)), other + [""] * (rows - len(other)), strict=True)
    return "\n".join(f"{a:<{width}}    {b}".rstrip() for a, b in pairs)
