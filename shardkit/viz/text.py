"""The pictures as text for terminals: bars, curves and overlap in characters, without matplotlib and without color.

Each takes what the picture of its name takes. Meshes, arrays, trees and plans have `sk.describe`, schedules `print`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from shardkit._check import at_least
from shardkit._typed import typed
from shardkit.analysis.hlo.timeline import Timeline
from shardkit.viz import curves, gantt, memories, traffic
from shardkit.viz.bars import size
from shardkit.viz.panels import Bar

# One for each kind in order; the last is for all others. Darker before lighter, then shapes.
_FILLS = "█▓▒░╬╪┼·"
_MARKS = "ox+*#%@&"
_LEAST = 20  # columns


@partial(typed, where="viz.text.census")
def census(census: Any, *, width: int = 80) -> str:
    """The bytes that one device sends per step over each mesh axis, by collective, as bars in characters.

    Args:
        census: as for `viz.census`.
        width: columns.

    Returns:
        A line per axes, and one of what the characters mean.

    Raises:
        TypeError: something else than a census.
        ValueError: fewer than 20 columns.

    Example:
        >>> f = jax.shard_map(lambda x: sk.all_reduce(x, "model"), mesh=mesh, in_specs=P(None, "model"), out_specs=P())
        >>> print(sk.viz.text.census(sk.census(f, jnp.ones((8, 4))), width=40))
        sent per device and step: 48 B
        model=4  ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒ 48 B, 1 x
        ▒ all_reduce
    """
    several = traffic.rows_of("viz.text.census", census)
    times = traffic.counts(several)
    bars = traffic.traffic(several)
    head = f"sent {traffic.totals(several)}"
    words = {label: f", {count} x" for label, count in times.items()}
    return _bars("viz.text.census", head, bars, traffic.COLLECTIVES, width, words)


@partial(typed, where="viz.text.memory")
def memory(memory: Any, *, state: Any = None, width: int = 80) -> str:
    """A device's memory by what it holds, as bars in characters.

    Args:
        memory: as for `viz.memory`.
        state: as for `viz.memory`.
        width: columns.

    Returns:
        A line per name, and one of what the characters mean.

    Raises:
        TypeError: something else than memory, or a state that is none.
        ValueError: a program that the compiler refused; fewer than 20 columns.

    Example:
        >>> stages = {f"ZeRO-{stage}": sk.cost.zero_breakdown(1e9, 8, stage) for stage in (1, 3)}
        >>> print(sk.viz.text.memory(stages, width=40))
        memory of a device
        ZeRO-1  ████████▓▓▓▓▓▓▒▒▒▒▒▒▒▒ 5.122 GiB
        ZeRO-3  █▓▓▓▓▓▓▒ 1.863 GiB
        █ parameters  ▓ optimizer  ▒ gradients
    """
    found = memories.parts("viz.text.memory", memory, state)
    bars = [Bar(name, kind, value) for name, own in found.items() for kind, value in own.items() if value > 0]
    return _bars("viz.text.memory", "memory of a device", bars, memories.KINDS, width, {})


@partial(typed, where="viz.text.losses")
def losses(losses: Mapping[str, Any], *, width: int = 80, height: int = 12) -> str:
    """Loss curves over each other, in characters; where several meet, the mark is that of the first.

    Args:
        losses: as for `viz.losses`.
        width: columns.
        height: lines of the plot.

    Returns:
        The plot, the marks of the runs, and the largest difference from the first.

    Raises:
        TypeError: something else than numbers.
        ValueError: no loss at all; fewer than 20 columns or 2 lines.

    Example:
        >>> print(sk.viz.text.losses({"dp": [4.0, 2.0, 1.0], "fsdp": [4.0, 3.0, 1.0]}, width=24, height=4))
        4 |o
        3 |          x
        2 |          o
        1 |                    o
           1 .. step 3
        o dp  x fsdp
        largest difference: 1 (fsdp - dp)
    """
    _check("viz.text.losses", width, height)
    lines = curves.curves("viz.text.losses", losses)
    points = [point for line in lines for point in line.points if math.isfinite(point[1])]
    xs, ys = [x for x, _ in points] or [1.0], [y for _, y in points] or [0.0]
    low, high, first, last = min(ys), max(ys), min(xs), max(xs)
    labels = [f"{high - (high - low) * row / (height - 1):.3g}" for row in range(height)]
    left = max(map(len, labels))
    columns = width - left - 2
    grid = [[" "] * columns for _ in range(height)]
    for number, line in reversed(list(enumerate(lines))):
        for x, y in line.points:
            if math.isfinite(y):
                column = round((x - first) / (last - first or 1) * (columns - 1))
                grid[round((high - y) / (high - low or 1) * (height - 1))][column] = _MARKS[number % len(_MARKS)]
    plot = [f"{label:>{left}} |{''.join(row)}".rstrip() for label, row in zip(labels, grid, strict=True)]
    under = [f"{'':{left}}  {first:g} .. step {last:g}", _marks([line.name for line in lines], _MARKS)]
    said = curves.largest(lines[0].name, curves.differences(lines))
    return "\n".join([*plot, *under, *([said] if said else [])])


@partial(typed, where="viz.text.overlap")
def overlap(report: Any, *, width: int = 80) -> str:
    """How a compiled program's collectives overlap with its compute, in characters.

    Args:
        report: as for `viz.overlap`.
        width: columns.

    Returns:
        For each report its times in words, a line of compute and one for the collectives over each axes: full where
        they run beside each other, shaded where compute waits.

    Raises:
        TypeError: something else than a report.
        ValueError: a report without a timeline; fewer than 20 columns.

    Example:
        print(sk.viz.text.overlap(sk.aot.compile(step, args, topology="v5e:2x4")))
    """
    _check("viz.text.overlap", width)
    several = gantt.timelines("viz.text.overlap", report)
    most = max(line.seconds for line in several.values())
    names = max(len(lane) for line in several.values() for lane in line.lanes())
    out = []
    for name, line in several.items():
        out.append(": ".join(filter(None, [name, gantt.hidden(line)])))
        for lane in line.lanes():
            out.append(f"{lane:<{names}}  {_lane(line, lane, most, width - names - 2)}".rstrip())
    names_of = {"█": "runs", "░": "exposed: compute waits", "·": "less than a third of a column"}
    used = [mark for mark in names_of if any(mark in line for line in out)]
    return "\n".join([*out, _marks([names_of[mark] for mark in used], used)])


def _lane(line: Timeline, lane: str, most: float, columns: int) -> str:
    """A lane of a timeline: in each column what takes most of its time."""
    taken = [[0.0, 0.0] for _ in range(columns)]
    for span in line.spans:
        if span.lane != lane:
            continue
        start, end = span.start / most * columns, span.end / most * columns
        for column in range(int(start), min(math.ceil(end), columns)):
            taken[column][span.exposed] += min(end, column + 1) - max(start, column)
    brief = " " if lane == "compute" else "·"  # a collective stays visible, a wait of compute too
    return "".join(
        " " if not any(pair) else brief if max(pair) < 1 / 3 else "█" if pair[0] >= pair[1] else "░" for pair in taken
    )


def _bars(
    where: str, head: str, bars: Sequence[Bar], kinds: Sequence[str], width: int, words: Mapping[str, str]
) -> str:
    """A line per label, with as many characters of each kind as its value has of the longest line."""
    _check(where, width)
    labels = list(dict.fromkeys(bar.label for bar in bars))
    every = list(dict.fromkeys([*kinds, *(bar.kind for bar in bars)]))  # each has one character in all pictures
    fills = {kind: _FILLS[min(number, len(_FILLS) - 1)] for number, kind in enumerate(every)}
    totals = {label: sum(bar.value for bar in bars if bar.label == label) for label in labels}
    texts = {label: size(total) + words.get(label, "") for label, total in totals.items()}
    left = max(map(len, labels), default=0)
    columns = max(width - left - 3 - max(map(len, texts.values()), default=0), 1)
    most = max(totals.values(), default=0.0) or 1.0
    lines = [head]
    for label in labels:
        row, done = "", 0.0
        for kind in every:
            done += sum(bar.value for bar in bars if (bar.label, bar.kind) == (label, kind))
            row += fills[kind] * (round(done / most * columns) - len(row))
        lines.append(f"{label:<{left}}  {row} {texts[label]}".strip())
    used = [kind for kind in every if any(bar.kind == kind for bar in bars)]
    return "\n".join([*lines, _marks(used, [fills[kind] for kind in used]) if used else "nothing"])


def _marks(names: Sequence[str], marks: Sequence[str]) -> str:
    """What the characters mean."""
    return "  ".join(f"{marks[i % len(marks)]} {name}" for i, name in enumerate(names))


def _check(where: str, width: int, height: int = 2) -> None:
    at_least(where, _LEAST, width=width)
    at_least(where, 2, height=height)
