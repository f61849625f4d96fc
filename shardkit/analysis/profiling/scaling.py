"""How much faster more devices are, measured: nothing here assumes that it is linear."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from shardkit._check import known, whole
from shardkit._typed import typed
from shardkit.analysis.jaxpr.census import traceable
from shardkit.analysis.profiling.runs import Machine, machine, refuse_abstract, repeatable
from shardkit.layout import table


class Sample(NamedTuple):
    """Seconds of one call on each number of devices, of one round."""

    wall: tuple[float, ...]
    cpu: tuple[float, ...]


class Spread(NamedTuple):
    """What rounds gave: the median, the 10th and the 90th percentile."""

    median: float
    p10: float
    p90: float


@dataclass(frozen=True)
class Size:
    """One number of devices. Every ratio is to the smallest one's time in the same round.

    Attributes:
        devices: devices of the mesh.
        wall: seconds of a call, wall clock.
        cpu: seconds of a call, CPU time of all threads of this process.
        speed_up: work done in the time that the smallest mesh takes for its own, measured.
        efficiency: speed-up over the number of times that there are more devices; 1 is linear.
        work_efficiency: the CPU time of a piece of work on the smallest mesh over that here; what is missing to 1 is
            work that was added.
    """

    devices: int
    wall: Spread
    cpu: Spread
    speed_up: Spread
    efficiency: Spread
    work_efficiency: Spread


@dataclass(frozen=True)
class Scaling:
    """The same program on meshes of several sizes; `print` it, or read the sizes.

    Attributes:
        mode: "strong" (the same work on all) or "weak" (the same work on each device).
        sizes: by number of devices; the first is what the others are held against.
        calls: calls of each in each round.
        rounds: rounds.
        machine: where it ran.
        notes: what to know before believing the numbers, a sentence each.
    """

    mode: str
    sizes: tuple[Size, ...]
    calls: int
    rounds: int
    machine: Machine
    notes: tuple[str, ...]

    def to_json(self) -> str:
        """Everything in the report; a spread is [median, p10, p90], times are seconds."""
        return json.dumps(asdict(self), indent=1)

    def __str__(self) -> str:
        work = {"strong": "the same work on every mesh", "weak": "the same work on every device"}[self.mode]
        base = self.sizes[0].devices
        head = ("devices", "wall ms", "CPU ms", "speed-up", "of linear", "efficiency", "CPU time's efficiency")
        cells = [head] + [
            (
                str(s.devices),
                _shown(s.wall, 1e3),
                _shown(s.cpu, 1e3),
                _shown(s.speed_up),
                f"{s.devices / base:g}",
                _shown(s.efficiency),
                _shown(s.work_efficiency),
            )
            for s in self.sizes
        ]
        lines = [
            str(self.machine),
            f"{self.mode} scaling ({work}), median [p10, p90] of {self.rounds} rounds of {self.calls} calls, "
            f"ratios within a round to {base} device{'s' * (base > 1)}",
            table(cells),
        ]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


@typed
def scaling(
    make: Callable[[int], tuple[Callable[..., Any], Sequence[Any]]],
    sizes: Sequence[int],
    *,
    mode: str = "strong",
    calls: int = 5,
    rounds: int = 7,
    clock: Callable[[], tuple[float, float]] = lambda: (time.perf_counter(), time.process_time()),
) -> Scaling:
    """Measures a program on meshes of several sizes and reports speed-up and efficiency against the smallest.

    Every round runs all sizes one after the other, each round beginning with another one, and ratios are taken within
    a round: what slows the machine down for a while slows both sides of a ratio. Only times are measured; that the
    meshes compute the same is what `testing.assert_same_training` proves.

    Args:
        make: `make(devices) -> (fn, args)`: the program on a mesh of so many devices, and its arguments, laid out for
            it. All sizes are in memory together; what a program donates is copied before each call, outside the time.
        sizes: numbers of devices, at least two different ones.
        mode: "strong": `make` gives every mesh the same work; "weak": work in proportion to its devices.
        calls: calls of each size in each round; each is waited for.
        rounds: rounds, after the call that compiles.
        clock: seconds by the wall clock and seconds of CPU time of this process.

    Returns:
        Scaling: for each size, times, speed-up, efficiency and the efficiency of CPU time, each as median, 10th and
        90th percentile over the rounds. Printed, a table; `.to_json()`. Where devices are simulated a note says what
        that means.

    Raises:
        ValueError: fewer than two sizes, an unknown mode, or a number that is no whole number of at least 1.
        TypeError: an argument is a ShapeDtypeStruct.
    """
    known("scaling", "mode", mode, ("strong", "weak"))
    whole("scaling", calls=calls, rounds=rounds)
    for devices in sizes:
        whole("scaling", size=devices)
    order = sorted(set(sizes))
    if len(order) < 2:
        raise ValueError(
            f"scaling: sizes must hold at least two different numbers of devices; got {list(sizes)}. Name a smaller "
            "one to compare with."
        )
    prepared = []
    for devices in order:
        fn, args = make(devices)
        refuse_abstract("scaling", args)
        prepared.append(repeatable(traceable(fn), args))
    samples = []
    for number in range(rounds):
        taken = {}
        for at in range(len(order)):
            which = (at + number) % len(order)
            taken[which] = _timed(prepared[which], calls, clock)
        wall, cpu = zip(*(taken[which] for which in range(len(order))), strict=True)
        samples.append(Sample(wall, cpu))
    return scaling_of(order, samples, mode, calls, machine())


def _timed(
    prepare: Callable[[], Callable[[], Any]], calls: int, clock: Callable[[], tuple[float, float]]
) -> tuple[float, float]:
    """Wall and CPU seconds of one call, the mean of `calls`."""
    wall = cpu = 0.0
    for _ in range(calls):
        call = prepare()
        collected = gc.isenabled()
        gc.disable()  # a collection would fall on one size by chance
        try:
            started = clock()
            call()
            ended = clock()
        finally:
            if collected:
                gc.enable()
        wall += ended[0] - started[0]
        cpu += ended[1] - started[1]
    return wall / calls, cpu / calls


def scaling_of(order: Sequence[int], samples: Sequence[Sample], mode: str, calls: int, where: Machine) -> Scaling:
    """The report on rounds that are measured already; times of a sample stand in the order of the sizes."""
    wall, cpu = (np.array([getattr(sample, name) for sample in samples]) for name in Sample._fields)
    more = np.array(order) / order[0]
    work = more if mode == "weak" else np.ones(len(order))  # how much more is done than on the smallest mesh
    speed_up = wall[:, :1] / wall * work
    # A clock of CPU time ticks coarsely: what took no tick at all has no ratio.
    work_efficiency = np.divide(cpu[:, :1] * work, cpu, out=np.full_like(cpu, np.nan), where=cpu > 0)
    sizes = tuple(
        Size(
            devices,
            *(_spread(values[:, at]) for values in (wall, cpu, speed_up, speed_up / more, work_efficiency)),
        )
        for at, devices in enumerate(order)
    )
    return Scaling(mode, sizes, calls, len(samples), where, tuple(_notes(sizes, where)))


def _notes(sizes: Sequence[Size], where: Machine) -> list[str]:
    notes = []
    if where.simulated:
        notes.append(
            f"These devices are simulated and share {where.cores} CPU cores, so that speed-up and efficiency are of "
            "the cores, not of the devices. What the program itself loses is in the efficiency of CPU time, which is "
            "of the total work."
        )
    wide = [str(s.devices) for s in sizes[1:] if s.speed_up.p90 > 1.5 * s.speed_up.p10]
    if wide:
        notes.append(
            f"The speed-up on {', '.join(wide)} devices differs between rounds by more than half, so the machine was "
            "busy with something else; repeat with more rounds or on a quiet machine."
        )
    return notes


def _spread(values: np.ndarray) -> Spread:
    return Spread(*(float(v) for v in np.percentile(values, (50, 10, 90))))


def _shown(spread: Spread, scale: float = 1.0) -> str:
    digits = 3 if scale > 1 else 2
    median, low, high = (f"{value * scale:,.{digits}f}" for value in spread)
    return f"{median} [{low}, {high}]"
