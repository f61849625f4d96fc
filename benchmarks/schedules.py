"""Pipeline schedules executed, beside their simulation: time, memory, and the time to compile.

All run the same small model, and must give the loss and the gradients of that model on one device. Simulated devices
share the CPU's cores, so that CPU time is the work of all devices together: it shows what a schedule recomputes and
what masked devices discard, not the bubble, in which a device waits.

Ticks, makespan and bubble are simulated, with F = 1 and I = W = 1; work and CPU are over the model on one device; in,
cot and kept are slots for stage inputs, cotangents and weight-gradient residuals.
"""

from __future__ import annotations

import argparse
import inspect
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from benchmarks.growth import align_right, fit_exponent, format_number
from benchmarks.start import choose_calls, choose_rounds, start
from shardkit import bench
from shardkit.bench.records import Record, write

STAGES = 4
VOCABULARY = 64
SPECS = {"layers": P("stage"), "table": P(), "gain": P()}
SLOTS = ("slots_inputs", "slots_saved", "slots_cotangents", "slots_kept")
Step = Callable[..., Any]


def list_builders() -> dict[str, Callable[..., sk.schedules.Schedule]]:
    """The functions of `sk.schedules` that make a schedule, by name: a new one is measured without a line here."""
    builders: dict[str, Callable[..., sk.schedules.Schedule]] = {}
    for name in sk.schedules.__all__:
        function = getattr(sk.schedules, name)
        if inspect.isfunction(function):
            builders[name] = function
    return builders


BUILDERS = list_builders()


def build_schedule(name: str, devices: int, microbatches: int) -> sk.schedules.Schedule:
    """The schedule of that name, with two chunks a device if it takes them; lockstep has one."""
    build = BUILDERS[name]
    if "chunks" in inspect.signature(build).parameters and name != "lockstep":
        return build(devices, microbatches, 2)
    return build(devices, microbatches)


def count_work(schedule: sk.schedules.Schedule, mode: str) -> float:
    """What all devices compute, over what the model without a pipeline computes: F takes 1, I and W 1 each.

    A backward pass recomputes its forward pass. Masked, every device computes each kind of op of a tick; in branches,
    its own alone.

    For example GPipe with 8 microbatches on 4 devices, masked: 8 + 3 ticks of F and as many of B, which takes 3. All 4
    devices compute in each: 11 (1 + 3) 4 = 176. The model computes 3 x 8 for each of 4 stages: 96. The ratio is 1.83.
    """
    if mode == "branch":
        total = sum(schedule.simulate(1, 3, weight_grad=1).busy)
    else:
        total = _count_masked_work(schedule)
    return total / (3 * schedule.devices * schedule.microbatches)


def _count_masked_work(schedule: sk.schedules.Schedule) -> float:
    costs = {"F": 1.0, "B": 3.0, "I": 2.0, "W": 1.0}
    total = 0.0
    for segment in schedule.table(saved=False).segments:
        kinds = set(segment.ops)
        if "B" in kinds:
            # Where some devices run B and others I, B is I with W after it.
            kinds.discard("I")
        tick = sum(costs[kind] for kind in kinds)
        total += segment.ticks * tick * schedule.devices / schedule.chunks
    return total


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


def run_stage(layers: Any, x: jax.Array, keys: Any) -> jax.Array:
    """Residual feed-forward layers."""

    def apply_layer(x: jax.Array, w: Any) -> Any:
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    y, _ = lax.scan(apply_layer, x, layers)
    return y


def compute_loss(shared: Any, x: jax.Array, batch: Any) -> sk.Mean:
    """The mean square, times a parameter."""
    return sk.Mean.of(jnp.square((x * shared["gain"]).astype(jnp.float32)))


def make_pipelined_step(schedule: sk.schedules.Schedule, mode: Any, recompute: bool, mesh: Any) -> Step:
    """`(params, batch) -> (loss, gradients)` of a schedule; stacks are in the order of the layers."""
    pipe = sk.pipeline(schedule, "stage")
    grad_fn = pipe.value_and_grad(embed, run_stage, compute_loss, mode=mode, recompute=recompute)

    def compute_on_device(params: Any, batch: Any) -> Any:
        mean, _, grads = grad_fn(params, batch, None)
        # Table and gain are on all devices, but the first stage alone has a gradient of one, and the last of the other.
        ends = {"table": grads["table"], "gain": grads["gain"]}
        mean, ends = sk.all_reduce((mean, ends), "stage")
        loss = mean.total / mean.weight
        return loss, jax.tree.map(lambda g: g / mean.weight, grads | ends)

    mapped = jax.shard_map(compute_on_device, mesh=mesh, in_specs=(SPECS, P()), out_specs=(P(), SPECS))

    def step(params: Any, batch: Any) -> Any:
        layers = params["layers"]["up"].shape[0]
        order = np.array(pipe.stages.rows(layers), int)
        if not order.size:
            return mapped(params, batch)
        # With two chunks a device has two runs of layers, which do not follow each other in the model.
        stack = jax.tree.map(lambda leaf: leaf[order], params["layers"])
        loss, grads = mapped(params | {"layers": stack}, batch)
        stack_grads = jax.tree.map(lambda leaf: leaf[np.argsort(order)], grads["layers"])
        return loss, grads | {"layers": stack_grads}

    return step


def make_unpipelined_step(microbatches: int) -> Step:
    """The same on one device: the whole model for each microbatch, and the sum."""

    def loss_fn(params: Any, batch: Any, keys: Any) -> sk.Mean:
        x = embed(params, batch, keys)
        return compute_loss(params, run_stage(params["layers"], x, keys), batch)

    grad_fn: Any = sk.value_and_grad(loss_fn)

    def step(params: Any, batch: Any) -> Any:
        def add_microbatch(sums: Any, tokens: jax.Array) -> Any:
            mean, _, grads = grad_fn(params, {"tokens": tokens}, None)
            return jax.tree.map(jnp.add, sums, (mean, grads)), None

        zero_mean = sk.Mean(jnp.float32(0), jnp.float32(0))
        zero_grads = jax.tree.map(jnp.zeros_like, params)
        tokens = batch["tokens"].reshape(microbatches, -1)
        (mean, grads), _ = lax.scan(add_microbatch, (zero_mean, zero_grads), tokens)
        return mean.total / mean.weight, jax.tree.map(lambda g: g / mean.weight, grads)

    return step


def make_case(name: str, step: Step, mesh: Mesh, params: Any, tokens: np.ndarray, fields: Any) -> bench.Case:
    """A step over a mesh, traced and compiled; how long that took is in its fields."""

    def call_step(carry: jax.Array, *args: Any) -> Any:
        return carry, step(*args)

    replicated = NamedSharding(mesh, P())
    batch = {"tokens": jax.device_put(tokens, replicated)}
    args = (sk.shard(params, mesh, SPECS), batch)
    # `measure` needs a carry: this one is passed through, so that every call computes the same.
    case = bench.Case(name, jax.jit(call_step), jax.device_put(jnp.float32(0), replicated), args)
    return case._replace(fields=fields | compile_case(case))


def compile_case(case: bench.Case) -> dict[str, Any]:
    """CPU seconds to trace and to compile a case, which its calls then use, and the memory that it needs."""
    step: Any = case.step
    start_time = time.process_time()
    traced = step.trace(case.carry, *case.args)
    traced_time = time.process_time()
    memory = traced.lower().compile().memory_analysis()
    compiled_time = time.process_time()
    return {
        "temp_bytes": memory.temp_size_in_bytes,
        "trace_cpu_s": round(traced_time - start_time, 4),
        "compile_cpu_s": round(compiled_time - traced_time, 4),
    }


class Sizes(NamedTuple):
    """Of the model and of a microbatch."""

    dim: int
    examples: int  # of a microbatch


def measure_row(
    mesh: Mesh,
    names: Sequence[str],
    microbatches: int,
    mode: str,
    sizes: Sizes,
    *,
    calls: int,
    rounds: int,
) -> list[Record]:
    """The records of schedules of so many microbatches, after that of the model on one device; gpipe must be named."""
    dim, examples = sizes
    schedules = [build_schedule(name, mesh.size, microbatches) for name in names]
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, examples * microbatches).astype(np.int32)
    # Chunks divide the layers: every schedule runs as many.
    chunks = math.lcm(*(schedule.chunks for schedule in schedules))
    params = make_params(mesh.size * chunks, dim, 4 * dim)
    first_device = Mesh(mesh.devices.reshape(-1)[:1], ("stage",))
    unpipelined = make_unpipelined_step(microbatches)
    cases = [make_case("unpipelined", unpipelined, first_device, params, tokens, {})]
    for schedule in schedules:
        step = make_pipelined_step(schedule, mode, True, mesh)
        fields = describe_schedule(schedule, mode, slot_bytes=4 * examples * dim)
        cases.append(make_case(f"{schedule.name}, {mode}", step, mesh, params, tokens, fields))
    records = bench.measure(
        "schedules",
        f"{microbatches} microbatches",
        cases,
        mode="dispatched",
        calls=calls,
        rounds=rounds,
        donate=False,
        refuse=False,  # the exit code says so, after all rows
    )
    [gpipe] = [record for record in records if record["case"] == f"gpipe, {mode}"]
    for record in records[1:]:
        record["gpipe_cpu_ratio"] = round(record["cpu_ratio"] / gpipe["cpu_ratio"], 4)
        record["gpipe_work_ratio"] = round(record["work_ratio"] / gpipe["work_ratio"], 4)
    return records


def describe_schedule(schedule: sk.schedules.Schedule, mode: str, slot_bytes: int) -> dict[str, Any]:
    """What the table of a schedule says, for its record."""
    timeline = schedule.simulate(1, 3, weight_grad=1)
    slots = schedule.slots()
    return {
        "schedule": schedule.name,
        "microbatches": schedule.microbatches,
        "ticks": max(map(len, schedule.rows)),
        "makespan": round(timeline.makespan, 6),
        "bubble": round(timeline.bubble, 6),
        "work_ratio": round(count_work(schedule, mode), 4),
        "slots_inputs": slots.inputs,
        "slots_saved": slots.saved,
        "slots_cotangents": slots.cotangents,
        "slots_kept": slots.kept,
        "slot_bytes": slot_bytes,  # of an input or a cotangent
    }


COLUMNS = (
    "case",
    "ticks",
    "makespan",
    "bubble",
    "work",
    "CPU",
    "work/GPipe",
    "CPU/GPipe",
    "in",
    "cot",
    "kept",
    "slot KiB",
    "temp KiB",
    "trace s",
    "compile s",
    "wrong",
)


def format_table(records: Sequence[Record]) -> str:
    """The records of a row as a table."""
    rows: list[tuple[str, ...]] = [COLUMNS]
    for record in records:
        # The model on one device has no schedule.
        ticks: tuple[str, ...] = ("", "", "")
        gpipe_ratios: tuple[str, ...] = ("", "")
        slots: tuple[str, ...] = ("", "", "", "")
        if "schedule" in record:
            ticks = (str(record["ticks"]), f"{record['makespan']:g}", f"{record['bubble']:.1%}")
            gpipe_ratios = (format_number(record["gpipe_work_ratio"]), format_number(record["gpipe_cpu_ratio"]))
            slots = (
                str(record["slots_inputs"]),
                str(record["slots_cotangents"]),
                str(record["slots_kept"]),
                format_number(record["slot_bytes"], 0, 1024),
            )
        row = (
            record["case"],
            *ticks,
            format_number(record.get("work_ratio", 1.0)),
            format_number(record["cpu_ratio"]),
            *gpipe_ratios,
            *slots,
            format_number(record["temp_bytes"], 0, 1024),
            format_number(record["trace_cpu_s"]),
            format_number(record["compile_cpu_s"]),
            str(record["wrong"]),
        )
        rows.append(row)
    return f"{records[0]['row']}\n{align_right(rows)}"


def count_slots(record: Record) -> int:
    """All slots of a schedule, of which each holds an array of a microbatch."""
    return sum(record[field] for field in SLOTS)


def format_exponents(records: Sequence[Record]) -> str:
    """For each schedule, how slots, memory and the time to build grow with the microbatches, as a table."""
    records_by_case: dict[str, list[Record]] = {}
    for record in records:
        if "schedule" in record:
            records_by_case.setdefault(record["case"], []).append(record)
    rows: list[tuple[str, ...]] = [("exponent against microbatches", "slots", "temp", "trace", "compile")]
    for name, schedule_records in records_by_case.items():
        microbatches = [record["microbatches"] for record in schedule_records]
        slots = [count_slots(record) for record in schedule_records]
        cells = [name, format_number(fit_exponent(microbatches, slots))]
        for field in ("temp_bytes", "trace_cpu_s", "compile_cpu_s"):
            costs = [record[field] for record in schedule_records]
            cells.append(format_number(fit_exponent(microbatches, costs)))
        rows.append(tuple(cells))
    return align_right(rows)


def list_names(options: argparse.Namespace) -> list[str]:
    """The schedules to run; GPipe, to which the others are compared, is the first."""
    if options.smoke:
        return ["gpipe", "one_f_one_b"]
    names = ["gpipe"]
    for name in BUILDERS:
        if name != "gpipe":
            names.append(name)
    return names


def main(argv: Sequence[str] | None = None) -> int:
    """Runs every schedule; the exit code is 1 if an element of a loss or a gradient is wrong."""
    options = start(__doc__, argv, devices=STAGES, branch="devices compute their own alone, instead of masked")
    mesh = sk.make_mesh(stage=-1)
    counts = [4, 8, 16, 32]
    sizes = Sizes(dim=64, examples=128)
    if options.smoke:
        counts = [2, 4]
        sizes = Sizes(dim=8, examples=4)
    mode = "masked"
    if options.branch:
        mode = "branch"
    calls = choose_calls(options, 1, smoke=1)
    rounds = choose_rounds(options, 10)
    records: list[Record] = []
    for count in counts:
        row = measure_row(mesh, list_names(options), count, mode, sizes, calls=calls, rounds=rounds)
        print(format_table(row), flush=True)
        if options.json:
            write(row, options.json)
        records += row
    print(format_exponents(records))
    return int(any(record["wrong"] for record in records))


if __name__ == "__main__":
    raise SystemExit(main())
