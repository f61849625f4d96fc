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
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from benchmarks.compiled import count_asynchronous, describe_array, format_milliseconds, get_memory
from shardkit.analysis.hlo.report import Report
from shardkit.bench.records import write

EXPLICIT_FORMS = ("gather", "ring", "bidirectional", "auto")
FORMS = (*EXPLICIT_FORMS, "partitioner")
DEVICES = 8
SPLIT_ROWS = P("model")  # of tokens, and of the second matrix
SPLIT_COLUMNS = P(None, "model")  # of the first matrix, and of what is between the two
SPECS = (SPLIT_ROWS, SPLIT_COLUMNS, SPLIT_ROWS)  # of tokens and both matrices


class Size(NamedTuple):
    """Of a block, over all devices."""

    tokens: int = 8192
    width: int = 4096
    hidden: int = 32768


def apply_block(x_tD: jax.Array, w_Df: jax.Array, w_fD: jax.Array, form: Any) -> jax.Array:
    """The block by collective matmuls, on one device."""
    h_Tf = jax.nn.gelu(sk.all_gather_matmul(x_tD, w_Df, "model", impl=form))
    return sk.matmul_reduce_scatter(h_Tf, w_fD, "model", impl=form)


def build_block(form: str, size: Size) -> tuple[Any, tuple[Any, ...]]:
    """Result and gradients of the block from (x, w_up, w_down, cotangent), and the shapes of these."""
    mesh = sk.abstract_mesh(model=DEVICES)
    x = describe_array(mesh, SPLIT_ROWS, (size.tokens, size.width))
    w_up = describe_array(mesh, SPLIT_COLUMNS, (size.width, size.hidden))
    w_down = describe_array(mesh, SPLIT_ROWS, (size.hidden, size.width))
    args = (x, w_up, w_down, x)
    columns_layout = NamedSharding(mesh, SPLIT_COLUMNS)

    def apply_automatic_block(x_TD: jax.Array, w_DF: jax.Array, w_FD: jax.Array) -> jax.Array:
        h_TF = jax.lax.with_sharding_constraint(jax.nn.gelu(x_TD @ w_DF), columns_layout)
        return h_TF @ w_FD

    def differentiate(block: Any, x: jax.Array, up: jax.Array, down: jax.Array, cotangent: jax.Array) -> Any:
        y, backward = jax.vjp(block, x, up, down)
        return y, backward(cotangent)

    if form == "partitioner":
        layouts = tuple(NamedSharding(mesh, spec) for spec in SPECS)
        function = partial(differentiate, apply_automatic_block)
        return jax.jit(function, out_shardings=(layouts[0], layouts)), args
    function = partial(differentiate, partial(apply_block, form=form))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=(*SPECS, SPECS[0]), out_specs=(SPECS[0], SPECS))
    return jax.jit(mapped), args


def build_stack(form: str, size: Size, layers: int) -> tuple[Any, tuple[Any, ...]]:
    """Gradients of the sum of squares of a stack's result, from tokens and stacked weights, and the shapes of these."""
    mesh = sk.abstract_mesh(model=DEVICES)
    specs = (SPLIT_ROWS, P(None, *SPLIT_COLUMNS), P(None, *SPLIT_ROWS))
    save_matmuls = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

    @partial(jax.checkpoint, policy=save_matmuls)
    def apply_layer(x_tD: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        w_Df, w_fD = weights
        return x_tD + apply_block(x_tD, w_Df, w_fD, form), None

    def loss(x_tD: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        y_tD, _ = jax.lax.scan(apply_layer, x_tD, (up, down))
        return jnp.sum(y_tD.astype(jnp.float32) ** 2)

    args = (
        describe_array(mesh, specs[0], (size.tokens, size.width)),
        describe_array(mesh, specs[1], (layers, size.width, size.hidden)),
        describe_array(mesh, specs[2], (layers, size.hidden, size.width)),
    )
    gradients = jax.grad(loss, (0, 1, 2))
    return jax.jit(jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=specs)), args


def compile_form(form: str, topology: str = "v5e:2x4", *, size: Size | None = None, layers: int = 0) -> Report:
    """The compiled block, or stack of so many."""
    if size is None:
        size = Size()
    if layers:
        function, args = build_stack(form, size, layers)
    else:
        function, args = build_block(form, size)
    return sk.aot.compile(function, args, topology=topology)


def choose_forms(options: argparse.Namespace) -> Sequence[str]:
    """The forms to compile; the partitioner has no stack."""
    if options.only:
        return [options.only]
    if options.layers:
        return EXPLICIT_FORMS
    return FORMS


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=FORMS)
    parser.add_argument("--topology", default="v5e:2x4")
    parser.add_argument("--hidden", type=int, default=Size().hidden, help="columns, of all 8 devices")
    parser.add_argument("--width", type=int, default=Size().width)
    parser.add_argument("--layers", type=int, default=0, help="blocks of a scan; 0: one block")
    parser.add_argument("--json", type=Path, help="where to append records")
    options = parser.parse_args(argv)
    size = Size(width=options.width, hidden=options.hidden)
    print("|  | collectives, of them beside compute | on the wire | exposed | compute | temp | compiled in |")
    print("|---|---|---|---|---|---|---|")
    for form in choose_forms(options):
        report = compile_form(form, options.topology, size=size, layers=options.layers)
        cells = [form, f"{report.count()}, {count_asynchronous(report)}"]
        for time in format_milliseconds(report.wire_seconds, report.exposed_seconds, report.compute.seconds):
            cells.append(f"{time} ms")
        cells.append(f"{get_memory(report).temp / 1e6:,.0f} MB")
        cells.append(f"{report.compile_seconds:.0f} s")
        print(f"| {' | '.join(cells)} |", flush=True)
        if options.json:
            record = {
                "benchmark": "ring_matmul",
                "row": form,
                "width": options.width,
                "hidden": options.hidden,
                "layers": options.layers,
                "report": json.loads(report.to_json()),
            }
            write([record], options.json)


if __name__ == "__main__":
    main()
