"""`shardkit soak`: starts a training loop that never waits many times, to show that it does not hang.

jax 0.10 runs all simulated devices in one thread pool, in which such a loop can deadlock (see `simulated.py`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Annotated

import jax
import tyro
from rich.progress import track

from shardkit.cli.output import Json, console, write_json

_CHILD = """
import shardkit as sk
import jax, optax
if {fixed}:
    sk.simulate_devices({devices})
from shardkit.models import transformer
config = transformer.Config(layers=1, dim=64, heads=4)
devices = jax.devices()
mesh = sk.make_mesh(data={devices})
grad_fn = sk.value_and_grad(transformer.loss_fn(config))
init, step = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh, plan=sk.dp("data"))
state = init(lambda key: transformer.init(key, config), jax.random.key(0))
tokens = jax.random.randint(jax.random.key(1), (4 * {devices}, 65), 0, 256)
batch = sk.shard({{"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}}, mesh, jax.P("data"))
for _ in range({steps}):
    state, metrics = step(state, batch)
print(float(metrics["loss"]))
"""

EXAMPLES = {
    "shardkit soak --starts 100 --steps 60": "what make soak runs",
    "shardkit soak --starts 10 --threads 8": "reproduce the hang of jax's CPU runtime",
}


@dataclass(frozen=True)
class Options:
    """Options of `shardkit soak`."""

    starts: int = 100
    """Processes to start, one after another."""
    steps: int = 60
    """Steps per process, dispatched without waiting."""
    devices: int = 8
    """Simulated devices per process."""
    timeout: float = 120.0
    """Seconds after which a process counts as hung."""
    threads: int | None = None
    """Reproduce the hang: turn shardkit's workaround off and give jax's CPU runtime this many threads (NPROC)."""
    json: Json = None
    """Write the results to this file, or with - to standard output."""


def soak(options: Annotated[Options, tyro.conf.arg(name="")]) -> int:
    """Start training many times on simulated devices, dispatch every step without waiting, and count hangs."""
    for name in ("starts", "steps", "devices", "threads", "timeout"):
        value = getattr(options, name)
        if value is not None and not value >= 1:
            raise ValueError(f"soak: --{name} must be at least 1; got {value}. Pass 1 or more.")
    here = console()
    failures, begin, answers = 0, time.perf_counter(), set()
    rows = []
    for start in track(range(options.starts), "starts", console=here, disable=not here.is_terminal):
        if start and start % 10 == 0 and not here.is_terminal:
            here.print(f"{start} starts, {failures} hung or failed")
        ended = run_once(options)
        right = isinstance(ended, float)
        rows.append({"start": start + 1, "loss": ended if right else None, "failure": None if right else ended})
        if isinstance(ended, float):
            answers.add(ended)
        else:
            failures += 1
            here.print(f"start {start + 1}: {ended}")
    minutes = (time.perf_counter() - begin) / 60
    here.print(
        f"jax {jax.__version__}: {options.starts} starts of {options.steps} steps on {options.devices} "
        f"simulated devices: {failures} hung or failed, {len(answers)} distinct final loss(es), {minutes:.1f} minutes"
    )
    write_json(options.json, "soak", rows, steps=options.steps, devices=options.devices, minutes=minutes)
    return 1 if failures else 0


def run_once(options: Options) -> float | str:
    """One start: its final loss, or the failure as text."""
    environ = dict(os.environ)
    flags = [
        # end a collective that waits for a missing device; the default is longer than --timeout
        f"--xla_cpu_collective_call_terminate_timeout_seconds={max(1, int(options.timeout / 4))}",
        f"--xla_cpu_collective_timeout_seconds={max(1, int(options.timeout / 4))}",
    ]
    if options.threads is not None:
        flags.append(f"--xla_force_host_platform_device_count={options.devices}")
        environ |= {"NPROC": str(options.threads), "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"}
    environ["XLA_FLAGS"] = " ".join(flags)
    code = _CHILD.format(devices=options.devices, steps=options.steps, fixed=options.threads is None)
    try:
        child = subprocess.run(
            [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=options.timeout
        )
    except subprocess.TimeoutExpired:
        return f"hung: still running after {options.timeout:g} s"
    if child.returncode:
        stuck = [line for line in child.stderr.splitlines() if "rendezvous" in line or "Error" in line]
        return f"ended with code {child.returncode}: {(stuck or ['no message'])[-1][:160]}"
    return float(child.stdout.split()[-1])
