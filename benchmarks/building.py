"""How long it takes to build what is large before anything runs: imports, traces, schedules.

Nothing is compiled. Each row starts afresh; CPU time is of this process, and of a child process for imports.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from benchmarks.functions import measure_functions
from benchmarks.start import start
from shardkit import bench


def imported(module: str) -> None:
    """A child process that imports a module."""
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)


def layers_unrolled(count: int) -> Any:
    """The trace of a training step whose layers are a list, each gathered by itself."""
    layer = sk.gathered(lambda w, x: x + jnp.tanh(x @ w["up"]) @ w["down"])

    def loss_fn(params: Any, batch: Any, keys: Any) -> sk.Mean:
        x = batch["x"]
        for each in params["layers"]:
            x = layer(each, x)
        return sk.Mean.of((x - batch["y"]) ** 2)

    mesh = sk.abstract_mesh(data=2, fsdp=4)
    plan = sk.chain(sk.dp("data"), sk.fsdp("fsdp", layerwise=("layers",), min_size=1))
    init, step = sk.make_train_step(sk.value_and_grad(loss_fn), optax.adam(1e-3), mesh=mesh, plan=plan)
    params, batch = list_of_layers(count)
    return step.trace(init.abstract(params), batch)


def layers_by_jit(count: int) -> Any:
    """The trace of the same step on one device, by plain jit."""
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

    params, batch = list_of_layers(count)
    return jax.jit(step).trace(params, jax.eval_shape(optimizer.init, params), batch)


def list_of_layers(count: int) -> tuple[Any, Any]:
    """The shapes of the layers' parameters, and of a batch."""

    def shape(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.float32)

    layers = [{"up": shape(64, 256), "down": shape(256, 64)} for _ in range(count)]
    return {"layers": layers}, {"x": shape(16, 64), "y": shape(16, 64)}


def attention(tokens: int, devices: int, block: int, order: str) -> Any:
    """The trace of ring attention and its gradient."""
    mesh = sk.abstract_mesh(context=devices)
    attend = lambda q, k, v: sk.layers.ring_attention(q, k, v, "context", order=order, block=block)  # noqa: E731
    mapped = jax.shard_map(attend, mesh=mesh, in_specs=P(None, "context"), out_specs=P(None, "context"))
    x = jax.ShapeDtypeStruct((1, tokens, 8, 128), jnp.bfloat16)
    return jax.make_jaxpr(jax.grad(lambda *qkv: mapped(*qkv).astype(jnp.float32).sum(), argnums=(0, 1, 2)))(x, x, x)


ROWS: dict[str, Callable[[bool], Any]] = {
    "layers, unrolled (48)": lambda smoke: layers_unrolled(2 if smoke else 48),
    "ring attention, 2^20 tokens": lambda smoke: attention(2**12 if smoke else 2**20, 4, 512, "contiguous"),
    "the same in zigzag order": lambda smoke: attention(2**12 if smoke else 2**20, 4, 512, "zigzag"),
    "1F1B, p=64, m=512": lambda smoke: simulated(sk.schedules.one_f_one_b(*((4, 8) if smoke else (64, 512)))),
    "interleaved, p=64, m=512, v=4": lambda smoke: simulated(
        sk.schedules.interleaved(*((4, 8) if smoke else (64, 512)), chunks=4)
    ),
}


def simulated(schedule: Any) -> Any:
    """A schedule, checked and simulated."""
    schedule.check()
    return schedule.simulate()


def traced_afresh(row: Callable[[bool], Any], smoke: bool) -> None:
    """One row without what jax remembers of another."""
    jax.clear_caches()
    row(smoke)


def main(argv: Sequence[str] | None = None) -> None:
    """Times `--rounds` of each row; an import is a child process."""
    options = start(__doc__, argv, devices=1)
    rounds = 1 if options.smoke else options.rounds or 3
    modules = {f"import {module}": partial(imported, module) for module in ("jax", "jax, shardkit", "shardkit.runtime")}
    bench.report(measure_functions("building", "imports", modules, rounds=rounds), options.json)
    layers = 2 if options.smoke else 8
    traces = {
        "jit": partial(traced_afresh, lambda _: layers_by_jit(layers), options.smoke),
        "each gathered": partial(traced_afresh, lambda _: layers_unrolled(layers), options.smoke),
    }
    records = measure_functions("building", f"layers, unrolled ({layers})", traces, rounds=rounds)
    bench.report(records, options.json)
    for name, row in ROWS.items():
        records = measure_functions("building", name, {name: partial(traced_afresh, row, options.smoke)}, rounds=rounds)
        bench.report(records, options.json)


if __name__ == "__main__":
    main()
