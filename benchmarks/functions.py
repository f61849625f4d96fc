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
    samples: list[dict[str, Sample]] = []
    calibrations: list[float] = []
    for results in interleaved({name: partial(_whole, function) for name, function in functions.items()}, rounds):
        samples.append(results)
        calibrations.append(round(calibration(), 1))
    return make_records(benchmark, row, samples, calibrations, {"mode": "function", "calls": 1}, {})


def _whole(function: Callable[[], Any]) -> Sample:
    wall, cpu = time.perf_counter(), _cpu_seconds()
    jax.block_until_ready(function())
    return Sample((time.perf_counter() - wall) * 1e6, (_cpu_seconds() - cpu) * 1e6)


def _cpu_seconds() -> float:
    times = os.times()
    return time.process_time() + times.children_user + times.children_system
