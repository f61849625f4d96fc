"""A 70B step on 512 v5p, from a layout by hand to what the planner finds, each row compiled: what its wire exposes.

    python -m benchmarks.exposed                 # ten compilations, a minute or two each
    python -m benchmarks.exposed --only context  # the rows whose name has the word

256 sequences of 4,096 tokens a step. Seconds are by the time model of `shardkit/analysis/hlo/compute.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

import shardkit as sk
from benchmarks.planned import MODELS
from shardkit import planner
from shardkit.analysis.hlo.report import Report
from shardkit.collectives.matmul import Impl
from shardkit.models import transformer
from shardkit.planner import Layout

BATCH = 256
SEQUENCE = 4096
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "2d_all_gather", "3d_all_gather", "nd_reduce_scatter")
# What users may pass to the compiler: collectives on a chip's SparseCores, beside the cores that multiply; and other
# splits where it would run a reduce_scatter as an all_reduce of twice the bytes.
OPTIONS = {
    "SparseCore": {f"xla_tpu_enable_sparse_core_collective_offload_{kind}": True for kind in KINDS},
    "minor sharding": {"xla_tpu_use_minor_sharding_for_major_trivial_input": True},
}
ALL_OPTIONS = tuple(OPTIONS)


class Row(NamedTuple):
    """A layout, the options of the compiler by their names above, and what is changed in its axes or configuration."""

    layout: Layout
    options: tuple[str, ...] = ()
    ring: bool = False  # of matmuls, along the tensor ways
    prefetch: bool = False

    @property
    def name(self) -> str:
        """The row in words."""
        words = [str(self.layout)]
        if self.ring:
            words.append("ring")
        if self.prefetch:
            words.append("prefetch")
        return ", ".join([*words, *self.options])


# From a layout by hand to that which the planner finds, and what each option and form adds to it.
ROWS = (
    Row(Layout(fsdp=64, tensor=8, remat="full")),
    Row(Layout(fsdp=256, tensor=2, remat="selective")),
    Row(Layout(fsdp=256, tensor=2, remat="selective"), ("SparseCore",)),
    Row(Layout(fsdp=256, tensor=2, remat="selective"), ALL_OPTIONS),
    Row(Layout(fsdp=256, tensor=2, remat="selective"), ALL_OPTIONS, ring=True),
    Row(Layout(fsdp=256, context=2), ALL_OPTIONS),
    Row(Layout(fsdp=128, context=4)),
    Row(Layout(fsdp=128, context=4), ("SparseCore",)),
    Row(Layout(fsdp=128, context=4), ("SparseCore",), prefetch=True),
    Row(Layout(fsdp=128, tensor=2, context=2), ("SparseCore",), ring=True),
)


def compile_row(row: Row) -> Report:
    """The compiled step of a row."""
    candidate = planner.estimate(MODELS["70b"], row.layout, chip="v5p", batch=BATCH, sequence=SEQUENCE)
    config = replace(candidate.config(), prefetch=row.prefetch)
    loss_fn = transformer.loss_fn(config, choose_axes(row))
    init, step = sk.make_train_step(
        sk.value_and_grad(loss_fn),
        optax.adamw(3e-4),
        mesh=sk.abstract_mesh(**row.layout.axes),
        plan=candidate.plan(),
        precision="bf16",
    )
    tokens = jax.ShapeDtypeStruct((BATCH, SEQUENCE), jnp.int32)
    state = init.abstract(lambda key: transformer.init(key, config))
    compiler_options: dict[str, bool] = {}
    for name in row.options:
        compiler_options |= OPTIONS[name]
    args = (state, {"tokens": tokens, "targets": tokens})
    return sk.aot.compile(step, args, topology="v5p:8x8x8", options=compiler_options)


def choose_axes(row: Row) -> transformer.Axes:
    """The axes over which the transformer of a row communicates; with tensor parallelism its tokens are split, too."""
    model = None
    if "model" in row.layout.axes:
        model = "model"
    context = None
    if "context" in row.layout.axes:
        context = "context"
    impl: Impl = "auto"
    if row.ring:
        impl = "ring"
    return transformer.Axes(model=model, sequence=model is not None, context=context, impl=impl)


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
        report = compile_row(row)
        cells = [
            row.name,
            f"{report.compute.seconds:.3f}",
            f"{report.exposed_seconds:.3f} of {report.wire_seconds:.3f}",
            f"{report.seconds:.3f}",
            f"{report.needed / 2**30:.1f}",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
