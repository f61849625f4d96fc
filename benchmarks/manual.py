"""Explicit fsdp around a model that XLA's partitioner splits (`manual=`), and several steps in one call (`steps=`).

    python -m benchmarks.manual

The reference transformer, AdamW, float32, heads and columns in 2, all else in 4. The first table is that of `shardkit
bench strategies`: plain jit, every collective explicit ("fsdp x tp"), and explicit fsdp with tensor parallelism left to
the partitioner ("fsdp x rules"). In the second all cases take the same steps of a small model: one in each call, or all
in one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from benchmarks.start import start
from benchmarks.strategies import beside
from shardkit import bench
from shardkit.bench.records import write
from shardkit.bench.strategies import text
from shardkit.bench.workload import LAYERS, LEARNING_RATE, cases_of, reference
from shardkit.models import transformer
from shardkit.plans.splits import map_layouts

CONSTRAINED = "jit, constraints: fsdp x tp"
HELD = ("jit: fsdp x tp", CONSTRAINED, "fsdp x tp", "jit: fsdp x rules", "fsdp x rules")
AXES = transformer.Axes("model", impl="gather")


def workload(config: transformer.Config, mesh: Mesh, tokens: int) -> bench.Workload:
    """The transformer, with the layouts over "model" that the partitioner starts from."""
    work = reference(config, 2 * mesh.size, tokens)
    layouts = tensor(config, mesh).layouts(work.params, mesh)
    return work._replace(rules=map_layouts(lambda layout: layout.rest, layouts))


def tensor(config: transformer.Config, mesh: Mesh) -> sk.Plan:
    """Tensor parallelism over "model"."""
    return sk.tp("model", transformer.tensor_rules(config, "model", mesh.shape["model"]))


def one_by_one(case: bench.Case, name: str, batches: list[Any]) -> bench.Case:
    """A step, called for one batch after another."""

    def calls(carry: Any, batches: list[Any]) -> tuple[Any, list[Any]]:
        found = []
        for batch in batches:
            carry, metrics = case.step(carry, batch)
            found.append(metrics)
        return carry, found

    calls.lower = None  # type: ignore[attr-defined]  # must not be jitted as a whole: what is measured is its calls
    return bench.Case(f"{name}, one by one", calls, case.carry, (batches,), _checked)


def at_once(case: bench.Case, name: str, stacked: Any, step: Any = None) -> bench.Case:
    """All of these steps in one call: those of a builder, or of a scan over a step of plain jit."""
    scan = jax.jit(lambda carry, stacked: jax.lax.scan(case.step, carry, stacked), donate_argnums=0)
    return bench.Case(name, step or scan, case.carry, (stacked,), _checked)


def _checked(carry: Any, value: Any) -> Any:
    held = (carry.params, carry.opt_state) if isinstance(carry, sk.TrainState) else carry
    return held, jnp.stack([each["loss"] for each in value]) if isinstance(value, list) else value["loss"]


def several(mesh: Mesh, config: transformer.Config, tokens: int, steps: int) -> list[bench.Case]:
    """The same steps, one in each call and all in one."""
    work = workload(config, mesh, tokens)
    cases = cases_of(work, mesh)
    plain, explicit, mine = (cases[name]() for name in ("jit: fsdp x tp", "fsdp x tp", "fsdp x rules"))
    [data] = plain.args
    rolled = lambda x, i: jax.device_put(jnp.roll(x, i, axis=0), x.sharding)  # noqa: E731
    batches = [jax.tree.map(lambda x, i=i: rolled(x, i), data) for i in range(steps)]
    stacked = jax.tree.map(
        lambda *each: jax.device_put(jnp.stack(each), NamedSharding(mesh, P(None, *each[0].sharding.spec))), *batches
    )
    optimizer, how = optax.adamw(LEARNING_RATE), {"mesh": mesh, "steps": steps}
    whole = sk.chain(sk.fsdp("data", layerwise=LAYERS), tensor(config, mesh))
    grad_fn = sk.value_and_grad(transformer.loss_fn(config, AXES))
    _, all_steps = sk.make_train_step(grad_fn, optimizer, plan=whole, **how)
    grad_fn, part = sk.value_and_grad(work.loss_fn), sk.fsdp("data")
    _, left = sk.make_train_step(grad_fn, optimizer, plan=part, manual="data", **how)
    return [
        one_by_one(plain, "jit", batches),
        at_once(plain, "jit, scan", stacked),
        one_by_one(explicit, "fsdp x tp", batches),
        at_once(explicit, f"fsdp x tp, steps={steps}", stacked, all_steps),
        one_by_one(mine, "manual fsdp", batches),
        at_once(mine, f"manual fsdp, steps={steps}", stacked, left),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Prints both tables."""
    options = start(__doc__, argv, devices=8)
    mesh = sk.make_mesh(data=-1, model=2)
    small = transformer.Config(layers=2, dim=64, heads=8)
    config, tokens = (small, 16) if options.smoke else (transformer.Config(layers=6, dim=256, heads=8), 128)
    calls, rounds = (1, 1) if options.smoke else (options.calls or 2, options.rounds or 15)
    work = workload(config, mesh, tokens)
    records = bench.strategies(
        work, mesh=mesh, only=HELD, beside={CONSTRAINED: beside(work, mesh)[CONSTRAINED]}, calls=calls, rounds=rounds
    )
    print(text(records))
    if options.json:
        write(records, options.json)

    steps = 2 if options.smoke else 8
    how: dict[str, Any] = {"mode": "dispatched", "calls": calls, "rounds": rounds, "tolerance": 1e-4}
    bench.report(bench.measure("manual", f"{steps} steps", several(mesh, small, 16, steps), **how), options.json)


if __name__ == "__main__":
    main()
