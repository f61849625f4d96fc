"""A tensor-parallel MLP block, forward and backward, as a chip's own compiler schedules it: what it hides and holds.

    python -m benchmarks.ring_matmul
    python -m benchmarks.ring_matmul --topology h100:1x1x8
    python -m benchmarks.ring_matmul --layers 4

`gelu(x @ w_up) @ w_down` in bfloat16 over 8 devices, 8192 tokens of width 4096, 32768 hidden columns; tokens are split
outside the block, columns inside. Each form of `all_gather_matmul` and `matmul_reduce_scatter`, and the automatic
partitioner: `jax.jit` with NamedShardings on arguments, results and the hidden activations. With `--layers` the
explicit forms are blocks of a scan, with a residual, that saves the results of matmuls alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk

FORMS = ("gather", "ring", "bidirectional", "auto", "partitioner")
TOKENS, WIDTH, HIDDEN = 8192, 4096, 32768
SPECS = (P("model"), P(None, "model"), P("model"))  # tokens, columns, rows


def step(form: Any, tokens: int, width: int, hidden: int) -> tuple[Any, tuple[Any, ...]]:
    """Result and gradients of the block from (x, w_up, w_down, cotangent), and the shapes of these."""
    mesh = sk.abstract_mesh(model=8)
    tokens_split, columns_split, rows_split = (NamedSharding(mesh, spec) for spec in SPECS)

    def explicit(x_tD: jax.Array, w_Df: jax.Array, w_fD: jax.Array) -> jax.Array:
        h_Tf = jax.nn.gelu(sk.all_gather_matmul(x_tD, w_Df, "model", impl=form))
        return sk.matmul_reduce_scatter(h_Tf, w_fD, "model", impl=form)

    def automatic(x_TD: jax.Array, w_DF: jax.Array, w_FD: jax.Array) -> jax.Array:
        h_TF = jax.lax.with_sharding_constraint(jax.nn.gelu(x_TD @ w_DF), columns_split)
        return h_TF @ w_FD

    def both(x: jax.Array, up: jax.Array, down: jax.Array, cotangent: jax.Array) -> Any:
        y, back = jax.vjp(automatic if form == "partitioner" else explicit, x, up, down)
        return y, back(cotangent)

    def shape(rows: int, columns: int, split: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, columns), jnp.bfloat16, sharding=split)

    x = shape(tokens, width, tokens_split)
    args = (x, shape(width, hidden, columns_split), shape(hidden, width, rows_split), x)
    if form == "partitioner":
        return jax.jit(both, out_shardings=(tokens_split, (tokens_split, columns_split, rows_split))), args
    return jax.jit(jax.shard_map(both, mesh=mesh, in_specs=(*SPECS, SPECS[0]), out_specs=(SPECS[0], SPECS))), args


def stack(form: Any, tokens: int, width: int, hidden: int, layers: int) -> tuple[Any, tuple[Any, ...]]:
    """Gradients of the sum of squares of a stack's result, from tokens and stacked weights, and the shapes of these."""
    mesh = sk.abstract_mesh(model=8)
    tokens_split, columns_split, rows_split = SPECS
    specs = (tokens_split, P(None, *columns_split), P(None, *rows_split))
    save_matmuls = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

    @partial(jax.checkpoint, policy=save_matmuls)
    def block(x_tD: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        w_Df, w_fD = weights
        h_Tf = jax.nn.gelu(sk.all_gather_matmul(x_tD, w_Df, "model", impl=form))
        return x_tD + sk.matmul_reduce_scatter(h_Tf, w_fD, "model", impl=form), None

    def loss(x_tD: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        y_tD, _ = jax.lax.scan(block, x_tD, (up, down))
        return jnp.sum(y_tD.astype(jnp.float32) ** 2)

    args = []
    for dims, spec in zip(((tokens, width), (layers, width, hidden), (layers, hidden, width)), specs, strict=True):
        args.append(jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=NamedSharding(mesh, spec)))
    gradients = jax.grad(loss, (0, 1, 2))
    return jax.jit(jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=specs)), tuple(args)


def report(
    form: str,
    topology: str = "v5e:2x4",
    *,
    tokens: int = TOKENS,
    width: int = WIDTH,
    hidden: int = HIDDEN,
    layers: int = 0,
) -> Any:
    """The compiled block, or stack of so many."""
    if layers:
        return sk.aot.compile(*stack(form, tokens, width, hidden, layers), topology=topology)
    return sk.aot.compile(*step(form, tokens, width, hidden), topology=topology)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=FORMS)
    parser.add_argument("--topology", default="v5e:2x4")
    parser.add_argument("--hidden", type=int, default=HIDDEN, help="columns, of all 8 devices")
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--layers", type=int, default=0, help="blocks of a scan; 0: one block")
    parser.add_argument("--json", help="where to append records")
    options = parser.parse_args(argv)
    print("|  | collectives, of them beside compute | on the wire | exposed | compute | temp | compiled in |")
    print("|---|---|---|---|---|---|---|")
    forms = FORMS
    if options.layers:
        forms = FORMS[:-1]
    if options.only:
        forms = (options.only,)
    for form in forms:
        made = report(form, options.topology, width=options.width, hidden=options.hidden, layers=options.layers)
        beside = sum(row.times for row in made.rows if row.asynchronous)
        seconds = made.wire_seconds, made.exposed_seconds, made.compute.seconds
        times = " | ".join(f"{1e3 * each:.2f} ms" for each in seconds)
        temp = f"{made.memory.temp / 1e6:,.0f} MB | {made.compile_seconds:.0f} s"
        print(f"| {form} | {made.count()}, {beside} | {times} | {temp} |", flush=True)
        if options.json:
            with open(options.json, "a") as out:
                sizes = {"width": options.width, "hidden": options.hidden, "layers": options.layers}
                record = {"benchmark": "ring_matmul", "row": form} | sizes
                out.write(json.dumps(record | {"report": json.loads(made.to_json())}) + "\n")


if __name__ == "__main__":
    main()
