"""A 70B step on 512 v5p, from a layout by hand to what the planner finds, each row compiled: what its wire exposes.

    python -m benchmarks.exposed                 # ten compilations, a minute or two each
    python -m benchmarks.exposed --only context  # the rows whose name has the word

256 sequences of 4,096 tokens a step. Seconds are by the time model of `shardkit/analysis/hlo/compute.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import shardkit as sk
from benchmarks.planned import MODELS
from shardkit import planner
from shardkit.analysis.hlo.report import Report
from shardkit.models import transformer
from shardkit.planner import Layout

BATCH, SEQUENCE = 256, 4096
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "2d_all_gather", "3d_all_gather", "nd_reduce_scatter")
OPTIONS = {
    "SparseCore": {f"xla_tpu_enable_sparse_core_collective_offload_{kind}": True for kind in KINDS},
    "minor sharding": {"xla_tpu_use_minor_sharding_for_major_trivial_input": True},
}
BOTH = tuple(OPTIONS)


class Row(NamedTuple):
    """A layout, the options of the compiler by their names above, and what is changed in its axes or configuration."""

    layout: Layout
    options: tuple[str, ...] = ()
    ring: bool = False  # of matmuls, along the tensor ways
    prefetch: bool = False

    @property
    def name(self) -> str:
        """The row in words."""
        changed = [name for name in ("ring", "prefetch") if getattr(self, name)]
        return ", ".join([str(self.layout), *changed, *self.options])


ROWS = (
    Row(Layout(fsdp=64, tensor=8, remat="full")),
    Row(Layout(fsdp=256, tensor=2, remat="selective")),
    Row(Layout(fsdp=256, tensor=2, remat="selective"), ("SparseCore",)),
    Row(Layout(fsdp=256, tensor=2, remat="selective"), BOTH),
    Row(Layout(fsdp=256, tensor=2, remat="selective"), BOTH, ring=True),
    Row(Layout(fsdp=256, context=2), BOTH),
    Row(Layout(fsdp=128, context=4)),
    Row(Layout(fsdp=128, context=4), ("SparseCore",)),
    Row(Layout(fsdp=128, context=4), ("SparseCore",), prefetch=True),
    Row(Layout(fsdp=128, tensor=2, context=2), ("SparseCore",), ring=True),
)


def report(row: Row) -> Report:
    """The compiled step of a row."""
    found = planner.estimate(MODELS["70b"], row.layout, chip="v5p", batch=BATCH, sequence=SEQUENCE)
    config = replace(found.config(), prefetch=row.prefetch)
    inside: dict[str, Any] = {axis: axis for axis in ("model", "context") if axis in row.layout.axes}
    axes = transformer.Axes(**inside, sequence="model" in inside, impl="ring" if row.ring else "auto")
    init, step = sk.make_train_step(
        sk.value_and_grad(transformer.loss_fn(config, axes)),
        optax.adamw(3e-4),
        mesh=sk.abstract_mesh(**row.layout.axes),
        plan=found.plan(),
        precision="bf16",
    )
    tokens = jax.ShapeDtypeStruct((BATCH, SEQUENCE), jnp.int32)
    args = (init.abstract(lambda key: transformer.init(key, config)), {"tokens": tokens, "targets": tokens})
    chosen: dict[str, bool] = {}
    for name in row.options:
        chosen |= OPTIONS[name]
    return sk.aot.compile(step, args, topology="v5p:8x8x8", options=chosen)


def main(argv: Sequence[str] | None = None) -> None:
    """Compiles the rows and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="the rows whose name has these words")
    options = parser.parse_args(argv)
    print("| layout and options | compute, s | exposed of the wire, s | step, s | memory, GiB |")
    print("|---|--:|--:|--:|--:|")
    for row in ROWS:
        if options.only not in row.name:
            continue
        made = report(row)
        wire = f"{made.exposed_seconds:.3f} of {made.wire_seconds:.3f}"
        cells = (row.name, f"{made.compute.seconds:.3f}", wire, f"{made.seconds:.3f}", f"{made.needed / 2**30:.1f}")
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
