"""What a machine with real chips can say in ten minutes: `make accelerator`.

Every collective against its meaning, over all chips. The chip's own rate of a large bfloat16 matmul. Then a transformer
of about 350 million parameters in bfloat16, AdamW on a float32 copy, without dropout: the builder's step beside plain
jit on one chip, and with several beside jit + NamedSharding under dp and fsdp. MFU is model FLOPs over the chip's
peak, and beside it over the measured rate of the matmul. Without a chip, `--smoke` runs all of it at small sizes.

Between one chip and several the numbers differ by rounding: losses are held together within 2%, as bfloat16 gives them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from benchmarks.start import choose_calls, choose_rounds, start
from shardkit import bench
from shardkit.bench.records import Record
from shardkit.bench.workload import make_partitioned_case, reference
from shardkit.cli.self_test import self_test
from shardkit.cost import hardware
from shardkit.models import transformer
from shardkit.plans.splits import map_layouts

LARGE = transformer.Config(vocabulary=32_000, layers=20, dim=1024, heads=16, remat=None)  # 346 million parameters
SMALL = transformer.Config(layers=2, dim=64, heads=4)
LEARNING_RATE = 1e-5
TOLERANCE = 2e-2  # bfloat16, summed in another order


def measure_matmul_rate(size: int, calls: int, rounds: int, file: Path | None) -> float:
    """FLOP/s of one chip in a matmul of bfloat16 squares, the median.

    No program of matmuls reaches the peak of a data sheet: the share of this rate says what the step itself loses.
    """
    # The identity: its products stay finite, however many follow each other.
    x = jax.device_put(jnp.eye(size, dtype=jnp.bfloat16), jax.devices()[0])

    def multiply(x: jax.Array) -> tuple[jax.Array, None]:
        return x @ x, None

    case = bench.Case("matmul", multiply, x)
    [record] = bench.measure("accelerator", f"matmul of {size} x {size}", [case], calls=calls, rounds=rounds)
    bench.report([record], file)
    return 2.0 * size**3 / record["wall_us_median"] * 1e6


def make_plain_case(work: bench.Workload, layouts: Any, batch_layout: NamedSharding) -> bench.Case:
    """The step as one writes it for one chip, its arrays laid out: bfloat16 inside, parameters and AdamW in float32."""

    def loss_in_bfloat16(params: Any, batch: Any, keys: Any) -> Any:
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        return work.loss_fn(params, batch, keys)

    replicated = NamedSharding(batch_layout.mesh, P())

    def place_moment(x: jax.Array) -> jax.Array:
        # A moment is where its parameter is. The count of steps is a scalar, and on one device yet.
        if x.ndim:
            return x
        return jax.device_put(x, replicated)

    optimizer = optax.adamw(LEARNING_RATE)
    params = jax.device_put(work.params, layouts)
    moments = jax.tree.map(place_moment, optimizer.init(params))
    batch = jax.device_put(work.batch, batch_layout)
    case = make_partitioned_case("jit", loss_in_bfloat16, optimizer, (params, moments), batch, layouts)
    return case._replace(checked=_get_loss)


def make_built_case(work: bench.Workload, mesh: Mesh, plan: sk.Plan) -> bench.Case:
    """The builder's step, with the same dtypes."""
    grad_fn = sk.value_and_grad(work.loss_fn)
    optimizer = optax.adamw(LEARNING_RATE)
    init, step = sk.make_train_step(grad_fn, optimizer, mesh=mesh, plan=plan, precision="bf16")
    batch = jax.device_put(work.batch, NamedSharding(mesh, plan.batch_spec(mesh)))
    state = init(work.params, jax.random.key(2))
    return bench.Case("shardkit", step, state, (batch,), _get_loss)


def _get_loss(carry: Any, metrics: Any) -> Any:
    # Not the parameters: AdamW makes whole steps of rounding where a gradient is nearly zero.
    return metrics["loss"]


class Row(NamedTuple):
    """Some chips, and the plan of the step on them."""

    title: str
    chips: Sequence[jax.Device]
    plan: sk.Plan

    def make_cases(self, config: transformer.Config, examples: int, tokens: int) -> list[bench.Case]:
        """The steps that are timed beside each other, with so many examples on each chip."""
        mesh = sk.make_mesh(self.chips, data=len(self.chips))
        work = reference(config, examples * mesh.size, tokens)
        layouts = self.plan.layouts(work.params, mesh)
        at_rest = map_layouts(lambda layout: NamedSharding(mesh, layout.rest), layouts)
        batch_layout = NamedSharding(mesh, self.plan.batch_spec(mesh))
        return [make_plain_case(work, at_rest, batch_layout), make_built_case(work, mesh, self.plan)]


def list_rows() -> list[Row]:
    """One chip, and all of them if there are several."""
    chips = jax.devices()
    rows = [Row("one chip", chips[:1], sk.dp("data"))]
    if len(chips) > 1:
        rows.append(Row(f"dp, {len(chips)} chips", chips, sk.dp("data")))
        rows.append(Row(f"fsdp, {len(chips)} chips", chips, sk.fsdp("data")))
    return rows


def check_collectives() -> bool:
    """Compares every collective with its meaning, over all chips, and prints which ones are wrong."""
    wrong = []
    for name, difference in self_test(sk.make_mesh(x=-1)).items():
        if difference != 0:
            wrong.append(name)
    verdict = "all exact"
    if wrong:
        verdict = f"{', '.join(wrong)} WRONG"
    print(f"collectives over {jax.device_count()} x {jax.devices()[0].device_kind}: {verdict}", flush=True)
    return not wrong


def main(argv: Sequence[str] | None = None) -> int:
    """Prints everything, and a Markdown table at the end, which goes beside --json; 1 if a collective is wrong."""
    options = start(__doc__, argv, devices=0)
    exact = check_collectives()
    config = LARGE
    tokens = 1024
    examples = 8
    matmul_size = 8192
    if options.smoke:
        config = SMALL
        tokens = 32
        examples = 2
        matmul_size = 128
    calls = choose_calls(options, 5)
    rounds = choose_rounds(options, 5)
    # Many calls in one loop on the chip: called one by one from Python, a matmul would have to wait for it.
    rate = measure_matmul_rate(matmul_size, 20, rounds, options.json)
    flops = sk.cost.transformer_flops(
        layers=config.layers,
        hidden=config.dim,
        heads=config.heads,
        ffn=config.width,
        gated=True,
        vocabulary=config.vocabulary,
        sequence=tokens,
        batch=examples,
    )
    kind = jax.devices()[0].device_kind
    chip = hardware.chip_of(kind)

    def format_row(title: str, record: Record) -> str:
        seconds = record["wall_us_median"] / 1e6
        peak_share = "unknown peak"
        if chip is not None:
            peak_share = f"{sk.cost.mfu(flops, seconds, peak=chip):.1%}"
        cells = [
            f"{title}: {record['case']}",
            f"{examples * tokens / seconds:,.0f}",
            peak_share,
            f"{flops / seconds / rate:.1%}",
            f"{record['wall_ratio_median']:.3f}",
        ]
        return f"| {' | '.join(cells)} |"

    table = ["| | tokens/s per chip | MFU | of the matmul's rate | to jit, wall |", "|---|--:|--:|--:|--:|"]
    for row in list_rows():
        records = bench.measure(
            "accelerator",
            row.title,
            # No name holds the cases: the arrays of a row are freed before those of the next one are made.
            row.make_cases(config, examples, tokens),
            mode="dispatched",
            calls=calls,
            rounds=rounds,
            tolerance=TOLERANCE,
        )
        bench.report(records, options.json)
        for record in records:
            table.append(format_row(row.title, record))
    summary = f"{jax.device_count()} x {kind}, matmul {rate / 1e12:,.1f} TFLOP/s\n\n" + "\n".join(table)
    print(f"\n{summary}")
    if options.json:
        options.json.with_suffix(".md").write_text(f"{summary}\n")
    return int(not exact)


if __name__ == "__main__":
    sys.exit(main())
