"""What a machine with real chips can say in ten minutes: `make accelerator`.

Every collective against its meaning, over all chips. The chip's own rate of a large bfloat16 matmul. Then a transformer
of about 350 million parameters in bfloat16, AdamW on a float32 copy, without dropout: the builder's step beside plain
jit on one chip, and with several beside jit + NamedSharding under dp and fsdp. MFU is model FLOPs over the chip's
peak, and beside it over the measured rate of the matmul. Without a chip, `--smoke` runs all of it at small sizes.

Between one chip and several the numbers differ by rounding: losses are held together within 2%, as bfloat16 gives them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from benchmarks.start import start
from shardkit import bench
from shardkit.bench.workload import make_partitioned_case, reference
from shardkit.cli.self_test import self_test
from shardkit.cost import hardware
from shardkit.models import transformer
from shardkit.plans.splits import map_layouts

LARGE = transformer.Config(vocabulary=32_000, layers=20, dim=1024, heads=16, remat=None)  # 346 million parameters
SMALL = transformer.Config(layers=2, dim=64, heads=4)
LEARNING_RATE = 1e-5
TOLERANCE = 2e-2  # bfloat16, summed in another order


def matmul_rate(size: int, calls: int, rounds: int, file: Path | None) -> float:
    """FLOP/s of one chip in a matmul of bfloat16 squares, the median."""
    x = jax.device_put(jnp.eye(size, dtype=jnp.bfloat16), jax.devices()[0])
    case = bench.Case("matmul", lambda x: (x @ x, None), x)
    [record] = bench.measure("accelerator", f"matmul of {size} x {size}", [case], calls=calls, rounds=rounds)
    bench.report([record], file)
    return 2.0 * size**3 / record["wall_us_median"] * 1e6


def plain(name: str, work: bench.Workload, held: Any, over: NamedSharding) -> bench.Case:
    """The step as one writes it for one chip, its arrays laid out: bfloat16 inside, parameters and AdamW in float32."""

    def in_bfloat16(params: Any, batch: Any, keys: Any) -> Any:
        return work.loss_fn(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), batch, keys)

    optimizer = optax.adamw(LEARNING_RATE)
    params = jax.device_put(work.params, held)
    whole = NamedSharding(over.mesh, P())
    moments = jax.tree.map(lambda x: x if x.ndim else jax.device_put(x, whole), optimizer.init(params))
    batch = jax.device_put(work.batch, over)
    case = make_partitioned_case(name, in_bfloat16, optimizer, (params, moments), batch, held)
    return case._replace(checked=_loss)


def built(name: str, work: bench.Workload, mesh: Mesh, plan: sk.Plan) -> bench.Case:
    """The builder's step, with the same dtypes."""
    grad_fn, optimizer = sk.value_and_grad(work.loss_fn), optax.adamw(LEARNING_RATE)
    init, step = sk.make_train_step(grad_fn, optimizer, mesh=mesh, plan=plan, precision="bf16")
    batch = jax.device_put(work.batch, NamedSharding(mesh, plan.batch_spec(mesh)))
    return bench.Case(name, step, init(work.params, jax.random.key(2)), (batch,), _loss)


def _loss(carry: Any, metrics: Any) -> Any:
    return metrics["loss"]


def rows(config: transformer.Config, examples: int, tokens: int) -> dict[str, Callable[[], list[bench.Case]]]:
    """By title the cases that are timed beside each other; memory holds one row's states at a time."""

    def over(devices: Sequence[jax.Device], plan: sk.Plan) -> list[bench.Case]:
        mesh = sk.make_mesh(devices, data=len(devices))
        work = reference(config, examples * mesh.size, tokens)
        held = map_layouts(lambda layout: NamedSharding(mesh, layout.rest), plan.layouts(work.params, mesh))
        jit = plain("jit", work, held, NamedSharding(mesh, plan.batch_spec(mesh)))
        return [jit, built("shardkit", work, mesh, plan)]

    chips = jax.devices()
    plans = {"dp": sk.dp("data"), "fsdp": sk.fsdp("data")} if len(chips) > 1 else {}
    several = {f"{name}, {len(chips)} chips": partial(over, chips, plan) for name, plan in plans.items()}
    return {"one chip": partial(over, chips[:1], sk.dp("data"))} | several


def main(argv: Sequence[str] | None = None) -> int:
    """Prints everything, and a Markdown table at the end, which goes beside --json; 1 if a collective is wrong."""
    options = start(__doc__, argv, devices=0)
    chips, kind = jax.device_count(), jax.devices()[0].device_kind
    wrong = [name for name, difference in self_test(sk.make_mesh(x=-1)).items() if difference != 0]
    print(f"collectives over {chips} x {kind}: {', '.join(wrong) + ' WRONG' if wrong else 'all exact'}", flush=True)

    config, tokens, examples = (SMALL, 32, 2) if options.smoke else (LARGE, 1024, 8)
    calls, rounds = options.calls or (2 if options.smoke else 5), options.rounds or (2 if options.smoke else 5)
    rate = matmul_rate(128 if options.smoke else 8192, 20, rounds, options.json)
    flops = sk.cost.transformer_flops(
        layers=config.layers, hidden=config.dim, heads=config.heads, ffn=config.width, gated=True,
        vocabulary=config.vocabulary, sequence=tokens, batch=examples,
    )  # fmt: skip
    chip = hardware.chip_of(kind)
    table = ["| | tokens/s per chip | MFU | of the matmul's rate | to jit, wall |", "|---|--:|--:|--:|--:|"]
    for title, cases in rows(config, examples, tokens).items():
        how: Any = {"mode": "dispatched", "calls": calls, "rounds": rounds, "tolerance": TOLERANCE}
        records = bench.measure("accelerator", title, cases(), **how)
        bench.report(records, options.json)
        for record in records:
            seconds = record["wall_us_median"] / 1e6
            share = f"{sk.cost.mfu(flops, seconds, peak=chip):.1%}" if chip else "unknown peak"
            cells = [f"{title}: {record['case']}", f"{examples * tokens / seconds:,.0f}", share]
            cells += [f"{flops / seconds / rate:.1%}", f"{record['wall_ratio_median']:.3f}"]
            table.append(f"| {' | '.join(cells)} |")
    text = f"{chips} x {kind}, matmul {rate / 1e12:,.1f} TFLOP/s\n\n" + "\n".join(table)
    print(f"\n{text}")
    if options.json:
        options.json.with_suffix(".md").write_text(f"{text}\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
