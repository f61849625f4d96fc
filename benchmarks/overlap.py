"""How much communication hides behind compute: each kernel beside its compute alone and its communication alone.

    share hidden = (compute + communication - together) / min(compute, communication)

On accelerators all three are timed. Without, or with `--predict`, the compiler of v5e:2x4 schedules the program, and
the time model of `shardkit/analysis/hlo/compute.py` says how long it computes, how long it sends, and what of that
no compute covers. Simulated devices are not timed: their compute and communication share the same cores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from benchmarks.compiled import describe_array
from benchmarks.functions import measure_functions
from benchmarks.start import start
from shardkit._jax.backends import leave_out_idle_tpu
from shardkit.bench.environment import environment
from shardkit.bench.records import FORMAT, Record, write
from shardkit.meshes.layout import table

TOPOLOGY = "v5e:2x4"
DEVICES = 8
IMPLS = ("gather", "ring", "bidirectional")
QUICK = ("all_gather_matmul, gather", "all_gather_matmul, ring", "layers, prefetch")


class Size(NamedTuple):
    """Of all cases, over all devices: tokens and width of the activations, columns of the weights, layers of a stack.

    Tokens, columns and layers are multiples of the devices; a layer of the stack has a quarter of the columns.
    """

    tokens: int = 8192
    width: int = 4096
    hidden: int = 32768
    layers: int = 8

    def describe_stack(self, mesh: Any, spec: P) -> dict[str, Any]:
        """The stack's matrices, each with this layout."""
        columns = self.hidden // 4
        return {
            "up": describe_array(mesh, spec, (self.layers, self.width, columns)),
            "down": describe_array(mesh, spec, (self.layers, columns, self.width)),
        }


class Program(NamedTuple):
    """A jitted function, and the shapes of its arguments."""

    function: Any
    args: tuple[Any, ...]


class Parts(NamedTuple):
    """A program that overlaps, and its compute and its communication alone.

    The last two are None where only the compiled schedule tells them apart.
    """

    together: Program
    compute: Program | None
    communication: Program | None


class Times(NamedTuple):
    """Microseconds of the three programs."""

    compute: float
    communication: float
    together: float


def list_cases(mesh: Any, size: Size) -> dict[str, Callable[[], Parts]]:
    """The cases by name; each is built when it is called."""
    cases: dict[str, Callable[[], Parts]] = {}
    for impl in IMPLS:
        cases[f"all_gather_matmul, {impl}"] = partial(build_gather_matmul, mesh, size, impl)
    for impl in IMPLS:
        cases[f"matmul_reduce_scatter, {impl}"] = partial(build_matmul_scatter, mesh, size, impl)
    cases["layers"] = partial(build_layers, mesh, size, False)
    cases["layers, prefetch"] = partial(build_layers, mesh, size, True)
    for name in ("gpipe", "one_f_one_b", "lockstep"):
        cases[f"pipeline, {name}"] = partial(build_pipeline, mesh, size, name)
    return cases


def map_over_mesh(mesh: Any, function: Any, in_specs: Any, out_specs: Any) -> Any:
    """The function over the mesh, jitted."""
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def choose_kernel(gather: Any, ring: Any, impl: str) -> Any:
    """What a collective matmul sends with, by itself."""
    if impl == "gather":
        return gather
    return partial(ring, bidirectional=impl == "bidirectional")


def build_gather_matmul(mesh: Any, size: Size, impl: Any) -> Parts:
    """Tokens gathered and multiplied by columns."""
    rows = P("x")
    columns = P(None, "x")
    split_x = describe_array(mesh, rows, (size.tokens, size.width))
    gathered_x = describe_array(mesh, P(), (size.tokens, size.width))
    w = describe_array(mesh, columns, (size.width, size.hidden))
    kernel = choose_kernel(sk.all_gather, sk.ring.all_gather, impl)

    def gather_and_multiply(x: jax.Array, w: jax.Array) -> jax.Array:
        return sk.all_gather_matmul(x, w, "x", impl=impl)

    def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
        return sk.vary(x, "x") @ w

    def gather(x: jax.Array) -> jax.Array:
        return kernel(x, "x")

    return Parts(
        together=Program(map_over_mesh(mesh, gather_and_multiply, (rows, columns), columns), (split_x, w)),
        compute=Program(map_over_mesh(mesh, multiply, (P(), columns), columns), (gathered_x, w)),
        communication=Program(map_over_mesh(mesh, gather, (rows,), rows), (split_x,)),
    )


def build_matmul_scatter(mesh: Any, size: Size, impl: Any) -> Parts:
    """Products of rows, whose partial sums are scattered over tokens."""
    rows = P("x")
    columns = P(None, "x")
    h = describe_array(mesh, columns, (size.tokens, size.hidden))
    w = describe_array(mesh, rows, (size.hidden, size.width))
    sums = describe_array(mesh, P(), (size.tokens, size.width))
    kernel = choose_kernel(sk.reduce_scatter, sk.ring.reduce_scatter, impl)

    def multiply_and_scatter(h: jax.Array, w: jax.Array) -> jax.Array:
        return sk.matmul_reduce_scatter(h, w, "x", impl=impl)

    def multiply(h: jax.Array, w: jax.Array) -> jax.Array:
        return h @ w

    def scatter(y: jax.Array) -> jax.Array:
        return kernel(sk.vary(y, "x"), "x")

    return Parts(
        together=Program(map_over_mesh(mesh, multiply_and_scatter, (columns, rows), rows), (h, w)),
        compute=Program(map_over_mesh(mesh, multiply, (columns, rows), rows), (h, w)),
        communication=Program(map_over_mesh(mesh, scatter, (P(),), rows), (sums,)),
    )


def apply_layer(w: Any, x_tD: jax.Array) -> jax.Array:
    """A residual feed-forward layer."""
    return x_tD + jax.nn.gelu(x_tD @ w["up"]) @ w["down"]


def build_layers(mesh: Any, size: Size, prefetch: bool) -> Parts:
    """The forward pass of a stack whose weights are split, gathered layer by layer."""

    def loss(params: Any, batch: Any, keys: Any) -> sk.Mean:
        x_tD = sk.scan_layers(apply_layer, params["layers"], batch, prefetch=prefetch)
        return sk.Mean.of(x_tD.astype(jnp.float32) ** 2)

    def gather_layer(total: jax.Array, w: Any) -> tuple[jax.Array, None]:
        # The sum uses what was gathered: else the compiler would remove the gathers.
        matrices = jax.tree.leaves(sk.all_gather(w, "x"))
        return total + sum(jnp.sum(matrix) for matrix in matrices), None

    def gather_layers(stack: Any) -> jax.Array:
        total, _ = lax.scan(gather_layer, sk.vary(jnp.bfloat16(0), "x"), stack)
        return total[None]

    plan = sk.fsdp("x", layerwise=("layers",), min_size=1)  # by default the small leaves of tests stay whole
    gathered_params = {"layers": size.describe_stack(mesh, P())}
    layouts = plan.layouts(gathered_params, mesh)["layers"]
    split_stack = {}
    for name, matrix in gathered_params["layers"].items():
        split_stack[name] = describe_array(mesh, layouts[name].rest, matrix.shape)
    batch = describe_array(mesh, P("x"), (size.tokens, size.width))
    together = sk.make_eval_step(loss, mesh=mesh, plan=plan)
    # Whole weights on every device: the same loss, and nothing to gather.
    compute = sk.make_eval_step(loss, mesh=mesh, plan=sk.dp("x"))
    communication = map_over_mesh(mesh, gather_layers, P(None, "x"), P("x"))
    return Parts(
        together=Program(together, ({"layers": split_stack}, batch)),
        compute=Program(compute, (gathered_params, batch)),
        communication=Program(communication, (size.describe_stack(mesh, P(None, "x")),)),
    )


def build_pipeline(mesh: Any, size: Size, name: str) -> Parts:
    """Forward and backward of the stack in stages, with two microbatches for a stage."""
    stages = mesh.shape["x"]

    def embed(shared: Any, batch: Any, keys: Any) -> jax.Array:
        return batch * shared["scale"]

    def run_stage(stack: Any, x_tD: jax.Array, keys: Any) -> jax.Array:
        def run_layer(x_tD: jax.Array, w: Any) -> tuple[jax.Array, None]:
            return apply_layer(w, x_tD), None

        y_tD, _ = lax.scan(run_layer, x_tD, stack)
        return y_tD

    def compute_loss(shared: Any, x_tD: jax.Array, batch: Any) -> sk.Mean:
        return sk.Mean.of((x_tD * shared["scale"]).astype(jnp.float32) ** 2)

    schedule = getattr(sk.schedules, name)(stages, 2 * stages)
    grad_fn = sk.pipeline(schedule, "x").value_and_grad(embed, run_stage, compute_loss)

    def step(params: Any, batch: Any) -> Any:
        mean, _, grads = grad_fn(params, batch, None)
        return sk.all_reduce(mean.total, "x"), grads["layers"]

    param_specs = {"layers": P("x"), "scale": P()}
    together = map_over_mesh(mesh, step, (param_specs, P()), (P(), P("x")))
    params = {"layers": size.describe_stack(mesh, P("x")), "scale": describe_array(mesh, P(), ())}
    batch = describe_array(mesh, P(), (size.tokens, size.width))
    # No program sends what a pipeline sends, and computes nothing.
    return Parts(Program(together, (params, batch)), compute=None, communication=None)


def compute_hidden_share(compute: float, communication: float, together: float) -> float | None:
    """1 where together they take as long as the longer of the two, 0 where as long as their sum; None of nothing.

    For example 10 of compute and 4 of communication, that take 12 together: of the 4, 2 hide, and the share is 0.5.
    """
    if not communication:
        return None
    hidden = compute + communication - together
    return round(hidden / min(compute, communication), 4)


def predict_times(parts: Parts) -> Times:
    """Microseconds by the compiled schedule and the time model."""
    report = sk.aot.compile(parts.together.function, parts.together.args, topology=TOPOLOGY)
    compute = report.compute.seconds * 1e6
    return Times(compute, report.wire_seconds * 1e6, compute + report.exposed_seconds * 1e6)


def measure_times(parts: Parts, rounds: int) -> Times:
    """Microseconds by the clock."""
    assert parts.compute is not None, "a pipeline is only predicted"
    assert parts.communication is not None, "a pipeline is only predicted"
    functions = {
        "compute": make_call(parts.compute),
        "communication": make_call(parts.communication),
        "together": make_call(parts.together),
    }
    records = measure_functions("overlap", "", functions, rounds=rounds)
    compute, communication, together = (record["wall_us_median"] for record in records)
    return Times(compute, communication, together)


def make_call(program: Program) -> Callable[[], Any]:
    """The call of a program on arrays of its shapes. It was called once, so that no round compiles."""
    # Ones are finite in every layer, and of no other cost than a model's numbers.
    args = jax.tree.map(lambda x: jax.device_put(jnp.ones(x.shape, x.dtype), x.sharding), program.args)
    jax.block_until_ready(program.function(*args))
    return partial(program.function, *args)


def make_records(times: Mapping[str, Times], row: str, method: str, size: Size) -> list[Record]:
    """A record for each case."""
    records = []
    machine = environment()
    for name, case_times in times.items():
        record = {
            "format": FORMAT,
            "version": 1,
            "benchmark": "overlap",
            "row": row,
            "method": method,
            **size._asdict(),
            "environment": machine,
            "case": name,
            "compute_us": round(case_times.compute, 3),
            "communication_us": round(case_times.communication, 3),
            "together_us": round(case_times.together, 3),
            "hidden_share": compute_hidden_share(*case_times),
        }
        records.append(record)
    return records


def format_table(records: Sequence[Record]) -> str:
    """The records as a table; times in milliseconds."""
    rows = [("case", "compute ms", "communication ms", "their sum", "their maximum", "together", "hidden")]
    for record in records:
        compute = record["compute_us"] / 1e3
        communication = record["communication_us"] / 1e3
        hidden = ""
        if record["hidden_share"] is not None:
            hidden = f"{record['hidden_share']:.0%}"
        row = (
            record["case"],
            f"{compute:.3f}",
            f"{communication:.3f}",
            f"{compute + communication:.3f}",
            f"{max(compute, communication):.3f}",
            f"{record['together_us'] / 1e3:.3f}",
            hidden,
        )
        rows.append(row)
    method = "predicted from the compiled schedule"
    if records[0]["method"] == "measured":
        method = "measured"
    return f"{table(rows)}\n{records[0]['row']}, {method}"


def main(argv: Sequence[str] | None = None) -> None:
    """Measures on this machine's accelerators, or predicts."""
    leave_out_idle_tpu()
    options = start(__doc__, argv, devices=0, predict="for v5e:2x4, also where there are accelerators")
    size = Size()
    if options.smoke:
        size = Size(tokens=1024, width=512, hidden=2048, layers=8)
    # What runs on simulated devices has compute and communication on the same cores: nothing could hide.
    if options.predict or jax.default_backend() == "cpu":
        row = TOPOLOGY
        method = "predicted"
        mesh: Any = sk.abstract_mesh(x=DEVICES)
    else:
        mesh = sk.make_mesh(x=-1)
        row = f"{mesh.size} x {jax.devices()[0].device_kind}"
        method = "measured"
    times: dict[str, Times] = {}
    for name, build in list_cases(mesh, size).items():
        if options.smoke and name not in QUICK:
            continue
        parts = build()
        if method == "predicted":
            times[name] = predict_times(parts)
        elif parts.compute is not None:
            times[name] = measure_times(parts, options.rounds or 20)
        else:
            continue
        print(f"{name}: done", flush=True)
    records = make_records(times, row, method, size)
    print(f"\n{format_table(records)}")
    if options.json:
        write(records, options.json)


if __name__ == "__main__":
    main()
