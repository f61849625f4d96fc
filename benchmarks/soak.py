"""Starts a training loop that never waits many times, to show that it does not hang; `make soak` runs it.

jax 0.10 runs all simulated devices in one thread pool, in which such a loop can deadlock
(`shardkit/meshes/simulated.py` says how). `--threads 8` turns the workaround off, and shows the hang.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence

import jax

CHILD = """
import shardkit as sk
import jax, optax
if {fixed}:
    sk.simulate_devices(8)
from shardkit.models import transformer
config = transformer.Config(layers=1, dim=64, heads=4)
mesh = sk.make_mesh(data=8)
grad_fn = sk.value_and_grad(transformer.loss_fn(config))
init, step = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh, plan=sk.dp("data"))
state = init(lambda key: transformer.init(key, config), jax.random.key(0))
tokens = jax.random.randint(jax.random.key(1), (32, 65), 0, 256)
batch = sk.shard({{"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}}, mesh, jax.P("data"))
for _ in range({steps}):
    state, metrics = step(state, batch)
print(float(metrics["loss"]))
"""


def run_once(steps: int, timeout: float, threads: int | None = None) -> float | str:
    """One start: its final loss, or the failure as text."""
    command = [sys.executable, "-c", CHILD.format(steps=steps, fixed=threads is None)]
    environ = make_environ(timeout, threads)
    try:
        child = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return f"hung: still running after {timeout:g} s"
    if child.returncode:
        return f"ended with code {child.returncode}: {find_message(child.stderr)}"
    return float(child.stdout.split()[-1])


def make_environ(timeout: float, threads: int | None) -> dict[str, str]:
    """The environment of a start, without the workaround if it is to have so many threads."""
    # A collective that waits for a missing device ends itself, and says which one: by default after the timeout.
    seconds = max(1, int(timeout / 4))
    flags = [
        f"--xla_cpu_collective_timeout_seconds={seconds}",
        f"--xla_cpu_collective_call_terminate_timeout_seconds={seconds}",
    ]
    environ = dict(os.environ)
    if threads is not None:
        flags.append("--xla_force_host_platform_device_count=8")
        environ |= {"NPROC": str(threads), "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"}
    environ["XLA_FLAGS"] = " ".join(flags)
    return environ


def find_message(stderr: str) -> str:
    """The last line that says what went wrong, and no more than fits a line of this output."""
    message = "no message"
    for line in stderr.splitlines():
        if "rendezvous" in line or "Error" in line:
            message = line
    return message[:160]


def main(argv: Sequence[str] | None = None) -> int:
    """Counts the starts that hung or failed; the exit code is 1 if any did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=100, help="processes, one after another (default 100)")
    parser.add_argument("--steps", type=int, default=60, help="of each, dispatched without waiting (default 60)")
    parser.add_argument("--timeout", type=float, default=120, help="seconds after which one counts as hung (120)")
    parser.add_argument("--threads", type=int, help="workaround off, and so many threads for jax's CPU runtime")
    options = parser.parse_args(argv)
    start_time = time.monotonic()
    failures = 0
    losses = set()
    for number in range(1, options.starts + 1):
        outcome = run_once(options.steps, options.timeout, options.threads)
        if isinstance(outcome, float):
            losses.add(outcome)
        else:
            failures += 1
            print(f"start {number}: {outcome}", flush=True)
        if number % 10 == 0:
            print(f"{number} starts, {failures} hung or failed", flush=True)
    minutes = (time.monotonic() - start_time) / 60
    print(
        f"jax {jax.__version__}: {options.starts} starts of {options.steps} steps on 8 simulated devices: {failures} "
        f"hung or failed, {len(losses)} distinct final loss(es), {minutes:.1f} minutes"
    )
    return int(failures > 0)


if __name__ == "__main__":
    raise SystemExit(main())
