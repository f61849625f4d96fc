"""Loss curves laid over each other, with their difference from the first below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkit._arguments.typed import short, typed
from shardkit.viz.bars import Line
from shardkit.viz.style import INK, MUTED, SMALL, blank, file_of, heading, look, saved, stroked

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEFT, _WIDE, _TALL, _LOW = 0.8, 5.4, 2.4, 1.1  # inches
_MARKS = 12  # on a line of more points


@partial(typed, where="viz.losses")
def losses(
    losses: Mapping[str, Any], *, marks: Mapping[str, Sequence[int]] | None = None, output: str | Path | None = None
) -> Any:
    """The picture of loss curves, laid over each other, and below it each one's difference from the first.

    Args:
        losses: by the name of the run, its losses: a sequence, from step 1 on, or a mapping of steps to losses.
        marks: by what happened, the steps at which it did: triangles on the last curve.
        output: a .png or .svg to write; missing directories are created. The same losses give the same bytes.

    Returns:
        A matplotlib figure, which notebooks show. The gid of a line is its name; below it is "name - first".

    Raises:
        TypeError: something else than numbers.
        ValueError: no loss at all; another kind of file.
        RuntimeError: matplotlib is not installed.

    Example:
        >>> picture = sk.viz.losses({"one device": [2.0, 1.5, 1.25], "fsdp": {1: 2.0, 3: 1.2500001}})
    """
    path = file_of("viz.losses", output)
    lines = curves(losses)
    below = differences(lines)
    looks = {line.name: stroked(number) for number, line in enumerate(lines)}
    looks |= {line.name: looks[other.name] for line, other in zip(below, _others(lines), strict=True)}
    with look():
        low, keys = (_LOW + 0.15) * bool(below), 0.2 * -(-(len(lines) + len(marks or {})) // 3)
        width, up = _LEFT + _WIDE + 0.3, 0.7 + keys + _TALL + low + 0.5
        note = largest(lines[0].name, below)
        picture = blank(width, up, f"loss by step of {', '.join(line.name for line in lines)}; {note}")
        heading(picture, "loss by step", note)
        axes = picture.add_axes((_LEFT / width, (0.5 + low) / up, _WIDE / width, _TALL / up))
        _draw(axes, "loss", lines, looks)
        _mark(axes, lines[-1], marks or {})
        last = axes
        if below:
            last = picture.add_axes((_LEFT / width, 0.5 / up, _WIDE / width, _LOW / up), sharex=axes)
            last.axhline(0, color=MUTED, linewidth=0.8)
            _draw(last, "difference", below, looks)
            axes.tick_params(labelbottom=False)
        last.set_xlabel("step")
        last.locator_params(axis="x", integer=True)
        picture.legend(
            handles=axes.get_lines(), loc="upper left", bbox_to_anchor=(0.15 / width, 1 - 0.6 / up), ncols=3,
            borderpad=0, borderaxespad=0,
        )  # fmt: skip
        return saved(picture, path)


def curves(losses: Mapping[str, Any]) -> list[Line]:
    """The points of each run, in the order of steps; refuses what is no loss."""
    lines = []
    for name, run in losses.items():
        points = dict(run) if isinstance(run, Mapping) else _numbered(run)
        wrong = [each for pair in points.items() for each in pair if not _is_number(each)]
        if wrong:
            raise TypeError(
                f"viz.losses: the losses of {name!r} must be numbers, in a sequence or by step; got {short(wrong[0])}. "
                "Pass for example {'fsdp': [2.0, 1.5]}."
            )
        if points:
            lines.append(Line(str(name), tuple(sorted((float(x), float(y)) for x, y in points.items()))))
    if not lines:
        raise ValueError("viz.losses: losses must have at least one loss; got none. Pass for example {'fsdp': [2.0]}.")
    return lines


def differences(lines: Sequence[Line]) -> list[Line]:
    """Each run minus the first, at the steps that both have."""
    first = dict(lines[0].points)
    return [
        Line(f"{line.name} - {lines[0].name}", tuple((x, y - first[x]) for x, y in line.points if x in first))
        for line in _others(lines)
    ]


def largest(first: str, below: Sequence[Line]) -> str:
    """The largest difference, in words."""
    found = [(abs(y), line.name) for line in below for _, y in line.points]
    if not found:
        return ""
    most, name = max(found)
    if most == 0:
        return f"no difference from {first} at any step"
    return f"largest difference: {most:.2g} ({name})"


def _others(lines: Sequence[Line]) -> Sequence[Line]:
    """The runs that have a step in common with the first, without it."""
    steps = {x for x, _ in lines[0].points}
    return [line for line in lines[1:] if any(x in steps for x, _ in line.points)]


def _numbered(run: Any) -> dict[Any, Any]:
    """Losses from step 1 on; what is no sequence counts as one loss, which is refused if it is no number."""
    items = getattr(run, "tolist", lambda: run)()
    return dict(enumerate(items if isinstance(items, Sequence) and not isinstance(items, str) else [run], 1))


def _is_number(x: Any) -> bool:
    """Whether it is a number of Python, numpy or jax."""
    return (isinstance(x, Real) or getattr(x, "shape", None) == ()) and not isinstance(x, bool)


def _draw(axes: Axes, name: str, lines: Sequence[Line], looks: Mapping[str, dict[str, Any]]) -> None:
    for number, line in enumerate(lines):
        wide = 1.3 + min(len(lines) - 1 - number, 3)  # what lies below others shows at their sides
        marks = max(1, len(line.points) // _MARKS)
        xs, ys = zip(*line.points, strict=True)
        axes.plot(xs, ys, label=line.name, gid=line.name, markevery=marks, linewidth=wide, **looks[line.name])
    axes.set_ylabel(name)
    axes.grid()
    axes.yaxis.get_offset_text().set_fontsize(SMALL)


def _mark(axes: Axes, line: Line, marks: Mapping[str, Sequence[int]]) -> None:
    """Marks steps on a curve, at its last point up to each of them."""
    for name, steps in marks.items():
        points = [max((point for point in line.points if point[0] <= step), default=line.points[0]) for step in steps]
        xs, ys = zip(*points, strict=True) if points else ((), ())
        axes.plot(xs, ys, label=name, gid=name, linestyle="none", marker="v", markersize=4, color=INK, zorder=3)
