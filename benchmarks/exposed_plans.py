"""What plans leave exposed of their wire, by the chips' own compilers, and what was tried against it.

    python -m benchmarks.exposed_plans                    # v5e:2x4, v5p:2x2x2
    python -m benchmarks.exposed_plans --chips h100:8     # with shardkit[aot-gpu]

A transformer of six layers of width 1,024 in float32, eight sequences of 1,024 tokens, Adam. Each plan is compiled
without options, and then by `sk.aot.tune` with each option of `shardkit plan --tune` added to those that helped. Times
are by the report's model of the chip, and not measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

import shardkit as sk
from shardkit.analysis.hlo.topology import device_of, parse_topology
from shardkit.analysis.hlo.tuning import Trial
from shardkit.models import transformer
from shardkit.planner import Layout
from shardkit.planner.changes import StepChange, list_changes

CHIPS = ("v5e:2x4", "v5p:2x2x2")
LAYERS, WIDTH, BATCH, TOKENS = 6, 1024, 8, 1024
# What people are told to try, beside the options that the planner tries.
RERUN = StepChange("scheduler rerun", {"xla_latency_hiding_scheduler_rerun": 2})


def make_step(plan: sk.Plan, prefetch: bool) -> tuple[Any, Any, Any]:
    """The step of a plan over eight devices, and the shapes of its arguments."""
    config = transformer.Config(
        vocabulary=4096, dim=WIDTH, heads=8, hidden=4 * WIDTH, layers=LAYERS, remat="full", prefetch=prefetch
    )
    init, step = sk.make_train_step(
        sk.value_and_grad(transformer.loss_fn(config)), optax.adam(1e-3), mesh=sk.abstract_mesh(d=8), plan=plan
    )
    tokens = jax.ShapeDtypeStruct((BATCH, TOKENS), jnp.int32)
    state = init.abstract(lambda key: transformer.init(key, config))
    return step, state, {"tokens": tokens, "targets": tokens}


def list_plans() -> dict[str, tuple[sk.Plan, bool]]:
    """The plans by name, and whether layers are gathered before they are needed."""
    layers = ("layers",)
    return {
        "zero1": (sk.zero1("d"), False),
        "zero1 by layer": (sk.zero1("d", layerwise=layers), False),
        "zero2 by layer": (sk.zero2("d", layerwise=layers), False),
        "fsdp": (sk.fsdp("d"), False),
        "fsdp by layer": (sk.fsdp("d", layerwise=layers), False),
        "fsdp by layer, prefetch": (sk.fsdp("d", layerwise=layers), True),
    }


def name_options(trial: Trial, changes: Sequence[StepChange]) -> str:
    """The changes whose options a trial has, in words."""
    names = [change.name for change in changes if change.options.keys() <= trial.options.keys()]
    return ", ".join(names) or "none"


def main(argv: Sequence[str] | None = None) -> None:
    """Compiles the plans and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", default=list(CHIPS), help="topologies of eight devices")
    parser.add_argument("--only", default="", help="the plans whose name has these words")
    options = parser.parse_args(argv)
    print("| chips | plan | options | compute, ms | exposed of the wire, ms | step, ms | temp, MiB |")
    print("|---|---|---|--:|--:|--:|--:|")
    for topology in options.chips:
        changes = [*list_changes(Layout(), device_of(parse_topology(topology))), RERUN]
        for name, (plan, prefetch) in list_plans().items():
            if options.only not in name:
                continue
            step, state, batch = make_step(plan, prefetch)
            tried = [change.options for change in changes]
            tuned = sk.aot.tune(step, (state, batch), topology=topology, options=tried)
            for trial in tuned.trials:
                report = trial.report
                words = name_options(trial, changes)
                if report is None:
                    print(f"| {topology} | {name} | {words} | refused: {trial.message[:60]} | | | |")
                    continue
                wire = f"{1e3 * report.exposed_seconds:.2f} of {1e3 * report.wire_seconds:.2f}"
                times = f"{1e3 * report.compute.seconds:.2f} | {wire} | {1e3 * report.seconds:.2f}"
                print(f"| {topology} | {name} | {words} | {times} | {report.memory.temp / 2**20:.0f} |", flush=True)


if __name__ == "__main__":
    main()
