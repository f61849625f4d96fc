"""Pipeline schedules executed, beside their simulation: time, memory, and the time to compile.

All run the same small model, and must give the loss and the gradients of that model on one device. Simulated devices
share the CPU's cores, so that CPU time is the work of all devices together: it shows what a schedule recomputes and
what masked devices discard, not the bubble, in which a device waits.

Ticks, makespan and bubble are simulated, with F = 1 and I = W = 1; work and CPU are over the model on one device; in,
cot and kept are slots for stage inputs, cotangents and weight-gradient residuals.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from benchmarks.growth import cell, exponent, right
from benchmarks.start import start
from shardkit import bench
from shardkit.bench.records import Record, write

BUILDERS = {name: each for name in sk.schedules.__all__ if inspect.isfunction(each := getattr(sk.schedules, name))}
STAGES, VOCABULARY = 4, 64
SPECS = {"layers": P("stage"), "table": P(), "gain": P()}


def builder(name: str, devices: int, microbatches: int) -> sk.schedules.Schedule:
    """The schedule of that name, with two chunks a device if it takes them; lockstep has one."""
    chunked = "chunks" in inspect.signature(BUILDERS[name]).parameters and name != "lockstep"
    return BUILDERS[name](devices, microbatches, *[2] * chunked)


def work(schedule: sk.schedules.Schedule, mode: str) -> float:
    """What all devices compute, over what the model without a pipeline computes: F takes 1, I and W 1 each.

    A backward pass recomputes its forward pass. Masked, every device computes each kind of op of a tick; in branches,
    its own alone.
    """
    if mode == "branch":
        total = sum(schedule.simulate(1, 3, weight_grad=1).busy)
    else:
        costs = {"F": 1.0, "B": 3.0, "I": 2.0, "W": 1.0}
        total = 0.0
        for segment in schedule.table(saved=False).segments:
            # Where some devices run B and others I, B is I with W after it.
            kinds = set(segment.ops) - ({"I"} if "B" in segment.ops else set())
            total += segment.ticks * sum(costs[op] for op in kinds) * schedule.devices / schedule.chunks
    return total / (3 * schedule.devices * schedule.microbatches)


def make_params(layers: int, dim: int, hidden: int, dtype: Any = np.float32) -> Any:
    """A stack of residual feed-forward layers, a table of tokens, and the head's gain."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) * shape[-2] ** -0.5 / 2).astype(dtype)

    stack = {"up": draw(layers, dim, hidden), "down": draw(layers, hidden, dim)}
    return {"layers": stack, "table": draw(VOCABULARY, dim), "gain": np.ones((), dtype)}


def embed(shared: Any, batch: Any, keys: Any) -> jax.Array:
    """A row of the table for each token."""
    return shared["table"][batch["tokens"]]


def stage(layers: Any, x: jax.Array, keys: Any) -> jax.Array:
    """Residual feed-forward layers."""

    def layer(x: jax.Array, w: Any) -> Any:
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    return lax.scan(layer, x, layers)[0]


def head(shared: Any, x: jax.Array, batch: Any) -> sk.Mean:
    """The mean square, times a parameter."""
    return sk.Mean.of(jnp.square((x * shared["gain"]).astype(jnp.float32)))


def pipelined(schedule: sk.schedules.Schedule, mode: Any, recompute: bool, mesh: Any) -> Callable[..., Any]:
    """`(params, batch) -> (loss, gradients)` of a schedule; stacks are in the order of the layers."""
    pipe = sk.pipeline(schedule, "stage")
    grad_fn = pipe.value_and_grad(embed, stage, head, mode=mode, recompute=recompute)

    def device(params: Any, batch: Any) -> Any:
        mean, _, grads = grad_fn(params, batch, None)
        mean, shared = sk.all_reduce((mean, {name: grads[name] for name in ("table", "gain")}), "stage")
        return mean.total / mean.weight, jax.tree.map(lambda g: g / mean.weight, grads | shared)

    mapped = jax.shard_map(device, mesh=mesh, in_specs=(SPECS, P()), out_specs=(P(), SPECS))

    def step(params: Any, batch: Any) -> Any:
        order = np.array(pipe.stages.rows(params["layers"]["up"].shape[0]), int)
        if not order.size:
            return mapped(params, batch)
        stack = jax.tree.map(lambda leaf: leaf[order], params["layers"])
        loss, grads = mapped(params | {"layers": stack}, batch)
        return loss, grads | {"layers": jax.tree.map(lambda leaf: leaf[np.argsort(order)], grads["layers"])}

    return step


def unpipelined(count: int) -> Callable[..., Any]:
    """The same on one device: the whole model for each microbatch, and the sum."""

    def loss(params: Any, batch: Any, keys: Any) -> sk.Mean:
        return head(params, stage(params["layers"], embed(params, batch, keys), keys), batch)

    grad_fn: Any = sk.value_and_grad(loss)

    def step(params: Any, batch: Any) -> Any:
        def add(sums: Any, tokens: jax.Array) -> Any:
            mean, _, grads = grad_fn(params, {"tokens": tokens}, None)
            return jax.tree.map(jnp.add, sums, (mean, grads)), None

        zero = (sk.Mean(jnp.float32(0), jnp.float32(0)), jax.tree.map(jnp.zeros_like, params))
        (mean, grads), _ = lax.scan(add, zero, batch["tokens"].reshape(count, -1))
        return mean.total / mean.weight, jax.tree.map(lambda g: g / mean.weight, grads)

    return step


def row(
    mesh: Mesh, names: Sequence[str], count: int, mode: str, dim: int, examples: int, calls: int, rounds: int
) -> list[Record]:
    """The records of schedules of so many microbatches, after that of the model on one device; gpipe must be named."""
    made = [builder(name, mesh.size, count) for name in names]
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, examples * count).astype(np.int32)
    # Chunks divide the layers: every schedule runs as many.
    params = make_params(mesh.size * int(np.lcm.reduce([each.chunks for each in made])), dim, 4 * dim)
    one = Mesh(mesh.devices.reshape(-1)[:1], ("stage",))
    forms = {"unpipelined": (unpipelined(count), one)}
    forms |= {f"{each.name}, {mode}": (pipelined(each, mode, True, mesh), mesh) for each in made}
    fields = {f"{each.name}, {mode}": facts(each, mode, 4 * examples * dim) for each in made}
    cases = []
    for name, (step, place) in forms.items():
        args = (sk.shard(params, place, SPECS), {"tokens": jax.device_put(tokens, NamedSharding(place, P()))})
        zero = jax.device_put(jnp.float32(0), NamedSharding(place, P()))
        case = bench.Case(name, jax.jit(lambda carry, *args, step=step: (carry, step(*args))), zero, args)
        cases.append(case._replace(fields=fields.get(name, {}) | built(case)))
    how: Any = {"mode": "dispatched", "calls": calls, "rounds": rounds, "donate": False, "refuse": False}
    found = bench.measure("schedules", f"{count} microbatches", cases, **how)
    [base] = [record for record in found if record["case"] == f"gpipe, {mode}"]
    for record in found[1:]:
        record["gpipe_cpu_ratio"] = round(record["cpu_ratio"] / base["cpu_ratio"], 4)
        record["gpipe_work_ratio"] = round(record["work_ratio"] / base["work_ratio"], 4)
    return found


def facts(schedule: sk.schedules.Schedule, mode: str, slot_bytes: int) -> dict[str, Any]:
    """What the table of a schedule says, for its record."""
    timeline, slots = schedule.simulate(1, 3, weight_grad=1), schedule.slots()
    return {
        "schedule": schedule.name,
        "microbatches": schedule.microbatches,
        "ticks": max(map(len, schedule.rows)),
        "makespan": round(timeline.makespan, 6),
        "bubble": round(timeline.bubble, 6),
        "work_ratio": round(work(schedule, mode), 4),
        "slots_inputs": slots.inputs,
        "slots_saved": slots.saved,
        "slots_cotangents": slots.cotangents,
        "slots_kept": slots.kept,
        "slot_bytes": slot_bytes,  # of an input or a cotangent
    }


def built(case: bench.Case) -> dict[str, Any]:
    """CPU seconds to trace and to compile a case, which its calls then use, and the memory that it needs."""
    step: Any = case.step
    begun = time.process_time()
    traced = step.trace(case.carry, *case.args)
    between = time.process_time()
    memory = traced.lower().compile().memory_analysis()
    seconds = {"trace_cpu_s": between - begun, "compile_cpu_s": time.process_time() - between}
    return {"temp_bytes": memory.temp_size_in_bytes} | {key: round(value, 4) for key, value in seconds.items()}


def lines(records: Sequence[Record]) -> str:
    """The records of a row as a table."""
    head = ("case", "ticks", "makespan", "bubble", "work", "CPU", "work/GPipe", "CPU/GPipe")
    rows = [(*head, "in", "cot", "kept", "slot KiB", "temp KiB", "trace s", "compile s", "wrong")]
    for r in records:
        simulated, over, slots = ("",) * 3, ("",) * 2, ("",) * 4
        if "schedule" in r:
            simulated = (str(r["ticks"]), f"{r['makespan']:g}", f"{r['bubble']:.1%}")
            over = (cell(r["gpipe_work_ratio"]), cell(r["gpipe_cpu_ratio"]))
            counts = [str(r[f"slots_{kind}"]) for kind in ("inputs", "cotangents", "kept")]
            slots = (*counts, cell(r["slot_bytes"], 0, 1024))
        ratios = (cell(r.get("work_ratio", 1.0)), cell(r["cpu_ratio"]))
        built = (cell(r["temp_bytes"], 0, 1024), cell(r["trace_cpu_s"]), cell(r["compile_cpu_s"]), str(r["wrong"]))
        rows.append((r["case"], *simulated, *ratios, *over, *slots, *built))
    return f"{records[0]['row']}\n{right(rows)}"


def exponents(records: Sequence[Record]) -> str:
    """For each schedule, how slots, memory and the time to build grow with the microbatches, as a table."""
    rows = [("exponent against microbatches", "slots", "temp", "trace", "compile")]
    executed = [r for r in records if "ticks" in r]
    for name in dict.fromkeys(r["case"] for r in executed):
        own = [r for r in executed if r["case"] == name]
        slots = [sum(r[f"slots_{kind}"] for kind in ("inputs", "saved", "cotangents", "kept")) for r in own]
        costs = [slots, *([r[key] for r in own] for key in ("temp_bytes", "trace_cpu_s", "compile_cpu_s"))]
        rows.append((name, *(cell(exponent([r["microbatches"] for r in own], each)) for each in costs)))
    return right(rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs every schedule; the exit code is 1 if an element of a loss or a gradient is wrong."""
    options = start(__doc__, argv, devices=STAGES, branch="devices compute their own alone, instead of masked")
    mesh = sk.make_mesh(stage=-1)
    names = ("gpipe", "one_f_one_b") if options.smoke else tuple(dict.fromkeys(["gpipe", *BUILDERS]))
    counts, dim, examples = ((2, 4), 8, 4) if options.smoke else ((4, 8, 16, 32), 64, 128)
    rounds = options.rounds or (2 if options.smoke else 10)
    records: list[Record] = []
    for count in counts:
        mode = "branch" if options.branch else "masked"
        records += row(mesh, names, count, mode, dim, examples, options.calls or 1, rounds)
        print(lines(records[-1 - len(names) :]), flush=True)
        if options.json:
            write(records[-1 - len(names) :], options.json)
    print(exponents(records))
    return int(any(record["wrong"] for record in records))


if __name__ == "__main__":
    raise SystemExit(main())
