"""Which device holds which piece of an array, as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from shardkit._arguments.typed import short, typed
from shardkit.meshes.inspection import draw_array, is_on_devices
from shardkit.meshes.mesh import DeviceGrid, GridTable
from shardkit.viz.style import LETTER, PAPER, RGB, TEXT, check_file, look, make_figure, ramp, save, text_on

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Inches: around a picture, between two grids, of a line of text; of a grid the narrowest column, the part of a cell
# that a device has, and a row; and what a picture may be at most.
_EDGE = 0.25
_GAP = 0.5
_LINE = 0.2
_COLUMN = 0.55
_PART = 0.24
_ROW = 0.34
_WIDE = 24.0
_TALL = 16.0
_SMALLEST_TEXT = 4.0  # points


@partial(typed, where="viz.array")
def array(x: jax.Array, output: str | Path | None = None, *, after: jax.Array | None = None) -> Any:
    """Draws the places of an array: each piece, with the devices that hold it. `after` shows a resharding beside it.

    Each piece is a cell. Every device that holds the piece has a part of the cell, with its id, so a cell with several
    parts is replicated. A device has one color, also in `after`. Rows and columns are the last two split dims.

    Args:
        x: an array on devices, or its ShapeDtypeStruct with a sharding.
        output: a .png or .svg to write; missing directories are created. The same arrays give the same bytes.
        after: an array to draw beside it.

    Returns:
        A matplotlib figure; a notebook shows it. The gid of a part is the label of its piece and its device.

    Raises:
        TypeError: an array without devices, from NumPy or over an AbstractMesh.
        ValueError: another kind of file.
        RuntimeError: matplotlib is not installed.

    Example:
        >>> x = sk.shard(np.ones((8, 4)), mesh, P("data", "model"))
        >>> picture = sk.viz.array(x, after=sk.shard(np.ones((8, 4)), mesh, P("model")))
    """
    _check_on_devices("x", x)
    grids = [draw_array(x)]
    if after is not None:
        _check_on_devices("after", after)
        grids = [_prepend("before: ", grids[0]), _prepend("after: ", draw_array(after))]
    file = check_file("viz.array", output)
    with look():
        picture = draw_grids(grids)
        save(picture, file)
        return picture


def _check_on_devices(name: str, x: Any) -> None:
    if not is_on_devices(x):
        raise TypeError(
            f"viz.array: {name} must be an array on devices; got {short(x)}. Place it, as in sk.shard(x, mesh, spec)."
        )


def _prepend(text: str, grid: DeviceGrid) -> DeviceGrid:
    """The grid with a text before the first line of its title."""
    first, *later = grid.title
    return grid._replace(title=(text + first, *later))


class _Size(NamedTuple):
    """Width and height, in inches."""

    width: float
    height: float


def draw_grids(grids: list[DeviceGrid]) -> Figure:
    """The grids side by side, each with its title and its tables."""
    devices = _list_devices(grids)
    colours = {}
    for number, device in enumerate(devices):
        colours[device] = ramp(number, len(devices))
    tables_of_grids = []
    sizes = []
    for grid in grids:
        tables = list(grid.tables())
        tables_of_grids.append(tables)
        sizes.append(_measure_grid(grid, tables))
    # There is one gap less than there are grids. What is too large is made smaller, and nothing is made larger.
    width = 2 * _EDGE - _GAP + sum(size.width + _GAP for size in sizes)
    height = 2 * _EDGE + max(size.height for size in sizes)
    scale = min(1, _WIDE / width, _TALL / height)
    description = ", ".join(grid.title[0] for grid in grids)
    page = _Page(make_figure(width * scale, height * scale, description), _Size(width, height), scale)
    left = _EDGE
    for grid, tables, size in zip(grids, tables_of_grids, sizes, strict=True):
        _draw_grid(page, grid, tables, left, colours)
        left += size.width + _GAP
    return page.picture


def _list_devices(grids: Sequence[DeviceGrid]) -> list[int]:
    """The ids of all devices, ascending."""
    devices: set[int] = set()
    for grid in grids:
        for cell in grid.cells.values():
            devices.update(cell)
    return sorted(devices)


class _Page(NamedTuple):
    """A picture, its size before it was scaled to fit, and the scale: all positions are in inches before."""

    picture: Figure
    size: _Size
    scale: float

    def write(self, left: float, top: float, text: str, **style: Any) -> None:
        """Writes a text, so many inches from the left and upper edges."""
        x = left / self.size.width
        y = 1 - top / self.size.height
        self.picture.text(x, y, text, size=TEXT * self.scale, va="center", **style)

    def add_axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """Axes of this size, so many inches from the left and upper edges."""
        full_width, full_height = self.size
        bottom = 1 - (top + height) / full_height
        return self.picture.add_axes((left / full_width, bottom, width / full_width, height / full_height))


def _draw_grid(
    page: _Page, grid: DeviceGrid, tables: Sequence[GridTable], left: float, colours: Mapping[int, RGB]
) -> None:
    """The title of a grid, and below it its tables, with their labels."""
    top = _EDGE
    weight = "bold"  # of the first line
    for line in grid.title:
        page.write(left, top + _LINE / 2, line, weight=weight)
        weight = "normal"
        top += _LINE
    column = _measure_column(tables)
    table_left = left + _measure_labels(tables)
    for table in tables:
        top += _LINE
        if table.title:
            page.write(left, top - _LINE / 2, table.title)
            top += _LINE
        for number, label in enumerate(table.column_labels):
            page.write(table_left + (number + 0.5) * column, top - _LINE / 2, label, ha="center")
        for number, label in enumerate(table.row_labels):
            page.write(table_left - LETTER, top + (number + 0.5) * _ROW, label, ha="right")
        width = column * len(table.column_labels)
        height = _ROW * len(table.row_labels)
        axes = page.add_axes(table_left, top, width, height)
        # An inch has 72 points, in which the sizes of letters are.
        _fill_cells(axes, table, colours, 72 * column * page.scale, 72 * _ROW * page.scale)
        top += height


def _measure_labels(tables: Sequence[GridTable]) -> float:
    """The width of the labels of rows."""
    labels: list[str] = []
    for table in tables:
        labels += table.row_labels
    return LETTER * (_count_letters(labels) + 1)


def _measure_column(tables: Sequence[GridTable]) -> float:
    """The width of a column: of its label, and of a part for each device of its fullest cell."""
    labels: list[str] = []
    most_devices = 0  # of a cell
    for table in tables:
        labels += table.column_labels
        for row in table.cells:
            for devices in row:
                most_devices = max(most_devices, len(devices))
    label_width = LETTER * (_count_letters(labels) + 1)
    return max(_COLUMN, label_width, _PART * most_devices)


def _count_letters(texts: Sequence[str]) -> int:
    """The letters of the longest text."""
    return max((len(text) for text in texts), default=0)


def _measure_grid(grid: DeviceGrid, tables: Sequence[GridTable]) -> _Size:
    """The size of a grid with its title."""
    table_width = _measure_labels(tables) + _measure_column(tables) * len(tables[0].column_labels)
    title_width = 1.1 * LETTER * _count_letters(grid.title)  # a bold letter is wider
    lines = len(grid.title)
    rows = 0
    for table in tables:
        lines += 1  # of the labels of columns
        if table.title:
            lines += 1
        rows += len(table.row_labels)
    return _Size(max(table_width, title_width), lines * _LINE + _ROW * rows)


def _fill_cells(axes: Axes, table: GridTable, colours: Mapping[int, RGB], width: float, height: float) -> None:
    """The cells of a table, each `width` x `height` points, with a part for each of its devices."""
    from matplotlib.patches import Rectangle

    axes.set_axis_off()
    axes.set_xlim(0, len(table.column_labels))
    axes.set_ylim(len(table.row_labels), 0)  # row 0 is the upper one
    for row, (row_label, cells) in enumerate(zip(table.row_labels, table.cells, strict=True)):
        for column, (column_label, devices) in enumerate(zip(table.column_labels, cells, strict=True)):
            part = 1 / len(devices)  # of the cell
            labels = [label for label in (table.title, row_label, column_label) if label]
            for number, device in enumerate(devices):
                left = column + number * part
                gid = " ".join([*labels, str(device)])
                axes.add_patch(Rectangle((left, row), part, 1, facecolor=colours[device], linewidth=0, gid=gid))
                # As large as fits: a digit takes at most 0.75 of its height, and the line 0.7 of the row.
                fitting_size = part * width / (0.75 * len(str(device)))
                size = min(TEXT, fitting_size, 0.7 * height)
                if size >= _SMALLEST_TEXT:
                    style: dict[str, Any] = {"ha": "center", "va": "center_baseline", "color": text_on(colours[device])}
                    axes.text(left + part / 2, row + 0.5, str(device), size=size, **style)
            axes.add_patch(Rectangle((column, row), 1, 1, fill=False, edgecolor=PAPER, linewidth=2.0))
