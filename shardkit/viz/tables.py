"""A collective as a picture: an arrow for each message, from the device that sends to the one that receives."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkit._arguments.typed import typed
from shardkit.collectives.tables import SendTable
from shardkit.viz.style import blank, file_of, heading, look, ramp, saved

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LEFT, _RIGHT, _TOP, _BOTTOM = 0.6, 0.4, 0.8, 0.6  # inches
_STEP, _ROW, _WIDEST, _TALLEST = 1.1, 0.4, 24.0, 20.0


@partial(typed, where="viz.table")
def table(table: SendTable, output: str | Path | None = None) -> Any:
    """Draws the messages of a table: a row for each device, a column for each step.

    An arrow's color is its chunk's, from dark for the first to light for the last; it is dashed where the receiver adds
    what it brings.

    Args:
        table: the table.
        output: the .png or .svg to write; missing directories are created.

    Returns:
        A matplotlib figure; the gid of an arrow is its step and message, as in "0: 1>2 3".

    Raises:
        ValueError: a table that is refused by its `check`, or another kind of file.
        RuntimeError: matplotlib is not installed.

    Example:
        >>> picture = sk.viz.table(sk.tables.bine("all_gather", 8))
    """
    path = file_of("viz.table", output)
    table.check()
    with look():
        return saved(_picture(table), path)


def _picture(table: SendTable) -> Figure:
    width, height = min(_STEP * max(table.steps, 4), _WIDEST), min(_ROW * table.devices, _TALLEST)
    across, up = _LEFT + width + _RIGHT, _TOP + height + _BOTTOM
    title, note = f"{table.name}: {table.op}", f"{table.devices} devices, {table.chunks} chunks, {table.steps} steps"
    picture = blank(across, up, f"{title}; {note}")
    heading(picture, title, note)
    axes = picture.add_axes((_LEFT / across, _BOTTOM / up, width / across, height / up))
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
    beside: dict[tuple[int, int, int], int] = {}
    for send in table.sends:
        number = beside[send[:3]] = beside.get(send[:3], -1) + 1
        shift = 0.08 * (number % 6)
        style: dict[str, Any] = {"linestyle": "--" if send.reduce else "-", "shrinkA": 0, "shrinkB": 0}
        arrow = axes.annotate(
            "",
            (send.step + 0.95, send.target + shift),
            (send.step + 0.05, send.source + shift),
            arrowprops={"arrowstyle": "->", "color": ramp(send.chunk, table.chunks), **style},
        )
        arrow.set_gid(f"{send.step}: {send}")
    return picture
