"""What it costs that a step has the same bits on every mesh: `deterministic=G` against the ordinary step.

    python -m benchmarks.deterministic

On eight devices, and on one of them. With as many groups as devices the ordinary step computes the same in one piece;
with eight groups a device, it accumulates as many microbatches. Each row also prints what one device sends in a step,
by the census, and the temporary memory of the compiled step. The last case is the ordinary step again, under another
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
from benchmarks.start import choose_calls, choose_rounds, start
from benchmarks.step_overhead import LEARNING_RATE, Model, make_mlp, make_transformer
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


def make_case(name: str, model: Model, setting: Setting, **options: Any) -> bench.Case:
    """A step over the first devices, with its batch laid out."""
    mesh = sk.make_mesh(jax.devices()[: setting.devices], data=setting.devices)
    grad_fn = sk.value_and_grad(model.loss_fn)
    optimizer = optax.adamw(LEARNING_RATE)
    init, step = sk.make_train_step(grad_fn, optimizer, mesh=mesh, plan=setting.plan, **options)
    batch = jax.device_put(model.batch, NamedSharding(mesh, P("data")))
    state = init(model.params, jax.random.key(2))
    return bench.Case(name, step, state, (batch,), _get_results)


def _get_results(state: sk.TrainState, metrics: Any) -> Any:
    # Not the key of the state, which is no number.
    return state.params, state.opt_state, metrics["loss"]


def make_cases(model: Model, setting: Setting) -> list[bench.Case]:
    """The ordinary step, the deterministic one, and the ordinary one again."""
    # As many microbatches as there are groups on a device: else the ratio would be that of accumulation, too.
    microbatches = setting.groups
    groups = setting.devices * setting.groups
    return [
        make_case("ordinary", model, setting, accumulate=microbatches),
        make_case("deterministic", model, setting, deterministic=groups),
        make_case("ordinary again", model, setting, accumulate=microbatches),
    ]


def describe_needs(case: bench.Case) -> str:
    """What one device sends in a step, and the temporary memory of the compiled step."""
    step: Any = case.step
    traced = step.trace(case.carry, *case.args)
    sent = float(sk.census(traced).sent())
    temporary = traced.lower().compile().memory_analysis().temp_size_in_bytes
    return f"{case.name}: {sent / 1024:,.1f} KiB sent, {temporary / 1024:,.0f} KiB temporary"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the rows of all models."""
    options = start(__doc__, argv, devices=8)
    if options.smoke:
        models = [make_mlp(16, 64)]
        settings = SETTINGS[:1]
    else:
        models = [make_mlp(), make_transformer(examples=64)]
        settings = SETTINGS
    for model in models:
        for setting in settings:
            ordinary, deterministic, ordinary_again = make_cases(model, setting)
            for case in (ordinary, deterministic):
                print(describe_needs(case), flush=True)
            records = bench.measure(
                "deterministic",
                f"{model.name}, {setting}",
                [ordinary, deterministic, ordinary_again],
                mode="dispatched",
                calls=choose_calls(options, model.calls),
                rounds=choose_rounds(options, 20),
                tolerance=1e-3,  # the two steps sum in another order
            )
            bench.report(records, options.json)


if __name__ == "__main__":
    main()
