"""Explicit fsdp around a model that XLA's partitioner splits (`manual=`), and several steps in one call (`steps=`).

    python -m benchmarks.manual

The reference transformer, AdamW, float32, heads and columns in 2, all else in 4. The first table is that of `shardkit
bench strategies`: plain jit, every collective explicit ("fsdp x tp"), and explicit fsdp with tensor parallelism left to
the partitioner ("fsdp x rules"). In the second all cases take the same steps of a small model: one in each call, or all
in one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from benchmarks.start import choose_calls, choose_rounds, start
from benchmarks.strategies import list_handwritten_cases
from shardkit import bench
from shardkit.bench.records import write
from shardkit.bench.strategies import text
from shardkit.bench.workload import LAYERS, LEARNING_RATE, cases_of, reference
from shardkit.models import transformer
from shardkit.plans.splits import map_layouts

CONSTRAINED = "jit, constraints: fsdp x tp"
COMPARED = ("jit: fsdp x tp", CONSTRAINED, "fsdp x tp", "jit: fsdp x rules", "fsdp x rules")
AXES = transformer.Axes("model", impl="gather")


def make_workload(config: transformer.Config, mesh: Mesh, tokens: int) -> bench.Workload:
    """The transformer, with the layouts over "model" that the partitioner starts from."""
    work = reference(config, 2 * mesh.size, tokens)
    layouts = make_tensor_plan(config, mesh).layouts(work.params, mesh)
    return work._replace(rules=map_layouts(lambda layout: layout.rest, layouts))


def make_tensor_plan(config: transformer.Config, mesh: Mesh) -> sk.Plan:
    """Tensor parallelism over "model"."""
    return sk.tp("model", transformer.tensor_rules(config, "model", mesh.shape["model"]))


def call_one_by_one(case: bench.Case, name: str, batches: list[Any]) -> bench.Case:
    """A step, called for one batch after another."""

    def call_steps(carry: Any, batches: list[Any]) -> tuple[Any, list[jax.Array]]:
        losses = []
        for batch in batches:
            carry, metrics = case.step(carry, batch)
            losses.append(metrics["loss"])
        return carry, losses

    def get_results(carry: Any, losses: list[jax.Array]) -> Any:
        return _get_arrays(carry), jnp.stack(losses)

    call_steps.lower = None  # type: ignore[attr-defined]  # must not be jitted as a whole: its calls are measured
    return bench.Case(f"{name}, one by one", call_steps, case.carry, (batches,), get_results)


def call_once(case: bench.Case, name: str, stacked_batch: Any, step: Any) -> bench.Case:
    """All of these steps in one call."""

    def get_results(carry: Any, metrics: Any) -> Any:
        return _get_arrays(carry), metrics["loss"]

    return bench.Case(name, step, case.carry, (stacked_batch,), get_results)


def _get_arrays(carry: Any) -> Any:
    """Parameters and the optimizer's state, of a builder's step or of one by jit."""
    if isinstance(carry, sk.TrainState):
        return carry.params, carry.opt_state
    return carry


def make_batches(batch: Any, count: int) -> list[Any]:
    """Batches of the same examples, number i rolled by i, and laid out as this one."""

    # Each step has other examples at its places: one that took the batch of another step would have another loss.
    def roll(x: jax.Array, number: int) -> jax.Array:
        return jax.device_put(jnp.roll(x, number, axis=0), x.sharding)

    batches = []
    for number in range(count):
        batches.append({name: roll(x, number) for name, x in batch.items()})
    return batches


def stack_batches(batches: list[Any], mesh: Mesh) -> Any:
    """One array a name, with a dim of steps before the others, which no axis splits."""
    stacked = {}
    for name, x in batches[0].items():
        layout = NamedSharding(mesh, P(None, *x.sharding.spec))
        stacked[name] = jax.device_put(jnp.stack([batch[name] for batch in batches]), layout)
    return stacked


def make_cases(mesh: Mesh, config: transformer.Config, tokens: int, steps: int) -> list[bench.Case]:
    """The same steps, one in each call and all in one."""
    work = make_workload(config, mesh, tokens)
    cases = cases_of(work, mesh)
    jit = cases["jit: fsdp x tp"]()
    explicit = cases["fsdp x tp"]()
    manual = cases["fsdp x rules"]()
    batches = make_batches(jit.args[0], steps)
    stacked_batch = stack_batches(batches, mesh)

    # What jax users write to save calls: the baseline of steps=.
    @partial(jax.jit, donate_argnums=0)
    def scan_jit(carry: Any, stacked_batch: Any) -> Any:
        return jax.lax.scan(jit.step, carry, stacked_batch)

    optimizer = optax.adamw(LEARNING_RATE)
    _, explicit_steps = sk.make_train_step(
        sk.value_and_grad(transformer.loss_fn(config, AXES)),
        optimizer,
        mesh=mesh,
        plan=sk.chain(sk.fsdp("data", layerwise=LAYERS), make_tensor_plan(config, mesh)),
        steps=steps,
    )
    _, manual_steps = sk.make_train_step(
        sk.value_and_grad(work.loss_fn),
        optimizer,
        mesh=mesh,
        plan=sk.fsdp("data"),
        manual="data",
        steps=steps,
    )
    return [
        call_one_by_one(jit, "jit", batches),
        call_once(jit, "jit, scan", stacked_batch, scan_jit),
        call_one_by_one(explicit, "fsdp x tp", batches),
        call_once(explicit, f"fsdp x tp, steps={steps}", stacked_batch, explicit_steps),
        call_one_by_one(manual, "manual fsdp", batches),
        call_once(manual, f"manual fsdp, steps={steps}", stacked_batch, manual_steps),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Prints both tables."""
    options = start(__doc__, argv, devices=8)
    mesh = sk.make_mesh(data=-1, model=2)
    small = transformer.Config(layers=2, dim=64, heads=8)
    config = transformer.Config(layers=6, dim=256, heads=8)
    tokens = 128
    steps = 8
    if options.smoke:
        config = small
        tokens = 16
        steps = 2
    calls = choose_calls(options, 2, smoke=1)
    rounds = choose_rounds(options, 15, smoke=1)
    work = make_workload(config, mesh, tokens)
    constrained = {CONSTRAINED: list_handwritten_cases(work, mesh)[CONSTRAINED]}
    records = bench.strategies(work, mesh=mesh, only=COMPARED, beside=constrained, calls=calls, rounds=rounds)
    print(text(records))
    if options.json:
        write(records, options.json)

    records = bench.measure(
        "manual",
        f"{steps} steps",
        make_cases(mesh, small, 16, steps),
        mode="dispatched",
        calls=calls,
        rounds=rounds,
        tolerance=1e-4,
    )
    bench.report(records, options.json)


if __name__ == "__main__":
    main()
