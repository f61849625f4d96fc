"""A mixture of experts with a capacity against the dropless path, on simulated devices, and the bytes that each sends.

The same tokens, router and SwiGLU experts in all cases; top-2. "capacity E" has room for every token in every expert,
as nothing else gives the dropless numbers; "capacity 1.25" drops what a real run would drop, dense, gather and ring
nothing. Each is held against the same experts on one device, where each device's tokens come by themselves. "dense
loop" is every expert over every token, E/2 times the arithmetic and no routing at all.
`--explain` counts what a step sends, by the census. `--tpu` compiles forward and backward of each exchange of dropless
experts for v5e:2x4 without one: bytes sent, exposed and whole time as modelled from the schedule, and temp.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from benchmarks.compiled import describe_array, format_milliseconds, get_memory
from benchmarks.start import choose_calls, choose_rounds, start
from shardkit import bench
from shardkit.meshes.layout import table

EXPERTS = 8
TOP_K = 2
SEQUENCE = 64
EXCHANGES: tuple[Any, ...] = ("ragged", "dense", "gather", "ring")  # of dropless experts
Moe = Callable[..., jax.Array]


class Size(NamedTuple):
    """A row of the table."""

    width: int
    hidden: int
    sequences: int = 4  # of a device

    def __str__(self) -> str:
        return f"D={self.width}, F={self.hidden}"


SIZES = [Size(64, 128), Size(256, 512)]


def swiglu(w: Any, x_SD: jax.Array, dot: Any) -> jax.Array:
    """silu(x W_gate) * (x W_up), then W_down."""
    return dot(jax.nn.silu(dot(x_SD, w["gate"])) * dot(x_SD, w["up"]), w["down"])


def route(routing: sk.layers.Capacity | sk.layers.Dropless) -> Moe:
    """`moe` with this routing."""

    def apply_moe(x: jax.Array, router: jax.Array, w: Any) -> jax.Array:
        y, _ = sk.layers.moe(x, router, w, swiglu, "expert", top_k=TOP_K, routing=routing)
        return y

    return apply_moe


def loop_over_experts(x_bTD: jax.Array, router_DE: jax.Array, w: Any) -> jax.Array:
    """Every expert, gathered whole, over every token of this device."""
    w = sk.all_gather(w, "expert")
    gate_bTE = jax.nn.softmax(jnp.dot(x_bTD, router_DE, precision="highest"))
    top_bTk, index_bTk = jax.lax.top_k(gate_bTE, TOP_K)
    top_bTk = top_bTk / jnp.sum(top_bTk, axis=-1, keepdims=True)
    gate_bTE = jnp.sum(top_bTk[..., None] * jax.nn.one_hot(index_bTk, EXPERTS), axis=2)
    hidden_bTEF = jax.nn.silu(jnp.einsum("bTD,EDF->bTEF", x_bTD, w["gate"]))
    hidden_bTEF = hidden_bTEF * jnp.einsum("bTD,EDF->bTEF", x_bTD, w["up"])
    return jnp.einsum("bTEF,EFD,bTE->bTD", hidden_bTEF, w["down"], gate_bTE)


def list_layers() -> dict[str, Moe]:
    """The layers by name; the first one is the baseline."""
    # A capacity of E has a place for every token in every expert: it drops nothing, and has the dropless numbers.
    layers = {"capacity E": route(sk.layers.Capacity(EXPERTS))}
    for impl in EXCHANGES:
        if impl != "ragged":  # which CPUs do not have
            layers[impl] = route(sk.layers.Dropless(impl=impl))
    layers["dense loop"] = loop_over_experts
    layers["capacity 1.25"] = route(sk.layers.Capacity(1.25))
    layers["capacity 2"] = route(sk.layers.Capacity(2.0))
    return layers


def make_step(moe: Moe, mesh: Mesh) -> Callable[..., tuple[Any, Any]]:
    """The gradients of router and experts, which move them a little, and which are what is compared."""

    def compute_loss(params: Any, x: jax.Array) -> jax.Array:
        router, w = params
        return sk.all_reduce(jnp.sum(moe(x, router, w) ** 2), "expert")

    param_specs = (P(), P("expert"))
    on_mesh = jax.shard_map(compute_loss, mesh=mesh, in_specs=(param_specs, P("expert")), out_specs=P())

    def step(params: Any, *xs: jax.Array) -> tuple[Any, Any]:
        def sum_losses(params: Any) -> Any:
            return sum(on_mesh(params, x) for x in xs)

        grads = jax.grad(sum_losses)(params)
        # So small a step that no token goes to another expert: of a tie, rounding would decide.
        return jax.tree.map(lambda p, g: p - 1e-6 * g, params, grads), grads

    return step


def draw_arrays(size: Size, devices: int) -> tuple[tuple[jax.Array, dict[str, jax.Array]], jax.Array]:
    """Router and experts, and the tokens of all devices."""
    gate_key, up_key, down_key, router_key, token_key = jax.random.split(jax.random.key(0), 5)

    def draw_matrices(key: jax.Array, rows: int, columns: int) -> jax.Array:
        return jax.random.normal(key, (EXPERTS, rows, columns)) / rows**0.5

    experts = {
        "gate": draw_matrices(gate_key, size.width, size.hidden),
        "up": draw_matrices(up_key, size.width, size.hidden),
        "down": draw_matrices(down_key, size.hidden, size.width),
    }
    router = jax.random.normal(router_key, (size.width, EXPERTS))
    x = jax.random.normal(token_key, (size.sequences * devices, SEQUENCE, size.width))
    return (router, experts), x


def make_case(name: str, moe: Moe, mesh: Mesh, size: Size, calls: int) -> bench.Case:
    """A step on the mesh, and what so many steps of all experts on one device give for each device's tokens."""
    params, x = draw_arrays(size, mesh.size)
    one_device = sk.make_mesh(list(mesh.devices.flat[:1]), expert=1)
    step_on_one_device = jax.jit(make_step(moe, one_device))
    # A capacity is of the tokens of a device: on one device, too, those of each are routed by themselves.
    parts = jnp.split(x, mesh.size)
    expected_params: Any = params
    expected_grads: Any = None
    for _ in range(calls):
        expected_params, expected_grads = step_on_one_device(expected_params, *parts)
    replicated = NamedSharding(mesh, P())
    split_experts = NamedSharding(mesh, P("expert"))
    router, experts = params
    carry = (jax.device_put(router, replicated), jax.device_put(experts, split_experts))
    args = (jax.device_put(x, split_experts),)
    expected = (expected_params, expected_grads)
    return bench.Case(name, make_step(moe, mesh), carry, args, expected=expected)


def explain(case: bench.Case) -> str:
    """What a step sends, forward and backward, without the sums of a few values of losses and loads."""
    census = sk.census(case.step, case.carry, *case.args)
    kinds: dict[str, None] = {}  # in the order in which the step sends
    sent = 0.0
    for row in census.rows:
        if row.kind != "all_reduce":
            kinds[row.kind] = None
            sent += float(row.total)
    counts = ", ".join(f"{census.count(kind=kind)} {kind}s" for kind in kinds)
    return f"{case.name}: {counts}, {sent / 2**20:,.2f} MiB sent a device"


class ChipSize(NamedTuple):
    """What is compiled for chips; tokens are of one device."""

    tokens: int
    width: int
    hidden: int
    experts: int
    top_k: int


CHIP_SIZES = [ChipSize(4096, 2048, 2048, 8, 2), ChipSize(4096, 2048, 768, 64, 8)]
SMOKE_CHIP_SIZES = [ChipSize(256, 128, 128, 16, 2)]


def build_gradients(impl: Any, size: ChipSize, mesh: Any) -> tuple[Any, tuple[Any, ...]]:
    """Forward and backward of dropless experts, and the shapes of its arguments."""
    split_experts = P("expert")
    specs = (split_experts, P(), split_experts)
    up_dims = (size.experts, size.width, size.hidden)
    down_dims = (size.experts, size.hidden, size.width)
    experts = {
        "gate": describe_array(mesh, split_experts, up_dims),
        "up": describe_array(mesh, split_experts, up_dims),
        "down": describe_array(mesh, split_experts, down_dims),
    }
    router = describe_array(mesh, P(), (size.width, size.experts))
    x = describe_array(mesh, split_experts, (mesh.size * size.tokens, size.width))

    def compute_loss(w: Any, router: jax.Array, x: jax.Array) -> jax.Array:
        routing = sk.layers.Dropless(impl=impl)
        y, _ = sk.layers.moe(x, router, w, swiglu, "expert", top_k=size.top_k, routing=routing)
        return sk.all_reduce(jnp.sum(y.astype(jnp.float32) ** 2), "expert")

    mapped = jax.shard_map(compute_loss, mesh=mesh, in_specs=specs, out_specs=P())
    return jax.jit(jax.grad(mapped, argnums=(0, 1, 2))), (experts, router, x)


def compile_exchanges(size: ChipSize) -> str:
    """A table of the exchanges as the TPU's compiler has them."""
    mesh = sk.abstract_mesh(expert=8)
    rows: list[tuple[str, ...]] = [("exchange", "sent MB", "exposed ms", "step ms", "temp GiB")]
    for impl in EXCHANGES:
        function, args = build_gradients(impl, size, mesh)
        report = sk.aot.compile(function, args, topology="v5e:2x4")
        row = (
            impl,
            f"{float(report.sent()) / 1e6:,.1f}",
            *format_milliseconds(report.exposed_seconds, report.seconds),
            f"{get_memory(report).temp / 2**30:.2f}",
        )
        rows.append(row)
        print(*row, flush=True)
    sizes = f"D={size.width}, F={size.hidden}, {size.experts} experts, top {size.top_k}"
    return f"{size.tokens} tokens a device, {sizes}\n{table(rows)}"


def measure_size(size: Size, options: argparse.Namespace) -> None:
    """Times the layers of a size, or explains them."""
    mesh = sk.make_mesh(expert=-1)
    calls = choose_calls(options, 5)
    expected_calls = calls
    if options.explain:
        expected_calls = 0  # nothing is compared
    cases = []
    for name, moe in list_layers().items():
        cases.append(make_case(name, moe, mesh, size, expected_calls))
    row = f"{size}, expert={mesh.size}"
    if options.explain:
        print(f"\n{row}")
        for case in cases:
            print(explain(case), flush=True)
        return
    rounds = choose_rounds(options, 10)
    records = bench.measure("experts", row, cases, calls=calls, rounds=rounds, tolerance=1e-4)
    bench.report(records, options.json)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a row for each size."""
    options = start(
        __doc__,
        argv,
        devices=8,
        explain="count what is sent instead of timing",
        tpu="compile the exchanges for v5e:2x4",
    )
    sizes = SIZES
    chip_sizes = CHIP_SIZES
    if options.smoke:
        sizes = SIZES[:1]
        chip_sizes = SMOKE_CHIP_SIZES
    if options.tpu:
        for chip_size in chip_sizes:
            print(compile_exchanges(chip_size), flush=True)
    else:
        for size in sizes:
            measure_size(size, options)


if __name__ == "__main__":
    main()
