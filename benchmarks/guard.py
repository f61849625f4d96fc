"""What the guard costs: the same step plain and under `guard.watch`, and the time that its monitor takes beside it.

The small step shows the microseconds that a call costs; the one of about 50 ms shows them as a share, which is to stay
below 1%. The last case of each row is the plain step again: its ratio is 1 but for what this machine cannot tell
apart.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import shardkit as sk
from benchmarks.start import start
from shardkit import bench
from shardkit.runtime.channel import client

TARGET = 1.01


def step_of(size: int, products: int) -> tuple[Callable[..., Any], Any]:
    """A jitted step of so many products of square matrices, and its first state."""

    def step(state: Any) -> tuple[Any, Any]:
        x = jax.lax.fori_loop(0, products, lambda _, x: jnp.tanh(x @ state["w"]), state["x"])
        return state | {"x": x}, jnp.mean(x)

    weights = jnp.eye(size) * 0.9
    return jax.jit(step), {"w": weights, "x": jnp.ones((size, size))}


def cpu_seconds(process: int) -> float:
    """CPU time that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(argv: Sequence[str] | None = None) -> int:
    """Times both rows and the monitor; 1 if the guard costs more of the longer step than the target."""
    missed = False
    options = start(__doc__, argv, devices=1)
    mesh = sk.make_mesh(data=1, devices=jax.devices()[:1])
    rows = {"a step of 20 us": (16, 1, 2000), "a step of 50 ms": (512, 5, 20)}
    for row, (size, products, calls) in rows.items():
        step, state = step_of(size, products)
        if row.endswith("ms") and not options.smoke:
            jax.block_until_ready(step(state))
            begun = time.perf_counter()
            jax.block_until_ready(step(state))
            step, state = step_of(size, max(1, round(products * 0.05 / (time.perf_counter() - begun))))
        guard = sk.runtime.guard(mesh=mesh)
        cases = [
            bench.Case("plain", step, state),
            bench.Case("guarded", guard.watch(step), state),
            bench.Case("plain again", step, state),
        ]
        calls, rounds = (2, 2) if options.smoke else (options.calls or calls, options.rounds or 20)
        records = bench.measure("guard", row, cases, mode="dispatched", calls=calls, rounds=rounds)
        bench.report(records, options.json)
        missed |= row.endswith("ms") and not options.smoke and records[1]["cpu_ratio_median"] > TARGET
    watcher = client.find_monitor()
    assert watcher is not None
    seconds = 0.2 if options.smoke else 10.0
    before = cpu_seconds(watcher.process_id)
    time.sleep(seconds)
    used = cpu_seconds(watcher.process_id) - before
    print(f"the monitor beside the process: {used / seconds:.2%} of one core")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
