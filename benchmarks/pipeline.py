"""A pipelined step beside a GPipe scan written the tutorial way, and what the TPU compiler holds for it.

CPU: eight stages of residual feed-forward layers; the baseline scans m + p - 1 ticks forward, every device computing
its stage at every tick, and lets autodiff run the scan backward. `--memory` compiles for TPU v5e:2x4 instead, without
one: 8 stages, bfloat16, 32 MiB of stage input, and prints the temporary memory of each form. `--vocabulary` does so for
an embedding and a head of 131,072 tokens, on one device or spread over all. `--compiling` compiles both for the CPU,
and prints how many loops the program has and how long that takes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from benchmarks.compiled import describe_array, format_milliseconds, get_memory
from benchmarks.schedules import (
    SPECS,
    VOCABULARY,
    Step,
    compute_loss,
    embed,
    make_params,
    make_pipelined_step,
    run_stage,
)
from benchmarks.start import choose_calls, choose_rounds, start
from shardkit import bench
from shardkit.meshes.layout import table

STAGES = 8
LAST = STAGES - 1
SCHEDULES: dict[str, Callable[[int, int], sk.schedules.Schedule]] = {
    "lockstep": sk.schedules.lockstep,
    "one_f_one_b": sk.schedules.one_f_one_b,
    "zero_bubble_h1": sk.schedules.zero_bubble_h1,
}
ENDS = ("one device each", "spread")  # where embedding and head run
# Schedule, stages, microbatches.
COMPILED = [
    ("one_f_one_b", 2, 4),
    ("one_f_one_b", 4, 8),
    ("one_f_one_b", 8, 16),
    ("lockstep", 4, 8),
    ("zero_bubble_h1", 4, 8),
]


def make_tutorial_loss(microbatches: int, remat: bool) -> Callable[..., Any]:
    """GPipe as tutorials write it: one scan, differentiated; every tick computes on every device.

    For example 2 stages and 3 microbatches a, b, c take 4 ticks. What has no letter is computed, and not used:

    tick            0   1   2   3
    first device    a   b   c   .
    last device     .   a   b   c
    """
    apply_stage = run_stage
    if remat:
        apply_stage = jax.checkpoint(run_stage, static_argnums=2)

    def loss(params: Any, batch: Any) -> jax.Array:
        device = lax.axis_index("stage")
        embedded = embed(params, batch, None)
        inputs = embedded.reshape(microbatches, -1, embedded.shape[-1])

        def tick(state: Any, t: jax.Array) -> Any:
            x, total = state
            first_input = inputs[jnp.minimum(t, microbatches - 1)]
            x = jnp.where(device == 0, first_input, x)
            y = apply_stage(params["layers"], x, None)
            # Every device computes a loss. That of the last one counts, once its first microbatch has arrived.
            tick_total = compute_loss(params, y, batch).total
            total = total + jnp.where((device == LAST) & (t >= LAST), tick_total, 0.0)
            # Every device hands its result on, whether it is one or not: the next tick reads what arrives.
            y = lax.ppermute(y, "stage", [(i, i + 1) for i in range(LAST)])
            return (y, total), None

        zero = (jnp.zeros(inputs.shape[1:], inputs.dtype), jnp.float32(0))
        carry = lax.pcast(zero, "stage", to="varying")
        (_, total), _ = lax.scan(tick, carry, jnp.arange(microbatches + LAST))
        return lax.psum(total, "stage") / embedded.size  # only the last device has a total

    return loss


def list_steps(mesh: Any, microbatches: int) -> dict[str, Step]:
    """`(params, batch) -> (loss, gradients)` of every form; the first is the baseline."""
    steps: dict[str, Step] = {}
    for name, remat in (("scan GPipe", False), ("scan GPipe, remat", True)):
        loss = make_tutorial_loss(microbatches, remat)
        mapped = jax.shard_map(loss, mesh=mesh, in_specs=(SPECS, P()), out_specs=P())
        steps[name] = jax.value_and_grad(mapped)
    for name, build in SCHEDULES.items():
        schedule = build(STAGES, microbatches)
        for mode in ("masked", "branch"):
            for residuals, recompute in (("recompute", True), ("saved", False)):
                steps[f"{name}, {mode}, {residuals}"] = make_pipelined_step(schedule, mode, recompute, mesh)
    return steps


def make_case(name: str, step: Step, carry: jax.Array, args: tuple[Any, ...]) -> bench.Case:
    """Loss and gradients of a step; the carry is only passed through.

    No optimizer: its update would be in every row, and hide a part of the differences.
    """

    def call_step(carry: jax.Array, *args: Any) -> Any:
        return carry, step(*args)

    return bench.Case(name, call_step, carry, args)


def measure_steps(options: argparse.Namespace) -> None:
    """Times every form on simulated devices."""
    dim = 256
    rows = 64
    counts = [8, 16, 32]
    if options.smoke:
        dim = 8
        rows = 2
        counts = [4]
    mesh = sk.make_mesh(stage=STAGES)
    replicated = NamedSharding(mesh, P())
    params = sk.shard(make_params(2 * STAGES, dim, 4 * dim), mesh, SPECS)
    zero = jax.device_put(jnp.float32(0), replicated)
    for microbatches in counts:
        tokens = np.random.default_rng(1).integers(0, VOCABULARY, rows * microbatches).astype(np.int32)
        batch = {"tokens": jax.device_put(tokens, replicated)}
        cases = []
        for name, step in list_steps(mesh, microbatches).items():
            cases.append(make_case(name, step, zero, (params, batch)))
        records = bench.measure(
            "pipeline",
            f"{microbatches} microbatches",
            cases,
            mode="dispatched",
            calls=choose_calls(options, 2),
            rounds=choose_rounds(options, 10, smoke=1),
            donate=False,  # the same parameters in every call
        )
        bench.report(records, options.json)


def describe_params(mesh: Any, dim: int) -> Any:
    """The shapes of the parameters of as many layers as stages, and how they are split."""

    def describe(spec: P, tree: Any) -> Any:
        return jax.tree.map(lambda x: describe_array(mesh, spec, x.shape, x.dtype), tree)

    shapes = jax.eval_shape(lambda: make_params(STAGES, dim, dim, jnp.bfloat16))
    return {name: describe(SPECS[name], tree) for name, tree in shapes.items()}


def print_memory(smoke: bool) -> None:
    """Temporary memory and compile time of three forms, by the TPU's own compiler; runs nothing."""
    mesh = sk.abstract_mesh(stage=STAGES)
    rows = 16384
    dim = 1024
    counts = [8, 16, 64]
    if smoke:
        rows = 64
        dim = 128
        counts = [4, 8]
    params = describe_params(mesh, dim)
    lines: list[tuple[str, ...]] = [("form", "microbatches", "temp MiB", "compile s")]
    for microbatches in counts:
        steps = list_steps(mesh, microbatches)
        batch = {"tokens": describe_array(mesh, P(), (rows * microbatches,), jnp.int32)}
        for name in ("scan GPipe, remat", "lockstep, masked, recompute", "one_f_one_b, branch, recompute"):
            start_time = time.perf_counter()
            report = sk.aot.compile(jax.jit(steps[name]), (params, batch), topology="v5e:2x4")
            seconds = time.perf_counter() - start_time
            temp = get_memory(report).temp / 2**20
            lines.append((name, str(microbatches), f"{temp:,.0f}", f"{seconds:.1f}"))
            print(*lines[-1], flush=True)
    print(table(lines))


class VocabularyModel(NamedTuple):
    """The sizes of a model with an embedding and a head."""

    layers: int
    dim: int
    vocabulary: int

    def describe_params(self, dtype: Any) -> Any:
        """The shapes of the parameters of a stack, a table of tokens and a head."""

        def shape(*dims: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(dims, dtype)

        stack = {
            "up": shape(self.layers, self.dim, 4 * self.dim),
            "down": shape(self.layers, 4 * self.dim, self.dim),
        }
        return {
            "layers": stack,
            "table": shape(self.vocabulary, self.dim),
            "head": shape(self.dim, self.vocabulary),
        }


def make_vocabulary_step(schedule: sk.schedules.Schedule, ends: str, mesh: Any) -> Any:
    """A step of adam, its embedding and head on one device each, or spread over all."""
    dims = {"table": 0, "head": 1}

    def split_vocabulary(path: str, shape: tuple[int, ...]) -> int:
        return dims[path]

    axis = None
    spread = None
    if ends == "spread":
        axis = "stage"
        spread = split_vocabulary
    pipe = sk.pipeline(schedule, "stage", spread=spread)

    def embed_tokens(shared: Any, batch: Any, keys: Any) -> jax.Array:
        return sk.layers.vocab_embed(batch["tokens"], shared["table"], axis)

    def compute_cross_entropy(shared: Any, x: jax.Array, batch: Any) -> sk.Mean:
        return sk.Mean.of(sk.layers.vocab_cross_entropy(x, shared["head"], batch["targets"], axis))

    grad_fn = pipe.value_and_grad(embed_tokens, run_stage, compute_cross_entropy)
    return sk.make_train_step(grad_fn, optax.adam(1e-3), mesh=mesh, plan=pipe.plan)


def print_vocabulary(smoke: bool) -> None:
    """A step of adam as the TPU's compiler sees it, with the ends of the model on one device each, and spread."""
    sizes = VocabularyModel(layers=16, dim=2048, vocabulary=131_072)
    rows = 2
    microbatches = 16
    if smoke:
        sizes = VocabularyModel(layers=8, dim=128, vocabulary=1024)
        rows = 8
        microbatches = 2
    params = sizes.describe_params(jnp.bfloat16)
    tokens = jax.ShapeDtypeStruct((rows * microbatches, 1024), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    mesh = sk.abstract_mesh(stage=STAGES)
    lines: list[tuple[str, ...]] = [
        ("schedule", "ends", "held GiB", "needed GiB", "modelled ms", "exposed ms", "compile s")
    ]
    for name in ("lockstep", "one_f_one_b"):
        for ends in ENDS:
            schedule = SCHEDULES[name](STAGES, microbatches)
            init, step = make_vocabulary_step(schedule, ends, mesh)
            state = init.abstract(params)
            start_time = time.perf_counter()
            report = sk.aot.compile(step, (state, batch), topology="v5e:2x4")
            seconds = time.perf_counter() - start_time
            line = (
                name,
                ends,
                f"{get_memory(report).held / 2**30:.2f}",
                f"{report.needed / 2**30:.2f}",
                *format_milliseconds(report.seconds, report.exposed_seconds, digits=0),
                f"{seconds:.0f}",
            )
            lines.append(line)
            print(*line, flush=True)
    print(table(lines))


def print_compiling(smoke: bool) -> None:
    """Loops of the program, CPU seconds to compile and temporary memory, with the ends on one device each or spread."""
    dim = 64
    vocabulary = 256
    rows = COMPILED
    if smoke:
        dim = 8
        vocabulary = 16
        rows = COMPILED[:1]
    lines: list[tuple[str, ...]] = [("schedule", "stages", "microbatches", "ends", "loops", "compile s", "temp KiB")]
    for name, stages, microbatches in rows:
        schedule = SCHEDULES[name](stages, microbatches)
        params = VocabularyModel(stages * schedule.chunks, dim, vocabulary).describe_params(jnp.float32)
        tokens = jax.ShapeDtypeStruct((2 * microbatches, 8), jnp.int32)
        batch = {"tokens": tokens, "targets": tokens}
        mesh = sk.make_mesh(jax.devices()[:stages], stage=stages)
        for ends in ENDS:
            init, step = make_vocabulary_step(schedule, ends, mesh)
            lowered = step.trace(init.abstract(params), batch).lower()
            # A loop is a run of ticks with the same ops: their number is what the time to compile follows.
            loops = lowered.as_text().count("stablehlo.while")
            start_time = time.process_time()
            temp = lowered.compile().memory_analysis().temp_size_in_bytes
            seconds = time.process_time() - start_time
            line = (
                name,
                str(stages),
                str(microbatches),
                ends,
                str(loops),
                f"{seconds:.1f}",
                f"{temp / 2**10:,.0f}",
            )
            lines.append(line)
            print(*line, flush=True)
    print(table(lines))


def main(argv: Sequence[str] | None = None) -> None:
    """Measures every form on simulated devices, or compiles them for a TPU."""
    options = start(
        __doc__,
        argv,
        devices=STAGES,
        memory="compile for TPU v5e:2x4 and print memory",
        vocabulary="compile for TPU v5e:2x4 with a large vocabulary, and print time and memory",
        compiling="compile for the CPU, and print loops, time to compile and memory",
    )
    if options.compiling:
        print_compiling(options.smoke)
    elif options.memory:
        print_memory(options.smoke)
    elif options.vocabulary:
        print_vocabulary(options.smoke)
    else:
        measure_steps(options)


if __name__ == "__main__":
    main()
