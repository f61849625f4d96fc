"""What measurements of `shardkit bench comm` say of the links: latency, bandwidth."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from shardkit import cost
from shardkit._arguments.checks import format_count, name_axes
from shardkit._arguments.typed import check_kind
from shardkit.bench.records import Record
from shardkit.cost.hardware import chip_of


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
        return cost.Link(self.latency, self.bandwidth).seconds(sent, hops)


def alpha_beta(records: Iterable[Record]) -> Fit:
    """Fits latency and bandwidth to the median times of collectives of several sizes.

    It minimizes the squares of relative errors, so a small size counts as much as a large size. Both figures are at
    least 0.

    Args:
        records: records of `bench.comm`, with "hops", "written_bytes" and "wall_us_median"; it leaves out all others,
            and records with wrong elements. Pass one operation and implementation, or several that share links.

    Raises:
        ValueError: fewer than two sizes.

    Example:
        >>> from shardkit.bench.fit import alpha_beta
        >>> times = [{"hops": 14, "written_bytes": b, "wall_us_median": 14 * 5 + b / 1e3} for b in (1e3, 1e6)]
        >>> fit = alpha_beta(times)
        >>> f"{fit.latency * 1e6:.1f} us a hop, {fit.bandwidth / 1e9:.1f} GB/s"
        '5.0 us a hop, 1.0 GB/s'

    Source: Hockney, The Communication Challenge for MPP (1994).
    """
    rows = _read_rows(records)
    # Rows that are multiples of each other, as of one size measured twice, have many solutions. Hops and bytes are
    # divided by the largest of each, so that the rank does not depend on their units.
    causes = rows[:, :2]
    largest = np.maximum(causes.max(axis=0, initial=0), 1)
    if np.linalg.matrix_rank(causes / largest) < 2:
        sizes = len(np.unique(causes, axis=0))
        raise ValueError(
            "alpha_beta: records must be of at least two sizes to tell latency from bandwidth; got "
            f"{format_count(len(rows), 'usable record')} of {format_count(sizes, 'size')}. "
            "Measure more sizes."
        )
    # hops * latency + bytes * slope = seconds, divided by the seconds: each row asks for 1. Worked example: 14 hops and
    # 1e6 bytes in 1.07e-3 s are the row 13084 * latency + 9.3e8 * slope = 1, which 5e-6 s and 1e-9 s/byte solve.
    shares = causes / rows[:, 2:]
    solution = _solve(shares)
    # Each row was divided by its time, so that this is (fitted - measured) / measured.
    errors = shares @ solution - 1
    residual = float(np.sqrt(np.mean(np.square(errors))))
    latency, slope = map(float, solution)
    bandwidth = math.inf
    if slope:
        bandwidth = 1 / slope
    return Fit(latency, bandwidth, residual)


def _read_rows(records: Iterable[Record]) -> np.ndarray:
    """Hops, bytes and seconds, [records, 3], of the records that have all three, no wrong element and no neighbor."""
    rows = []
    for record in records:
        hops = record.get("hops")
        sent = record.get("written_bytes")
        time = record.get("wall_us_median")
        if hops is None or sent is None or time is None or record.get("wrong"):
            continue
        if record.get("beside"):  # the time of a collective and of what ran at the same time
            continue
        if time > 0:
            rows.append((hops, sent, time / 1e6))
    return np.array(rows, float).reshape(-1, 3)


def _solve(shares: np.ndarray) -> np.ndarray:
    """The two numbers of at least 0 with which `shares @ solution` is nearest to ones."""
    # The columns are as far apart as 1e4 and 1e9: each is divided by its largest element, for lstsq.
    scale = np.maximum(shares.max(axis=0, initial=0), 1e-300)
    solution, *_ = np.linalg.lstsq(shares / scale, np.ones(len(shares)), rcond=None)
    solution = solution / scale
    if solution.min() < 0:
        # The other one alone explains the times: the projection of ones onto its column.
        positive = int(solution.argmax())
        column = shares[:, positive]
        solution = np.zeros(2)
        solution[positive] = column.sum() / np.square(column).sum()
    return solution


def links(records: Sequence[Record], *, flops: float | None = None) -> cost.Links:
    """Returns the measured links of each axis, and for all other axes the links over the whole mesh.

    It fits latency and bandwidth to lax's collectives over this axis alone, with all operations and sizes.

    Args:
        records: records of `bench.comm`, or from the file of `shardkit bench comm --json`.
        flops: FLOP/s of a device's matmuls; None: the chip's, if it is in `cost.chips`.

    Returns:
        cost.Links, for `impl=` of the collective matmuls and `links=` of the planner. On simulated devices they tell
            you how fast this machine copies, and nothing about a network.

    Raises:
        ValueError: no such records with at least two sizes, or sizes too small to show a bandwidth.

    Example:
        >>> sizes = {"mesh": {"data": 8}, "op": "all_reduce", "impl": "lax", "axes": "data", "n": 8, "hops": 14}
        >>> here = {"date": "2026-11-23T12:00:00", "device_kind": "TPU v5 lite"}
        >>> times = {1792: 14.2, 1835008: 197.5}
        >>> rows = [{"written_bytes": b, "wall_us_median": t, "environment": here} | sizes for b, t in times.items()]
        >>> print(sk.bench.links(rows).of("data"))
        1 us a message, 10 GB/s (measured on 2026-11-23)
    """
    if flops is not None:
        check_kind("bench.links", "flops", flops, (float,))
    usable: list[Record] = []
    by_axis: dict[str, list[Record]] = {}
    for record in records:
        axes = record.get("axes")
        # A collective over several axes uses all their links, and tells nothing of a single one.
        if record.get("impl") == "lax" and axes and "," not in axes:
            usable.append(record)
            by_axis.setdefault(axes, []).append(record)
    if not usable:
        raise ValueError(
            "bench.links: records must be of shardkit bench comm, with impl 'lax' over one axis; got none. Run for "
            "example shardkit bench comm data=8 --impl lax --json FILE."
        )
    if flops is None:
        chip = chip_of(usable[-1]["environment"].get("device_kind"))
        if chip is not None:
            flops = chip.flops
    links_of_axes = []
    for axis, axis_records in by_axis.items():
        links_of_axes.append((axis, _fit_link(axis_records)))
    return cost.Links(_fit_link(usable), flops, tuple(links_of_axes))


def _fit_link(records: Sequence[Record]) -> cost.Link:
    fit = alpha_beta(records)
    if math.isinf(fit.bandwidth):
        largest = max(record.get("written_bytes") or 0 for record in records)
        axes = list(dict.fromkeys(record["axes"] for record in records))
        raise ValueError(
            f"bench.links: times must grow with the bytes; over {name_axes(axes)} they do not up to "
            f"{largest:,.0f} bytes. Measure larger sizes."
        )
    day = records[-1]["environment"]["date"][:10]  # of "2026-11-23T12:00:00+00:00"
    return cost.Link(fit.latency, fit.bandwidth, f"measured on {day}")
