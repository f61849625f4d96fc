"""Rounds: functions that take turns, their times, and the records that come of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from shardkit.bench.environment import calibration, environment
from shardkit.bench.records import FORMAT, VERSION, Record

STATISTICS = (("median", 50), ("p10", 10), ("p90", 90), ("p99", 99), ("min", 0), ("max", 100))
T = TypeVar("T")


class Sample(NamedTuple):
    """What one case took in one round: microseconds a call, wall clock and CPU time of the process (all threads)."""

    wall_us: float
    cpu_us: float


def interleaved(runs: Mapping[str, Callable[[], T]], rounds: int) -> Iterator[dict[str, T]]:
    """Runs each function once a round and yields the results by name; each round starts one function further on.

    Args:
        runs: the functions by name.
        rounds: how often each is called.

    Returns:
        An iterator over rounds, of results by name.

    Example:
        >>> list(sk.bench.interleaved({"a": lambda: 1, "b": lambda: 2}, 2))
        [{'a': 1, 'b': 2}, {'a': 1, 'b': 2}]
    """
    names = list(runs)
    for number in range(rounds):
        first = number % len(names)
        results = {name: runs[name]() for name in names[first:] + names[:first]}
        yield {name: results[name] for name in names}


def summarise(samples: Sequence[Mapping[str, Sample]], baseline: str) -> dict[str, dict[str, float]]:
    """Median, percentiles and extremes of each case's times and of its ratios, each taken within one round.

    The ratio to quote is that of all rounds together: what slows a whole round is divided out by the geometric mean of
    its cases; of what is left each case's midmean is taken, the mean of the middle half, which no slow moment moves.

    Args:
        samples: for each round, the samples by case.
        baseline: the case that ratios are to.

    Returns:
        By case: `wall_us_median`, `_p10`, `_p90`, `_p99`, `_min`, `_max`, the same with `cpu`, and with `ratio`; and
        `wall_ratio`, `cpu_ratio`, of all rounds together.

    Example:
        >>> rounds = [{"a": sk.bench.Sample(10, 10), "b": sk.bench.Sample(20, 10)}]
        >>> sk.bench.summarise(rounds, "a")["b"]["wall_ratio_median"]
        2.0
    """
    out: dict[str, dict[str, float]] = {}
    times = {c: {n: [getattr(each[n], f"{c}_us") for each in samples] for n in samples[0]} for c in ("wall", "cpu")}
    steady = {clock: divided(each) for clock, each in times.items()}
    for name in samples[0]:
        out[name] = {}
        for clock in ("wall", "cpu"):
            own, base = (np.array(times[clock][each]) for each in (name, baseline))
            for kind, values in (("us", own), ("ratio", own / np.maximum(base, 1e-9))):
                for label, q in STATISTICS:
                    out[name][f"{clock}_{kind}_{label}"] = round(float(np.percentile(values, q)), 4)
            ratio = midmean(steady[clock][name]) / midmean(steady[clock][baseline])
            out[name][f"{clock}_ratio"] = round(float(ratio), 4)
    return out


def divided(times: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The times of each case in each round, over the geometric mean of the round."""
    logs = {name: np.log(np.maximum(np.asarray(each, float), 1e-9)) for name, each in times.items()}
    mean = np.mean(list(logs.values()), axis=0)
    return {name: np.exp(each - mean) for name, each in logs.items()}


def midmean(values: np.ndarray) -> Any:
    """The mean of the middle half, along the last dim."""
    ordered, n = np.sort(values, axis=-1), np.shape(values)[-1]
    return np.mean(ordered[..., n // 4 : n - n // 4], axis=-1)


def measure_functions(
    benchmark: str, row: str, functions: Mapping[str, Callable[[], Any]], *, rounds: int = 5
) -> list[Record]:
    """Measures Python functions whole, such as traces and imports; the first one is the baseline.

    CPU time is that of this process and of the child processes that a function starts and waits for.

    Args:
        benchmark: the name of the benchmark, for the records.
        row: what is done.
        functions: by name; each is called once a round, and what it returns is waited for.
        rounds: how often.

    Returns:
        One record per function, as `measure` returns them, in microseconds a call.

    Raises:
        ValueError: no functions.

    Example:
        >>> [record] = sk.bench.measure_functions("sorting", "8 numbers", {"sorted": lambda: sorted(range(8))})
        >>> record["rounds"], record["case"]
        (5, 'sorted')
    """
    if not functions:
        raise ValueError("measure_functions: functions must not be empty. Pass at least one by name.")
    samples: list[dict[str, Sample]] = []
    calibrations: list[float] = []
    for results in interleaved({name: partial(_whole, function) for name, function in functions.items()}, rounds):
        samples.append(results)
        calibrations.append(round(calibration(), 1))
    return recorded(benchmark, row, samples, calibrations, {"mode": "function", "calls": 1}, {})


def _whole(function: Callable[[], Any]) -> Sample:
    wall, cpu = time.perf_counter(), _cpu_seconds()
    jax.block_until_ready(function())
    return Sample((time.perf_counter() - wall) * 1e6, (_cpu_seconds() - cpu) * 1e6)


def _cpu_seconds() -> float:
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def recorded(
    benchmark: str,
    row: str,
    samples: Sequence[Mapping[str, Sample]],
    calibrations: Sequence[float],
    shared: Mapping[str, Any],
    fields: Mapping[str, Mapping[str, Any]],
) -> list[Record]:
    """The records of a row: for each case what is shared, its statistics, its own fields and its samples."""
    baseline = next(iter(samples[0]))
    numbers, here = summarise(samples, baseline), environment()
    return [
        {
            "format": FORMAT,
            "version": VERSION,
            "benchmark": benchmark,
            "row": row,
            "case": name,
            "baseline": baseline,
            "rounds": len(samples),
            **shared,
            **numbers[name],
            **fields.get(name, {}),
            "samples": {
                **{key: [round(getattr(each[name], key), 3) for each in samples] for key in Sample._fields},
                "calibration_cpu_us": list(calibrations),
            },
            "environment": here,
        }
        for name in samples[0]
    ]
