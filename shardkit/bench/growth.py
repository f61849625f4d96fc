"""How a cost grows: the exponent that fits measured points best."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardkit.layout import table

Rows = list[tuple[str, ...]]


def exponent(sizes: Sequence[float], costs: Sequence[float | None]) -> tuple[float, float] | None:
    """The exponent e and the factor c of cost = c size^e, by least squares in logarithms.

    Args:
        sizes: what grows.
        costs: one per size, in any unit; points with a cost that is None or not positive are left out.

    Returns:
        (e, c); None if fewer than two sizes are left.

    Example:
        >>> e, c = sk.bench.exponent([1, 2, 4], [3, 12, 48])
        >>> round(e, 6), round(c, 6)
        (2.0, 3.0)
    """
    kept = [(x, y) for x, y in zip(sizes, costs, strict=True) if y is not None and x > 0 and y > 0]
    if len({x for x, _ in kept}) < 2:
        return None
    x, y = np.log(np.array(kept, float)).T
    slope, intercept = np.polyfit(x, y, 1)
    return float(slope), float(np.exp(intercept))


def power(sizes: Sequence[float], costs: Sequence[float | None]) -> float | None:
    """The exponent alone, rounded, as records hold it."""
    found = exponent(sizes, costs)
    return None if found is None else round(found[0], 4)


def cell(value: float | None, digits: int = 2, unit: float = 1) -> str:
    """A number of a table; "-" where there is none."""
    return "-" if value is None else f"{value / unit:,.{digits}f}"


def right(rows: Rows) -> str:
    """A table whose columns, but for the first, end at the right, as columns of numbers do."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return table([(row[0], *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))) for row in rows])
