"""The roofline of a chip, and where computations are under it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from shardkit._check import quoted
from shardkit._kinds import short
from shardkit._typed import typed
from shardkit.analysis.hlo.report import Report
from shardkit.analysis.hlo.topology import device_of, parse_topology
from shardkit.cost import Chip, Roofline, chip
from shardkit.viz.style import INK, LETTER, MUTED, SMALL, blank, file_of, heading, look, saved, stroked

_LEFT, _WIDE, _BELOW, _TALL, _TOP = 0.85, 4.6, 0.5, 2.8, 0.75  # inches


class Point(NamedTuple):
    """A computation under a roofline: FLOPs per byte of memory traffic, FLOP/s attained, and what bounds it."""

    intensity: float
    flops_per_second: float
    bound: str


_chip = chip  # where an argument takes the name


@partial(typed, where="viz.roofline")
def roofline(computations: Mapping[str, Any], chip: Any = None, *, output: str | Path | None = None) -> Any:
    """The picture of a chip's roofline, and of computations under it: FLOP/s against FLOPs per byte of memory traffic.

    A computation on the roof is bound by memory at the left of the ridge and by compute at its right. One below the
    roof waits: for the network in a `cost.roofline`, for exposed collectives in a report.

    Args:
        computations: by name, what `cost.roofline` returned; a report of `aot.compile`; or FLOPs, bytes of memory
            traffic and measured seconds.
        chip: a chip or its name; None: that of the reports' topology.
        output: a .png or .svg to write; missing directories are created. The same computations give the same bytes.

    Returns:
        A matplotlib figure, which notebooks show. The gid of a point is its name.

    Raises:
        TypeError: something else than a computation.
        ValueError: no chip, or an unknown one; no FLOPs or bytes; another kind of file.
        RuntimeError: matplotlib is not installed.

    Example:
        >>> matmul = {f"{rows} rows": sk.cost.roofline(2.0 * rows * 2**24, 2.0 * 2**24, "v5e") for rows in (8, 1024)}
        >>> picture = sk.viz.roofline(matmul, "v5e")
    """
    path = file_of("viz.roofline", output)
    where = _chip_of(computations, chip)
    found = points(computations)
    ridge = where.flops / where.hbm_bandwidth
    with look():
        note = f"{where.flops / 1e12:,.0f} TFLOP/s, {where.hbm_bandwidth / 1e9:,.0f} GB/s of memory"
        names = {
            name: f"{name}: {p.flops_per_second / where.flops:.0%} of peak, {p.bound}" for name, p in found.items()
        }
        right = 0.9 * LETTER * max(map(len, names.values()), default=0) + 0.5
        across, up = _LEFT + _WIDE + right, _BELOW + _TALL + _TOP
        picture = blank(across, up, f"roofline of {where.name}: {note}")
        heading(picture, f"roofline of {where.name}", note)
        axes = picture.add_axes((_LEFT / across, _BELOW / up, _WIDE / across, _TALL / up))
        every = [*(point.intensity for point in found.values()), ridge]
        low, high = min(every) / 4, max(every) * 4
        xs = [low, ridge, high]
        axes.plot(xs, [min(where.flops, x * where.hbm_bandwidth) for x in xs], color=INK, linewidth=1.6, gid="roof")
        axes.axvline(ridge, color=MUTED, linewidth=0.8, linestyle=":", gid="ridge")
        axes.annotate(
            f"{ridge:,.0f} FLOPs/byte", (ridge, 0), (3, 4), ("data", "axes fraction"), textcoords="offset points",
            size=SMALL, color=MUTED,
        )  # fmt: skip
        for number, (name, point) in enumerate(found.items()):
            style = stroked(number) | {"linestyle": "", "markersize": 7.0}
            axes.plot([point.intensity], [point.flops_per_second], gid=name, label=names[name], **style)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(low, high)
        from matplotlib.ticker import LogLocator, NullFormatter

        for axis, unit in ((axes.xaxis, 1.0), (axes.yaxis, 1e12)):
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.set_major_formatter(partial(_tick, unit=unit))
            axis.set_minor_formatter(NullFormatter())  # a range of few decades would have them on top of each other
        axes.set_xlabel("FLOPs per byte of memory traffic")
        axes.set_ylabel("TFLOP/s")
        axes.grid()
        if found:
            axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1), borderaxespad=0)
        return saved(picture, path)


def _tick(value: float, _: int, *, unit: float) -> str:
    """The label of a tick, in this unit."""
    return f"{value / unit:g}"


def points(computations: Mapping[str, Any]) -> dict[str, Point]:
    """Where each computation is; refuses anything else."""
    return {str(name): _point(str(name), each) for name, each in computations.items()}


def _point(name: str, given: Any) -> Point:
    if isinstance(given, Roofline):
        return _checked(name, Point(given.intensity, given.flops_per_second, f"{given.bound} bound"))
    if isinstance(given, Report):
        work, seconds = given.compute, given.compute.seconds + given.exposed_seconds
        bound = "network bound" if given.exposed_seconds > work.seconds else _bound(given, work.flops, work.bytes)
        return _checked(name, Point(_over(work.flops, work.bytes), _over(work.flops, seconds), bound))
    triple = tuple(given) if isinstance(given, tuple | list) else ()
    if len(triple) != 3 or not all(isinstance(each, Real) for each in triple):
        raise TypeError(
            f"viz.roofline: computation {name!r} must be a cost.roofline, a report, or FLOPs, bytes and seconds; got "
            f"{short(given)}. Pass for example sk.cost.roofline(1e12, 1e10, 'v5e')."
        )
    flops, size, seconds = map(float, triple)
    return _checked(name, Point(_over(flops, size), _over(flops, seconds), "measured"))


def _bound(report: Report, flops: int, size: int) -> str:
    device = device_of(parse_topology(report.topology))
    return "compute bound" if _over(flops, size) >= device.flops / device.hbm_bandwidth else "memory bound"


def _over(amount: float, other: float) -> float:
    return amount / other if other else math.inf


def _checked(name: str, point: Point) -> Point:
    if not all(0 < each < math.inf for each in point[:2]):
        raise ValueError(
            f"viz.roofline: computation {name!r} must have FLOPs, bytes and seconds; got {point.intensity:g} "
            f"FLOPs/byte and {point.flops_per_second:g} FLOP/s. Leave it out, or count its memory traffic."
        )
    return point


def _chip_of(computations: Mapping[str, Any], given: Any) -> Chip:
    if given is not None:
        return _chip(given)
    found = {each.topology.split(":")[0] for each in computations.values() if isinstance(each, Report)}
    if len(found) != 1:
        raise ValueError(
            f"viz.roofline: chip must be given unless all reports are of one; got reports of {quoted(sorted(found))}. "
            "Pass for example chip='v5e'."
        )
    return device_of(parse_topology(next(each.topology for each in computations.values() if isinstance(each, Report))))
