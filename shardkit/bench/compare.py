"""Two files of results compared: what became slower, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardkit._arguments import checks
from shardkit.bench.measure import divide_by_round, midmean
from shardkit.bench.records import Record
from shardkit.meshes.layout import table

_RESAMPLES = 2000
_LEVEL = (0.5, 99.5)  # percentiles: an interval of 99 %, because a file has many rows
_COMPARED = ("slower", "faster", "equal")  # verdicts
_Key = tuple[str, str, str, str]


class Change(NamedTuple):
    """What became of one case.

    Attributes:
        benchmark, row, mode, case: which one.
        measure: what is compared: "cpu" or "wall" time, as a ratio to the baseline in the same round, and of the
            baseline itself to the calibration loop; both measures if they differ.
        old: the ratio before, of all rounds together, as in `summarise`.
        new: the ratio after.
        change: new / old - 1.
        low: the lower end of its 99 % interval, by bootstrap over rounds.
        high: the upper end.
        verdict: "slower", "faster", "equal", "only in old", "only in new", or "not comparable" if the two runs have
            another baseline or clock.
    """

    benchmark: str
    row: str
    mode: str
    case: str
    measure: str
    old: float
    new: float
    change: float
    low: float
    high: float
    verdict: str


class Comparison(NamedTuple):
    """Two files of results; print it. `regressed` says whether any case became slower or wrong."""

    changes: tuple[Change, ...]
    threshold: float
    wrong: tuple[str, ...] = ()

    @property
    def regressed(self) -> bool:
        """Whether a case became slower than the threshold allows, or gave wrong elements."""
        return bool(self.wrong) or any(change.verdict == "slower" for change in self.changes)

    def __str__(self) -> str:
        rows = [("row", "case", "ratio to", "old", "new", "change", "99 % interval", "verdict")]
        for change in self.changes:
            rows.append(_make_line(change))
        lines = [table(rows)]
        for case in self.wrong:
            lines.append(f"wrong elements: {case}")
        verdicts = [change.verdict for change in self.changes]
        compared = sum(verdict in _COMPARED for verdict in verdicts)
        lines.append(f"{verdicts.count('slower')} of {compared} slower by more than {100 * self.threshold:g}%")
        return "\n".join(lines)


def _make_line(change: Change) -> tuple[str, str, str, str, str, str, str, str]:
    where = f"{change.benchmark}: {change.row}"
    if change.mode:
        where += f" ({change.mode})"
    if math.isnan(change.change):  # of what is not compared, all numbers are missing
        return where, change.case, change.measure, "", "", "", "", change.verdict
    return (
        where,
        change.case,
        change.measure,
        f"{change.old:.3f}",
        f"{change.new:.3f}",
        f"{change.change:+.1%}",
        f"{change.low:+.1%} to {change.high:+.1%}",
        change.verdict,
    )


def compare(old: Sequence[Record], new: Sequence[Record], *, threshold: float = 0.05) -> Comparison:
    """Compares two runs by their ratios within a round: a slower hour is not a slower program.

    A case is slower if two things hold. Its ratio to the baseline, of all rounds together as in `summarise`, grew by
    more than the threshold. And the 99 % interval of this growth, by bootstrap over rounds, excludes zero. On CPU it
    takes the ratio of CPU times, elsewhere of wall-clock times. It pools results of the same case in a file.

    Args:
        old: records from before the change, of `measure` or `read`.
        new: records after the change.
        threshold: the smallest change to report, as a fraction.

    Raises:
        ValueError: a threshold that is not positive; runs without a case in common, or without samples; results of one
            case in a file that have different baselines or clocks.

    Example:
        >>> case = sk.bench.Case("double", lambda x: (2 * x, None), jnp.ones(4))
        >>> records = sk.bench.measure("doubling", "4 numbers", [case], calls=2, rounds=3)
        >>> sk.bench.compare(records, records).changes[0].verdict
        'equal'

    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13: the percentile interval.
    """
    [threshold] = checks.positive("compare", threshold=threshold)
    before = _collect_times(old)
    after = _collect_times(new)
    if not before.keys() & after.keys():
        raise ValueError(
            f"compare: the two runs must have a case with samples in common; got none in {len(old)} and {len(new)} "
            "results. Measure the same cases before and after."
        )
    # Seeded, so that the same two files always get the same verdict.
    generator = np.random.default_rng(0)
    changes = []
    # In the order of the old file, and behind it what only the new one has.
    for key in before | after:
        changes.append(_compare_case(key, before.get(key), after.get(key), threshold, generator))
    wrong = []
    for record in new:
        if record.get("wrong"):
            wrong.append(f"{record['row']}, {record['case']}: {record['wrong']}")
    return Comparison(tuple(changes), threshold, tuple(wrong))


class _Times(NamedTuple):
    """The times of a case and of its baseline, [2, rounds]."""

    measure: str
    pairs: np.ndarray


def _collect_times(records: Sequence[Record]) -> dict[_Key, _Times]:
    """For each case its times in every round, beside the times of its baseline, over all runs in a file."""
    measures: dict[_Key, str] = {}
    pairs: dict[_Key, list[np.ndarray]] = {}
    for run in _separate_runs(records):
        for name, record in run.items():
            key = _key(record)
            times = _read_times(name, record, run)
            first_measure = measures.setdefault(key, times.measure)
            if times.measure != first_measure:
                raise ValueError(
                    f"compare: results of one case in a file must have one baseline and clock; got {first_measure!r} "
                    f"and {times.measure!r} for {name!r}. Keep such runs in files of their own."
                )
            pairs.setdefault(key, []).append(times.pairs)
    times_of = {}
    for key, arrays in pairs.items():
        times_of[key] = _Times(measures[key], np.concatenate(arrays, axis=-1))
    return times_of


def _separate_runs(records: Sequence[Record]) -> list[dict[str, Record]]:
    """The records by run and case: a case that comes again belongs to another run of the same row.

    For example a, b, a, b of one row are the runs {a, b} and {a, b}.
    """
    runs: dict[tuple[str, str, str], list[dict[str, Record]]] = {}
    for record in records:
        if "samples" not in record:
            continue
        benchmark, row, mode, case = _key(record)
        row_runs = runs.setdefault((benchmark, row, mode), [])
        if not row_runs or case in row_runs[-1]:
            row_runs.append({})
        row_runs[-1][case] = record
    all_runs: list[dict[str, Record]] = []
    for row_runs in runs.values():
        all_runs += row_runs
    return all_runs


def _read_times(name: str, record: Record, run: dict[str, Record]) -> _Times:
    """The times of a case in one run beside its baseline's; for the baseline itself, beside the calibration loop's."""
    clock = "wall"
    if record["environment"].get("platform") == "cpu":
        clock = "cpu"
    times = {}
    baseline = record["baseline"]
    # The baseline has nothing beside it but the machine itself, whose speed the calibration loop shows.
    if name == baseline or baseline not in run:
        baseline = "calibration"
        times[name] = record["samples"][f"{clock}_us"]
        times[baseline] = record["samples"]["calibration_cpu_us"]
    else:
        for case, case_record in run.items():
            times[case] = case_record["samples"][f"{clock}_us"]
    relative = divide_by_round(times)
    return _Times(f"{clock}, {baseline}", np.stack([relative[name], relative[baseline]]))


def _key(record: Record) -> _Key:
    return record["benchmark"], record["row"], record.get("mode", ""), record["case"]


def _compare_case(
    key: _Key, before: _Times | None, after: _Times | None, threshold: float, generator: np.random.Generator
) -> Change:
    if before is None:
        return _make_empty_change(key, "", "only in new")
    if after is None:
        return _make_empty_change(key, "", "only in old")
    if before.measure != after.measure:  # a ratio to another baseline says nothing of the case
        return _make_empty_change(key, f"{before.measure}; {after.measure}", "not comparable")
    new_ratios = _resample_ratios(after.pairs, generator)
    old_ratios = _resample_ratios(before.pairs, generator)
    low, high = np.percentile(new_ratios / old_ratios - 1, _LEVEL)
    old = _ratio(before.pairs)
    new = _ratio(after.pairs)
    change = new / old - 1
    # Large enough to matter, and no accident of some rounds: the interval excludes zero.
    verdict = "equal"
    if change > threshold and low > 0:
        verdict = "slower"
    elif change < -threshold and high < 0:
        verdict = "faster"
    return Change(*key, after.measure, old, new, change, float(low), float(high), verdict)


def _make_empty_change(key: _Key, measure: str, verdict: str) -> Change:
    nan = float("nan")
    return Change(*key, measure, nan, nan, nan, nan, nan, verdict)


def _ratio(pairs: np.ndarray) -> float:
    case, baseline = pairs
    return float(midmean(case) / midmean(baseline))


def _resample_ratios(pairs: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Ratios of midmeans of rounds that are drawn again, the same rounds for both."""
    # A slow round is slow for the case and its baseline, so that both must come from the same round.
    case, baseline = pairs
    rounds = pairs.shape[-1]
    numbers = generator.integers(rounds, size=(_RESAMPLES, rounds))
    return midmean(case[numbers]) / midmean(baseline[numbers])
