"""How a cost grows: the exponent that fits measured points best, and tables of numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardkit.meshes.layout import table


def exponent(sizes: Sequence[float], costs: Sequence[float | None]) -> float | None:
    """The exponent e of cost = c size^e, by least squares in logarithms, of all points that were measured.

    None where fewer than two sizes are left.
    """
    kept = [(x, y) for x, y in zip(sizes, costs, strict=True) if y is not None and x > 0 and y > 0]
    if len({x for x, _ in kept}) < 2:
        return None
    x, y = np.log(np.array(kept, float)).T
    return float(np.polyfit(x, y, 1)[0])


def cell(value: float | None, digits: int = 2, unit: float = 1) -> str:
    """A number of a table; "-" where there is none."""
    if value is None:
        return "-"
    return f"{round(value / unit, digits) + 0.0:,.{digits}f}"  # not -0.00, whose sign is the linear algebra's


def right(rows: Sequence[tuple[str, ...]]) -> str:
    """A table whose columns, but for the first, end at the right, as columns of numbers do."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return table([(row[0], *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))) for row in rows])
