"""Measured speed-up over numbers of devices."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from shardkit._check import counted, one_of, whole
from shardkit._typed import typed
from shardkit.analysis.jaxpr.census import traceable
from shardkit.analysis.profiling.runs import Machine, machine, refuse_abstract, repeatable
from shardkit.layout import table


class Sample(NamedTuple):
    """Seconds of one call on each number of devices, in one round."""

    wall: tuple[float, ...]
    cpu: tuple[float, ...]


class Spread(NamedTuple):
    """The median, the 10th and the 90th percentile over rounds."""

    median: float
    p10: float
    p90: float


@dataclass(frozen=True)
class Size:
    """One number of devices. Every ratio is to the smallest number in the same round.

    Attributes:
        devices: devices of the mesh.
        wall: wall-clock seconds per call.
        cpu: CPU seconds per call, of all threads of this process.
        speed_up: work done in the time in which the smallest mesh does its work.
        efficiency: speed-up over the ratio of devices; 1 is linear.
        work_efficiency: CPU time per work on the smallest mesh over that on this one; below 1 where work was added.
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
        sizes: by number of devices; the others are compared with the first.
        calls: calls per size and round.
        rounds: rounds.
        machine: where it ran.
        notes: caveats, one sentence each.
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
            f"ratios within a round to {counted(base, 'device')}",
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
    """Measures a program on meshes of several sizes and reports speed-up and efficiency over the smallest.

    Every round runs all sizes, starting with a different one each time, and ratios are taken within a round, so that a
    slow phase of the machine affects both sides. Only time is measured; `testing.assert_same_training` proves that the
    meshes compute the same.

    Args:
        make: `make(devices) -> (fn, args)`: the program on a mesh of that size, and its arguments, sharded over
            it. All sizes are in memory together; donated arguments are copied before each call, outside the time.
        sizes: numbers of devices, at least two different ones.
        mode: "strong": the same work on every mesh; "weak": work in proportion to the devices.
        calls: calls per size and round; each is timed until its results are ready.
        rounds: rounds after the call that compiles.
        clock: wall-clock seconds and CPU seconds of this process.

    Returns:
        Scaling: for each size, times, speed-up, efficiency and the efficiency of CPU time, each as median, 10th and
        90th percentile over the rounds. Prints as a table; `.to_json()`. A note explains the
        numbers of simulated devices.

    Raises:
        ValueError: fewer than two sizes, an unknown mode, or a number that is not a whole number of at least 1.
        TypeError: an argument is a ShapeDtypeStruct.

    Example:
        >>> found = sk.analysis.scaling(lambda n: (jnp.sum, (jnp.ones(n),)), [1, 2], calls=1, rounds=2)
        >>> [size.devices for size in found.sizes]
        [1, 2]
    """
    one_of("scaling", "mode", mode, ("strong", "weak"))
    whole("scaling", calls=calls, rounds=rounds)
    for devices in sizes:
        whole("scaling", size=devices)
    order = sorted(set(sizes))
    if len(order) < 2:
        raise ValueError(
            f"scaling: sizes must hold at least two different numbers of devices; got {list(sizes)}. Add a smaller "
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
        gc.disable()  # a collection would hit one size by chance
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
    """The report on measured rounds; the times of a sample are in the order of `order`."""
    wall, cpu = (np.array([getattr(sample, name) for sample in samples]) for name in Sample._fields)
    more = np.array(order) / order[0]
    work = more if mode == "weak" else np.ones(len(order))  # relative to the smallest mesh
    speed_up = wall[:, :1] / wall * work
    # The CPU clock ticks coarsely: what took no tick has no ratio.
    work_efficiency = np.divide(cpu[:, :1] * work, cpu, out=np.full_like(cpu, np.nan), where=cpu > 0)
    sizes = tuple(
        Size(devices, *(_spread(values[:, at]) for values in (wall, cpu, speed_up, speed_up / more, work_efficiency)))
        for at, devices in enumerate(order)
    )
    return Scaling(mode, sizes, calls, len(samples), where, tuple(_notes(sizes, where)))


def _notes(sizes: Sequence[Size], where: Machine) -> list[str]:
    notes = []
    if where.simulated:
        notes.append(
            f"These devices are simulated and share {where.cores} CPU cores, so that speed-up and efficiency "
            "describe the cores, not the devices. The efficiency of CPU time, over the total work, shows what the "
            "program loses."
        )
    wide = [str(s.devices) for s in sizes[1:] if s.speed_up.p90 > 1.5 * s.speed_up.p10]
    if wide:
        notes.append(
            f"The speed-up on {', '.join(wide)} devices differs between rounds by more than half: the machine was "
            "busy. Repeat with more rounds or on an idle machine."
        )
    return notes


def _spread(values: np.ndarray) -> Spread:
    return Spread(*(float(v) for v in np.percentile(values, (50, 10, 90))))


def _shown(spread: Spread, scale: float = 1.0) -> str:
    digits = 3 if scale > 1 else 2
    median, low, high = (f"{value * scale:,.{digits}f}" for value in spread)
    return f"{median} [{low}, {high}]"
