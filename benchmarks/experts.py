"""A mixture of experts with a capacity against the dropless path, on simulated devices, and the bytes that each sends.

The same tokens, router and SwiGLU experts in all cases; top-2. "capacity E" has room for every token in every expert,
as nothing else gives the dropless numbers; "capacity 1.25" drops what a real run would drop, dense, gather and ring
nothing. Each is held against the same experts on one device, where each device's tokens come by themselves. "dense
loop" is every expert over every token, E/2 times the arithmetic and no routing at all.
`--explain` counts what a step sends, by the census. `--tpu` compiles forward and backward of each exchange of dropless
experts for v5e:2x4 without one: bytes sent, exposed and whole time as modelled from the schedule, and temp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from benchmarks.start import start
from shardkit import bench
from shardkit.analysis import census
from shardkit.meshes.layout import table

EXPERTS, TOP_K, SEQUENCE = 8, 2, 64
SIZES = {"D=64, F=128": (64, 128, 4), "D=256, F=512": (256, 512, 4)}  # width, hidden, sequences a device
EXCHANGES: tuple[Any, ...] = ("ragged", "dense", "gather", "ring")  # of dropless experts
Moe = Callable[..., jax.Array]


def swiglu(w: Any, x_SD: jax.Array, dot: Any) -> jax.Array:
    """silu(x W_gate) * (x W_up), then W_down."""
    return dot(jax.nn.silu(dot(x_SD, w["gate"])) * dot(x_SD, w["up"]), w["down"])


def routed(routing: sk.layers.Capacity | sk.layers.Dropless) -> Moe:
    """`moe` with this routing."""
    return lambda x, router, w: sk.layers.moe(x, router, w, swiglu, "expert", top_k=TOP_K, routing=routing)[0]


def dense_loop(x_bTD: jax.Array, router_DE: jax.Array, w: Any) -> jax.Array:
    """Every expert, gathered whole, over every token of this device."""
    w = sk.all_gather(w, "expert")
    gate_bTE = jax.nn.softmax(jnp.dot(x_bTD, router_DE, precision="highest"))
    top_bTk, index_bTk = jax.lax.top_k(gate_bTE, TOP_K)
    top_bTk = top_bTk / jnp.sum(top_bTk, axis=-1, keepdims=True)
    gate_bTE = jnp.sum(top_bTk[..., None] * jax.nn.one_hot(index_bTk, EXPERTS), axis=2)
    up_bTEF = jax.nn.silu(jnp.einsum("bTD,EDF->bTEF", x_bTD, w["gate"])) * jnp.einsum("bTD,EDF->bTEF", x_bTD, w["up"])
    return jnp.einsum("bTEF,EFD,bTE->bTD", up_bTEF, w["down"], gate_bTE)


def step_of(moe: Moe, mesh: Mesh) -> Callable[..., tuple[Any, Any]]:
    """The gradients of router and experts, which move them a little, and which are what is compared."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return sk.all_reduce(jnp.sum(moe(x, *params) ** 2), "expert")

    specs = (P(), P("expert"))
    on_mesh = jax.shard_map(loss, mesh=mesh, in_specs=(specs, P("expert")), out_specs=P())

    def step(params: Any, *xs: jax.Array) -> tuple[Any, Any]:
        grads = jax.grad(lambda params: sum(on_mesh(params, x) for x in xs))(params)
        return jax.tree.map(lambda p, g: p - 1e-6 * g, params, grads), grads

    return step


def case(name: str, moe: Moe, mesh: Mesh, width: int, hidden: int, sequences: int, calls: int) -> bench.Case:
    """A step on the mesh, and what so many steps of all experts on one device give for each device's tokens."""
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    w = {
        name: jax.random.normal(key, (EXPERTS, *shape)) / shape[0] ** 0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=False)
    }
    router = jax.random.normal(keys[3], (width, EXPERTS))
    x = jax.random.normal(keys[4], (sequences * mesh.size, SEQUENCE, width))
    alone = jax.jit(step_of(moe, sk.make_mesh(mesh.devices.flat[:1], expert=1)))
    carry: Any = (router, w)
    grads: Any = None
    for _ in range(calls):
        carry, grads = alone(carry, *jnp.split(x, mesh.size))
    over = NamedSharding(mesh, P("expert"))
    placed = (jax.device_put(router, NamedSharding(mesh, P())), jax.device_put(w, over))
    return bench.Case(name, step_of(moe, mesh), placed, (jax.device_put(x, over),), expected=(carry, grads))


def explain(each: bench.Case) -> str:
    """What a step sends, forward and backward, without the sums of a few values of losses and loads."""
    found = census(each.step, each.carry, *each.args)
    rows = [row for row in found.rows if row.kind != "all_reduce"]
    kinds = ", ".join(f"{found.count(kind=kind)} {kind}s" for kind in dict.fromkeys(row.kind for row in rows))
    return f"{each.name}: {kinds}, {float(sum(r.total for r in rows)) / 2**20:,.2f} MiB sent a device"


def compiled(tokens: int, width: int, hidden: int, experts: int, top_k: int) -> str:
    """A table of the exchanges as the TPU's compiler has them; `tokens` are of one device."""
    mesh = sk.abstract_mesh(expert=8)
    lines = [("exchange", "sent MB", "exposed ms", "step ms", "temp GiB")]
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    over, whole = NamedSharding(mesh, P("expert")), NamedSharding(mesh, P())
    w = dict.fromkeys(("gate", "up"), (experts, width, hidden)) | {"down": (experts, hidden, width)}
    args = (
        {name: shape(each, sharding=over) for name, each in w.items()},
        shape((width, experts), sharding=whole),
        shape((8 * tokens, width), sharding=over),
    )
    for impl in EXCHANGES:

        def loss(w: Any, router: jax.Array, x: jax.Array, impl: Any = impl) -> jax.Array:
            routing = sk.layers.Dropless(impl=impl)
            y, _ = sk.layers.moe(x, router, w, swiglu, "expert", top_k=top_k, routing=routing)
            return sk.all_reduce(jnp.sum(y.astype(jnp.float32) ** 2), "expert")

        mapped = jax.shard_map(loss, mesh=mesh, in_specs=(P("expert"), P(), P("expert")), out_specs=P())
        report = sk.aot.compile(jax.jit(jax.grad(mapped, argnums=(0, 1, 2))), args, topology="v5e:2x4")
        times = [f"{1e3 * each:.2f}" for each in (report.exposed_seconds, report.seconds)]
        lines.append((impl, f"{float(report.sent()) / 1e6:,.1f}", *times, f"{report.memory.temp / 2**30:.2f}"))
        print(*lines[-1], flush=True)
    sizes = f"{tokens} tokens a device, D={width}, F={hidden}, {experts} experts, top {top_k}"
    return f"{sizes}\n{table(lines)}"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a row for each size."""
    flags = {"explain": "count what is sent instead of timing", "tpu": "compile the exchanges for v5e:2x4"}
    options = start(__doc__, argv, devices=8, **flags)
    if options.tpu:
        for sizes in (
            ((256, 128, 128, 16, 2),) if options.smoke else ((4096, 2048, 2048, 8, 2), (4096, 2048, 768, 64, 8))
        ):
            print(compiled(*sizes), flush=True)
        return
    mesh = sk.make_mesh(expert=-1)
    kinds = {
        "capacity E": routed(sk.layers.Capacity(EXPERTS)),
        **{impl: routed(sk.layers.Dropless(impl=impl)) for impl in EXCHANGES[1:]},  # CPUs have no ragged one
        "dense loop": dense_loop,
        "capacity 1.25": routed(sk.layers.Capacity(1.25)),
        "capacity 2": routed(sk.layers.Capacity(2.0)),
    }
    for label, sizes in list(SIZES.items())[: 1 if options.smoke else None]:
        calls, rounds = options.calls or (2 if options.smoke else 5), options.rounds or (2 if options.smoke else 10)
        cases = [case(name, moe, mesh, *sizes, 0 if options.explain else calls) for name, moe in kinds.items()]
        row = f"{label}, expert={mesh.size}"
        if options.explain:
            print("\n".join(["", row, *map(explain, cases)]), flush=True)
            continue
        records = bench.measure("experts", row, cases, calls=calls, rounds=rounds, tolerance=1e-4)
        bench.report(records, options.json)


if __name__ == "__main__":
    main()
