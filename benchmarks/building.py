"""How long it takes to build what is large before anything runs: imports, traces, schedules.

Nothing is compiled. Each row starts afresh; CPU time is of this process, and of a child process for imports.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from benchmarks.functions import measure_functions
from benchmarks.start import choose_rounds, start
from shardkit import bench

# jax alone is the baseline: what follows it is shardkit's.
MODULES = ("jax", "jax, shardkit", "shardkit.runtime")


def import_in_child(modules: str) -> None:
    """Imports modules in a child process: this one has imported them already."""
    subprocess.run([sys.executable, "-c", f"import {modules}"], check=True)


def trace_gathered_layers(count: int) -> Any:
    """The trace of a training step whose layers are a list, each gathered by itself."""

    def apply_layer(w: Any, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(x @ w["up"]) @ w["down"]

    gathered_layer = sk.gathered(apply_layer)

    def loss_fn(params: Any, batch: Any, keys: Any) -> sk.Mean:
        x = batch["x"]
        for w in params["layers"]:
            x = gathered_layer(w, x)
        return sk.Mean.of((x - batch["y"]) ** 2)

    mesh = sk.abstract_mesh(data=2, fsdp=4)
    plan = sk.chain(sk.dp("data"), sk.fsdp("fsdp", layerwise=("layers",), min_size=1))
    init, step = sk.make_train_step(sk.value_and_grad(loss_fn), optax.adam(1e-3), mesh=mesh, plan=plan)
    params, batch = describe_layers(count)
    return step.trace(init.abstract(params), batch)


def trace_layers_by_jit(count: int) -> Any:
    """The trace of the same step on one device, by plain jit."""
    # The step as a tutorial writes it, so that the ratio is what builder and gathers add.
    optimizer = optax.adam(1e-3)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for w in params["layers"]:
            x = x + jnp.tanh(x @ w["up"]) @ w["down"]
        return jnp.mean((x - batch["y"]) ** 2)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params, batch = describe_layers(count)
    opt_state = jax.eval_shape(optimizer.init, params)
    return jax.jit(step).trace(params, opt_state, batch)


def describe_layers(count: int) -> tuple[Any, Any]:
    """The shapes of the layers' parameters, and of a batch."""

    def shape(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.float32)

    layers = [{"up": shape(64, 256), "down": shape(256, 64)} for _ in range(count)]
    batch = {"x": shape(16, 64), "y": shape(16, 64)}
    return {"layers": layers}, batch


def trace_attention(tokens: int, order: Literal["contiguous", "zigzag"]) -> Any:
    """The trace of ring attention over four devices, in blocks of 512 tokens, and of its gradient."""
    mesh = sk.abstract_mesh(context=4)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return sk.layers.ring_attention(q, k, v, "context", order=order, block=512)

    mapped = jax.shard_map(attend, mesh=mesh, in_specs=P(None, "context"), out_specs=P(None, "context"))

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return mapped(q, k, v).astype(jnp.float32).sum()

    x = jax.ShapeDtypeStruct((1, tokens, 8, 128), jnp.bfloat16)
    return jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(x, x, x)


def simulate_schedule(make_schedule: Callable[..., sk.schedules.Schedule], *sizes: int, **options: int) -> Any:
    """A schedule: made, checked and simulated."""
    schedule = make_schedule(*sizes, **options)
    schedule.check()  # as every pipeline does
    return schedule.simulate()


def list_rows(smoke: bool) -> dict[str, Callable[[], Any]]:
    """What is built, by name."""
    layers = 48
    tokens = 2**20
    devices = 64
    microbatches = 512
    if smoke:
        layers = 2
        tokens = 2**12
        devices = 4
        microbatches = 8
    one_f_one_b = sk.schedules.one_f_one_b
    interleaved = sk.schedules.interleaved
    return {
        "layers, unrolled (48)": partial(trace_gathered_layers, layers),
        "ring attention, 2^20 tokens": partial(trace_attention, tokens, "contiguous"),
        "the same in zigzag order": partial(trace_attention, tokens, "zigzag"),
        "1F1B, p=64, m=512": partial(simulate_schedule, one_f_one_b, devices, microbatches),
        "interleaved, p=64, m=512, v=4": partial(simulate_schedule, interleaved, devices, microbatches, chunks=4),
    }


def run_afresh(build: Callable[[], Any]) -> None:
    """Builds one row. Of a second trace jax remembers most parts, and it would take no time."""
    jax.clear_caches()
    build()


def main(argv: Sequence[str] | None = None) -> None:
    """Times `--rounds` of each row; an import is a child process."""
    options = start(__doc__, argv, devices=1)
    rounds = choose_rounds(options, 3, smoke=1)
    # Imports take turns: the file cache of the system is warm for all of them after the first round.
    imports = {}
    for modules in MODULES:
        imports[f"import {modules}"] = partial(import_in_child, modules)
    bench.report(measure_functions("building", "imports", imports, rounds=rounds), options.json)

    layers = 8
    if options.smoke:
        layers = 2
    traces = {
        "jit": partial(run_afresh, partial(trace_layers_by_jit, layers)),
        "each gathered": partial(run_afresh, partial(trace_gathered_layers, layers)),
    }
    records = measure_functions("building", f"layers, unrolled ({layers})", traces, rounds=rounds)
    bench.report(records, options.json)

    for name, build in list_rows(options.smoke).items():
        records = measure_functions("building", name, {name: partial(run_afresh, build)}, rounds=rounds)
        bench.report(records, options.json)


if __name__ == "__main__":
    main()
