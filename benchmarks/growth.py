"""How a cost grows: the exponent that fits measured points best, and numbers as tables of text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardkit.meshes.layout import table


def fit_exponent(sizes: Sequence[float], costs: Sequence[float | None]) -> float | None:
    """The exponent e of cost = c size^e, by least squares in logarithms, of all points that were measured.

    For example costs 5, 40 and 320 of sizes 1, 4 and 16: they are 5 size^1.5, and the exponent is 1.5.

    None where fewer than two sizes have a cost.
    """
    points = []
    for size, cost in zip(sizes, costs, strict=True):
        if cost is not None and size > 0 and cost > 0:
            points.append((size, cost))
    if len({size for size, _ in points}) < 2:
        return None
    log_sizes, log_costs = np.log(np.array(points, float)).T
    slope, _ = np.polyfit(log_sizes, log_costs, 1)
    return float(slope)


def format_number(value: float | None, digits: int = 2, unit: float = 1) -> str:
    """A number of a table; "-" where there is none."""
    if value is None:
        return "-"
    # The sum makes 0.00 of -0.00, whose sign is the linear algebra's.
    rounded = round(value / unit, digits) + 0.0
    return f"{rounded:,.{digits}f}"


def align_right(rows: Sequence[tuple[str, ...]]) -> str:
    """A table as text whose columns, but for the first, end at the right, as columns of numbers do."""
    widths = []
    for column in zip(*rows, strict=True):
        widths.append(max(map(len, column)))
    aligned = []
    for row in rows:
        numbers = map(str.rjust, row[1:], widths[1:])
        aligned.append((row[0], *numbers))
    return table(aligned)
