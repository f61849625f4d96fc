"""Measures variants of one computation against each other, in a way that a shared machine cannot easily spoil.

Every round runs each variant once, in an order that rotates, from the same starting values; ratios to the baseline are
taken round by round, so that what slows the machine down for a while slows both sides of a ratio. Each round's results
are compared between the variants, outside the timed part: a row whose variants disagree is an error, not a number.

Two modes: "inside" runs the steps in a loop inside one jit, so that dispatch from Python is not measured;
"dispatched" calls the compiled step from Python and waits once at the end, as a training loop does.

A whole benchmark file (save it as `benchmarks/example.py`, run `python -m benchmarks.example --json out.jsonl`):

    '''All-reduce: one psum against reduce_scatter and all_gather, over 4 MiB on each device.'''

    import jax, jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec as P
    import shardkit as sk
    from benchmarks import harness

    def variant(name, mesh, kernel):
        mean = jax.shard_map(lambda x: kernel(x) / mesh.size, mesh=mesh, in_specs=P(), out_specs=P())
        x = jax.device_put(jnp.arange(2.0**20), NamedSharding(mesh, P()))
        return harness.Variant(name, lambda x: (mean(x), None), x)

    def pair(x):
        return sk.all_gather(sk.reduce_scatter(sk.vary(x, "data"), "data"), "data", replicated=True)

    def main(argv=None):
        options = harness.start(__doc__, argv, devices=8)
        mesh = sk.make_mesh(data=-1)
        psum = variant("psum", mesh, lambda x: sk.all_reduce(sk.vary(x, "data"), "data"))
        for mode in harness.MODES:
            records = harness.measure("all_reduce", "4 MiB", [psum, variant("pair", mesh, pair)], mode=mode,
                                      calls=options.calls or 10, rounds=options.rounds or 20)
            harness.report(records, options.json)

    if __name__ == "__main__":
        main()
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

import shardkit as sk
from benchmarks.environment import environment

MODES = ("inside", "dispatched")
BANNER = (
    "These devices are simulated and share the CPU's cores: read the numbers as overhead and ratios, not as bandwidth."
)
T = TypeVar("T")
Record = dict[str, Any]


class Variant(NamedTuple):
    """One way to compute a row.

    Attributes:
        name: how it is listed.
        step: `step(carry, *args) -> (carry, value)`, what one call does; the carry feeds the next call and the value
            may be None. A function that is jitted already is dispatched as it is, with its own donation.
        carry: the carry that every round starts from; it is copied, so donation does not consume it.
        args: arrays that each call is given, after the carry.
        checked: `checked(carry, value) -> pytree of arrays`: what is compared between variants after the last call of
            a round, outside the timed part. By default both.
    """

    name: str
    step: Callable[..., tuple[Any, Any]]
    carry: Any
    args: tuple[Any, ...] = ()
    checked: Callable[[Any, Any], Any] = lambda carry, value: (carry, value)


class Sample(NamedTuple):
    """What one variant took in one round: microseconds a call, wall clock and CPU time of the process (all threads)."""

    wall_us: float
    cpu_us: float


def start(
    description: str | None, argv: Sequence[str] | None = None, *, devices: int = 8, **flags: str
) -> argparse.Namespace:
    """Reads the command line, starts the devices and prints where this runs; call it before jax touches a device.

    Args:
        description: the benchmark's docstring, for `--help`.
        argv: arguments; None reads the command line.
        devices: devices to simulate unless `--simulate` says otherwise; `--simulate 0` uses the machine's own.
        **flags: further on/off options by name, each with its help.

    Returns:
        Namespace with `simulate`, `calls` and `rounds` (None unless given), `json` (Path or None), `smoke`, the flags.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", type=int, default=devices, help=f"CPU devices (default {devices}); 0: real ones")
    parser.add_argument("--calls", type=int, help="calls in each round")
    parser.add_argument("--rounds", type=int, help="rounds, in each of which every variant runs once")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one JSON line per variant and row")
    parser.add_argument("--smoke", action="store_true", help="the smallest run that exercises everything; no numbers")
    for name, text in flags.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    options = parser.parse_args(argv)
    if options.simulate:
        sk.simulate_devices(options.simulate)
    here = environment()
    print(
        f"jax {here['jax']}, {here['device_count']} x {here['device_kind']} ({here['platform']}), {here['cpu_model']}, "
        f"{here['cores']} cores, load {here['load_average_1min']}, Python {here['python']}"
    )
    if here["platform"] == "cpu":
        print(BANNER)
    return options


def measure(
    benchmark: str,
    row: str,
    variants: Sequence[Variant],
    *,
    mode: str = "inside",
    calls: int = 20,
    rounds: int = 20,
    donate: bool = True,
    tolerance: float = 1e-5,
) -> list[Record]:
    """Measures the variants of one row; the first one is the baseline.

    Args:
        benchmark: the name of the benchmark, for the records.
        row: what is computed, for example "mlp, data=8".
        variants: at least one, with different names.
        mode: "inside" (a loop inside one jit) or "dispatched" (calls from Python, dispatch included).
        calls: calls of each variant in each round; times are divided by it.
        rounds: timed rounds, after one untimed round that compiles.
        donate: donate the carry, to the loop or to each call.
        tolerance: largest accepted `disagreement` with the baseline, relative.

    Returns:
        One record per variant. Times are microseconds a call; ratios are to the baseline within the same round.

    Raises:
        ValueError: an unknown mode, names that are not different, or variants that disagree.
    """
    if mode not in MODES:
        raise ValueError(f"measure: mode must be 'inside' or 'dispatched'; got {mode!r}. Choose one of them.")
    names = [v.name for v in variants]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"measure: variants must have different names; got {names}. Name each of them.")
    prepare = _inside if mode == "inside" else _dispatched
    runs = {v.name: _timed(v, prepare(v, calls, donate), calls) for v in variants}
    samples: list[dict[str, Sample]] = []
    worst = dict.fromkeys(names, 0.0)
    for number, results in enumerate(interleaved(runs, rounds + 1)):
        _compare(f"{row} ({mode})", {name: value for name, (_, value) in results.items()}, tolerance, worst)
        if number:  # the first one compiled
            samples.append({name: sample for name, (sample, _) in results.items()})
    numbers = summarise(samples, names[0])
    shared = {"benchmark": benchmark, "row": row, "mode": mode, "baseline": names[0], "calls": calls, "rounds": rounds}
    shared |= {"donate": donate, "tolerance_relative": tolerance, "environment": environment()}
    return [{**shared, "variant": n, **numbers[n], "disagreement_relative_max": worst[n]} for n in names]


def interleaved(runs: Mapping[str, Callable[[], T]], rounds: int) -> Iterator[dict[str, T]]:
    """Runs each function once a round and yields the results by name; each round starts one function further on."""
    names = list(runs)
    for number in range(rounds):
        first = number % len(names)
        results = {name: runs[name]() for name in names[first:] + names[:first]}
        yield {name: results[name] for name in names}


def summarise(samples: Sequence[Mapping[str, Sample]], baseline: str) -> dict[str, dict[str, float]]:
    """Median, 10th and 90th percentile of each variant's times and of its ratios, each taken within one round.

    Args:
        samples: for each round, the samples by variant.
        baseline: the variant that ratios are to.

    Returns:
        By variant: `wall_us_median`, `wall_us_p10`, `wall_us_p90`, the same with `cpu`, and `wall_ratio_median` etc.
    """
    out: dict[str, dict[str, float]] = {}
    for name in samples[0]:
        out[name] = {}
        for clock in ("wall", "cpu"):
            own = np.array([getattr(each[name], f"{clock}_us") for each in samples])
            base = np.array([getattr(each[baseline], f"{clock}_us") for each in samples])
            for kind, values in (("us", own), ("ratio", own / np.maximum(base, 1e-9))):
                for label, q in (("median", 50), ("p10", 10), ("p90", 90)):
                    out[name][f"{clock}_{kind}_{label}"] = round(float(np.percentile(values, q)), 4)
    return out


def disagreement(value: Any, reference: Any) -> tuple[float, str]:
    """The largest difference of two pytrees, relative to the largest element of the reference's leaf, and its path.

    Infinite where a leaf is missing, has another shape, or is not finite.
    """
    found, known = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (value, reference))
    if found.keys() != known.keys():
        return np.inf, "(another tree)"
    errors = [(_relative(found[path], known[path]), jax.tree_util.keystr(path)) for path in known]
    return max(errors, default=(0.0, ""), key=lambda each: each[0])


def report(records: Sequence[Record], file: Path | None = None, line: Callable[[Record], str] | None = None) -> None:
    """Prints records as a table, or each as this line of one, and, given a file, appends them to it as JSON lines."""
    print("\n".join(map(line, records)) if line else "\n" + table(records), flush=True)
    if file is not None:
        with file.open("a") as out:
            out.writelines(json.dumps(record) + "\n" for record in records)


def table(records: Sequence[Record]) -> str:
    """The records of one row as plain text: microseconds a call and ratios, each as median [p10, p90]."""
    head = ["variant", "wall us", "CPU us", "wall ratio", "CPU ratio"]
    columns = (("wall_us", 1), ("cpu_us", 1), ("wall_ratio", 3), ("cpu_ratio", 3))
    lines = [head] + [[r["variant"], *(_spread(r, *column) for column in columns)] for r in records]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    body = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    r = records[0]
    return "\n".join([f"{r['row']} ({r['mode']}, {r['calls']} calls x {r['rounds']} rounds)", *body])


def _inside(variant: Variant, calls: int, donate: bool) -> Callable[..., tuple[Any, Any]]:
    def loop(carry: Any, *args: Any) -> tuple[Any, Any]:
        shapes = jax.eval_shape(variant.step, carry, *args)[1]
        nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return jax.lax.fori_loop(0, calls, lambda _, both: variant.step(both[0], *args), (carry, nothing))

    return jax.jit(loop, donate_argnums=(0,) if donate else ())


def _dispatched(variant: Variant, calls: int, donate: bool) -> Callable[..., tuple[Any, Any]]:
    jitted = hasattr(variant.step, "lower")
    step = variant.step if jitted else jax.jit(variant.step, donate_argnums=(0,) if donate else ())

    def loop(carry: Any, *args: Any) -> tuple[Any, Any]:
        value = None
        for _ in range(calls):
            carry, value = step(carry, *args)
        return carry, value

    return loop


def _timed(variant: Variant, loop: Callable[..., tuple[Any, Any]], calls: int) -> Callable[[], tuple[Sample, Any]]:
    shardings = jax.tree.map(lambda x: x.sharding, variant.carry)
    copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=shardings)

    def run() -> tuple[Sample, Any]:
        carry = jax.block_until_ready(copy(variant.carry))
        gc.disable()  # as timeit does: a collection would fall on one variant by chance
        try:
            wall, cpu = time.perf_counter(), time.process_time()
            out = jax.block_until_ready(loop(carry, *variant.args))
            sample = Sample((time.perf_counter() - wall) * 1e6 / calls, (time.process_time() - cpu) * 1e6 / calls)
        finally:
            gc.enable()
        return sample, jax.tree.map(np.asarray, variant.checked(*out))

    return run


def _compare(row: str, values: Mapping[str, Any], tolerance: float, worst: dict[str, float]) -> None:
    baseline, *others = values
    for name in others or [baseline]:
        error, path = disagreement(values[name], values[baseline])
        if not error <= tolerance:
            raise ValueError(
                f"measure: variants must agree within {tolerance:.1e} of the largest element; in row {row!r}, {name!r} "
                f"differs from {baseline!r} by {error:.1e}{f' in leaf {path}' if path else ''}. No time is reported: "
                "make both compute the same, or pass a larger tolerance."
            )
        worst[name] = max(worst[name], error)


def _relative(value: Any, reference: Any) -> float:
    a, b = (np.asarray(x).astype(np.float64) for x in (value, reference))
    if a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return np.inf
    error, size = np.abs(a - b).max(initial=0), np.abs(b).max(initial=0)
    return 0.0 if error == 0 else float(error / size) if size else np.inf


def _spread(record: Record, key: str, digits: int) -> str:
    median, low, high = (f"{record[f'{key}_{label}']:.{digits}f}" for label in ("median", "p10", "p90"))
    return f"{median} [{low}, {high}]"
