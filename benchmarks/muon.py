"""Muon by owners beside optax's Muon under the partitioner, as the TPU's compiler sees a step of each.

Compiles for TPU v5e:2x4 without one: the reference transformer of 8 layers, 1024 tokens on each of 8 devices, its
matrices split by fsdp or by zero1, or whole in data parallelism. Each row is a whole step as compiled: what one device
sends, computes and holds, and its modelled time; what is above the row of sgd is Muon's. No simulated device runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax

import shardkit as sk
from benchmarks.start import start
from shardkit.meshes.layout import table
from shardkit.models import parameters, transformer

DEVICES = 8
PLANS = {
    "fsdp, layer-wise": lambda: sk.fsdp("data", layerwise=("layers",)),
    "zero1": lambda: sk.zero1("data"),
    "zero1 by layers": lambda: sk.zero1("data", rules=by_layers),
    "dp": lambda: sk.dp("data"),
}


def by_layers(path: str, shape: tuple[int, ...]) -> int | None:
    """Dim 0 of the matrices, so that the update holds whole ones."""
    return 0 if len(shape) > 2 else None


def main(argv: Sequence[str] | None = None) -> None:
    """Compiles a step of each plan with each optimizer, and prints what the compiler says."""
    options = start(__doc__, argv, devices=DEVICES)
    config = transformer.Config(layers=8, dim=128 if options.smoke else 2048, heads=16, vocabulary=256)
    mesh = sk.abstract_mesh(data=DEVICES)
    dims = parameters.muon_dims(config)
    shapes = jax.eval_shape(lambda key: parameters.init(key, config), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((DEVICES, 128 if options.smoke else 1024), jnp.int32)
    grad_fn = sk.value_and_grad(transformer.loss_fn(config))
    lines = [("plan", "optimizer", "collectives", "sent MB", "matmul TFLOP", "exposed ms", "step ms", "temp GiB")]
    for name, make in PLANS.items():
        if options.smoke and name != "zero1":
            continue
        plan = make()
        optimizers = {
            "sgd": optax.sgd(0.02),
            "optax, partitioned": optax.contrib.muon(0.02, muon_weight_dimension_numbers=dims),
            "by owners": sk.muon(0.02, mesh=mesh, plan=plan, muon_weight_dimension_numbers=dims),
        }
        for kind, optimizer in optimizers.items():
            init, step = sk.make_train_step(grad_fn, optimizer, mesh=mesh, plan=plan)
            batch = {"tokens": tokens, "targets": tokens}
            report = sk.aot.compile(step, (init.abstract(shapes), batch), topology="v5e:2x4")
            times = [f"{1e3 * each:.1f}" for each in (report.exposed_seconds, report.seconds)]
            sent = f"{float(report.sent()) / 1e6:,.1f}"
            flops = f"{report.compute.flops / 1e12:.2f}"
            lines.append((name, kind, str(report.count()), sent, flops, *times, f"{report.memory.temp / 2**30:.2f}"))
            print(*lines[-1], flush=True)
    print(table(lines))


if __name__ == "__main__":
    main()
