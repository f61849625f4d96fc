"""A pipelined step beside a GPipe scan written the tutorial way, and what the TPU compiler holds for it.

CPU: eight stages of residual feed-forward layers; the baseline scans m + p - 1 ticks forward, every device computing
its stage at every tick, and lets autodiff run the scan backward. `--memory` compiles for TPU v5e:2x4 instead, without
one: 8 stages, bfloat16, 32 MiB of stage input, and prints the temporary memory of each form. `--vocabulary` does so for
an embedding and a head of 131,072 tokens, on one device or spread over all. `--compiling` compiles both for the CPU,
and prints how many loops the program has and how long that takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from benchmarks.schedules import SPECS, VOCABULARY, embed, head, make_params, pipelined, stage
from benchmarks.start import start
from shardkit import bench
from shardkit.meshes.layout import table

STAGES = 8
SCHEDULES = {
    "lockstep": lambda m: sk.schedules.lockstep(STAGES, m),
    "one_f_one_b": lambda m: sk.schedules.one_f_one_b(STAGES, m),
    "zero_bubble_h1": lambda m: sk.schedules.zero_bubble_h1(STAGES, m),
}
ENDS = ("one device each", "spread")  # where embedding and head run
COMPILED = (
    ("one_f_one_b", 2, 4),
    ("one_f_one_b", 4, 8),
    ("one_f_one_b", 8, 16),
    ("lockstep", 4, 8),
    ("zero_bubble_h1", 4, 8),
)


def tutorial(microbatches: int, remat: bool) -> Callable[..., Any]:
    """GPipe as tutorials write it: one scan, differentiated; every tick computes on every device."""

    def loss(params: Any, batch: Any) -> jax.Array:
        d, last = lax.axis_index("stage"), STAGES - 1
        xs = embed(params, batch, None)
        size, xs = xs.size, xs.reshape(microbatches, -1, xs.shape[-1])
        run = jax.checkpoint(stage, static_argnums=2) if remat else stage

        def tick(state: Any, t: jax.Array) -> Any:
            x, total = state
            x = jnp.where(d == 0, xs[jnp.minimum(t, microbatches - 1)], x)
            y = run(params["layers"], x, None)
            here = head(params, y, batch).total
            total = total + jnp.where((d == last) & (t >= last), here, 0.0)
            return (lax.ppermute(y, "stage", [(i, i + 1) for i in range(last)]), total), None

        zero = lax.pcast((jnp.zeros(xs.shape[1:], xs.dtype), jnp.float32(0)), "stage", to="varying")
        (_, total), _ = lax.scan(tick, zero, jnp.arange(microbatches + last))
        return lax.psum(total, "stage") / size

    return loss


def steps(mesh: Any, microbatches: int, only: Sequence[str] = ()) -> dict[str, Callable[..., Any]]:
    """`(params, batch) -> (loss, gradients)` of every form, or of some; the first is the baseline."""
    forms: dict[str, Callable[..., Any]] = {}
    for remat in (False, True):
        whole = jax.shard_map(tutorial(microbatches, remat), mesh=mesh, in_specs=(SPECS, P()), out_specs=P())
        forms[f"scan GPipe{', remat' * remat}"] = jax.value_and_grad(whole)
    for name, make in SCHEDULES.items():
        for mode in ("masked", "branch"):
            for recompute in (True, False):
                form = f"{name}, {mode}, {'recompute' if recompute else 'saved'}"
                forms[form] = pipelined(make(microbatches), mode, recompute, mesh)
    return {name: forms[name] for name in only or forms}


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
        return compiling(smoke=options.smoke)
    if options.memory:
        return memory(smoke=options.smoke)
    if options.vocabulary:
        return vocabulary(smoke=options.smoke)
    dim, rows = (8, 2) if options.smoke else (256, 64)
    mesh = sk.make_mesh(stage=STAGES)
    params = sk.shard(make_params(2 * STAGES, dim, 4 * dim), mesh, SPECS)
    for microbatches in (4,) if options.smoke else (8, 16, 32):
        tokens = np.random.default_rng(1).integers(0, VOCABULARY, rows * microbatches).astype(np.int32)
        batch = {"tokens": jax.device_put(tokens, NamedSharding(mesh, P()))}

        zero = jax.device_put(jnp.float32(0), NamedSharding(mesh, P()))
        variants = [
            bench.Case(name, lambda carry, *args, step=step: (carry, step(*args)), zero, (params, batch))
            for name, step in steps(mesh, microbatches).items()
        ]
        records = bench.measure(
            "pipeline",
            f"{microbatches} microbatches",
            variants,
            mode="dispatched",
            calls=options.calls or 2,
            rounds=options.rounds or (1 if options.smoke else 10),
            donate=False,
        )
        bench.report(records, options.json)


def memory(smoke: bool) -> None:
    """Temporary memory and compile time of each form, by the TPU's own compiler; runs nothing."""
    mesh = sk.abstract_mesh(stage=STAGES)
    rows, dim = (64, 128) if smoke else (16384, 1024)
    forms = ("scan GPipe, remat", "lockstep, masked, recompute", "one_f_one_b, branch, recompute")
    lines = [("form", "microbatches", "temp MiB", "compile s")]
    for microbatches in (4, 8) if smoke else (8, 16, 64):
        for name, step in steps(mesh, microbatches, forms).items():
            shapes = jax.eval_shape(lambda: make_params(STAGES, dim, dim, jnp.bfloat16))
            placed = jax.tree.map(
                lambda spec, tree: jax.tree.map(
                    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)), tree
                ),
                SPECS,
                shapes,
                is_leaf=lambda x: isinstance(x, P),
            )
            tokens = jax.ShapeDtypeStruct((rows * microbatches,), jnp.int32, sharding=NamedSharding(mesh, P()))
            begin = time.perf_counter()
            compiled = sk.aot.compile(jax.jit(step), (placed, {"tokens": tokens}), topology="v5e:2x4")
            seconds = time.perf_counter() - begin
            lines.append((name, str(microbatches), f"{compiled.memory.temp / 2**20:,.0f}", f"{seconds:.1f}"))
            print(*lines[-1], flush=True)
    print(table(lines))


def vocabulary(smoke: bool) -> None:
    """A step of adam as the TPU's compiler sees it, with the ends of the model on one device each, and spread."""
    layers, dim, entries, rows, microbatches = (8, 128, 1024, 8, 2) if smoke else (16, 2048, 131_072, 2, 16)
    params = _vocabulary_shapes(layers, dim, entries, jnp.bfloat16)
    tokens = jax.ShapeDtypeStruct((rows * microbatches, 1024), jnp.int32)
    mesh = sk.abstract_mesh(stage=STAGES)
    lines = [("schedule", "ends", "held GiB", "needed GiB", "modelled ms", "exposed ms", "compile s")]
    for name in ("lockstep", "one_f_one_b"):
        for ends in ENDS:
            init, step = _make_vocabulary_step(SCHEDULES[name](microbatches), ends, mesh)
            state = init.abstract(params)
            begin = time.perf_counter()
            report = sk.aot.compile(step, (state, {"tokens": tokens, "targets": tokens}), topology="v5e:2x4")
            seconds = time.perf_counter() - begin
            sizes = [f"{size / 2**30:.2f}" for size in (report.memory.held, report.needed)]
            times = [f"{1e3 * each:.0f}" for each in (report.seconds, report.exposed_seconds)]
            lines.append((name, ends, *sizes, *times, f"{seconds:.0f}"))
            print(*lines[-1], flush=True)
    print(table(lines))


def _vocabulary_shapes(layers: int, dim: int, entries: int, dtype: Any) -> Any:
    """The parameters of a stack, a table of tokens and a head, as shapes."""

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    stack = {"up": shape(layers, dim, 4 * dim), "down": shape(layers, 4 * dim, dim)}
    return {"layers": stack, "table": shape(entries, dim), "head": shape(dim, entries)}


def _make_vocabulary_step(schedule: sk.schedules.Schedule, ends: str, mesh: Any) -> Any:
    """A step of adam, its embedding and head on one device each, or spread over all."""
    axis = "stage" if ends == "spread" else None
    dims = {"table": 0, "head": 1}
    pipe = sk.pipeline(schedule, "stage", spread=(lambda path, shape: dims[path]) if axis else None)

    def embed_tokens(shared: Any, batch: Any, keys: Any) -> jax.Array:
        return sk.layers.vocab_embed(batch["tokens"], shared["table"], axis)

    def compute_loss(shared: Any, x: jax.Array, batch: Any) -> sk.Mean:
        return sk.Mean.of(sk.layers.vocab_cross_entropy(x, shared["head"], batch["targets"], axis))

    grad_fn = pipe.value_and_grad(embed_tokens, stage, compute_loss)
    return sk.make_train_step(grad_fn, optax.adam(1e-3), mesh=mesh, plan=pipe.plan)


def compiling(smoke: bool) -> None:
    """Loops of the program, CPU seconds to compile and temporary memory, with the ends on one device each or spread."""
    dim, entries = (8, 16) if smoke else (64, 256)
    lines = [("schedule", "stages", "microbatches", "ends", "loops", "compile s", "temp KiB")]
    for name, stages, microbatches in [("one_f_one_b", 2, 4)] if smoke else COMPILED:
        schedule = getattr(sk.schedules, name)(stages, microbatches)
        params = _vocabulary_shapes(stages * schedule.chunks, dim, entries, jnp.float32)
        tokens = jax.ShapeDtypeStruct((2 * microbatches, 8), jnp.int32)
        mesh = sk.make_mesh(jax.devices()[:stages], stage=stages)
        for ends in ENDS:
            init, step = _make_vocabulary_step(schedule, ends, mesh)
            lowered = step.trace(init.abstract(params), {"tokens": tokens, "targets": tokens}).lower()
            loops = lowered.as_text().count("stablehlo.while")
            begin = time.process_time()
            temporary = lowered.compile().memory_analysis().temp_size_in_bytes
            seconds = time.process_time() - begin
            sizes = (str(loops), f"{seconds:.1f}", f"{temporary / 2**10:,.0f}")
            lines.append((name, str(stages), str(microbatches), ends, *sizes))
            print(*lines[-1], flush=True)
    print(table(lines))


if __name__ == "__main__":
    main()
