"""What each ZeRO stage holds, measured by the TPU's own compiler: bytes a parameter on one of eight v5e chips.

    python -m benchmarks.zero_memory

A stack of 8 feed-forward layers, 268 million parameters, Adam, bfloat16 compute and reductions (`--reduce float32`
sums in float32), layers recomputed in the backward pass. DP, ZeRO-1 and ZeRO-2 hold bfloat16 parameters on every device
and a float32 master copy with the optimizer state; ZeRO-3 holds the master copy alone, in parts, and gathers in
bfloat16. Theory, in bytes a parameter over n devices: 14, 2 + 12/n, 2 + 12/n, 12/n (Rajbhandari et al., ZeRO, SC 2020,
without the gradients, which do not outlive the step).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

import shardkit as sk

LAYERS, WIDTH, HIDDEN, TOKENS = 8, 2048, 8192, 512
WITH_MASTER = sk.Precision(param=jnp.bfloat16, compute=jnp.bfloat16, master=jnp.float32)
IN_PARTS = sk.Precision(compute=jnp.bfloat16)
ROWS: dict[str, tuple[sk.Plan, sk.Precision, float]] = {
    "DP": (sk.dp("d"), WITH_MASTER, 14.0),
    "ZeRO-1": (sk.zero1("d", layerwise=("layers",)), WITH_MASTER, 2 + 12 / 8),
    "ZeRO-1, at the end": (sk.zero1("d"), WITH_MASTER, 2 + 12 / 8),
    "jit, ZeRO-1": (sk.zero1("d"), WITH_MASTER, 2 + 12 / 8),
    "ZeRO-2": (sk.zero2("d", layerwise=("layers",)), WITH_MASTER, 2 + 12 / 8),
    "ZeRO-3": (sk.fsdp("d", layerwise=("layers",)), IN_PARTS, 12 / 8),
    "ZeRO-3, prefetch": (sk.fsdp("d", layerwise=("layers",)), IN_PARTS, 12 / 8),
}


def loss_fn(prefetch: bool, microbatches: int = 1) -> Callable[[Any, Any, Any], sk.Mean]:
    """A stack of residual feed-forward layers."""

    def layer(w: Any, x_bTD: jax.Array) -> jax.Array:
        h_bTF = jax.nn.gelu(jnp.einsum("bTD,DF->bTF", x_bTD, w["up"]))
        return x_bTD + jnp.einsum("bTF,FD->bTD", h_bTF, w["down"])

    def loss(params: Any, batch: Any, keys: Any) -> sk.Mean:
        options: dict[str, Any] = {"prefetch": prefetch, "microbatches": microbatches}
        x_bTD = sk.scan_layers(layer, params["layers"], batch, remat="full", **options)
        return sk.Mean.of(x_bTD.astype(jnp.float32) ** 2)

    return loss


def report(
    name: str,
    accumulate: int = 1,
    reduce: str = "bfloat16",
    tokens: int = TOKENS,
    topology: str = "v5e:2x4",
    microbatches: int = 1,
    float32: bool = False,
) -> tuple[Any, int]:
    """The compiled step of a row, and its number of parameters."""
    plan, precision, _ = ROWS[name]
    if float32:
        precision = sk.Precision()
        reduce = "float32"
    shapes = {"up": (LAYERS, WIDTH, HIDDEN), "down": (LAYERS, HIDDEN, WIDTH)}
    params = {"layers": {k: jax.ShapeDtypeStruct(shape, jnp.float32) for k, shape in shapes.items()}}
    init, step = sk.make_train_step(
        sk.value_and_grad(loss_fn("prefetch" in name, microbatches)),
        optax.adam(1e-4),
        mesh=sk.abstract_mesh(d=8),
        plan=plan,
        precision=precision._replace(reduce=jnp.dtype(reduce)),
        accumulate=accumulate,
    )
    state = init.abstract(params)
    batch = jax.ShapeDtypeStruct(
        (8 * accumulate * microbatches, tokens, WIDTH), jnp.float32 if float32 else jnp.bfloat16
    )
    if name.startswith("jit"):
        step, state, batch = by_jit(state, batch)
    return sk.aot.compile(step, (state, batch), topology=topology), sum(x.size for x in jax.tree.leaves(params))


def by_jit(state: Any, batch: Any) -> tuple[Any, Any, Any]:
    """The step of one device under jit, with the layouts of a TrainState: the function and its two arguments."""
    optimizer = optax.adam(1e-4)

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        h = jax.nn.gelu(jnp.einsum("bTD,DF->bTF", x, w["up"]))
        return x + jnp.einsum("bTF,FD->bTD", h, w["down"]), None

    def mean(params: Any, batch: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(jax.checkpoint(layer), batch, params["layers"])
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(carry: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
        params, copy, opt_state = carry
        loss, grads = jax.value_and_grad(mean)(params, batch)
        if copy is None:
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), None, opt_state), loss
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, opt_state = optimizer.update(grads, opt_state, copy)
        copy = optax.apply_updates(copy, updates)
        return (jax.tree.map(lambda x: x.astype(jnp.bfloat16), copy), copy, opt_state), loss

    carry = (state.params, None, state.opt_state)
    if hasattr(state.opt_state, "copy"):  # the master copy
        carry = (state.params, state.opt_state.copy, state.opt_state.inner)
    layouts = jax.tree.map(lambda x: x.sharding, carry)
    mesh = state.step.sharding.mesh
    batch = jax.ShapeDtypeStruct(batch.shape, batch.dtype, sharding=NamedSharding(mesh, PartitionSpec("d")))
    out = (layouts, NamedSharding(mesh, PartitionSpec()))
    return jax.jit(step, donate_argnums=0, out_shardings=out), carry, batch


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=ROWS)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=1, help="through a layer before the next one")
    parser.add_argument("--reduce", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--float32", action="store_true", help="everything in float32, without a master copy")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="on each device, in a microbatch")
    parser.add_argument("--topology", default="v5e:2x4")
    parser.add_argument("--json", help="where to append records")
    options = parser.parse_args(argv)
    print("|  | held (theory) | temp | synchronous on the wire | synchronous gathers, whole | exposed | compiled in |")
    print("|---|---|---|---|---|---|---|")
    for name in [options.only] if options.only else ROWS:
        made, parameters = report(
            name,
            options.accumulate,
            options.reduce,
            options.tokens,
            options.topology,
            options.microbatches,
            options.float32,
        )
        examples = options.accumulate * options.microbatches
        held = made.memory.held - examples * options.tokens * WIDTH * (4 if options.float32 else 2)
        alone = sum(r.total for r in made.rows if not r.asynchronous)
        gathers = sum(r.bytes_out * r.times for r in made.select(kind="all_gather") if not r.asynchronous)
        wire = f"{float(alone) / 2**20:,.0f} of {float(made.sent()) / 2**20:,.0f} MiB"
        theory = "-" if options.float32 else f"{ROWS[name][2]:g}"
        sizes = f"{held / parameters:.3f} ({theory}) | {made.memory.temp / parameters:.3f}"
        late = f"{wire} | {gathers / 1e6:,.0f} MB | {1e3 * made.exposed_seconds:.2f} ms"
        print(f"| {name} | {sizes} | {late} | {made.compile_seconds:.0f} s |", flush=True)
        if options.json:
            with open(options.json, "a") as out:
                record = {"benchmark": "zero_memory", "row": name, "parameters": parameters}
                out.write(json.dumps(record | {"report": json.loads(made.to_json())}) + "\n")


if __name__ == "__main__":
    main()
