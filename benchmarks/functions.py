"""Python functions measured whole, such as traces and imports, in the rounds and records of `shardkit.bench`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax

from shardkit.bench.environment import calibration
from shardkit.bench.measure import Sample, interleaved, make_records
from shardkit.bench.records import Record


def measure_functions(
    benchmark: str, row: str, functions: Mapping[str, Callable[[], Any]], *, rounds: int = 5
) -> list[Record]:
    """A record per function, in microseconds a call, and as ratios to the first one.

    Each is called once a round, and what it returns is waited for. CPU time is that of this process and of the child
    processes that a function starts and waits for.
    """
    timers = {}
    for name, function in functions.items():
        timers[name] = partial(_time_call, function)
    samples: list[dict[str, Sample]] = []
    calibrations: list[float] = []
    for results in interleaved(timers, rounds):
        samples.append(results)
        calibrations.append(round(calibration(), 1))
    return make_records(benchmark, row, samples, calibrations, {"mode": "function", "calls": 1}, {})


def _time_call(function: Callable[[], Any]) -> Sample:
    wall_start = time.perf_counter()
    cpu_start = _read_cpu_seconds()
    # jax returns before a computation ends: without the wait only its dispatch would be timed.
    jax.block_until_ready(function())
    wall = time.perf_counter() - wall_start
    cpu = _read_cpu_seconds() - cpu_start
    return Sample(wall * 1e6, cpu * 1e6)


def _read_cpu_seconds() -> float:
    """CPU time of this process, and of its children that have ended."""
    times = os.times()
    # os.times counts this process in hundredths of a second; process_time is exact.
    return time.process_time() + times.children_user + times.children_system
