"""What the guard costs: the same step plain and under `guard.watch`, and the time that its monitor takes beside it.

The small step shows the microseconds that a call costs; the one of about 50 ms shows them as a share, which is to stay
below 1%. The last case of each row is the plain step again: its ratio is 1 but for what this machine cannot tell
apart.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import shardkit as sk
from benchmarks.processes import read_cpu_seconds
from benchmarks.start import choose_calls, choose_rounds, start
from shardkit import bench
from shardkit.bench.records import Record
from shardkit.runtime.channel import client

TARGET = 1.01
LONG_STEP = 0.05  # seconds

Step = Callable[[Any], tuple[Any, Any]]


def make_step(size: int, products: int) -> tuple[Step, Any]:
    """A jitted step of so many products of square matrices, and its first state."""

    def step(state: Any) -> tuple[Any, Any]:
        x = jax.lax.fori_loop(0, products, lambda _, x: jnp.tanh(x @ state["w"]), state["x"])
        return state | {"x": x}, jnp.mean(x)

    weights = jnp.eye(size) * 0.9
    return jax.jit(step), {"w": weights, "x": jnp.ones((size, size))}


def make_long_step() -> tuple[Step, Any]:
    """A step that takes about 50 ms on this machine: five products are timed, and others are as many as fill it."""
    size = 512
    products = 5
    step, state = make_step(size, products)
    jax.block_until_ready(step(state))  # compiles
    start_time = time.perf_counter()
    jax.block_until_ready(step(state))
    seconds = time.perf_counter() - start_time
    return make_step(size, max(1, round(products * LONG_STEP / seconds)))


def measure_row(row: str, step: Step, state: Any, calls: int, rounds: int) -> list[Record]:
    """Times a step plain, guarded, and plain again."""
    guard = sk.runtime.guard(mesh=sk.make_mesh(data=1, devices=jax.devices()[:1]))
    cases = [
        bench.Case("plain", step, state),
        bench.Case("guarded", guard.watch(step), state),
        bench.Case("plain again", step, state),
    ]
    return bench.measure("guard", row, cases, mode="dispatched", calls=calls, rounds=rounds)


def print_monitor_share(seconds: float) -> None:
    """Prints what the monitor takes of a core while this process sleeps: it is a process of its own."""
    monitor = client.find_monitor()
    assert monitor is not None, "a guard has a monitor"
    before = read_cpu_seconds(monitor.process_id)
    time.sleep(seconds)
    cpu = read_cpu_seconds(monitor.process_id) - before
    print(f"the monitor beside the process: {cpu / seconds:.2%} of one core")


def main(argv: Sequence[str] | None = None) -> int:
    """Times both rows and the monitor; 1 if the guard costs more of the longer step than the target."""
    options = start(__doc__, argv, devices=1)
    rounds = choose_rounds(options, 20)

    # Many calls of so short a step: of a few, one interruption would be most of the round.
    step, state = make_step(16, 1)
    records = measure_row("a step of 20 us", step, state, choose_calls(options, 2000), rounds)
    bench.report(records, options.json)

    if options.smoke:
        step, state = make_step(512, 5)
    else:
        step, state = make_long_step()
    records = measure_row("a step of 50 ms", step, state, choose_calls(options, 20), rounds)
    bench.report(records, options.json)
    _, guarded, _ = records
    missed = guarded["cpu_ratio_median"] > TARGET and not options.smoke  # the times of two calls tell nothing

    if options.smoke:
        print_monitor_share(0.2)
    else:
        print_monitor_share(10.0)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
