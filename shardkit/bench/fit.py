"""The alpha-beta model of measured collectives: seconds for each hop, and bytes per second."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from shardkit._check import counted
from shardkit.bench.records import Record


class Fit(NamedTuple):
    """What a collective takes, as measured: `hops * latency + bytes / bandwidth`.

    Attributes:
        latency: seconds for each hop, 0 or more.
        bandwidth: bytes/s that one device sends; infinite where more bytes took no longer.
        residual: root mean square of (fitted - measured) / measured.
    """

    latency: float
    bandwidth: float
    residual: float = 0.0

    def seconds(self, hops: float, sent: float) -> float:
        """The expected time of a collective of so many hops, in which a device sends so many bytes."""
        return hops * self.latency + sent / self.bandwidth


def alpha_beta(records: Iterable[Record]) -> Fit:
    """Fits latency and bandwidth to the median times of collectives of several sizes.

    Least squares of the relative error, so that a small size counts as much as a large one; neither figure is negative.

    Args:
        records: of `bench.comm`, with "hops", "written_bytes" and "wall_us_median"; all others, and those with wrong
            elements, are left out. Of one operation and implementation, or of several that share links.

    Returns:
        Fit.

    Raises:
        ValueError: fewer than two sizes.

    Example:
        >>> times = [{"hops": 14, "written_bytes": b, "wall_us_median": 14 * 5 + b / 1e3} for b in (1e3, 1e6)]
        >>> found = sk.bench.alpha_beta(times)
        >>> f"{found.latency * 1e6:.1f} us a hop, {found.bandwidth / 1e9:.1f} GB/s"
        '5.0 us a hop, 1.0 GB/s'

    Source: Hockney, The Communication Challenge for MPP (1994).
    """
    rows = [(r["hops"], r["written_bytes"], r["wall_us_median"] / 1e6) for r in records if _usable(r)]
    table = np.array(rows, float).reshape(-1, 3)
    shares = table[:, :2] / table[:, 2:]  # of the time that was measured, by second and by second per byte
    scale = np.maximum(shares.max(axis=0, initial=0), 1e-300)  # seconds and seconds per byte are far apart
    if np.linalg.matrix_rank(table[:, :2] / np.maximum(table[:, :2].max(axis=0, initial=0), 1)) < 2:
        raise ValueError(
            f"alpha_beta: records must be of at least two sizes to tell latency from bandwidth; got "
            f"{counted(len(rows), 'usable record')} of {counted(len({row[:2] for row in rows}), 'size')}. Measure more "
            "sizes."
        )
    found = np.linalg.lstsq(shares / scale, np.ones(len(rows)), rcond=None)[0] / scale
    if found.min() < 0:  # without the one that would be negative
        kept = int(found.argmax())
        found = np.zeros(2)
        found[kept] = shares[:, kept].sum() / np.square(shares[:, kept]).sum()
    residual = float(np.sqrt(np.mean(np.square(shares @ found - 1))))
    latency, slope = map(float, found)
    return Fit(latency, 1 / slope if slope else float("inf"), residual)


def _usable(record: Record) -> bool:
    known = all(record.get(key) is not None for key in ("hops", "written_bytes", "wall_us_median"))
    return known and record["wall_us_median"] > 0 and not record.get("wrong")
