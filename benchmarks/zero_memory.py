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
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

import shardkit as sk
from benchmarks.compiled import format_milliseconds, get_memory
from shardkit.analysis.hlo.report import Report
from shardkit.bench.records import write

DEVICES = 8
LAYERS = 8
WIDTH = 2048
HIDDEN = 8192
TOKENS = 512
WITH_MASTER = sk.Precision(param=jnp.bfloat16, compute=jnp.bfloat16, master=jnp.float32)
IN_PARTS = sk.Precision(compute=jnp.bfloat16)
STACK = ("layers",)


class Row(NamedTuple):
    """A plan, and the bytes a parameter that theory gives it."""

    plan: sk.Plan
    precision: sk.Precision
    theory: float
    prefetch: bool = False
    by_jit: bool = False  # the step of one device under jit, in the plan's layouts


ROWS = {
    "DP": Row(sk.dp("d"), WITH_MASTER, 14.0),
    "ZeRO-1": Row(sk.zero1("d", layerwise=STACK), WITH_MASTER, 2 + 12 / DEVICES),
    "ZeRO-1, at the end": Row(sk.zero1("d"), WITH_MASTER, 2 + 12 / DEVICES),
    "jit, ZeRO-1": Row(sk.zero1("d"), WITH_MASTER, 2 + 12 / DEVICES, by_jit=True),
    "ZeRO-2": Row(sk.zero2("d", layerwise=STACK), WITH_MASTER, 2 + 12 / DEVICES),
    "ZeRO-3": Row(sk.fsdp("d", layerwise=STACK), IN_PARTS, 12 / DEVICES),
    "ZeRO-3, prefetch": Row(sk.fsdp("d", layerwise=STACK), IN_PARTS, 12 / DEVICES, prefetch=True),
}


def loss_fn(prefetch: bool, microbatches: int) -> Callable[[Any, Any, Any], sk.Mean]:
    """A stack of residual feed-forward layers."""

    def apply_layer(w: Any, x_bTD: jax.Array) -> jax.Array:
        h_bTF = jax.nn.gelu(jnp.einsum("bTD,DF->bTF", x_bTD, w["up"]))
        return x_bTD + jnp.einsum("bTF,FD->bTD", h_bTF, w["down"])

    def loss(params: Any, batch: Any, keys: Any) -> sk.Mean:
        x_bTD = sk.scan_layers(
            apply_layer, params["layers"], batch, remat="full", prefetch=prefetch, microbatches=microbatches
        )
        return sk.Mean.of(x_bTD.astype(jnp.float32) ** 2)

    return loss


def compile_row(
    name: str,
    accumulate: int = 1,
    reduce: str = "bfloat16",
    tokens: int = TOKENS,
    topology: str = "v5e:2x4",
    microbatches: int = 1,
    float32: bool = False,
) -> tuple[Report, int]:
    """The compiled step of a row, and its number of parameters."""
    row = ROWS[name]
    precision = row.precision._replace(reduce=jnp.dtype(reduce))
    batch_dtype = jnp.bfloat16
    if float32:
        precision = sk.Precision(reduce=jnp.dtype("float32"))
        batch_dtype = jnp.float32
    stack = {
        "up": jax.ShapeDtypeStruct((LAYERS, WIDTH, HIDDEN), jnp.float32),
        "down": jax.ShapeDtypeStruct((LAYERS, HIDDEN, WIDTH), jnp.float32),
    }
    init, step = sk.make_train_step(
        sk.value_and_grad(loss_fn(row.prefetch, microbatches)),
        optax.adam(1e-4),
        mesh=sk.abstract_mesh(d=DEVICES),
        plan=row.plan,
        precision=precision,
        accumulate=accumulate,
    )
    state = init.abstract({"layers": stack})
    examples = DEVICES * accumulate * microbatches
    batch = jax.ShapeDtypeStruct((examples, tokens, WIDTH), batch_dtype)
    if row.by_jit:
        function, args = build_jit_step(state, batch, has_master=precision.master is not None)
        report = sk.aot.compile(function, args, topology=topology)
    else:
        report = sk.aot.compile(step, (state, batch), topology=topology)
    return report, sum(x.size for x in stack.values())


def build_jit_step(state: Any, batch: Any, *, has_master: bool) -> tuple[Any, tuple[Any, Any]]:
    """The step of one device under jit, with the layouts of a TrainState, and its two arguments."""
    optimizer = optax.adam(1e-4)

    def apply_layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        h = jax.nn.gelu(jnp.einsum("bTD,DF->bTF", x, w["up"]))
        return x + jnp.einsum("bTF,FD->bTD", h, w["down"]), None

    def compute_mean(params: Any, batch: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(jax.checkpoint(apply_layer), batch, params["layers"])
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(carry: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
        params, master, opt_state = carry
        loss, grads = jax.value_and_grad(compute_mean)(params, batch)
        if master is None:
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), None, opt_state), loss
        # The sums are as the parameters are, in bfloat16; the master copy is updated in float32, and rounded again.
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, opt_state = optimizer.update(grads, opt_state, master)
        master = optax.apply_updates(master, updates)
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), master)
        return (params, master, opt_state), loss

    carry = (state.params, None, state.opt_state)
    if has_master:
        carry = (state.params, state.opt_state.copy, state.opt_state.inner)
    carry_layouts = jax.tree.map(lambda x: x.sharding, carry)
    mesh = state.step.sharding.mesh
    replicated = NamedSharding(mesh, PartitionSpec())
    split_examples = NamedSharding(mesh, PartitionSpec("d"))
    batch = jax.ShapeDtypeStruct(batch.shape, batch.dtype, sharding=split_examples)
    return jax.jit(step, donate_argnums=0, out_shardings=(carry_layouts, replicated)), (carry, batch)


def format_row(name: str, report: Report, parameters: int, options: argparse.Namespace) -> str:
    """A row of the table."""
    value_bytes = 2
    theory = f"{ROWS[name].theory:g}"
    if options.float32:
        value_bytes = 4
        theory = "-"
    memory = get_memory(report)
    # What is held between steps is what the arguments take: its temporary memory is a column of its own.
    # The arguments are the state, and the examples of one device.
    examples = options.accumulate * options.microbatches
    state_bytes = memory.held - examples * options.tokens * WIDTH * value_bytes
    synchronous = sum(row.total for row in report.rows if not row.asynchronous)
    gathers = 0
    for row in report.select(kind="all_gather"):
        if not row.asynchronous:
            gathers += row.bytes_out * row.times
    [exposed] = format_milliseconds(report.exposed_seconds)
    cells = [
        name,
        f"{state_bytes / parameters:.3f} ({theory})",
        f"{memory.temp / parameters:.3f}",
        f"{float(synchronous) / 2**20:,.0f} of {float(report.sent()) / 2**20:,.0f} MiB",
        f"{gathers / 1e6:,.0f} MB",
        f"{exposed} ms",
        f"{report.compile_seconds:.0f} s",
    ]
    return f"| {' | '.join(cells)} |"


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
    parser.add_argument("--json", type=Path, help="where to append records")
    options = parser.parse_args(argv)
    names = list(ROWS)
    if options.only:
        names = [options.only]
    print("|  | held (theory) | temp | synchronous on the wire | synchronous gathers, whole | exposed | compiled in |")
    print("|---|---|---|---|---|---|---|")
    for name in names:
        report, parameters = compile_row(
            name,
            options.accumulate,
            options.reduce,
            options.tokens,
            options.topology,
            options.microbatches,
            options.float32,
        )
        print(format_row(name, report, parameters, options), flush=True)
        if options.json:
            record = {
                "benchmark": "zero_memory",
                "row": name,
                "parameters": parameters,
                "report": json.loads(report.to_json()),
            }
            write([record], options.json)


if __name__ == "__main__":
    main()
