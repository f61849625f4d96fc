"""A collective as a picture: an arrow for each message, from the device that sends to the one that receives."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkit._arguments.typed import typed
from shardkit.collectives.tables import SendTable
from shardkit.viz.style import check_file, look, make_figure, ramp, save, write_heading

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Inches: the margins of the plot, a step and a device in it, and what it may be at most.
_LEFT = 0.6
_RIGHT = 0.4
_TOP = 0.8
_BOTTOM = 0.6
_STEP = 1.1
_ROW = 0.4
_WIDEST = 24.0
_TALLEST = 20.0


@partial(typed, where="viz.table")
def table(table: SendTable, output: str | Path | None = None) -> Any:
    """Draws the messages of a table: a row for each device, a column for each step.

    The color of an arrow is its chunk, from dark for the first to light for the last. An arrow is dashed if the
    receiver adds its chunk.

    Args:
        table: the table.
        output: the .png or .svg to write; missing directories are created.

    Returns:
        A matplotlib figure; the gid of an arrow is its step and message, as in "0: 1>2 3".

    Raises:
        ValueError: a table that fails its `check`, or another kind of file.
        RuntimeError: matplotlib is not installed.

    Example:
        >>> picture = sk.viz.table(sk.tables.bine("all_gather", 8))
    """
    file = check_file("viz.table", output)
    table.check()
    with look():
        picture = _draw(table)
        save(picture, file)
        return picture


def _draw(table: SendTable) -> Figure:
    width = min(_STEP * max(table.steps, 4), _WIDEST)
    height = min(_ROW * table.devices, _TALLEST)
    full_width = _LEFT + width + _RIGHT
    full_height = _TOP + height + _BOTTOM
    title = f"{table.name}: {table.op}"
    note = f"{table.devices} devices, {table.chunks} chunks, {table.steps} steps"
    picture = make_figure(full_width, full_height, f"{title}; {note}")
    write_heading(picture, title, note)
    axes = picture.add_axes((_LEFT / full_width, _BOTTOM / full_height, width / full_width, height / full_height))
    axes.set_xlim(0, max(table.steps, 1))
    axes.set_ylim(table.devices - 0.5, -0.5)
    axes.set_xticks([step + 0.5 for step in range(table.steps)], [str(step) for step in range(table.steps)])
    axes.set_yticks(range(table.devices))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set(xlabel="step", ylabel="device")
    for step in range(table.steps + 1):
        axes.axvline(step, color="0.5", linewidth=0.3)
    # Arrows between the same two devices lie beside each other.
    arrows: Counter[tuple[int, int, int]] = Counter()
    for send in table.sends:
        pair = (send.step, send.source, send.target)
        shift = 0.08 * (arrows[pair] % 6)
        arrows[pair] += 1
        line = "-"
        if send.reduce:
            line = "--"
        style: dict[str, Any] = {
            "arrowstyle": "->",
            "color": ramp(send.chunk, table.chunks),
            "linestyle": line,
            "shrinkA": 0,
            "shrinkB": 0,
        }
        start = (send.step + 0.05, send.source + shift)
        end = (send.step + 0.95, send.target + shift)
        arrow = axes.annotate("", end, start, arrowprops=style)
        arrow.set_gid(f"{send.step}: {send}")
    return picture
