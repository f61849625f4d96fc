"""Muon by owners beside optax's Muon under the partitioner, as the TPU's compiler sees a step of each.

Compiles for TPU v5e:2x4 without one: the reference transformer of 8 layers, 1024 tokens on each of 8 devices, its
matrices split by fsdp or by zero1, or whole in data parallelism. Each row is a whole step as compiled: what one device
sends, computes and holds, and its modelled time; what is above the row of sgd is Muon's. No simulated device runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

import shardkit as sk
from benchmarks.compiled import format_milliseconds, get_memory
from benchmarks.start import start
from shardkit.meshes.layout import table
from shardkit.models import parameters, transformer

DEVICES = 8
RATE = 0.02


def split_layers(path: str, shape: tuple[int, ...]) -> int | None:
    """Dim 0 of the stacks of matrices: each device then updates the whole matrices of its layers."""
    if len(shape) > 2:
        return 0
    return None


PLANS = {
    "fsdp, layer-wise": sk.fsdp("data", layerwise=("layers",)),
    "zero1": sk.zero1("data"),
    "zero1 by layers": sk.zero1("data", rules=split_layers),
    "dp": sk.dp("data"),
}


def list_optimizers(plan: sk.Plan, mesh: Any, dims: Any) -> dict[str, optax.GradientTransformation]:
    """The optimizers that are compared; the first one shows what the step takes without Muon."""
    return {
        "sgd": optax.sgd(RATE),
        "optax, partitioned": optax.contrib.muon(RATE, muon_weight_dimension_numbers=dims),
        "by owners": sk.muon(RATE, mesh=mesh, plan=plan, muon_weight_dimension_numbers=dims),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Compiles a step of each plan with each optimizer, and prints what the compiler says."""
    options = start(__doc__, argv, devices=DEVICES)
    plans = PLANS
    dim = 2048
    tokens = 1024
    if options.smoke:
        plans = {"zero1": PLANS["zero1"]}
        dim = 128
        tokens = 128
    config = transformer.Config(layers=8, dim=dim, heads=16, vocabulary=256)
    mesh = sk.abstract_mesh(data=DEVICES)  # of chips that are not there
    dims = parameters.muon_dims(config)
    shapes = jax.eval_shape(lambda key: parameters.init(key, config), jax.random.key(0))
    token_shape = jax.ShapeDtypeStruct((DEVICES, tokens), jnp.int32)
    batch = {"tokens": token_shape, "targets": token_shape}
    grad_fn = sk.value_and_grad(transformer.loss_fn(config))
    rows: list[tuple[str, ...]] = [
        ("plan", "optimizer", "collectives", "sent MB", "matmul TFLOP", "exposed ms", "step ms", "temp GiB")
    ]
    for plan_name, plan in plans.items():
        for name, optimizer in list_optimizers(plan, mesh, dims).items():
            init, step = sk.make_train_step(grad_fn, optimizer, mesh=mesh, plan=plan)
            report = sk.aot.compile(step, (init.abstract(shapes), batch), topology="v5e:2x4")
            row = (
                plan_name,
                name,
                str(report.count()),
                f"{float(report.sent()) / 1e6:,.1f}",
                f"{report.compute.flops / 1e12:.2f}",
                *format_milliseconds(report.exposed_seconds, report.seconds, digits=1),
                f"{get_memory(report).temp / 2**30:.2f}",
            )
            rows.append(row)
            print(*row, flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
