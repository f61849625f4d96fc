"""What it costs that a step has the same bits on every mesh: `deterministic=G` against the ordinary step.

    python -m benchmarks.deterministic

On eight devices, and on one of them. With as many groups as devices the ordinary step computes the same in one piece;
with eight groups a device, it accumulates as many microbatches. Each row also prints what one device sends in a step,
by the census, and the temporary memory of the compiled step. The last variant is the ordinary step again, under another
name: its ratio is 1 but for what this machine cannot tell apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from benchmarks.start import start
from benchmarks.step_overhead import LEARNING_RATE, Model, mlp, small_transformer
from shardkit import bench


class Setting(NamedTuple):
    """A plan, its devices, and the groups of each."""

    plan: sk.Plan
    devices: int
    groups: int

    def __str__(self) -> str:
        return f"{self.plan}, {self.devices} devices, {self.groups} groups a device"


SETTINGS = [
    Setting(sk.dp("data"), 8, 1),
    Setting(sk.zero1("data"), 8, 1),
    Setting(sk.fsdp("data"), 8, 1),
    Setting(sk.dp("data"), 8, 8),
    Setting(sk.dp("data"), 1, 8),
]


def variant(name: str, model: Model, case: Setting, **options: Any) -> bench.Case:
    """A step over the first devices, with its batch laid out."""
    mesh = sk.make_mesh(jax.devices()[: case.devices], data=case.devices)
    grad_fn = sk.value_and_grad(model.loss_fn)
    init, step = sk.make_train_step(grad_fn, optax.adamw(LEARNING_RATE), mesh=mesh, plan=case.plan, **options)
    batch = jax.device_put(model.batch, NamedSharding(mesh, P("data")))
    state = init(model.params, jax.random.key(2))
    return bench.Case(name, step, state, (batch,), lambda s, metrics: (s.params, s.opt_state, metrics["loss"]))


def variants(model: Model, case: Setting) -> list[bench.Case]:
    """The ordinary step, the deterministic one, and the ordinary one again."""
    plain = {"accumulate": case.groups}
    return [
        variant("ordinary", model, case, **plain),
        variant("deterministic", model, case, deterministic=case.devices * case.groups),
        variant("ordinary again", model, case, **plain),
    ]


def needs(variant: bench.Case) -> str:
    """What one device sends in a step, and the temporary memory of the compiled step."""
    traced = variant.step.trace(variant.carry, *variant.args)
    sent = float(sk.census(traced).sent())
    temporary = traced.lower().compile().memory_analysis().temp_size_in_bytes
    return f"{variant.name}: {sent / 1024:,.1f} KiB sent, {temporary / 1024:,.0f} KiB temporary"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the rows of both models."""
    options = start(__doc__, argv, devices=8)
    models = [mlp(16, 64)] if options.smoke else [mlp(), small_transformer(examples=64)]
    cases = SETTINGS[:1] if options.smoke else SETTINGS
    for model in models:
        for case in cases:
            rows = variants(model, case)
            for each in rows[:2]:
                print(needs(each), flush=True)
            calls = options.calls or (2 if options.smoke else model.calls)
            rounds = options.rounds or (2 if options.smoke else 20)
            row = f"{model.name}, {case}"
            how: dict[str, Any] = {"mode": "dispatched", "calls": calls, "rounds": rounds, "tolerance": 1e-3}
            bench.report(bench.measure("deterministic", row, rows, **how), options.json)


if __name__ == "__main__":
    main()
