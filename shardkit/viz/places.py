"""Which device holds which piece of an array, as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from shardkit._arguments.typed import short, typed
from shardkit.meshes.inspection import draw_array, is_on_devices
from shardkit.meshes.mesh import DeviceGrid, GridTable
from shardkit.viz.style import LETTER, PAPER, RGB, TEXT, blank, file_of, look, ramp, saved, text_on

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Inches.
_EDGE, _GAP, _LINE = 0.25, 0.5, 0.2
_COLUMN, _PART, _ROW = 0.55, 0.24, 0.34
_WIDE, _TALL = 24.0, 16.0
_SMALLEST_TEXT = 4.0  # points


@partial(typed, where="viz.array")
def array(x: jax.Array, output: str | Path | None = None, *, after: jax.Array | None = None) -> Any:
    """The picture of an array: which device holds which piece of it, and beside it `after` a resharding.

    Each piece is a cell, in which every device that holds it has a part of its own with its id: a cell of several
    parts is replicated. A device has one color, also in `after`. Rows and columns are the last two dims that are split.

    Args:
        x: an array on devices, or its ShapeDtypeStruct with a sharding.
        output: a .png or .svg to write; missing directories are created. The same arrays give the same bytes.
        after: an array to draw beside it.

    Returns:
        A matplotlib figure, which notebooks show. The gid of a part is the label of its piece and its device.

    Raises:
        TypeError: an array on no devices, as one of NumPy or over an AbstractMesh.
        ValueError: another kind of file.
        RuntimeError: matplotlib is not installed.

    Example:
        >>> x = sk.shard(np.ones((8, 4)), mesh, P("data", "model"))
        >>> picture = sk.viz.array(x, after=sk.shard(np.ones((8, 4)), mesh, P("model")))
    """
    given = {"x": x} | ({"after": after} if after is not None else {})
    for name, each in given.items():
        if not is_on_devices(each):
            raise TypeError(
                f"viz.array: {name} must be an array on devices; got {short(each)}. Place it, as in "
                "sk.shard(x, mesh, spec)."
            )
    grids = [draw_array(each) for each in given.values()]
    if after is not None:
        heads = ("before: ", "after: ")
        grids = [g._replace(title=(head + g.title[0], *g.title[1:])) for head, g in zip(heads, grids, strict=True)]
    path = file_of("viz.array", output)
    with look():
        return saved(picture_of(grids), path)


def picture_of(grids: list[DeviceGrid]) -> Figure:
    """The grids side by side, each with its title and its tables."""
    ids = sorted({each for grid in grids for cell in grid.cells.values() for each in cell})
    colours = {each: ramp(i, len(ids)) for i, each in enumerate(ids)}
    blocks = [list(grid.tables()) for grid in grids]
    sizes = [_size(grid, tables) for grid, tables in zip(grids, blocks, strict=True)]
    across, up = 2 * _EDGE - _GAP + sum(w + _GAP for w, _ in sizes), 2 * _EDGE + max(h for _, h in sizes)
    shrink = min(1, _WIDE / across, _TALL / up)
    picture = blank(across * shrink, up * shrink, ", ".join(grid.title[0] for grid in grids))

    def write(left: float, top: float, text: str, **style: Any) -> None:
        picture.text(left / across, 1 - top / up, text, size=TEXT * shrink, va="center", **style)

    left = _EDGE
    for grid, tables, (width, _) in zip(grids, blocks, sizes, strict=True):
        top = _EDGE
        for number, line in enumerate(grid.title):
            write(left, top + _LINE / 2, line, weight="normal" if number else "bold")
            top += _LINE
        side, column = _side(tables), _column(tables)
        for table in tables:
            top += _LINE
            if table.title:
                write(left, top - _LINE / 2, table.title)
                top += _LINE
            for i, head in enumerate(table.column_labels):
                write(left + side + (i + 0.5) * column, top - _LINE / 2, head, ha="center")
            high, wide = _ROW * len(table.row_labels), column * len(table.column_labels)
            for i, text in enumerate(table.row_labels):
                write(left + side - LETTER, top + (i + 0.5) * _ROW, text, ha="right")
            axes = picture.add_axes(((left + side) / across, 1 - (top + high) / up, wide / across, high / up))
            _fill(axes, table, colours, 72 * column * shrink, 72 * _ROW * shrink)
            top += high
        left += width + _GAP
    return picture


def _side(tables: Sequence[GridTable]) -> float:
    """The width of the labels of rows."""
    return LETTER * (max(len(side) for table in tables for side in table.row_labels) + 1)


def _column(tables: Sequence[GridTable]) -> float:
    """The width of a column: of its label, and of a part for each device of its fullest cell."""
    label = max(len(head) for table in tables for head in table.column_labels)
    parts = max(len(cell) for table in tables for row in table.cells for cell in row)
    return max(_COLUMN, LETTER * (label + 1), _PART * parts)


def _size(grid: DeviceGrid, tables: Sequence[GridTable]) -> tuple[float, float]:
    """Width and height of a grid with its title."""
    table = _side(tables) + _column(tables) * len(tables[0].column_labels)
    title = 1.1 * LETTER * max(map(len, grid.title))
    lines = len(grid.title) + sum(1 + bool(each.title) for each in tables)
    return max(table, title), lines * _LINE + _ROW * sum(len(each.row_labels) for each in tables)


def _fill(axes: Axes, table: GridTable, colours: Mapping[int, RGB], width: float, height: float) -> None:
    """The cells of a table, each `width` x `height` points, with a part for each of its devices."""
    from matplotlib.patches import Rectangle

    axes.set_axis_off()
    axes.set_xlim(0, len(table.column_labels))
    axes.set_ylim(len(table.row_labels), 0)
    for row, (side, cells) in enumerate(zip(table.row_labels, table.cells, strict=True)):
        for column, (head, ids) in enumerate(zip(table.column_labels, cells, strict=True)):
            part = 1 / len(ids)
            for number, each in enumerate(ids):
                left, label = column + number * part, " ".join(filter(None, [table.title, side, head, str(each)]))
                axes.add_patch(Rectangle((left, row), part, 1, facecolor=colours[each], linewidth=0, gid=label))
                size = min(TEXT, part * width / (0.75 * len(str(each))), 0.7 * height)
                if size >= _SMALLEST_TEXT:
                    style: dict[str, Any] = {"ha": "center", "va": "center_baseline", "color": text_on(colours[each])}
                    axes.text(left + part / 2, row + 0.5, str(each), size=size, **style)
            axes.add_patch(Rectangle((column, row), 1, 1, fill=False, edgecolor=PAPER, linewidth=2.0))
