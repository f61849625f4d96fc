"""Explicit fsdp around a model that XLA's partitioner splits (`manual=`), and several steps in one call (`steps=`).

    python -m benchmarks.manual

The reference transformer, AdamW, float32, heads and columns in 2, all else in 4. Every step of a row holds its state in
the same layouts, donates it, and gives the same results.

    jit              plain jit with NamedShardings, as in `benchmarks.partitioner`, with the fewest constraints and all
    fsdp x tp        every collective explicit: `sk.chain(sk.fsdp("fsdp"), sk.tp("model", rules))`
    manual fsdp      `make_train_step(.., plan=sk.fsdp("fsdp"), manual="fsdp")`: tensor parallelism is the partitioner's

Bytes and temporaries are those of `benchmarks.partitioner`. Times are ratios to the first variant within a round, of
steps that Python calls as a training loop does. In the second table all variants take the same steps of a small model:
one in each call, or all in one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

import shardkit as sk
from benchmarks import harness, partitioner
from shardkit.models import transformer
from shardkit.partitioning.placement import map_layouts

HELD = "heads and columns in 2, all in 4"
ROW = partitioner.ROWS[HELD]
MANUAL = {"manual fsdp": sk.fsdp("fsdp"), "manual fsdp, by layer": sk.fsdp("fsdp", layerwise=partitioner.LAYERS)}


def around(name: str, mesh: Mesh, config: transformer.Config, data: Any, **options: Any) -> harness.Variant:
    """A step with explicit fsdp, whose model is written for one device and laid out over "model"."""
    params = transformer.init(jax.random.key(0), config)
    layouts = sk.tp("model", partitioner.RULES).layouts(params, mesh)
    params = jax.device_put(params, map_layouts(lambda layout: NamedSharding(mesh, layout.rest), layouts))
    grad_fn, optimizer = sk.value_and_grad(transformer.loss_fn(config)), optax.adamw(partitioner.LEARNING_RATE)
    init, step = sk.make_train_step(grad_fn, optimizer, mesh=mesh, plan=MANUAL[name], manual="fsdp", **options)
    return harness.Variant(name, step, init(params, jax.random.key(2)), (data,), partitioner.results)


def one_by_one(variant: harness.Variant, batches: list[Any]) -> harness.Variant:
    """A step, called for one batch after another."""

    def calls(carry: Any, batches: list[Any]) -> tuple[Any, list[Any]]:
        found = []
        for batch in batches:
            carry, metrics = variant.step(carry, batch)
            found.append(metrics)
        return carry, found

    calls.lower = None  # type: ignore[attr-defined]  # the harness must not jit it: what is measured is its calls
    return variant._replace(step=calls, args=(batches,), checked=_checked)


def at_once(variant: harness.Variant, name: str, stacked: Any, step: Any = None) -> harness.Variant:
    """All of these steps in one call: those of a builder, or of a scan over a step of plain jit."""
    scan = jax.jit(lambda carry, stacked: jax.lax.scan(variant.step, carry, stacked), donate_argnums=0)
    return harness.Variant(name, step or scan, variant.carry, (stacked,), _checked)


def _checked(carry: Any, value: Any) -> Any:
    held = (carry.params, carry.opt_state) if isinstance(carry, sk.TrainState) else carry
    return held, jnp.stack([each["loss"] for each in value]) if isinstance(value, list) else value["loss"]


def several(mesh: Mesh, config: transformer.Config, tokens: int, steps: int) -> list[harness.Variant]:
    """The same steps, one in each call and all in one."""
    plain, *_, explicit, _ = partitioner.variants(ROW, mesh, config, examples=mesh.size, tokens=tokens)
    (data,) = plain.args
    mine = around("manual fsdp", mesh, config, data)
    batches = [jax.tree.map(lambda x, i=i: jnp.roll(x, i, axis=0), data) for i in range(steps)]
    batches = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), batches, [data] * steps)
    stacked = jax.tree.map(lambda *each: jnp.stack(each), *batches)
    behind = jax.tree.map(lambda x: NamedSharding(mesh, jax.P(None, *x.sharding.spec)), data)
    stacked = jax.device_put(stacked, behind)
    grad_fn = sk.value_and_grad(transformer.loss_fn(config, ROW.axes))
    optimizer, plan = optax.adamw(partitioner.LEARNING_RATE), ROW.plans["fsdp x tp"]
    whole = sk.make_train_step(grad_fn, optimizer, mesh=mesh, plan=plan, steps=steps)
    left = around("manual fsdp", mesh, config, data, steps=steps)
    return [
        one_by_one(plain, batches),
        at_once(plain, "jit, scan", stacked),
        one_by_one(explicit, batches),
        at_once(explicit, f"fsdp x tp, steps={steps}", stacked, whole.step),
        one_by_one(mine, batches),
        at_once(left, f"manual fsdp, steps={steps}", stacked, left.step),
    ]


def times(record: harness.Record) -> str:
    """A record of the second table as a row of it."""
    cells = [record["row"], record["variant"], *(f"{record[f'{clock}_ratio_median']:.2f}" for clock in ("wall", "cpu"))]
    cells += [f"{record['disagreement_relative_max']:.0e}"]
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> None:
    """Prints both tables."""
    options = harness.start(__doc__, argv, devices=8)
    mesh = sk.make_mesh(**ROW.mesh)
    small = transformer.Config(layers=2, dim=64, heads=8)
    config, tokens = (small, 16) if options.smoke else (partitioner.CONFIG, 128)
    calls, rounds = (1, 1) if options.smoke else (options.calls or 2, options.rounds or 15)
    variants = partitioner.variants(ROW, mesh, config, examples=mesh.size, tokens=tokens)
    variants += [around(name, mesh, config, variants[0].args[0]) for name in MANUAL]
    sizes = [partitioner.sizes(each) for each in variants]
    how: dict[str, Any] = {"mode": "dispatched", "calls": calls, "rounds": rounds, "tolerance": 1e-4}
    timed = harness.measure("manual", HELD, variants, **how)
    columns = ["held", "step", "sent, as written", "sent, MiB", "temp, MiB", "wall", "CPU", "difference"]
    print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    harness.report([one | each for one, each in zip(sizes, timed, strict=True)], options.json, partitioner.line)

    steps = 2 if options.smoke else 8
    timed = harness.measure("manual", f"{steps} steps", several(mesh, small, 16, steps), **how)
    print("\n| taken | step | wall | CPU | difference |\n|---|---|---|---|---|")
    harness.report(timed, options.json, times)


if __name__ == "__main__":
    main()
