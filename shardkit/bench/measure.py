"""Measures cases of one computation against each other, in a way that a shared machine cannot easily spoil.

Every round runs each case once, in an order that rotates, from the same starting values; ratios to the baseline are
taken round by round, so that what slows the machine down for a while slows both sides of a ratio. Each round's results
are compared with what is expected, outside the timed part: a row whose cases are wrong is an error, not a number.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from shardkit._arguments import checks
from shardkit.bench.environment import calibration, environment
from shardkit.bench.records import FORMAT, VERSION, Record

_SHORTEST = 1e-9  # microseconds, in place of a time of 0
STATISTICS = (("median", 50), ("p10", 10), ("p90", 90), ("p99", 99), ("min", 0), ("max", 100))
T = TypeVar("T")


class Sample(NamedTuple):
    """The time of one case in one round: microseconds a call, wall clock and CPU time of the process (all threads)."""

    wall_us: float
    cpu_us: float


def interleaved(runs: Mapping[str, Callable[[], T]], rounds: int) -> Iterator[dict[str, T]]:
    """Runs each function once a round and yields the results by name; each round starts one function further on.

    Args:
        runs: the functions by name.
        rounds: the number of calls of each function.

    Example:
        >>> from shardkit.bench.measure import interleaved
        >>> list(interleaved({"a": lambda: 1, "b": lambda: 2}, 2))
        [{'a': 1, 'b': 2}, {'a': 1, 'b': 2}]
    """
    names = list(runs)
    for number in range(rounds):
        first = number % len(names)
        results = {}
        for name in names[first:] + names[:first]:
            results[name] = runs[name]()
        # In the order of `runs`, because whoever reads a round takes the first case for the baseline.
        yield {name: results[name] for name in names}


def summarise(samples: Sequence[Mapping[str, Sample]], baseline: str) -> dict[str, dict[str, float]]:
    """Summarises each case: median, percentiles and extremes of its times, and of its ratios within one round.

    Quote the ratio of all rounds together. It divides each round by the geometric mean of its cases, so a slow round
    does not count. Then it takes each case's midmean, the mean of the middle half, so a slow moment does not count
    either.

    Args:
        samples: for each round, the samples by case.
        baseline: the case in the denominator of all ratios.

    Returns:
        By case: `wall_us_median`, `_p10`, `_p90`, `_p99`, `_min`, `_max`, the same with `cpu`, and with `ratio`; and
        `wall_ratio`, `cpu_ratio`, of all rounds together.

    Example:
        >>> from shardkit.bench.measure import Sample, summarise
        >>> rounds = [{"a": Sample(10, 10), "b": Sample(20, 10)}]
        >>> summarise(rounds, "a")["b"]["wall_ratio_median"]
        2.0
    """
    statistics: dict[str, dict[str, float]] = {name: {} for name in samples[0]}
    for clock in ("wall", "cpu"):
        times = {}
        for name in statistics:
            times[name] = np.array([getattr(sample[name], f"{clock}_us") for sample in samples])
        relative = divide_by_round(times)
        for name, row in statistics.items():
            row |= _describe(f"{clock}_us", times[name])
            row |= _describe(f"{clock}_ratio", times[name] / np.maximum(times[baseline], _SHORTEST))
            ratio = midmean(relative[name]) / midmean(relative[baseline])
            row[f"{clock}_ratio"] = round(float(ratio), 4)
    return statistics


def _describe(prefix: str, values: np.ndarray) -> dict[str, float]:
    """Median, percentiles and extremes of some values, by name."""
    statistics = {}
    for label, percent in STATISTICS:
        statistics[f"{prefix}_{label}"] = round(float(np.percentile(values, percent)), 4)
    return statistics


def divide_by_round(times: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The times of each case in each round, over the geometric mean of the round.

    For example a=[1, 10], b=[4, 40], where the second round fell on a busy moment: the means are 2 and 20, and both
    rounds give a=0.5, b=2.
    """
    logs = {}
    for name, values in times.items():
        logs[name] = np.log(np.maximum(np.asarray(values, float), _SHORTEST))
    round_means = np.mean(list(logs.values()), axis=0)
    shares = {}
    for name, values in logs.items():
        shares[name] = np.exp(values - round_means)
    return shares


def midmean(values: np.ndarray) -> Any:
    """The mean of the middle half, along the last dim: of 1, 2, 3, 4, 5, 6, 7, 100 it is 4.5, the mean of 3 to 6."""
    ordered = np.sort(values, axis=-1)
    n = ordered.shape[-1]
    return np.mean(ordered[..., n // 4 : n - n // 4], axis=-1)


def make_records(
    benchmark: str,
    row: str,
    samples: Sequence[Mapping[str, Sample]],
    calibrations: Sequence[float],
    shared: Mapping[str, Any],
    fields: Mapping[str, Mapping[str, Any]],
) -> list[Record]:
    """The records of a row: for each case what is shared, its statistics, its own fields and its samples."""
    names = list(samples[0])
    baseline = names[0]
    statistics = summarise(samples, baseline)
    where = environment()
    records = []
    for name in names:
        times: dict[str, list[float]] = {}
        for field in Sample._fields:
            times[field] = [round(getattr(sample[name], field), 3) for sample in samples]
        times["calibration_cpu_us"] = list(calibrations)
        record = {
            "format": FORMAT,
            "version": VERSION,
            "benchmark": benchmark,
            "row": row,
            "case": name,
            "baseline": baseline,
            "rounds": len(samples),
            **shared,
            **statistics[name],
            **fields.get(name, {}),
            "samples": times,
            "environment": where,
        }
        records.append(record)
    return records


MODES = ("inside", "dispatched")
"""Where calls are timed: in a loop inside one jit, or each from Python."""


def _carry_and_value(carry: Any, value: Any) -> tuple[Any, Any]:
    return carry, value


class Case(NamedTuple):
    """One of the ways to compute a row: `measure` times several cases beside each other.

    Attributes:
        name: its name in tables.
        step: `step(carry, *args) -> (carry, value)`, one call. The carry goes into the next call; the value may be
            None. If you pass a jitted or compiled function, it is called unchanged, with its donation.
        carry: the first carry of every round. It is copied, so donation does not consume it.
        args: further arrays for each call, after the carry.
        checked: `checked(carry, value) -> pytree of arrays`: the values to compare after the last call of a round,
            outside the timed part. By default both.
        expected: the right result of `checked`, as a pytree of arrays; None: the result of the baseline.
        repeated: `repeated(calls)` returns a jitted function of the carry and the args that calls `step` this often,
            for mode "inside". None: a loop around `step`. If `step` is a shard_map, every turn of a loop around it
            copies its arrays at the boundary; write the loop inside of it to avoid this.
        fields: further JSON values for its record.

    Example:
        >>> double = sk.bench.Case("double", lambda x: (2 * x, None), jnp.ones(4))
        >>> add = sk.bench.Case("add", lambda x: (x + x, None), jnp.ones(4))
        >>> [record["case"] for record in sk.bench.measure("doubling", "4 numbers", [double, add], calls=2, rounds=2)]
        ['double', 'add']
    """

    name: str
    step: Callable[..., tuple[Any, Any]]
    carry: Any
    args: tuple[Any, ...] = ()
    checked: Callable[[Any, Any], Any] = _carry_and_value
    expected: Any = None
    repeated: Callable[[int], Callable[..., tuple[Any, Any]]] | None = None
    fields: Mapping[str, Any] = MappingProxyType({})


def measure(
    benchmark: str,
    row: str,
    cases: Sequence[Case],
    *,
    mode: str = "inside",
    calls: int = 20,
    rounds: int = 20,
    donate: bool = True,
    tolerance: float = 1e-5,
    refuse: bool = True,
) -> list[Record]:
    """Measures the cases of one row; the first one is the baseline.

    Args:
        benchmark: the name of the benchmark, for the records.
        row: the name of the computation, for example "mlp, data=8".
        cases: at least one, with different names.
        mode: "inside" (a loop inside one jit) or "dispatched" (calls from Python, dispatch included).
        calls: calls of each case in each round; times are divided by it.
        rounds: timed rounds, after one untimed round that compiles.
        donate: donate the carry, to the loop or to each call.
        tolerance: largest accepted difference from the expected result, relative to its largest element.
        refuse: raise an error if a case is wrong; False: its record says so, in "wrong".

    Returns:
        One record per case. Times are microseconds a call; ratios are to the baseline within the same round;
        "wrong" counts elements outside of the tolerance, in the worst round; "samples" holds each round's times, and
        the CPU time of `calibration` beside it.

    Raises:
        ValueError: an unknown mode, a number below 1, names that are not different, or cases that are wrong.

    Example:
        >>> case = sk.bench.Case("double", lambda x: (2 * x, None), jnp.ones(4), expected=(4 * np.ones(4), None))
        >>> [record] = sk.bench.measure("doubling", "4 numbers", [case], calls=2, rounds=3)
        >>> record["wrong"], record["wall_ratio_median"], len(record["samples"]["cpu_us"])
        (0, 1.0, 3)
    """
    checks.one_of("measure", "mode", mode, MODES)
    calls, rounds = checks.integers_from_one("measure", calls=calls, rounds=rounds)
    names = [case.name for case in cases]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"measure: cases must have different names; got {names}. Name each of them.")
    runs = {}
    for case in cases:
        if mode == "inside":
            loop = _loop_inside_jit(case, calls, donate)
        else:
            loop = _loop_of_calls(case, calls, donate)
        runs[case.name] = _make_timed_run(case, loop, calls)
    agreement = _Agreement(f"{row} ({mode})", cases, tolerance, refuse)
    samples: list[dict[str, Sample]] = []
    calibrations: list[float] = []
    for number, results in enumerate(interleaved(runs, rounds + 1)):
        round_samples = {}
        round_values = {}
        for name, (sample, value) in results.items():
            round_samples[name] = sample
            round_values[name] = value
        agreement.check_round(round_values)
        if number > 0:  # the first round compiled
            samples.append(round_samples)
            calibrations.append(round(calibration(), 1))
    shared = {"mode": mode, "calls": calls, "donate": donate, "tolerance_relative": tolerance}
    fields_by_case: dict[str, dict[str, Any]] = {}
    for case in cases:
        fields_by_case[case.name] = agreement.fields_of(case.name) | dict(case.fields)
    return make_records(benchmark, row, samples, calibrations, shared, fields_by_case)


class _Agreement:
    """Compares the results of each round with the expected ones, or with the first case's if none are given."""

    def __init__(self, row: str, cases: Sequence[Case], tolerance: float, refuse: bool):
        self._row = row
        self._cases = cases
        self._tolerance = tolerance
        self._refuse = refuse
        # By the name of the case, in its worst round.
        self._largest_error: dict[str, float] = {}
        self._most_wrong: dict[str, int] = {}
        for case in cases:
            self._largest_error[case.name] = 0.0
            self._most_wrong[case.name] = 0

    def check_round(self, values: Mapping[str, Any]) -> None:
        """Compares the values of a round, by case; raises for one that is wrong, if that is refused."""
        baseline = self._cases[0].name
        for case in self._cases:
            expected = case.expected
            if expected is None:
                expected = values[baseline]
            error, path, wrong = difference(values[case.name], expected, self._tolerance)
            if wrong and self._refuse:
                raise _make_refusal(self._row, case, baseline, error, path, self._tolerance)
            self._largest_error[case.name] = max(self._largest_error[case.name], error)
            self._most_wrong[case.name] = max(self._most_wrong[case.name], wrong)

    def fields_of(self, name: str) -> dict[str, Any]:
        """The fields of a case's record: its worst round."""
        return {"disagreement_relative_max": self._largest_error[name], "wrong": self._most_wrong[name]}


def difference(value: Any, reference: Any, tolerance: float) -> tuple[float, str, int]:
    """How far a pytree of arrays is from a reference.

    Returns:
        The largest difference, relative to the largest element of the reference's leaf, infinite where a leaf is
        missing, has another shape, or is not finite; that leaf's path; the number of elements outside of the tolerance.
    """
    leaves = dict(jax.tree_util.tree_leaves_with_path(value))
    expected_leaves = dict(jax.tree_util.tree_leaves_with_path(reference))
    if leaves.keys() != expected_leaves.keys():
        # At least 1, or a reference without elements would make another tree right.
        elements = sum(np.size(x) for x in expected_leaves.values())
        return np.inf, "(another tree)", max(1, elements)
    largest = 0.0
    largest_path = ""
    total_wrong = 0
    for path, expected in expected_leaves.items():
        error, wrong = _relative_error(leaves[path], expected, tolerance)
        total_wrong += wrong
        if not largest_path or error > largest:
            largest = error
            largest_path = jax.tree_util.keystr(path)
    return largest, largest_path, total_wrong


def _loop_inside_jit(case: Case, calls: int, donate: bool) -> Callable[..., tuple[Any, Any]]:
    if case.repeated is not None:
        return case.repeated(calls)

    def loop(carry: Any, *args: Any) -> tuple[Any, Any]:
        # A loop's carry has one type from the start: begin with zeros in place of the value of a call.
        _, shapes = jax.eval_shape(case.step, carry, *args)
        value = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)

        def call(_: Any, carry_and_value: tuple[Any, Any]) -> tuple[Any, Any]:
            carry, _ = carry_and_value
            return case.step(carry, *args)

        return jax.lax.fori_loop(0, calls, call, (carry, value))

    return _jit(loop, donate)


def _jit(fn: Callable[..., Any], donate: bool) -> Callable[..., Any]:
    """A function that is jitted, with the memory of its first argument for its results if `donate`."""
    if donate:
        return jax.jit(fn, donate_argnums=(0,))
    return jax.jit(fn)


def _loop_of_calls(case: Case, calls: int, donate: bool) -> Callable[..., tuple[Any, Any]]:
    step = case.step
    # What a user has jitted or compiled keeps its own donation.
    is_jitted = isinstance(step, jax.stages.Compiled) or hasattr(step, "lower")
    if not is_jitted:
        step = _jit(step, donate)

    def loop(carry: Any, *args: Any) -> tuple[Any, Any]:
        value = None
        for _ in range(calls):
            carry, value = step(carry, *args)
        return carry, value

    return loop


def _make_timed_run(case: Case, loop: Callable[..., tuple[Any, Any]], calls: int) -> Callable[[], tuple[Sample, Any]]:
    # Every round starts from the same carry, which the loop may consume.
    copy = make_copier(case.carry)

    def run() -> tuple[Sample, Any]:
        carry = jax.block_until_ready(copy(case.carry))
        collects = gc.isenabled()
        gc.disable()  # as timeit does: a collection would fall on one case by chance
        try:
            wall_start = time.perf_counter()
            cpu_start = time.process_time()
            # jax returns before the devices have computed: the wait belongs to the time. The CPU time is that of all
            # threads, also of those that run simulated devices.
            carry, value = jax.block_until_ready(loop(carry, *case.args))
            wall = time.perf_counter() - wall_start
            cpu = time.process_time() - cpu_start
        finally:
            if collects:
                gc.enable()
        sample = Sample(wall * 1e6 / calls, cpu * 1e6 / calls)
        # Outside the timed part: the comparison moves the results to the host.
        return sample, jax.tree.map(_to_host, case.checked(carry, value))

    return run


def make_copier(arrays: Any) -> Callable[[Any], Any]:
    """A function that copies a pytree of arrays as these, in the same layout: a step may consume the copy."""
    shardings = jax.tree.map(lambda x: x.sharding, arrays)

    def copy(tree: Any) -> Any:
        return jax.tree.map(jnp.copy, tree)

    return jax.jit(copy, out_shardings=shardings)


def _to_host(x: Any) -> np.ndarray:
    """A leaf as numbers of numpy; a key, as the state of a training step has one, by its data."""
    if jnp.issubdtype(getattr(x, "dtype", np.float64), jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def _make_refusal(row: str, case: Case, baseline: str, error: float, path: str, tolerance: float) -> ValueError:
    """The error for a case that is wrong: by what is expected of it, or by what the baseline returns."""
    subject = "cases"
    standard = repr(baseline)
    if case.expected is not None:
        subject = "results"
        standard = "what is expected"
    leaf = ""
    if path:
        leaf = f" in leaf {path}"
    return ValueError(
        f"measure: {subject} must agree within {tolerance:.1e} of the largest element; in row {row!r}, {case.name!r} "
        f"differs from {standard} by {error:.1e}{leaf}. No time is reported: make both compute the same, or pass a "
        "larger tolerance."
    )


def _relative_error(value: Any, reference: Any, tolerance: float) -> tuple[float, int]:
    """The largest difference of two arrays, and the number of elements outside of the tolerance."""
    array = _to_host(value).astype(np.float64)
    expected = _to_host(reference).astype(np.float64)
    # Nothing can be measured against a reference with NaN, so that all of it counts as wrong.
    if array.shape != expected.shape or not np.isfinite(expected).all():
        return np.inf, max(1, expected.size)
    errors = np.abs(array - expected)
    largest = np.abs(expected).max(initial=0)
    # An expected result of zeros has no scale: 0 is right, and anything else infinitely far off.
    if largest:
        relative = errors / largest
    else:
        relative = np.where(errors == 0, 0.0, np.inf)
    # NaN > tolerance is False: without this line NaN would count as right.
    relative = np.where(np.isfinite(array), relative, np.inf)
    wrong = (relative > tolerance).sum()
    return float(relative.max(initial=0)), int(wrong)
