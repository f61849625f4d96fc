"""Two files of results compared: what became slower, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardkit._arguments import checks
from shardkit.bench.measure import divided, midmean
from shardkit.bench.records import Record
from shardkit.meshes.layout import table

_RESAMPLES = 2000
_LEVEL = (0.5, 99.5)  # percentiles: an interval of 99 %, because a file has many rows
_Key = tuple[str, str, str, str]


class Change(NamedTuple):
    """What became of one case.

    Attributes:
        benchmark, row, mode, case: which one.
        measure: what is compared: "cpu" or "wall" time, as a ratio to the baseline in the same round, and of the
            baseline itself to the calibration loop.
        old: the ratio before, of all rounds together, as in `summarise`.
        new: the ratio after.
        change: new / old - 1.
        low: the lower end of its 99 % interval, by bootstrap over rounds.
        high: the upper end.
        verdict: "slower", "faster", "equal", "only in old" or "only in new".
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
        return bool(self.wrong) or any(each.verdict == "slower" for each in self.changes)

    def __str__(self) -> str:
        rows = [("row", "case", "ratio to", "old", "new", "change", "99 % interval", "verdict")]
        for c in self.changes:
            numbers = ("", "", "", "")
            if not math.isnan(c.change):  # of a case that one run alone has, all numbers are missing
                numbers = (f"{c.old:.3f}", f"{c.new:.3f}", f"{c.change:+.1%}", f"{c.low:+.1%} to {c.high:+.1%}")
            where = f"{c.benchmark}: {c.row}" + (f" ({c.mode})" if c.mode else "")
            rows.append((where, c.case, c.measure, *numbers, c.verdict))
        slower = sum(c.verdict == "slower" for c in self.changes)
        last = f"{slower} of {len(self.changes)} slower by more than {self.threshold:.0%}"
        return "\n".join([table(rows), *(f"wrong elements: {each}" for each in self.wrong), last])


def compare(old: Sequence[Record], new: Sequence[Record], *, threshold: float = 0.05) -> Comparison:
    """Compares two runs by ratios that were taken within a round, so that a slower hour is not a slower program.

    A case is called slower if its ratio to the baseline, of all rounds together as in `summarise`, grew by more than
    the threshold, and the 99 % interval of that growth, by bootstrap over rounds, excludes zero. On CPU the ratio is of
    CPU time, elsewhere of wall-clock time. Results of the same case that a file holds several times are pooled.

    Args:
        old: records of `measure` or `read`.
        new: records after the change.
        threshold: the smallest change that counts, as a fraction.

    Raises:
        ValueError: a threshold that is not positive.

    Example:
        >>> case = sk.bench.Case("double", lambda x: (2 * x, None), jnp.ones(4))
        >>> records = sk.bench.measure("doubling", "4 numbers", [case], calls=2, rounds=3)
        >>> sk.bench.compare(records, records).changes[0].verdict
        'equal'

    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13: the percentile interval.
    """
    [threshold] = checks.positive("compare", threshold=threshold)
    before, after = _pairs(old), _pairs(new)
    generator = np.random.default_rng(0)
    changes = [_change(key, before.get(key), after.get(key), threshold, generator) for key in before | after]
    wrong = [f"{r['row']}, {r['case']}: {r['wrong']}" for r in new if r.get("wrong")]
    return Comparison(tuple(changes), threshold, tuple(wrong))


def _pairs(records: Sequence[Record]) -> dict[_Key, tuple[str, np.ndarray]]:
    """By case what its ratio is to, and the times of both in each round."""
    timed = [r for r in records if "samples" in r]
    runs: dict[tuple[str, str, str], list[dict[str, Record]]] = {}
    for record in timed:  # a case that comes again belongs to another run
        each = runs.setdefault(_key(record)[:3], [])
        if not each or record["case"] in each[-1]:
            each.append({})
        each[-1][record["case"]] = record
    out: dict[_Key, tuple[str, list[np.ndarray]]] = {}
    for run in (run for each in runs.values() for run in each):
        for name, record in run.items():
            clock = "cpu_us" if record["environment"].get("platform") == "cpu" else "wall_us"
            of_machine = name == record["baseline"] or record["baseline"] not in run
            times = {n: r["samples"][clock] for n, r in run.items()}
            if of_machine:
                times = {name: times[name], "calibration": record["samples"]["calibration_cpu_us"]}
            steady = divided(times)
            what = f"{clock.removesuffix('_us')}, {'calibration' if of_machine else record['baseline']}"
            both = np.stack([steady[name], steady["calibration" if of_machine else record["baseline"]]])
            out.setdefault(_key(record), (what, []))[1].append(both)
    return {key: (what, np.concatenate(each, axis=-1)) for key, (what, each) in out.items()}


def _key(record: Record) -> _Key:
    return record["benchmark"], record["row"], record.get("mode", ""), record["case"]


def _change(
    key: _Key,
    before: tuple[str, np.ndarray] | None,
    after: tuple[str, np.ndarray] | None,
    threshold: float,
    generator: np.random.Generator,
) -> Change:
    if before is None or after is None:
        there = "new" if before is None else "old"
        none = float("nan")
        return Change(*key, "", none, none, none, none, none, f"only in {there}")
    what, (old, new) = after[0], (before[1], after[1])
    low, high = np.percentile(_resampled(new, generator) / _resampled(old, generator) - 1, _LEVEL)
    ratios = [float(midmean(own) / midmean(base)) for own, base in (old, new)]
    change = ratios[1] / ratios[0] - 1
    slower, faster = change > threshold and low > 0, change < -threshold and high < 0
    verdict = "slower" if slower else "faster" if faster else "equal"
    return Change(*key, what, ratios[0], ratios[1], change, float(low), float(high), verdict)


def _resampled(pair: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Ratios of midmeans of rounds that are drawn again, the same rounds for both."""
    rounds = pair.shape[-1]
    drawn = generator.integers(rounds, size=(_RESAMPLES, rounds))
    return midmean(pair[0][drawn]) / midmean(pair[1][drawn])
