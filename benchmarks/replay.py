"""What the search for silent corruption costs: the same step plain, watched in memory, and repeated after every call.

    python -m benchmarks.replay

"watched" takes the checksums of the state before and after each step, and never repeats one. "repeated" repeats each on
exchanged devices: the difference to "watched" is what a check costs, which `every=100` pays every hundredth step. The
last case of each row is the plain step again: its ratio is 1 but for what this machine cannot tell apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import optax

import shardkit as sk
from benchmarks.start import start
from benchmarks.step_overhead import LEARNING_RATE, Model, mlp, small_transformer
from shardkit import bench


def cases(model: Model, mesh: jax.sharding.Mesh, plan: sk.Plan) -> list[bench.Case]:
    """The four cases of a row."""

    def build(mesh: jax.sharding.Mesh) -> Any:
        grad_fn = sk.value_and_grad(model.loss_fn)
        return sk.make_train_step(grad_fn, optax.adamw(LEARNING_RATE), mesh=mesh, plan=plan)

    init, step = build(mesh)
    batch = jax.tree.map(lambda x: sk.runtime.from_full(x, mesh, plan.batch_spec(mesh)), model.batch)

    def case(name: str, every: int | None) -> bench.Case:
        replay = sk.runtime.Replay(step, lambda mesh: build(mesh).step, mesh=mesh, every=every) if every else step
        run = lambda state, batch: replay(state, batch)  # noqa: E731
        run.lower = step.lower  # type: ignore[attr-defined]  # it is called as it is, not under jit
        state = init(model.params, jax.random.key(2))
        return bench.Case(name, run, state, (batch,), lambda s, metrics: (s.params, metrics["loss"]))

    return [case("plain", None), case("watched", 10**9), case("repeated", 1), case("plain again", None)]


def main(argv: Sequence[str] | None = None) -> None:
    """Times the rows."""
    options = start(__doc__, argv, devices=4)
    mesh = sk.make_mesh(data=-1)
    models = [mlp(16, 64)] if options.smoke else [mlp(512, 256), small_transformer(dim=128, examples=32, tokens=64)]
    for model in models:
        for plan in [sk.fsdp("data")] if options.smoke else [sk.dp("data"), sk.fsdp("data")]:
            calls, rounds = (1, 2) if options.smoke else (options.calls or 5, options.rounds or 10)
            row = f"{model.name}, {plan}"
            records = bench.measure(
                "replay", row, cases(model, mesh, plan), mode="dispatched", calls=calls, rounds=rounds
            )
            bench.report(records, options.json)
            for time in ("wall", "cpu"):
                _, watched, repeated, _ = (record[f"{time}_ratio_median"] for record in records)
                print(
                    f"{time} time: to repeat a step takes {repeated - watched:.2f} steps, to watch it {watched - 1:.2f}"
                )


if __name__ == "__main__":
    main()
